// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Refcount block entries: 1, 2, 4, 8, 16, 32 or 64 bits, big-endian; below a byte the lower index is in the lower bits
//! ("Refcount block entry").

/// Largest count that `1 << order` bits hold; `order` is 0–6.
#[inline]
pub const fn max_value(order: u32) -> u64 {
    assert!(order <= 6);
    u64::MAX >> (64 - (1u32 << order))
}

/// Entries in a block of `bytes` bytes.
#[inline]
pub const fn entries(bytes: usize, order: u32) -> usize {
    (bytes * 8) >> order
}

/// Entry `index` of a block. An index outside of the block, or an order above 6, is a bug of the caller and panics.
#[inline]
pub fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..=2 => {
            let bit = index << order;
            u64::from(block[bit / 8] >> (bit % 8)) & max_value(order)
        }
        3 => u64::from(block[index]),
        4 => u64::from(u16::from_be_bytes(wide(block, index))),
        5 => u64::from(u32::from_be_bytes(wide(block, index))),
        6 => u64::from_be_bytes(wide(block, index)),
        _ => panic!("refcount order {order} was validated at open"),
    }
}

/// True when an entry from `first` on isn't zero. An order above 6 is a bug of the caller and panics; there are no entries
/// behind the end of the block.
pub fn any_from(block: &[u8], order: u32, first: usize) -> bool {
    let per_byte = if order < 3 { 8 >> order } else { 1 };
    let aligned = first.next_multiple_of(per_byte);
    let entries = (block.len() << 3) >> order;
    if (first..aligned.min(entries)).any(|entry| get(block, order, entry) != 0) {
        return true;
    }
    let rest = block.get((aligned << order) / 8..).unwrap_or_default();
    // Without a branch for each byte, so that the compiler uses vector instructions.
    rest.chunks(4096).any(|chunk| chunk.iter().fold(0, |sum, byte| sum | byte) != 0)
}

/// Sets entry `index` of a block. A value above [`max_value`], an index outside of the block or an order above 6 is a
/// bug of the caller and panics.
#[inline]
pub fn set(block: &mut [u8], order: u32, index: usize, value: u64) {
    assert!(value <= max_value(order), "refcount {value} doesn't fit {} bits", 1u32 << order);
    match order {
        0..=2 => {
            let bit = index << order;
            let byte = &mut block[bit / 8];
            let shift = bit % 8;
            *byte = (*byte & !((max_value(order) as u8) << shift)) | ((value as u8) << shift);
        }
        3 => block[index] = value as u8,
        4 => block[index * 2..][..2].copy_from_slice(&(value as u16).to_be_bytes()),
        5 => block[index * 4..][..4].copy_from_slice(&(value as u32).to_be_bytes()),
        _ => block[index * 8..][..8].copy_from_slice(&value.to_be_bytes()),
    }
}

#[inline]
fn wide<const N: usize>(block: &[u8], index: usize) -> [u8; N] {
    let mut entry = [0; N];
    entry.copy_from_slice(&block[index * N..][..N]);
    entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sub_byte_entries_start_at_the_low_bits() {
        let block = [0b1110_0100, 0x21];
        assert_eq!((0..4).map(|index| get(&block, 1, index)).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!((get(&block, 2, 2), get(&block, 2, 3)), (1, 2));
        assert_eq!((get(&block, 0, 2), get(&block, 0, 0)), (1, 0));
    }

    #[test]
    fn wide_entries_are_big_endian() {
        let block = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(get(&block, 3, 1), 2);
        assert_eq!(get(&block, 4, 1), 0x0304);
        assert_eq!(get(&block, 5, 1), 0x05060708);
        assert_eq!(get(&block, 6, 1), 0x090a0b0c0d0e0f10);
    }

    #[test]
    fn maxima() {
        assert_eq!((0..=6).map(max_value).collect::<Vec<_>>(), [1, 3, 15, 255, 65535, u32::MAX as u64, u64::MAX]);
    }

    #[test]
    fn any_from_an_entry_on() {
        for order in 0..=6 {
            let mut block = vec![0; 8192];
            assert!(!any_from(&block, order, 0));
            let entries = (8192 * 8) >> order;
            for used in [0, 1, 5, 63, 77, entries - 1] {
                set(&mut block, order, used, 1);
                for first in [0, 1, 3, 4, 5, 6, 63, 64, 77, 78, entries - 2, entries - 1, entries, entries + 9] {
                    assert_eq!(any_from(&block, order, first), first <= used, "{first} of {used}, order {order}");
                }
                set(&mut block, order, used, 0);
            }
        }
    }

    proptest! {
        #[test]
        fn set_changes_one_entry(order in 0u32..=6, index in 0usize..512, value: u64, fill: u8) {
            let mut block = vec![fill; 4096];
            let before: Vec<u64> = (0..512).map(|i| get(&block, order, i)).collect();
            let value = value & max_value(order);
            set(&mut block, order, index, value);
            for (i, old) in before.into_iter().enumerate() {
                prop_assert_eq!(get(&block, order, i), if i == index { value } else { old });
            }
        }
    }
}
