// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The place of a LUKS header with its key slots: the start of a file, or clusters of a qcow2 image.

use crate::secret::Secret;
use cowshed_crypto::SectorCipher;
use cowshed_crypto::luks::{MasterKey, Volume};
use cowshed_layout::luks::{HEADER_BYTES, LuksHeader};
use cowshed_storage::{File, IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result};

/// A key derivation beyond this takes many minutes: a header that asks for more is hostile or damaged.
const MOST_ITERATIONS: u32 = 1 << 30;

/// The place of a LUKS header, in bytes.
#[derive(Clone, Debug)]
pub struct LuksArea {
    /// The file that it is in.
    pub file: File,
    /// Its first byte.
    pub offset: u64,
    /// Bytes that header and key slots may take.
    pub len: u64,
}

impl LuksArea {
    /// Reads the header. A contradictory header is refused by its field.
    pub async fn volume(&self) -> Result<Volume> {
        if self.offset.saturating_add(HEADER_BYTES as u64) > self.file.len() {
            let message = "the LUKS header lies past the end of the file";
            return Err(Error::invalid_image("luks_header", self.offset, message));
        }
        let (result, bytes) = self.file.read_at(IoBuf::zeroed(HEADER_BYTES), self.offset).await;
        result?;
        Volume::new(LuksHeader::parse(&bytes)?, self.len)
    }

    /// Tries the passphrase on each slot. `None` when it opens none.
    pub async fn master_key(&self, volume: &Volume, secret: &Secret) -> Result<Option<MasterKey>> {
        check_iterations(volume)?;
        for slot in volume.active_slots() {
            if let Some(key) = self.try_slot(volume, slot, secret).await? {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }

    /// The master key, if the passphrase is that of the slot.
    pub async fn try_slot(&self, volume: &Volume, slot: usize, secret: &Secret) -> Result<Option<MasterKey>> {
        check_iterations(volume)?;
        let place = volume.key_material(slot);
        let len = (place.end - place.start) as usize;
        let (result, material) = self.file.read_at(IoBuf::try_zeroed(len)?, self.offset + place.start).await;
        result?;
        let (volume, secret) = (volume.clone(), secret.clone());
        rt::run_on_cpu_pool(move || volume.try_slot(slot, &material, secret.as_bytes())).await
    }

    /// The cipher of the data. A passphrase that opens no slot is an error.
    pub async fn unlock(&self, secret: &Secret) -> Result<(Volume, SectorCipher)> {
        let volume = self.volume().await?;
        let key = self.master_key(&volume, secret).await?.ok_or_else(wrong_passphrase)?;
        let cipher = volume.cipher(&key)?;
        Ok((volume, cipher))
    }
}

pub(super) fn wrong_passphrase() -> Error {
    Error::new(ErrorKind::PermissionDenied, "Invalid password, cannot unlock any keyslot")
}

fn check_iterations(volume: &Volume) -> Result<()> {
    let longest = volume.active_slots().map(|slot| volume.header().slots[slot].iterations).max().unwrap_or(0);
    let iterations = longest.max(volume.header().master_key_iterations);
    if iterations > MOST_ITERATIONS {
        let message = "the key derivation would take too long";
        return Err(Error::new(ErrorKind::Limit, message).field("luks_iterations").value(iterations));
    }
    Ok(())
}
