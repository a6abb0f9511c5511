// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A write makes some records of a file's content out of date. These are the UUID of a VDI's content, by which
//! differences know it, and the dirty bitmaps of Parallels. They go before the write, wherever the power is cut.

use crate::fresh_images::{IMAGE, kinds, opened};
use cowshed_image::ZeroFlags;
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::crash::{CrashPlan, explore};

const BLOCK: usize = 4096;

/// An image of this format with one block of data, closed.
fn image(format: &str) -> Vec<u8> {
    let found = kinds().into_iter().find(|(kind, _)| kind.format == format);
    let (_, bytes) = found.expect("a format");
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, PageMap::from_bytes(&bytes));
    world.run(async {
        let node = opened(format, true).await;
        node.write(0, IoBuf::copy_from(&[7; BLOCK])).await.0.expect("written");
        node.close().await.expect("closed");
    });
    world.contents(IMAGE).expect("the file").to_vec()
}

/// Cuts the power of a writer at each place. Where anything but `header` differs from `before`, `is_told` must hold.
fn cut(format: &'static str, before: &[u8], header: usize, is_told: impl Fn(&[u8]) -> bool) {
    let world = World::new(Config::new(1));
    world.add_file(IMAGE, PageMap::from_bytes(before));
    world.run(async {
        let node = opened(format, true).await;
        let write = |at: usize| {
            let node = &node;
            async move { node.write(at as u64, IoBuf::copy_from(&[9; BLOCK])).await.0 }
        };
        // A read first: it changes nothing.
        node.read(0, IoBuf::zeroed(BLOCK)).await.0.expect("read");
        write(0).await.expect("written");
        write(BLOCK).await.expect("written");
        node.flush().await.expect("flushed");
        node.write_zeroes(0, BLOCK as u64, ZeroFlags::default()).await.expect("zeroed");
        node.close().await.expect("closed");
    });
    let report = explore(&world.trace(), &CrashPlan::new(1), |case| {
        let Some(left) = case.state.files.get(IMAGE).map(|contents| contents.to_vec()) else { return Ok(()) };
        let len = left.len().max(before.len());
        let byte = |bytes: &[u8], at: usize| bytes.get(at).copied().unwrap_or(0);
        let is_changed = (header..len).any(|at| byte(&left, at) != byte(before, at));
        match is_changed && !is_told(&left) {
            true => Err(format!("{format}: the content has changed, and the header has the old record")),
            false => Ok(()),
        }
    });
    let report = report.unwrap_or_else(|failure| panic!("{failure}"));
    println!("{format}: {report}");
    assert!(report.distinct() > 5, "{report}");
    let whole = world.contents(IMAGE).expect("the file").to_vec();
    assert!(is_told(&whole), "{format}: a whole run");
}

#[test]
fn a_changed_vdi_has_another_content_uuid_after_any_cut() {
    let before = image("vdi");
    let uuid = before[408..424].to_vec();
    cut("vdi", &before, 512, |left| left[408..424] != uuid[..]);
}

#[test]
fn a_changed_parallels_image_has_no_bitmaps_after_any_cut() {
    let mut before = image("parallels");
    before.resize(before.len().next_multiple_of(BLOCK), 0);
    let at = before.len();
    before.extend(0xab23_4cef_23dc_ea87u64.to_le_bytes());
    before.resize(at + BLOCK, 0);
    before[44..48].copy_from_slice(&0x312e_3276u32.to_le_bytes());
    before[56..64].copy_from_slice(&(at as u64 / 512).to_le_bytes());
    cut("parallels", &before, 64, |left| left[56..64] == [0; 8]);
}
