// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An image whose file was cut short must not be written to. The first cluster that is allocated makes the file longer. Then
//! the part that the cut took away would read as zeroes without a word.

use super::Qcow2Driver;
use cowshed_offline::check::{CheckOptions, FindingKind, check};
use cowshed_qcow2::ExtentList;
use cowshed_types::{Errno, Error, GuestOffset, HostOffset, Mapping, Result, StoredIn};

const REFUSAL: &str = "can't be opened for writing, which would turn what is lost into zeroes ('convert --salvage' and \
                       'rescue' read out the rest, 'check -r all --lossy' gives up what is lost)";

impl Qcow2Driver {
    /// Refuses to write to an image of which something lies past the end of its file, or of its data file. Costs one
    /// refcount block, unless clusters past the end are counted as used.
    pub(super) async fn refuse_lost_clusters(&self) -> Result<()> {
        let end = self.engine.geometry().clusters(self.file.len());
        if self.plan(|engine| engine.uses_clusters_from(end)).await? {
            self.refuse_lost_structures().await?;
        }
        match &self.data_file {
            Some(data_file) if data_file.len() < self.size() => self.refuse_lost_data(data_file.len()).await,
            _ => Ok(()),
        }
    }

    /// A crash may leave leaked clusters past the end: the check distinguishes them from lost ones.
    async fn refuse_lost_structures(&self) -> Result<()> {
        let report = check(&self.file, &CheckOptions::default(), &|_, _| true).await?;
        let lost = report.findings.iter().find_map(|finding| match finding.kind {
            FindingKind::PastEnd { structure, offset, .. } => Some((structure, offset, finding.guest)),
            _ => None,
        });
        let Some((structure, offset, guest)) = lost else { return Ok(()) };
        let message = format!(
            "{} lies past the end of the file ({} bytes)",
            match guest {
                Some(guest) => format!("the {} of guest offset {}", structure.name(), GuestOffset(guest)),
                None => format!("the {}", structure.name()),
            },
            self.file.len()
        );
        let error = Error::invalid_image("host_offset", HostOffset(offset), message).with_errno(Errno::EIO);
        Err(self.error(error.context(REFUSAL)))
    }

    /// Data in a data file lies at its guest offset: only bytes behind the end of the file can be lost.
    async fn refuse_lost_data(&self, data_file_len: u64) -> Result<()> {
        let mut extents = ExtentList::default();
        let mut at = data_file_len;
        while at < self.size() {
            let rest = self.size() - at;
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), rest, &mut extents)).await?;
            for extent in extents.iter() {
                if let Mapping::Data { host, file: file @ StoredIn::DataFile, .. } = extent.mapping {
                    self.check_stored(extent, file, host).map_err(|error| error.context(REFUSAL))?;
                }
            }
            at += mapped.max(1);
        }
        Ok(())
    }
}
