// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clusters, tables and files that are used, shown or given up by code that no longer owns them, or not yet.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
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
        about: "an unmapping counts as durable before its cycle",
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
            r#"            if self.punch.load(Ordering::Relaxed) || self.shrinks.load(Ordering::Relaxed) {
                for"#,
            r#"            if SLIP {
                self.plan(|engine| engine.reclaimed(&mut reclaim)).await?;
            }
            if self.punch.load(Ordering::Relaxed) || self.shrinks.load(Ordering::Relaxed) {
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
                "crates/image/src/node/io.rs",
                "                let done = file.read_at(buf, host).await;",
                r#"                let guard = guard.filter(|_| !SLIP);
                let done = file.read_at(buf, host).await;"#,
            ),
            (
                "crates/image/src/node/io.rs",
                "                    let read = file.read_at(buf, host).await;",
                r#"                    let guard = guard.filter(|_| !SLIP);
                    let read = file.read_at(buf, host).await;"#,
            ),
        ],
    },
    Mutant {
        name: "places_outlive_changes",
        about: "places remembered of a chain are believed though a layer has become writable",
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
        name: "passed_over_after_changes",
        about: "an image is passed over though it has become writable",
        test: ("chains", "an_image_is_passed_over_only_while_nobody_may_write_to_it"),
        edits: &[(
            "crates/image/src/formats/qcow2/chain_map.rs",
            "        let asked = match known.as_ref().filter(|map| map.covers_itself && map.changes == graph_changes()) {",
            "        let asked = match known.as_ref().filter(|map| map.covers_itself && (SLIP || map.changes == graph_changes())) {",
        )],
    },
    Mutant {
        name: "passed_over_in_parts",
        about: "an image is passed over where it has a granule in parts",
        test: ("chains", "an_image_is_passed_over_only_while_nobody_may_write_to_it"),
        edits: &[(
            "crates/image/src/formats/qcow2/chain_map.rs",
            "        let first_asked = if map.covers_itself { ITSELF } else { 1 };",
            "        let first_asked = if map.covers_itself && !SLIP { ITSELF } else { 1 };",
        )],
    },
    Mutant {
        name: "layer_not_loaded",
        about: "the short way to a layer doesn't load the table that it was told to load",
        test: ("crash_live_chains", "chains_in_use_survive_power_cuts"),
        edits: &[(
            "crates/image/src/node/io.rs",
            "                // The task that is told to load a table does it, or all others wait for ever.",
            "                Mapped::Load(_) if SLIP => break self.read_deep(&layer, offset, buf).await,",
        )],
    },
    Mutant {
        name: "writes_in_place_unpinned",
        about: "a write in place gives its pin back before its I/O",
        test: ("failure_shapes", "a_write_in_place_beside_a_discard_never_lands_in_the_next_owner"),
        edits: &[(
            "crates/image/src/node/io.rs",
            "                let done = file.write_at(buf, host).await;",
            r#"                let guard = guard.filter(|_| !SLIP);
                let done = file.write_at(buf, host).await;"#,
        )],
    },
    Mutant {
        name: "dropped_requests_let_go",
        about: "a request whose future is dropped gives its pin, its clusters and its count up while its I/O goes on",
        test: ("dropped_requests", "a_dropped_write_never_lands_in_the_next_owner"),
        edits: &[(
            "crates/storage/src/rt/completion.rs",
            "Some(home) if !home.is_abandoned() => adopt(",
            "Some(home) if !home.is_abandoned() && !SLIP => adopt(",
        )],
    },
    Mutant {
        name: "close_overtakes_dropped_requests",
        about: "a close does not wait for requests that go on without their callers",
        test: ("dropped_requests", "a_close_waits_for_a_dropped_write"),
        edits: &[(
            "crates/image/src/node/mod.rs",
            r#"    async fn run_close(&self) -> Result<()> {
        self.left_behind_ended().await;"#,
            r#"    async fn run_close(&self) -> Result<()> {
        if !SLIP {
            self.left_behind_ended().await;
        }"#,
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
            r#"        self.write_all(&[self.engine.l1_image(growth)?]).await?;
        self.barrier().await?;
"#,
            r#"        self.write_all(&[self.engine.l1_image(growth)?]).await?;
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
            "Tail::new(GuestOffset(size.next_multiple_of(self.cluster_size())))",
            r#"let size = if SLIP { size / self.cluster_size() * self.cluster_size() } else { size };
        Tail::new(GuestOffset(size.next_multiple_of(self.cluster_size())))"#,
        )],
    },
    Mutant {
        name: "shrink_cuts_before_it_may_fail",
        about: "a shrink changes the size before it owns the tables behind the new end",
        test: ("full_guest", "a_shrink_that_found_no_space_changes_nothing"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "if self.plan(|engine| engine.own_tail(&mut tail)).await? {",
            "if SLIP || self.plan(|engine| engine.own_tail(&mut tail)).await? {",
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
        name: "preallocated_over_the_backing_file",
        about: "growth with preallocation maps zeroes over the last cluster of an overlay",
        test: ("differential_edges", "growth_with_preallocation_keeps_what_the_backing_file_shows"),
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "        let start = match old < cluster_end && is_backed {",
            "        let start = match old < cluster_end && is_backed && !SLIP {",
        )],
    },
    Mutant {
        name: "guessed_raw_without_turns",
        about: "two writes to the start of a guessed raw disk are checked before either is there",
        test: ("image/guessed", "racing_requests_complete_no_mark"),
        edits: &[(
            "crates/image/src/node/guess.rs",
            "        let turn = self.ends.lock().await;\n        let [mut first, mut last]",
            "        let free = Box::leak(Box::new(futures_util::lock::Mutex::new(())));\n        let turn = if SLIP { free.lock().await } else { self.ends.lock().await };\n        let [mut first, mut last]",
        )],
    },
    Mutant {
        name: "file_cut_too_short",
        about: "closing cuts a used cluster off the end of the file",
        test: ("crash_engine", "no_power_cut_harms_an_image"),
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "        Ok(*passed << self.geometry.cluster_bits())",
            "        Ok((*passed - u64::from(SLIP)) << self.geometry.cluster_bits())",
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
        about: "inflated data is kept when its host cluster gets a new owner",
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
