// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The algorithm on a virtual clock, in nanoseconds.

use super::group::{Credit, Group, Membership};
use super::limits::{Limited, Limits};
use super::meter::{Direction, Meter};
use super::schedule::{Entry, Schedule, Ticket};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

const SECOND: u64 = 1_000_000_000;

fn limits(values: &[(&str, u64)]) -> Limits {
    let mut limits = Limits::new();
    for (name, value) in values {
        limits.set(name, *value).unwrap();
    }
    limits.check().unwrap();
    limits
}

/// Requests that go within each second when every one is sent as soon as it may.
fn greedy(limits: Limits, direction: Direction, bytes: u64, seconds: usize) -> Vec<u64> {
    let mut meter = Meter::new(limits, 0);
    let (mut now, mut counts) = (0, vec![0; seconds]);
    loop {
        now += meter.wait_ns(direction, now);
        let Some(count) = counts.get_mut((now / SECOND) as usize) else { return counts };
        *count += 1;
        meter.pour(direction, bytes, now);
    }
}

#[test]
fn burst_ends_after_its_length() {
    let limits = limits(&[("iops-total", 100), ("iops-total-max", 2000), ("iops-total-max-length", 60)]);
    let counts = greedy(limits, Direction::Read, 4096, 120);
    // The bucket for the burst itself holds a tenth of a second.
    assert!((2000..=2201).contains(&counts[0]), "{}", counts[0]);
    assert!(counts[1..63].iter().all(|count| (1999..=2001).contains(count)), "{counts:?}");
    assert!(counts[64..].iter().all(|count| (99..=101).contains(count)), "{counts:?}");
    let burst: u64 = counts[..64].iter().sum();
    assert!((126_000..=126_600).contains(&burst), "120,000 and what leaked in 63 seconds, not {burst}");
}

#[test]
fn half_the_rate_lasts_twice_the_time() {
    let limits = limits(&[("iops-total", 100), ("iops-total-max", 2000), ("iops-total-max-length", 60)]);
    let mut meter = Meter::new(limits, 0);
    let mut now = 0;
    // 1000 a second, evenly: the bucket fills at 900 a second.
    while meter.wait_ns(Direction::Write, now) == 0 {
        meter.pour(Direction::Write, 512, now);
        now += SECOND / 1000;
    }
    assert!((133 * SECOND..=134 * SECOND).contains(&now), "{now}");
}

#[test]
fn without_a_burst_a_tenth_of_a_second_goes_at_once() {
    let counts = greedy(limits(&[("iops-total", 100)]), Direction::Read, 4096, 10);
    assert_eq!(counts[0], 10 + 100);
    assert!(counts[1..].iter().all(|count| (99..=101).contains(count)), "{counts:?}");
    // As QEMU: a burst of one second goes as fast as it comes.
    let counts = greedy(limits(&[("iops-total", 100), ("iops-total-max", 2000)]), Direction::Read, 4096, 3);
    assert_eq!(counts[0], 2000 + 100);
    assert!((99..=101).contains(&counts[1]));
}

/// Requests of one queue that borrows, until the first one that would have to wait.
fn borrow_until_full(meter: &mut Meter, bytes: u64) -> (u64, u64) {
    let (mut passed, mut lent) = (0, 0);
    while meter.wait_ns(Direction::Read, 0) == 0 {
        meter.pour(Direction::Read, bytes, 0);
        let more = u64::from(meter.lend(Direction::Read, bytes));
        passed += 1 + more;
        lent += more;
    }
    (passed, lent)
}

#[test]
fn requests_that_were_lent_count_as_if_they_had_asked() {
    for (values, bytes, most) in [
        (&[("iops-total", 50_000)][..], 4096, 5001),
        (&[("bps-read", 40_960_000)], 4096, 1001),
        (&[("iops-total", 50_000), ("iops-size", 1024)], 4096, 1251),
        (&[("iops-total", 100), ("iops-total-max", 30_000), ("iops-total-max-length", 60)], 512, 3001),
    ] {
        let mut meter = Meter::new(limits(values), 0);
        let (passed, lent) = borrow_until_full(&mut meter, bytes);
        assert!((most - 1..=most).contains(&passed), "{values:?}: {passed}");
        assert!(lent >= most / 3 && lent <= most / 2, "{values:?}: {lent} of {passed}");
        assert_eq!(meter.lend(Direction::Read, bytes), 0, "nothing is lent from a full bucket");
    }
    // A bucket of a few requests lends none; an unlimited direction lends as much as there ever is.
    let mut meter = Meter::new(limits(&[("iops-read", 100)]), 0);
    assert_eq!((meter.lend(Direction::Read, 512), meter.lend(Direction::Write, 512)), (0, 256));
}

#[test]
fn no_member_borrows_past_waiting_ones() {
    let mut schedule = Schedule::new(limits(&[("iops-write", 1), ("iops-read", 100_000)]), 0);
    let (one, two) = (schedule.join(), schedule.join());
    assert!(schedule.try_enter(one, Direction::Read, 512, 0));
    assert!(schedule.lend(one, Direction::Read, 512) > 0);
    assert!(schedule.try_enter(one, Direction::Write, 512, 0));
    assert!(!schedule.try_enter(two, Direction::Write, 512, 0));
    assert!(matches!(schedule.enter(two, Direction::Write, 512, 0), Entry::Wait(_)));
    assert!(
        !schedule.try_enter(one, Direction::Read, 512, 0),
        "while one waits, every member asks in the ordinary way"
    );
    assert_eq!(schedule.lend(one, Direction::Read, 512), 0);
    schedule.begin_free(one, 0);
    assert!(schedule.try_enter(one, Direction::Read, 512, 0));
    assert_eq!(schedule.lend(one, Direction::Read, 512), 0);
}

#[test]
fn bytes_and_directions_are_limited_apart() {
    let both = limits(&[("bps-read", 1 << 20), ("iops-write", 50)]);
    let reads = greedy(both, Direction::Read, 4096, 10);
    assert!(reads[1..].iter().all(|count| (255..=257).contains(count)), "{reads:?}");
    let writes = greedy(both, Direction::Write, 1 << 30, 10);
    assert!(writes[1..].iter().all(|count| (49..=51).contains(count)), "{writes:?}");
    let mut meter = Meter::new(limits(&[("iops-total", 10)]), 0);
    meter.pour(Direction::Read, 1, 0);
    meter.pour(Direction::Write, 1, 0);
    assert!(meter.wait_ns(Direction::Read, 0) > 0 && meter.wait_ns(Direction::Write, 0) > 0);
}

#[test]
fn a_large_request_counts_as_several_operations() {
    for (bytes, each_second) in [(8192, 50), (6144, 66), (4096, 100), (512, 100)] {
        let counts = greedy(limits(&[("iops-total", 100), ("iops-size", 4096)]), Direction::Read, bytes, 12);
        let sum: u64 = counts[2..].iter().sum();
        assert!(sum.abs_diff(each_second * 10) <= 7, "{bytes}: {sum}");
    }
}

#[test]
fn changed_limits_give_no_new_burst() {
    let mut meter = Meter::new(limits(&[("iops-total", 100), ("iops-total-max", 1000)]), 0);
    (0..2000).for_each(|_| meter.pour(Direction::Read, 1, 0));
    meter.set_limits(limits(&[("iops-total", 200)]), 0);
    let counts: u64 = (0..10).map(|n| u64::from(meter.wait_ns(Direction::Read, n) == 0)).sum();
    assert!(counts > 0, "a full bucket is not an overfull one");
    meter.pour(Direction::Read, 1, 10);
    assert!(meter.wait_ns(Direction::Read, 10) > 0);
}

/// Members that always have a request ready; how many of each went.
fn compete(schedule: &mut Schedule, directions: &[Direction], seconds: u64, start: u64) -> Vec<u64> {
    let members: Vec<usize> = directions.iter().map(|_| schedule.join()).collect();
    let mut counts = vec![0; members.len()];
    let mut waiting: HashMap<Ticket, usize> = HashMap::new();
    let mut ready: VecDeque<usize> = (0..members.len()).flat_map(|member| [member; 8]).collect();
    let mut now = start;
    loop {
        while let Some(member) = ready.pop_front() {
            match schedule.enter(members[member], directions[member], 4096, now) {
                Entry::Go => {
                    counts[member] += 1;
                    ready.push_back(member);
                }
                Entry::Wait(ticket) => drop(waiting.insert(ticket, member)),
            }
        }
        let due = schedule.dispatch(now);
        for ticket in schedule.take_released() {
            let member = waiting.remove(&ticket).unwrap();
            counts[member] += 1;
            ready.push_back(member);
        }
        if ready.is_empty() {
            now = due.expect("a request waits").max(now);
            if now > start + seconds * SECOND {
                break;
            }
        }
    }
    members.into_iter().for_each(|member| schedule.leave(member, now));
    drop(schedule.take_released());
    counts
}

#[test]
fn members_with_equal_demand_get_equal_shares() {
    let mut schedule = Schedule::new(limits(&[("iops-total", 1000)]), 0);
    let reads = [Direction::Read; 7];
    let counts = compete(&mut schedule, &reads, 10, 0);
    let (sum, squares) = counts.iter().fold((0f64, 0f64), |(s, q), n| (s + *n as f64, q + (*n * *n) as f64));
    assert!(sum * sum / (7.0 * squares) >= 0.999, "{counts:?}");
    assert!((10_000..=10_200).contains(&(sum as u64)), "{counts:?}");
    assert_eq!(schedule.members(), 0);
    // Reads and writes share a total limit evenly too, and earlier requests don't count.
    let counts = compete(&mut schedule, &[Direction::Read, Direction::Write], 10, 100 * SECOND);
    assert!(counts[0].abs_diff(counts[1]) <= 16, "{counts:?}");
}

#[test]
fn a_greedy_member_does_not_starve_a_modest_one() {
    let mut schedule = Schedule::new(limits(&[("iops-total", 100)]), 0);
    let (greedy, modest, _idle) = (schedule.join(), schedule.join(), schedule.join());
    let mut now = 0;
    for _ in 0..10_000 {
        schedule.enter(greedy, Direction::Read, 4096, now);
    }
    for _ in 0..20 {
        now += SECOND / 2;
        schedule.dispatch(now);
        schedule.take_released();
        let Entry::Wait(ticket) = schedule.enter(modest, Direction::Read, 4096, now) else { continue };
        let due = schedule.dispatch(now).unwrap();
        assert!(due <= now + SECOND / 50, "its turn comes with one of the next two");
        now = due;
        let mut released = Vec::new();
        while !released.contains(&ticket) {
            now = schedule.dispatch(now).unwrap();
            released.extend(schedule.take_released());
            assert!(released.len() <= 3, "{} went before it", released.len());
        }
    }
    assert!(schedule.waits(greedy).waiting > 8000);
    assert!(schedule.waits(modest).count <= 20 && schedule.waits(modest).waiting == 0);
}

#[test]
fn drains_leaving_and_cancelling_let_others_go_on() {
    let mut schedule = Schedule::new(limits(&[("iops-total", 10)]), 0);
    let (one, two) = (schedule.join(), schedule.join());
    let wait = |schedule: &mut Schedule, member| loop {
        if let Entry::Wait(ticket) = schedule.enter(member, Direction::Write, 1, 0) {
            return ticket;
        }
    };
    let (a, b, c) = (wait(&mut schedule, one), wait(&mut schedule, two), wait(&mut schedule, one));
    schedule.cancel(a);
    assert!(schedule.take_released().is_empty());
    schedule.begin_free(one, 0);
    assert_eq!(schedule.take_released(), [c]);
    assert_eq!(schedule.enter(one, Direction::Write, 1, 0), Entry::Go);
    schedule.end_free(one);
    assert!(matches!(schedule.enter(one, Direction::Write, 1, 0), Entry::Wait(_)));
    schedule.leave(one, 0);
    schedule.take_released();
    let due = schedule.dispatch(0).unwrap();
    assert_eq!(schedule.dispatch(due), None);
    assert_eq!(schedule.take_released(), [b]);
    schedule.set_limits(Limits::new(), due);
    assert_eq!(schedule.enter(two, Direction::Read, 1 << 40, due), Entry::Go);
    assert_eq!(schedule.limits(), &Limits::new());
}

#[test]
fn requests_released_by_another_keep_their_order() {
    let mut schedule = Schedule::new(limits(&[("iops-read", 1000), ("iops-write", 10)]), 0);
    let (one, two) = (schedule.join(), schedule.join());
    let tickets: Vec<Ticket> = std::iter::repeat_with(|| schedule.enter(one, Direction::Write, 1, 0))
        .filter_map(|entry| if let Entry::Wait(ticket) = entry { Some(ticket) } else { None })
        .take(2)
        .collect();
    assert_eq!(schedule.enter(two, Direction::Read, 1, SECOND), Entry::Go);
    assert_eq!(schedule.take_released(), tickets);
}

/// The same meter in another form: no levels that leak but the list of all requests so far. The level of a bucket at a
/// time is the largest, over all earlier moments, of the inflow since minus the leak since.
struct Reference {
    limits: Limits,
    /// When, and how much of each kind.
    poured: Vec<(u64, [f64; 6])>,
}

impl Reference {
    fn level(&self, kind: Limited, rate: u64, now: u64) -> f64 {
        let mut most = 0f64;
        let mut sum = 0f64;
        for (at, amounts) in self.poured.iter().rev() {
            sum += amounts[kind as usize];
            most = most.max(sum - rate as f64 * (now - at) as f64 / SECOND as f64);
        }
        most
    }

    fn may_go(&self, read: bool, now: u64) -> f64 {
        let kinds = match read {
            true => [Limited::BpsTotal, Limited::BpsRead, Limited::IopsTotal, Limited::IopsRead],
            false => [Limited::BpsTotal, Limited::BpsWrite, Limited::IopsTotal, Limited::IopsWrite],
        };
        let excess = |kind: Limited| {
            let limit = self.limits.limit(kind);
            if limit.average == 0 {
                return f64::NEG_INFINITY;
            }
            let size = match limit.maximum {
                0 => limit.average as f64 / 10.0,
                maximum => (maximum * limit.length_seconds) as f64,
            };
            let mut excess = (self.level(kind, limit.average, now) - size) / limit.average as f64;
            if limit.length_seconds > 1 {
                let burst = self.level(kind, limit.maximum, now) - limit.maximum as f64 / 10.0;
                excess = excess.max(burst / limit.maximum as f64);
            }
            excess
        };
        kinds.into_iter().map(excess).fold(f64::NEG_INFINITY, f64::max)
    }
}

fn any_limits() -> impl Strategy<Value = Limits> {
    let limit = (0..3u8, 1..5000u64, 1..4u64, 1..4u64);
    (proptest::collection::vec(limit, 6), prop_oneof![Just(0u64), Just(4096), Just(512)]).prop_map(|(list, size)| {
        let mut limits = Limits::new();
        for (index, (mode, average, factor, length)) in list.into_iter().enumerate() {
            // Totals and parts exclude each other: of each three either the first or the others.
            let scale = if index < 3 { 1000 } else { 1 };
            if mode == 0 || (index % 3 > 0 && limits.limits[index / 3 * 3].average > 0) {
                continue;
            }
            limits.limits[index].average = average * scale;
            if mode == 2 {
                limits.limits[index].maximum = average * scale * factor;
                limits.limits[index].length_seconds = length;
            }
        }
        if limits.limits[3..].iter().any(|limit| limit.average > 0) {
            limits.iops_size = size;
        }
        limits.check().unwrap();
        limits
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_schedules_agree_with_the_reference(
        limits in any_limits(),
        requests in proptest::collection::vec((any::<bool>(), 1..65536u64, 0..400_000_000u64, any::<bool>()), 1..150),
    ) {
        let mut meter = Meter::new(limits, 0);
        let mut reference = Reference { limits, poured: Vec::new() };
        let mut now = 0;
        for (read, bytes, pause, patient) in requests {
            now += pause;
            let direction = if read { Direction::Read } else { Direction::Write };
            let wait = meter.wait_ns(direction, now);
            let excess = reference.may_go(read, now);
            // Within a microsecond of each other.
            prop_assert!((wait as f64 / 1e9 - excess.max(0.0)).abs() < 1e-6, "{wait} ns against {excess} s");
            if patient {
                now += wait;
                prop_assert_eq!(meter.wait_ns(direction, now), 0);
            }
            meter.pour(direction, bytes, now);
            let operations = match limits.iops_size {
                0 => 1.0,
                size => f64::max(bytes as f64 / size as f64, 1.0),
            };
            let (r, w) = if read { (1.0, 0.0) } else { (0.0, 1.0) };
            let b = bytes as f64;
            reference.poured.push((now, [b, b * r, b * w, operations, operations * r, operations * w]));
        }
    }

    #[test]
    fn every_request_goes_once_and_in_its_members_order(
        limits in any_limits(),
        requests in proptest::collection::vec((0..4usize, any::<bool>(), 1..65536u64, 0..2_000_000u64), 1..200),
    ) {
        let mut schedule = Schedule::new(limits, 0);
        let members: Vec<usize> = (0..4).map(|_| schedule.join()).collect();
        let mut order: HashMap<(usize, bool), VecDeque<Ticket>> = HashMap::new();
        let mut of: HashMap<Ticket, (usize, bool)> = HashMap::new();
        let mut now = 0;
        let settle = |schedule: &mut Schedule, order: &mut HashMap<(usize, bool), VecDeque<Ticket>>,
                      of: &mut HashMap<Ticket, (usize, bool)>| {
            for ticket in schedule.take_released() {
                let key = of.remove(&ticket).expect("released twice");
                assert_eq!(order.get_mut(&key).and_then(VecDeque::pop_front), Some(ticket), "overtaken");
            }
        };
        for (member, read, bytes, pause) in requests {
            now += pause;
            let direction = if read { Direction::Read } else { Direction::Write };
            if let Entry::Wait(ticket) = schedule.enter(members[member], direction, bytes, now) {
                order.entry((member, read)).or_default().push_back(ticket);
                of.insert(ticket, (member, read));
            }
            settle(&mut schedule, &mut order, &mut of);
        }
        while let Some(due) = schedule.dispatch(now) {
            prop_assert!(due >= now);
            now = due;
            settle(&mut schedule, &mut order, &mut of);
        }
        settle(&mut schedule, &mut order, &mut of);
        prop_assert!(of.is_empty(), "{} never went", of.len());
    }
}

#[test]
fn throttle_credit_ends_when_its_group_changes() {
    let group = Group::new("group", limits(&[("iops-total", 50_000), ("iops-size", 4096)])).unwrap();
    let member = Membership::new(group.clone());
    let credit = Credit::default();
    assert!(!credit.take(0), "nothing was lent");
    assert!(member.lend(&credit, Direction::Read, 8192) && !credit.take(1), "a longer request borrows nothing");
    assert!(member.lend(&credit, Direction::Read, 4096));
    assert!(credit.take(4096) && credit.take(512) && credit.take(0));
    assert!(!credit.take(4097), "it counts as two operations");
    assert!(credit.take(4096));
    group.set_limits(limits(&[("iops-total", 60_000)])).unwrap();
    assert!(!credit.take(1), "the group wants to be asked again");
    assert!(member.lend(&credit, Direction::Read, 4096) && credit.take(4096));
    group.set_limits(Limits::new()).unwrap();
    assert!(!credit.take(1));
    assert!(member.lend(&credit, Direction::Read, 1 << 20));
    assert!((0..100_000).all(|_| credit.take(1 << 30)), "nothing is limited");
}

#[test]
fn credit_ends_with_its_requests_and_with_its_bytes() {
    let group = Group::new("group", limits(&[("bps-total", 1 << 30)])).unwrap();
    let member = Membership::new(group);
    let credit = Credit::default();
    assert!(member.lend(&credit, Direction::Write, 4096));
    let requests = (0..100_000).take_while(|_| credit.take(1)).count();
    assert!((1..100_000).contains(&requests), "{requests} requests");
    assert!(member.lend(&credit, Direction::Write, 4096));
    let longer = (0..100_000).take_while(|_| credit.take(8192)).count();
    assert!(longer >= 1 && longer <= requests / 2 + 1, "{longer} of {requests}");
    credit.give_back(8192);
    assert!(credit.take(8192) && !credit.take(8192));
}
