// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data that a guest may read from its disk: while it runs, and after a power cut.
//!
//! The model keeps, for each sector, every version that a write, zero write or discard has given it. A version has the
//! moments at which its request began and ended. A version is out of the question once a later one is settled: one that
//! began after it had ended. For a read, requests that ended before it began are settled. After a power cut, those are
//! settled that ended before an acknowledged flush began. So overlapping requests may win in either order, and
//! unflushed data may be there or not, sector by sector.

use crate::random::Random;

/// Unit of atomicity in bytes: a sector of the guest holds one version or another, never a mixture.
pub const GUEST_SECTOR_BYTES: u64 = 512;

/// The content of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// [`fill`] with this stamp.
    Stamp(u64),
    Zero,
    /// Zeroes, or the old data.
    MaybeZero,
}

/// A moment: the model's own order of events, and the length of the world's log then.
#[derive(Clone, Copy, Debug)]
struct Moment {
    tick: u64,
    position: usize,
}

#[derive(Clone, Debug)]
struct Version {
    start: u64,
    end: u64,
    content: Content,
    began: Moment,
    /// When it succeeded. A failed request never settles anything.
    ended: Option<Moment>,
}

#[derive(Clone, Debug)]
struct Flush {
    began: Moment,
    ended: Option<Moment>,
}

/// A request that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(usize);

/// A size that the disk was given.
#[derive(Clone, Debug)]
struct Size {
    bytes: u64,
    began: Moment,
    ended: Option<Moment>,
}

/// The model of one guest disk.
#[derive(Clone, Debug)]
pub struct Model {
    /// At the start; zeroes up to the largest size that the disk may get.
    initial: Vec<u8>,
    /// In the order in which they were asked for, one at a time.
    sizes: Vec<Size>,
    versions: Vec<Version>,
    /// Indices into `versions` for each sector, in the order in which they began.
    sectors: Vec<Vec<u32>>,
    flushes: Vec<Flush>,
    tick: u64,
}

/// Stamps from here on [`fill`] with bytes that a codec makes smaller.
pub const COMPRESSIBLE: u64 = 1 << 32;

/// Bytes that a write with `stamp` puts at guest `offset`: different for every stamp and place.
pub fn fill(stamp: u64, offset: u64, bytes: &mut [u8]) {
    let mut word_at = u64::MAX;
    let mut word = [0; 8];
    for (at, byte) in (offset..).zip(bytes) {
        if at / 8 != word_at {
            word_at = at / 8;
            let empty = stamp >= COMPRESSIBLE && word_at % 8 != 0;
            let random = || Random::new(stamp.rotate_left(32) ^ word_at).next_u64();
            word = if empty { 0 } else { random() }.to_le_bytes();
        }
        *byte = word[(at % 8) as usize];
    }
}

impl Model {
    /// A disk with these bytes, all of them durable.
    pub fn new(initial: Vec<u8>) -> Self {
        let sectors = vec![Vec::new(); initial.len().div_ceil(GUEST_SECTOR_BYTES as usize)];
        let start = Moment { tick: 0, position: 0 };
        let sizes = vec![Size { bytes: initial.len() as u64, began: start, ended: Some(start) }];
        Model { initial, sizes, versions: Vec::new(), sectors, flushes: Vec::new(), tick: 0 }
    }

    /// Size of the disk in bytes: the last one asked for.
    pub fn len(&self) -> u64 {
        self.sizes.last().map_or(0, |size| size.bytes)
    }

    /// True for a disk of 0 bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A resize begins; nothing else is under way. Bytes that a shrink cuts off read as zeroes when the disk grows
    /// again.
    pub fn begin_resize(&mut self, bytes: u64, position: usize) -> RequestId {
        let old = self.len();
        let cut = if bytes < old { Some(self.begin(bytes, old - bytes, Content::Zero, position)) } else { None };
        if bytes > self.initial.len() as u64 {
            self.initial.resize(bytes as usize, 0);
            self.sectors.resize(bytes.div_ceil(GUEST_SECTOR_BYTES) as usize, Vec::new());
        }
        let began = self.moment(position);
        self.sizes.push(Size { bytes, began, ended: None });
        cut.unwrap_or(RequestId(usize::MAX))
    }

    /// A resize has succeeded.
    pub fn end_resize(&mut self, request: RequestId, position: usize) {
        let moment = self.moment(position);
        if let Some(size) = self.sizes.last_mut() {
            size.ended = Some(moment);
        }
        if request.0 != usize::MAX {
            self.versions[request.0].ended = Some(moment);
        }
    }

    /// Checks the size of the disk after a power cut with `position` entries in the log.
    ///
    /// # Errors
    /// The sizes that were possible.
    pub fn check_size_after_cut(&self, position: usize, bytes: u64) -> Result<(), String> {
        let settled = self.settled(position);
        let is_settled = |size: &Size| size.ended.is_some_and(|ended| ended.tick <= settled);
        let newest = self.sizes.iter().rposition(is_settled).unwrap_or(0);
        let allowed: Vec<u64> =
            self.sizes[newest..].iter().filter(|size| size.began.position <= position).map(|size| size.bytes).collect();
        match allowed.contains(&bytes) {
            true => Ok(()),
            false => Err(format!("the disk has {bytes} bytes; allowed: {allowed:?}")),
        }
    }

    /// A write begins; `position` is the length of the world's log.
    pub fn begin_write(&mut self, offset: u64, len: u64, stamp: u64, position: usize) -> RequestId {
        self.begin(offset, len, Content::Stamp(stamp), position)
    }

    /// A zero write begins.
    pub fn begin_zero(&mut self, offset: u64, len: u64, position: usize) -> RequestId {
        self.begin(offset, len, Content::Zero, position)
    }

    /// A discard begins.
    pub fn begin_discard(&mut self, offset: u64, len: u64, position: usize) -> RequestId {
        self.begin(offset, len, Content::MaybeZero, position)
    }

    /// A write, zero write or discard has succeeded. A request that failed is never ended: it may have happened or not.
    pub fn end(&mut self, request: RequestId, position: usize) {
        let moment = self.moment(position);
        self.versions[request.0].ended = Some(moment);
    }

    /// A flush begins.
    pub fn begin_flush(&mut self, position: usize) -> RequestId {
        let began = self.moment(position);
        self.flushes.push(Flush { began, ended: None });
        RequestId(self.flushes.len() - 1)
    }

    /// A flush was acknowledged.
    pub fn end_flush(&mut self, flush: RequestId, position: usize) {
        let moment = self.moment(position);
        self.flushes[flush.0].ended = Some(moment);
    }

    /// A read begins; its bytes are checked with [`Model::check_read`].
    pub fn begin_read(&mut self) -> u64 {
        self.tick += 1;
        self.tick
    }

    /// Checks the bytes at `offset` of a read that began at `began`.
    ///
    /// # Errors
    /// The first byte or sector that isn't allowed, and its allowed values.
    pub fn check_read(&self, began: u64, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.check(offset, bytes, usize::MAX, began)
    }

    /// As [`Model::check_read`], on a machine where a read beside a write may see a part of the write inside of a sector.
    /// Processors copy words of eight bytes: words of the disk, or those of the buffer, which begins at `offset`.
    ///
    /// # Errors
    /// The first word that isn't allowed, and its allowed values.
    pub fn check_torn_read(&self, began: u64, offset: u64, bytes: &[u8]) -> Result<(), String> {
        if self.check_read(began, offset, bytes).is_ok() {
            return Ok(());
        }
        let mut at = offset;
        while at < offset + bytes.len() as u64 {
            let (of_disk, of_buffer) = ((at / 8 + 1) * 8, offset + ((at - offset) / 8 + 1) * 8);
            let end = of_disk.min(of_buffer).min(offset + bytes.len() as u64);
            let word = &bytes[(at - offset) as usize..(end - offset) as usize];
            self.check_sector(at / GUEST_SECTOR_BYTES, at, word, usize::MAX, began)?;
            at = end;
        }
        Ok(())
    }

    /// Checks the bytes at `offset` after a power cut with `position` entries in the log.
    ///
    /// # Errors
    /// The first byte or sector that isn't allowed, and its allowed values.
    pub fn check_after_cut(&self, position: usize, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.check(offset, bytes, position, self.settled(position))
    }

    /// Checks a copy of the disk, from `offset` on, that shows it at one moment. That moment is not before the begin of
    /// the read that [`Model::begin_read`] called `began`, and not after the event `position`. Each sector is checked
    /// by itself.
    ///
    /// # Errors
    /// The first byte or sector that isn't allowed, and its allowed values.
    pub fn check_point_in_time(&self, began: u64, position: usize, offset: u64, bytes: &[u8]) -> Result<(), String> {
        self.check(offset, bytes, position, began)
    }

    /// Ranges of the disk changed by requests that were under way at a power cut, or not covered by the last
    /// acknowledged flush but one. Their allocated or freed clusters may be leaked. In units of `unit_bytes`, each unit
    /// once for each request. Flushes that overlap count as one: one round of writes may serve both, and the round
    /// after it writes the freed counts.
    pub fn unsettled_units(&self, position: usize, unit_bytes: u64) -> u64 {
        let ended = |flush: &Flush| flush.ended.filter(|moment| moment.position <= position).map(|moment| moment.tick);
        let last_began = self.flushes.iter().filter(|flush| ended(flush).is_some()).map(|flush| flush.began.tick).max();
        let earlier = self.flushes.iter().filter(|flush| ended(flush).is_some_and(|tick| Some(tick) < last_began));
        let settled = earlier.map(|flush| flush.began.tick).max().unwrap_or(0);
        let unsettled = self.versions.iter().filter(|version| {
            version.began.position <= position && version.ended.is_none_or(|ended| ended.tick >= settled)
        });
        unsettled.map(|version| version.end.div_ceil(unit_bytes) - version.start / unit_bytes).sum()
    }

    /// The tick before which ended requests are durable after a power cut at `position`.
    fn settled(&self, position: usize) -> u64 {
        let acknowledged =
            self.flushes.iter().filter(|flush| flush.ended.is_some_and(|moment| moment.position <= position));
        acknowledged.map(|flush| flush.began.tick).max().unwrap_or(0)
    }

    fn moment(&mut self, position: usize) -> Moment {
        self.tick += 1;
        Moment { tick: self.tick, position }
    }

    fn begin(&mut self, offset: u64, len: u64, content: Content, position: usize) -> RequestId {
        let began = self.moment(position);
        let index = self.versions.len();
        let end = (offset + len).min(self.initial.len() as u64);
        self.versions.push(Version { start: offset, end, content, began, ended: None });
        if offset < end {
            let touched = offset / GUEST_SECTOR_BYTES..end.div_ceil(GUEST_SECTOR_BYTES);
            for sector in touched {
                self.sectors[sector as usize].push(index as u32);
            }
        }
        RequestId(index)
    }

    /// Only versions begun with at most `position` entries in the log exist; requests that ended before `settled` are
    /// settled.
    fn check(&self, offset: u64, bytes: &[u8], position: usize, settled: u64) -> Result<(), String> {
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            let sector = at / GUEST_SECTOR_BYTES;
            let end = ((sector + 1) * GUEST_SECTOR_BYTES).min(offset + bytes.len() as u64);
            let part = &bytes[done..done + (end - at) as usize];
            self.check_sector(sector, at, part, position, settled)?;
            done += part.len();
        }
        Ok(())
    }

    fn check_sector(&self, sector: u64, at: u64, part: &[u8], position: usize, settled: u64) -> Result<(), String> {
        let Some(touching) = self.sectors.get(sector as usize) else {
            return Err(format!("read past the end of the disk at {at:#x}"));
        };
        let end = at + part.len() as u64;
        let touching: Vec<&Version> = touching
            .iter()
            .map(|index| &self.versions[*index as usize])
            .filter(|version| version.began.position <= position && version.start < end && at < version.end)
            .collect();
        if touching.iter().all(|version| version.start <= at && end <= version.end) {
            let allowed = self.allowed(&touching, settled);
            return match allowed.iter().any(|content| self.holds(*content, at, part)) {
                true => Ok(()),
                false => Err(self.complaint(at, part, &allowed, &touching)),
            };
        }
        for (at, byte) in (at..).zip(part.chunks(1)) {
            let here: Vec<&Version> =
                touching.iter().copied().filter(|version| version.start <= at && at < version.end).collect();
            let allowed = self.allowed(&here, settled);
            if !allowed.iter().any(|content| self.holds(*content, at, byte)) {
                return Err(self.complaint(at, byte, &allowed, &here));
            }
        }
        Ok(())
    }

    /// The contents allowed where exactly the versions `here` apply; `None` is the initial one.
    fn allowed(&self, here: &[&Version], settled: u64) -> Vec<Option<Content>> {
        // A discard settles nothing: the old data may still be there.
        let settling = |version: &&&Version| {
            version.content != Content::MaybeZero && version.ended.is_some_and(|ended| ended.tick < settled)
        };
        let newest_began = here.iter().filter(settling).map(|version| version.began.tick).max();
        let replaced = |version: &Version| match (version.ended, newest_began) {
            (Some(ended), Some(newest)) => ended.tick < newest,
            _ => false,
        };
        let mut allowed: Vec<Option<Content>> =
            here.iter().filter(|version| !replaced(version)).map(|version| Some(version.content)).collect();
        if newest_began.is_none() {
            allowed.push(None);
        }
        allowed
    }

    fn holds(&self, content: Option<Content>, at: u64, part: &[u8]) -> bool {
        match content {
            None => self.initial[at as usize..at as usize + part.len()] == *part,
            Some(Content::Zero | Content::MaybeZero) => part.iter().all(|&byte| byte == 0),
            Some(Content::Stamp(stamp)) => {
                let mut expected = [0; GUEST_SECTOR_BYTES as usize];
                let expected = &mut expected[..part.len()];
                fill(stamp, at, expected);
                expected == part
            }
        }
    }

    fn complaint(&self, at: u64, part: &[u8], allowed: &[Option<Content>], here: &[&Version]) -> String {
        let head = &part[..part.len().min(8)];
        let found = match () {
            () if part.iter().all(|&byte| byte == 0) => "zeroes".to_owned(),
            () if self.holds(None, at, part) => "what it held at the start".to_owned(),
            () => match here.iter().find(|version| self.holds(Some(version.content), at, part)) {
                Some(version) => format!("the replaced {:x?}", version.content),
                None => format!("{head:02x?}… that was never written there"),
            },
        };
        let allowed: Vec<String> = allowed
            .iter()
            .map(|content| content.map_or("its contents at the start".to_owned(), |content| format!("{content:x?}")))
            .collect();
        format!("guest {at:#x}+{:#x} holds {found}; allowed: {}", part.len(), allowed.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(stamp: u64, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fill(stamp, offset, &mut bytes);
        bytes
    }

    #[test]
    fn concurrent_read_is_torn_between_words() {
        let mut model = Model::new(vec![0; 4096]);
        let first = model.begin_write(0, 1024, 1, 0);
        model.end(first, 0);
        let began = model.begin_read();
        model.begin_write(0, 1024, 2, 0);
        // The offset of the read, and where it turns from the new bytes to the old ones.
        for (offset, turn, is_possible) in
            [(0, 64, true), (4, 64, true), (4, 68, true), (4, 66, false), (0, 68, false), (3, 67, true), (3, 68, false)]
        {
            let mut read = bytes(2, offset, (512 - offset) as usize);
            let old = bytes(1, turn, (512 - turn) as usize);
            read[(turn - offset) as usize..].copy_from_slice(&old);
            assert_eq!(model.check_torn_read(began, offset, &read).is_ok(), is_possible, "{offset} {turn}");
        }
    }

    #[test]
    fn a_flushed_write_must_be_there_and_a_later_one_may() {
        let mut model = Model::new(vec![0; 4096]);
        let first = model.begin_write(0, 1024, 1, 0);
        model.end(first, 3);
        let flush = model.begin_flush(3);
        model.end_flush(flush, 5);
        let second = model.begin_write(512, 512, 2, 6);
        model.end(second, 7);
        assert!(model.check_after_cut(4, 0, &[0; 1024]).is_ok(), "not acknowledged yet");
        assert!(model.check_after_cut(5, 0, &[0; 1024]).is_err());
        let torn = [bytes(1, 0, 512), bytes(2, 512, 512)].concat();
        assert!(model.check_after_cut(7, 0, &torn).is_ok());
        assert!(model.check_after_cut(5, 0, &torn).is_err(), "not begun yet");
        assert!(model.check_after_cut(7, 0, &bytes(1, 0, 1024)).is_ok());
        let mixed = [bytes(1, 0, 512), bytes(1, 512, 256), bytes(2, 768, 256)].concat();
        assert!(model.check_after_cut(7, 0, &mixed).is_err(), "a sector holds one version");
        let read = model.begin_read();
        assert!(model.check_read(read, 0, &torn).is_ok());
        assert!(model.check_read(read, 0, &bytes(1, 0, 1024)).is_err(), "a read sees what ended before");
    }

    #[test]
    fn overlapping_requests_may_win_in_either_order() {
        let mut model = Model::new(vec![0; 512]);
        let a = model.begin_write(0, 512, 1, 0);
        let b = model.begin_zero(0, 512, 0);
        model.end(b, 1);
        model.end(a, 1);
        let read = model.begin_read();
        assert!(model.check_read(read, 0, &[0; 512]).is_ok() && model.check_read(read, 0, &bytes(1, 0, 512)).is_ok());
        let c = model.begin_discard(0, 512, 2);
        model.end(c, 2);
        let read = model.begin_read();
        assert!(model.check_read(read, 0, &bytes(1, 0, 512)).is_ok());
        let d = model.begin_write(100, 10, 9, 3);
        model.end(d, 3);
        let read = model.begin_read();
        let mut expected = bytes(1, 0, 512);
        assert!(model.check_read(read, 0, &expected).is_err());
        fill(9, 100, &mut expected[100..110]);
        assert!(model.check_read(read, 0, &expected).is_ok());
    }

    #[test]
    fn flushes_that_overlap_settle_what_was_freed_as_one() {
        let mut model = Model::new(vec![0; 4096]);
        let write = model.begin_write(512, 1024, 1, 0);
        model.end(write, 1);
        let first = model.begin_flush(2);
        let beside = model.begin_flush(2);
        model.end_flush(first, 4);
        model.end_flush(beside, 4);
        assert_eq!(model.unsettled_units(5, 512), 2, "one round of writes may have served both");
        let later = model.begin_flush(5);
        assert_eq!(model.unsettled_units(6, 512), 2, "not acknowledged");
        model.end_flush(later, 7);
        assert_eq!((model.unsettled_units(6, 512), model.unsettled_units(7, 512)), (2, 0));
    }
}
