// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of a block device.

use crate::malformed::{u32_at, u64_at};
use crate::{DescriptorChain, SECTOR_BYTES, Shared};

/// Bytes of a request's header.
pub const HEADER_BYTES: usize = 16;
/// Bytes of one segment of a discard or a write of zeroes.
pub const SEGMENT_BYTES: usize = 16;
/// Bytes of the answer to `GET_ID`.
pub const ID_BYTES: usize = 20;

const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
/// In a segment: the space of the range may be freed.
const UNMAP: u32 = 1;

/// The end of a request, as the guest reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// It failed, or can't be.
    IoError = 1,
    /// There is no such request.
    Unsupported = 2,
}

/// The limits by which a request is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Size of the disk in bytes, now.
    pub disk_bytes: u64,
    /// Logical block size in bytes: requests begin at multiples of it.
    pub block_bytes: u32,
    /// Nothing may be changed.
    pub read_only: bool,
    /// The most segments of a discard or a write of zeroes.
    pub max_segments: u32,
    /// Sectors of one such segment.
    pub max_segment_sectors: u32,
}

/// A range of the disk that is to be discarded or to be zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes, not 0.
    pub len: u64,
    /// The space of the range may be freed.
    pub unmap: bool,
}

/// A request that passed all checks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Fill the chain's writable bytes, without the last one, from `offset` of the disk.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Write the chain's readable bytes behind the header at `offset` of the disk.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Make earlier writes durable.
    Flush,
    /// Give the name of the disk, in at most this many bytes.
    GetId {
        /// The most bytes of the name.
        len: u64,
    },
    /// Give ranges back: a hint.
    Discard(Vec<Segment>),
    /// Make ranges read as zeroes.
    WriteZeroes(Vec<Segment>),
}

/// Bytes of a chain's answer: without the status.
fn answer_bytes<P: Shared>(chain: &DescriptorChain<P>) -> u64 {
    chain.writable.len().saturating_sub(1)
}

/// Writes the status to the last writable byte. False: the chain has no place for one.
pub fn write_status<P: Shared>(chain: &DescriptorChain<P>, status: Status) -> bool {
    !chain.writable.is_empty() && chain.writable.write(&mut chain.writable.cursor(answer_bytes(chain)), &[status as u8])
}

impl Request {
    /// The request that a chain holds, or how it ends at once. Header, data and status may share descriptors, and lie in any
    /// number of them.
    pub fn parse<P: Shared>(chain: &DescriptorChain<P>, limits: &RequestLimits) -> Result<Request, Status> {
        let mut header = [0; HEADER_BYTES];
        if chain.writable.is_empty() || !chain.readable.read(&mut chain.readable.cursor(0), &mut header) {
            return Err(Status::IoError);
        }
        let (kind, sector) = (u32_at(&header, 0), u64_at(&header, 8));
        let sent = chain.readable.len() - HEADER_BYTES as u64;
        let changes = matches!(kind, OUT | DISCARD | WRITE_ZEROES);
        if changes && limits.read_only {
            return Err(Status::IoError);
        }
        match kind {
            IN => {
                let len = answer_bytes(chain);
                Ok(Request::Read { offset: limits.range(sector, len)?, len })
            }
            OUT => Ok(Request::Write { offset: limits.range(sector, sent)?, len: sent }),
            FLUSH => Ok(Request::Flush),
            GET_ID => Ok(Request::GetId { len: answer_bytes(chain).min(ID_BYTES as u64) }),
            DISCARD => segments(chain, sent, limits, 0).map(Request::Discard),
            WRITE_ZEROES => segments(chain, sent, limits, UNMAP).map(Request::WriteZeroes),
            _ => Err(Status::Unsupported),
        }
    }
}

fn segments<P: Shared>(
    chain: &DescriptorChain<P>,
    sent: u64,
    limits: &RequestLimits,
    known_flags: u32,
) -> Result<Vec<Segment>, Status> {
    let count = sent / SEGMENT_BYTES as u64;
    if count == 0 || count > limits.max_segments.into() {
        return Err(Status::IoError);
    }
    // As QEMU's device answers.
    if !sent.is_multiple_of(SEGMENT_BYTES as u64) {
        return Err(Status::Unsupported);
    }
    let mut found = Vec::new();
    for number in 0..count {
        let mut bytes = [0; SEGMENT_BYTES];
        let at = HEADER_BYTES as u64 + number * SEGMENT_BYTES as u64;
        if !chain.readable.read(&mut chain.readable.cursor(at), &mut bytes) {
            return Err(Status::IoError);
        }
        let (sector, sectors, flags) = (u64_at(&bytes, 0), u32_at(&bytes, 8), u32_at(&bytes, 12));
        // "The device MUST set the status byte to VIRTIO_BLK_S_UNSUPP" for flags that it doesn't know.
        if flags & !known_flags != 0 {
            return Err(Status::Unsupported);
        }
        if sectors > limits.max_segment_sectors {
            return Err(Status::IoError);
        }
        let len = u64::from(sectors) * SECTOR_BYTES;
        let offset = limits.range(sector, len)?;
        if len > 0 {
            found.push(Segment { offset, len, unmap: flags & UNMAP != 0 });
        }
    }
    Ok(found)
}

impl RequestLimits {
    /// The offset in bytes of a range that lies on the disk: whole sectors from the start of a block on, as with QEMU's device.
    fn range(&self, sector: u64, len: u64) -> Result<u64, Status> {
        let disk_bytes = self.disk_bytes - self.disk_bytes % SECTOR_BYTES;
        let block = u64::from(self.block_bytes).max(SECTOR_BYTES);
        let offset = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoError)?;
        let end = offset.checked_add(len).ok_or(Status::IoError)?;
        match end <= disk_bytes && offset.is_multiple_of(block) && len.is_multiple_of(SECTOR_BYTES) {
            true => Ok(offset),
            false => Err(Status::IoError),
        }
    }
}
