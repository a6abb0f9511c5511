// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread that carries out a write, and the remembered runs of data.

use super::{BULK_BYTES, HostFile, NOW_BYTES};
use crate::medium::Space;
use crate::payload::Payload;
use crate::ring::Direction;
use crate::{DataRange, IoBuf, OpenOptions, rt};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

fn payload(len: usize) -> Payload {
    Payload::one(IoBuf::zeroed(len))
}

#[test]
fn larger_writes_in_bulk_are_left_to_a_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    std::fs::write(&path, []).expect("a file");
    let options = OpenOptions { write: true, ..OpenOptions::default() };
    let host = HostFile::open(&path, &options).expect("it opens");
    // Whether the file system can promise not to wait makes no difference here.
    host.tries_now[usize::from(true)].store(false, Ordering::Relaxed);
    rt::block_on(async {
        // Where there is no ring another thread has all of them.
        let is_here = rt::current_ring().is_some();
        let mut offset = 0;
        let mut written_here = |len| {
            // A slow disk has nothing to do with it.
            host.rests_until_ns.store(0, Ordering::Relaxed);
            let result = host.write_now(&payload(len), offset);
            offset += len as u64;
            result.map(|written| written.expect("it can be written")) == Some(len)
        };
        assert_eq!(written_here(NOW_BYTES), is_here);
        assert_eq!(written_here(4096), is_here);
        host.note_bulk_write();
        assert!(host.bulk_until_ns.load(Ordering::Relaxed) > 0);
        // No test may wait for its clock.
        host.bulk_until_ns.store(u64::MAX, Ordering::Relaxed);
        assert!(!written_here(NOW_BYTES));
        assert!(!written_here(BULK_BYTES));
        assert_eq!(written_here(4096), is_here, "a small one costs less than asking");
        host.bulk_until_ns.store(1, Ordering::Relaxed);
        assert_eq!(written_here(BULK_BYTES), is_here, "the job has ended");
    });
}

#[test]
fn data_found_last_are_known_until_a_hole_is_made() {
    const MIB: u64 = 1 << 20;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    std::fs::write(&path, vec![1; MIB as usize]).expect("a file");
    let host = HostFile::open(&path, &OpenOptions { write: true, ..OpenOptions::default() }).expect("it opens");
    rt::block_on(async {
        let whole = DataRange { start: 0, end: MIB };
        let rest = DataRange { start: 4096, end: MIB };
        assert_eq!(host.known.find(0, MIB), None);
        assert_eq!(host.next_data(0, MIB).await.expect("next"), Some(whole));
        assert_eq!(host.known.find(4096, MIB), Some(rest), "remembered");
        assert_eq!(host.next_data(4096, MIB).await.expect("next"), Some(rest));
        assert_eq!(host.data_ranges(4096, MIB, MIB, 9).await.expect("ranges"), [rest]);
        assert_eq!(host.data_ranges(4096, MIB, MIB, 0).await.expect("ranges"), []);

        // The kernel is asked for the part behind the known run.
        host.set_len(2 * MIB, None).await.expect("it grows");
        assert_eq!(host.next_data(0, 2 * MIB).await.expect("next"), Some(whole));
        let write_behind = |offset| {
            let file = std::fs::OpenOptions::new().write(true).open(&path);
            let written = file.and_then(|file| file.write_all_at(&[1; 4096], offset));
            written.expect("it can be written");
        };
        write_behind(MIB + MIB / 2);
        let behind = DataRange { start: MIB + MIB / 2, end: MIB + MIB / 2 + 4096 };
        assert_eq!(host.data_ranges(0, 2 * MIB, 2 * MIB, 9).await.expect("ranges"), [whole, behind]);
        assert_eq!(host.data_ranges(0, 2 * MIB, 2 * MIB, 1).await.expect("ranges"), [whole]);
        host.next_data(0, 2 * MIB).await.expect("next");
        write_behind(MIB);
        let longer = DataRange { start: 0, end: MIB + 4096 };
        assert_eq!(host.data_ranges(0, 2 * MIB, 2 * MIB, 9).await.expect("ranges"), [longer, behind]);

        // Holes show at once, however they came.
        host.next_data(0, 2 * MIB).await.expect("next");
        host.fallocate(Space::Punch, MIB / 2, 65536, None).await.expect("a file system that makes holes");
        assert_eq!(host.next_data(0, 2 * MIB).await.expect("next").map(|data| data.end), Some(MIB / 2));
        host.set_len(MIB / 4, None).await.expect("it shrinks");
        host.set_len(MIB, None).await.expect("it grows");
        assert_eq!(host.next_data(0, MIB).await.expect("next").map(|data| data.end), Some(MIB / 4));
        assert_eq!(host.next_data(MIB / 2, MIB).await.expect("next"), None);
    });
}

#[test]
fn the_first_pages_are_written_without_a_ring() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    std::fs::write(&path, vec![1; 8192]).expect("a file");
    let host = HostFile::open(&path, &OpenOptions { write: true, ..OpenOptions::default() }).expect("it opens");
    crate::rt::Local::system().block_on(async {
        for offset in [0, 4096] {
            // Also where the file system can't promise not to wait.
            assert_eq!(host.write_now(&payload(4096), offset), Some(Ok(4096)));
        }
        assert!(!rt::has_made_ring());
        if rt::current_ring().is_some() {
            assert!(rt::has_made_ring());
        }
    });
    assert_eq!(std::fs::read(&path).expect("it is there"), vec![0; 8192]);
}

#[test]
fn thread_is_alone_while_nothing_runs_or_is_in_flight() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    std::fs::write(&path, vec![1; 4096]).expect("a file");
    let host = HostFile::open(&path, &OpenOptions::default()).expect("it opens");
    assert!(!rt::is_alone(), "no executor runs");
    rt::block_on(async {
        assert!(rt::is_alone(), "nothing was asked for");
        let has_ring = rt::current_ring().is_some();
        assert_eq!(rt::is_alone(), has_ring, "what a pool does isn't seen");
        let task = rt::spawn(std::future::ready(()));
        assert!(!rt::is_alone(), "a task can run");
        task.await;
        assert_eq!(rt::is_alone(), has_ring);
        if let Ok(read) = host.start(Direction::Read, payload(512), 0) {
            assert!(!rt::is_alone(), "a read is in flight");
            assert_eq!(read.await.0, 512);
        }
        assert_eq!(rt::is_alone(), has_ring);
    });
}
