// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A span of the virtual disk on its way to the files. It is mapped under a pin and cut at the borders of its extents,
//! and the parts are carried out side by side. Reads and writes in place differ only in their mapping and in the
//! operation for a part.

use super::Qcow2Driver;
use cowshed_graph::buffers::join;
use cowshed_graph::node::{Intent, Mapped, Place, graph_changes};
use cowshed_qcow2::{Engine, EpochGuard, ExtentList, Planned};
use cowshed_storage::IoBuf;
use cowshed_types::{Errno, Error, Extent, GuestOffset, HostOffset, Mapping, Result, StoredIn, slip};
use futures_util::future::join_all;
use std::future::Future;

/// The function that maps a span: [`Engine::map`] or [`Engine::map_overwrite`].
pub(super) type MapSpan = fn(&Engine, GuestOffset, u64, &mut ExtentList) -> Planned<u64>;

/// A buffer cut in parts: the bytes done (or the first error), the part that they are in, and the rest.
pub(super) type SplitBuf = (Result<u64>, IoBuf, IoBuf);

/// The extents of a span.
enum Cut {
    /// The common case: the future of the one part stays in its place.
    One(Extent),
    Many(Vec<Extent>),
}

impl Qcow2Driver {
    /// The short way of a request by the mapping: no future, no memory.
    #[inline]
    pub(super) fn direct(&self, offset: u64, len: u64, intent: Intent) -> Mapped<'_> {
        let seen = self.events.now();
        let pin = self.engine.pin();
        let mut extents = ExtentList::default();
        let mapped = match intent {
            Intent::Read => self.engine.map(GuestOffset(offset), len, &mut extents),
            Intent::Overwrite => self.engine.map_overwrite(GuestOffset(offset), len, &mut extents),
        };
        match mapped {
            Ok(mapped) if mapped == len => match *extents {
                [Extent { mapping: Mapping::Data { host, file, encrypted: false }, .. }] => {
                    let file = self.stored_in(file);
                    match host.0 + len <= file.len() {
                        true => Mapped::File { file, host: host.0, guard: Some(pin) },
                        false => Mapped::Special,
                    }
                }
                [Extent { mapping: Mapping::Unallocated, .. }] if intent == Intent::Read => self.below(offset, len),
                [Extent { mapping: Mapping::Zero { .. }, .. }] if intent == Intent::Read => Mapped::Zeroes,
                _ => Mapped::Special,
            },
            Ok(0) => Mapped::Nothing,
            Ok(_) => Mapped::Special,
            // A caller that gets a table to load must do it: all others wait for that.
            Err(stall) => self.settling(stall, seen),
        }
    }

    /// As [`Self::direct`] where the chain map has the place of the data: the mapping isn't asked.
    #[inline]
    pub(super) fn placed_at(&self, place: Place, len: u64) -> Mapped<'_> {
        // First the pin, then the look.
        let pin = self.engine.pin();
        let file = self.stored_in(self.data_place());
        match (slip!("places_outlive_changes") || place.changes == graph_changes()) && place.host.0 + len <= file.len()
        {
            true => Mapped::File { file, host: place.host.0, guard: Some(pin) },
            false => Mapped::Special,
        }
    }

    /// Data must be in its file, at least the beginning of its cluster: the file may end within the last one. Bytes
    /// past the end are lost, and neither zeroes nor a place to write to.
    pub(super) fn check_stored(&self, extent: &Extent, file: StoredIn, host: HostOffset) -> Result<()> {
        let file = self.stored_in(file);
        let in_file = |len: u64| host.0 + extent.len <= len.next_multiple_of(self.cluster_size());
        if in_file(file.len()) || in_file(file.measure_len()) {
            return Ok(());
        }
        let end = file.len().next_multiple_of(self.cluster_size());
        let lost = host.0.max(end);
        let message = format!(
            "the data of guest offset {} lies past the end of the file ({} bytes)",
            extent.guest + (lost - host.0),
            file.len()
        );
        let error = Error::invalid_image("l2_entry", HostOffset(lost), message).with_errno(Errno::EIO);
        Err(error.offset(extent.guest.0 + (lost - host.0)).file(file.name()))
    }

    /// Maps the front of `buf`, as far as one plan reaches, and has `carry_out` do each of its extents.
    pub(super) async fn by_extents<'a, F>(
        &'a self,
        map: MapSpan,
        at: u64,
        len: u64,
        mut buf: IoBuf,
        carry_out: impl Fn(&'a Self, Extent, IoBuf) -> F,
    ) -> SplitBuf
    where
        F: Future<Output = (Result<()>, IoBuf)>,
    {
        let (pin, mapped, cut) = loop {
            let seen = self.events.now();
            match self.cut(map, at, len) {
                Ok(cut) => break cut,
                Err(stall) => {
                    if let Err(error) = Box::pin(self.settle(stall, seen)).await {
                        let none = buf.split_to(0);
                        return (Err(error), none, buf);
                    }
                }
            }
        };
        let mut rest = buf;
        match cut {
            Cut::One(extent) => {
                let part = rest.split_to(extent.len as usize);
                let (outcome, part) = carry_out(self, extent, part).await;
                drop(pin);
                (outcome.map(|()| mapped), part, rest)
            }
            Cut::Many(extents) => {
                let requests = extents.into_iter().map(|extent| {
                    let part = rest.split_to(extent.len as usize);
                    carry_out(self, extent, part)
                });
                let all = join_all(requests);
                let parts = all.await;
                drop(pin);
                join_parts(parts, mapped, rest)
            }
        }
    }

    /// Maps a span under a pin: the bytes that one plan reaches, and their extents. No future holds the list of extents.
    fn cut(&self, map: MapSpan, at: u64, len: u64) -> Planned<(EpochGuard<'_>, u64, Cut)> {
        let pin = self.engine.pin();
        let mut extents = ExtentList::default();
        let mapped = map(&self.engine, GuestOffset(at), len, &mut extents)?;
        let cut = match *extents {
            [extent] => Cut::One(extent),
            _ => Cut::Many(extents.to_vec()),
        };
        Ok((pin, mapped, cut))
    }

    /// Has `step` do the front of `buf` again and again, for `offset..end`, until nothing is left or one fails.
    pub(super) async fn step_by_step<F>(
        &self,
        offset: u64,
        end: u64,
        buf: IoBuf,
        step: impl Fn(u64, IoBuf) -> F,
    ) -> (Result<()>, IoBuf)
    where
        F: Future<Output = SplitBuf>,
    {
        let mut rest = buf;
        let mut done: Option<IoBuf> = None;
        let mut at = offset;
        while at < end {
            let (result, part, left) = step(at, rest).await;
            done = Some(join(done, part));
            rest = left;
            match result {
                Ok(bytes) => at += bytes,
                Err(error) => return (Err(error), join(done, rest)),
            }
        }
        (Ok(()), join(done, rest))
    }
}

/// The parts of one plan joined again: an error of one is an error of all.
pub(super) fn join_parts(parts: Vec<(Result<()>, IoBuf)>, mapped: u64, mut rest: IoBuf) -> SplitBuf {
    let mut result = Ok(mapped);
    let mut whole: Option<IoBuf> = None;
    for (outcome, part) in parts {
        if let (Err(error), Ok(_)) = (outcome, &result) {
            result = Err(error);
        }
        whole = Some(join(whole, part));
    }
    let whole = whole.unwrap_or_else(|| rest.split_to(0));
    (result, whole, rest)
}
