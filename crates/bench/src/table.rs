// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Results as a markdown table.

use crate::Settings;
use crate::measure::{Pairs, Sample, median};
use crate::nbd::Served;
use crate::options::{Taken, Turns};
use std::process::Command;
use std::time::Duration;

/// One line of the table.
pub struct Row {
    /// The measured operation.
    pub name: String,
    /// The goal in words; empty where there is none.
    pub target: &'static str,
    /// The measurements.
    pub result: Outcome,
}

impl Row {
    /// A finished row. It is shown at once: a long run that is stopped keeps its rows.
    pub fn new(name: impl Into<String>, target: &'static str, result: Outcome) -> Row {
        let row = Row { name: name.into(), target, result };
        eprintln!("| {} | {} | {} |", row.name, line(&row.result), row.target);
        row
    }
}

/// A load, and the server's writes to files for it.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// The load.
    pub served: Served,
    /// Bytes.
    pub bytes: u64,
}

/// The costs of one run on one side of an optimisation.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Wall time of a request, or of the command.
    pub seconds: f64,
    /// User and system time of the same.
    pub cpu_seconds: f64,
    /// Bytes of the kind that the row names.
    pub bytes: u64,
}

/// The measurements in a row.
pub enum Outcome {
    /// A load with an optimisation and without it.
    Means {
        /// With it, one value a round.
        with: Vec<Cost>,
        /// The side without it, one value a round.
        without: Vec<Cost>,
        /// Times are of one request.
        requests: bool,
        /// The kind of bytes.
        bytes: &'static str,
    },
    /// An optimisation that could not be measured, and why.
    Failed(String),
    /// Two commands side by side, with the sizes of their files (0: none).
    Pair {
        /// Times and memory.
        pairs: Pairs,
        /// Bytes that our run wrote.
        our_bytes: u64,
        /// Bytes that theirs wrote.
        their_bytes: u64,
    },
    /// CPU time per request through the library and on the raw file.
    Requests {
        /// Nanoseconds through the library, one value a round.
        library_ns: Vec<f64>,
        /// Nanoseconds on the file.
        file_ns: Vec<f64>,
    },
    /// A load on two servers.
    Served {
        /// Ours, one value a round.
        ours: Vec<Served>,
        /// Theirs.
        theirs: Vec<Served>,
        /// A server that does nothing but the system calls, on a raw file.
        bare: Option<Vec<Served>>,
    },
    /// A load on two servers, and on ours with a raw file.
    Beside {
        /// Ours, one value a round.
        ours: Vec<Served>,
        /// Theirs.
        theirs: Vec<Served>,
        /// Ours on the raw file.
        limit: Option<Vec<Served>>,
    },
    /// Writes to fresh images.
    Written {
        /// Ours, one value a round.
        ours: Vec<Written>,
        /// Theirs.
        theirs: Vec<Written>,
        /// Ours on a raw file of the same kind; where requests copy blocks, whole blocks, in requests of the case.
        limit: Option<Vec<Written>>,
    },
    /// A load on our server beside a ring of the load's own program on the raw file.
    Bounds {
        /// The server, one value a round.
        ours: Vec<Served>,
        /// A bare server of the raw file, in a process of its own as ours is.
        bare: Vec<Served>,
        /// The ring.
        ring: Vec<Served>,
        /// CPU time of the load's program for each request to the server, in microseconds.
        driver_microseconds: Vec<f64>,
    },
    /// Requests per second from one and from two queues.
    Scaling {
        /// From one, one value a round.
        one: Vec<f64>,
        /// Those of two queues, one value a round.
        two: Vec<f64>,
    },
    /// Resident memory.
    Memory {
        /// Ours.
        our_bytes: u64,
        /// Theirs.
        their_bytes: u64,
    },
    /// Two commands side by side, and how often each read from the images.
    Opened {
        /// Times and memory.
        pairs: Pairs,
        /// Reads of ours and of theirs, or why there are none.
        reads: Result<(u64, u64), &'static str>,
    },
    /// An option off and on.
    Options {
        /// Ours.
        ours: Turns,
        /// Theirs, where they have it.
        theirs: Option<Turns>,
        /// Whether a run is a command, else a load on a server.
        is_command: bool,
    },
    /// The reason of a missing measurement.
    Skipped(String),
}

/// The whole report.
pub fn render(settings: &Settings, rows: &[Row]) -> String {
    let mut text = format!("cowshed against {}\n", version(settings));
    let (written, rest): (Vec<&Row>, Vec<&Row>) =
        rows.iter().partition(|row| matches!(row.result, Outcome::Written { .. }));
    let (means, rest): (Vec<&Row>, Vec<&Row>) =
        rest.into_iter().partition(|row| matches!(row.result, Outcome::Means { .. } | Outcome::Failed(_)));
    let (beside, rest): (Vec<&Row>, Vec<&Row>) =
        rest.into_iter().partition(|row| matches!(row.result, Outcome::Beside { .. }));
    let (options, rest): (Vec<&Row>, Vec<&Row>) =
        rest.into_iter().partition(|row| matches!(row.result, Outcome::Options { .. } | Outcome::Skipped(_)));
    let (opened, rest): (Vec<&Row>, Vec<&Row>) =
        rest.into_iter().partition(|row| matches!(row.result, Outcome::Opened { .. }));
    let (served, run): (Vec<&Row>, Vec<&Row>) =
        rest.into_iter().partition(|row| matches!(row.result, Outcome::Served { .. }));
    let mut section = |head: &str, rows: &[&Row], ratio: &str| {
        if rows.is_empty() {
            return;
        }
        let columns = head.matches('|').count() - 1;
        text += &format!("\n{head}\n|{}\n", "---|".repeat(columns));
        for row in rows {
            text += &format!("| {} | {} | {} |\n", row.name, line(&row.result), row.target);
        }
        text += &format!("\nMedians of {} rounds in turns; {ratio}\n", settings.rounds);
    };
    section(
        "| case | cowshed: wall, CPU, peak | qemu-img: wall, CPU, peak | wall ratio (min–max) | CPU ratio | size | target |",
        &run,
        "a ratio is theirs / ours of the same round, so above 1 we are faster.",
    );
    section(
        "| case | cowshed: wall, CPU, peak | qemu-img: wall, CPU, peak | wall ratio (min–max) | CPU ratio | reads, theirs | target |",
        &opened,
        "a ratio is theirs / ours of the same round, so above 1 we are faster. Reads are counted in other runs.",
    );
    section(
        "| load | cowshed: IOPS, CPU a request | theirs: IOPS, CPU a request | IOPS, ours / theirs (min–max) | CPU, ours / theirs (min–max) | peak: ours, theirs | written a request: ours, theirs | bare server: IOPS, CPU | CPU, bare / theirs (min–max) | target |",
        &served,
        "a ratio is of the same round.",
    );
    section(
        "| load | cowshed: IOPS, CPU a request | theirs: IOPS, CPU a request | IOPS, ours / theirs (min–max) | CPU, ours / theirs (min–max) | peak: ours, theirs | written a request: ours, theirs | raw file: IOPS, CPU | IOPS, ours / raw file (min–max) | target |",
        &beside,
        "a ratio is of the same round.",
    );
    section(
        "| fresh image | cowshed: IOPS, CPU a request | theirs: IOPS, CPU a request | IOPS, ours / theirs (min–max) | CPU, ours / theirs (min–max) | peak: ours, theirs | written: ours, theirs | bytes, ours / theirs | raw file: IOPS, CPU | IOPS, ours / raw file (min–max) | target |",
        &written,
        "a ratio is of the same round.",
    );
    section(
        "| means: load | with it | without it | time, without / with (min–max) | CPU, without / with (min–max) | bytes, without / with | instead, without it |",
        &means,
        "a ratio is of the same round, above 1 the optimisation pays.",
    );
    section(
        "| option | cowshed: off, on | speed, on / off (min–max) | CPU, on / off | peak: off, on | written: off, on | size: off, on | theirs: off, on | speed, on / off (min–max) | CPU, on / off | peak: off, on | written: off, on | size: off, on | target |",
        &options,
        "a ratio is of the same round. Off: without the option or with its first value; speed: requests a second, or the inverse of a command's wall time.",
    );
    text
}

fn version(settings: &Settings) -> String {
    let output = Command::new(&settings.qemu).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("an unknown qemu-img").to_owned()
}

fn line(result: &Outcome) -> String {
    match result {
        Outcome::Failed(error) => format!("failed: {} | – | – | – | –", error.replace(['|', '\n'], " ")),
        Outcome::Means { with, without, requests, bytes } => {
            let ratio = |of: fn(&Cost) -> f64| spread(quotients(without, with, of));
            let (time, cpu) = (ratio(|cost| cost.seconds), ratio(|cost| cost.cpu_seconds));
            let size = median(quotients(without, with, |cost| cost.bytes as f64));
            let (with, without) = (costs(with, *requests, bytes), costs(without, *requests, bytes));
            format!("{with} | {without} | {time} | {cpu} | {size:.2}")
        }
        Outcome::Pair { pairs, our_bytes, their_bytes } => {
            let size = match (*our_bytes, *their_bytes) {
                (0, _) | (_, 0) => "–".to_owned(),
                (ours, theirs) => format!("{:.1} % of theirs", 100.0 * ours as f64 / theirs as f64),
            };
            format!("{} | {size}", paired(pairs))
        }
        Outcome::Opened { pairs, reads } => match reads {
            Ok((ours, theirs)) => format!("{} | {ours}, {theirs}", paired(pairs)),
            Err(why) => format!("{} | {why}", paired(pairs)),
        },
        Outcome::Requests { library_ns, file_ns } => {
            let (library, file) = (median(library_ns.iter().copied()), median(file_ns.iter().copied()));
            let ratio = median(library_ns.iter().zip(file_ns).map(|(library, file)| library / file));
            format!("{library:.0} ns a request | raw file: {file:.0} ns | – | **{ratio:.2}** × the raw file | –")
        }
        Outcome::Served { ours, theirs, bare } => {
            let rate = spread(quotients(ours, theirs, |run| run.per_second));
            let cpu = spread(quotients(ours, theirs, |run| run.cpu_microseconds));
            let bare = match bare {
                Some(bare) => {
                    let ratio = spread(quotients(bare, theirs, |run| run.cpu_microseconds));
                    format!("{} | {ratio}", loaded(bare))
                }
                None => "– | –".to_owned(),
            };
            let used = used(ours, theirs);
            format!("{} | {} | {rate} | {cpu} | {used} | {bare}", loaded(ours), loaded(theirs))
        }
        Outcome::Beside { ours, theirs, limit } => {
            let rate = spread(quotients(ours, theirs, |run| run.per_second));
            let cpu = spread(quotients(ours, theirs, |run| run.cpu_microseconds));
            let limit = beside(ours, limit.as_deref());
            let used = used(ours, theirs);
            format!("{} | {} | {rate} | {cpu} | {used} | {limit}", loaded(ours), loaded(theirs))
        }
        Outcome::Written { ours, theirs, limit } => {
            let served = |runs: &[Written]| runs.iter().map(|run| run.served).collect::<Vec<_>>();
            let mib = |runs: &[Written]| median(runs.iter().map(|run| run.bytes as f64)) / f64::from(1 << 20);
            let bytes = median(ours.iter().zip(theirs).map(|(ours, theirs)| ours.bytes as f64 / theirs.bytes as f64));
            let sizes = format!("{:.0} MiB, {:.0} MiB | {bytes:.2}", mib(ours), mib(theirs));
            let (ours, theirs) = (served(ours), served(theirs));
            let rate = spread(quotients(&ours, &theirs, |run| run.per_second));
            let cpu = spread(quotients(&ours, &theirs, |run| run.cpu_microseconds));
            let limit = beside(&ours, limit.as_ref().map(|limit| served(limit)).as_deref());
            let peak = peaks(&ours, &theirs);
            format!("{} | {} | {rate} | {cpu} | {peak} | {sizes} | {limit}", loaded(&ours), loaded(&theirs))
        }
        Outcome::Bounds { ours, bare, ring, driver_microseconds } => {
            let rate = |bound: &[Served]| spread(quotients(ours, bound, |run| run.per_second));
            let cpu = |bound: &[Served]| median(quotients(ours, bound, |run| run.cpu_microseconds));
            let rates = format!("{} × the ring's rate, {} × the bare server's", rate(ring), rate(bare));
            let cpu = format!("{:.2}, {:.2}", cpu(ring), cpu(bare));
            let driver = median(driver_microseconds.iter().copied());
            let (ours, bare, ring) = (loaded(ours), loaded(bare), loaded(ring));
            format!("{ours}, the driver {driver:.1} µs | ring: {ring}; bare server: {bare} | {rates} | {cpu} | –")
        }
        Outcome::Scaling { one, two } => {
            let ratio = median(one.iter().zip(two).map(|(one, two)| two / one));
            let rate = |runs: &[f64]| median(runs.iter().copied()) / 1000.0;
            let (one, two) = (rate(one), rate(two));
            format!("one: {one:.0} k/s, two: {two:.0} k/s | – | – | **{ratio:.2}** × one queue | –")
        }
        Outcome::Memory { our_bytes, their_bytes } => {
            let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
            format!("{:.2} MiB | {:.2} MiB | – | – | –", mib(our_bytes), mib(their_bytes))
        }
        Outcome::Options { ours, theirs, is_command } => {
            let theirs = theirs.as_ref().map(|theirs| turns(theirs, *is_command));
            format!("{} | {}", turns(ours, *is_command), theirs.as_deref().unwrap_or("– | – | – | – | – | –"))
        }
        Outcome::Skipped(why) => format!("{why} | – | – | – | – | – | – | – | – | – | – | –"),
    }
}

/// Two commands side by side.
fn paired(pairs: &Pairs) -> String {
    let (wall, cpu) = (ratios(pairs, |s| s.wall), ratios(pairs, |s| s.cpu));
    let (least, most) = wall.iter().fold((f64::MAX, 0.0_f64), |(l, m), r| (l.min(*r), m.max(*r)));
    let (wall, cpu) = (median(wall.iter().copied()), median(cpu));
    let sides = format!("{} | {}", summary(&pairs.ours), summary(&pairs.theirs));
    format!("{sides} | **{wall:.2}** ({least:.2}–{most:.2}) | {cpu:.2}")
}

/// The effect of an option on one side, as text.
fn turns(turns: &Turns, is_command: bool) -> String {
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    let pair = |of: &dyn Fn(&Taken) -> Option<f64>| {
        if turns.off.iter().chain(&turns.on).any(|taken| of(taken).is_none()) {
            return "–".to_owned();
        }
        let [off, on] = turns.medians(|taken| of(taken).map_or(0.0, mib));
        format!("{off:.1}, {on:.1} MiB")
    };
    let times = turns.medians(|taken| taken.seconds);
    let times = match is_command {
        true => times.map(time).join(", "),
        false => times.map(|seconds| format!("{:.0} /s", 1.0 / seconds.max(1e-12))).join(", "),
    };
    let (speed, each) = turns.ratio(|taken| taken.seconds);
    let (least, most) = each.iter().fold((f64::MAX, 0.0_f64), |(l, m), r| (l.min(*r), m.max(*r)));
    // Less than the clock's tick is no number to divide by.
    let cpu = match turns.medians(|taken| taken.cpu_seconds).iter().all(|seconds| *seconds > 0.0) {
        true => format!("{:.2}", 1.0 / turns.ratio(|taken| taken.cpu_seconds).0),
        false => "–".to_owned(),
    };
    let peak = pair(&|taken| Some(taken.peak_bytes as f64));
    let (written, size) = (pair(&|taken| taken.written_bytes), pair(&|taken| taken.size_bytes.map(|size| size as f64)));
    format!("{times} | **{speed:.2}** ({least:.2}–{most:.2}) | {cpu} | {peak} | {written} | {size}")
}

/// The raw file beside ours.
fn beside(ours: &[Served], limit: Option<&[Served]>) -> String {
    match limit {
        Some(limit) => {
            format!("{} | {}", loaded(limit), spread(quotients(ours, limit, |run| run.per_second)))
        }
        None => "– | –".to_owned(),
    }
}

/// Peak memory of both servers.
fn peaks(ours: &[Served], theirs: &[Served]) -> String {
    let mib = |runs: &[Served]| median(runs.iter().map(|run| run.peak_bytes as f64)) / f64::from(1 << 20);
    format!("{:.0} MiB, {:.0} MiB", mib(ours), mib(theirs))
}

/// The same, and the bytes that the disk was given to write for a request.
fn used(ours: &[Served], theirs: &[Served]) -> String {
    let written = |runs: &[Served]| runs.iter().map(|run| run.written_bytes).collect::<Option<Vec<f64>>>();
    let written = match (written(ours), written(theirs)) {
        (Some(ours), Some(theirs)) => {
            let [ours, theirs] = [ours, theirs].map(|runs| median(runs) / 1024.0);
            format!("{ours:.1} KiB, {theirs:.1} KiB")
        }
        _ => "–".to_owned(),
    };
    format!("{} | {written}", peaks(ours, theirs))
}

/// One value against the other's, in each round.
pub fn quotients<T>(ours: &[T], theirs: &[T], of: impl Fn(&T) -> f64) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| of(ours) / of(theirs).max(1e-9)).collect()
}

/// The middle and the extremes.
fn spread(each: Vec<f64>) -> String {
    let (least, most) = each.iter().fold((f64::MAX, 0.0_f64), |(l, m), r| (l.min(*r), m.max(*r)));
    format!("**{:.2}** ({least:.2}–{most:.2})", median(each))
}

fn loaded(runs: &[Served]) -> String {
    let rate = median(runs.iter().map(|run| run.per_second));
    let cpu = median(runs.iter().map(|run| run.cpu_microseconds));
    format!("{rate:.0}, {cpu:.1} µs")
}

/// Medians of a side of an optimisation.
fn costs(runs: &[Cost], requests: bool, bytes: &str) -> String {
    let middle = |of: fn(&Cost) -> f64| median(runs.iter().map(of));
    let (seconds, cpu) = (middle(|cost| cost.seconds), middle(|cost| cost.cpu_seconds));
    let mib = middle(|cost| cost.bytes as f64) / f64::from(1 << 20);
    match requests {
        true => format!("{:.0}/s, {:.1} µs, {mib:.0} MiB {bytes}", 1.0 / seconds.max(1e-9), cpu * 1e6),
        false => format!("{}, {}, {mib:.0} MiB {bytes}", time(seconds), time(cpu)),
    }
}

fn ratios(pairs: &Pairs, of: impl Fn(&Sample) -> Duration) -> Vec<f64> {
    let both = pairs.ours.iter().zip(&pairs.theirs);
    both.map(|(ours, theirs)| of(theirs).as_secs_f64() / of(ours).as_secs_f64().max(1e-9)).collect()
}

fn summary(samples: &[Sample]) -> String {
    let seconds = |of: fn(&Sample) -> Duration| median(samples.iter().map(|sample| of(sample).as_secs_f64()));
    let (wall, cpu) = (seconds(|s| s.wall), seconds(|s| s.cpu));
    let peak = median(samples.iter().map(|sample| sample.peak_bytes as f64)) / f64::from(1 << 20);
    format!("{}, {}, {peak:.0} MiB", time(wall), time(cpu))
}

fn time(seconds: f64) -> String {
    if seconds < 0.1 { format!("{:.1} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}
