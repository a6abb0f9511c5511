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
        // Bytes 24–71 hold sizes and tables, 72–95 the feature bits of version 3.
        let mut bytes = Vec::with_capacity(72);
        bytes.extend(header.size.to_be_bytes());
        bytes.extend(header.crypt_method.to_be_bytes());
        bytes.extend(header.l1_size.to_be_bytes());
        bytes.extend(header.l1_table_offset.to_be_bytes());
        bytes.extend(header.refcount_table_offset.to_be_bytes());
        bytes.extend(header.refcount_table_clusters.to_be_bytes());
        bytes.extend(header.nb_snapshots.to_be_bytes());
        bytes.extend(header.snapshots_offset.to_be_bytes());
        if header.version >= 3 {
            bytes.extend(header.incompatible_features.to_be_bytes());
            bytes.extend(header.compatible_features.to_be_bytes());
            bytes.extend(header.autoclear_features.to_be_bytes());
        }
        let (result, _) = self.file.write_at(IoBuf::copy_from(&bytes), offset::SIZE).await;
        result?;
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }
}
