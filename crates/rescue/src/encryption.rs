// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The data of an encrypted image.

use crate::DamagedImage;
use crate::damaged_image::salvage;
use crate::header::CRYPT_LUKS;
use cowshed_crypto::legacy_aes;
use cowshed_image::encryption::{Cipher, LuksArea, SECTOR_BYTES, SectorsOf};
use cowshed_image::secret::Secret;
use cowshed_types::{Error, GuestOffset, HostOffset, Result};
use std::ops::Range;
use std::sync::Arc;

/// The first bytes of a LUKS header.
const MAGIC: &[u8] = b"LUKS\xba\xbe\0\x01";
/// Clusters at the beginning of a file that are searched where the header doesn't have the place of the LUKS header.
const SEARCHED_CLUSTERS: u64 = 1 << 16;

impl DamagedImage {
    /// True when the guest's data can't be read without a passphrase.
    pub fn is_encrypted(&self) -> bool {
        self.fields.crypt_method != 0
    }

    /// Takes the passphrase. A passphrase that opens nothing, and a lost LUKS header, are errors.
    pub async fn unlock(&mut self, secret: &Secret) -> Result<()> {
        let (cipher, by_host) = match self.fields.crypt_method {
            CRYPT_LUKS => (self.luks_area().await?.unlock(secret).await?.1, true),
            _ => (legacy_aes(secret.as_bytes())?, false),
        };
        self.cipher = Some(Arc::new(SectorsOf { cipher, by_host }));
        Ok(())
    }

    async fn luks_area(&mut self) -> Result<LuksArea> {
        let file = self.image.storage();
        let named = self.header().and_then(|header| header.encryption_header()).map(|area| (area.offset, area.length));
        if let Some((offset, len)) = named {
            return Ok(LuksArea { file, offset, len });
        }
        let cluster = self.shape.geometry.cluster_size();
        let clusters = (self.shape.file_len / cluster).min(SEARCHED_CLUSTERS);
        for offset in (1..clusters).map(|index| index * cluster) {
            if salvage(&self.image, offset, MAGIC.len()).await.0 == MAGIC {
                let message =
                    format!("the damaged header doesn't say where the LUKS header is: found one at {offset:#x}");
                self.fields.notes.push(message);
                return Ok(LuksArea { file, offset, len: self.shape.file_len - offset });
            }
        }
        let message = "the LUKS header is lost, and with it everything that it encrypts";
        Err(Error::invalid_image("luks_header", "missing", message))
    }

    /// Decrypts the read bytes of the guest's `guest`, from `host` on. Bytes that could not be read stay zero.
    pub(super) fn decrypt(&self, guest: u64, host: u64, bytes: &mut [u8], bad: impl Iterator<Item = Range<u64>>) {
        let Some(cipher) = &self.cipher else { return };
        let cipher: &dyn Cipher = &**cipher;
        cipher.decrypt(GuestOffset(guest), HostOffset(host), bytes);
        // A sector that the file ends in is lost as a whole.
        // The node counts whole sectors, its file doesn't.
        let len = self.data.as_ref().unwrap_or(&self.image).storage().len();
        let inside = len.saturating_sub(host) / SECTOR_BYTES * SECTOR_BYTES;
        let end = bytes.len() as u64;
        for lost in bad.chain(std::iter::once(inside.min(end)..end)) {
            bytes[lost.start as usize..lost.end as usize].fill(0);
        }
    }
}
