// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while a disk grows and its new part gets space. The image opens for writing after each, with the old size
//! or the new, and with its data.

use cowshed_image::Preallocation;
use cowshed_simulator::{Config, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::audit::audit;
use cowshed_testkit::crash::{CrashCase, CrashPlan, CrashReport, explore};
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::runner::GuestDisk;
use cowshed_testkit::scenario::{ImageDisk, Prepared};
use cowshed_types::Result;

const OLD_BYTES: u64 = 128 << 10;
const NEW_BYTES: u64 = (1 << 20) + 512;
/// Room for few dirty tables, so that cycles run while the clusters are being mapped.
const SMALL_CACHE: &str = "l2-cache-size=1k,l2-cache-entry-size=512,refcount-cache-size=2k";

fn prepared(cluster_size: u64) -> Prepared {
    let spec = Qcow2Spec { cluster_size, ..Qcow2Spec::default() };
    let session = vec![Op::Write { offset: 0, len: 64 << 10, texture: Texture::Random(1) }];
    Prepared::new(&Chain {
        layers: vec![Layer { format: Format::Qcow2(spec), size: OLD_BYTES, sessions: vec![session] }],
    })
}

/// The image takes writes, and everything is there.
fn judge(prepared: &Prepared, case: &CrashCase<'_>) -> std::result::Result<(), String> {
    let world = World::with_files(Config { in_order: true, ..Config::new(1) }, &case.state.files);
    let used: Result<Vec<u8>> = world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await?;
        let (result, buf) = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await;
        result?;
        disk.write(OLD_BYTES - 512, IoBuf::copy_from(&[7; 512])).await.0?;
        disk.0.close().await?;
        Ok(buf.to_vec())
    });
    let bytes = used.map_err(|error| format!("opened again: {error}"))?;
    let (old, new) = bytes.split_at(OLD_BYTES as usize);
    let is_known = bytes.len() as u64 == OLD_BYTES || bytes.len() as u64 == NEW_BYTES;
    if !is_known || old != prepared.content || new.iter().any(|byte| *byte != 0) {
        return Err(format!("the disk of {} bytes is not what it was", bytes.len()));
    }
    audit(&world.contents(&prepared.top).ok_or("the image is gone")?).map(drop)
}

fn grow(cluster_size: u64, options: &str, mode: Preallocation) -> CrashReport {
    let prepared = prepared(cluster_size);
    let world = World::with_files(Config::new(cluster_size), &prepared.files);
    let grown: Result<()> = world.run(async {
        let disk = ImageDisk::open_with(&prepared.top, true, false, options).await?;
        disk.0.resize(NEW_BYTES, mode).await?;
        disk.0.close().await
    });
    grown.unwrap_or_else(|error| panic!("{mode:?}: {error}"));
    let plan = CrashPlan { max_distinct: 400, ..CrashPlan::new(cluster_size) };
    explore(&world.trace(), &plan, |case| judge(&prepared, case))
        .unwrap_or_else(|failure| panic!("{mode:?}: {failure}"))
}

#[test]
fn power_cut_in_a_preallocated_growth_leaves_an_image_that_opens() {
    for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
        for (cluster_size, options) in [(512, SMALL_CACHE), (512, ""), (4096, "")] {
            let report = grow(cluster_size, options, mode);
            println!("{mode:?}, clusters of {cluster_size} bytes, {options}: {report}");
            assert!(report.distinct() > 3, "{report}");
        }
    }
}

#[test]
fn space_that_growth_reserved_for_the_length_is_given_back() {
    const MAPPED_BYTES: u64 = 1 << 30;
    let prepared = prepared(64 << 10);
    let world = World::with_files(Config::new(1), &prepared.files);
    let allocated = || world.contents(&prepared.top).expect("the image").allocated_bytes();
    let before = allocated();
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("the image");
        disk.0.resize(MAPPED_BYTES, Preallocation::Metadata).await.expect("it grows");
        disk.0.close().await.expect("closed");
    });
    // L2 tables, counts, a longer L1 table. Blocks for the length alone would take 64 KiB more.
    let known = (MAPPED_BYTES >> 16) * 8 + (MAPPED_BYTES >> 16) * 2 + (64 << 10);
    let gained = allocated() - before;
    assert!(gained < known + (32 << 10), "{gained} bytes for {known} bytes of tables");
}
