// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New files: an archive, and those of one that is unpacked. They have other names until they are whole, and are gone after an
//! error.

use cowshed_jobs::JobHandle;
use cowshed_ova::manifest::{DigestKind, Digests, Line};
use cowshed_ova::tar::{self, Dialect};
use cowshed_storage::{OpenOptions, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tempfile::{Builder, NamedTempFile};

/// Copied at once.
const PIECE_BYTES: usize = 1 << 20;
/// Zeroes for which a file has a hole: more than a block of any file system.
const HOLE_BYTES: usize = 64 << 10;
/// The digests of a new manifest.
const KIND: DigestKind = DigestKind::Sha256;

/// Names of files that aren't whole.
const PART_START: &str = ".cowshed-";
/// Their end.
const PART_END: &str = ".part";

/// An archive that is being written.
pub struct Archive {
    file: NamedTempFile,
    target: PathBuf,
    len: u64,
    seconds: u64,
    /// The digests of the added files.
    lines: Vec<Line>,
    /// Where the manifest has its place, and how long it is.
    manifest: Option<(u64, usize)>,
}

impl Archive {
    /// An empty one, in the folder of the target.
    pub fn create(target: &Path) -> Result<Archive> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let (target, lines, manifest) = (target.to_owned(), Vec::new(), None);
        Ok(Archive { file: beside(&target)?, target, len: 0, seconds, lines, manifest })
    }

    /// Adds a file of `len` bytes. `copy` writes them, and has their digest.
    pub fn add(&mut self, name: &str, len: u64, copy: impl FnOnce(&mut File) -> Result<String>) -> Result<()> {
        self.write_header(name, len)?;
        let digest = copy(self.file.as_file_mut()).map_err(|error| error.file(self.target.display().to_string()))?;
        let end = self.file.as_file_mut().stream_position().map_err(|error| self.failed(&error))?;
        if end != self.len + len {
            return Err(Error::new(ErrorKind::Io, format!("'{name}' changed its length while it was read")));
        }
        self.len = end;
        self.write(&[0; 512][..tar::padding(len)])?;
        self.lines.push(Line { kind: KIND, name: name.to_owned(), digest });
        Ok(())
    }

    /// Keeps the place of the manifest of these files, which are written before and after it.
    pub fn place_manifest<'a>(&mut self, name: &str, files: impl Iterator<Item = &'a str>) -> Result<()> {
        let line = |name: &str| Line { kind: KIND, name: name.to_owned(), digest: "0".repeat(KIND.digits()) };
        let len: usize = files.map(|name| line(name).text().len()).sum();
        self.write_header(name, len as u64)?;
        self.manifest = Some((self.len, len));
        self.write(&vec![0; len + tar::padding(len as u64)])
    }

    /// Ends the archive, and puts it under its name.
    pub fn finish(mut self, force: bool) -> Result<()> {
        self.write(&vec![0; tar::end(self.len)])?;
        if let Some((at, len)) = self.manifest {
            let text: String = self.lines.iter().map(Line::text).collect();
            if text.len() != len {
                return Err(Error::internal("the manifest has another length than its place"));
            }
            self.file.as_file().write_all_at(text.as_bytes(), at).map_err(|error| self.failed(&error))?;
        }
        publish(self.file, &self.target, force)
    }

    fn write_header(&mut self, name: &str, len: u64) -> Result<()> {
        let header = tar::header(name, len, self.seconds, Dialect::Ustar)?;
        self.write(&header)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| self.failed(&error))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Error {
        Error::io(error, "could not write the archive").file(self.target.display().to_string())
    }
}

/// Writes a file from its start, and leaves holes where there are zeroes.
pub struct Holes<'a> {
    file: &'a File,
    len: u64,
}

impl<'a> Holes<'a> {
    /// The archive in an empty file.
    pub fn new(file: &'a File) -> Self {
        Holes { file, len: 0 }
    }

    /// Gives the file its length, and makes it durable.
    pub fn finish(self) -> io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.sync_all()
    }
}

impl Write for Holes<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = HOLE_BYTES - (self.len % HOLE_BYTES as u64) as usize;
        let bytes = &bytes[..bytes.len().min(left)];
        if bytes.iter().any(|byte| *byte != 0) {
            self.file.write_all_at(bytes, self.len)?;
        }
        self.len += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The folder of a file.
pub fn folder_of(target: &Path) -> PathBuf {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A file beside the target, which goes with its handle.
pub fn beside(target: &Path) -> Result<NamedTempFile> {
    // As any new file: the user's mask counts.
    let mode = fs::Permissions::from_mode(0o666);
    cowshed_storage::note_writable();
    let made = Builder::new().prefix(PART_START).suffix(PART_END).permissions(mode).tempfile_in(folder_of(target));
    made.map_err(|error| Error::io(&error, "could not make a file beside it").file(target.display().to_string()))
}

/// The same for a part of a disk, which no conversion publishes. Beside a device or a target that is no local file
/// there is no room: it is in the folder of temporary files then.
pub fn aside(target: &Path) -> Result<NamedTempFile> {
    let is_file = fs::metadata(target).map_or(true, |about| about.is_file());
    if is_file && folder_of(target).is_dir() {
        return beside(target);
    }
    // Larger than the memory that /tmp may be.
    let folder = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()).unwrap_or_else(|| "/var/tmp".into());
    beside(&Path::new(&folder).join("x"))
}

/// A message in which files that have another name until they are whole have the name of the target.
pub fn with_final_names(message: &str, target: &Path) -> String {
    let (folder, target) = (folder_of(target), target.display().to_string());
    let start = folder.join(PART_START).display().to_string();
    let mut text = String::new();
    let mut rest = message;
    while let Some((before, behind)) = rest.split_once(&start) {
        let Some((_, behind)) = behind.split_once(PART_END) else { break };
        text.push_str(before);
        text.push_str(&target);
        rest = behind;
    }
    text + rest
}

/// Makes a file durable and puts it under its name.
pub fn publish(file: NamedTempFile, target: &Path, force: bool) -> Result<()> {
    let failed = |error: &io::Error, doing: &str| Error::io(error, doing).file(target.display().to_string());
    file.as_file().sync_all().map_err(|error| failed(&error, "could not flush"))?;
    let named = match force {
        true => file.persist(target),
        false => file.persist_noclobber(target),
    };
    named.map_err(|error| failed(&error.error, "could not make"))?;
    flush_folder(&folder_of(target))
}

/// Makes the names in a folder durable.
pub fn flush_folder(folder: &Path) -> Result<()> {
    let flushed = File::open(folder).and_then(|folder| folder.sync_all());
    flushed.map_err(|error| Error::io(&error, "could not flush the folder").file(folder.display().to_string()))
}

/// Copies all that a reader has; the length and the digest.
pub fn copy(reader: &mut dyn Read, writer: &mut dyn Write, job: &JobHandle) -> Result<(u64, String)> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut copied = 0;
    let mut digests = Digests::new([KIND]);
    loop {
        if job.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        let len = match reader.read(&mut piece) {
            Ok(0) => return Ok((copied, digests.finish().pop().map(|(_, digest)| digest).unwrap_or_default())),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::io(&error, "could not read")),
        };
        digests.update(&piece[..len]);
        writer.write_all(&piece[..len]).map_err(|error| Error::io(&error, "could not write"))?;
        copied += len as u64;
    }
}

/// Refuses a file that is there already, without `--force`. With it, the file is locked as one that is written to: nothing
/// uses it while the lock is held.
pub fn claim(target: &Path, force: bool) -> Result<Option<cowshed_storage::File>> {
    let about = std::fs::symlink_metadata(target);
    let refuse = |message: &str| Err(Error::invalid_argument(message).file(target.display().to_string()));
    match about {
        Ok(about) if !about.is_file() => refuse("it is no plain file"),
        Ok(_) if !force => refuse("the file exists already; --force overwrites it"),
        Ok(_) => {
            let permissions = Some(Permissions::CREATE);
            let options = OpenOptions { write: true, permissions, ..OpenOptions::default() };
            cowshed_storage::File::open(target, &options).map(Some)
        }
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_names_of_whole_files() {
        for (target, message, shown) in [
            ("m.ova", "./.cowshed-a1B2c3.part: No space left", "m.ova: No space left"),
            ("/x/m.ova", "/x/.cowshed-a.part, and /x/.cowshed-b.part", "/x/m.ova, and /x/m.ova"),
            ("/x/m.ova", "/y/.cowshed-a.part: no", "/y/.cowshed-a.part: no"),
            ("/x/m.ova", "/x/.cowshed-a", "/x/.cowshed-a"),
        ] {
            assert_eq!(with_final_names(message, Path::new(target)), shown);
        }
    }

    #[test]
    fn zeroes_become_holes_and_data_stay() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create_new(folder.path().join("x")).unwrap();
        let mut bytes = vec![0; 1 << 20];
        bytes[100_000..100_010].fill(7);
        bytes.resize((1 << 20) + 5, 0);
        let mut writer = Holes::new(&file);
        for piece in bytes.chunks(70_001) {
            writer.write_all(piece).unwrap();
        }
        writer.finish().unwrap();
        assert!(fs::read(folder.path().join("x")).unwrap() == bytes);
    }

    #[test]
    fn parts_of_disks_have_a_place_that_is_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let made = aside(&folder.path().join("new.qcow2")).unwrap();
        assert_eq!(made.path().parent(), Some(folder.path()));
        for target in ["/dev/null", "nbd://host/x"] {
            let made = aside(Path::new(target)).unwrap();
            assert!(!made.path().starts_with("/dev"), "{target}: {made:?}");
        }
    }
}
