// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The dirty bitmaps of a node, by name: those in memory, and the persistent ones of its image.

use super::requests::Left;
use super::tracking::Transient;
use super::{BitmapChange, BitmapStatus, ChildRole, Node, check_new_bitmap, default_granularity_bytes};
use cowshed_crypto::Hash;
use cowshed_storage::rt;
use cowshed_types::{DirtyBits, Error, ErrorKind, Result};
use std::future::Future;
use std::sync::Arc;

/// log2 of the bytes of a piece of a bitmap in memory.
const PIECE_BITS: u32 = 12;
/// The longest bitmap that a digest is made of.
const MAX_DIGESTED_BYTES: usize = 64 << 20;

/// A dirty bitmap of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeBitmap {
    /// Its name, unique for the node.
    pub name: String,
    /// Bytes of the disk that a bit stands for.
    pub granularity_bytes: u64,
    /// Dirty bytes, in whole granules; 0 of an inconsistent one.
    pub dirty_bytes: u64,
    /// It records writes.
    pub recording: bool,
    /// An export or a job uses it.
    pub busy: bool,
    /// It is kept in the image.
    pub persistent: bool,
    /// It was not saved correctly: it can only be removed.
    pub inconsistent: bool,
}

/// A bitmap's former state, for [`Node::restore_bitmap`].
#[derive(Clone, Debug)]
pub struct SavedBitmap {
    name: String,
    was: Option<(NodeBitmap, Arc<DirtyBits>)>,
}

/// A use of a bitmap: no other may change it meanwhile. It ends when this is dropped.
#[derive(Debug)]
pub struct BitmapUse {
    node: Arc<Node>,
    name: String,
}

impl BitmapUse {
    /// The node whose bitmap it is.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// The bitmap's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One more use by the same user.
    #[must_use]
    pub fn again(&self) -> BitmapUse {
        self.node.tracking.named().busy.push(self.name.clone());
        BitmapUse { node: Arc::clone(&self.node), name: self.name.clone() }
    }
}

impl Drop for BitmapUse {
    fn drop(&mut self) {
        let mut named = self.node.tracking.named();
        if let Some(at) = named.busy.iter().position(|name| *name == self.name) {
            named.busy.swap_remove(at);
        }
    }
}

impl Node {
    /// All dirty bitmaps, the persistent ones first.
    pub async fn bitmaps(&self) -> Result<Vec<NodeBitmap>> {
        let mut all = Vec::new();
        if let Some(stored) = self.stored_bitmaps() {
            for BitmapStatus { name, granularity_bytes, enabled, inconsistent } in stored.list().await? {
                let dirty = match inconsistent {
                    true => 0,
                    false => stored.bits(&name).await?.count(),
                };
                all.push(NodeBitmap {
                    busy: self.is_bitmap_busy(&name),
                    dirty_bytes: dirty.saturating_mul(granularity_bytes),
                    recording: enabled && !inconsistent && self.bitmaps_may_change(),
                    persistent: true,
                    name,
                    granularity_bytes,
                    inconsistent,
                });
            }
        }
        let transient = self.named_bitmaps().transient.clone();
        all.extend(transient.into_iter().map(|bitmap| NodeBitmap {
            busy: self.is_bitmap_busy(&bitmap.name),
            granularity_bytes: bitmap.bits.granularity_bytes(),
            dirty_bytes: bitmap.bits.count().saturating_mul(bitmap.bits.granularity_bytes()),
            recording: bitmap.enabled,
            persistent: false,
            inconsistent: false,
            name: bitmap.name,
        }));
        Ok(all)
    }

    /// As [`Node::bitmaps`], the newest first, whatever their kind.
    pub async fn bitmaps_newest_first(&self) -> Result<Vec<NodeBitmap>> {
        let mut all = self.bitmaps().await?;
        let added = self.tracking.named().added.clone();
        // Those that were stored at the opening are in the order of the image.
        all.sort_by_key(|bitmap| added.iter().position(|name| *name == bitmap.name).map_or(0, |at| at + 1));
        all.reverse();
        Ok(all)
    }

    /// True where the bitmaps that the image stores may be changed.
    pub fn bitmaps_may_change(&self) -> bool {
        !self.is_read_only() || self.is_below_snapshot()
    }

    fn is_bitmap_busy(&self, name: &str) -> bool {
        self.tracking.named().busy.iter().any(|busy| busy == name)
    }

    fn transient(&self, name: &str) -> Option<Transient> {
        self.named_bitmaps().transient.iter().find(|bitmap| bitmap.name == name).cloned()
    }

    fn no_such_bitmap(&self, name: &str) -> Error {
        Error::new(ErrorKind::NotFound, format!("Dirty bitmap '{name}' not found")).file(self.filename())
    }

    /// True when there is a bitmap of this name.
    pub async fn has_bitmap(&self, name: &str) -> Result<bool> {
        match (self.transient(name), self.stored_bitmaps()) {
            (Some(_), _) => Ok(true),
            (None, Some(stored)) => Ok(stored.list().await?.iter().any(|bitmap| bitmap.name == name)),
            (None, None) => Ok(false),
        }
    }

    /// The bits of a bitmap at this moment.
    pub async fn bitmap_bits(&self, name: &str) -> Result<Arc<DirtyBits>> {
        match (self.transient(name), self.stored_bitmaps()) {
            (Some(bitmap), _) => Ok(bitmap.bits),
            (None, Some(stored)) => stored.bits(name).await,
            (None, None) => Err(self.no_such_bitmap(name)),
        }
    }

    /// The SHA-256 of a bitmap's bits, as QEMU has it: in words of 64, the lowest bit first.
    pub async fn bitmap_digest(&self, name: &str) -> Result<String> {
        let bits = self.bitmap_bits(name).await?;
        let len = bits.bits().div_ceil(64).saturating_mul(8);
        let len = usize::try_from(len).ok().filter(|&len| len <= MAX_DIGESTED_BYTES);
        let len = len.ok_or_else(|| Error::new(ErrorKind::Limit, format!("bitmap '{name}' is too large")))?;
        let mut bytes = cowshed_types::memory::vec_for(len)?;
        bytes.resize(len, 0_u8);
        let mut rest = bytes.as_mut_slice();
        for piece in 0..bits.piece_count() {
            let stored = bits.piece_bytes(piece);
            let (start, behind) = rest.split_at_mut(stored.len().min(rest.len()));
            start.copy_from_slice(&stored[..start.len()]);
            rest = behind;
        }
        Ok(Hash::Sha256.digest(&[&bytes]).iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Refuses a bitmap that doesn't exist, is in use, or may not be believed.
    pub async fn check_bitmap(&self, name: &str) -> Result<NodeBitmap> {
        let found = self.bitmaps().await?.into_iter().find(|bitmap| bitmap.name == name);
        let Some(bitmap) = found else { return Err(self.no_such_bitmap(name)) };
        if bitmap.busy {
            let message = format!("Bitmap '{name}' is currently in use by another operation and cannot be used");
            return Err(Error::new(ErrorKind::Busy, message).file(self.filename()));
        }
        if bitmap.inconsistent {
            let message = format!("Bitmap '{name}' is inconsistent and cannot be used, only removed");
            return Err(Error::new(ErrorKind::InvalidImage, message).file(self.filename()));
        }
        Ok(bitmap)
    }

    /// Refuses a bitmap that can't change: the image is only read, or its format has a way to read bitmaps alone.
    pub fn check_bitmap_changes(&self, name: &str) -> Result<()> {
        let may_change = self.bitmaps_may_change() && self.changeable_bitmaps().is_some();
        if may_change || self.transient(name).is_some() {
            return Ok(());
        }
        let message = format!("Bitmap '{name}' is readonly and cannot be modified");
        Err(Error::new(ErrorKind::ReadOnly, message).file(self.filename()))
    }

    /// Uses a bitmap until the result is dropped.
    pub async fn use_bitmap(self: &Arc<Self>, name: &str) -> Result<BitmapUse> {
        self.check_bitmap(name).await?;
        self.tracking.named().busy.push(name.to_owned());
        Ok(BitmapUse { node: Arc::clone(self), name: name.to_owned() })
    }

    /// The first node from this one down, through filters and backing files, with a bitmap of this name.
    pub async fn find_bitmap(self: &Arc<Self>, name: &str) -> Result<Arc<Node>> {
        let mut node = Arc::clone(self);
        loop {
            if node.has_bitmap(name).await? {
                return Ok(node);
            }
            let below = if node.is_filter() { node.child(ChildRole::File) } else { node.backing() };
            node = below.ok_or_else(|| {
                Error::new(ErrorKind::NotFound, format!("Bitmap '{name}' is not found")).file(self.filename())
            })?;
        }
    }

    /// Makes a change. `persistent`: where a new bitmap is kept. While anything is recorded no request may run: drain first.
    /// Once polled, it is carried out even when the future is dropped.
    pub fn change_bitmap(&self, change: &BitmapChange, persistent: bool) -> impl Future<Output = Result<()>> + use<> {
        let (node, change) = (self.shared(), change.clone());
        rt::to_completion_of(Left(Arc::clone(&node)), async move { node.run_change_bitmap(&change, persistent).await })
    }

    async fn run_change_bitmap(&self, change: &BitmapChange, persistent: bool) -> Result<()> {
        match change {
            BitmapChange::Add { name, .. } => {
                if self.has_bitmap(name).await? {
                    let message = format!("Bitmap already exists: {name}");
                    return Err(Error::invalid_argument(message).file(self.filename()));
                }
            }
            BitmapChange::Remove(name) => {
                if self.is_bitmap_busy(name) {
                    self.check_bitmap(name).await?;
                }
            }
            BitmapChange::Clear(name) | BitmapChange::Enable(name) | BitmapChange::Disable(name) => {
                self.check_bitmap(name).await?;
            }
            BitmapChange::Merge { target, .. } => drop(self.check_bitmap(target).await?),
        }
        let changed = self.carry_out_bitmap_change(change, persistent).await;
        if changed.is_ok()
            && let BitmapChange::Add { name, .. } | BitmapChange::Remove(name) = change
        {
            let added = &mut self.tracking.named().added;
            added.retain(|known| known != name);
            if matches!(change, BitmapChange::Add { .. }) {
                added.push(name.clone());
            }
        }
        changed
    }

    async fn carry_out_bitmap_change(&self, change: &BitmapChange, persistent: bool) -> Result<()> {
        match change {
            BitmapChange::Add { name, granularity_bytes, enabled } if !persistent => {
                self.add_transient(name, *granularity_bytes, *enabled)
            }
            BitmapChange::Add { .. } => self.change_persistent(change).await,
            BitmapChange::Remove(name) => match self.remove_transient(name) {
                true => Ok(()),
                false => self.change_persistent(change).await,
            },
            BitmapChange::Clear(name) => match self.edit(name, |bitmap| Arc::make_mut(&mut bitmap.bits).clear()) {
                Some(()) => Ok(()),
                None => self.change_persistent(change).await,
            },
            BitmapChange::Enable(name) | BitmapChange::Disable(name) => {
                let enabled = matches!(change, BitmapChange::Enable(_));
                match self.edit(name, |bitmap| bitmap.enabled = enabled) {
                    Some(()) => {
                        self.start_tracking();
                        Ok(())
                    }
                    None => self.change_persistent(change).await,
                }
            }
            BitmapChange::Merge { target, source } => {
                match self.edit(target, |bitmap| Arc::make_mut(&mut bitmap.bits).merge(source)) {
                    Some(merged) => merged,
                    None => self.change_persistent(change).await,
                }
            }
        }
    }

    /// False where there is none in memory.
    fn remove_transient(&self, name: &str) -> bool {
        let transient = &mut self.tracking.named().transient;
        let before = transient.len();
        transient.retain(|bitmap| bitmap.name != name);
        transient.len() < before
    }

    /// Edits a bitmap in memory; `None` where there is none.
    fn edit<T>(&self, name: &str, edit: impl FnOnce(&mut Transient) -> T) -> Option<T> {
        let mut named = self.named_bitmaps();
        named.transient.iter_mut().find(|bitmap| bitmap.name == name).map(edit)
    }

    async fn change_persistent(&self, change: &BitmapChange) -> Result<()> {
        match self.changeable_bitmaps() {
            Some(stored) => stored.change(std::slice::from_ref(change)).await,
            None => {
                let message = format!("Can't store persistent bitmaps to {}", self.name());
                Err(Error::unsupported(message).file(self.filename()))
            }
        }
    }

    fn add_transient(&self, name: &str, granularity_bytes: Option<u64>, enabled: bool) -> Result<()> {
        let default = default_granularity_bytes(self.cluster_bytes().unwrap_or(0));
        let granularity = granularity_bytes.unwrap_or(default);
        let granularity_bits = check_new_bitmap(name, granularity).map_err(|error| error.file(self.filename()))?;
        let bits = Arc::new(DirtyBits::new(self.size(), granularity_bits, PIECE_BITS));
        self.tracking.named().transient.push(Transient { name: name.to_owned(), enabled, bits });
        self.start_tracking();
        Ok(())
    }

    /// Makes a bitmap hold these bits and nothing else. No request may run. Once polled, it is carried out even when the future is
    /// dropped.
    pub fn set_bitmap_bits(&self, name: &str, bits: &Arc<DirtyBits>) -> impl Future<Output = Result<()>> + use<> {
        let (node, name, bits) = (self.shared(), name.to_owned(), Arc::clone(bits));
        rt::to_completion_of(Left(Arc::clone(&node)), async move { node.run_set_bitmap_bits(&name, &bits).await })
    }

    async fn run_set_bitmap_bits(&self, name: &str, bits: &Arc<DirtyBits>) -> Result<()> {
        let set = self.edit(name, |bitmap| {
            let target = Arc::make_mut(&mut bitmap.bits);
            target.clear();
            target.merge(bits)
        });
        match (set, self.changeable_bitmaps()) {
            (Some(set), _) => set,
            (None, Some(stored)) => {
                let merge = BitmapChange::Merge { target: name.to_owned(), source: Arc::clone(bits) };
                stored.change(&[BitmapChange::Clear(name.to_owned()), merge]).await
            }
            (None, None) => Err(self.no_such_bitmap(name)),
        }
    }

    /// The present state of the bitmap of this name, or its absence.
    pub async fn save_bitmap(&self, name: &str) -> Result<SavedBitmap> {
        let found = self.bitmaps().await?.into_iter().find(|bitmap| bitmap.name == name && !bitmap.inconsistent);
        let was = match found {
            Some(bitmap) => Some((bitmap, self.bitmap_bits(name).await?)),
            None => None,
        };
        Ok(SavedBitmap { name: name.to_owned(), was })
    }

    /// Gives the bitmap its former state. No request may run. Once polled, it is carried out even when the future is
    /// dropped.
    pub fn restore_bitmap(&self, saved: &SavedBitmap) -> impl Future<Output = Result<()>> + use<> {
        let (node, saved) = (self.shared(), saved.clone());
        rt::to_completion_of(Left(Arc::clone(&node)), async move { node.run_restore_bitmap(&saved).await })
    }

    async fn run_restore_bitmap(&self, saved: &SavedBitmap) -> Result<()> {
        let name = saved.name.clone();
        if self.has_bitmap(&name).await? {
            self.run_change_bitmap(&BitmapChange::Remove(name.clone()), false).await?;
        }
        let Some((was, bits)) = &saved.was else { return Ok(()) };
        let granularity_bytes = Some(was.granularity_bytes);
        let add = BitmapChange::Add { name: name.clone(), granularity_bytes, enabled: was.recording };
        self.run_change_bitmap(&add, was.persistent).await?;
        self.run_set_bitmap_bits(&name, bits).await
    }
}
