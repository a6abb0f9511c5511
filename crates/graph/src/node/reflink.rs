// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Data that one image takes over from the file of another by sharing its blocks, where the file system can.

use super::{DetectZeroes, Node};
use crate::stats::IoKind;
use cowshed_storage::File;
use cowshed_types::Result;

impl Node {
    /// The files with the plain data of this layer and of those below it, which [`super::StatusExtent::file`] names.
    /// `None` where one of them isn't directly a file of this machine (a filter, a server, a nested image): its names
    /// mean nothing then.
    pub fn content_files(&self) -> Option<Vec<File>> {
        let mut files = vec![self.own_content_file()?];
        let mut layer = self.backing();
        while let Some(node) = layer {
            files.push(node.own_content_file()?);
            layer = node.backing();
        }
        Some(files)
    }

    fn own_content_file(&self) -> Option<File> {
        self.driver.content_file().filter(|file| file.is_plain()).cloned()
    }

    /// True where [`Node::share_from`] can take blocks over from `source`, by the file system's answer.
    pub async fn can_share_from(&self, source: &File) -> bool {
        match self.own_content_file() {
            Some(file) => file.can_share_from(source).await,
            None => false,
        }
    }

    /// See [`Node::share_from`].
    pub(super) async fn run_share_from(&self, offset: u64, len: u64, source: &File, source_offset: u64) -> Result<u64> {
        let start_ns = self.clock_ns();
        self.check_counted(IoKind::Write, offset, len)?;
        if self.settings.is_probed_raw()
            || self.settings.is_writethrough()
            || self.settings.detect_zeroes() != DetectZeroes::Off
        {
            return Ok(0);
        }
        let result = self.driver.share_from(offset, len, source, source_offset).await;
        // An error of the disk shows again in the write that the caller makes instead.
        let shared = match result {
            Ok(shared) => shared,
            Err(error) => {
                tracing::debug!("{}: {error}", self.name);
                0
            }
        };
        if shared > 0 {
            self.count(IoKind::Write, offset, shared, start_ns, &Ok(()));
            self.counters.note_written(offset + shared);
            self.tracking.written(offset, shared);
        }
        Ok(shared)
    }
}
