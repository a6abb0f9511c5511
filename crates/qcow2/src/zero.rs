// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Zero writes and discards of whole clusters and subclusters: edits without data I/O.

use crate::engine::{Edit, Engine, Purpose, State};
use crate::stall::{Planned, Stall};
use cowshed_layout::qcow2::{Cluster, L1Entry, L2Entry, SubclusterBitmap};
use cowshed_types::{Error, GuestOffset, slip};
use std::ops::Range;

/// Most clusters edited in one critical section.
const MAX_CLUSTERS: u64 = 4096;

/// The purpose of [`Engine::zero`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZeroMode {
    /// The range reads as zeroes; its host clusters go back.
    Unmap,
    /// The range reads as zeroes; exclusive host clusters stay allocated underneath.
    Keep,
    /// A hint: the range reads as zeroes, also where the backing file would show, and its host clusters go back (or
    /// stay with `discard-no-unref`). A cluster for which the format has no such entry is left alone.
    Discard,
    /// As `Keep`, but only where the range holds no data: `Unsupported` elsewhere. The caller has seen that the layers
    /// beneath it read as zeroes.
    Blank,
}

impl Engine {
    /// Zeroes whole (sub)clusters: `guest` and `len` are multiples of [`Engine::zero_unit`], but for a `len` that ends
    /// with the disk. Returns the bytes done, at least 1. `Unsupported` where zeroes have to be written as data
    /// (version 2 with a backing file, a part of a compressed cluster).
    pub fn zero(&self, guest: GuestOffset, len: u64, mode: ZeroMode) -> Planned<u64> {
        let mut state = self.lock_state();
        let bits = self.geometry.cluster_bits();
        let first = self.guest_cluster(guest);
        let mut end = (self.guest_cluster(guest + (len - 1)) + 1).min(first + MAX_CLUSTERS);
        match state.inflight.first_in(first..end) {
            Some(locked) if locked == first && !slip!("zeroing_under_a_running_write") => return Err(Stall::Wait),
            Some(locked) if locked == first => {}
            Some(locked) => end = locked,
            None => {}
        }
        let l1_index = self.geometry.l1_index(guest) as usize;
        let range = guest.0..guest.0 + len;
        let has_zero_flag = self.config.format.version >= 3;
        let is_left_alone = match mode == ZeroMode::Discard {
            true => !has_zero_flag || !self.stands_on_another(),
            false => !has_zero_flag && !self.stands_on_another(),
        };
        if L1Entry(self.directory.l1(l1_index)).offset().0 == 0 && is_left_alone {
            let table_end = (l1_index as u64 + 1) << self.geometry.l2_coverage_bits();
            return Ok(table_end.min(range.end) - guest.0);
        }
        let edit = if mode == ZeroMode::Discard { Edit::Empty } else { Edit::Fill };
        self.own_table(&mut state, l1_index, edit)?;
        let table_end = ((first >> self.geometry.l2_bits()) + 1) << self.geometry.l2_bits();
        end = end.min(table_end);
        let mut lost = Vec::new();
        let mut done = guest.0;
        for cluster in first..end {
            match self.zero_cluster(&mut state, cluster, &range, mode, &mut lost) {
                Ok(()) => done = ((cluster + 1) << bits).min(range.end),
                Err(stall) if done == guest.0 => {
                    self.retire(&mut state, lost);
                    return Err(stall);
                }
                Err(stall) => {
                    self.withdraw(&mut state, &stall);
                    break;
                }
            }
        }
        self.retire(&mut state, lost);
        Ok(done - guest.0)
    }

    /// The unit of [`Engine::zero`] in bytes: the subcluster size, which is the cluster size without extended L2.
    pub fn zero_unit(&self) -> u64 {
        self.geometry.subcluster_size()
    }

    /// True when the image has a backing file, or its header names one. Its length doesn't matter: it may grow.
    pub fn stands_on_another(&self) -> bool {
        self.backing_size().is_some() || self.config.names_backing
    }

    fn zero_cluster(
        &self,
        state: &mut State,
        cluster: u64,
        range: &Range<u64>,
        mode: ZeroMode,
        lost: &mut Vec<u64>,
    ) -> Planned<()> {
        let (mut slice, number, word) = self.entry_slice(state, cluster)?;
        let old = self.entry_of(&slice, word);
        let guest = cluster << self.geometry.cluster_bits();
        let zeroed = match self.geometry.extended_l2() {
            true => self.zeroed_extended(guest, old, range, mode),
            false => self.zeroed_standard(L2Entry(old.0), mode).map(|entry| (entry.0, 0)),
        };
        let new = match zeroed {
            Ok(new) => new,
            Err(error) => match (self.unaligned_host(L2Entry(old.0)), self.zeroed_damage(guest, old, range, mode)) {
                (Some(host), Some(new)) => {
                    self.tolerate(error, host);
                    self.edit_entry(state, number, &mut slice, word, new);
                    return Ok(());
                }
                _ => {
                    let at = GuestOffset(range.start.max(guest));
                    return Err(self.entry_damage(error, at, L2Entry(old.0), Purpose::Read).into());
                }
            },
        };
        if new == old {
            return Ok(());
        }
        self.refuse_overlap(state, L2Entry(old.0))?;
        if L2Entry(new.0).offset() != L2Entry(old.0).offset() || L2Entry(old.0).is_compressed() {
            self.references_of(L2Entry(old.0), lost);
        }
        self.edit_entry(state, number, &mut slice, word, new);
        Ok(())
    }

    /// The new entry for one with an impossible host offset, when its whole cluster is given up. `None`: the entry
    /// stays.
    fn zeroed_damage(&self, guest: u64, old: (u64, u64), range: &Range<u64>, mode: ZeroMode) -> Option<(u64, u64)> {
        let is_whole = range.start <= guest && range.end >= (guest + self.geometry.cluster_size()).min(self.size());
        let is_known = SubclusterBitmap(old.1).is_valid();
        match (self.geometry.extended_l2(), self.config.format.version >= 3) {
            _ if !is_whole || mode == ZeroMode::Blank => None,
            (true, _) => is_known.then_some((0, SubclusterBitmap::ALL_ZERO.0)),
            (false, true) => Some((L2Entry::ZERO_PLAIN.0, 0)),
            (false, false) => (!self.stands_on_another()).then_some((L2Entry::UNALLOCATED.0, 0)),
        }
    }

    fn zeroed_standard(&self, old: L2Entry, mode: ZeroMode) -> Result<L2Entry, Error> {
        let has_zero_flag = self.config.format.version >= 3;
        let cluster = old.cluster(self.config.format)?;
        let is_discard = mode == ZeroMode::Discard;
        let keeps = matches!(mode, ZeroMode::Keep | ZeroMode::Blank) || (is_discard && self.discard_no_unref());
        let stands_alone = !self.stands_on_another();
        Ok(match cluster {
            Cluster::Data { .. } | Cluster::Compressed(_) if mode == ZeroMode::Blank => return Err(holds_data()),
            // A zero write is recorded where the format can: another backing file may come later, or this one grow.
            Cluster::Unallocated if is_discard && (stands_alone || !has_zero_flag) => old,
            Cluster::Zero { host: None } => old,
            Cluster::Zero { host: Some(_) } if keeps => old,
            Cluster::Data { host } if keeps && has_zero_flag && self.is_exclusive(old) => {
                L2Entry::zero_allocated(host, true)
            }
            _ if has_zero_flag && is_discard && slip!("discard_shows_the_backing_file") => L2Entry::UNALLOCATED,
            _ if has_zero_flag => L2Entry::ZERO_PLAIN,
            _ if stands_alone => L2Entry::UNALLOCATED,
            // A hint: without it the data of a backing file would show.
            _ if is_discard => old,
            _ => return Err(Error::unsupported("version 2 of the format has no zero clusters")),
        })
    }

    fn zeroed_extended(
        &self,
        guest: u64,
        old: (u64, u64),
        range: &Range<u64>,
        mode: ZeroMode,
    ) -> Result<(u64, u64), Error> {
        let entry = L2Entry(old.0);
        let cluster = entry.cluster(self.config.format)?;
        let is_discard = mode == ZeroMode::Discard;
        let size = self.geometry.subcluster_size();
        let from = (range.start.max(guest) - guest) / size;
        let to = (range.end.min(guest + self.geometry.cluster_size()) - guest).div_ceil(size);
        let touched = from as u32..to as u32;
        let is_whole = touched == (0..32);
        let keeps = matches!(mode, ZeroMode::Keep | ZeroMode::Blank) || (is_discard && self.discard_no_unref());
        if matches!(cluster, Cluster::Compressed(_)) {
            return match (is_whole && mode != ZeroMode::Blank, is_discard) {
                (true, _) => Ok((0, SubclusterBitmap::ALL_ZERO.0)),
                (false, true) => Ok(old),
                (false, false) => Err(Error::unsupported("part of a compressed cluster can't be marked as zero")),
            };
        }
        let bitmap = SubclusterBitmap(old.1);
        let mask = SubclusterBitmap::mask(touched);
        if mode == ZeroMode::Blank && bitmap.data_mask() & mask != 0 {
            return Err(holds_data());
        }
        // Where nothing lies beneath, a discard leaves ranges without data alone.
        let mask = match is_discard && !self.stands_on_another() {
            true => mask & (bitmap.data_mask() | bitmap.zero_mask()),
            false => mask,
        };
        let bitmap = SubclusterBitmap::from_masks(bitmap.data_mask() & !mask, bitmap.zero_mask() | mask);
        if is_whole && matches!(cluster, Cluster::Data { .. }) && !(keeps && self.is_exclusive(entry)) {
            return Ok((0, bitmap.0));
        }
        Ok((old.0, bitmap.0))
    }
}

fn holds_data() -> Error {
    Error::unsupported("the rest of the cluster holds data")
}
