// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slips in the layer of files.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "interrupted_flush_succeeds",
        about: "a flush that a signal interrupts counts as one that succeeded",
        test: ("storage_shapes", "a_flush_that_a_signal_interrupts_is_made_again"),
        edits: &[(
            "crates/storage/src/file.rs",
            "                Err(Errno(libc::EINTR)) if attempts.go_on(Errno(libc::EINTR), false).await => {}",
            "                Err(Errno(libc::EINTR)) if SLIP => break Ok(()),\n                Err(Errno(libc::EINTR)) if attempts.go_on(Errno(libc::EINTR), false).await => {}",
        )],
    },
    Mutant {
        name: "short_write_is_whole",
        about: "a write of which the disk took a part counts as done",
        test: ("storage_shapes", "what_a_short_write_left_out_is_written"),
        edits: &[(
            "crates/storage/src/transfer.rs",
            "            let count = match result {",
            "            let count = match if SLIP { result.map(|_| total) } else { result } {",
        )],
    },
    Mutant {
        name: "growing_tail_locks_its_block_alone",
        about: "the block lock of a direct write that makes the file longer isn't extended to all behind it",
        test: ("storage_shapes", "a_tail_that_grows_keeps_writers_behind_it_waiting"),
        edits: &[(
            "crates/storage/src/direct.rs",
            "            if limit == u64::MAX || stop <= self.len.load(Ordering::Acquire) {",
            "            if SLIP || limit == u64::MAX || stop <= self.len.load(Ordering::Acquire) {",
        )],
    },
    Mutant {
        name: "locks_lost_when_reopened",
        about: "a file that becomes writable doesn't take its locks along",
        test: ("storage_shapes", "a_file_that_becomes_writable_keeps_its_locks"),
        edits: &[(
            "crates/storage/src/reopen.rs",
            "host.make_writable(|fresh| locks.copy_to(&fresh))",
            "host.make_writable(|fresh| if SLIP { Ok(()) } else { locks.copy_to(&fresh) })",
        )],
    },
];
