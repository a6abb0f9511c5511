// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Giving up data that no repair brings back: entries whose data can't be reached become such that read as zeroes.
//!
//! They never read as the backing file, whose data is older than the lost ones.

use super::ScanContext;
use cowshed_layout::qcow2::{L1Entry, L2Entry, SubclusterBitmap};

/// The edits of a table's lost entries: (index of an 8-byte word, its new value). Version 2 has no zero clusters, so with
/// a backing file entries stay there as they are.
pub fn give_up_l2(context: &ScanContext, has_backing: bool, bytes: &[u8]) -> Vec<(usize, u64)> {
    if context.version < 3 && has_backing {
        return Vec::new();
    }
    let words = bytes.as_chunks::<8>().0;
    let number = |word: &[u8; 8]| u64::from_be_bytes(*word);
    let mut edits = Vec::new();
    if !context.geometry.extended_l2() {
        let zero = if context.version < 3 { L2Entry::UNALLOCATED } else { L2Entry::ZERO_PLAIN };
        let lost = words.iter().enumerate().filter(|(_, word)| is_lost(context, L2Entry(number(word))));
        edits.extend(lost.map(|(index, _)| (index, zero.0)));
        return edits;
    }
    for (pair, index) in words.as_chunks::<2>().0.iter().zip((0..).step_by(2)) {
        let (entry, bitmap) = (L2Entry(number(&pair[0])), SubclusterBitmap(number(&pair[1])));
        let (new_entry, new_bitmap) = without_loss(context, entry, bitmap);
        edits.extend((new_entry != entry).then_some((index, new_entry.0)));
        edits.extend((new_bitmap != bitmap).then_some((index + 1, new_bitmap.0)));
    }
    edits
}

/// An extended entry, and its replacement.
fn without_loss(context: &ScanContext, entry: L2Entry, bitmap: SubclusterBitmap) -> (L2Entry, SubclusterBitmap) {
    let (data, zero) = (bitmap.data_mask(), bitmap.zero_mask());
    if is_lost(context, entry) {
        let zeroes = if entry.is_compressed() { u32::MAX } else { zero | data };
        return (L2Entry::UNALLOCATED, SubclusterBitmap::from_masks(0, zeroes));
    }
    if entry.is_compressed() {
        return (entry, bitmap);
    }
    let allocated = entry.offset().0 != 0 || (context.data_file && entry.is_copied());
    let bitmap = match allocated {
        // Allocated and zero at once: the data are there, so nothing is lost when they are taken.
        true => SubclusterBitmap::from_masks(data, zero & !data),
        false => SubclusterBitmap::from_masks(0, zero | data),
    };
    (entry, bitmap)
}

/// True for an entry whose data are where none can be.
fn is_lost(context: &ScanContext, entry: L2Entry) -> bool {
    if let Some(descriptor) = entry.compressed_descriptor(context.geometry.cluster_bits()) {
        return context.data_file || context.is_past_end(descriptor.host_offset.0, descriptor.len_max());
    }
    let offset = entry.offset().0;
    if context.geometry.in_cluster(offset) != 0 {
        return true;
    }
    !context.data_file && offset != 0 && context.is_past_end(offset, context.geometry.cluster_size())
}

/// An L1 entry, without its table where none can be. With a backing file it stays: a table of zeroes is needed then.
pub fn give_up_l1(context: &ScanContext, has_backing: bool, entry: L1Entry) -> L1Entry {
    let offset = entry.offset().0;
    let lost = context.geometry.in_cluster(offset) != 0 || context.is_past_end(offset, context.geometry.cluster_size());
    if entry.is_allocated() && lost && !has_backing { L1Entry::UNALLOCATED } else { entry }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_layout::qcow2::Geometry;

    fn context(extended: bool, version: u32) -> ScanContext {
        let geometry = Geometry::new(16, 4, extended).expect("a geometry");
        ScanContext { geometry, version, data_file: false, data_file_raw: false, file_len: 1 << 20, first_pass: true }
    }

    fn table(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn what_can_be_reached_stays() {
        let good = [0, 1, 1 << 63 | 0xf_0000, 0x10_0000 - 0x1_0000, 1 << 62 | 0x5_0123];
        assert_eq!(give_up_l2(&context(false, 3), true, &table(&good)), []);
        let lost = [0x10_0000, 0x8200, 1 << 62 | 0x40_0000, 1 << 63 | 1 << 50];
        let edits: Vec<_> = (0..4).map(|index| (index, 1)).collect();
        assert_eq!(give_up_l2(&context(false, 3), true, &table(&lost)), edits);
    }

    #[test]
    fn version_2_keeps_lost_entries_above_a_backing_file() {
        assert_eq!(give_up_l2(&context(false, 2), true, &table(&[0x8200])), []);
        assert_eq!(give_up_l2(&context(false, 2), false, &table(&[0x8200])), [(0, 0)]);
    }

    #[test]
    fn subclusters_become_valid() {
        let words = [0x5_0000, 3 << 32 | 5, 0, 1 << 32 | 2, 0x100_0000, 1 << 34 | 3];
        let expected = [(1, 2 << 32 | 5), (3, 3 << 32), (4, 0), (5, 7 << 32)];
        assert_eq!(give_up_l2(&context(true, 3), true, &table(&words)), expected);
    }

    #[test]
    fn tables_are_given_up_without_a_backing_file_only() {
        let context = context(false, 3);
        for (entry, gone) in [(1 << 63 | 0x5_0000, false), (0x5_0200, true), (1 << 40, true), (0, false)] {
            let expected = if gone { L1Entry::UNALLOCATED } else { L1Entry(entry) };
            assert_eq!(give_up_l1(&context, false, L1Entry(entry)), expected);
            assert_eq!(give_up_l1(&context, true, L1Entry(entry)), L1Entry(entry));
        }
    }
}
