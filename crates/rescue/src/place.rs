// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The sources of a guest cluster's parts, as the L2 entry of a damaged image gives them.

use crate::{Doubt, Loss};
use cowshed_layout::qcow2::{CompressedDescriptor, Geometry, L2Entry, Subcluster, SubclusterBitmap};
use std::ops::Range;

/// The properties of an image that decide how entries are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryRules {
    pub geometry: Geometry,
    pub version: u32,
    /// Guest data are in an external data file.
    pub data_file: bool,
    /// Bytes of the image file.
    pub file_len: u64,
    /// Bytes of the file with the guest's data; 0 when it is missing.
    pub data_len: u64,
}

/// The source of the bytes of a part of a guest cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The backing file, or zeroes without one.
    Unallocated,
    /// Zeroes.
    Zero,
    /// Plain data at a host offset.
    Data { host: u64 },
    /// Compressed data of the whole cluster.
    Compressed(CompressedDescriptor),
    /// Nowhere.
    Lost(Loss),
}

/// The parts of a guest cluster, in order and without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Places {
    pub parts: Vec<(Range<u64>, Source)>,
    pub doubt: Option<Doubt>,
}

impl Places {
    fn whole(shape: &EntryRules, source: Source, doubt: Option<Doubt>) -> Self {
        let len = shape.geometry.cluster_size();
        Places { parts: std::iter::once((0..len, source)).collect(), doubt }
    }
}

/// Reads an entry; `bitmap` with extended entries.
pub(super) fn places(shape: &EntryRules, raw: u64, bitmap: Option<u64>) -> Places {
    let entry = L2Entry(raw);
    if let Some(descriptor) = entry.compressed_descriptor(shape.geometry.cluster_bits()) {
        return Places::whole(shape, compressed(shape, descriptor), None);
    }
    let offset = entry.offset().0;
    let allocated = offset != 0 || (shape.data_file && entry.is_copied());
    let flawed = entry.reserved_bits() != 0 || (shape.version < 3 && entry.is_zero());
    let doubt = flawed.then_some(Doubt::ReservedBits);
    if let Some(bitmap) = bitmap {
        return subclusters(shape, offset, allocated, SubclusterBitmap(bitmap), doubt);
    }
    if shape.version >= 3 && entry.is_zero() {
        return Places::whole(shape, Source::Zero, doubt);
    }
    if !allocated {
        return Places::whole(shape, Source::Unallocated, doubt);
    }
    let doubt = doubt.or_else(|| tail_doubt(shape, offset, shape.geometry.cluster_size()));
    Places::whole(shape, data(shape, offset, 0), doubt)
}

fn compressed(shape: &EntryRules, descriptor: CompressedDescriptor) -> Source {
    if shape.data_file {
        return Source::Lost(Loss::CompressedInDataFile);
    }
    let len = descriptor.len_max();
    let end = descriptor.host_offset.0.checked_add(len);
    // The last sector of the file need not be complete.
    if end.is_none_or(|end| end > shape.file_len.next_multiple_of(shape.geometry.cluster_size())) {
        return Source::Lost(Loss::PastEnd);
    }
    Source::Compressed(descriptor)
}

fn data(shape: &EntryRules, offset: u64, within: u64) -> Source {
    if shape.geometry.in_cluster(offset) != 0 {
        return Source::Lost(Loss::Unaligned);
    }
    if shape.data_file && shape.data_len == 0 {
        return Source::Lost(Loss::DataFileMissing);
    }
    if offset >= shape.data_len {
        return Source::Lost(Loss::PastEnd);
    }
    if offset == 0 && !shape.data_file {
        return Source::Lost(Loss::Unaligned);
    }
    Source::Data { host: offset + within }
}

/// A whole image doesn't end inside of data; one that was cut off may.
fn tail_doubt(shape: &EntryRules, offset: u64, end: u64) -> Option<Doubt> {
    let end = offset.saturating_add(end);
    (!shape.data_file && offset < shape.data_len && end > shape.data_len).then_some(Doubt::FileEndsInside)
}

fn subclusters(
    shape: &EntryRules,
    offset: u64,
    allocated: bool,
    bitmap: SubclusterBitmap,
    mut doubt: Option<Doubt>,
) -> Places {
    let subcluster_size = shape.geometry.cluster_size() / u64::from(shape.geometry.subclusters());
    let mut parts = Vec::new();
    let mut index = 0;
    while index < shape.geometry.subclusters() {
        let (state, count) = bitmap.run(index);
        let range = u64::from(index) * subcluster_size..u64::from(index + count) * subcluster_size;
        let source = match state {
            Subcluster::Unallocated => Source::Unallocated,
            Subcluster::Zero => Source::Zero,
            Subcluster::Data | Subcluster::Invalid if !allocated => Source::Lost(Loss::NoCluster),
            Subcluster::Data => {
                doubt = doubt.or_else(|| tail_doubt(shape, offset, range.end));
                data(shape, offset, range.start)
            }
            Subcluster::Invalid => {
                // The data are there; whether they count is unknown.
                doubt = Some(Doubt::SubclusterBitmap);
                data(shape, offset, range.start)
            }
        };
        parts.push((range, source));
        index += count;
    }
    Places { parts, doubt }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(extended: bool, version: u32) -> EntryRules {
        let geometry = Geometry::new(16, 4, extended).expect("a geometry");
        EntryRules { geometry, version, data_file: false, file_len: 0x10_8000, data_len: 0x10_8000 }
    }

    fn single(raw: u64) -> (Source, Option<Doubt>) {
        let places = places(&shape(false, 3), raw, None);
        assert_eq!(places.parts.len(), 1);
        (places.parts[0].1.clone(), places.doubt)
    }

    #[test]
    fn plain_entries() {
        assert_eq!(single(0), (Source::Unallocated, None));
        assert_eq!(single(1), (Source::Zero, None));
        assert_eq!(single(1 << 63 | 0x5_0000), (Source::Data { host: 0x5_0000 }, None));
        assert_eq!(single(0x5_0010), (Source::Data { host: 0x5_0000 }, Some(Doubt::ReservedBits)));
        assert_eq!(single(0x10_0000), (Source::Data { host: 0x10_0000 }, Some(Doubt::FileEndsInside)));
        assert_eq!(single(0x5_0200).0, Source::Lost(Loss::Unaligned));
        assert_eq!(single(0x11_0000).0, Source::Lost(Loss::PastEnd));
        assert_eq!(single(1 << 62 | 0x40_0000).0, Source::Lost(Loss::PastEnd));
        assert!(matches!(single(1 << 62 | 0x5_0123).0, Source::Compressed(_)));
    }

    #[test]
    fn subclusters_are_judged_one_by_one() {
        let places = places(&shape(true, 3), 0x5_0000, Some(1 << 33 | 1 << 1 | 1 | 1 << 35));
        let kinds: Vec<_> = places.parts.iter().map(|(range, source)| (range.start / 2048, source.clone())).collect();
        let data = |index: u64| Source::Data { host: 0x5_0000 + index * 2048 };
        let expected =
            [(0, data(0)), (1, data(1)), (2, Source::Unallocated), (3, Source::Zero), (4, Source::Unallocated)];
        assert_eq!(kinds, expected);
        assert_eq!(places.doubt, Some(Doubt::SubclusterBitmap));
        let lost = super::places(&shape(true, 3), 0, Some(1));
        assert_eq!(lost.parts[0], (0..2048, Source::Lost(Loss::NoCluster)));
    }
}
