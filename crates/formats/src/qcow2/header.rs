// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of the header: always a write of fixed fields in its first sector; parts beyond it are switched to from
//! there.

use super::Qcow2Driver;
use cowshed_layout::qcow2::{Extension, Header, HeaderStages, extension_type, offset, switch_header};
use cowshed_storage::IoBuf;
use cowshed_storage::fault::Event;
use cowshed_types::{Error, Result, name_of_text, slip};
use std::sync::PoisonError;

impl Qcow2Driver {
    /// Changes fields of the header, in memory and by one write within the first sector, without a barrier.
    pub(super) async fn edit_header(&self, edit: impl FnOnce(&mut Header)) -> Result<()> {
        let old = self.header().encode_changing_fields();
        let mut header = self.header();
        edit(&mut header);
        let new = header.encode_changing_fields();
        if let Err(error) = self.write_metadata(IoBuf::copy_from(&new), offset::SIZE).await {
            self.expect_fields(error, &old, &new).await?;
        }
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header;
        Ok(())
    }

    /// Reads the fields that a failed write of the header has left. `Ok`: they are the new ones, and the caller's barrier makes them
    /// durable. If the file has neither the new ones nor the old, or can't be read, nothing more is written to the image.
    async fn expect_fields(&self, error: Error, old: &[u8], new: &[u8]) -> Result<()> {
        if slip!("failed_header_is_believed_old") {
            return Err(error);
        }
        let (result, there) = self.read_metadata(IoBuf::zeroed(new.len()), offset::SIZE).await;
        if result.is_ok() && there[..] == *new {
            tracing::warn!("a write of the header has failed, and the header is the new one: {error}");
            return Ok(());
        }
        if result.is_err() || there[..] != *old {
            self.abandon();
        }
        Err(error)
    }

    /// Changes extensions and the backing file's name, durably. A power cut leaves the old header or the new one
    /// (`cowshed_layout::qcow2::switch_header`).
    ///
    /// # Errors
    /// Also with the new header in the file, or one between: [`Self::header`] is the file's header then, too. If the file's can't be
    /// read, nothing more is written to the image.
    pub(super) async fn switch_header(&self, edit: impl FnOnce(&mut Header)) -> Result<()> {
        self.check_writable()?;
        let _guard = self.cycle_lock.lock().await;
        let old = self.header();
        let mut new = old.clone();
        edit(&mut new);
        let (result, mut cluster) = self.read_metadata(IoBuf::zeroed(old.cluster_size() as usize), 0).await;
        result?;
        let stages = switch_header(&cluster, &old, &new).map_err(|error| self.error(error))?;
        for (offset, bytes) in stages.iter().flatten() {
            cluster[*offset as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        // A read behind the switch might fail, and the header in memory would be the old one.
        let written = Header::parse(&cluster).map_err(|error| self.error(error))?;
        self.barrier().await?;
        if let Err(error) = self.write_stages(stages).await {
            self.note_header().await;
            return Err(error);
        }
        *self.header.lock().unwrap_or_else(PoisonError::into_inner) = written;
        Ok(())
    }

    async fn write_stages(&self, stages: HeaderStages) -> Result<()> {
        for stage in stages {
            for (offset, bytes) in stage {
                self.write_metadata(IoBuf::copy_from(&bytes), offset).await?;
            }
            self.file.sync().await?;
        }
        Ok(())
    }

    /// Takes the header that a failed switch has left in the file.
    async fn note_header(&self) {
        if slip!("failed_header_is_believed_old") {
            return;
        }
        let (result, cluster) = self.read_metadata(IoBuf::zeroed(self.header().cluster_size() as usize), 0).await;
        match result.and_then(|()| Header::parse(&cluster)) {
            Ok(header) => *self.header.lock().unwrap_or_else(PoisonError::into_inner) = header,
            Err(error) => {
                tracing::warn!("the header can't be read after a write of it has failed: {error}");
                self.abandon();
            }
        }
    }

    /// See [`cowshed_graph::Node::change_backing_file`].
    pub(crate) async fn change_backing_file(&self, name: Option<&str>, format: Option<&str>) -> Result<()> {
        self.be_writable().await?;
        self.switch_header(|header| {
            header.backing_file = name.map(|name| name_of_text(name).into_owned());
            match format.filter(|_| name.is_some()) {
                Some(format) => header.set_extension(Extension::BackingFormat(format.as_bytes().to_vec())),
                None => header.remove_extension(extension_type::BACKING_FORMAT),
            }
        })
        .await
    }

    /// See [`cowshed_graph::Node::make_empty`].
    pub(crate) async fn make_empty(&self) -> Result<()> {
        self.be_writable().await?;
        self.meet(Event::EmptyImagePrepare).await;
        self.unmap_behind(0).await?;
        self.write_back(false).await?;
        self.reclaim().await
    }
}
