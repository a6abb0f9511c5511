// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writes: in place without the owner where the clusters are ours, else through an allocation.

use super::Qcow2Driver;
use super::read::{join, join_parts};
use cowshed_block::{Error, Extent, GuestOffset, HostOffset, Mapping, Result};
use cowshed_qcow2::ExtentList;
use cowshed_storage::IoBuf;
use futures_util::future::join_all;

impl Qcow2Driver {
    /// Writes `buf` at `offset`. The node has checked the range.
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        if !self.writable {
            return (self.check_writable(), buf);
        }
        if self.cipher.is_none() {
            let seen = self.events.now();
            let pin = self.engine.pin();
            let mut extents = ExtentList::default();
            let len = buf.len() as u64;
            match self.engine.map_overwrite(GuestOffset(offset), len, &mut extents) {
                Ok(mapped) => {
                    if mapped == len
                        && let [Extent { mapping: Mapping::Data { host, file, .. }, .. }] = *extents
                    {
                        let done = self.stored_in(file).write_at(buf, host.0).await;
                        drop(pin);
                        return done;
                    }
                }
                // Who is told to load a table must do it: everybody else waits for that.
                Err(stall) => {
                    drop(pin);
                    if let Err(error) = self.settle(stall, seen).await {
                        return (Err(error), buf);
                    }
                }
            }
        }
        self.write_range(offset, buf).await
    }

    pub(super) async fn write_range(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        if let Err(error) = self.check_writable() {
            return (Err(error), buf);
        }
        let end = offset + buf.len() as u64;
        let mut rest = buf;
        let mut done: Option<IoBuf> = None;
        let mut at = offset;
        while at < end {
            let (result, part, left) = match self.write_in_place(at, rest).await {
                (Ok(0), part, left) => {
                    done = Some(join(done, part));
                    self.write_allocating(at, left).await
                }
                other => other,
            };
            done = Some(join(done, part));
            rest = left;
            match result {
                Ok(bytes) => at += bytes,
                Err(error) => return (Err(error), join(done, rest)),
            }
        }
        (Ok(()), join(done, rest))
    }

    /// Writes the front of `buf` as far as it lies in clusters of ours. Returns the bytes written (0: the first byte
    /// needs an allocation), that part of the buffer, and the rest.
    async fn write_in_place(&self, at: u64, mut buf: IoBuf) -> (Result<u64>, IoBuf, IoBuf) {
        let mut extents = ExtentList::default();
        let len = buf.len() as u64;
        let (pin, mapped) = loop {
            let seen = self.events.now();
            let pin = self.engine.pin();
            match self.engine.map_overwrite(GuestOffset(at), len, &mut extents) {
                Ok(mapped) => break (pin, mapped),
                Err(stall) => {
                    drop(pin);
                    if let Err(error) = self.settle(stall, seen).await {
                        let none = buf.split_to(0);
                        return (Err(error), none, buf);
                    }
                }
            }
        };
        if mapped == 0 {
            let none = buf.split_to(0);
            return (Ok(0), none, buf);
        }
        let mut rest = buf;
        let mut writes = Vec::with_capacity(extents.len());
        for extent in extents.iter() {
            let part = rest.split_to(extent.len as usize);
            writes.push(self.write_extent(*extent, part));
        }
        let parts = match writes.len() {
            1 => vec![writes.remove(0).await],
            _ => join_all(writes).await,
        };
        drop(pin);
        join_parts(parts, mapped, rest)
    }

    async fn write_extent(&self, extent: Extent, buf: IoBuf) -> (Result<()>, IoBuf) {
        let Mapping::Data { host, file, encrypted } = extent.mapping else {
            return (Err(Error::internal("an in-place write to something that is not data")), buf);
        };
        if !encrypted {
            return self.stored_in(file).write_at(buf, host.0).await;
        }
        let bytes = match self.encrypted(extent.guest, host, &buf) {
            Ok(bytes) => bytes,
            Err(error) => return (Err(error), buf),
        };
        let (result, _) = self.stored_in(file).write_at(bytes, host.0).await;
        (result, buf)
    }

    /// An encrypted copy of `bytes`.
    pub(super) fn encrypted(&self, guest: GuestOffset, host: HostOffset, bytes: &[u8]) -> Result<IoBuf> {
        let Some(cipher) = &self.cipher else {
            return Err(self.error(Error::unsupported("encrypted images can't be written yet")));
        };
        if !guest.is_aligned(9) || !bytes.len().is_multiple_of(512) {
            return Err(Error::invalid_argument("encrypted images are written in whole sectors").value(guest));
        }
        let mut copy = IoBuf::copy_from(bytes);
        cipher.encrypt(guest, host, &mut copy);
        Ok(copy)
    }
}
