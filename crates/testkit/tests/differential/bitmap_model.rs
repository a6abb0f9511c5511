// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Lives of dirty bitmaps beside a plain set of granules: writes side by side, clears, enabling, disabling, reopening,
//! kills and power cuts. No bit of a write after a clear is lost, and no bit of a write before it returns.

use super::crash_bitmaps::{NAME, bitmaps, prepare};
use cowshed_image::formats::DriverOf;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_simulator::{Config, Event, PageMap, Snapshot, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashCase, CrashPlan, explore};
use cowshed_testkit::dirty::DirtyModel;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::{Random, for_each_seed};
use futures_util::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

const SECTORS: u64 = (1 << 20) / 512;
const OPTIONS: &[&str] =
    &["cluster_size=512", "cluster_size=4k", "cluster_size=16k,extended_l2=on", "cluster_size=64k"];

type Models = BTreeMap<String, DirtyModel>;
/// The dirty granules of each bitmap.
type Bits = BTreeMap<String, BTreeSet<u64>>;

/// The bounds of the bits at one moment: those that are durable, and all that may be there.
#[derive(Clone)]
struct Bounds {
    durable: Bits,
    possible: Bits,
}

fn bits_of(models: &Models) -> Bits {
    models.iter().map(|(name, model)| (name.clone(), model.dirty.clone())).collect()
}

async fn opened() -> Arc<Node> {
    open(OpenRequest::file(NAME).format("qcow2").writable(true)).await.expect("open")
}

/// Writes side by side: several of them wait for one piece of a bitmap.
async fn write(node: &Node, ranges: &[(u64, u64)]) {
    let requests = ranges.iter().map(|(at, len)| async move { node.write(*at, IoBuf::zeroed(*len as usize)).await.0 });
    join_all(requests).await.into_iter().for_each(|written| written.expect("write"));
}

async fn change(node: &Node, change: BitmapChange) {
    node.qcow2().expect("qcow2").change_bitmaps(&[change]).await.expect("a change");
}

/// The bitmaps as the image has them, with their bits as models.
async fn found() -> Result<Models, String> {
    let (_, found) = bitmaps().await.map_err(|error| error.to_string())?;
    let model = |(status, ranges): (cowshed_image::formats::qcow2::BitmapStatus, Vec<std::ops::Range<u64>>)| {
        let mut model = DirtyModel::new(status.granularity_bytes, status.enabled);
        ranges.iter().for_each(|range| model.mark(range.start, range.end - range.start));
        (status.name, model)
    };
    Ok(found.into_iter().map(model).collect())
}

struct Life<'a> {
    world: &'a World,
    random: Random,
    models: Models,
    /// The bounds from each mark of the trace on.
    bounds: Vec<Bounds>,
}

impl Life<'_> {
    fn note(&mut self, durable: Bits, possible: Bits) {
        self.world.mark(self.bounds.len() as u64);
        self.bounds.push(Bounds { durable, possible });
    }

    fn durable(&self) -> Bits {
        self.bounds.last().map(|bounds| bounds.durable.clone()).unwrap_or_default()
    }

    async fn write_some(&mut self, node: &Node) {
        let mut ranges = Vec::new();
        // Few granules, so that writes meet in them.
        let start = self.random.below(SECTORS - 64);
        for _ in 0..1 + self.random.below(8) {
            ranges.push(((start + self.random.below(32)) * 512, (1 + self.random.below(16)) * 512));
        }
        for model in self.models.values_mut().filter(|model| model.enabled) {
            ranges.iter().for_each(|(at, len)| model.mark(*at, *len));
        }
        self.note(self.durable(), bits_of(&self.models));
        write(node, &ranges).await;
        if self.random.chance(40) {
            node.flush().await.expect("flush");
            self.note(bits_of(&self.models), bits_of(&self.models));
        }
    }

    async fn change_some(&mut self, node: &Node) {
        let names: Vec<String> = self.models.keys().cloned().collect();
        let name = names[self.random.below(names.len() as u64) as usize].clone();
        let mut durable = self.durable();
        let Some(model) = self.models.get_mut(&name) else { return };
        match self.random.below(4) {
            0 | 1 => {
                durable.insert(name.clone(), BTreeSet::new());
                let before = bits_of(&self.models);
                self.note(durable.clone(), before);
                change(node, BitmapChange::Clear(name.clone())).await;
                self.models.entry(name).and_modify(|model| model.dirty.clear());
                self.note(durable, bits_of(&self.models));
            }
            2 => {
                model.enabled = true;
                change(node, BitmapChange::Enable(name)).await;
            }
            _ => {
                model.enabled = false;
                change(node, BitmapChange::Disable(name)).await;
            }
        }
    }

    /// A session that ends in a close, or in a kill.
    async fn session(&mut self) {
        let node = opened().await;
        for _ in 0..2 + self.random.below(6) {
            match self.random.chance(70) {
                true => self.write_some(&node).await,
                false => self.change_some(&node).await,
            }
            let driver = node.qcow2().expect("qcow2");
            for (name, model) in &self.models {
                let bits = driver.bitmap_bits(name).await.expect("bits");
                let ranges: Vec<(u64, u64)> = bits.dirty_ranges().map(|range| (range.start, range.end)).collect();
                assert_eq!(ranges, model.ranges(SECTORS * 512), "{name} in an open image");
            }
        }
        match self.random.chance(60) {
            true => node.close().await.expect("close"),
            false => std::mem::forget(node),
        }
    }
}

/// Holds the image that a cut leaves against the bounds of its moment.
fn verify(case: &CrashCase<'_>, bounds: &[Bounds], marks: &[usize], config: &Config) -> Result<(), String> {
    let passed = marks.iter().filter(|at| **at < case.position).count();
    let Some(bounds) = passed.checked_sub(1).and_then(|last| bounds.get(last)) else { return Ok(()) };
    let world = World::with_files(Config { in_order: true, ..config.clone() }, &case.state.files);
    let found = bits_of(&world.run(found())?);
    for (name, bits) in &found {
        let none = BTreeSet::new();
        let (durable, possible) = (bounds.durable.get(name).unwrap_or(&none), &bounds.possible[name]);
        if let Some(lost) = durable.difference(bits).next() {
            return Err(format!("{name}: the bit of granule {lost} is lost"));
        }
        if let Some(back) = bits.difference(possible).next() {
            return Err(format!("{name}: the bit of granule {back} has come back"));
        }
    }
    Ok(())
}

#[test]
fn bits_of_finished_writes_stay_away_after_a_clear() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for options in OPTIONS {
        let image = prepare(&qemu, folder.path(), options);
        let world = World::with_files(Config::new(3), &Snapshot::from([(NAME.into(), PageMap::from_bytes(&image))]));
        let found = world.run(async {
            let node = opened().await;
            // They share granules: one request records the bits of the others.
            let ranges: Vec<(u64, u64)> = (0..16).map(|number| (number % 3 * 512, 1024)).collect();
            write(&node, &ranges).await;
            change(&node, BitmapChange::Clear("fine".to_owned())).await;
            write(&node, &[(900 << 10, 512)]).await;
            node.close().await.expect("close");
            found().await.expect("bitmaps")
        });
        assert_eq!(found["fine"].ranges(SECTORS * 512), [(900 << 10, (900 << 10) + 512)], "{options}");
    }
}

#[test]
fn lives_of_bitmaps_are_those_of_plain_sets() {
    let (qemu, folder) = (Qemu::system(), temp_dir());
    for_each_seed(24, |seed| {
        let mut random = Random::new(seed);
        let options = random.pick(OPTIONS);
        let image = prepare(&qemu, folder.path(), options);
        let config = Config { in_order: random.chance(30), ..Config::new(seed) };
        let mut files = Snapshot::from([(NAME.to_owned(), PageMap::from_bytes(&image))]);
        let mut models = World::with_files(config.clone(), &files).run(found()).expect("bitmaps");
        for round in 0..4 {
            let world = World::with_files(config.clone(), &files);
            let mut life = Life { world: &world, random: Random::new(seed << 8 | round), models, bounds: Vec::new() };
            life.note(bits_of(&life.models), bits_of(&life.models));
            world.run(life.session());
            let trace = world.trace();
            let is_mark = |(at, event): (usize, &Event)| matches!(event, Event::Mark(_)).then_some(at);
            let marks: Vec<usize> = trace.log.iter().enumerate().filter_map(is_mark).collect();
            let plan = CrashPlan { max_distinct: 40, ..CrashPlan::new(seed) };
            let cut = explore(&trace, &plan, |case| verify(case, &life.bounds, &marks, &config));
            cut.unwrap_or_else(|failure| panic!("seed {seed}, {options}: {failure}"));
            files = Snapshot::from([(NAME.to_owned(), world.contents(NAME).expect("the image"))]);
            models = life.models;
            let again = World::with_files(config.clone(), &files).run(found()).expect("bitmaps");
            for (name, model) in &models {
                let (found, wanted) = (again[name].ranges(SECTORS * 512), model.ranges(SECTORS * 512));
                assert_eq!(found, wanted, "seed {seed}, {options}, round {round}: {name} after the session");
                assert_eq!(again[name].enabled, model.enabled, "seed {seed}, {options}, round {round}: {name}");
            }
        }
    });
}
