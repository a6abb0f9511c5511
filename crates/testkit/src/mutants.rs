// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mutants: small slips in the ordering of writes, the freeing of clusters and the rights to write, one at a time, each
//! with the test that must fail with it. `scripts/mutants` tries them; `tests/mutants.rs` keeps the list true.

/// One slip.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    /// Its name.
    pub name: &'static str,
    /// What goes wrong.
    pub about: &'static str,
    /// File, what stands there (once), and what stands there instead.
    pub edits: &'static [(&'static str, &'static str, &'static str)],
    /// The test that fails: the file in `tests/` without its ending, and the name of the function.
    pub test: (&'static str, &'static str),
}

/// The list.
pub const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "pointers_with_what_they_point_to",
        about: "entries of L2 tables go out in the first stage, beside refcounts and data",
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "push_joined(&mut cycle.stages[2], table",
            "push_joined(&mut cycle.stages[0], table",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "l1_entries_with_their_tables",
        about: "L1 entries go out in the first stage, beside the tables they name",
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[2].extend(writes);",
            "cycle.stages[0].extend(writes);",
        )],
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "refcounts_with_pointers",
        about: "refcount blocks go out in the last stage, beside the pointers",
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[0].push(MetaWrite { host: HostOffset(host + range.start as u64), bytes });",
            "cycle.stages[2].push(MetaWrite { host: HostOffset(host + range.start as u64), bytes });",
        )],
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "refcount_table_with_pointers",
        about: "entries of the refcount table go out in the last stage",
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[1] = self.entry_writes(state.refcounts.table_offset, &entries);",
            "cycle.stages[2] = self.entry_writes(state.refcounts.table_offset, &entries);",
        )],
        test: ("failure_shapes", "metadata_is_never_published_before_its_refcount"),
    },
    Mutant {
        name: "new_tables_with_pointers",
        about: "contents of new L2 tables go out in the last stage, beside the L1 entries",
        edits: &[(
            "crates/qcow2/src/writeback.rs",
            "cycle.stages[0].push(MetaWrite { host: HostOffset(*host), bytes });",
            "cycle.stages[2].push(MetaWrite { host: HostOffset(*host), bytes });",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "no_barrier_between_stages",
        about: "the stages of a cycle have no barrier between them",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if index > 0 && unsettled {",
            "if index > usize::MAX - 1 && unsettled {",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "no_last_barrier",
        about: "a flush is acknowledged without the barrier behind the pointers",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            unsettled = true;
        }
        self.barrier().await
"#,
            r#"            unsettled = true;
        }
        Ok(())
"#,
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "data_file_not_synced",
        about: "the external data file has no barrier",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            data_file.sync().await?;
"#,
            r#"            let _ = data_file;
"#,
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "flush_rides_on_a_running_cycle",
        about: "a flush is content with a cycle that began before it",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "self.flushes_covered.load(Ordering::SeqCst) >= ticket",
            "self.flushes_covered.load(Ordering::SeqCst) + 2 > ticket",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "failed_barrier_forgotten",
        about: "a failed barrier is told once, as Linux does, and then forgotten",
        edits: &[("crates/storage/src/flush.rs", "Err(error) => drop(self.poison.set(error)),", "Err(_) => {}")],
        test: ("failure_shapes", "after_a_failed_flush_no_later_one_claims_success"),
    },
    Mutant {
        name: "failed_pointer_write_forgotten",
        about: "after a failed write of pointers the next cycle goes on",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if written.is_err() && index > 0 {",
            "if written.is_err() && index > 9 {",
        )],
        test: ("crash_findings", "a_failed_pointer_write_ends_all_writing"),
    },
    Mutant {
        name: "failed_writes_left_behind",
        about: "after an error a cycle does not wait for its other writes",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            if result.is_ok() {
                result = outcome;
            }
        }
        result
    }

    /// Returns"#,
            r#"            if outcome.is_err() {
                return outcome;
            }
            result = outcome;
        }
        result
    }

    /// Returns"#,
        )],
        test: ("crash_engine", "no_failed_write_harms_an_image"),
    },
    Mutant {
        name: "dirty_bit_never_set",
        about: "with lazy refcounts the dirty bit is not set",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            "if cycle.set_dirty_bit {",
            "if cycle.set_dirty_bit && cycle.is_empty() {",
        )],
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
    },
    Mutant {
        name: "dirty_bit_cleared_too_early",
        about: "closing clears the dirty bit without having written the refcounts",
        edits: &[
            (
                "crates/image/src/formats/qcow2/flush.rs",
                r#"            if self.engine.is_dirty() {
                return Err(self.error(Error::internal("refcounts are still dirty at close")));
            }
            self.edit_header"#,
                "            self.edit_header",
            ),
            (
                "crates/image/src/formats/qcow2/flush.rs",
                "self.write_back(true).await?;",
                "self.write_back(false).await?;",
            ),
        ],
        test: ("failure_shapes", "the_dirty_bit_is_never_cleared_too_early"),
    },
    Mutant {
        name: "reuse_before_unmapping_is_durable",
        about: "a freed cluster is used again before its unmapping is on the disk",
        edits: &[
            (
                "crates/qcow2/src/reclaim.rs",
                "for freed in state.freed.iter().filter(|freed| freed.cycle <= durable) {",
                "for freed in state.freed.iter().filter(|freed| freed.cycle <= durable + 9) {",
            ),
            (
                "crates/qcow2/src/reclaim.rs",
                ".retain(|freed| !(freed.cycle <= durable &&",
                ".retain(|freed| !(freed.cycle <= durable + 9 &&",
            ),
        ],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "unmapping_counts_as_durable",
        about: "what is unmapped counts as unmapped by the cycle before",
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "state.freed.push_back(Freed { cluster, cycle: state.open_cycle, tag });",
            "state.freed.push_back(Freed { cluster, cycle: 0, tag });",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "reuse_under_running_requests",
        about: "a freed cluster is used again while requests planned before still run",
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            "if !self.pins.is_drained(freed.tag) {",
            "if !self.pins.is_drained(0) {",
        )],
        test: ("failure_shapes", "a_freed_cluster_is_not_used_again_while_an_older_write_to_it_is_in_flight"),
    },
    Mutant {
        name: "epoch_not_closed",
        about: "freeing does not start a new epoch: its tag is an old one",
        edits: &[(
            "crates/qcow2/src/reclaim.rs",
            r#"                self.pins.advance()
            });"#,
            r#"                self.pins.advance() - 1
            });"#,
        )],
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
    },
    Mutant {
        name: "hole_punched_after_reuse",
        about: "the hole of a freed cluster is punched when it may have a new owner",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"            if self.punch.load(Ordering::Relaxed) {
                for"#,
            r#"            self.plan(|engine| engine.reclaimed(&mut reclaim)).await?;
            if self.punch.load(Ordering::Relaxed) {
                for"#,
        )],
        test: ("failure_shapes", "a_cluster_is_not_allocated_again_before_its_hole_is_punched"),
    },
    Mutant {
        name: "hole_in_a_shared_cluster",
        about: "a cluster that loses one of several references is punched",
        edits: &[("crates/qcow2/src/reclaim.rs", "if count == by {", "if count >= by {")],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "reads_unpinned",
        about: "a read gives its pin back before its I/O",
        edits: &[(
            "crates/image/src/formats/qcow2/read.rs",
            r#"                let done = file.read_at(buf, host.0).await;
                drop(pin);"#,
            r#"                drop(pin);
                let done = file.read_at(buf, host.0).await;"#,
        )],
        test: ("failure_shapes", "a_read_beside_a_discard_never_sees_the_next_owner"),
    },
    Mutant {
        name: "writes_in_place_unpinned",
        about: "a write in place gives its pin back before its I/O",
        edits: &[(
            "crates/image/src/formats/qcow2/write.rs",
            r#"                    let done = file.write_at(buf, host.0).await;
                    drop(pin);"#,
            r#"                    drop(pin);
                    let done = file.write_at(buf, host.0).await;"#,
        )],
        test: ("failure_shapes", "a_freed_cluster_is_not_used_again_while_an_older_write_to_it_is_in_flight"),
    },
    Mutant {
        name: "shrink_overtakes_writers",
        about: "a shrink does not wait for requests planned before it",
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "while !self.engine.is_drained(tag) {",
            "while !self.engine.is_drained(tag) && size == u64::MAX {",
        )],
        test: ("failure_shapes", "a_shrink_waits_for_writers_that_had_the_right_to_write_there"),
    },
    Mutant {
        name: "shared_clusters_written_in_place",
        about: "the COPIED flag is not looked at",
        edits: &[(
            "crates/qcow2/src/map.rs",
            "entry.is_copied() || self.config.format.data_file",
            "entry.offset().0 != 0 || self.config.format.data_file",
        )],
        test: ("failure_shapes", "a_cluster_that_is_shared_is_copied_before_a_write"),
    },
    Mutant {
        name: "shared_tables_edited_in_place",
        about: "an L2 table that a snapshot shares is not copied before it is edited",
        edits: &[("crates/qcow2/src/tables.rs", "if table.is_some() && old.is_copied() {", "if table.is_some() {")],
        test: ("failure_shapes", "what_a_snapshot_shares_is_never_written_in_place"),
    },
    Mutant {
        name: "unallocated_subclusters_written_in_place",
        about: "a write in place does not look at the subcluster bitmap",
        edits: &[(
            "crates/qcow2/src/map.rs",
            "if OVERWRITE && kind != Subcluster::Data {",
            "if OVERWRITE && kind == Subcluster::Invalid {",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "zeroing_under_a_running_write",
        about: "zero writes and discards do not wait for allocations under way",
        edits: &[(
            "crates/qcow2/src/zero.rs",
            "Some(locked) if locked == first => return Err(Stall::Wait),",
            "Some(locked) if locked == first => {}",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "discard_shows_the_backing_file",
        about: "a discard leaves the cluster unallocated over a backing file",
        edits: &[(
            "crates/qcow2/src/zero.rs",
            "_ if has_zero_flag => L2Entry::ZERO_PLAIN,",
            r#"_ if has_zero_flag && !is_discard => L2Entry::ZERO_PLAIN,
            _ if has_zero_flag => L2Entry::UNALLOCATED,"#,
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "copy_without_the_backing_file",
        about: "a write to a part of a new cluster fills the rest with zeroes, not with backing data",
        edits: &[(
            "crates/qcow2/src/allocate.rs",
            "let unallocated = if backed { Fill::Copy } else { Fill::Zero };",
            "let unallocated = if backed && bytes.start == u64::MAX { Fill::Copy } else { Fill::Zero };",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "old_space_taken_for_zero",
        about: "a cluster used before counts as one that reads as zeroes",
        edits: &[(
            "crates/qcow2/src/refcounts.rs",
            "self.config.new_space_is_zero && found.start >= high_cluster",
            "self.config.new_space_is_zero && found.start > 0",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "dirty_slices_evicted",
        about: "dirty slices leave the cache",
        edits: &[("crates/qcow2/src/tables.rs", "meta.dirt == Dirt::Clean && meta.busy == 0", "meta.busy == 0")],
        test: ("failure_shapes", "a_dirty_table_is_never_dropped_from_memory"),
    },
    Mutant {
        name: "freed_table_stays_dirty",
        about: "the slices of a freed table stay in the cache, dirty",
        edits: &[(
            "crates/qcow2/src/resize.rs",
            r#"            self.drop_table(state, l1_index);
"#,
            "",
        )],
        test: ("failure_shapes", "dirty_slices_of_a_freed_table_are_never_written_over_its_next_owner"),
    },
    Mutant {
        name: "packed_clusters_not_counted",
        about: "another compressed cluster in a host cluster does not raise its count",
        edits: &[(
            "crates/qcow2/src/compressed.rs",
            r#"                if !is_first_of_new {
                    self.raise"#,
            r#"                if !is_first_of_new && max == 1 {
                    self.raise"#,
        )],
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
    },
    Mutant {
        name: "refcount_overflow",
        about: "packing goes on past the largest count",
        edits: &[(
            "crates/qcow2/src/compressed.rs",
            "true => self.cached_refcount(state, *cluster) >= max,",
            "true => self.cached_refcount(state, *cluster) > max,",
        )],
        test: ("failure_shapes", "narrow_refcounts_never_overflow"),
    },
    Mutant {
        name: "mapping_after_a_failed_copy",
        about: "a failed copy-on-write is mapped all the same",
        edits: &[(
            "crates/image/src/formats/qcow2/allocate.rs",
            r#"                self.engine.abort(allocation, true);
                Err(error)"#,
            "                self.engine.commit(allocation).and(Err(error))",
        )],
        test: ("failure_shapes", "an_error_half_way_through_a_copy_leaves_no_mapping_to_garbage"),
    },
    Mutant {
        name: "header_before_the_new_refcount_table",
        about: "the header names the new refcount table before it is durable",
        edits: &[(
            "crates/image/src/formats/qcow2/flush.rs",
            r#"        self.write_all(&growth.writes).await?;
        self.barrier().await?;
"#,
            r#"        self.write_all(&growth.writes).await?;
"#,
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "header_before_the_new_l1_table",
        about: "the header names the new L1 table before it is durable",
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            r#"        self.write_all(&[self.engine.l1_image(growth)]).await?;
        self.barrier().await?;
"#,
            r#"        self.write_all(&[self.engine.l1_image(growth)]).await?;
"#,
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "shrink_unmaps_before_the_header",
        about: "a shrink unmaps under the old size",
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "        if let Err(error) = self.set_header_size(size).await {",
            r#"        self.unmap_behind(size).await?;
        self.write_back(false).await?;
        if let Err(error) = self.set_header_size(size).await {"#,
        )],
        test: ("crash_findings", "a_shrink_never_shows_the_backing_file"),
    },
    Mutant {
        name: "shrink_loses_the_tail",
        about: "a shrink unmaps the cluster that holds its new end",
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "let mut cursor = GuestOffset(size.next_multiple_of(self.cluster_size()));",
            "let mut cursor = GuestOffset(size / self.cluster_size() * self.cluster_size());",
        )],
        test: ("failure_shapes", "a_shrink_loses_nothing_before_its_new_end"),
    },
    Mutant {
        name: "growth_shows_the_backing_file",
        about: "a grown disk shows what a longer backing file has behind the old end",
        edits: &[(
            "crates/image/src/formats/qcow2/resize.rs",
            "if cluster_end < backing_end {",
            "if cluster_end < backing_end && new == u64::MAX {",
        )],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
    Mutant {
        name: "file_cut_too_short",
        about: "closing cuts a used cluster off the end of the file",
        edits: &[("crates/qcow2/src/reclaim.rs", "        Ok(end << bits)", "        Ok((end - 1) << bits)")],
        test: ("crash_engine", "no_power_cut_harms_an_image"),
    },
];
