// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A folder of the host as a disk with a FAT file system, for reading: docs/formats/vvfat.md. The files' bytes stay
//! where they are, and the structures around them are made when they are read.

mod tree;

use cowshed_graph::node::{Driver, LocalFuture, StatusExtent, Transfer};
use cowshed_graph::open::{Draft, DriverLine, FileNames, Mention, NameParts, Opened, Opener, Telling, WithoutWord};
use cowshed_graph::options::{BlockdevOptions, DriverKind, DriverSchema, KeyType, key};
use cowshed_layout::fat::{ClusterChain, FatDisk, FatKind, FatRegion, LABEL_BYTES};
use cowshed_storage::{File, IoBuf, Locking, OpenOptions, path_of_text, rt};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use tree::{FolderFile, Tree};

const SCHEMA: DriverSchema = DriverSchema {
    name: "vvfat",
    kind: DriverKind::Protocol,
    about: "a folder as a disk with a FAT file system, for reading",
    keys: &[
        key("dir", KeyType::Text, "", "the folder"),
        key("fat-type", KeyType::Number(0, u64::MAX), "0", "12, 16 or 32; 0: 12 of a floppy disk, else 16"),
        key("floppy", KeyType::Bool, "off", "a floppy disk: no partition table, 2.88 MB"),
        key("label", KeyType::Text, "QEMU VVFAT", "the label of the file system, 11 bytes at most"),
        key("rw", KeyType::Bool, "off", "writes change the folder: refused"),
    ],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .telling(Telling::Keys(&["dir", "fat-type", "floppy", "label", "rw"]))
    .reading(FileNames::beginning_with("fat", folder_options, WithoutWord::Refused(|_| OTHER_NAME.to_owned())))
    .named_by_images(Mention::AsExtent("a folder by"));

const OTHER_NAME: &str = "File name string must start with 'fat:'";

/// The options of `fat:[12:|16:|32:][floppy:][rw:]FOLDER`.
fn folder_options(parts: &NameParts<'_>) -> Result<BlockdevOptions> {
    let (mut folder, mut kind, mut is_floppy, mut writes) = (parts.rest, 0, false, false);
    while let Some((word, rest)) = folder.split_once(':') {
        match word {
            "12" => kind = 12,
            "16" => kind = 16,
            "32" => kind = 32,
            "floppy" => is_floppy = true,
            "rw" => writes = true,
            _ => break,
        }
        folder = rest;
    }
    let options = BlockdevOptions::new().with("fat-type", kind).with("dir", folder).with("driver", parts.driver);
    Ok(options.with("floppy", is_floppy).with("rw", writes))
}

/// Files that are kept open.
const OPEN_FILES: usize = 32;

/// The content of clusters that follow each other.
enum Content {
    Directory(Vec<u8>),
    /// The index of a file of the tree.
    File(usize),
}

struct Vvfat {
    disk: FatDisk,
    folder: PathBuf,
    filename: String,
    /// The areas before the tables: places and bytes.
    heads: Vec<(u64, Vec<u8>)>,
    /// The root folder of FAT12 and FAT16.
    root: Vec<u8>,
    /// In order, without gaps from the first cluster on; with their contents.
    chains: Vec<ClusterChain>,
    contents: Vec<Content>,
    files: Vec<FolderFile>,
    open: Mutex<VecDeque<(usize, Arc<File>)>>,
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let options = &draft.options;
    let Some(dir) = options.text("dir").map(str::to_owned) else {
        let error = Error::invalid_argument("driver 'vvfat' needs the option 'dir'");
        return Err(error.qemu("vvfat block driver requires a 'dir' option"));
    };
    let is_floppy = options.flag("floppy").unwrap_or(false);
    let number = match options.number("fat-type") {
        None | Some(0) if is_floppy => 12,
        None | Some(0) => 16,
        Some(number) => number,
    };
    // A floppy disk has too few clusters for the others.
    let kind = FatKind::of(number).filter(|kind| !is_floppy || *kind == FatKind::Fat12).ok_or_else(|| {
        let error = Error::invalid_argument(match is_floppy {
            true => "a floppy disk has FAT12".to_owned(),
            false => "Valid FAT types are only 12, 16 and 32".to_owned(),
        });
        error.field("fat-type").value(number).qemu("Valid FAT types are only 12, 16 and 32")
    })?;
    let label = label_of(options.text("label").unwrap_or("QEMU VVFAT"))?;
    if options.flag("rw") == Some(true) {
        let message = format!("folders are only read here: 'rw' of '{dir}' is not supported");
        return Err(Error::unsupported(message).qemu("Unable to set VVFAT to 'rw' when drive is read-only"));
    }
    if !draft.settings.read_only {
        if !draft.place.auto_read_only {
            let message = format!("the folder '{dir}' can only be read as a disk");
            return Err(Error::new(ErrorKind::ReadOnly, message).qemu("Image is read-only"));
        }
        draft.settings.read_only = true;
    }
    let folder = path_of_text(&dir);
    let root = folder.clone();
    let tree = rt::run_on_cpu_pool(move || Tree::read(&root)).await?;
    for warning in &tree.warnings {
        opener.warn(format!("{dir}: {warning}"));
    }
    let vvfat = Vvfat::new(tree, kind, is_floppy, label, folder, format!("fat:{dir}"))?;
    opener.policy().check_size(vvfat.disk.size())?;
    let filename = vvfat.filename.clone();
    Ok((Box::new(vvfat), filename))
}

/// A label as the file system has it.
fn label_of(text: &str) -> Result<[u8; LABEL_BYTES]> {
    if text.len() > LABEL_BYTES {
        return Err(Error::invalid_argument("vvfat label cannot be longer than 11 bytes"));
    }
    let mut label = [b' '; LABEL_BYTES];
    for (place, byte) in label.iter_mut().zip(text.bytes()) {
        *place = if byte.is_ascii_graphic() || byte == b' ' { byte } else { b'_' };
    }
    Ok(label)
}

/// The content of a place of the disk.
enum DiskContent<'a> {
    Zero,
    Table(u64),
    Bytes(&'a [u8]),
    /// Bytes of a file, from there on.
    File(usize, u64),
}

impl Vvfat {
    fn new(
        tree: Tree,
        kind: FatKind,
        is_floppy: bool,
        label: [u8; LABEL_BYTES],
        folder: PathBuf,
        filename: String,
    ) -> Result<Vvfat> {
        let is_rooted = kind != FatKind::Fat32;
        let disk = FatDisk::new(kind, is_floppy, label, |cluster| tree.clusters(cluster, is_rooted));
        let used = tree.clusters(disk.cluster_bytes(), is_rooted);
        if used > disk.clusters() {
            let number = kind.number();
            let message = format!(
                "the folder does not fit in FAT{number}: it needs {used} clusters of {} bytes, and there are {}",
                disk.cluster_bytes(),
                disk.clusters()
            );
            let megabytes = disk.sectors() as f64 / 2000.0;
            let sentence = format!("Directory does not fit in FAT{number} (capacity {megabytes:.2} MB)");
            return Err(Error::new(ErrorKind::Limit, message).qemu(sentence));
        }
        let laid = tree.lay_out(&disk, label)?;
        let heads = disk.heads(used);
        let (chains, contents) = laid.contents.into_iter().unzip();
        Ok(Vvfat {
            disk,
            folder,
            filename,
            heads,
            root: laid.root,
            chains,
            contents,
            files: laid.files,
            open: Mutex::default(),
        })
    }

    /// The content at a byte of the disk, and for how many of the `len` bytes from there it holds.
    fn piece(&self, at: u64, len: u64) -> (DiskContent<'_>, u64) {
        let (region, there) = self.disk.region(at);
        let len = len.min(there);
        match region {
            FatRegion::Head => {
                let next = self.heads.partition_point(|(start, _)| *start <= at);
                if let Some((start, bytes)) = next.checked_sub(1).and_then(|index| self.heads.get(index))
                    && let Some(rest) = bytes.get((at - start) as usize..).filter(|rest| !rest.is_empty())
                {
                    return (DiskContent::Bytes(rest), len.min(rest.len() as u64));
                }
                let end = self.heads.get(next).map_or(len, |(start, _)| start - at);
                (DiskContent::Zero, len.min(end))
            }
            FatRegion::Table(skip) => (DiskContent::Table(skip), len),
            FatRegion::Root(skip) => part_of(&self.root, skip, len),
            FatRegion::Clusters(skip) => self.piece_of_clusters(skip, len),
            FatRegion::Behind => (DiskContent::Zero, len),
        }
    }

    fn piece_of_clusters(&self, skip: u64, len: u64) -> (DiskContent<'_>, u64) {
        let cluster_bytes = self.disk.cluster_bytes();
        let start_of = |chain: &ClusterChain| (u64::from(chain.first) - 2) * cluster_bytes;
        let next = self.chains.partition_point(|chain| start_of(chain) <= skip);
        let found = next.checked_sub(1).and_then(|index| Some((self.chains.get(index)?, self.contents.get(index)?)));
        let Some((chain, content)) = found else { return (DiskContent::Zero, len) };
        let within = skip - start_of(chain);
        let whole = u64::from(chain.count) * cluster_bytes;
        if within >= whole {
            // Behind the last one: there are no gaps.
            return (DiskContent::Zero, len);
        }
        let len = len.min(whole - within);
        match content {
            Content::Directory(bytes) => part_of(bytes, within, len),
            Content::File(index) => {
                let size = self.files.get(*index).map_or(0, |file| file.len);
                match size.checked_sub(within).filter(|rest| *rest > 0) {
                    Some(rest) => (DiskContent::File(*index, within), len.min(rest)),
                    None => (DiskContent::Zero, len),
                }
            }
        }
    }

    /// A file, open. Refused once it is another one than the folder was read with.
    async fn file(&self, index: usize) -> Result<(Arc<File>, &FolderFile)> {
        let open = || self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.files.get(index).ok_or_else(|| Error::internal("a file of the folder went away"))?;
        let kept = open().iter().find(|(kept, _)| *kept == index).map(|(_, file)| Arc::clone(file));
        if let Some(file) = kept {
            return Ok((file, known));
        }
        let path = self.folder.join(&known.path);
        let options =
            OpenOptions { beneath: Some(self.folder.clone()), locking: Locking::Off, ..OpenOptions::default() };
        let file = Arc::new(rt::run_on_cpu_pool(move || File::open(&path, &options)).await?);
        let mut open = open();
        open.truncate(OPEN_FILES - 1);
        open.push_front((index, Arc::clone(&file)));
        Ok((file, known))
    }

    async fn read_file(&self, index: usize, offset: u64, part: IoBuf) -> (Result<()>, IoBuf) {
        let (file, known) = match self.file(index).await {
            Ok(found) => found,
            Err(error) => return (Err(error), part),
        };
        let (result, mut part) = file.read_at(part, offset).await;
        // Looked at behind the read: bytes from before a change are as they were.
        if file.change_stamp() == Some(known.stamp) {
            return (result, part);
        }
        part.fill(0);
        let message = "the file has changed since the folder was opened as a disk";
        (Err(Error::new(ErrorKind::Io, message).file(known.path.display().to_string())), part)
    }
}

/// Bytes that zeroes follow.
fn part_of(bytes: &[u8], skip: u64, len: u64) -> (DiskContent<'_>, u64) {
    match bytes.get(skip as usize..).filter(|rest| !rest.is_empty()) {
        Some(rest) => (DiskContent::Bytes(rest), len.min(rest.len() as u64)),
        None => (DiskContent::Zero, len),
    }
}

impl Driver for Vvfat {
    fn name(&self) -> &'static str {
        SCHEMA.name
    }

    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        self.disk.size()
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let (mut done, mut rest) = (0, buf);
            let whole = rest.len();
            let mut parts: Vec<IoBuf> = Vec::new();
            let mut result = Ok(());
            while done < whole {
                let (piece, len) = self.piece(offset + done as u64, (whole - done) as u64);
                let mut part = rest.split_to(len as usize);
                let read = match piece {
                    DiskContent::Zero => {
                        part.fill(0);
                        Ok(())
                    }
                    DiskContent::Table(skip) => {
                        part.fill(0);
                        self.disk.fill_table(&self.chains, skip, &mut part);
                        Ok(())
                    }
                    DiskContent::Bytes(bytes) => {
                        part.copy_from_slice(&bytes[..len as usize]);
                        Ok(())
                    }
                    DiskContent::File(index, within) => {
                        let (read, filled) = self.read_file(index, within, part).await;
                        part = filled;
                        read
                    }
                };
                done += len as usize;
                parts.push(part);
                if read.is_err() {
                    result = read;
                    break;
                }
            }
            let mut buf = None;
            for part in parts {
                buf = Some(cowshed_graph::buffers::join(buf, part));
            }
            (result, cowshed_graph::buffers::join(buf, rest))
        })
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move {
            let name: Arc<str> = self.filename.as_str().into();
            let mut runs: Vec<StatusExtent> = Vec::new();
            let max_runs = max_runs.max(1);
            let (mut at, end) = (offset, offset.saturating_add(len));
            while at < end {
                let (piece, len) = self.piece(at, end - at);
                let data = !matches!(piece, DiskContent::Zero);
                if let Some(last) = runs.last_mut().filter(|last| last.data == data) {
                    last.len += len;
                } else if runs.len() >= max_runs {
                    break;
                } else {
                    runs.push(StatusExtent {
                        start: at,
                        len,
                        data,
                        zero: !data,
                        present: true,
                        compressed: false,
                        offset: Some(at),
                        file: Some(Arc::clone(&name)),
                        depth: 0,
                    });
                }
                at += len;
            }
            Ok(runs)
        })
    }
}
