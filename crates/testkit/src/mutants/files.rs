// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slips in the layer of files.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "interrupted_flush_succeeds",
        about: "a flush that a signal interrupts counts as one that succeeded",
        test: ("storage_shapes", "a_flush_that_a_signal_interrupts_is_made_again"),
    },
    Mutant {
        name: "short_write_is_whole",
        about: "a write of which the disk took a part counts as done",
        test: ("storage_shapes", "what_a_short_write_left_out_is_written"),
    },
    Mutant {
        name: "growing_tail_locks_its_block_alone",
        about: "the block lock of a direct write that makes the file longer isn't extended to all behind it",
        test: ("storage_shapes", "a_tail_that_grows_keeps_writers_behind_it_waiting"),
    },
    Mutant {
        name: "locks_lost_when_reopened",
        about: "a file that becomes writable doesn't take its locks along",
        test: ("storage_shapes", "a_file_that_becomes_writable_keeps_its_locks"),
    },
];
