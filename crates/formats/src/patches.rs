// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of a file that are carried out in memory: a log that an opening for reading may not write to the file.

use super::mapped::RunSource;
use cowshed_layout::vhdx::{LogWrite, Replay};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The bytes that replace those of a range of the file.
#[derive(Clone, Debug)]
enum Patch {
    Zeroes,
    Bytes(Arc<Vec<u8>>),
}

/// Changes by where they begin: disjoint ranges, and whole ones, for all are in sectors of one length.
#[derive(Debug, Default)]
pub(crate) struct Patches {
    /// The end and the bytes of each, by its start.
    ranges: BTreeMap<u64, (u64, Patch)>,
    /// The file is to have this length at least.
    len: u64,
}

impl Patches {
    /// The changes of a log, the later ones over the earlier ones.
    pub(crate) fn of(replay: Replay) -> Patches {
        let mut patches = Patches { ranges: BTreeMap::new(), len: replay.last_bytes };
        for write in replay.writes {
            let range = write.range();
            patches.clear(range.start, range.end);
            let patch = match write {
                LogWrite::Zeroes(..) => Patch::Zeroes,
                LogWrite::Sector(_, bytes) => Patch::Bytes(Arc::new(bytes)),
            };
            patches.len = patches.len.max(range.end);
            patches.ranges.insert(range.start, (range.end, patch));
        }
        patches
    }

    /// Takes the patches of a range away.
    fn clear(&mut self, start: u64, end: u64) {
        let first = self.ranges.range(..start).next_back().filter(|(_, (known_end, _))| *known_end > start);
        let first = first.map_or(start, |(at, _)| *at);
        let inside: Vec<u64> = self.ranges.range(first..end).map(|(at, _)| *at).collect();
        for at in inside {
            let Some((known_end, patch)) = self.ranges.remove(&at) else { continue };
            if at < start {
                self.ranges.insert(at, (start, patch.clone()));
            }
            if known_end > end {
                self.ranges.insert(end, (known_end, patch));
            }
        }
    }

    /// The length that the file is to have at least.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Puts the changes into bytes that were read at `offset` of the file.
    pub(crate) fn apply(&self, offset: u64, bytes: &mut [u8]) {
        let end = offset + bytes.len() as u64;
        let before = self.ranges.range(..offset).next_back();
        for (at, (patch_end, patch)) in before.into_iter().chain(self.ranges.range(offset..end)) {
            let (from, to) = ((*at).max(offset), (*patch_end).min(end));
            if from >= to {
                continue;
            }
            let target = &mut bytes[(from - offset) as usize..(to - offset) as usize];
            match patch {
                Patch::Zeroes => target.fill(0),
                Patch::Bytes(patch) => {
                    let skip = (from - at) as usize;
                    if let Some(patch) = patch.get(skip..skip + target.len()) {
                        target.copy_from_slice(patch);
                    }
                }
            }
        }
    }

    /// The place of data at `host` of the file, byte `at` of the disk, and for how many of the `len` bytes it holds.
    /// Data that were changed are packed blocks of their own.
    pub(crate) fn place(&self, (host, at, len): (u64, u64, u64), file_len: u64) -> (RunSource, u64) {
        let before = self.ranges.range(..=host).next_back();
        match before {
            Some((start, (end, patch))) if *end > host => {
                let len = len.min(end - host);
                match patch {
                    Patch::Zeroes => (RunSource::Zero, len),
                    // No change begins before the block of the disk that it is in.
                    Patch::Bytes(_) => (RunSource::Packed { block: at - (host - start).min(at) }, len),
                }
            }
            _ => {
                let next = self.ranges.range(host..).next().map_or(u64::MAX, |(start, _)| *start);
                let len = len.min(next - host);
                match file_len.saturating_sub(host) {
                    0 => (RunSource::Zero, len),
                    there => (RunSource::Data { file: 0, host }, len.min(there)),
                }
            }
        }
    }

    /// The bytes of the change that begins at `host`.
    pub(crate) fn bytes_at(&self, host: u64) -> Option<Vec<u8>> {
        match self.ranges.get(&host) {
            Some((_, Patch::Bytes(bytes))) => Some(bytes.to_vec()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB4: u64 = 4096;

    fn patches(writes: Vec<LogWrite>) -> Patches {
        Patches::of(Replay { flushed_bytes: 0, last_bytes: 10 * KIB4, writes })
    }

    fn sector(at: u64, value: u8) -> LogWrite {
        LogWrite::Sector(at * KIB4, vec![value; KIB4 as usize])
    }

    #[test]
    fn later_changes_stand_over_earlier_ones() {
        let patches = patches(vec![
            LogWrite::Zeroes(KIB4, 5 * KIB4),
            sector(2, 7),
            sector(4, 8),
            sector(4, 9),
            LogWrite::Zeroes(5 * KIB4, KIB4),
            sector(11, 3),
        ]);
        assert_eq!(patches.len(), 12 * KIB4);
        let mut bytes = vec![1; 13 * KIB4 as usize];
        patches.apply(0, &mut bytes);
        let firsts: Vec<u8> = bytes.chunks(KIB4 as usize).map(|sector| sector[0]).collect();
        assert_eq!(firsts, [1, 0, 7, 0, 9, 0, 1, 1, 1, 1, 1, 3, 1]);
        let mut part = vec![1; 1024];
        patches.apply(2 * KIB4 + 3584, &mut part);
        assert_eq!((part[0], part[511], part[512]), (7, 7, 0));
        patches.apply(KIB4 - 512, &mut part);
        assert_eq!((part[511], part[512]), (7, 0));
    }

    #[test]
    fn places_go_as_far_as_one_change() {
        let patches = patches(vec![LogWrite::Zeroes(KIB4, KIB4), sector(2, 7)]);
        let place = |host: u64, len: u64| patches.place((host, host + 100 * KIB4, len), 6 * KIB4);
        assert_eq!(place(0, 9 * KIB4), (RunSource::Data { file: 0, host: 0 }, KIB4));
        assert_eq!(place(KIB4 + 512, 9 * KIB4), (RunSource::Zero, 3584));
        assert_eq!(place(2 * KIB4 + 512, 9 * KIB4), (RunSource::Packed { block: 102 * KIB4 }, 3584));
        assert_eq!(place(3 * KIB4, 9 * KIB4), (RunSource::Data { file: 0, host: 3 * KIB4 }, 3 * KIB4));
        assert_eq!(place(7 * KIB4, KIB4), (RunSource::Zero, KIB4));
        assert_eq!(patches.bytes_at(2 * KIB4), Some(vec![7; KIB4 as usize]));
        assert_eq!(patches.bytes_at(KIB4), None);
    }
}
