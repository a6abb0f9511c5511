// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Space for metadata that the mapping doesn't know: that of dirty bitmaps.

use crate::engine::Engine;
use crate::stall::Planned;
use crate::structures::Structure;
use cowshed_types::HostOffset;

impl Engine {
    /// Takes `clusters` neighbouring host clusters, at least one. Their counts are durable after a whole write-back cycle
    /// with refcounts; nothing on disk may refer to them before that.
    pub fn allocate_metadata(&self, clusters: u64) -> Planned<HostOffset> {
        let mut state = self.lock_state();
        let first = match clusters {
            0 | 1 => self.allocate(&mut state, 1, None)?.cluster,
            clusters => self.allocate_contiguous(&mut state, clusters)?,
        };
        Ok(HostOffset(first << self.geometry.cluster_bits()))
    }

    /// Gives host clusters back, each with one reference: nothing on disk refers to them any more, durably. Offsets of
    /// clusters.
    pub fn free_metadata(&self, clusters: impl IntoIterator<Item = HostOffset>) {
        let bits = self.geometry.cluster_bits();
        let mut state = self.lock_state();
        self.give_back(&mut state, clusters.into_iter().map(|host| host.0 >> bits));
    }

    /// True when a write to a host cluster would hit metadata that the overlap checks know.
    pub fn is_other_metadata(&self, host: HostOffset) -> bool {
        self.metadata.contains(host.0 >> self.geometry.cluster_bits())
    }

    /// The bitmap directory has moved: where it is now and its bytes, or that there is none.
    pub fn set_bitmap_directory(&self, place: Option<(HostOffset, u64)>) {
        let bits = self.geometry.cluster_bits();
        let mut state = self.lock_state();
        let clusters = |offset: u64, bytes: u64| offset >> bits..(offset + bytes).div_ceil(1 << bits);
        for (_, offset, bytes) in state.other_metadata.extract_if(.., |(kind, ..)| *kind == Structure::BitmapDirectory)
        {
            self.unmark(Structure::BitmapDirectory, clusters(offset, bytes));
        }
        if let Some((offset, bytes)) = place {
            self.mark(Structure::BitmapDirectory, clusters(offset.0, bytes));
            state.other_metadata.push((Structure::BitmapDirectory, offset.0, bytes));
        }
    }
}
