// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changing extensions and the backing file's name so that a power cut leaves the old header or the new one.
//!
//! The header's fixed fields are in the first sector, whose write is atomic; extensions and the name may reach beyond
//! it. So the part beyond is written first, to bytes that the old header doesn't use, and then the first sector.

use super::{Extension, Header, extension_type, offset};
use cowshed_types::Result;
use std::ops::Range;

/// Bytes of which a write is atomic.
const SECTOR_BYTES: usize = 512;

/// Type and length of an extension; the end mark is one without data.
const HEAD_BYTES: usize = 8;

/// Writes within the first cluster, as offset and bytes; a barrier belongs behind each stage.
pub type HeaderStages = Vec<Vec<(u64, Vec<u8>)>>;

/// The stages that turn `cluster`, the file's first cluster with the header `old`, into one with `new`, whose
/// `backing_file_offset` doesn't count. The change is a single write of several sectors only if the cluster can't hold
/// the old and the new of long names at once.
pub fn switch(cluster: &[u8], old: &Header, new: &Header) -> Result<HeaderStages> {
    // It comes again where it is needed.
    let mut new = new.clone();
    new.remove_extension(extension_type::PADDING);
    let new = &new;
    // It also refuses a header that doesn't fit.
    let whole = new.encode()?;
    let mut format_last = new.clone();
    format_last.extensions.sort_by_key(|extension| extension.kind() == extension_type::BACKING_FORMAT);
    for candidate in [new, &format_last] {
        if let Some(stages) = atomic(cluster, old, candidate)? {
            return Ok(stages);
        }
    }
    if let Some(stages) = without_names_between(cluster, old, new)? {
        return Ok(stages);
    }
    if let Some(stages) = long_ones_last(cluster, old, new)? {
        return Ok(stages);
    }
    let mut bytes = whole;
    let used = extensions_end(old)?.max(old_name(old).end).min(cluster.len());
    bytes.resize(bytes.len().max(used), 0);
    Ok(vec![vec![(0, bytes)]])
}

/// The part beyond the first sector is nearly always the feature name table, which is optional. So the header is
/// switched to one without it, and then to one that has it behind everything else.
fn without_names_between(cluster: &[u8], old: &Header, new: &Header) -> Result<Option<HeaderStages>> {
    let mut last = new.clone();
    last.extensions.sort_by_key(|extension| match extension.kind() {
        extension_type::FEATURE_NAMES => 3,
        extension_type::DATA_FILE => 2,
        extension_type::BACKING_FORMAT => 1,
        _ => 0,
    });
    let mut bare = last.clone();
    bare.remove_extension(extension_type::FEATURE_NAMES);
    let Some(mut stages) = atomic(cluster, old, &bare)? else { return Ok(None) };
    let mut between = cluster.to_vec();
    for (at, bytes) in stages.iter().flatten() {
        between[*at as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    let bare = Header::parse(&between)?;
    // Without room for it the table stays away.
    if let Some(second) = atomic(&between, &bare, &last)? {
        stages.extend(second);
    }
    Ok(Some(stages))
}

/// Short extensions that change often come first, within the first sector. A long one (the name of a data file) lies
/// beyond it and stays there: an extension without a meaning fills the gap.
fn long_ones_last(cluster: &[u8], old: &Header, new: &Header) -> Result<Option<HeaderStages>> {
    let is_short = |extension: &Extension| {
        let short = [
            extension_type::BACKING_FORMAT,
            extension_type::ENCRYPTION_HEADER,
            extension_type::BITMAPS,
            extension_type::BITMAP_JOURNAL,
        ];
        short.contains(&extension.kind())
    };
    let (short, long): (Vec<Extension>, Vec<Extension>) = new.extensions.iter().cloned().partition(is_short);
    let bytes = |extensions: &[Extension]| -> usize {
        extensions.iter().map(|extension| HEAD_BYTES + extension.data().len().next_multiple_of(8)).sum()
    };
    let (long_bytes, old_end) = (bytes(&long), extensions_end(old)?);
    let gap_at = extensions_end(new)? - HEAD_BYTES - long_bytes;
    let stays = old.extensions.ends_with(&long) && old_end - HEAD_BYTES - long_bytes >= SECTOR_BYTES;
    let place = match stays {
        true => Some(old_end - HEAD_BYTES - long_bytes),
        false => find_place(cluster.len(), long_bytes + HEAD_BYTES, &[&(0..old_end), &old_name(old)]),
    };
    let Some(place) = place.filter(|place| gap_at + HEAD_BYTES <= SECTOR_BYTES.min(*place)) else { return Ok(None) };
    // Bytes beyond the first sector stay as they are.
    let mut data = cluster[gap_at + HEAD_BYTES..place].to_vec();
    let within = (SECTOR_BYTES - gap_at - HEAD_BYTES).min(data.len());
    data[..within].fill(0);
    let padding = Extension::Unknown { kind: extension_type::PADDING, data };
    let extensions = short.into_iter().chain([padding]).chain(long).collect();
    atomic(cluster, old, &Header { extensions, ..new.clone() })
}

/// The stages with a single switch in the first sector, where the space allows it.
fn atomic(cluster: &[u8], old: &Header, new: &Header) -> Result<Option<HeaderStages>> {
    let mut body = Header { backing_file: None, ..new.clone() }.encode()?;
    let name = new.backing_file.as_deref().unwrap_or_default();
    let mut stages = Vec::new();
    let old_extensions = 0..extensions_end(old)?;
    let mut old_name = old_name(old);
    // New extensions beyond the first sector must not change bytes that the old header uses.
    let changed = |range: &Range<usize>| {
        (SECTOR_BYTES.max(range.start)..body.len().min(range.end)).any(|at| cluster.get(at) != body.get(at))
    };
    if changed(&old_extensions) {
        return Ok(None);
    }
    let overlaps = |a: &Range<usize>, b: &Range<usize>| a.start < b.end && b.start < a.end;
    let body_range = 0..body.len();
    if body.len() > SECTOR_BYTES && overlaps(&old_name, &body_range) && changed(&old_name) {
        // The old name is in the way: it moves first.
        let Some(place) = find_place(cluster.len(), old_name.len(), &[&body_range, &old_extensions, &old_name]) else {
            return Ok(None);
        };
        stages.push(vec![(place as u64, cluster[old_name.clone()].to_vec())]);
        stages.push(vec![(offset::BACKING_FILE_OFFSET, (place as u64).to_be_bytes().to_vec())]);
        old_name = place..place + old_name.len();
    }
    let mut beyond = Vec::new();
    if !name.is_empty() {
        let at = match body.len() + name.len() <= SECTOR_BYTES {
            true => Some(body.len()),
            false => find_place(cluster.len(), name.len(), &[&body_range, &old_extensions, &old_name]),
        };
        let Some(at) = at else { return Ok(None) };
        body[offset::BACKING_FILE_OFFSET as usize..][..8].copy_from_slice(&(at as u64).to_be_bytes());
        body[offset::BACKING_FILE_SIZE as usize..][..4].copy_from_slice(&(name.len() as u32).to_be_bytes());
        if at < SECTOR_BYTES {
            body.extend_from_slice(name);
        } else {
            beyond.push((at as u64, name.to_vec()));
        }
    }
    if body.len() > SECTOR_BYTES {
        beyond.push((SECTOR_BYTES as u64, body.split_off(SECTOR_BYTES)));
    }
    body.resize(SECTOR_BYTES, 0);
    let in_use: Vec<Range<usize>> = beyond.iter().map(|(at, bytes)| *at as usize..*at as usize + bytes.len()).collect();
    if !beyond.is_empty() {
        stages.push(beyond);
    }
    stages.push(vec![(0, body)]);
    let leftovers = leftovers(&[old_extensions, old_name], &in_use);
    if !leftovers.is_empty() {
        stages.push(leftovers.into_iter().map(|range| (range.start as u64, vec![0; range.len()])).collect());
    }
    Ok(Some(stages))
}

/// Where the header and its extensions end, the end mark included.
fn extensions_end(header: &Header) -> Result<usize> {
    Ok(Header { backing_file: None, ..header.clone() }.encode()?.len())
}

fn old_name(header: &Header) -> Range<usize> {
    let len = header.backing_file.as_ref().map_or(0, Vec::len);
    let start = header.backing_file_offset as usize;
    start..start + len
}

/// The first place beyond the first sector for `len` bytes that touches none of `taken`.
fn find_place(cluster_size: usize, len: usize, taken: &[&Range<usize>]) -> Option<usize> {
    let mut at = SECTOR_BYTES;
    while let Some(hit) = taken.iter().find(|range| !range.is_empty() && range.start < at + len && at < range.end) {
        at = hit.end.next_multiple_of(8);
    }
    (at + len <= cluster_size).then_some(at)
}

/// The parts of `old` beyond the first sector that aren't in `new`.
fn leftovers(old: &[Range<usize>], new: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut left: Vec<Range<usize>> = old.iter().map(|range| range.start.max(SECTOR_BYTES)..range.end).collect();
    for taken in new {
        left = left
            .into_iter()
            .flat_map(|range| [range.start..range.end.min(taken.start), range.start.max(taken.end)..range.end])
            .collect();
    }
    left.retain(|range| !range.is_empty());
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::Extension;
    use proptest::prelude::*;

    /// The new header as a reader finds it.
    fn parsed(cluster: &[u8]) -> Header {
        Header { backing_file_offset: 0, ..Header::parse(cluster).expect("a header") }
    }

    fn with_bitmaps(mut header: Header, bitmaps: Option<(u32, bool)>) -> Header {
        use crate::qcow2::features::{AUTOCLEAR_BITMAP_JOURNAL, AUTOCLEAR_BITMAPS};
        use crate::qcow2::{BitmapJournal, BitmapsExtension};
        let Some((number, journal)) = bitmaps else { return header };
        let directory_offset = u64::from(10 + number) << header.cluster_bits;
        let directory_size = u64::from(number + 1) * 32;
        let bitmaps = BitmapsExtension { nb_bitmaps: number + 1, reserved: 0, directory_size, directory_offset };
        header.set_extension(Extension::Bitmaps(bitmaps));
        header.autoclear_features |= AUTOCLEAR_BITMAPS;
        if journal {
            let entries = (0..number % 5).collect();
            header.set_extension(Extension::BitmapJournal(BitmapJournal { directory_offset, entries }));
            header.autoclear_features |= AUTOCLEAR_BITMAP_JOURNAL;
        }
        header
    }

    fn header(cluster_bits: u32, names: bool, backing: &Option<(usize, bool)>) -> Header {
        let mut header = Header::new(3, cluster_bits);
        header.l1_table_offset = 3 << cluster_bits;
        header.refcount_table_offset = 1 << cluster_bits;
        header.refcount_table_clusters = 1;
        if !names {
            header.extensions.clear();
        }
        if let Some((len, format)) = backing {
            header.backing_file = Some(vec![b'a' + (*len % 26) as u8; *len]);
            if *format {
                header.set_extension(Extension::BackingFormat(b"qcow2".to_vec()));
            }
        }
        header
    }

    /// Every state that the writes of one stage can leave, torn at sectors: here each sector of each write alone.
    fn check_stages(mut cluster: Vec<u8>, stages: &HeaderStages, old: &Header, new: &Header) {
        let good = |cluster: &[u8]| {
            let found = parsed(cluster);
            let is = |wanted: &Header| {
                let mut sorted = (found.clone(), Header { backing_file_offset: 0, ..wanted.clone() });
                for header in [&mut sorted.0, &mut sorted.1] {
                    header.extensions.sort_by_key(Extension::kind);
                    // A courtesy, which may be away for a moment.
                    header.remove_extension(extension_type::FEATURE_NAMES);
                    header.remove_extension(extension_type::PADDING);
                }
                sorted.0 == sorted.1
            };
            is(old) || is(new)
        };
        for stage in stages {
            for (at, bytes) in stage {
                for from in (0..bytes.len()).step_by(SECTOR_BYTES) {
                    let to = (from + SECTOR_BYTES).min(bytes.len());
                    let mut torn = cluster.clone();
                    torn[*at as usize + from..*at as usize + to].copy_from_slice(&bytes[from..to]);
                    assert!(good(&torn), "a torn header");
                }
            }
            for (at, bytes) in stage {
                cluster[*at as usize..][..bytes.len()].copy_from_slice(bytes);
            }
        }
        let mut found = parsed(&cluster);
        found.remove_extension(extension_type::PADDING);
        assert_eq!((&found.backing_file, found.backing_format()), (&new.backing_file, new.backing_format()));
        let mut new = new.clone();
        if new.extensions.iter().any(|extension| matches!(extension, Extension::DataFile(_))) {
            // Beside a long name there may be no room for the courtesy.
            found.remove_extension(extension_type::FEATURE_NAMES);
            new.remove_extension(extension_type::FEATURE_NAMES);
        }
        assert_eq!(found.extensions.len(), new.extensions.len());
    }

    proptest! {
        #[test]
        fn every_state_is_old_or_new(
            cluster_bits in 12u32..17,
            names in any::<bool>(),
            chain in proptest::collection::vec(proptest::option::of((1usize..1023, any::<bool>())), 2..6),
            bitmaps in proptest::collection::vec(proptest::option::of((0u32..9, any::<bool>())), 6),
        ) {
            let mut cluster = with_bitmaps(header(cluster_bits, names, &chain[0]), bitmaps[0]).encode().unwrap();
            cluster.resize(1 << cluster_bits, 0);
            for (next, bitmaps) in chain[1..].iter().zip(&bitmaps[1..]) {
                let old = Header::parse(&cluster).unwrap();
                let new = with_bitmaps(header(cluster_bits, names, next), *bitmaps);
                let stages = switch(&cluster, &old, &new).unwrap();
                check_stages(cluster.clone(), &stages, &old, &new);
                for (at, bytes) in stages.into_iter().flatten() {
                    cluster[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
    }

    proptest! {
        /// A name that fills the first sector alone: whatever else changes, no state is between old and new.
        #[test]
        fn long_names_of_data_files_block_no_switch(
            cluster_bits in 13u32..17,
            names in any::<bool>(),
            name_len in 1usize..1023,
            backing in proptest::option::of((1usize..1023, any::<bool>())),
            bitmaps in proptest::collection::vec(proptest::option::of((0u32..9, any::<bool>())), 2..8),
        ) {
            let with = |bitmaps| {
                let mut header = with_bitmaps(header(cluster_bits, names, &backing), bitmaps);
                header.incompatible_features |= crate::qcow2::features::INCOMPAT_DATA_FILE;
                header.set_extension(Extension::DataFile(vec![b'd'; name_len]));
                header
            };
            let mut cluster = with(bitmaps[0]).encode().unwrap();
            cluster.resize(1 << cluster_bits, 0);
            for bitmaps in &bitmaps[1..] {
                let old = Header::parse(&cluster).unwrap();
                let new = with(*bitmaps);
                let stages = switch(&cluster, &old, &new).unwrap();
                check_stages(cluster.clone(), &stages, &old, &new);
                for (at, bytes) in stages.into_iter().flatten() {
                    cluster[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
    }

    #[test]
    fn a_small_cluster_takes_what_fits() {
        let (old, new) = (header(9, false, &None), header(9, false, &Some((200, true))));
        let mut cluster = old.encode().unwrap();
        cluster.resize(512, 0);
        let stages = switch(&cluster, &old, &new).unwrap();
        assert_eq!(stages.len(), 1);
        check_stages(cluster.clone(), &stages, &old, &new);
        assert!(switch(&cluster, &old, &header(9, false, &Some((500, true)))).is_err());
    }
}
