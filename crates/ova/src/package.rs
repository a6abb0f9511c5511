// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A package on disk: an archive, or a descriptor with its files in one folder.

use crate::envelope::{Envelope, FileReference};
use crate::limits;
use crate::manifest::{DigestKind, Line, Manifest};
use crate::tar::{self, Member, has_ending, printable};
use cowshed_block::{Error, ErrorKind, Result};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// An open package.
#[derive(Debug)]
pub struct Package {
    /// The archive, or the descriptor.
    path: PathBuf,
    /// The archive; none for a folder.
    archive: Option<File>,
    /// The files of the package. In a folder: the descriptor and the files that it or the manifest names.
    pub members: Vec<Member>,
    /// The name of the descriptor.
    pub descriptor: String,
    /// What that says.
    pub envelope: Envelope,
    /// The digests, where the package has some.
    pub manifest: Option<Manifest>,
    /// The name of the manifest.
    pub manifest_name: Option<String>,
    /// Where each name stands in `members`.
    by_name: HashMap<String, usize>,
}

/// A part of a disk's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The file's name in the package.
    pub name: String,
    /// The file that has it.
    pub path: PathBuf,
    /// Its first byte there.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// A disk with the place of its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedDisk {
    /// Counted from 1.
    pub number: usize,
    /// Its id in the descriptor.
    pub id: String,
    /// The name of its file.
    pub name: String,
    /// The name of its format's driver.
    pub format: &'static str,
    /// Its length in bytes, where the package says it.
    pub capacity_bytes: Option<u64>,
    /// Where its file is, in this order.
    pub pieces: Vec<Piece>,
    /// The file is stored with gzip.
    pub is_gzip: bool,
}

/// Drivers by a part of the URI of a format, in lower case.
const FORMATS: &[(&str, &str)] = &[
    ("vmdk", "vmdk"),
    ("vhdx", "vhdx"),
    ("vhd", "vpc"),
    ("virtualpc", "vpc"),
    ("vdi", "vdi"),
    ("qcow2", "qcow2"),
    ("qcow-image-format", "qcow2"),
    ("raw", "raw"),
];

impl Package {
    /// True for a file that begins as an archive with a descriptor in front, or whose name ends so.
    pub fn is_one(path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if has_ending(name, "ova") || has_ending(name, "ovf") {
            return path.is_file();
        }
        let mut block = [0; 512];
        path.is_file()
            && File::open(path).and_then(|file| file.read_exact_at(&mut block, 0)).is_ok()
            && tar::starts_with_descriptor(&block)
    }

    /// Opens a package and reads its descriptor and its manifest.
    ///
    /// # Errors
    /// For what can't be read, is damaged, or asks for more than [`limits`] allow.
    pub fn open(path: &Path) -> Result<Package> {
        let named = |error: Error| error.file(path.display().to_string());
        // A FIFO would let the opening wait.
        let about = fs::metadata(path).map_err(|error| named(Error::io(&error, "could not open")))?;
        if !about.is_file() {
            return Err(named(Error::invalid_argument("a package is a file")));
        }
        let mut file = File::open(path).map_err(|error| named(Error::io(&error, "could not open")))?;
        let about = file.metadata().map_err(|error| named(Error::io(&error, "could not look at")))?;
        let is_descriptor = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("ovf"));
        let package = match is_descriptor {
            true => Self::open_folder(path, &file, about.len()),
            false => tar::members(&mut file, about.len()).and_then(|members| Self::open_archive(path, file, members)),
        };
        package.and_then(Self::checked).map_err(named)
    }

    /// Refuses references that stand for other files than the package's disks, or for more than it may have.
    fn checked(mut self) -> Result<Package> {
        self.by_name = self.members.iter().enumerate().map(|(index, member)| (member.name.clone(), index)).collect();
        let disks = self.envelope.disks.iter().filter_map(|disk| self.envelope.file(disk.file.as_deref()?));
        for pieces in [self.envelope.files.iter().map(count_of).sum::<u64>(), disks.map(count_of).sum()] {
            if pieces > 2 * limits::MEMBERS as u64 {
                let message = format!("more than {} pieces of files", 2 * limits::MEMBERS);
                return Err(Error::new(ErrorKind::Limit, message));
            }
        }
        let own = |name: &str| name == self.descriptor || self.manifest_name.as_deref() == Some(name);
        let mut names = HashSet::new();
        for reference in &self.envelope.files {
            let href = printable(&reference.href);
            if own(&reference.href) {
                let message = format!("the descriptor names '{href}' as a file, which is a part of the package itself");
                return Err(Error::new(ErrorKind::InvalidImage, message));
            }
            if reference.chunk_bytes.is_some() && !names.insert(&reference.href) {
                let message = format!("the descriptor names the pieces of '{href}' twice");
                return Err(Error::new(ErrorKind::InvalidImage, message));
            }
        }
        Ok(self)
    }

    fn open_archive(path: &Path, file: File, members: Vec<Member>) -> Result<Package> {
        let mut descriptors = members.iter().filter(|member| has_ending(&member.name, "ovf"));
        let descriptor = descriptors.next().cloned();
        let descriptor = descriptor
            .ok_or_else(|| Error::new(ErrorKind::InvalidImage, "there is no OVF descriptor in the archive"))?;
        if descriptors.next().is_some() {
            return Err(Error::new(ErrorKind::InvalidImage, "there are two OVF descriptors in the archive"));
        }
        let window = |member: &Member| Window { file: &file, offset: member.offset, end: member.offset + member.len };
        let envelope = Envelope::parse(&whole(window(&descriptor), descriptor.len, limits::DESCRIPTOR_BYTES)?)?;
        // Its name is the descriptor's with another ending; the only other file with that ending is it too.
        let mut manifests: Vec<&Member> = members.iter().filter(|member| has_ending(&member.name, "mf")).collect();
        if manifests.len() > 1 {
            manifests.retain(|member| stem_of(&member.name) == stem_of(&descriptor.name));
            if manifests.len() != 1 {
                return Err(Error::new(ErrorKind::InvalidImage, "there are several manifests in the archive"));
            }
        }
        let manifest = manifests.first();
        let manifest_name = manifest.map(|member| member.name.clone());
        let manifest =
            manifest.map(|member| Manifest::parse(&whole(window(member), member.len, limits::MANIFEST_BYTES)?));
        let manifest = manifest.transpose()?;
        let path = path.to_owned();
        Ok(Package {
            path,
            archive: Some(file),
            members,
            descriptor: descriptor.name,
            envelope,
            manifest,
            manifest_name,
            by_name: HashMap::new(),
        })
    }

    fn open_folder(path: &Path, file: &File, len: u64) -> Result<Package> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| Error::unsupported("the name of the descriptor is no UTF-8"))?;
        let envelope = Envelope::parse(&whole(Window { file, offset: 0, end: len }, len, limits::DESCRIPTOR_BYTES)?)?;
        let mut members = vec![Member { name: name.to_owned(), offset: 0, len }];
        let manifest_name = manifest_beside(path, name)?;
        let manifest = match &manifest_name {
            None => None,
            Some(name) => {
                let file = open_plain(&path.with_file_name(name))?;
                let len = file.metadata().map_err(|error| Error::io(&error, "could not look at"))?.len();
                members.push(Member { name: name.clone(), offset: 0, len });
                Some(Manifest::parse(&whole(
                    Window { file: &file, offset: 0, end: len },
                    len,
                    limits::MANIFEST_BYTES,
                )?)?)
            }
        };
        let mut known: HashSet<String> = members.iter().map(|member| member.name.clone()).collect();
        for reference in &envelope.files {
            for (name, _) in pieces_of(reference)? {
                // The use of a missing one tells of it.
                let Ok(about) = fs::symlink_metadata(path.with_file_name(&name)) else { continue };
                if about.is_file() && known.insert(name.clone()) {
                    members.push(Member { name, offset: 0, len: about.len() });
                }
            }
        }
        for line in manifest.iter().flat_map(|manifest: &Manifest| &manifest.lines) {
            let Ok(name) = tar::plain_name(&line.name) else { continue };
            let Ok(about) = fs::symlink_metadata(path.with_file_name(name)) else { continue };
            if about.is_file() && known.insert(name.to_owned()) {
                members.push(Member { name: name.to_owned(), offset: 0, len: about.len() });
            }
        }
        let (path, descriptor, by_name) = (path.to_owned(), name.to_owned(), HashMap::new());
        Ok(Package { path, archive: None, members, descriptor, envelope, manifest, manifest_name, by_name })
    }

    /// True for one file that has all.
    pub fn is_archive(&self) -> bool {
        self.archive.is_some()
    }

    /// The file with this name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.get(*self.by_name.get(name)?)
    }

    /// Reads a file of the package.
    ///
    /// # Errors
    /// For a file of a folder that can't be opened, or is a link.
    pub fn reader(&self, member: &Member) -> Result<Box<dyn Read>> {
        let (offset, end) = (member.offset, member.offset + member.len);
        match &self.archive {
            Some(archive) => {
                let file = archive.try_clone().map_err(|error| Error::io(&error, "could not read the archive"))?;
                Ok(Box::new(Window { file, offset, end }))
            }
            None => {
                let file = open_plain(&self.path.with_file_name(&member.name))?;
                Ok(Box::new(Window { file, offset, end }))
            }
        }
    }

    /// The disks that have a file, in the order of the descriptor.
    pub fn disks(&self) -> impl Iterator<Item = Result<PackedDisk>> + '_ {
        (1..).zip(self.envelope.disks.iter().filter(|disk| disk.file.is_some())).map(|(number, disk)| {
            let reference = disk.file.as_deref().and_then(|file| self.envelope.file(file));
            let reference = reference.ok_or_else(|| Error::internal("a disk without a file"))?;
            let name = printable(&reference.href);
            let named = |error: Error| error.context(format!("disk {number} ('{name}')"));
            if let Some(parent) = &disk.parent {
                let message = format!("it is a difference to another disk ('{}')", printable(parent));
                return Err(named(Error::unsupported(message)));
            }
            let format = format_of(&disk.format).map_err(named)?;
            let pieces = self.pieces(reference).map_err(named)?;
            let (id, name) = (disk.id.clone(), reference.href.clone());
            let (capacity_bytes, is_gzip) = (disk.capacity_bytes, reference.is_gzip);
            Ok(PackedDisk { number, id, name, format, capacity_bytes, pieces, is_gzip })
        })
    }

    /// Where the bytes of a file are, each piece as long as it should be.
    pub fn pieces(&self, reference: &FileReference) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        for (name, wanted) in pieces_of(reference)? {
            let Some(member) = self.member(&name) else {
                let message = format!("the package lacks '{}'", printable(&name));
                return Err(Error::new(ErrorKind::InvalidImage, message));
            };
            if let Some(wanted) = wanted.filter(|&wanted| wanted != member.len) {
                let message = format!(
                    "'{}' has {} bytes, and the descriptor says {wanted}: it is cut off, or another one",
                    printable(&name),
                    member.len
                );
                return Err(Error::new(ErrorKind::InvalidImage, message));
            }
            let path = match self.is_archive() {
                true => self.path.clone(),
                false => self.path.with_file_name(&name),
            };
            pieces.push(Piece { name, path, offset: member.offset, len: member.len });
        }
        Ok(pieces)
    }

    /// True for a file that needs no digest: the manifest, and its signature.
    pub fn needs_no_digest(&self, name: &str) -> bool {
        self.manifest_name.as_deref() == Some(name) || has_ending(name, "cert")
    }

    /// Compares every file with the manifest, where there is one. `is_ended` is asked for each piece that is read.
    ///
    /// # Errors
    /// For a digest that differs, and for one or a file that is missing.
    pub fn check_digests(&self, is_ended: &dyn Fn() -> bool) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        for member in &self.members {
            if !self.check_digest(&member.name, is_ended)? && !self.needs_no_digest(&member.name) {
                let message = format!("the manifest has no digest of '{}'", printable(&member.name));
                return Err(Error::new(ErrorKind::InvalidImage, message));
            }
        }
        match manifest.lines.iter().find(|line| self.member(&line.name).is_none()) {
            Some(line) => self.check_digest(&line.name, is_ended).map(drop),
            None => Ok(()),
        }
    }

    /// Compares a file with all digests that the manifest has of it; false where it has none. `is_ended` is asked for each
    /// piece that is read.
    ///
    /// # Errors
    /// For a digest that differs.
    pub fn check_digest(&self, name: &str, is_ended: &dyn Fn() -> bool) -> Result<bool> {
        let lines = self.manifest.iter().flat_map(|manifest| manifest.lines.iter().filter(|line| line.name == name));
        let mut is_known = false;
        for line in lines {
            self.check_line(line, is_ended)?;
            is_known = true;
        }
        Ok(is_known)
    }

    fn check_line(&self, line: &Line, is_ended: &dyn Fn() -> bool) -> Result<()> {
        let name = &line.name;
        let shown = printable(name);
        let Some(member) = self.member(name) else {
            let message = format!("the manifest names '{shown}', which the package lacks");
            return Err(Error::new(ErrorKind::InvalidImage, message));
        };
        let digest = self.digest(member, line.kind, is_ended)?;
        match digest == line.digest {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::InvalidImage,
                format!(
                    "'{shown}' isn't the file of the manifest: its {} is {digest}, not {}",
                    line.kind.name(),
                    line.digest
                ),
            )),
        }
    }

    /// The digest of a file of the package.
    ///
    /// # Errors
    /// For a file that can't be read, and where `is_ended` says so.
    pub fn digest(&self, member: &Member, kind: DigestKind, is_ended: &dyn Fn() -> bool) -> Result<String> {
        let digest = kind.of(&mut Ending { reader: self.reader(member)?, is_ended });
        digest.map_err(|error| match is_ended() {
            true => Error::new(ErrorKind::Cancelled, "cancelled"),
            false => Error::io(&error, format!("could not read '{}'", printable(&member.name))),
        })
    }

    /// Refuses a target that is one of the package's own files, under any name.
    ///
    /// # Errors
    /// For such a target.
    pub fn check_target(&self, target: &Path) -> Result<()> {
        let Ok(target_about) = fs::metadata(target) else { return Ok(()) };
        let is_target = |path: &Path| {
            fs::metadata(path).is_ok_and(|about| (about.dev(), about.ino()) == (target_about.dev(), target_about.ino()))
        };
        let is_own = match self.is_archive() {
            true => is_target(&self.path),
            false => self.members.iter().any(|member| is_target(&self.path.with_file_name(&member.name))),
        };
        match is_own {
            true => {
                let message = "the target is a file of the package itself";
                Err(Error::invalid_argument(message).file(target.display().to_string()))
            }
            false => Ok(()),
        }
    }
}

/// A reader that is cut off when its work is to end.
struct Ending<'a> {
    reader: Box<dyn Read>,
    is_ended: &'a dyn Fn() -> bool,
}

impl Read for Ending<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match (self.is_ended)() {
            true => Err(io::Error::other("cancelled")),
            false => self.reader.read(bytes),
        }
    }
}

/// A name without its ending.
fn stem_of(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

/// The manifest in the folder of a descriptor, whatever it is: a link there is damage, and not the lack of a manifest.
fn manifest_beside(path: &Path, descriptor: &str) -> Result<Option<String>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |error: io::Error| Error::io(&error, "could not look for the manifest");
    let mut found: Option<String> = None;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(name) = name.to_str().filter(|name| has_ending(name, "mf") && stem_of(name) == stem_of(descriptor))
        else {
            continue;
        };
        if found.replace(name.to_owned()).is_some() {
            return Err(Error::new(ErrorKind::InvalidImage, "there are several manifests beside the descriptor"));
        }
    }
    Ok(found)
}

/// The count of files that a reference stands for.
fn count_of(reference: &FileReference) -> u64 {
    match (reference.chunk_bytes, reference.size) {
        (Some(chunk), Some(size)) => size.div_ceil(chunk).clamp(1, 1 + limits::MEMBERS as u64),
        _ => 1,
    }
}

/// The names of the files that a reference stands for, with their lengths as far as they are said.
pub fn pieces_of(reference: &FileReference) -> Result<Vec<(String, Option<u64>)>> {
    let (Some(chunk), Some(size)) = (reference.chunk_bytes, reference.size) else {
        return Ok(vec![(reference.href.clone(), reference.size)]);
    };
    let count = size.div_ceil(chunk).max(1);
    if count > limits::MEMBERS as u64 {
        return Err(Error::new(ErrorKind::Limit, format!("more than {} pieces of a file", limits::MEMBERS)));
    }
    let len = |index: u64| chunk.min(size - index * chunk);
    Ok((0..count).map(|index| (format!("{}.{index:09}", reference.href), Some(len(index)))).collect())
}

/// The driver of a format's URI.
fn format_of(uri: &str) -> Result<&'static str> {
    // The part behind the last slash says it; the host of the URI may have any name.
    let last = uri.rsplit('/').next().unwrap_or_default().to_ascii_lowercase();
    // A word of three letters may be a part of any other.
    let is_in_last = |part: &str| match part {
        "raw" => last.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == part),
        _ => last.contains(part),
    };
    let known = FORMATS.iter().find(|(part, _)| is_in_last(part));
    let anywhere = || FORMATS.iter().find(|(part, _)| *part != "raw" && uri.to_ascii_lowercase().contains(part));
    let found = known.or_else(anywhere).map(|(_, driver)| *driver);
    found.ok_or_else(|| Error::unsupported(format!("the format '{}' isn't known", printable(uri))))
}

/// Opens a file that is no link: a folder from a stranger may lead elsewhere with one.
fn open_plain(path: &Path) -> Result<File> {
    let named = |error: Error| error.file(path.display().to_string());
    let about = fs::symlink_metadata(path).map_err(|error| named(Error::io(&error, "could not open")))?;
    if !about.is_file() {
        return Err(named(Error::new(ErrorKind::InvalidImage, "it is no plain file, and a package has no others")));
    }
    File::open(path).map_err(|error| named(Error::io(&error, "could not open")))
}

/// All of a short file.
fn whole(mut window: Window<impl AsFile>, len: u64, most: u64) -> Result<Vec<u8>> {
    if len > most {
        return Err(Error::new(ErrorKind::Limit, format!("a descriptor or manifest of more than {most} bytes")));
    }
    let mut bytes = Vec::new();
    window.read_to_end(&mut bytes).map_err(|error| Error::io(&error, "could not read the package"))?;
    Ok(bytes)
}

trait AsFile {
    fn file(&self) -> &File;
}

impl AsFile for File {
    fn file(&self) -> &File {
        self
    }
}

impl AsFile for &File {
    fn file(&self) -> &File {
        self
    }
}

/// A part of a file, read from its start.
struct Window<F> {
    file: F,
    offset: u64,
    end: u64,
}

impl<F: AsFile> Read for Window<F> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.offset).unwrap_or(usize::MAX).min(bytes.len());
        let len = self.file.file().read_at(&mut bytes[..most], self.offset)?;
        if len == 0 && most != 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        self.offset += len as u64;
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_known_by_their_uris() {
        for (uri, driver) in [
            ("http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized", "vmdk"),
            ("http://www.vmware.com/specifications/vmdk.html#sparse", "vmdk"),
            ("http://www.gnome.org/~markmc/qcow-image-format.html", "qcow2"),
            ("http://go.microsoft.com/fwlink/?LinkId=137171#vhd", "vpc"),
            ("http://www.virtualbox.org/ovf/machine/vdi", "vdi"),
        ] {
            assert_eq!(format_of(uri).unwrap(), driver, "{uri}");
        }
        for uri in ["", "http://example.org/draw/x", "http://example.org/draw", "http://www.ecma-international.org/iso"]
        {
            assert!(format_of(uri).is_err(), "{uri}");
        }
    }

    #[test]
    fn pieces_cover_the_file_and_no_more() {
        let reference = |size, chunk| FileReference {
            href: "d".to_owned(),
            size: Some(size),
            chunk_bytes: Some(chunk),
            ..FileReference::default()
        };
        let lens = |size, chunk| -> Vec<u64> {
            pieces_of(&reference(size, chunk)).unwrap().iter().filter_map(|(_, len)| *len).collect()
        };
        assert_eq!(lens(10, 4), [4, 4, 2]);
        assert_eq!(lens(8, 4), [4, 4]);
        assert_eq!(lens(0, 4), [0]);
        assert_eq!(pieces_of(&reference(10, 4)).unwrap()[2].0, "d.000000002");
        assert_eq!(pieces_of(&reference(u64::MAX >> 1, 1)).unwrap_err().kind(), ErrorKind::Limit);
    }
}
