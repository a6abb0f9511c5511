// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Secrets (`--object secret`): passphrases that options name by an id.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cowshed_crypto::{Zeroizing, unwrap_aes256};
use cowshed_types::{Error, Result};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// Longest file of a secret, in bytes.
const MAX_SECRET_BYTES: u64 = 1 << 20;

/// A passphrase; wiped from memory when the last copy goes, and never shown.
#[derive(Clone)]
pub struct Secret(Arc<Zeroizing<Vec<u8>>>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// For options that are compared; the cost of a guess is decided elsewhere.
impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.0 == other.0
    }
}

impl Eq for Secret {}

impl Secret {
    /// The bytes as they are.
    pub fn new(bytes: Vec<u8>) -> Secret {
        Secret(Arc::new(Zeroizing::new(bytes)))
    }

    /// From text or from a file, as it is or in base64. Exactly one of the two is given. A file may hold any bytes, of which only
    /// UTF-8 is a passphrase ([`Secret::passphrase`]).
    pub fn load(data: Option<&str>, file: Option<&Path>, is_base64: bool) -> Result<Secret> {
        Self::load_wrapped(data, file, is_base64, None)
    }

    /// As [`Secret::load`], where the text may be encrypted with another secret (AES-256 in CBC with PKCS #7 padding).
    pub fn load_wrapped(
        data: Option<&str>,
        file: Option<&Path>,
        is_base64: bool,
        wrapping: Option<&Wrapping<'_>>,
    ) -> Result<Secret> {
        let (given, source) = match (data, file) {
            (Some(data), None) => (Zeroizing::new(data.as_bytes().to_vec()), "'data'".to_owned()),
            (None, Some(file)) => (read_file(file)?, file.display().to_string()),
            (Some(_), Some(_)) => return Err(Error::invalid_argument("'file' and 'data' are mutually exclusive")),
            (None, None) => return Err(Error::invalid_argument("Either 'file' or 'data' must be provided")),
        };
        let bytes = if is_base64 { from_base64(&source, &given)? } else { given };
        let bytes = match wrapping {
            Some(wrapping) => {
                let vector = from_base64("'iv'", wrapping.vector_base64.as_bytes())?;
                unwrap_aes256(wrapping.key.as_bytes(), &vector, &bytes)?
            }
            None => bytes,
        };
        Ok(Secret(Arc::new(bytes)))
    }

    /// The secret as a passphrase, which is text; `id` names it.
    pub fn passphrase(self, id: &str) -> Result<Secret> {
        match std::str::from_utf8(&self.0) {
            Ok(_) => Ok(self),
            Err(_) => Err(Error::invalid_argument(format!("Data from secret {id} is not valid UTF-8"))),
        }
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The key and the vector of an encrypted secret.
pub struct Wrapping<'a> {
    /// The key, 32 bytes (`keyid`).
    pub key: &'a Secret,
    /// The initial vector, 16 bytes, in base64 (`iv`).
    pub vector_base64: &'a str,
}

impl<'a> Wrapping<'a> {
    /// From the options `keyid` and `iv`, which belong together; `find` returns the secret of an id.
    pub fn of(
        key_id: Option<&str>,
        vector_base64: Option<&'a str>,
        find: impl Fn(&str) -> Option<&'a Secret>,
    ) -> Result<Option<Wrapping<'a>>> {
        match (key_id, vector_base64) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(Error::invalid_argument("'iv' is given without 'keyid'")),
            (Some(id), vector) => match (find(id), vector) {
                (None, _) => {
                    Err(Error::invalid_argument(format!("No secret with id '{id}'")).hint(" (option 'keyid')"))
                }
                (Some(key), Some(vector_base64)) => Ok(Some(Wrapping { key, vector_base64 })),
                (Some(_), None) => Err(Error::invalid_argument("IV is required to decrypt secret: 'keyid' needs 'iv'")),
            },
        }
    }
}

fn from_base64(source: &str, text: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
    let digits = Zeroizing::new(text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect::<Vec<u8>>());
    let bytes = STANDARD.decode(&digits[..]).map(Zeroizing::new);
    let is_foreign = |byte: &u8| !byte.is_ascii_alphanumeric() && !b"+/=".contains(byte);
    bytes.map_err(|_| {
        let error = Error::invalid_argument(format!("{source}: no valid base64 text"));
        let is_of_others = digits.iter().any(is_foreign);
        if is_of_others { error.qemu("Base64 data contains invalid characters") } else { error }
    })
}

fn read_file(path: &Path) -> Result<Zeroizing<Vec<u8>>> {
    let failed = |step: &str, error: std::io::Error| {
        let text = error.to_string();
        let (reason, path) = (text.split(" (os error").next().unwrap_or_default(), path.display());
        let sentence = format!("Unable to read {path}: {step} file “{path}”: {reason}");
        Error::invalid_argument(format!("Unable to read {path}: {reason}")).qemu(sentence)
    };
    let mut bytes = Zeroizing::new(Vec::new());
    let file = std::fs::File::open(path).map_err(|error| failed("Failed to open", error))?;
    let read = file.take(MAX_SECRET_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| failed("Error reading", error))?;
    match bytes.len() as u64 > MAX_SECRET_BYTES {
        true => {
            Err(Error::invalid_argument(format!("{}: a secret has at most {MAX_SECRET_BYTES} bytes", path.display())))
        }
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pass");
        std::fs::write(&path, "Z2Vo\nZWlt\n").unwrap();
        assert_eq!(Secret::load(Some("geheim"), None, false).unwrap().as_bytes(), b"geheim");
        assert_eq!(Secret::load(Some("Z2VoZWlt"), None, true).unwrap().as_bytes(), b"geheim");
        assert_eq!(Secret::load(None, Some(&path), true).unwrap().as_bytes(), b"geheim");
        assert_eq!(Secret::load(None, Some(&path), false).unwrap().as_bytes(), b"Z2Vo\nZWlt\n");
        assert_eq!(format!("{:?}", Secret::new(b"geheim".to_vec())), "Secret");
        for (data, file, is_base64) in [
            (None, None, false),
            (Some("x"), Some(&*path), false),
            (Some("x"), None, true),
            (None, Some(Path::new("/nowhere")), false),
        ] {
            assert!(Secret::load(data, file, is_base64).is_err());
        }
        for wrong in ["Zg", "Zg=", "Z===", "Zh==", "Zm9=", "Zm9v*m==", "====", "Zg==Zg=="] {
            assert!(Secret::load(Some(wrong), None, true).is_err(), "{wrong}");
        }
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        let secret = Secret::load(None, Some(&path), false).unwrap();
        assert_eq!(secret.as_bytes(), [0xff, 0xfe]);
        let error = secret.passphrase("s").unwrap_err();
        assert!(error.to_string().contains("Data from secret s is not valid UTF-8"), "{error}");
    }
}
