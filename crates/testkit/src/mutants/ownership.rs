// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clusters, tables and files that are used, shown or given up by code that no longer owns them, or not yet.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "reuse_before_unmapping_is_durable",
        about: "a freed cluster is used again before its unmapping is on the disk",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "unmapping_counts_as_durable",
        about: "an unmapping counts as durable before its cycle",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "reuse_under_running_requests",
        about: "a freed cluster is used again while requests planned before still run",
        test: ("failure_shapes", "freed_cluster_waits_for_older_writes"),
    },
    Mutant {
        name: "epoch_not_closed",
        about: "freeing is tagged with the epoch before: requests of the present one are not waited for",
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
    },
    Mutant {
        name: "hole_punched_after_reuse",
        about: "the hole of a freed cluster is punched when it may have a new owner",
        test: ("failure_shapes", "a_cluster_is_not_allocated_again_before_its_hole_is_punched"),
    },
    Mutant {
        name: "hole_in_a_shared_cluster",
        about: "a cluster that loses one of several references is punched",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "two_last_parts_without_a_hole",
        about: "two threads that give back the last two parts of a cluster each leave its hole to the other",
        test: ("failure_shapes", "cluster_freed_in_two_parts_is_punched_before_reuse"),
    },
    Mutant {
        name: "reads_unpinned",
        about: "a read gives its pin back before its I/O",
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
    },
    Mutant {
        name: "shared_reads_unpinned",
        about: "a read into guest memory gives its pin back before its I/O",
        test: ("failure_shapes", "a_shared_read_beside_a_discard_never_sees_the_next_owner"),
    },
    Mutant {
        name: "places_outlive_changes",
        about: "places remembered of a chain are believed though a layer has become writable",
        test: ("chains", "writable_layer_forgets_its_cached_places"),
    },
    Mutant {
        name: "passed_over_after_changes",
        about: "an image is passed over though it has become writable",
        test: ("chains", "writable_image_is_never_passed_over"),
    },
    Mutant {
        name: "passed_over_in_parts",
        about: "an image is passed over where it has a granule in parts",
        test: ("chains", "writable_image_is_never_passed_over"),
    },
    Mutant {
        name: "layer_not_loaded",
        about: "the short way to a layer doesn't load the table that it was told to load",
        test: ("crash_live_chains", "chains_in_use_survive_power_cuts"),
    },
    Mutant {
        name: "writes_in_place_unpinned",
        about: "a write in place gives its pin back before its I/O",
        test: ("failure_shapes", "write_beside_a_discard_never_lands_elsewhere"),
    },
    Mutant {
        name: "shared_writes_unpinned",
        about: "a write in place from guest memory gives its pin back before its I/O",
        test: ("failure_shapes", "a_shared_write_beside_a_discard_never_lands_elsewhere"),
    },
    Mutant {
        name: "dropped_requests_let_go",
        about: "a request whose future is dropped gives its pin, its clusters and its count up while its I/O goes on",
        test: ("dropped_requests", "a_dropped_write_never_lands_in_the_next_owner"),
    },
    Mutant {
        name: "close_overtakes_dropped_requests",
        about: "a close does not wait for requests that go on without their callers",
        test: ("dropped_requests", "a_close_waits_for_a_dropped_write"),
    },
    Mutant {
        name: "shrink_overtakes_writers",
        about: "a shrink does not wait for requests planned before it",
        test: ("failure_shapes", "shrink_waits_for_writers_past_the_new_end"),
    },
    Mutant {
        name: "shared_clusters_written_in_place",
        about: "the COPIED flag is not looked at",
        test: ("failure_shapes", "a_cluster_that_is_shared_is_copied_before_a_write"),
    },
    Mutant {
        name: "shared_tables_edited_in_place",
        about: "an L2 table that a snapshot shares is not copied before it is edited",
        test: ("failure_shapes", "what_a_snapshot_shares_is_never_written_in_place"),
    },
    Mutant {
        name: "unallocated_subclusters_written_in_place",
        about: "a write in place does not look at the subcluster bitmap",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "zeroing_under_a_running_write",
        about: "zero writes and discards do not wait for allocations under way",
        test: ("failure_shapes", "zeroes_wait_for_a_copy_that_is_under_way"),
    },
    Mutant {
        name: "discard_shows_the_backing_file",
        about: "a discard leaves the cluster unallocated over a backing file",
        test: ("failure_shapes", "a_discard_never_shows_the_backing_file"),
    },
    Mutant {
        name: "copy_without_the_backing_file",
        about: "a write to a part of a new cluster fills the rest with zeroes, not with backing data",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "old_space_taken_for_zero",
        about: "a cluster used before counts as one that reads as zeroes",
        test: ("failure_shapes", "space_that_was_used_before_is_not_taken_for_zeroes"),
    },
    Mutant {
        name: "dirty_slices_evicted",
        about: "dirty slices leave the cache",
        test: ("failure_shapes", "a_dirty_table_is_never_dropped_from_memory"),
    },
    Mutant {
        name: "freed_table_stays_dirty",
        about: "the slices of a freed table stay in the cache, dirty",
        test: ("failure_shapes", "dirty_slices_go_with_their_freed_table"),
    },
    Mutant {
        name: "packed_clusters_not_counted",
        about: "another compressed cluster in a host cluster does not raise its count",
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
    },
    Mutant {
        name: "refcount_overflow",
        about: "packing goes on past the largest count",
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
    },
    Mutant {
        name: "mapping_after_a_failed_copy",
        about: "a failed copy-on-write is mapped all the same",
        test: ("failure_shapes", "failed_copy_leaves_no_mapping_to_garbage"),
    },
    Mutant {
        name: "header_before_the_new_refcount_table",
        about: "the header names the new refcount table before it is durable",
        test: ("failure_shapes", "a_new_refcount_table_is_durable_before_the_header_names_it"),
    },
    Mutant {
        name: "header_before_the_new_l1_table",
        about: "the header names the new L1 table before it is durable",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "shrink_unmaps_before_the_header",
        about: "a shrink unmaps under the old size",
        test: ("crash_findings", "a_shrink_never_shows_the_backing_file"),
    },
    Mutant {
        name: "shrink_switches_before_it_cuts",
        about: "a shrink leaves data behind the new end until the header has it",
        test: ("failure_shapes", "no_cut_of_a_shrink_leaves_data_behind_the_end"),
    },
    Mutant {
        name: "shrink_loses_the_tail",
        about: "a shrink unmaps the cluster that holds its new end",
        test: ("failure_shapes", "a_shrink_loses_nothing_before_its_new_end"),
    },
    Mutant {
        name: "shrink_cuts_before_it_may_fail",
        about: "a shrink changes the size before it owns the tables behind the new end",
        test: ("full_guest", "a_shrink_that_found_no_space_changes_nothing"),
    },
    Mutant {
        name: "growth_shows_the_backing_file",
        about: "a grown disk shows what a longer backing file has behind the old end",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "preallocated_over_the_backing_file",
        about: "growth with preallocation maps zeroes over the last cluster of an overlay",
        test: ("differential_edges", "growth_with_preallocation_keeps_what_the_backing_file_shows"),
    },
    Mutant {
        name: "guessed_raw_without_turns",
        about: "two writes to the start of a guessed raw disk are checked before either is there",
        test: ("image/guessed", "racing_requests_complete_no_mark"),
    },
    Mutant {
        name: "file_cut_too_short",
        about: "closing cuts a used cluster off the end of the file",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "name_of_an_overlay_not_durable",
        about: "the name of a new image is not made durable",
        test: ("crash_live", "no_power_cut_around_a_live_snapshot_harms_an_image"),
    },
    Mutant {
        name: "live_snapshot_over_an_unfinished_image",
        about: "a live snapshot does not complete the image that becomes the backing file",
        test: ("crash_live", "no_power_cut_around_a_live_snapshot_harms_an_image"),
    },
    Mutant {
        name: "live_snapshot_overtakes_writers",
        about: "a live snapshot does not wait for requests that run",
        test: ("crash_live", "a_live_snapshot_waits_for_a_write_that_is_under_way"),
    },
    Mutant {
        name: "shared_subclusters_not_carried",
        about: "a new cluster does not take over the data of the one that a snapshot shares",
        test: ("differential_edges", "shared_subclusters_are_copied_as_in_qemu"),
    },
    Mutant {
        name: "a_failed_cycle_does_not_wait",
        about: "a cycle that fails does not wait for its other writes",
        test: ("failure_shapes", "a_cycle_that_fails_waits_for_its_other_writes"),
    },
    Mutant {
        name: "decompressed_clusters_not_forgotten",
        about: "decompressed data is kept when its host cluster gets a new owner",
        test: ("failure_shapes", "decompressed_cluster_goes_with_its_host_cluster"),
    },
    Mutant {
        name: "readers_keep_a_compact_slice",
        about: "an edit of a compact slice goes to an array that no reader sees",
        test: ("failure_shapes", "freed_cluster_waits_for_older_writes"),
    },
    Mutant {
        name: "changes_by_tables_of_before",
        about: "an image that could not be read anew after a snapshot takes writes by its old mapping",
        test: ("outdated_tables", "a_failed_read_behind_a_snapshot_leaves_both_disks_whole"),
    },
    Mutant {
        name: "tables_read_from_before",
        about: "an image that could not be read anew after a snapshot loads tables from their old places",
        test: ("outdated_tables", "a_failed_read_behind_a_snapshot_leaves_both_disks_whole"),
    },
    Mutant {
        name: "full_until_a_flush",
        about: "a write that a full disk refuses keeps its clusters until a flush",
        test: ("full_again", "clusters_of_a_failed_write_serve_the_next_at_once"),
    },
    Mutant {
        name: "plans_find_no_space",
        about: "a table, a compressed cluster or a bit that a full disk has no room for waits for a flush",
        test: ("full_again", "each_request_on_a_full_disk_finds_what_was_discarded"),
    },
    Mutant {
        name: "failed_header_is_believed_old",
        about: "after a failed write of the header the image goes on with the old one, whatever the file has",
        test: ("failed_headers", "an_image_goes_on_with_the_header_of_its_file"),
    },
    Mutant {
        name: "gaps_before_the_end",
        about: "places of writes that failed side by side stay behind the last block",
        test: ("full_again", "writes_that_fail_side_by_side_leave_no_gap"),
    },
    Mutant {
        name: "full_until_a_block_of_zeroes_fits",
        about: "a block whose first write a full disk refused must be filled with zeroes before the next",
        test: ("full_again", "a_write_that_found_no_room_leaves_it_to_smaller_ones"),
    },
    Mutant {
        name: "space_cut_without_a_look",
        about: "a close cuts off clusters without a count that it has not freed itself, and looks for no reference to them",
        test: ("cowshed/uncounted_tail", "changes_leave_uncounted_clusters_at_the_end"),
    },
];
