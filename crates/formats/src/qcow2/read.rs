// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads: one extent goes straight to the file; several are read side by side.

use super::extent_io::MapSpan;
use super::readahead::{DecodeGuard, ReadaheadStep};
use super::{Cipher, Qcow2Driver, cluster_cache};
use cowshed_graph::encryption::{SECTOR_BYTES, decrypt};
use cowshed_graph::node::{Intent, Mapped};
use cowshed_qcow2::{Engine, Stall};
use cowshed_storage::fault::Event;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Errno, Error, ErrorKind, Extent, GuestOffset, HostOffset, Mapping, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Decompression of clusters above this size is given to the pool.
const OFFLOAD_BYTES: u64 = 16 << 10;

impl Qcow2Driver {
    /// Decides at once about the way of a read.
    #[inline]
    pub(super) fn map_read(&self, offset: u64, len: u64) -> Mapped<'_> {
        if self.is_covered()
            && let Some(mapped) = self.anywhere(offset, len)
        {
            return mapped;
        }
        self.direct(offset, len, Intent::Read)
    }

    #[cold]
    pub(super) fn looking_around(&self, offset: u64) -> Mapped<'_> {
        Mapped::Load(Box::pin(async move {
            self.look_around(offset).await;
            Ok(())
        }))
    }

    #[cold]
    pub(super) fn settling(&self, stall: Stall, seen: u64) -> Mapped<'_> {
        Mapped::Load(Box::pin(self.settle(stall, seen)))
    }

    /// Fills `buf` from byte `offset` of the disk, for any mapping. The range lies on the disk.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        self.read_range(offset, buf).await
    }

    /// As [`Self::read`]; bytes past the end of the disk read as zeroes.
    pub(super) async fn read_range(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        let inside = self.size().saturating_sub(offset).min(buf.len() as u64) as usize;
        buf[inside..].fill(0);
        let end = offset + inside as u64;
        let map: MapSpan = Engine::map;
        let is_short = inside as u64 <= self.cluster_size();
        let step = |at, rest| {
            self.by_extents(map, at, end - at, rest, move |driver, extent, part| {
                driver.read_extent(extent, part, is_short)
            })
        };
        self.step_by_step(offset, end, buf, step).await
    }

    /// `is_short`: its request is for a cluster at most.
    pub(super) async fn read_extent(&self, extent: Extent, mut buf: IoBuf, is_short: bool) -> (Result<()>, IoBuf) {
        match extent.mapping {
            Mapping::Data { host, file, encrypted } => {
                if let Err(error) = self.check_stored(&extent, file, host) {
                    return (Err(error), buf);
                }
                if encrypted && self.cipher.is_none() {
                    return (
                        Err(self.error(Error::invalid_argument(
                            "the image is encrypted: reading needs 'encrypt.key-secret'",
                        ))),
                        buf,
                    );
                }
                let (result, mut buf) = match (encrypted, &self.cipher) {
                    (true, Some(cipher)) => return Box::pin(self.read_encrypted(cipher, extent, host, buf)).await,
                    _ => self.stored_in(file).read_at(buf, host.0).await,
                };
                if result.is_err() {
                    buf.fill(0);
                }
                (result, buf)
            }
            Mapping::Zero { .. } => {
                buf.fill(0);
                (Ok(()), buf)
            }
            Mapping::Unallocated => match &*self.backing.load() {
                Some(backing) => self.read_backing(backing, extent.guest.0, buf).await,
                None if self.no_backing => {
                    let message = "this range is in the backing file, which was left out";
                    (Err(self.error(Error::invalid_argument(message)).offset(extent.guest.0)), buf)
                }
                None => {
                    buf.fill(0);
                    (Ok(()), buf)
                }
            },
            Mapping::Compressed { host, len, skip } => {
                let (result, buf) =
                    self.read_compressed((host.0, len), skip, buf, is_short.then_some(extent.guest)).await;
                let result = result.map_err(|error| {
                    let error = match error.kind() {
                        ErrorKind::InvalidImage => error.with_errno(Errno::EIO),
                        _ => error,
                    };
                    self.error(error.context(format!("compressed cluster of guest offset {}", extent.guest)))
                });
                (result, buf)
            }
        }
    }

    /// Encrypted data is read in whole sectors.
    async fn read_encrypted(
        &self,
        cipher: &Arc<dyn Cipher>,
        extent: Extent,
        host: HostOffset,
        mut buf: IoBuf,
    ) -> (Result<()>, IoBuf) {
        let file = self.stored_in(self.data_place());
        let head = extent.guest.within(9);
        let sectors = (head + extent.len).next_multiple_of(SECTOR_BYTES);
        if sectors == extent.len {
            let (result, mut buf) = file.read_at(buf, host.0).await;
            return match result {
                Ok(()) => (Ok(()), decrypt(cipher, extent.guest, host, buf).await),
                Err(error) => {
                    buf.fill(0);
                    (Err(error), buf)
                }
            };
        }
        let start = HostOffset(host.0 - head);
        let (result, bytes) = file.read_at(IoBuf::zeroed(sectors as usize), start.0).await;
        if let Err(error) = result {
            return (Err(error), buf);
        }
        let bytes = decrypt(cipher, GuestOffset(extent.guest.0 - head), start, bytes).await;
        buf.copy_from_slice(&bytes[head as usize..(head + extent.len) as usize]);
        (Ok(()), buf)
    }

    pub(super) fn data_place(&self) -> cowshed_types::StoredIn {
        match self.data_file {
            Some(_) => cowshed_types::StoredIn::DataFile,
            None => cowshed_types::StoredIn::Image,
        }
    }

    /// Many entries of a small image can name the same compressed bytes, so the decompressed bytes have a limit of
    /// their own.
    fn count_decompressed(&self) -> Result<()> {
        let limit = self.max_decompressed_bytes;
        if limit == u64::MAX {
            return Ok(());
        }
        let cluster = self.cluster_size();
        let before = self.decompressed_bytes.fetch_add(cluster, Ordering::Relaxed);
        if before.saturating_add(cluster) <= limit {
            return Ok(());
        }
        let message =
            format!("more than {limit} bytes were decompressed, which the policy for this image doesn't allow");
        Err(Error::new(ErrorKind::Limit, message))
    }

    /// Fills `out` from `skip` on in a compressed cluster. A whole cluster is decompressed straight into it. A cluster of
    /// which a part is read is kept for the next part. With `guest`, where it is on the disk, sequential readers are
    /// noticed.
    async fn read_compressed(
        &self,
        (host, len): (u64, u64),
        skip: u64,
        mut out: IoBuf,
        guest: Option<GuestOffset>,
    ) -> (Result<()>, IoBuf) {
        // The descriptor counts whole sectors; a file may end within the last one, but not before the data.
        if host >= self.file.len() && host >= self.file.measure_len() {
            let message = "data lies past the end of the file";
            return (Err(Error::invalid_image("l2_entry", format!("{host:#x}"), message)), out);
        }
        self.meet(Event::ReadCompressed).await;
        let skip = skip as usize;
        let whole = out.len() as u64 == self.cluster_size();
        let next = self.ahead.next(&self.cluster_cache, (host, len), whole).await;
        if let Some(guest) = guest {
            self.read_ahead(guest);
        }
        let turn = match next {
            ReadaheadStep::Copy(cluster) => {
                let wanted = skip..skip + out.len();
                out.copy_from_slice(&cluster[wanted]);
                cluster_cache::release(cluster);
                return (Ok(()), out);
            }
            ReadaheadStep::Decompress(turn) => turn,
        };
        // In a box: a read of a kept cluster doesn't move the state that only this needs.
        Box::pin(self.decompress(turn, (host, len), skip, out)).await
    }

    /// As [`Self::read_compressed`], where no store has the cluster.
    async fn decompress(
        &self,
        turn: DecodeGuard,
        (host, len): (u64, u64),
        skip: usize,
        mut out: IoBuf,
    ) -> (Result<()>, IoBuf) {
        if let Err(error) = self.count_decompressed() {
            return (Err(error), out);
        }
        let cluster_size = self.cluster_size() as usize;
        let whole = out.len() == cluster_size;
        // Few sizes of memory: each is used again.
        let room = (len as usize).next_power_of_two();
        let kept = if whole { 0 } else { cluster_size };
        let share = self.ahead.memory.share((room + kept) as u64).await;
        let mut bytes = IoBuf::scratch(room);
        bytes.truncate(len as usize);
        let (result, bytes) = self.file.read_at(bytes, host).await;
        if result.is_err() {
            return (result, out);
        }
        let codec = self.codec();
        // The compressed bytes come back too: this thread uses their memory again. Their share stays as long.
        let decompress = move || {
            if whole {
                let result = codec.decompress(&bytes, &mut out);
                return (result, out, (bytes, share), None);
            }
            let mut cluster = cluster_cache::memory(cluster_size);
            let result = codec.decompress(&bytes, &mut cluster);
            // After an error the memory has bytes of other clusters.
            let wanted = skip..skip + out.len();
            let cluster = result.is_ok().then(|| {
                out.copy_from_slice(&cluster[wanted]);
                Arc::new(cluster)
            });
            (result, out, (bytes, share), cluster)
        };
        let (result, out, _held, cluster) =
            if cluster_size as u64 > OFFLOAD_BYTES { rt::run_on_cpu_pool(decompress).await } else { decompress() };
        // The request holds its pin until it is over.
        if let Some(cluster) = cluster {
            self.cluster_cache.put(host, len, cluster);
        }
        drop(turn);
        (result, out)
    }
}
