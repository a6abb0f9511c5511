// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A package on disk: an archive, or a descriptor with its files in one folder.

use crate::disk_format::format_of;
use crate::envelope::{Envelope, FileReference};
use crate::limits;
use crate::manifest::{DigestKind, Digests, Manifest};
use crate::pieces::{count_of, pieces_of};
use crate::stamp::{Stamp, Stamps};
use crate::tar::{self, Member, has_ending, printable};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Metadata};
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Read at once.
const PIECE_BYTES: usize = 1 << 20;

/// An open package.
#[derive(Debug)]
pub struct Package {
    /// The archive, or the descriptor.
    path: PathBuf,
    /// The archive; none for a folder.
    archive: Option<File>,
    /// The file at `path` as it was opened.
    stamp: Stamp,
    /// The descriptor and the manifest as they were read: later readings have these bytes.
    known: HashMap<String, Arc<[u8]>>,
    /// The files of the package. In a folder: the descriptor and the files that it or the manifest names.
    pub members: Vec<Member>,
    /// The name of the descriptor.
    pub descriptor: String,
    /// The descriptor's contents.
    pub envelope: Envelope,
    /// The digests, where the package has some.
    pub manifest: Option<Manifest>,
    /// The name of the manifest.
    pub manifest_name: Option<String>,
    /// The index in `members` of each name.
    by_name: HashMap<String, usize>,
}

/// A part of a disk's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRange {
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
    /// Its length in bytes, where the package has it.
    pub capacity_bytes: Option<u64>,
    /// Where its file is, in this order.
    pub pieces: Vec<FileRange>,
    /// The file is stored with gzip.
    pub is_gzip: bool,
}

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
    /// A package that can't be read, is damaged, or exceeds [`limits`].
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
            true => Self::open_folder(path, &file, &about),
            false => refuse_others(&file, about.len())
                .and_then(|()| tar::members(&mut file, about.len()))
                .and_then(|members| Self::open_archive(path, file, members, &about)),
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

    fn open_archive(path: &Path, file: File, members: Vec<Member>, about: &Metadata) -> Result<Package> {
        let mut descriptors = members.iter().filter(|member| has_ending(&member.name, "ovf"));
        let descriptor = descriptors.next().cloned();
        let descriptor = descriptor
            .ok_or_else(|| Error::new(ErrorKind::InvalidImage, "there is no OVF descriptor in the archive"))?;
        if descriptors.next().is_some() {
            return Err(Error::new(ErrorKind::InvalidImage, "there are two OVF descriptors in the archive"));
        }
        let window = |member: &Member| Window { file: &file, offset: member.offset, end: member.offset + member.len };
        let text = whole(window(&descriptor), descriptor.len, limits::DESCRIPTOR_BYTES)?;
        let mut envelope = Envelope::parse(&text)?;
        let names: HashSet<&str> = members.iter().map(|member| member.name.as_str()).collect();
        envelope.decode_names(|name| names.contains(name));
        let mut known = HashMap::from([(descriptor.name.clone(), Arc::from(text))]);
        // Its name is the descriptor's with another ending; the only other file with that ending counts too.
        let mut manifests: Vec<&Member> = members.iter().filter(|member| has_ending(&member.name, "mf")).collect();
        if manifests.len() > 1 {
            manifests.retain(|member| stem_of(&member.name) == stem_of(&descriptor.name));
            if manifests.len() != 1 {
                return Err(Error::new(ErrorKind::InvalidImage, "there are several manifests in the archive"));
            }
        }
        let manifest = manifests.first();
        let manifest_name = manifest.map(|member| member.name.clone());
        let manifest = match manifest {
            None => None,
            Some(member) => {
                let text = whole(window(member), member.len, limits::MANIFEST_BYTES)?;
                let manifest = Manifest::parse(&text)?;
                known.insert(member.name.clone(), Arc::from(text));
                Some(manifest)
            }
        };
        let path = path.to_owned();
        Ok(Package {
            path,
            archive: Some(file),
            stamp: Stamp::of(about),
            known,
            members,
            descriptor: descriptor.name,
            envelope,
            manifest,
            manifest_name,
            by_name: HashMap::new(),
        })
    }

    fn open_folder(path: &Path, file: &File, about: &Metadata) -> Result<Package> {
        let len = about.len();
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| Error::unsupported("the name of the descriptor is no UTF-8"))?;
        let text = whole(Window { file, offset: 0, end: len }, len, limits::DESCRIPTOR_BYTES)?;
        let mut envelope = Envelope::parse(&text)?;
        let plain_file = |name: &str| fs::symlink_metadata(path.with_file_name(name)).ok().filter(Metadata::is_file);
        envelope.decode_names(|name| plain_file(name).is_some());
        let mut known = HashMap::from([(name.to_owned(), Arc::from(text))]);
        let mut members = vec![Member { name: name.to_owned(), offset: 0, len }];
        let manifest_name = beside(path, name, "mf")?;
        let manifest = match &manifest_name {
            None => None,
            Some(name) => {
                let file = open_plain(&path.with_file_name(name))?;
                let len = file.metadata().map_err(|error| Error::io(&error, "could not look at"))?.len();
                members.push(Member { name: name.clone(), offset: 0, len });
                let text = whole(Window { file: &file, offset: 0, end: len }, len, limits::MANIFEST_BYTES)?;
                let manifest = Manifest::parse(&text)?;
                known.insert(name.clone(), Arc::from(text));
                Some(manifest)
            }
        };
        let mut names: HashSet<String> = members.iter().map(|member| member.name.clone()).collect();
        // The use of a missing one reports it.
        let mut add = |name: &str| {
            if let Some(about) = plain_file(name)
                && names.insert(name.to_owned())
            {
                members.push(Member { name: name.to_owned(), offset: 0, len: about.len() });
            }
        };
        for reference in &envelope.files {
            pieces_of(reference)?.iter().for_each(|(name, _)| add(name));
        }
        for line in manifest.iter().flat_map(|manifest: &Manifest| &manifest.lines) {
            if let Ok(name) = tar::plain_name(&line.name) {
                add(name);
            }
        }
        if let Some(name) = beside(path, name, "cert")? {
            add(&name);
        }
        let (path, descriptor, by_name) = (path.to_owned(), name.to_owned(), HashMap::new());
        let (archive, stamp) = (None, Stamp::of(about));
        Ok(Package { path, archive, stamp, known, members, descriptor, envelope, manifest, manifest_name, by_name })
    }

    /// True for one file that has all.
    pub fn is_archive(&self) -> bool {
        self.archive.is_some()
    }

    /// The file with this name.
    pub fn member(&self, name: &str) -> Option<&Member> {
        self.members.get(*self.by_name.get(name)?)
    }

    /// True for a file that is there and isn't stored with gzip.
    ///
    /// # Errors
    /// Where it can't be read.
    pub fn is_plain(&self, reference: &FileReference) -> Result<bool> {
        let Some(piece) = self.pieces(reference).ok().and_then(|pieces| pieces.into_iter().next()) else {
            return Ok(false);
        };
        let Some(member) = self.member(&piece.name) else { return Ok(false) };
        let mut head = Vec::new();
        let read = self.reader(member)?.take(2).read_to_end(&mut head);
        read.map_err(|error| Error::io(&error, format!("could not read '{}'", printable(&piece.name))))?;
        Ok(head != [0x1f, 0x8b])
    }

    /// Reads a file of the package.
    ///
    /// # Errors
    /// For a file of a folder that can't be opened, or is a link.
    pub fn reader(&self, member: &Member) -> Result<Box<dyn Read>> {
        if let Some(bytes) = self.known.get(&member.name) {
            return Ok(Box::new(Cursor::new(Arc::clone(bytes))));
        }
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
    pub fn pieces(&self, reference: &FileReference) -> Result<Vec<FileRange>> {
        let mut pieces = Vec::new();
        for (name, wanted) in pieces_of(reference)? {
            let Some(member) = self.member(&name) else {
                // Links, pipes and folders beside a descriptor are no part of it.
                let is_there = !self.is_archive() && fs::symlink_metadata(self.path.with_file_name(&name)).is_ok();
                let message = match is_there {
                    true => format!("'{}' is no plain file, and a package has no others", printable(&name)),
                    false => format!("the package lacks '{}'", printable(&name)),
                };
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
            pieces.push(FileRange { name, path, offset: member.offset, len: member.len });
        }
        Ok(pieces)
    }

    /// True for a file that needs no digest: the manifest, and its signature.
    pub fn needs_no_digest(&self, name: &str) -> bool {
        self.manifest_name.as_deref() == Some(name) || has_ending(name, "cert")
    }

    /// Refuses a file that the manifest lacks, and a line of it without a file. No file is read.
    ///
    /// # Errors
    /// For such a file or line.
    pub fn check_names(&self) -> Result<()> {
        let Some(manifest) = &self.manifest else { return Ok(()) };
        let named: HashSet<&str> = manifest.lines.iter().map(|line| line.name.as_str()).collect();
        let is_known = |name: &str| named.contains(name) || self.needs_no_digest(name);
        if let Some(member) = self.members.iter().find(|member| !is_known(&member.name)) {
            return Err(self.no_digest(&member.name));
        }
        match manifest.lines.iter().find(|line| self.member(&line.name).is_none()) {
            Some(line) => Err(lacking(&line.name)),
            None => Ok(()),
        }
    }

    /// The error of a file without a digest in the manifest.
    pub fn no_digest(&self, name: &str) -> Error {
        Error::new(ErrorKind::InvalidImage, format!("the manifest has no digest of '{}'", printable(name)))
    }

    /// Compares a file with all digests that the manifest has of it; false where it has none. `is_ended` is asked for each
    /// piece that is read.
    ///
    /// # Errors
    /// For a digest that differs.
    pub fn check_digest(&self, name: &str, is_ended: &dyn Fn() -> bool) -> Result<bool> {
        if !self.manifest.iter().any(|manifest| manifest.of(name).is_some()) {
            return Ok(false);
        }
        let member = self.member(name).ok_or_else(|| lacking(name))?;
        self.copy(member, &mut io::sink(), None, is_ended).map(|_| true)
    }

    /// Copies a file, and compares the copied bytes with all digests that the manifest has of it. So a change between
    /// two readings can't be missed. Returns the digest of `kind`, empty for none. `is_ended` is asked for each piece.
    ///
    /// # Errors
    /// A digest that differs, a failed read or write, or a cancellation by `is_ended`.
    pub fn copy(
        &self,
        member: &Member,
        writer: &mut dyn Write,
        kind: Option<DigestKind>,
        is_ended: &dyn Fn() -> bool,
    ) -> Result<String> {
        let lines =
            || self.manifest.iter().flat_map(|manifest| manifest.lines.iter().filter(|l| l.name == member.name));
        let mut digests = Digests::new(lines().map(|line| line.kind).chain(kind));
        let mut reader = self.reader(member)?;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            if is_ended() {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            let len = match reader.read(&mut piece) {
                Ok(0) => break,
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let message = format!("could not read '{}'", printable(&member.name));
                    return Err(Error::io(&error, message).file(self.path.display().to_string()));
                }
            };
            digests.update(&piece[..len]);
            writer.write_all(&piece[..len]).map_err(|error| Error::io(&error, "could not write"))?;
        }
        let digests = digests.finish();
        let named = |error: Error| error.file(self.path.display().to_string());
        let of = |kind| digests.iter().find(|(known, _)| *known == kind).map(|(_, digest)| digest.clone());
        for line in lines() {
            let digest = of(line.kind).unwrap_or_default();
            if digest != line.digest {
                let (shown, kind) = (printable(&line.name), line.kind.name());
                let message =
                    format!("'{shown}' isn't the file of the manifest: its {kind} is {digest}, not {}", line.digest);
                return Err(named(Error::new(ErrorKind::InvalidImage, message)));
            }
        }
        Ok(kind.and_then(of).unwrap_or_default())
    }

    /// The files of a disk as they are now.
    ///
    /// # Errors
    /// For files that can't be looked at.
    pub fn stamps(&self, disk: &PackedDisk) -> Result<Stamps> {
        match self.is_archive() {
            true => Ok(Stamps::new(vec![(self.path.clone(), self.stamp)])),
            false => {
                let of = |piece: &FileRange| {
                    let about = fs::symlink_metadata(&piece.path);
                    let about = about.map_err(|error| Error::io(&error, "could not look at"));
                    about.map(|about| (piece.path.clone(), Stamp::of(&about)))
                };
                disk.pieces.iter().map(of).collect::<Result<_>>().map(Stamps::new)
            }
        }
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

/// Refuses files that are no archive for a reason that a user can mend.
fn refuse_others(file: &File, len: u64) -> Result<()> {
    let mut start = [0; 2];
    if len == 0 {
        return Err(Error::new(ErrorKind::InvalidImage, "the file is empty"));
    }
    match file.read_at(&mut start, 0) {
        Ok(2) if start == [0x1f, 0x8b] => {
            Err(Error::unsupported("the archive is compressed with gzip: decompress it first (gunzip)"))
        }
        _ => Ok(()),
    }
}

/// The error of a line of the manifest without a file.
fn lacking(name: &str) -> Error {
    let message = format!("the manifest names '{}', which the package lacks", printable(name));
    Error::new(ErrorKind::InvalidImage, message)
}

/// A name without its ending.
fn stem_of(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(stem, _)| stem)
}

/// The file beside a descriptor that has its name with this ending, of any kind. A link there is damage, and not the
/// lack of a manifest.
fn beside(path: &Path, descriptor: &str, ending: &str) -> Result<Option<String>> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let failed = |error: io::Error| Error::io(&error, "could not look for files beside it");
    let mut found: Option<String> = None;
    for entry in fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(name) = name.to_str().filter(|name| has_ending(name, ending) && stem_of(name) == stem_of(descriptor))
        else {
            continue;
        };
        if found.replace(name.to_owned()).is_some() {
            let message = format!("there are several files with the ending .{ending} beside the descriptor");
            return Err(Error::new(ErrorKind::InvalidImage, message));
        }
    }
    Ok(found)
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
    use crate::machine::{Firmware, Importer, NewDisk, NewMachine};
    use crate::manifest::Line;
    use crate::tar::{Dialect, header, padding};

    /// A package in one file with a disk of these bytes, in a folder that goes with it.
    fn package(disk: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let (name, file_bytes) = ("d.vmdk".to_owned(), disk.len() as u64);
        let machine = NewMachine {
            name: "m".to_owned(),
            cpus: 1,
            memory_mib: 64,
            firmware: Firmware::Bios,
            networks: Vec::new(),
            importer: Importer::Both,
            disks: vec![NewDisk { name, file_bytes, capacity_bytes: 512, populated_bytes: None }],
        };
        let text = machine.descriptor().unwrap();
        let line = |name: &str, bytes: &[u8]| {
            let mut digests = Digests::new([DigestKind::Sha256]);
            digests.update(bytes);
            let digest = digests.finish().remove(0).1;
            Line { kind: DigestKind::Sha256, name: name.to_owned(), digest }.text()
        };
        let manifest = line("m.ovf", text.as_bytes()) + &line("d.vmdk", disk);
        let mut bytes = Vec::new();
        for (name, content) in [("m.ovf", text.as_bytes()), ("m.mf", manifest.as_bytes()), ("d.vmdk", disk)] {
            bytes.extend(header(name, content.len() as u64, 0, Dialect::Ustar).unwrap());
            bytes.extend_from_slice(content);
            bytes.resize(bytes.len() + padding(content.len() as u64), 0);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.ova");
        fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    /// A target whose first write changes the last byte of the package's disk.
    struct Changing<'a> {
        package: &'a Package,
        changed: bool,
    }

    impl Write for Changing<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if !self.changed {
                let member = self.package.member("d.vmdk").unwrap();
                let file = File::options().write(true).open(&self.package.path)?;
                file.write_all_at(b"X", member.offset + member.len - 1)?;
                self.changed = true;
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_change_while_a_file_is_copied_is_found() {
        let disk = vec![7; 3 * PIECE_BYTES];
        let (_folder, path) = package(&disk);
        let package = Package::open(&path).unwrap();
        let stamps = package.stamps(&package.disks().next().unwrap().unwrap()).unwrap();
        package.check_names().unwrap();
        let member = package.member("d.vmdk").unwrap();
        let mut copied = Vec::new();
        let digest = package.copy(member, &mut copied, Some(DigestKind::Sha1), &|| false).unwrap();
        assert_eq!((copied == disk, digest.len()), (true, DigestKind::Sha1.digits()));
        stamps.check().unwrap();
        let mut target = Changing { package: &package, changed: false };
        let error = package.copy(member, &mut target, None, &|| false).unwrap_err();
        assert!(target.changed && error.to_string().contains("isn't the file of the manifest"), "{error}");
        assert!(stamps.check().unwrap_err().to_string().contains("was changed"));
        let error = package.copy(member, &mut io::sink(), None, &|| true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled);
    }

    #[test]
    fn another_file_in_place_of_a_package_is_found() {
        let (folder, path) = package(&[7; 512]);
        let package = Package::open(&path).unwrap();
        let stamps = package.stamps(&package.disks().next().unwrap().unwrap()).unwrap();
        let copy = folder.path().join("copy");
        fs::copy(&path, &copy).unwrap();
        fs::rename(&copy, &path).unwrap();
        assert!(stamps.check().unwrap_err().to_string().contains("was changed"));
        fs::remove_file(&path).unwrap();
        assert!(stamps.check().is_err());
    }
}
