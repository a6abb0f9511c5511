// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Buffers through a cipher: short ones on this thread, and the rest in pieces side by side on the pool. And writes
//! that begin or end within a sector.

use super::{Cipher, SECTOR_BYTES};
use crate::buffers::join;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{GuestOffset, HostOffset, Result};
use futures_util::future::join_all;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are done here at a time, until [`INLINE_TIME`] has passed.
const INLINE_BYTES: usize = 32 << 10;
/// The time for which this thread works on a buffer itself. The bytes are in its core's cache, and another one would
/// have to be woken and to fetch them. A processor with instructions for the cipher does a MiB in that time.
const INLINE_TIME: Duration = Duration::from_micros(100);
/// Piece of a larger buffer that one thread of the pool does.
const PIECE_BYTES: usize = 128 << 10;

type Work = fn(&dyn Cipher, GuestOffset, HostOffset, &mut [u8]);

/// Encrypts a buffer of whole sectors that goes to `host` for the guest's `guest`.
pub async fn encrypt(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, buf: IoBuf) -> IoBuf {
    run(cipher, guest, host, buf, |cipher, guest, host, bytes| cipher.encrypt(guest, host, bytes)).await
}

/// Decrypts a buffer of whole sectors that was read from `host` for the guest's `guest`.
pub async fn decrypt(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, buf: IoBuf) -> IoBuf {
    run(cipher, guest, host, buf, |cipher, guest, host, bytes| cipher.decrypt(guest, host, bytes)).await
}

async fn run(cipher: &Arc<dyn Cipher>, guest: GuestOffset, host: HostOffset, mut buf: IoBuf, work: Work) -> IoBuf {
    let done = run_here(&**cipher, guest, host, &mut buf, work);
    if done == buf.len() {
        return buf;
    }
    let mut at = done as u64;
    let whole = buf.split_to(done);
    let mut pieces = Vec::with_capacity(buf.len().div_ceil(PIECE_BYTES));
    while !buf.is_empty() {
        let mut piece = buf.split_to(PIECE_BYTES.min(buf.len()));
        let (cipher, from) = (Arc::clone(cipher), at);
        at += piece.len() as u64;
        pieces.push(rt::run_on_cpu_pool(move || {
            work(&*cipher, guest + from, host + from, &mut piece);
            piece
        }));
    }
    join_all(pieces).await.into_iter().fold(whole, |whole, piece| join(Some(whole), piece))
}

/// Does the front on this thread; how much of it.
fn run_here(cipher: &dyn Cipher, guest: GuestOffset, host: HostOffset, bytes: &mut [u8], work: Work) -> usize {
    let start = rt::now();
    let mut done = 0;
    for piece in bytes.chunks_mut(INLINE_BYTES) {
        if done > 0 && rt::now().saturating_sub(start) >= INLINE_TIME {
            break;
        }
        work(cipher, guest + done as u64, host + done as u64, piece);
        done += piece.len();
    }
    done
}

/// The whole sectors that `data` at byte `offset` touches: their range, and their bytes with the data laid over. The
/// present bytes at its edges come from `read`, which gets an offset and one sector's buffer.
pub async fn part_sectors<F>(offset: u64, data: &[u8], read: impl Fn(u64, IoBuf) -> F) -> Result<(Range<u64>, IoBuf)>
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread::{ThreadId, current, sleep};

    /// A cipher that adds a number of the place, and notes the thread and its share of each place.
    struct Noting {
        takes: Duration,
        calls: Mutex<Vec<(u64, usize, ThreadId)>>,
    }

    impl Cipher for Noting {
        fn encrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
            assert_eq!(host.0, guest.0 + (1 << 30));
            // The time that the cipher takes.
            sleep(self.takes);
            for (sector, at) in bytes.chunks_mut(SECTOR_BYTES as usize).zip((guest.0..).step_by(SECTOR_BYTES as usize))
            {
                sector.iter_mut().for_each(|byte| *byte ^= (at / SECTOR_BYTES) as u8);
            }
            self.calls.lock().unwrap().push((guest.0, bytes.len(), current().id()));
        }

        fn decrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
            self.encrypt(guest, host, bytes);
        }
    }

    /// The work of each thread, in order.
    fn calls(takes: Duration, len: usize) -> Vec<(u64, usize, ThreadId)> {
        const START: u64 = 7 << 20;
        let noting = Arc::new(Noting { takes, calls: Mutex::default() });
        let cipher: Arc<dyn Cipher> = noting.clone();
        let (guest, host) = (GuestOffset(START), HostOffset(START + (1 << 30)));
        let buf = rt::block_on(encrypt(&cipher, guest, host, IoBuf::zeroed(len)));
        assert_eq!(buf.len(), len);
        for (at, sector) in buf.chunks(SECTOR_BYTES as usize).enumerate() {
            let number = (START / SECTOR_BYTES) as usize + at;
            assert!(sector.iter().all(|byte| *byte == number as u8), "sector {at}");
        }
        let buf = rt::block_on(decrypt(&cipher, guest, host, buf));
        assert!(buf.iter().all(|byte| *byte == 0));
        let mut calls = noting.calls.lock().unwrap().clone();
        calls.sort_unstable_by_key(|call| call.0);
        calls
    }

    #[test]
    fn what_takes_long_is_left_to_the_pool() {
        let len = INLINE_BYTES + 3 * PIECE_BYTES + 512;
        let calls = calls(INLINE_TIME, len);
        // Encrypted and decrypted, in the same pieces: the first here, the others elsewhere.
        assert_eq!(calls.len(), 2 * 5);
        for pair in calls.chunks(2) {
            assert_eq!(pair[0].1, pair[1].1);
            for (at, piece, thread) in pair {
                let is_first = *at == calls[0].0;
                assert_eq!(*thread == current().id(), is_first);
                assert!(*piece <= if is_first { INLINE_BYTES } else { PIECE_BYTES });
            }
        }
        assert_eq!(calls.iter().map(|call| call.1).sum::<usize>(), 2 * len);
    }

    #[test]
    fn little_stays_on_this_thread_however_long_it_takes() {
        for len in [512, INLINE_BYTES] {
            let calls = calls(10 * INLINE_TIME, len);
            assert_eq!(calls.len(), 2);
            assert!(calls.iter().all(|call| call.1 == len && call.2 == current().id()));
        }
    }
}
