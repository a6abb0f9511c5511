// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of the header: always a write of fixed fields in its first sector, never of the whole header.

use super::Qcow2Driver;
use cowshed_block::Result;
use cowshed_layout::qcow2::{Header, offset};
use cowshed_storage::IoBuf;
use std::sync::PoisonError;

impl Qcow2Driver {
    /// Changes fields of the header, in memory and by one write within the first sector, without a barrier.
    pub(super) async fn edit_header(&self, edit: impl FnOnce(&mut Header)) -> Result<()> {
        let mut header = self.header();
        edit(&mut header);
        let (result, _) = self.file.write_at(IoBuf::copy_from(&header.encode_changing_fields()), offset::SIZE).await;
        result?;
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }
}
