// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes, reads and flushes in the wrong order.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "head_of_a_held_write_unchecked",
        about: "a write that goes to both ends of a mirror makes its first part clean, though the target lacks the part's head",
        test: ("live_copies", "mirror_copies_the_rest_of_a_part_written"),
    },
    Mutant {
        name: "writes_held_before_the_map_is_whole",
        about: "a mirror sends writes to both ends before its map says which parts the target lacks",
        test: ("live_copies", "early_writes_leave_their_parts_to_the_mirror"),
    },
    Mutant {
        name: "dirty_range_of_a_backup_rounded_up",
        about: "a backup of what is dirty leaves out the part in which a dirty range begins",
        test: ("live_copies", "incremental_backup_has_whole_dirty_parts"),
    },
    Mutant {
        name: "no_flush_at_detach",
        about: "an export that goes leaves what its clients wrote unflushed",
        test: ("live_copies", "a_detach_flushes_and_tells_of_a_flush_that_fails"),
    },
    Mutant {
        name: "pieces_of_a_backup_pass_a_drain",
        about: "a backup copies while a drain holds its disk",
        test: ("drained_jobs", "a_drain_waits_for_a_piece_of_a_backup_alone"),
    },
    Mutant {
        name: "new_users_overtake_a_drain",
        about: "an attachment that is made during a drain does not wait for its end",
        test: ("drained_jobs", "a_client_that_comes_during_a_pivot_loses_no_write"),
    },
    Mutant {
        name: "drain_holds_throttled_requests",
        about: "a drain waits until limits let requests go",
        test: ("live_copies", "a_drain_lets_throttled_requests_go_at_once"),
    },
    Mutant {
        name: "readers_of_the_past_overtaken",
        about: "a write doesn't wait for the readers of its place as it was",
        test: ("fleecing", "readers_of_the_past_see_it_whatever_guests_write"),
    },
    Mutant {
        name: "readers_through_an_overlay_overtaken",
        about: "a write doesn't wait for the readers of the disk below the target",
        test: ("fleecing", "a_write_waits_for_a_slow_reader_through_an_overlay"),
    },
    Mutant {
        name: "counts_in_place_without_the_dirty_bit",
        about: "on a full disk a snapshot's counts and flags change in place without the dirty bit",
        test: ("crash_snapshots", "snapshots_on_a_full_disk_survive_power_cuts"),
    },
    Mutant {
        name: "drain_without_what_is_read_ahead",
        about: "a drain waits for requests alone",
        test: ("read_ahead", "a_drain_waits_for_what_is_read_ahead"),
    },
    Mutant {
        name: "given_up_parts_still_readable",
        about: "a part of a disk as it was is given up, and what the target has there counts as saved",
        test: ("fleecing", "readers_of_the_past_see_it_whatever_guests_write"),
    },
    Mutant {
        name: "bitmap_data_named_before_their_count",
        about: "a bitmap table points to a cluster whose raised count is not durable",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "bits_only_in_memory",
        about: "the bits of a write reach the disk at no time",
        test: ("crash_bitmaps", "a_killed_process_loses_no_bit"),
    },
    Mutant {
        name: "journal_beside_snapshots",
        about: "the journal of bitmaps begins in an image with internal snapshots",
        test: ("bitmaps_beside_snapshots", "snapshots_stay_through_qemus_repair_after_a_kill"),
    },
    Mutant {
        name: "bitmaps_named_before_they_are_durable",
        about: "the header points to new bitmaps that are not durable, nor counted",
        test: ("crash_bitmaps", "changes_of_bitmaps_survive_power_cuts"),
    },
    Mutant {
        name: "pointers_with_what_they_point_to",
        about: "entries of L2 tables go out in the first stage, beside refcounts and data",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "l1_entries_with_their_tables",
        about: "L1 entries go out in the first stage, beside the tables they name",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "refcounts_with_pointers",
        about: "refcount blocks go out in the last stage, beside the pointers",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "refcount_table_with_pointers",
        about: "entries of the refcount table go out in the last stage",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "new_tables_with_pointers",
        about: "contents of new L2 tables go out in the last stage, beside the L1 entries",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "no_barrier_between_stages",
        about: "the stages of a cycle have no barrier between them",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "no_last_barrier",
        about: "a flush is acknowledged without the barrier behind the pointers",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "data_file_not_synced",
        about: "the external data file has no barrier",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "flush_rides_on_a_running_cycle",
        about: "a flush is content with a cycle that began before it",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "length_after_preallocated_mappings",
        about: "tables name preallocated clusters before the file is as long as that",
        test: ("crash_growth", "power_cut_in_a_preallocated_growth_leaves_an_image_that_opens"),
    },
    Mutant {
        name: "failed_barrier_forgotten",
        about: "a failed barrier is told once, as Linux does, and then forgotten",
        test: ("failure_shapes", "after_a_failed_flush_no_later_one_claims_success"),
    },
    Mutant {
        name: "failed_pointer_write_forgotten",
        about: "after a failed write of pointers new tables are written as if no pointer could name them",
        test: ("crash_findings", "after_a_failed_pointer_write_new_tables_count_as_linked"),
    },
    Mutant {
        name: "data_without_barrier_after_a_failed_write",
        about: "a flush whose write of metadata fails leaves data in place without a barrier",
        test: ("full_guest", "a_flush_whose_write_failed_can_be_made_again"),
    },
    Mutant {
        name: "metadata_without_room",
        about: "no space is reserved for metadata before a request is acknowledged",
        test: ("full_guest", "what_a_full_disk_acknowledges_it_keeps"),
    },
    Mutant {
        name: "counts_without_room",
        about: "no space is reserved for refcount blocks that are there",
        test: ("full_guest", "counts_in_a_hole_of_their_block_have_room"),
    },
    Mutant {
        name: "dirty_bit_never_set",
        about: "with lazy refcounts the dirty bit is not set",
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
    },
    Mutant {
        name: "dirty_bit_decided_before_the_cycle",
        about: "with lazy refcounts a flush looks whether anything changed before it waits for the cycle lock",
        test: ("crash_findings", "what_another_queue_changes_goes_out_with_the_dirty_bit"),
    },
    Mutant {
        name: "dirty_bit_cleared_too_early",
        about: "closing clears the dirty bit without having written the refcounts",
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
    },
    Mutant {
        name: "blocks_named_before_they_are_durable",
        about: "in formats without reference counts an entry is written without a barrier behind the block that it names",
        test: ("crash_formats", "formats_without_reference_counts_survive_power_cuts"),
    },
    Mutant {
        name: "vdi_size_before_the_new_entries",
        about: "the header of a VDI disk that grows counts entries that are not durable",
        test: ("crash_formats", "power_cut_leaves_a_grown_vdi_whole"),
    },
    Mutant {
        name: "vdi_led_to_a_map_before_it_is_durable",
        about: "the header of a VDI disk that grows leads to a longer map that is not durable",
        test: ("crash_formats", "power_cut_leaves_a_grown_vdi_whole"),
    },
    Mutant {
        name: "vdi_blocks_moved_before_they_are_durable",
        about: "blocks of a VDI disk that make way for its map are named in their new places without a barrier",
        test: ("crash_formats", "power_cut_leaves_a_grown_vdi_whole"),
    },
    Mutant {
        name: "vhdx_log_emptied_before_its_changes_are_durable",
        about: "an opening that carries a VHDX log out empties it before its changes are durable",
        test: ("crash_formats", "power_cut_during_log_replay_keeps_the_disk"),
    },
    Mutant {
        name: "vhdx_log_knows_of_a_length_too_early",
        about: "an entry of a VHDX log notes a length that the file has not durably",
        test: ("crash_formats", "power_cut_leaves_files_as_long_as_their_logs_know"),
    },
    Mutant {
        name: "vhdx_log_runs_over_its_end",
        about: "an entry of a VHDX log that goes round the end of the log is written on behind that end",
        test: ("crash_formats", "power_cut_while_a_log_wraps_keeps_flushed_data"),
    },
    Mutant {
        name: "vhdx_log_ends_with_half_an_entry",
        about: "an entry of a VHDX log counts though its end was not written",
        test: ("crash_formats", "power_cut_while_a_log_wraps_keeps_flushed_data"),
    },
    Mutant {
        name: "vmdk_stream_ends_before_its_grains_are_durable",
        about: "the footer of a stream-optimised disk is written without a barrier behind its grains and tables",
        test: ("crash_parents", "power_cut_leaves_a_stream_empty_whole_or_refused"),
    },
    Mutant {
        name: "vmdk_stream_gives_up_its_flushed_end",
        about: "the first grain behind a flush of a stream-optimised disk takes the place of its footer at once",
        test: ("crash_parents", "power_cut_keeps_the_flushed_grains_of_a_stream"),
    },
    Mutant {
        name: "vmdk_content_id_after_the_data",
        about: "the first write to a VMDK disk may reach the disk before the new content id",
        test: ("crash_parents", "power_cut_leaves_no_changed_disk_under_its_old_identity"),
    },
    Mutant {
        name: "parallels_copy_led_to_before_it_is_durable",
        about: "a repair leads to the copy of a Parallels block before it is durable",
        test: ("crash_repairs", "power_cut_during_a_repair_loses_no_more"),
    },
    Mutant {
        name: "qed_name_led_to_before_it_is_durable",
        about: "the header of a QED image leads to another name of its backing file before that is durable",
        test: ("crash_formats", "power_cut_leaves_the_old_backing_name_or_the_new"),
    },
];
