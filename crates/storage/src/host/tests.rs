// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who carries out a write.

use super::{BULK_BYTES, HostFile, NOW_BYTES};
use crate::payload::Payload;
use crate::{IoBuf, OpenOptions, rt};
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
