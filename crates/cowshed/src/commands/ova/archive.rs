// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A new archive. It has another name until it is whole, and is gone after an error.

use cowshed_block::{Error, ErrorKind, Result};
use cowshed_jobs::JobHandle;
use cowshed_ova::tar::{self, Dialect};
use cowshed_storage::{OpenOptions, Permissions};
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use tempfile::{Builder, NamedTempFile};

/// Copied at once.
const PIECE_BYTES: usize = 1 << 20;

/// The data of a file.
pub struct Content<'a> {
    /// Has them.
    pub reader: Box<dyn Read + 'a>,
    /// Their length in bytes.
    pub len: u64,
}

impl<'a> Content<'a> {
    /// Bytes in memory.
    pub fn of(bytes: &'a [u8]) -> Self {
        Content { reader: Box::new(bytes), len: bytes.len() as u64 }
    }
}

/// An archive that is being written.
pub struct Archive {
    file: NamedTempFile,
    len: u64,
    seconds: u64,
}

impl Archive {
    /// An empty one, in the folder of the target.
    pub fn create(target: &Path) -> Result<Archive> {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Ok(Archive { file: beside(target)?, len: 0, seconds })
    }

    /// Adds a file.
    pub fn add(&mut self, name: &str, mut content: Content<'_>, job: &JobHandle) -> Result<()> {
        let header = tar::header(name, content.len, self.seconds, Dialect::Ustar)?;
        self.write(&header)?;
        let copied = copy(&mut *content.reader, self.file.as_file_mut(), job)?;
        if copied != content.len {
            return Err(Error::new(ErrorKind::Io, format!("'{name}' changed its length while it was read")));
        }
        self.len += copied;
        self.write(&[0; 512][..tar::padding(content.len)])
    }

    /// Ends the archive, and gives it its name.
    pub fn finish(mut self, target: &Path, force: bool) -> Result<()> {
        let end = tar::end(self.len);
        self.write(&vec![0; end])?;
        publish(self.file, target, force)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|error| Error::io(&error, "could not write the archive"))?;
        self.len += bytes.len() as u64;
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
    let made = Builder::new().prefix(".cowshed-").suffix(".part").permissions(mode).tempfile_in(folder_of(target));
    made.map_err(|error| Error::io(&error, "could not make a file beside it").file(target.display().to_string()))
}

/// Makes a file durable and gives it its name.
pub fn publish(file: NamedTempFile, target: &Path, force: bool) -> Result<()> {
    let failed = |error: &io::Error, doing: &str| Error::io(error, doing).file(target.display().to_string());
    file.as_file().sync_all().map_err(|error| failed(&error, "could not flush"))?;
    let named = match force {
        true => file.persist(target),
        false => file.persist_noclobber(target),
    };
    named.map_err(|error| failed(&error.error, "could not make"))?;
    let folder = std::fs::File::open(folder_of(target)).and_then(|folder| folder.sync_all());
    folder.map_err(|error| failed(&error, "could not flush the folder"))
}

/// Copies all that a reader has; the length.
pub fn copy(reader: &mut dyn Read, writer: &mut dyn Write, job: &JobHandle) -> Result<u64> {
    let mut piece = vec![0; PIECE_BYTES];
    let mut copied = 0;
    loop {
        if job.is_cancelled() {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        let len = match reader.read(&mut piece) {
            Ok(0) => return Ok(copied),
            Ok(len) => len,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Error::io(&error, "could not read")),
        };
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
