// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A file without contents: for measuring the cost of the layers above.
//!
//! Its reads are zeroes whatever the options are. Memory left as it is would be that of an earlier request, perhaps of
//! another export's client.

use crate::options::NullOptions;
use crate::payload::Payload;
use crate::rt;
use crate::sys::SysResult;

/// Reads as zeroes, forgets writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NullFile(pub(crate) NullOptions);

impl NullFile {
    async fn wait(&self) {
        if !self.0.latency.is_zero() {
            rt::sleep(self.0.latency).await;
        }
    }

    pub(crate) async fn read(&self, mut payload: Payload, skip: usize, offset: u64) -> (SysResult<usize>, Payload) {
        self.wait().await;
        let left = usize::try_from(self.0.len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let count = (payload.len() - skip).min(left);
        let mut position = 0;
        for buf in payload.bufs.slice_mut() {
            let start = skip.saturating_sub(position).min(buf.len());
            let end = (skip + count).saturating_sub(position).min(buf.len());
            buf[start..end.max(start)].fill(0);
            position += buf.len();
        }
        (Ok(count), payload)
    }

    pub(crate) async fn write(&self, payload: Payload, skip: usize) -> (SysResult<usize>, Payload) {
        self.wait().await;
        let count = payload.len() - skip;
        (Ok(count), payload)
    }
}
