// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cipher of an encrypted image: the master key out of a LUKS header's slots, or the legacy AES method.

use super::{Cipher, OpenContext};
use cowshed_block::{Error, ErrorKind, GuestOffset, HostOffset, Result};
use cowshed_crypto::luks::Volume;
use cowshed_crypto::{SECTOR_BYTES, SectorCipher, legacy_aes};
use cowshed_layout::luks::{HEADER_BYTES, LuksHeader};
use cowshed_layout::qcow2::Header;
use cowshed_storage::{IoBuf, rt};
use std::sync::Arc;

const METHOD_AES: u32 = 1;
const METHOD_LUKS: u32 = 2;

/// A key derivation beyond this takes many minutes: a header that asks for more is hostile or damaged.
const MOST_ITERATIONS: u32 = 1 << 30;

/// LUKS numbers sectors by their place in the file, the legacy method by that on the virtual disk.
struct ImageCipher {
    sectors: SectorCipher,
    by_host: bool,
}

impl ImageCipher {
    fn first(&self, guest: GuestOffset, host: HostOffset) -> u64 {
        (if self.by_host { host.0 } else { guest.0 }) / SECTOR_BYTES as u64
    }
}

impl Cipher for ImageCipher {
    fn encrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        self.sectors.encrypt(self.first(guest, host), bytes);
    }

    fn decrypt(&self, guest: GuestOffset, host: HostOffset, bytes: &mut [u8]) {
        self.sectors.decrypt(self.first(guest, host), bytes);
    }
}

/// The cipher of an image; `None` for one that isn't encrypted, or when there is no secret. A wrong passphrase, and options
/// that don't fit the image, are errors.
pub(super) async fn cipher_of(context: &OpenContext, header: &Header) -> Result<Option<Arc<dyn Cipher>>> {
    let found = match header.crypt_method {
        METHOD_AES => "aes",
        METHOD_LUKS => "luks",
        _ => "",
    };
    match &context.encryption.format {
        Some(wanted) if found.is_empty() => {
            let message = format!("No encryption in image header, but options specified format '{wanted}'");
            return Err(Error::invalid_argument(message));
        }
        Some(wanted) if wanted != found => {
            let message = format!("Header reported '{found}' encryption format but options specify '{wanted}'");
            return Err(Error::invalid_argument(message));
        }
        _ => {}
    }
    let Some(secret) = context.encryption.secret.clone() else { return Ok(None) };
    match header.crypt_method {
        METHOD_AES if context.writable && !context.check => {
            let message = "the legacy AES encryption is unsafe and only read: convert the image to LUKS";
            Err(Error::unsupported(message).field("crypt_method").value(METHOD_AES))
        }
        METHOD_AES => Ok(Some(Arc::new(ImageCipher { sectors: legacy_aes(secret.as_bytes())?, by_host: false }))),
        METHOD_LUKS => {
            let sectors = unlock(context, header, secret).await?;
            Ok(Some(Arc::new(ImageCipher { sectors, by_host: true })))
        }
        _ => Err(Error::invalid_argument("'encrypt.key-secret' is given, but the image is not encrypted")),
    }
}

/// Tries the passphrase on each slot.
async fn unlock(context: &OpenContext, header: &Header, secret: crate::secret::Secret) -> Result<SectorCipher> {
    let Some(area) = header.encryption_header().cloned() else {
        return Err(Error::invalid_image("crypt_method", METHOD_LUKS, "LUKS encryption without its header"));
    };
    let (result, bytes) = context.file.read_at(IoBuf::zeroed(HEADER_BYTES), area.offset).await;
    result?;
    let volume = Volume::new(LuksHeader::parse(&bytes)?, area.length)?;
    let slots: Vec<usize> = volume.active_slots().collect();
    let longest = slots.iter().map(|slot| volume.header().slots[*slot].iterations).max().unwrap_or(0);
    let iterations = longest.max(volume.header().master_key_iterations);
    if iterations > MOST_ITERATIONS {
        let message = "the key derivation would take too long";
        return Err(Error::new(ErrorKind::Limit, message).field("luks_iterations").value(iterations));
    }
    for slot in slots {
        let place = volume.key_material(slot);
        let len = (place.end - place.start) as usize;
        let (result, material) = context.file.read_at(IoBuf::zeroed(len), area.offset + place.start).await;
        result?;
        let (volume, secret) = (volume.clone(), secret.clone());
        let tried = rt::offload(move || {
            let key = volume.try_slot(slot, &material, secret.as_bytes())?;
            key.map(|key| volume.cipher(&key)).transpose()
        });
        if let Some(sectors) = tried.await? {
            return Ok(sectors);
        }
    }
    Err(Error::new(ErrorKind::PermissionDenied, "Invalid password, cannot unlock any keyslot"))
}
