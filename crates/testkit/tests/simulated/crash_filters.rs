// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while a client writes through a filter: `compress`, `preallocate`, `quorum`. Acknowledged and flushed data is
//! there afterwards, in each file that holds the disk. The images have no fault but leaked clusters.
//! `COWSHED_SEED=N` runs one case, `COWSHED_SEEDS=A..B` a range.

use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Preallocation, ZeroFlags};
use cowshed_simulator::{Config, Snapshot, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::audit::audit;
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::model::Model;
use cowshed_testkit::operations::OpGen;
use cowshed_testkit::random::seeds;
use cowshed_testkit::runner::{GuestDisk, Outcome, check_disk_after_cut, run_steps};
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::{Error, Result};
use std::sync::Arc;

const SIZE: u64 = 192 << 10;
const REQUESTS: usize = 30;

/// A client's disk.
struct Disk(Arc<Attachment>);

impl GuestDisk for Disk {
    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.0.queue().read(offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.0.queue().write(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, len: u64, may_unmap: bool) -> Result<()> {
        self.0.queue().write_zeroes(offset, len, ZeroFlags { may_unmap, no_fallback: false }).await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.0.queue().discard(offset, len).await
    }

    async fn write_compressed(&self, _: u64, _: IoBuf) -> Result<()> {
        Err(Error::unsupported("clients of a graph write nothing compressed"))
    }

    async fn resize(&self, bytes: u64) -> Result<()> {
        self.0.queue().resize(bytes, Preallocation::Off).await
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    async fn flush(&self) -> Result<()> {
        self.0.queue().flush().await
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Above {
    Compress,
    Preallocate,
    Quorum,
}

impl Above {
    /// The files that hold the disk, `top` among them.
    fn files(self, top: &str) -> Vec<String> {
        match self {
            Above::Compress | Above::Preallocate => vec![top.to_owned()],
            Above::Quorum => {
                (0..3).map(|index| if index == 0 { top.to_owned() } else { format!("{top}.{index}") }).collect()
            }
        }
    }

    /// The options of the disk.
    fn options(self, top: &str) -> String {
        match self {
            Above::Compress => format!("driver=compress,node-name=disk,file.driver=qcow2,file.file.filename={top}"),
            Above::Preallocate => format!(
                "driver=qcow2,node-name=disk,discard=unmap,file.driver=preallocate,file.prealloc-size=64k,\
                 file.prealloc-align=4k,file.file.driver=file,file.file.filename={top}"
            ),
            Above::Quorum => {
                let children = self.files(top);
                let children = children.iter().enumerate().map(|(index, file)| {
                    format!(",children.{index}.driver=qcow2,children.{index}.file.filename={file}")
                });
                format!("driver=quorum,node-name=disk,vote-threshold=2{}", children.collect::<String>())
            }
        }
    }
}

async fn run(
    above: Above,
    world: &World,
    prepared: &Prepared,
    steps: &[cowshed_testkit::operations::Step],
) -> Result<Outcome> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let node = graph.add(BlockdevOptions::from_keyval(&above.options(&prepared.top))?).await?;
    let user = graph.attach(&node, AttachRequest::export("guest", true)).await?;
    let (outcome, _) = run_steps(Disk(Arc::clone(&user)), world, Model::new(prepared.content.clone()), steps).await;
    user.detach().await?;
    drop(node);
    graph.close_all().await?;
    Ok(outcome)
}

fn verify(above: Above, top: &str, outcome: &Outcome, case: &CrashCase<'_>) -> std::result::Result<(), String> {
    let world = World::with_files(Config { in_order: true, ..Config::new(0) }, &case.state.files);
    for name in above.files(top) {
        let file = case.state.files.get(&name).ok_or_else(|| format!("{name} is gone"))?;
        audit(file).map_err(|complaint| format!("audit of {name}: {complaint}"))?;
        world.run(async {
            let disk = ImageDisk::open(&name, true, false).await;
            let disk = disk.map_err(|error| format!("{name} opened again: {error}"))?;
            check_disk_after_cut(&disk, &outcome.model, case.position)
                .await
                .map_err(|wrong| format!("{name}: {wrong}"))?;
            disk.0.close().await.map_err(|error| format!("{name} closed again: {error}"))
        })?;
    }
    Ok(())
}

fn case(above: Above, seed: u64) -> CrashReport {
    let spec = |cluster_size, extended_l2| Qcow2Spec { cluster_size, extended_l2, ..Qcow2Spec::default() };
    let specs = [spec(4096, false), spec(512, false), spec(16384, true), spec(65536, false)];
    let written = [(0, 40 << 10), (64 << 10, 20 << 10), (150 << 10, 30 << 10)];
    let sessions = written.map(|(offset, len)| Op::Write { offset, len, texture: Texture::Random(seed + offset) });
    let layer =
        Layer { format: Format::Qcow2(specs[seed as usize % 4].clone()), size: SIZE, sessions: vec![sessions.into()] };
    let prepared = Prepared::new(&Chain { layers: vec![layer] });
    let mut files: Snapshot = prepared.files.clone();
    for name in above.files(&prepared.top) {
        files.insert(name, prepared.files[&prepared.top].clone());
    }
    let sector_bytes = if seed % 3 == 2 { 4096 } else { 512 };
    let world = World::with_files(Config { sector_bytes, ..Config::new(seed) }, &files);
    let steps = OpGen { compressed: false, resizes: false, ..prepared.requests() }.steps(seed, REQUESTS);
    let outcome = world.run(run(above, &world, &prepared, &steps));
    let outcome = outcome.unwrap_or_else(|error| panic!("{above:?}, seed {seed}: {error}"));
    assert!(outcome.errors.is_empty(), "{above:?}, seed {seed}: {:?}", outcome.errors);
    assert!(outcome.wrong_reads.is_empty(), "{above:?}, seed {seed}: {:?}", outcome.wrong_reads);
    let plan = CrashPlan { max_distinct: 150, ..CrashPlan::new(seed) };
    explore(&world.trace(), &plan, |case| verify(above, &prepared.top, &outcome, case))
        .unwrap_or_else(|failure| panic!("{above:?}, seed {seed}: {failure}"))
}

fn all(above: Above) {
    let mut total = CrashReport::default();
    let seeds = seeds(8);
    let count = seeds.end - seeds.start;
    for seed in seeds {
        total.add(&case(above, seed));
    }
    println!("{above:?}: {total}");
    assert!(total.distinct() > 40 * count, "too few states to mean anything: {total}");
}

#[test]
fn no_power_cut_loses_what_was_written_compressed() {
    all(Above::Compress);
}

#[test]
fn no_power_cut_loses_what_was_written_into_space_ahead() {
    all(Above::Preallocate);
}

#[test]
fn no_power_cut_loses_what_all_children_of_a_quorum_have() {
    all(Above::Quorum);
}
