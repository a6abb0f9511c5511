// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `object-add` makes: throttle groups, credentials, secrets, threads.

use cowshed_image::filters::throttle::{Group, Limits};
use cowshed_nbd::ServerTls;
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;

/// An object.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    /// A name for a thread: connections are spread over the daemon's own threads, so it decides nothing.
    IoThread,
    /// `throttle-group`: limits that its members share.
    ThrottleGroup(Arc<Group>),
    /// `secret`: a passphrase or key for others. It is never shown.
    Secret(Secret),
    /// `tls-creds-x509`: a folder with certificates.
    TlsCreds { dir: PathBuf, is_server: bool, verify_peer: bool },
}

impl Object {
    /// Its type.
    pub fn kind(&self) -> &'static str {
        match self {
            Object::IoThread => "iothread",
            Object::ThrottleGroup(_) => "throttle-group",
            Object::Secret(_) => "secret",
            Object::TlsCreds { .. } => "tls-creds-x509",
        }
    }

    /// The names and types of its properties.
    pub fn properties(&self) -> Vec<(String, &'static str)> {
        match self {
            Object::IoThread => Vec::new(),
            Object::ThrottleGroup(_) => {
                let names = Limits::option_names().map(|name| (format!("x-{name}"), "int"));
                std::iter::once(("limits".to_owned(), "ThrottleLimits")).chain(names).collect()
            }
            Object::Secret(secret) => {
                let file = secret.file.iter().map(|_| ("file".to_owned(), "string"));
                file.chain([("format".to_owned(), "QCryptoSecretFormat")]).collect()
            }
            Object::TlsCreds { .. } => {
                let names = [("dir", "string"), ("endpoint", "QCryptoTLSCredsEndpoint"), ("verify-peer", "bool")];
                names.map(|(name, kind)| (name.to_owned(), kind)).into()
            }
        }
    }

    /// The value of a property.
    pub fn get(&self, property: &str) -> Option<Value> {
        match (self, property) {
            (Object::ThrottleGroup(group), "limits") => Some(Value::Object(group.limits().to_json())),
            (Object::ThrottleGroup(group), name) => group.limits().get(name.strip_prefix("x-")?).map(Value::from),
            (Object::Secret(secret), "file") => secret.file.as_deref().map(Value::from),
            (Object::Secret(secret), "format") => Some(if secret.is_base64 { "base64" } else { "raw" }.into()),
            (Object::TlsCreds { dir, .. }, "dir") => Some(dir.to_string_lossy().into()),
            (Object::TlsCreds { is_server, .. }, "endpoint") => {
                Some(if *is_server { "server" } else { "client" }.into())
            }
            (Object::TlsCreds { verify_peer, .. }, "verify-peer") => Some((*verify_peer).into()),
            _ => None,
        }
    }

    /// Changes a property. What is wrong changes nothing.
    pub fn set(&self, property: &str, value: &Value) -> QmpResult<()> {
        let failed = |error: cowshed_block::Error| QmpError::generic(error.to_string());
        let Object::ThrottleGroup(group) = self else {
            return Err(QmpError::generic(format!("Property '{property}' of '{}' cannot be changed", self.kind())));
        };
        let mut limits = group.limits();
        match (property, value) {
            ("limits", Value::Object(given)) => {
                // What isn't named stays as it is.
                let mut all = limits.to_json();
                for (name, value) in given {
                    all.insert(name.clone(), value.clone());
                }
                limits = Limits::from_json(&all).map_err(failed)?;
            }
            ("limits", _) => {
                return Err(QmpError::generic("Invalid parameter type for 'limits', expected: object"));
            }
            (name, value) => {
                let number = value.as_u64();
                let wrong = || QmpError::generic(format!("Invalid parameter type for '{name}', expected: integer"));
                limits.set(name, number.ok_or_else(wrong)?).map_err(failed)?;
            }
        }
        group.set_limits(limits).map_err(failed)
    }
}

/// A secret.
#[derive(Clone)]
pub(crate) struct Secret {
    bytes: Vec<u8>,
    file: Option<String>,
    is_base64: bool,
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secret").field("file", &self.file).finish_non_exhaustive()
    }
}

/// Longest file of a secret, in bytes.
const MAX_SECRET_BYTES: u64 = 1 << 20;

impl Secret {
    /// From its text or from a file, as it is or in base64. Exactly one of the two must be given.
    pub fn new(data: Option<&str>, file: Option<&str>, is_base64: bool) -> QmpResult<Secret> {
        let (given, source) = match (data, file) {
            (Some(data), None) => (data.as_bytes().to_vec(), "'data'".to_owned()),
            (None, Some(file)) => (read_secret(file)?, file.to_owned()),
            (Some(_), Some(_)) => return Err(QmpError::generic("'file' and 'data' are mutually exclusive")),
            (None, None) => return Err(QmpError::generic("Must provide 'file' or 'data'")),
        };
        let bytes = match is_base64 {
            true => from_base64(&given)
                .ok_or_else(|| QmpError::generic(format!("{source}: the secret is no valid base64 text")))?,
            // A raw one may be used as a passphrase, which is text.
            false if std::str::from_utf8(&given).is_err() => {
                return Err(QmpError::generic(format!("{source}: a secret of format 'raw' must be UTF-8 text")));
            }
            false => given,
        };
        Ok(Secret { bytes, file: file.map(str::to_owned), is_base64 })
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }
}

fn read_secret(path: &str) -> QmpResult<Vec<u8>> {
    let failed = |error: std::io::Error| QmpError::generic(format!("Unable to read {path}: {error}"));
    let mut bytes = Vec::new();
    std::fs::File::open(path).map_err(failed)?.take(MAX_SECRET_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 > MAX_SECRET_BYTES {
        true => Err(QmpError::generic(format!("{path}: a secret has at most {MAX_SECRET_BYTES} bytes"))),
        false => Ok(bytes),
    }
}

/// RFC 4648, with padding; white space (the end of a file's line) is skipped.
fn from_base64(text: &[u8]) -> Option<Vec<u8>> {
    let text: Vec<u8> = text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    if !text.len().is_multiple_of(4) || padding > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let digits = &text[..text.len() - padding];
    for group in digits.chunks(4) {
        let mut bits = 0u32;
        for digit in group {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return None,
            };
            bits = bits << 6 | u32::from(value);
        }
        bits <<= 6 * (4 - group.len());
        let [_, whole @ ..] = bits.to_be_bytes();
        let (kept, rest) = whole.split_at(group.len() - 1);
        if rest.iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(kept);
    }
    Some(bytes)
}

/// The objects by id.
#[derive(Debug, Default)]
pub(crate) struct Objects(RefCell<BTreeMap<String, Object>>);

impl Objects {
    /// Adds one; its id must be new.
    pub fn add(&self, id: &str, object: Object) -> QmpResult<()> {
        let mut objects = self.0.borrow_mut();
        if objects.contains_key(id) {
            return Err(duplicate(id));
        }
        objects.insert(id.to_owned(), object);
        Ok(())
    }

    /// The object with this id.
    pub fn find(&self, id: &str) -> Option<Object> {
        self.0.borrow().get(id).cloned()
    }

    /// Takes one away.
    pub fn remove(&self, id: &str) -> Option<Object> {
        self.0.borrow_mut().remove(id)
    }

    /// Ids and types.
    pub fn list(&self) -> Vec<(String, &'static str)> {
        self.0.borrow().iter().map(|(id, object)| (id.clone(), object.kind())).collect()
    }

    /// The object that a path means: its id, or `/objects/ID`.
    pub fn at_path(&self, path: &str) -> QmpResult<(String, Object)> {
        let id = path.strip_prefix("/objects/").unwrap_or(path);
        let found = self.find(id).map(|object| (id.to_owned(), object));
        found.ok_or_else(|| QmpError::new(ErrorClass::DeviceNotFound, format!("Device '{path}' not found")))
    }

    /// Makes a server's credentials.
    pub fn server_tls(&self, id: &str) -> QmpResult<ServerTls> {
        match self.find(id) {
            Some(Object::TlsCreds { dir, is_server: true, verify_peer }) => {
                ServerTls::from_dir(&dir, verify_peer).map_err(|error| QmpError::generic(error.to_string()))
            }
            Some(Object::TlsCreds { .. }) => Err(QmpError::generic("Expecting TLS credentials with a server endpoint")),
            Some(_) => Err(QmpError::generic(format!("Object with id '{id}' is not TLS credentials"))),
            None => Err(QmpError::generic(format!("No TLS credentials with id '{id}'"))),
        }
    }

    /// There must be such a thread.
    pub fn check_iothread(&self, id: &str) -> QmpResult<()> {
        match self.find(id) {
            Some(Object::IoThread) => Ok(()),
            _ => Err(QmpError::generic(format!("iothread \"{id}\" not found"))),
        }
    }
}

/// The error for an id that is taken.
pub(crate) fn duplicate(id: &str) -> QmpError {
    QmpError::generic(format!("attempt to add duplicate property '{id}' to object (type 'container')"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_strict() {
        for (text, bytes) in [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9v\nYmE=\n", "fooba")] {
            assert_eq!(from_base64(text.as_bytes()).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        for wrong in ["Zg", "Zg=", "Z===", "Zh==", "Zm9=", "Zm9v*m==", "====", "Zg==Zg=="] {
            assert_eq!(from_base64(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn secrets_come_from_a_text_or_a_file() {
        let secret = Secret::new(Some("geheim"), None, false).unwrap();
        assert_eq!((secret.len(), secret.bytes.as_slice()), (6, &b"geheim"[..]));
        assert!(!format!("{secret:?}").contains("geheim"));
        assert_eq!(Secret::new(Some("AAEC/w=="), None, true).unwrap().bytes, [0, 1, 2, 255]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        std::fs::write(&path, "Zm9v\n").unwrap();
        let path = path.to_str().unwrap();
        assert_eq!(Secret::new(None, Some(path), true).unwrap().bytes, b"foo");
        assert_eq!(Secret::new(None, Some(path), false).unwrap().bytes, b"Zm9v\n");
        std::fs::write(path, [0xff, 0xfe]).unwrap();
        for (wrong, reason) in [
            (Secret::new(None, Some(path), false), "UTF-8"),
            (Secret::new(None, Some(path), true), "base64"),
            (Secret::new(None, Some("/nonexistent"), true), "Unable to read /nonexistent"),
            (Secret::new(Some("a"), Some(path), true), "mutually exclusive"),
            (Secret::new(None, None, true), "Must provide"),
        ] {
            assert!(wrong.unwrap_err().description.contains(reason), "{reason}");
        }
    }
}
