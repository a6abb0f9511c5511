// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mutants: small slips in the ordering of writes, the freeing of clusters and the rights to write, each with the test
//! that must fail with it. `scripts/mutants` tries them; `tests/mutants.rs` keeps the list true.
//!
//! All slips go into one copy of the sources at once, each behind a switch, so that it is built only once.

use crate::switched::{Edit, Switches};

/// One slip.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Its name.
    pub name: &'static str,
    /// What goes wrong.
    pub about: &'static str,
    /// The test that fails: the file in `tests/` without its ending, and the name of the function.
    pub test: (&'static str, &'static str),
    /// The edits: `SLIP` is true when this mutant is switched on.
    pub edits: &'static [Edit],
}

/// What switches a mutant on: `COWSHED_SLIP=NAME`.
pub const SLIPS: Switches = Switches {
    word: "SLIP",
    call: "cowshed_block::slip(\"NAME\")",
    reader: r#"
/// True when the mutant of this name is switched on.
#[doc(hidden)]
pub fn slip(name: &str) -> bool {
    static CHOSEN: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    CHOSEN.get_or_init(|| std::env::var("COWSHED_SLIP").unwrap_or_default()) == name
}
"#,
};

/// The edits of each mutant.
pub fn edits() -> Vec<(&'static str, &'static [Edit])> {
    MUTANTS.iter().map(|mutant| (mutant.name, mutant.edits)).collect()
}

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "readers_of_the_past_overtaken",
        about: "a write doesn't wait for those who read its place as it was",
        test: ("fleecing", "readers_of_the_past_see_it_whatever_guests_write"),
        edits: &[(
            "crates/image/src/filters/copy_before_write.rs",
            "        self.saver.readers_left(offset, len).await;",
            "        if !SLIP { self.saver.readers_left(offset, len).await; }",
        )],
    },
    Mutant {
        name: "drain_without_what_is_read_ahead",
        about: "a drain waits for requests alone",
        test: ("read_ahead", "a_drain_waits_for_what_is_read_ahead"),
        edits: &[(
            "crates/image/src/graph/drain.rs",
            "            node.settle().await;",
            "            if !SLIP { node.settle().await; }",
        )],
    },
    Mutant {
        name: "given_up_parts_still_readable",
        about: "a part of a disk as it was is given up, and what the target has there counts as saved",
        test: ("fleecing", "readers_of_the_past_see_it_whatever_guests_write"),
        edits: &[(
            "crates/image/src/filters/saver.rs",
            "        self.kept.clear(start, len);",
            "        if !SLIP { self.kept.clear(start, len); }",
        )],
    },
    Mutant {
        name: "bitmap_data_named_before_their_count",
        about: "a bitmap table points to a cluster whose raised count is not durable",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/bitmaps/record.rs",
            "            result = self.write_back(true).await;",
            "            result = if SLIP { Ok(()) } else { self.write_back(true).await };",
        )],
    },
    Mutant {
        name: "bits_only_in_memory",
        about: "the bits of a write reach the disk at no time",
        test: ("crash_bitmaps", "a_killed_process_loses_no_bit"),
        edits: &[(
            "crates/image/src/formats/qcow2/bitmaps/record.rs",
            "        self.write_steps(&steps).await?;",
            "        if !SLIP { self.write_steps(&steps).await?; }",
        )],
    },
    Mutant {
        name: "bitmaps_named_before_they_are_durable",
        about: "the header points to new bitmaps that are not durable, nor counted",
        test: ("crash_bitmaps", "changes_of_bitmaps_survive_power_cuts"),
        edits: &[(
            "crates/image/src/formats/qcow2/bitmaps/publish.rs",
            "                Ok(place) => self.write_back(true).await.map(|()| place),",
            "                Ok(place) => if SLIP { Ok(place) } else { self.write_back(true).await.map(|()| place) },",
        )],
    },
    Mutant {
        name: "pointers_with_what_they_point_to",
        about: "entries of L2 tables go out in the first stage, beside refcounts and data",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "push_joined(&mut cycle.stages[2], table",
            "push_joined(&mut cycle.stages[if SLIP { 0 } else { 2 }], table",
        )],
    },
    Mutant {
        name: "l1_entries_with_their_tables",
        about: "L1 entries go out in the first stage, beside the tables they name",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[2].extend(writes);",
            "cycle.stages[if SLIP { 0 } else { 2 }].extend(writes);",
        )],
    },
    Mutant {
        name: "refcounts_with_pointers",
        about: "refcount blocks go out in the last stage, beside the pointers",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[0].push(MetaWrite { host: HostOffset(host + range.start as u64), bytes });",
            "cycle.stages[if SLIP { 2 } else { 0 }].push(MetaWrite { host: HostOffset(host + range.start as u64), bytes });",
        )],
    },
    Mutant {
        name: "refcount_table_with_pointers",
        about: "entries of the refcount table go out in the last stage",
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[1] = self.entry_writes",
            "cycle.stages[if SLIP { 2 } else { 1 }] = self.entry_writes",
        )],
    },
    Mutant {
        name: "new_tables_with_pointers",
        about: "contents of new L2 tables go out in the last stage, beside the L1 entries",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[0].push(MetaWrite { host: HostOffset(*host), bytes });",
            "cycle.stages[if SLIP { 2 } else { 0 }].push(MetaWrite { host: HostOffset(*host), bytes });",
        )],
    },
    Mutant {
        name: "no_barrier_between_stages",
        about: "the stages of a cycle have no barrier between them",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if index > 0 && unsettled {",
            "if index > 0 && unsettled && !SLIP {",
        )],
    },
    Mutant {
        name: "no_last_barrier",
        about: "a flush is acknowledged without the barrier behind the pointers",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            unsettled = true;
        }
        self.barrier().await
"#,
            r#"            unsettled = true;
        }
        if SLIP {
            return Ok(());
        }
        self.barrier().await
"#,
        )],
    },
    Mutant {
        name: "data_file_not_synced",
        about: "the external data file has no barrier",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            data_file.sync().await?;
"#,
            r#"            if !SLIP {
                data_file.sync().await?;
            }
"#,
        )],
    },
    Mutant {
        name: "flush_rides_on_a_running_cycle",
        about: "a flush is content with a cycle that began before it",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "self.flushes_covered.load(Ordering::SeqCst) >= ticket",
            "self.flushes_covered.load(Ordering::SeqCst) + u64::from(SLIP) >= ticket",
        )],
    },
    Mutant {
        name: "failed_barrier_forgotten",
        about: "a failed barrier is told once, as Linux does, and then forgotten",
        test: ("failure_shapes", "after_a_failed_flush_no_later_one_claims_success"),
        edits: &[(
            "crates/storage/src/flush.rs",
            "Err(error) => drop(self.poison.set(error)),",
            r#"Err(_) if SLIP => {}
            Err(error) => drop(self.poison.set(error)),"#,
        )],
    },
    Mutant {
        name: "failed_pointer_write_forgotten",
        about: "after a failed write of pointers the next cycle goes on",
        test: ("crash_findings", "a_failed_pointer_write_ends_all_writing"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if written.is_err() && index > 0 {",
            "if written.is_err() && index > 0 && !SLIP {",
        )],
    },
    Mutant {
        name: "dirty_bit_never_set",
        about: "with lazy refcounts the dirty bit is not set",
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if cycle.set_dirty_bit {",
            "if cycle.set_dirty_bit && !SLIP {",
        )],
    },
    Mutant {
        name: "dirty_bit_decided_before_the_cycle",
        about: "with lazy refcounts a flush looks whether anything changed before its cycle takes what another queue changes",
        test: ("crash_findings", "what_another_queue_changes_goes_out_with_the_dirty_bit"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if self.engine.lazy_refcounts() && !self.header().is_dirty() {",
            "if self.engine.lazy_refcounts() && (!SLIP || self.engine.is_dirty()) && !self.header().is_dirty() {",
        )],
    },
    Mutant {
        name: "dirty_bit_cleared_too_early",
        about: "closing clears the dirty bit without having written the refcounts",
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
        edits: &[
            (
                "crates/image/src/formats/qcow2/flush.rs",
                r#"            if self.engine.is_dirty() {
                return Err"#,
                r#"            if self.engine.is_dirty() && !SLIP {
                return Err"#,
            ),
            (
                "crates/image/src/formats/qcow2/flush.rs",
                "self.write_back(true).await?;",
                "self.write_back(!SLIP).await?;",
            ),
        ],
    },
    Mutant {
        name: "reuse_before_unmapping_is_durable",
        about: "a freed cluster is used again before its unmapping is on the disk",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[
            (
                "crates/qcow2/src/reclaim.rs",
                "for freed in state.freed.iter().filter(|freed| freed.cycle <= durable) {",
                "for freed in state.freed.iter().filter(|freed| freed.cycle <= durable + 9 * u64::from(SLIP)) {",
            ),
            (
                "crates/qcow2/src/reclaim.rs",
                ".retain(|freed| !(freed.cycle <= durable &&",
                ".retain(|freed| !(freed.cycle <= durable + 9 * u64::from(SLIP) &&",
            ),
        ],
    },
    Mutant {
        name: "unmapping_counts_as_durable",
        about: "what is unmapped counts as unmapped by the cycle before",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "state.freed.push_back(Freed { cluster, cycle: state.open_cycle, tag });",
            r#"let cycle = if SLIP { 0 } else { state.open_cycle };
            state.freed.push_back(Freed { cluster, cycle, tag });"#,
        )],
    },
    Mutant {
        name: "reuse_under_running_requests",
        about: "a freed cluster is used again while requests planned before still run",
        test: ("failure_shapes", "a_freed_cluster_is_not_used_again_while_an_older_write_to_it_is_in_flight"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "if !self.pins.is_drained(freed.tag) {",
            "if !SLIP && !self.pins.is_drained(freed.tag) {",
        )],
    },
    Mutant {
        name: "epoch_not_closed",
        about: "freeing is tagged with the epoch before: requests of the present one are not waited for",
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            r#"                self.pins.advance()
            });"#,
            r#"                self.pins.advance() - u64::from(SLIP)
            });"#,
        )],
    },
    Mutant {
        name: "hole_punched_after_reuse",
        about: "the hole of a freed cluster is punched when it may have a new owner",
        test: ("failure_shapes", "a_cluster_is_not_allocated_again_before_its_hole_is_punched"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            if self.punch.load(Ordering::Relaxed) {
                for"#,
            r#"            if SLIP {
                self.plan(|engine| engine.reclaimed(&mut reclaim)).await?;
            }
            if self.punch.load(Ordering::Relaxed) {
                for"#,
        )],
    },
    Mutant {
        name: "hole_in_a_shared_cluster",
        about: "a cluster that loses one of several references is punched",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[("crates/qcow2/src/reclaim.rs", "if count == *taken {", "if count == *taken || SLIP {")],
    },
    Mutant {
        name: "two_last_parts_without_a_hole",
        about: "two who give the last two parts of a cluster back at once each leave its hole to the other",
        test: ("failure_shapes", "a_cluster_whose_last_two_parts_go_at_once_is_punched_before_it_is_used_again"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "            *taken += by;",
            "            if SLIP { *taken = by } else { *taken += by }",
        )],
    },
    Mutant {
        name: "reads_unpinned",
        about: "a read gives its pin back before its I/O",
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
        edits: &[
            (
                "crates/image/src/formats/qcow2/read.rs",
                "                let done = file.read_at(buf, host.0).await;",
                r#"                let pin = (!SLIP).then_some(pin);
                let done = file.read_at(buf, host.0).await;"#,
            ),
            (
                "crates/image/src/formats/qcow2/read.rs",
                "                let read = file.read_at(buf, host.0).await;",
                r#"                let pin = (!SLIP).then_some(pin);
                let read = file.read_at(buf, host.0).await;"#,
            ),
        ],
    },
    Mutant {
        name: "places_outlive_changes",
        about: "what is remembered of a chain is believed though a layer has become writable",
        test: ("chains", "the_places_of_a_layer_are_forgotten_when_it_may_be_written_to"),
        edits: &[
            (
                "crates/image/src/formats/qcow2/chain_map.rs",
                "        let known = known.as_ref().filter(|map| map.changes == graph_changes());",
                "        let known = known.as_ref().filter(|map| SLIP || map.changes == graph_changes());",
            ),
            (
                "crates/image/src/formats/qcow2/span.rs",
                "        match place.changes == graph_changes() && place.host.0 + len <= file.len() {",
                "        match (SLIP || place.changes == graph_changes()) && place.host.0 + len <= file.len() {",
            ),
        ],
    },
    Mutant {
        name: "layer_not_loaded",
        about: "the short way to a layer doesn't load the table that it was told to load",
        test: ("crash_live_chains", "chains_in_use_survive_power_cuts"),
        edits: &[(
            "crates/image/src/formats/qcow2/read.rs",
            "            Direct::Stalled(stall, seen) => match Box::pin(self.settle(stall, seen)).await {",
            r#"            Direct::Stalled(..) if SLIP => Err(buf),
            Direct::Stalled(stall, seen) => match Box::pin(self.settle(stall, seen)).await {"#,
        )],
    },
    Mutant {
        name: "writes_in_place_unpinned",
        about: "a write in place gives its pin back before its I/O",
        test: ("failure_shapes", "a_write_in_place_beside_a_discard_never_lands_in_the_next_owner"),
        edits: &[(
            "crates/image/src/formats/qcow2/write.rs",
            "                    let done = file.write_at(buf, host.0).await;",
            r#"                    let pin = (!SLIP).then_some(pin);
                    let done = file.write_at(buf, host.0).await;"#,
        )],
    },
    Mutant {
        name: "shrink_overtakes_writers",
        about: "a shrink does not wait for requests planned before it",
        test: ("failure_shapes", "a_shrink_waits_for_writers_that_had_the_right_to_write_there"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "while !self.engine.is_drained(tag) {",
            "while !SLIP && !self.engine.is_drained(tag) {",
        )],
    },
    Mutant {
        name: "shared_clusters_written_in_place",
        about: "the COPIED flag is not looked at",
        test: ("failure_shapes", "a_cluster_that_is_shared_is_copied_before_a_write"),
        edits: &[(
            "crates/qcow2/src/map.rs",
            "entry.is_copied() || self.config.format.data_file",
            "entry.is_copied() || SLIP || self.config.format.data_file",
        )],
    },
    Mutant {
        name: "shared_tables_edited_in_place",
        about: "an L2 table that a snapshot shares is not copied before it is edited",
        test: ("failure_shapes", "what_a_snapshot_shares_is_never_written_in_place"),
        edits: &[(
            "crates/qcow2/src/tables.rs",
            "if table.is_some() && old.is_copied() {",
            "if table.is_some() && (SLIP || old.is_copied()) {",
        )],
    },
    Mutant {
        name: "unallocated_subclusters_written_in_place",
        about: "a write in place does not look at the subcluster bitmap",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/map.rs",
            "if OVERWRITE && kind != Subcluster::Data {",
            r#"let kind = if OVERWRITE && SLIP && host.is_some() { Subcluster::Data } else { kind };
            if OVERWRITE && kind != Subcluster::Data {"#,
        )],
    },
    Mutant {
        name: "zeroing_under_a_running_write",
        about: "zero writes and discards do not wait for allocations under way",
        test: ("failure_shapes", "zeroes_wait_for_a_copy_that_is_under_way"),
        edits: &[(
            "crates/qcow2/src/zero.rs",
            "Some(locked) if locked == first => return Err(Stall::Wait),",
            r#"Some(locked) if locked == first && !SLIP => return Err(Stall::Wait),
            Some(locked) if locked == first => {}"#,
        )],
    },
    Mutant {
        name: "discard_shows_the_backing_file",
        about: "a discard leaves the cluster unallocated over a backing file",
        test: ("failure_shapes", "a_discard_never_shows_the_backing_file"),
        edits: &[(
            "crates/qcow2/src/zero.rs",
            "_ if has_zero_flag => L2Entry::ZERO_PLAIN,",
            r#"_ if has_zero_flag && is_discard && SLIP => L2Entry::UNALLOCATED,
            _ if has_zero_flag => L2Entry::ZERO_PLAIN,"#,
        )],
    },
    Mutant {
        name: "copy_without_the_backing_file",
        about: "a write to a part of a new cluster fills the rest with zeroes, not with backing data",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/allocate.rs",
            "let unallocated = if backed { Fill::Copy }",
            "let unallocated = if backed && !SLIP { Fill::Copy }",
        )],
    },
    Mutant {
        name: "old_space_taken_for_zero",
        about: "a cluster used before counts as one that reads as zeroes",
        test: ("failure_shapes", "space_that_was_used_before_is_not_taken_for_zeroes"),
        edits: &[(
            "crates/qcow2/src/refcounts.rs",
            "self.config.new_space_is_zero && found.start >= high_cluster",
            "self.config.new_space_is_zero && (SLIP || found.start >= high_cluster)",
        )],
    },
    Mutant {
        name: "dirty_slices_evicted",
        about: "dirty slices leave the cache",
        test: ("failure_shapes", "a_dirty_table_is_never_dropped_from_memory"),
        edits: &[(
            "crates/qcow2/src/tables.rs",
            "meta.dirt == Dirt::Clean && meta.busy == 0",
            "(SLIP || meta.dirt == Dirt::Clean) && meta.busy == 0",
        )],
    },
    Mutant {
        name: "freed_table_stays_dirty",
        about: "the slices of a freed table stay in the cache, dirty",
        test: ("failure_shapes", "dirty_slices_of_a_freed_table_are_never_written_over_its_next_owner"),
        edits: &[(
            "crates/qcow2/src/resize.rs",
            r#"            self.drop_table(state, l1_index);
"#,
            r#"            if !SLIP {
                self.drop_table(state, l1_index);
            }
"#,
        )],
    },
    Mutant {
        name: "packed_clusters_not_counted",
        about: "another compressed cluster in a host cluster does not raise its count",
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
        edits: &[(
            "crates/qcow2/src/compressed.rs",
            r#"                if !is_first_of_new {
                    self.raise"#,
            r#"                if !is_first_of_new && !SLIP {
                    self.raise"#,
        )],
    },
    Mutant {
        name: "refcount_overflow",
        about: "packing goes on past the largest count",
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
        edits: &[
            (
                "crates/qcow2/src/compressed.rs",
                "true => self.cached_refcount(state, *cluster) >= max,",
                "true => self.cached_refcount(state, *cluster) >= max.saturating_add(u64::from(SLIP)),",
            ),
            (
                "crates/qcow2/src/compressed.rs",
                "if self.refcount(state, cluster)? >= self.geometry.max_refcount() {",
                "if self.refcount(state, cluster)? >= self.geometry.max_refcount().saturating_add(u64::from(SLIP)) {",
            ),
        ],
    },
    Mutant {
        name: "mapping_after_a_failed_copy",
        about: "a failed copy-on-write is mapped all the same",
        test: ("failure_shapes", "an_error_half_way_through_a_copy_leaves_no_mapping_to_garbage"),
        edits: &[(
            "crates/image/src/formats/qcow2/allocate.rs",
            r#"                self.engine.abort(allocation, true);
                Err(error)"#,
            r#"                if SLIP {
                    let _ = self.engine.commit(allocation);
                } else {
                    self.engine.abort(allocation, true);
                }
                Err(error)"#,
        )],
    },
    Mutant {
        name: "header_before_the_new_refcount_table",
        about: "the header names the new refcount table before it is durable",
        test: ("failure_shapes", "a_new_refcount_table_is_durable_before_the_header_names_it"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"        self.write_all(&growth.writes).await?;
        self.barrier().await?;
"#,
            r#"        self.write_all(&growth.writes).await?;
        if !SLIP {
            self.barrier().await?;
        }
"#,
        )],
    },
    Mutant {
        name: "header_before_the_new_l1_table",
        about: "the header names the new L1 table before it is durable",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            r#"        self.write_all(&[self.engine.l1_image(growth)]).await?;
        self.barrier().await?;
"#,
            r#"        self.write_all(&[self.engine.l1_image(growth)]).await?;
        if !SLIP {
            self.barrier().await?;
        }
"#,
        )],
    },
    Mutant {
        name: "shrink_unmaps_before_the_header",
        about: "a shrink unmaps under the old size",
        test: ("crash_findings", "a_shrink_never_shows_the_backing_file"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "        if let Err(error) = self.set_header_size(size).await {",
            r#"        if SLIP {
            self.unmap_behind(size).await?;
            self.write_back(false).await?;
        }
        if let Err(error) = self.set_header_size(size).await {"#,
        )],
    },
    Mutant {
        name: "shrink_loses_the_tail",
        about: "a shrink unmaps the cluster that holds its new end",
        test: ("failure_shapes", "a_shrink_loses_nothing_before_its_new_end"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "let mut cursor = GuestOffset(size.next_multiple_of(self.cluster_size()));",
            r#"let size = if SLIP { size / self.cluster_size() * self.cluster_size() } else { size };
        let mut cursor = GuestOffset(size.next_multiple_of(self.cluster_size()));"#,
        )],
    },
    Mutant {
        name: "growth_shows_the_backing_file",
        about: "a grown disk shows what a longer backing file has behind the old end",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "if cluster_end < backing_end {",
            "if cluster_end < backing_end && !SLIP {",
        )],
    },
    Mutant {
        name: "file_cut_too_short",
        about: "closing cuts a used cluster off the end of the file",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "        Ok(end << bits)",
            "        Ok((end - u64::from(SLIP)) << bits)",
        )],
    },
    Mutant {
        name: "name_of_an_overlay_not_durable",
        about: "the name of a new image is not made durable",
        test: ("crash_live", "no_power_cut_around_a_live_snapshot_harms_an_image"),
        edits: &[(
            "crates/image/src/create/file.rs",
            "if self.is_new && self.is_synced {",
            "if self.is_new && self.is_synced && !SLIP {",
        )],
    },
    Mutant {
        name: "live_snapshot_over_an_unfinished_image",
        about: "a live snapshot does not complete the image that becomes the backing file",
        test: ("crash_live", "no_power_cut_around_a_live_snapshot_harms_an_image"),
        edits: &[(
            "crates/image/src/graph/snapshot.rs",
            "        node.complete().await?;",
            r#"        if !SLIP {
            node.complete().await?;
        }"#,
        )],
    },
    Mutant {
        name: "live_snapshot_overtakes_writers",
        about: "a live snapshot does not wait for requests that run",
        test: ("crash_live", "a_live_snapshot_waits_for_a_write_that_is_under_way"),
        edits: &[(
            "crates/image/src/graph/drain.rs",
            "            attachment.gate().empty().await;",
            r#"            if !SLIP {
                attachment.gate().empty().await;
            }"#,
        )],
    },
    Mutant {
        name: "a_failed_cycle_does_not_wait",
        about: "a cycle that fails does not wait for its other writes",
        test: ("failure_shapes", "a_cycle_that_fails_waits_for_its_other_writes"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            if result.is_ok() {
                result = outcome;
            }"#,
            r#"            if result.is_ok() {
                result = outcome;
            }
            if SLIP && result.is_err() {
                return result;
            }"#,
        )],
    },
    Mutant {
        name: "inflated_clusters_not_forgotten",
        about: "what was inflated is kept when its host cluster gets a new owner",
        test: ("failure_shapes", "a_decompressed_cluster_is_not_served_after_its_host_cluster_has_a_new_owner"),
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "            self.inflated.forget(&reclaim.holes);",
            r#"            if !SLIP {
                self.inflated.forget(&reclaim.holes);
            }"#,
        )],
    },
    Mutant {
        name: "readers_keep_a_compact_slice",
        about: "an edit of a compact slice goes to an array that no reader sees",
        test: ("failure_shapes", "a_freed_cluster_is_not_used_again_while_an_older_write_to_it_is_in_flight"),
        edits: &[(
            "crates/qcow2/src/tables.rs",
            r#"            state.tables.count(number, slice.counted_bytes());
            self.directory.set_slice(l1_index, index, Some(slice.clone()));
        }
        if"#,
            r#"            state.tables.count(number, slice.counted_bytes());
            if !SLIP {
                self.directory.set_slice(l1_index, index, Some(slice.clone()));
            }
        }
        if"#,
        )],
    },
];
