// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Blocks in one place: each but the first gets a copy of its own, as in QEMU's repair.

use super::{ENTRY_BYTES, Parallels};
use crate::blocks::{BlockFormat, ImageFile};
use cowshed_storage::{File, IoBuf};
use cowshed_types::memory::try_push;
use cowshed_types::{Result, slip};

/// Data are copied in parts of this many bytes.
const PART_BYTES: u64 = 1 << 20;

impl Parallels {
    /// Copies blocks that lie on another one, durably before an entry leads there. Their number, and the end of the last copy.
    pub(super) async fn part_twins(&self, image: &ImageFile, file: &File, was_in_use: bool) -> Result<(u64, u64)> {
        let (cluster_bytes, first) = (self.header.cluster_bytes, self.header.data_offset);
        let mut places = Vec::new();
        let mut from = 0;
        while let Some((cluster, start)) = self.next_entry(image, from).await? {
            from = cluster + 1;
            if let Some(start) =
                Some(start).filter(|start| *start >= first && start.saturating_add(cluster_bytes) <= image.len())
            {
                try_push(&mut places, (start, cluster))?;
            }
        }
        places.sort_unstable();
        // Twins keep their places until all of them are copied: in an image of the old magic they lie on another one in part.
        let (mut kept_end, mut twins, mut taken) = (0, Vec::new(), Vec::new());
        for (start, cluster) in places {
            match start < kept_end {
                true => try_push(&mut twins, (cluster, start))?,
                false => kept_end = start + cluster_bytes,
            }
            try_push(&mut taken, start)?;
        }
        if twins.is_empty() {
            return Ok((0, 0));
        }
        // The clusters of the format extension are free then.
        self.mark(file, was_in_use).await?;
        twins.sort_unstable();
        let (mut taken, mut next, mut entries) = (taken.into_iter().peekable(), first, Vec::new());
        for (cluster, start) in twins {
            while let Some(start) = taken.next_if(|start| *start < next + cluster_bytes) {
                next = next.max(start + cluster_bytes);
            }
            let mut at = 0;
            while at < cluster_bytes {
                let len = (cluster_bytes - at).min(PART_BYTES);
                let (result, bytes) = file.read_at(IoBuf::try_zeroed(len as usize)?, start + at).await;
                result?;
                file.write_at(bytes, next + at).await.0?;
                at += len;
            }
            try_push(&mut entries, (cluster, self.entry(next)?))?;
            next += cluster_bytes;
        }
        if !slip!("parallels_copy_led_to_before_it_is_durable") {
            file.sync().await?;
        }
        for (cluster, entry) in &entries {
            file.write_at(IoBuf::copy_from(entry), self.bat.offset + cluster * ENTRY_BYTES).await.0?;
        }
        file.sync().await?;
        image.forget();
        Ok((entries.len() as u64, next))
    }
}
