// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers through a cipher: small ones at once, larger ones in pieces side by side on the pool. And writes that begin or
//! end within a sector.

use super::{Cipher, SECTOR_BYTES};
use crate::formats::qcow2::join;
use cowshed_block::{GuestOffset, HostOffset, Result};
use cowshed_storage::{IoBuf, rt};
use futures_util::future::join_all;
use std::ops::Range;
use std::sync::Arc;

/// Up to so many bytes the way to the pool and back costs more than the work.
const INLINE_BYTES: usize = 32 << 10;
/// Piece of a larger buffer that one thread of the pool does.
const PIECE_BYTES: usize = 128 << 10;

type Work = fn(&dyn Cipher, GuestOffset, HostOffset, &mut [u8]);

/// Encrypts a buffer of whole sectors that goes to `host` for the guest's `guest`.
pub(crate) async fn encrypt(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, buf: IoBuf) -> IoBuf {
    run(cipher, guest, host, buf, |cipher, guest, host, bytes| cipher.encrypt(guest, host, bytes)).await
}

/// Decrypts a buffer of whole sectors that was read from `host` for the guest's `guest`.
pub(crate) async fn decrypt(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, buf: IoBuf) -> IoBuf {
    run(cipher, guest, host, buf, |cipher, guest, host, bytes| cipher.decrypt(guest, host, bytes)).await
}

async fn run(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, mut buf: IoBuf, work: Work) -> IoBuf {
    if buf.len() <= INLINE_BYTES {
        work(&**cipher, guest, host, &mut buf);
        return buf;
    }
    let mut pieces = Vec::with_capacity(buf.len().div_ceil(PIECE_BYTES));
    let mut at = 0;
    while !buf.is_empty() {
        let mut piece = buf.split_to(PIECE_BYTES.min(buf.len()));
        let (cipher, from) = (Arc::clone(cipher), at);
        at += piece.len() as u64;
        pieces.push(rt::offload(move || {
            work(&*cipher, guest + from, host + from, &mut piece);
            piece
        }));
    }
    join_all(pieces).await.into_iter().fold(None, |whole, piece| Some(join(whole, piece))).unwrap_or(buf)
}

/// The whole sectors that `data` at byte `offset` touches: their range, and their bytes with the data laid over. What
/// stands at its edges now comes from `read`, which gets an offset and one sector's buffer.
pub(crate) async fn part_sectors<F>(
    offset: u64,
    data: &[u8],
    read: impl Fn(u64, IoBuf) -> F,
) -> Result<(Range<u64>, IoBuf)>
where
    F: Future<Output = (Result<()>, IoBuf)>,
{
    let end = offset + data.len() as u64;
    let sectors = offset / SECTOR_BYTES * SECTOR_BYTES..end.next_multiple_of(SECTOR_BYTES);
    let mut whole = IoBuf::zeroed((sectors.end - sectors.start) as usize);
    let mut edges = Vec::with_capacity(2);
    if !offset.is_multiple_of(SECTOR_BYTES) {
        edges.push(sectors.start);
    }
    let last = sectors.end - SECTOR_BYTES;
    if !end.is_multiple_of(SECTOR_BYTES) && edges.first() != Some(&last) {
        edges.push(last);
    }
    for edge in edges {
        let (result, sector) = read(edge, IoBuf::zeroed(SECTOR_BYTES as usize)).await;
        result?;
        let at = (edge - sectors.start) as usize;
        whole[at..at + sector.len()].copy_from_slice(&sector);
    }
    let at = (offset - sectors.start) as usize;
    whole[at..at + data.len()].copy_from_slice(data);
    Ok((sectors, whole))
}
