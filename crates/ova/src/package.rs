// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A package on disk: an archive, or a descriptor with its files in one folder.

use crate::envelope::{Envelope, FileReference};
use crate::limits;
use crate::manifest::Manifest;
use crate::tar::{self, Member, has_ending, printable};
use cowshed_block::{Error, ErrorKind, Result};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
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
        let mut file = File::open(path).map_err(|error| named(Error::io(&error, "could not open")))?;
        let about = file.metadata().map_err(|error| named(Error::io(&error, "could not look at")))?;
        if !about.is_file() {
            return Err(named(Error::invalid_argument("a package is a file")));
        }
        let is_descriptor = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("ovf"));
        let package = match is_descriptor {
            true => Self::open_folder(path, &file, about.len()),
            false => tar::members(&mut file, about.len()).and_then(|members| Self::open_archive(path, file, members)),
        };
        package.map_err(named)
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
        // Its name is the descriptor's with another ending; any other file with that ending is it too.
        let manifest = members.iter().find(|member| has_ending(&member.name, "mf"));
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
        })
    }

    fn open_folder(path: &Path, file: &File, len: u64) -> Result<Package> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| Error::unsupported("the name of the descriptor is no UTF-8"))?;
        let envelope = Envelope::parse(&whole(Window { file, offset: 0, end: len }, len, limits::DESCRIPTOR_BYTES)?)?;
        let mut members = vec![Member { name: name.to_owned(), offset: 0, len }];
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let manifest_name = Some(format!("{stem}.mf")).filter(|name| path.with_file_name(name).is_file());
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
        for reference in &envelope.files {
            for (name, _) in pieces_of(reference)? {
                // What is missing is said by the use of it.
                let Ok(about) = fs::symlink_metadata(path.with_file_name(&name)) else { continue };
                if about.is_file() && !members.iter().any(|member| member.name == name) {
                    members.push(Member { name, offset: 0, len: about.len() });
                }
            }
        }
        let path = path.to_owned();
        Ok(Package { path, archive: None, members, descriptor: name.to_owned(), envelope, manifest, manifest_name })
    }

    /// True for one file that has all.
    pub fn is_archive(&self) -> bool {
        self.archive.is_some()
    }

    /// The file with this name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.name == name)
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

    /// Compares a file with the manifest's strongest digest of it; false where the manifest has none.
    ///
    /// # Errors
    /// For a digest that differs.
    pub fn check_digest(&self, name: &str) -> Result<bool> {
        let Some(line) = self.manifest.as_ref().and_then(|manifest| manifest.of(name)) else { return Ok(false) };
        let shown = printable(name);
        let Some(member) = self.member(name) else {
            let message = format!("the manifest names '{shown}', which the package lacks");
            return Err(Error::new(ErrorKind::InvalidImage, message));
        };
        let digest = line.kind.of(&mut *self.reader(member)?);
        let digest = digest.map_err(|error| Error::io(&error, format!("could not read '{shown}'")))?;
        match digest == line.digest {
            true => Ok(true),
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
    let known = FORMATS.iter().find(|(part, _)| last.contains(part));
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
        for uri in ["", "http://example.org/draw/x", "http://www.ecma-international.org/iso"] {
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
