// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The manifest: the digests of a package's files, `SHA256(NAME)= HEX`, one a line.

use crate::tar::{printable, without_folder};
use cowshed_types::{Error, ErrorKind, Result};
use sha1::Sha1;
use sha2::digest::DynDigest;
use sha2::{Sha256, Sha384, Sha512};
use std::collections::HashMap;

/// A digest's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestKind {
    /// The digest of OVF 1.
    Sha1,
    /// The digest of OVF 2, which new packages have.
    Sha256,
    /// Longer ones.
    Sha384,
    /// Longer ones.
    Sha512,
}

/// Names, in manifests and on the command line, and lengths in bytes.
const KINDS: &[(DigestKind, &str, usize)] = &[
    (DigestKind::Sha1, "SHA1", 20),
    (DigestKind::Sha256, "SHA256", 32),
    (DigestKind::Sha384, "SHA384", 48),
    (DigestKind::Sha512, "SHA512", 64),
];

impl DigestKind {
    /// As in manifests.
    pub fn name(self) -> &'static str {
        KINDS.iter().find(|(kind, ..)| *kind == self).map_or("", |(_, name, _)| name)
    }

    fn start(self) -> Box<dyn DynDigest> {
        match self {
            DigestKind::Sha1 => Box::new(Sha1::default()),
            DigestKind::Sha256 => Box::new(Sha256::default()),
            DigestKind::Sha384 => Box::new(Sha384::default()),
            DigestKind::Sha512 => Box::new(Sha512::default()),
        }
    }

    /// The count of its hexadecimal digits.
    pub fn digits(self) -> usize {
        KINDS.iter().find(|(kind, ..)| *kind == self).map_or(0, |(_, _, len)| 2 * len)
    }
}

/// Digests of several kinds, of bytes that are read once.
pub struct Digests(Vec<(DigestKind, Box<dyn DynDigest>)>);

impl Digests {
    /// Each of these kinds, once.
    pub fn new(kinds: impl IntoIterator<Item = DigestKind>) -> Self {
        let mut digests = Digests(Vec::new());
        for kind in kinds {
            if digests.0.iter().all(|(known, _)| *known != kind) {
                digests.0.push((kind, kind.start()));
            }
        }
        digests
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.iter_mut().for_each(|(_, digest)| digest.update(bytes));
    }

    /// The digests of all bytes, in lower-case hexadecimal digits.
    pub fn finish(self) -> Vec<(DigestKind, String)> {
        let digits = |digest: Box<dyn DynDigest>| digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.into_iter().map(|(kind, digest)| (kind, digits(digest))).collect()
    }
}

/// A line of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The kind of digest.
    pub kind: DigestKind,
    /// The name of the file.
    pub name: String,
    /// The digest in lower-case hexadecimal digits.
    pub digest: String,
}

impl Line {
    /// The text of the file.
    pub fn text(&self) -> String {
        format!("{}({})= {}\n", self.kind.name(), self.name, self.digest)
    }
}

/// The digests of a package's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// In the order of the file.
    pub lines: Vec<Line>,
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// A line that isn't understood, because its digest can't be checked. Two lines about one file that disagree.
    pub fn parse(bytes: &[u8]) -> Result<Manifest> {
        let text = std::str::from_utf8(bytes).map_err(|_| wrong("it is no UTF-8"))?;
        let text = text.trim_start_matches('\u{feff}').trim_end_matches('\0');
        let mut manifest = Manifest::default();
        let mut digests: HashMap<(String, &str), String> = HashMap::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() {
                continue;
            }
            let parsed = parse_line(line).ok_or_else(|| {
                wrong(&format!("line {} is no digest that is known: '{}'", index + 1, printable(line)))
            })?;
            match digests.insert((parsed.name.clone(), parsed.kind.name()), parsed.digest.clone()) {
                // The same line again would have the file read again.
                Some(known) if known == parsed.digest => continue,
                Some(_) => return Err(wrong(&format!("two digests of '{}'", printable(&parsed.name)))),
                None => {}
            }
            if manifest.lines.len() >= crate::limits::MEMBERS * KINDS.len() {
                return Err(Error::new(ErrorKind::Limit, "too many lines in the manifest"));
            }
            manifest.lines.push(parsed);
        }
        Ok(manifest)
    }

    /// The strongest digest of a file.
    pub fn of(&self, name: &str) -> Option<&Line> {
        self.lines.iter().filter(|line| line.name == name).max_by_key(|line| line.digest.len())
    }
}

/// `SHA256(NAME)= HEX`, with or without spaces.
fn parse_line(line: &str) -> Option<Line> {
    let (word, rest) = line.split_once('(')?;
    let (name, digest) = rest.rsplit_once(')')?;
    let digest = digest.trim_start().strip_prefix('=')?.trim();
    let (kind, _, len) = KINDS.iter().find(|(_, known, _)| known.eq_ignore_ascii_case(word.trim()))?;
    let is_digest = digest.len() == 2 * len && digest.bytes().all(|digit| digit.is_ascii_hexdigit());
    // As archives and descriptors may have them.
    let name = without_folder(name);
    is_digest.then(|| Line { kind: *kind, name: name.to_owned(), digest: digest.to_ascii_lowercase() })
}

fn wrong(what: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, format!("the manifest can't be checked: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_other_programs_are_read() {
        let digest = "06271f767e0d5671c67e4edeaa2c157cabb66c2b";
        for line in [
            format!("SHA1(a (1).ovf)= {digest}"),
            format!("SHA1 (a (1).ovf) = {digest}\r\n"),
            format!("\nsha1(a (1).ovf)={}\n\n", digest.to_uppercase()),
        ] {
            let manifest = Manifest::parse(line.as_bytes()).unwrap();
            let line = manifest.of("a (1).ovf").unwrap();
            assert_eq!((line.kind, line.digest.as_str()), (DigestKind::Sha1, digest));
            assert_eq!(Manifest::parse(line.text().as_bytes()).unwrap(), manifest);
        }
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for text in
            ["x", "MD5(a)= 00", "SHA1(a)= 00", "SHA1 a = 0", "SHA1(a)= zz271f767e0d5671c67e4edeaa2c157cabb66c2b"]
        {
            assert!(Manifest::parse(text.as_bytes()).unwrap_err().to_string().contains("line 1"), "{text}");
        }
        assert!(Manifest::parse(&[0xff]).is_err());
        let two = format!("SHA1(a)= {}\nSHA1(a)= {}\n", "0".repeat(40), "1".repeat(40));
        assert!(Manifest::parse(two.as_bytes()).unwrap_err().to_string().contains("two digests"));
    }

    #[test]
    fn digests_are_those_of_everybody() {
        let mut digests = Digests::new([DigestKind::Sha1, DigestKind::Sha256, DigestKind::Sha1]);
        digests.update(b"a");
        digests.update(b"bc");
        let sha1 = "a9993e364706816aba3e25717850c26c9cd0d89d".to_owned();
        let sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".to_owned();
        assert_eq!(sha256.len(), DigestKind::Sha256.digits());
        assert_eq!(digests.finish(), [(DigestKind::Sha1, sha1), (DigestKind::Sha256, sha256)]);
    }
}
