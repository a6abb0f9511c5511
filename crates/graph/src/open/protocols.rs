// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The drivers of protocols: files and devices here, others beside.

use super::build::{Draft, Opened, OpenedFile, Opener, TreePlace};
use super::file_names::{ADDRESSES, FileNames, NameParts, only_allowed, only_word};
use super::line::{DriverLine, Mention, Telling};
use super::null;
use super::policy::FileKind;
use crate::node::{Edge, StorageKind};
use crate::options::{self, BlockdevOptions, FileOptions, schemas};
use crate::protocols::FileDriver;
use cowshed_storage::{File, OpenOptions, PermissionSet, Permissions, path_of_text};
use cowshed_types::{Errno, Error, ErrorKind, LINE_END, Result};
use std::future::ready;
use std::rc::Rc;

const FILE: DriverLine = DriverLine::new(&schemas::FILE, |opener, draft| {
    Box::pin(ready(opener.file_driver(draft, schemas::FILE.name, FileWanted::Regular)))
})
.reading(FileNames::paths(schemas::FILE.name, |parts| parts.file()));
const HOST_DEVICE: DriverLine = DriverLine::new(&schemas::HOST_DEVICE, |opener, draft| {
    Box::pin(ready(opener.file_driver(draft, schemas::HOST_DEVICE.name, FileWanted::Device)))
})
.reading(FileNames::paths(schemas::HOST_DEVICE.name, device));
const HOST_CDROM: DriverLine = DriverLine::new(&schemas::HOST_CDROM, |opener, draft| {
    Box::pin(ready(opener.file_driver(draft, schemas::HOST_CDROM.name, FileWanted::Device)))
})
.reading(FileNames::paths(schemas::HOST_CDROM.name, device));
const NBD: DriverLine = DriverLine::new(&schemas::NBD, |opener, draft| Box::pin(opener.nbd_driver(draft)))
    .telling(Telling::AllBut("driver"))
    .reading(ADDRESSES);
const NULL_CO: DriverLine = DriverLine::new(&schemas::NULL_CO, |_, draft| {
    Box::pin(ready(Ok(null::driver(&draft.options, schemas::NULL_CO.name))))
})
.telling(NULL_TELLING)
.reading(only_word(schemas::NULL_CO.name, |_| only_allowed(schemas::NULL_CO.name)))
.named_by_images(NULL_MENTION);
const NULL_AIO: DriverLine = DriverLine::new(&schemas::NULL_AIO, |_, draft| {
    Box::pin(ready(Ok(null::driver(&draft.options, schemas::NULL_AIO.name))))
})
.telling(NULL_TELLING)
.reading(only_word(schemas::NULL_AIO.name, |_| only_allowed(schemas::NULL_AIO.name)))
.named_by_images(NULL_MENTION);

fn device(parts: &NameParts<'_>) -> Result<BlockdevOptions> {
    Ok(parts.node().with("filename", parts.rest))
}

/// The kind of file that a driver opens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileWanted {
    Regular,
    Device,
}

const NULL_TELLING: Telling = Telling::Keys(&["size", "read-zeroes"]);
/// The reads of such a disk show the reader's memory in other programs.
const NULL_MENTION: Mention = Mention::Never("a disk that is nothing by");

/// The protocols, in the order of the help.
pub const PROTOCOLS: &[DriverLine] = &[FILE, HOST_DEVICE, HOST_CDROM, NBD, NULL_CO, NULL_AIO];

impl FileWanted {
    /// Refuses a folder, or a file for a driver of devices.
    fn check(self, driver: &str, path: &str, kind: Option<FileKind>, writes: bool) -> Result<()> {
        let wanted = match (self, kind) {
            // The system refuses these when they are opened.
            (FileWanted::Regular, Some(FileKind::Socket)) => return Ok(()),
            (FileWanted::Regular, Some(FileKind::Folder)) if writes => return Ok(()),
            (FileWanted::Regular, Some(FileKind::Folder | FileKind::CharacterDevice)) => "a regular file",
            (FileWanted::Regular, Some(FileKind::Other | FileKind::BlockDevice)) => "a regular file",
            (FileWanted::Device, Some(kind)) if !kind.is_device() => "a block device",
            _ => return Ok(()),
        };
        let error = Error::invalid_argument(format!("driver '{driver}' needs {wanted}"));
        let named = if self == FileWanted::Regular { wanted } else { "either a character or block device" };
        Err(error.qemu(format!("'{driver}' driver requires '{path}' to be {named}")))
    }
}

impl Opener {
    fn file_driver(self: &Rc<Self>, draft: &mut Draft, driver: &'static str, wanted: FileWanted) -> Opened {
        let options = FileOptions::new(&draft.options);
        if options.filename.is_empty() {
            let error = Error::invalid_argument("the file name is empty");
            return Err(error.qemu(format!("The '{driver}' block driver requires a file name")));
        }
        if let Some(id) = draft.options.text("pr-manager") {
            let error = Error::invalid_argument(format!("No persistent reservation manager with id '{id}'"));
            return Err(error.file(options.filename));
        }
        options::check_aio(&draft.options, draft.place.cache.direct)
            .map_err(|error| error.file(options.filename.clone()))?;
        let path = path_of_text(&options.filename);
        let writes = !draft.settings.read_only && !draft.place.auto_read_only;
        wanted
            .check(driver, &options.filename, self.files.kind(&path), writes)
            .map_err(|error| error.file(options.filename.clone()))?;
        let mut open_options = OpenOptions {
            write: !draft.settings.read_only,
            create: false,
            cache: draft.place.cache,
            engine: options.engine,
            locking: options.locking,
            beneath: draft.place.beneath.clone(),
            ..OpenOptions::default()
        };
        let opened = match open_options.write && self.files.kind(&path) == Some(FileKind::BlockDevice) {
            true if is_read_only_device(&path) => {
                let error = Error::os(Errno::EACCES, "The device is not writable");
                Err(error.file(options.filename.clone()))
            }
            _ => self.files.open(&path, &open_options),
        };
        let file = match opened {
            Err(error)
                if open_options.write
                    && draft.place.auto_read_only
                    && matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnly) =>
            {
                open_options.write = false;
                draft.settings.read_only = true;
                self.files.open(&path, &open_options)?
            }
            result => result?,
        };
        // Before the lock: the second open of a file would conflict with the first.
        self.check_loop(&file, &options.filename)?;
        if !self.locks_by_users {
            file.lock(self.file_permissions(&draft.place, open_options.write))?;
        }
        let kind = match wanted {
            FileWanted::Regular => StorageKind::HostFile,
            FileWanted::Device => StorageKind::HostDevice,
        };
        let driver = FileDriver { name: driver, file, kind: Some(kind), null_reads_zeroes: None, context: None };
        Ok((Box::new(driver), options.filename))
    }

    /// The rights for the locks of a file.
    fn file_permissions(&self, place: &TreePlace, writes: bool) -> Permissions {
        let permissions = match place.share_writes {
            _ if place.force_share => Edge::of("", writes, true).permissions,
            // Nothing that a writer could spoil.
            true if self.no_io && !writes => Permissions::NONE,
            true if writes && !self.resizes => Permissions::WRITE_IN_PLACE,
            shared => Edge::of("", writes, shared).permissions,
        };
        match self.keeps_size && place.share_writes && !place.force_share {
            true => Permissions { shared: permissions.shared & !PermissionSet::RESIZE, ..permissions },
            false => permissions,
        }
    }

    /// Refuses a file between the root and the node that is opened now.
    fn check_loop(self: &Rc<Self>, file: &File, name: &str) -> Result<()> {
        let Some(identity) = file.identity() else { return Ok(()) };
        if let Some(known) = self.opened.borrow().iter().find(|known| known.identity == identity) {
            let message = format!("the chain loops: this is the file '{}' again", known.name);
            // QEMU finds the lock that it has itself, and where it only reads it never ends.
            let sentence =
                format!("Failed to get shared \"write\" lock{LINE_END}Is another process using the image [{name}]?");
            return Err(Error::new(ErrorKind::InvalidImage, message).file(name).qemu(sentence));
        }
        self.opened.borrow_mut().push(OpenedFile { identity, name: name.to_owned() });
        Ok(())
    }
}

/// True for a block device that takes no writes, which the system reports only to a writer.
pub fn is_read_only_device(path: &std::path::Path) -> bool {
    let Ok(metadata) = std::fs::metadata(path) else { return false };
    let device = std::os::unix::fs::MetadataExt::rdev(&metadata);
    let major = ((device >> 8) & 0xfff) | ((device >> 32) & !0xfff);
    let minor = (device & 0xff) | ((device >> 12) & !0xff);
    std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro")).is_ok_and(|text| text.trim() == "1")
}
