// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The config space of a block device.

use crate::SECTOR_BYTES;

/// Bytes of the config space that are used; bytes behind read as zeroes.
pub const CONFIG_BYTES: usize = 60;
/// The offset of the switch of the write cache: the only field that a driver may write.
pub const WRITEBACK_AT: u32 = 32;

/// The fields of the config space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Size of the disk in bytes; a part of a sector at its end is not shown.
    pub disk_bytes: u64,
    /// The most segments of a request: two places of the ring are the header's and the status's.
    pub max_segments: u32,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// The physical block has this power of two of logical ones: the grain of allocation.
    pub physical_exponent: u8,
    /// Requests of this many bytes and multiples of it are the smallest good ones.
    pub min_io_bytes: u32,
    /// Requests of this many bytes and multiples of it are the best; 0 is unsaid.
    pub optimal_io_bytes: u32,
    /// The write cache is on: only a flush makes writes durable.
    pub writeback: bool,
    /// Number of queues.
    pub queues: u16,
    /// Sectors of one segment of a discard.
    pub max_discard_sectors: u32,
    /// The most segments of one discard.
    pub max_discard_segments: u32,
    /// Sectors to which discards are best aligned.
    pub discard_alignment_sectors: u32,
    /// Sectors of one segment of a write of zeroes.
    pub max_zeroes_sectors: u32,
    /// The most segments of one write of zeroes.
    pub max_zeroes_segments: u32,
}

impl DeviceConfig {
    /// The bytes of the config space.
    pub fn encode(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        let blocks = |len: u32| len / self.block_bytes.max(1);
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &(self.disk_bytes / SECTOR_BYTES).to_le_bytes());
        put(12, &self.max_segments.to_le_bytes());
        put(20, &self.block_bytes.to_le_bytes());
        put(24, &[self.physical_exponent]);
        put(26, &u16::try_from(blocks(self.min_io_bytes)).unwrap_or(u16::MAX).to_le_bytes());
        put(28, &blocks(self.optimal_io_bytes).to_le_bytes());
        put(32, &[u8::from(self.writeback)]);
        put(34, &self.queues.to_le_bytes());
        put(36, &self.max_discard_sectors.to_le_bytes());
        put(40, &self.max_discard_segments.to_le_bytes());
        put(44, &self.discard_alignment_sectors.to_le_bytes());
        put(48, &self.max_zeroes_sectors.to_le_bytes());
        put(52, &self.max_zeroes_segments.to_le_bytes());
        // A write of zeroes may free the space of its range.
        put(56, &[1]);
        bytes
    }

    /// A range of the config space. Behind its end are zeroes.
    pub fn read(&self, offset: u32, len: u32) -> Vec<u8> {
        let bytes = self.encode();
        (offset..offset.saturating_add(len)).map(|at| bytes.get(at as usize).copied().unwrap_or(0)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_stand_where_the_specification_has_them() {
        let config = DeviceConfig {
            disk_bytes: (1 << 30) + 100,
            max_segments: 126,
            block_bytes: 4096,
            physical_exponent: 4,
            min_io_bytes: 65536,
            optimal_io_bytes: 1 << 20,
            writeback: true,
            queues: 3,
            max_discard_sectors: 0x11,
            max_discard_segments: 0x22,
            discard_alignment_sectors: 0x33,
            max_zeroes_sectors: 0x44,
            max_zeroes_segments: 0x55,
        };
        assert_eq!(config.read(0, 8), (1u64 << 21).to_le_bytes());
        assert_eq!(config.read(12, 4), [126, 0, 0, 0]);
        assert_eq!(config.read(20, 14), [0, 16, 0, 0, 4, 0, 16, 0, 0, 1, 0, 0, 1, 0]);
        assert_eq!(config.read(34, 2), [3, 0]);
        let limits: Vec<u8> = config.read(36, 24).into_iter().filter(|byte| *byte != 0).collect();
        assert_eq!(limits, [0x11, 0x22, 0x33, 0x44, 0x55, 1]);
        assert_eq!(config.read(58, 4), [0; 4]);
        assert!(config.read(5, 0).is_empty());
        assert_eq!(config.read(250, 6), [0; 6]);
    }
}
