// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cipher of an encrypted image, and its key slots.

use super::{Cipher, OpenContext, Qcow2Driver};
use cowshed_crypto::legacy_aes;
use cowshed_graph::encryption::{LuksArea, SectorsOf};
use cowshed_layout::qcow2::Header;
use cowshed_storage::File;
use cowshed_types::{Error, Result};
use std::sync::Arc;

const METHOD_AES: u32 = 1;
const METHOD_LUKS: u32 = 2;

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
        METHOD_AES => Ok(Some(Arc::new(SectorsOf { cipher: legacy_aes(secret.as_bytes())?, by_host: false }))),
        METHOD_LUKS => {
            let (_, cipher) = luks_area(&context.file, header)?.unlock(&secret).await?;
            Ok(Some(Arc::new(SectorsOf { cipher, by_host: true })))
        }
        // A key that nothing needs is no error, as in QEMU.
        _ => Ok(None),
    }
}

/// The place of the LUKS header of an image.
fn luks_area(file: &File, header: &Header) -> Result<LuksArea> {
    let Some(area) = header.encryption_header() else {
        return Err(Error::invalid_image("crypt_method", METHOD_LUKS, "LUKS encryption without its header"));
    };
    Ok(LuksArea { file: file.clone(), offset: area.offset, len: area.length })
}

impl Qcow2Driver {
    /// True when the guest's data is stored encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.engine.config().encrypted
    }

    /// The place of the LUKS header with its key slots. Other images are refused.
    pub fn luks_area(&self) -> Result<LuksArea> {
        let header = self.header();
        match header.crypt_method {
            METHOD_LUKS => luks_area(&self.file, &header).map_err(|error| self.error(error)),
            METHOD_AES => Err(self.error(Error::unsupported("only LUKS encryption has key slots"))),
            _ => Err(self.error(Error::invalid_argument("the image isn't encrypted: it has no key slots"))),
        }
    }
}
