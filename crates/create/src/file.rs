// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Puts fresh images into files.

use crate::behind::Behind;
pub(super) use crate::created::Failed;
use crate::created::{Created, discard_file};
use crate::encryption::NewEncryption;
use crate::layout::FreshLayout;
use crate::qcow2::Qcow2CreateOptions;
use cowshed_image::DRIVERS;
use cowshed_image::encryption::{Cipher, encrypt};
use cowshed_image::node::Preallocation;
use cowshed_image::open::{is_nbd_name, is_read_only_device, open_nbd_file};
use cowshed_storage::{
    CacheMode, File, FileIdentity, IoBuf, LayoutHints, OpenOptions, Permissions, rt, sync_folder_of, text_of_path,
};
use cowshed_types::{Errno, Error, ErrorKind, GuestOffset, HostOffset, Result, slip};
use futures_util::future::{Either, select};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Zeroes are written in pieces of this many bytes.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;
/// The unit that a disk writes in whole or not at all, in bytes.
const SECTOR_BYTES: usize = 512;

/// Whether a created file is durable at the end of its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Durability {
    /// Name and contents are, and until the end the file isn't taken for an image.
    Synced,
    /// Nothing is synced where the name is new: for a caller that leaves out flushes anyway (`cache=unsafe`). A target
    /// with old contents (a file, a device, an export) is treated as with `Synced`.
    Unsynced,
}

/// The way of making an image.
#[derive(Clone, Debug)]
pub(super) struct Manner {
    pub durability: Durability,
    /// This flag stops it half-way.
    pub stop: Option<Arc<AtomicBool>>,
}

/// The pause between looks at the flag.
const LOOK: Duration = Duration::from_millis(20);

/// Waits for the flag.
async fn stopped(stop: &AtomicBool) -> Error {
    while !stop.load(Ordering::Acquire) {
        rt::sleep(LOOK).await;
    }
    Error::new(ErrorKind::Cancelled, "the creation was cancelled")
}

/// A name on its way to being an image.
pub(super) struct NewName<'a> {
    path: &'a Path,
    is_new: bool,
    is_synced: bool,
    failed: Failed,
    stop: Option<&'a AtomicBool>,
    /// The bytes behind the image in a device or an export.
    behind: Behind,
}

impl<'a> NewName<'a> {
    pub(super) fn new(path: &'a Path, how: &'a Manner, failed: Failed) -> NewName<'a> {
        let is_new = !is_nbd_name(&text_of_path(path)) && std::fs::metadata(path).is_err();
        let is_synced = how.durability == Durability::Synced || !is_new;
        NewName { path, is_new, is_synced, failed, stop: how.stop.as_deref(), behind: Behind::Kept }
    }

    /// Says what is to become of the bytes behind the image.
    pub(super) fn with_end(self, behind: Behind) -> NewName<'a> {
        NewName { behind, ..self }
    }

    /// Opens the file, empty, see [`create_file`]; has `fill` make an image of it; and makes its name durable. An error
    /// leaves no part of an image, nor a file that wasn't there.
    pub(super) async fn fill(
        self,
        len: u64,
        hints: LayoutHints,
        fill: impl AsyncFnOnce(&File) -> Result<()>,
    ) -> Result<Created> {
        let file = create_file(self.path, (len, self.behind), hints).await?;
        match self.fill_open(&file, fill).await {
            Ok(()) => {
                let mut created = Created::default();
                if self.is_new {
                    created.add(self.path, &file);
                }
                Ok(created)
            }
            Err(error) => Err(discard_file(self.path, &file, self.is_new, self.failed, error).await),
        }
    }

    async fn fill_open(&self, file: &File, fill: impl AsyncFnOnce(&File) -> Result<()>) -> Result<()> {
        if !self.is_synced {
            file.set_cache_mode(CacheMode { no_flush: true, ..file.cache_mode() })?;
        }
        match self.stop {
            None => fill(file).await?,
            Some(stop) => match select(pin!(fill(file)), pin!(stopped(stop))).await {
                Either::Left((filled, _)) => filled?,
                Either::Right((error, _)) => return Err(error),
            },
        }
        if self.is_new && self.is_synced && !slip!("name_of_an_overlay_not_durable") {
            sync_folder_of(self.path).await
        } else {
            Ok(())
        }
    }
}

/// Refuses to reserve space where there is no file system, before anything there changes.
fn check_space(path: &Path, preallocation: Preallocation) -> Result<()> {
    if matches!(preallocation, Preallocation::Off | Preallocation::Metadata) {
        return Ok(());
    }
    let mode = preallocation.name();
    let is_device = matches!(FileIdentity::of_path(path), Some(FileIdentity::BlockDevice(_)));
    match is_device || is_nbd_name(&text_of_path(path)) {
        true => Err(Error::unsupported(format!("Unsupported preallocation mode '{mode}'"))),
        false => Ok(()),
    }
}

/// Creates or empties a file and keeps it locked. The old contents of a file are durably gone before anything new is
/// written. A power cut must not leave an old header over new tables.
async fn create_file(path: &Path, (len, behind): (u64, Behind), hints: LayoutHints) -> Result<File> {
    let name = text_of_path(path);
    if is_nbd_name(&name) {
        return take_export(&name, len, behind).await;
    }
    if is_read_only_device(path) {
        let sentence = "Protocol driver 'host_device' does not support creating new images, so an existing image must be \
                        selected as the target; however, opening the given target as an existing image failed: The device \
                        is not writable";
        return Err(Error::os(Errno::EACCES, "the device is not writable").file(name).qemu(sentence));
    }
    let existed = std::fs::metadata(path).is_ok_and(|metadata| metadata.len() > 0);
    let options =
        OpenOptions { write: true, create: true, permissions: Some(Permissions::CREATE), ..OpenOptions::default() };
    let file = File::open(path, &options)?;
    if file.is_device() {
        behind.check_end(&file, len).map_err(|error| error.file(name))?;
    }
    file.hint_layout(hints);
    if existed {
        file.sync().await?;
    }
    Ok(file)
}

/// The beginning of the error where the export that is to become an image can't be opened.
pub const NO_EXPORT: &str = "could not open the export";

/// An export exists already and has the length that it has: `len` bytes must fit. Its first sector is cleared, so that it
/// isn't taken for the image that it held before.
async fn take_export(name: &str, len: u64, behind: Behind) -> Result<File> {
    let file = open_nbd_file(name).await.map_err(|error| error.context(NO_EXPORT))?;
    if file.len() < len {
        let message = format!("the export has {} bytes and the image needs {len}", file.len());
        return Err(Error::new(ErrorKind::NoSpace, message).file(name).qemu("Cannot grow NBD nodes"));
    }
    behind.check_end(&file, len).map_err(|error| error.file(name))?;
    let first = file.len().min(SECTOR_BYTES as u64);
    write_zeroes(&file, 0, first).await?;
    file.sync().await?;
    Ok(file)
}

/// Creates a qcow2 image, with its data file if it has one.
pub(super) async fn create_qcow2(path: &Path, options: &Qcow2CreateOptions, how: &Manner) -> Result<Created> {
    // The layout first: an existing file keeps its contents if the image can't be laid out.
    let layout = FreshLayout::of(options)?;
    layout.header(options)?;
    let mut data_file = Created::default();
    match &options.data_file {
        Some(name) => {
            check_data_file_name(name)?;
            let made = create_data_file(path, &crate::path_of_name(name), options, how).await;
            data_file = made.map_err(|error| error.file(name))?;
        }
        None => check_space(path, options.preallocation)?,
    }
    let name = NewName::new(path, how, Failed::Remove);
    let filled = name.fill(layout.file_bytes, options.hints, async |file| write_fresh_qcow2(file, options).await).await;
    match filled {
        Ok(created) => Ok(created.and(data_file)),
        Err(error) => Err(data_file.take_back(error)),
    }
}

/// Refuses names by which the image would not find the file again.
fn check_data_file_name(name: &str) -> Result<()> {
    if name.starts_with("json:") {
        let error = Error::unsupported(format!("a data file can't be created under the name '{name}'"));
        return Err(error.qemu("Must specify either driver or file"));
    }
    if is_nbd_name(name) {
        let error = Error::unsupported(format!("a data file is a file, not an export of an NBD server: '{name}'"));
        return Err(error.qemu(format!("Could not create '{name}': No such file or directory")));
    }
    // The error is about the image.
    let checked = DRIVERS.check_file_name(name);
    checked.map_err(|error| Error::invalid_argument(error.message().to_owned()).qemu(error.sentence()))
}

async fn create_data_file(image: &Path, path: &Path, options: &Qcow2CreateOptions, how: &Manner) -> Result<Created> {
    if same_file(image, path) {
        return Err(Error::invalid_argument("the data file can't be the image itself").field("data_file"));
    }
    if !options.keep_data_file {
        let is_file = std::fs::metadata(path).map_or(true, |found| found.is_file());
        let bytes = data_file_bytes(options, is_file);
        let created = create_raw(path, bytes, options.preallocation, options.hints, how).await;
        return created.map_err(|error| match options.preallocation {
            Preallocation::Falloc | Preallocation::Full => {
                no_space(error, "Could not resize image: ", options.preallocation)
            }
            _ => error,
        });
    }
    let permissions = Some(Permissions::CREATE);
    let file = File::open(path, &OpenOptions { write: true, permissions, ..OpenOptions::default() })?;
    file.check_single_use()?;
    if file.len() < options.size {
        file.set_len(options.size).await?;
    }
    file.sync().await.map(|()| Created::default())
}

/// The length of the data file in bytes. Clusters mapped from the start are in it whole; a device keeps its length.
fn data_file_bytes(options: &Qcow2CreateOptions, is_file: bool) -> u64 {
    match options.is_mapped() && is_file {
        true => options.size.checked_next_multiple_of(options.cluster_bytes()).unwrap_or(options.size),
        false => options.size,
    }
}

/// Gives an open data file the length that the image needs, and space where that is asked for. Its contents stay. A
/// longer file that is mapped from the start keeps its length, as in QEMU.
pub(super) async fn fit_data_file(file: &File, options: &Qcow2CreateOptions) -> Result<()> {
    let (old, bytes) = (file.len(), data_file_bytes(options, !file.is_device()));
    if old < bytes || (old > bytes && !options.is_mapped()) {
        file.set_len(bytes).await?;
    }
    if old < bytes {
        let reserved = reserve(file, old, bytes - old, options.preallocation).await;
        reserved.map_err(|error| no_space(error, "Could not resize image: ", options.preallocation))?;
    }
    file.sync().await
}

/// True where two names are those of one file, or will be once it is there.
pub(super) fn same_file(one: &Path, other: &Path) -> bool {
    let (one, other) = (&end_of_links(one), &end_of_links(other));
    match (FileIdentity::of_path(one), FileIdentity::of_path(other)) {
        (Some(one), Some(other)) => one == other,
        // The folder is there, whether or not the file is.
        _ => match (one.file_name(), FileIdentity::of_path(&folder_of(one))) {
            (Some(name), Some(folder)) => {
                other.file_name() == Some(name) && FileIdentity::of_path(&folder_of(other)) == Some(folder)
            }
            _ => one == other,
        },
    }
}

/// The name behind symbolic links, also where nothing is there.
fn end_of_links(path: &Path) -> PathBuf {
    const MOST_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        match std::fs::read_link(&path) {
            Ok(target) => path = folder_of(&path).join(target),
            Err(_) => break,
        }
    }
    path
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// Zeroes for the guest: `len` bytes from its byte `guest` on, which are at `host`.
async fn write_encrypted_zeroes(file: &File, cipher: &Arc<dyn Cipher>, guest: u64, host: u64, len: u64) -> Result<()> {
    let mut at = 0;
    while at < len {
        let bytes = ZERO_CHUNK_BYTES.min(len - at);
        let zeroes = IoBuf::zeroed(bytes as usize);
        let zeroes = encrypt(cipher, GuestOffset(guest + at), HostOffset(host + at), zeroes).await;
        file.write_at(zeroes, host + at).await.0?;
        at += bytes;
    }
    Ok(())
}

/// Creates a LUKS volume whose disk has `size` bytes; with `detached` only its header.
pub(super) async fn create_luks(
    path: &Path,
    encryption: &NewEncryption,
    size: u64,
    preallocation: Preallocation,
    detached: bool,
    hints: LayoutHints,
    how: &Manner,
) -> Result<Created> {
    check_space(path, preallocation)?;
    let name = NewName::new(path, how, Failed::Remove);
    let fill = async |file: &File| write_fresh_luks(file, encryption, size, preallocation, detached).await;
    name.fill(encryption.file_bytes(size, detached), hints, fill).await
}

/// Makes `file`, whose contents count for nothing, a fresh LUKS volume whose disk has `size` bytes.
pub(super) async fn write_fresh_luks(
    file: &File,
    encryption: &NewEncryption,
    size: u64,
    preallocation: Preallocation,
    detached: bool,
) -> Result<()> {
    let volume = encryption.make().await?;
    let volume = if detached { volume.detached() } else { volume };
    let header_bytes = encryption.header_bytes();
    let len = encryption.file_bytes(size, detached);
    if !file.is_empty() {
        write_zeroes(file, 0, header_bytes.min(file.len())).await?;
        file.sync().await?;
    }
    if file.len() < len {
        file.set_len(len).await?;
    }
    reserve(file, 0, len, preallocation).await?;
    volume.write_rest(file, 0).await?;
    file.sync().await?;
    volume.write_first_sector(file, 0).await?;
    file.sync().await
}

/// Creates a raw image of `size` bytes.
pub(super) async fn create_raw(
    path: &Path,
    size: u64,
    preallocation: Preallocation,
    hints: LayoutHints,
    how: &Manner,
) -> Result<Created> {
    check_space(path, preallocation)?;
    let fill = async |file: &File| match file.is_device() && file.len() >= size {
        // A device or an export: longer than the image is fine.
        true => file.sync().await,
        false => write_fresh_raw(file, size, preallocation).await,
    };
    NewName::new(path, how, Failed::Empty).fill(size, hints, fill).await
}

/// Makes an empty `file` a raw image of `size` bytes.
pub async fn write_fresh_raw(file: &File, size: u64, preallocation: Preallocation) -> Result<()> {
    if size > 0 {
        file.set_len(size).await?;
        let reserved = reserve(file, 0, size, preallocation).await;
        reserved.map_err(|error| no_space(error, "", preallocation))?;
        if preallocation == Preallocation::Off && !file.is_device() {
            allocate_first_block(file, size).await?;
        }
    }
    file.sync().await
}

/// Gives a new file its first block, as QEMU does. Programs that look for the alignment of direct I/O read it, and in a
/// hole any alignment works.
async fn allocate_first_block(file: &File, size: u64) -> Result<()> {
    const BLOCK_BYTES: u64 = 4096;
    write(file, 0, &vec![0; usize::try_from(size.min(BLOCK_BYTES)).unwrap_or_default()]).await
}

/// Makes a file as long as an image needs it. Where a file has whole sectors alone, as FUSE shows it of an image, it ends with one.
pub(super) async fn lengthen(file: &File, len: u64) -> Result<()> {
    const SECTOR_BYTES: u64 = 512;
    match file.set_len(len).await {
        Err(error) if error.errno() == Errno::EINVAL && !len.is_multiple_of(SECTOR_BYTES) => {
            file.set_len(len.next_multiple_of(SECTOR_BYTES)).await
        }
        result => result,
    }
}

/// Makes `file`, whose contents count for nothing, a fresh qcow2 image. Its header is written last, after a barrier:
/// whatever happens before, the file isn't taken for an image.
pub async fn write_fresh_qcow2(file: &File, options: &Qcow2CreateOptions) -> Result<()> {
    options.check()?;
    let layout = FreshLayout::of(options)?;
    let mut header = layout.header(options)?;
    let made = match &options.encryption {
        Some(encryption) => Some(encryption.make().await?),
        None => None,
    };
    if !file.is_empty() {
        // A device, or a file that wasn't truncated. Its old bytes must not show through, nor be taken for an image
        // while its tables are replaced.
        write_zeroes(file, 0, layout.file_bytes).await?;
        file.sync().await?;
        header.resize(usize::try_from(options.cluster_bytes()).unwrap_or(header.len()), 0);
    }
    // Bytes that aren't written below are zero: the file's new end covers them.
    if file.len() < layout.file_bytes {
        lengthen(file, layout.file_bytes).await?;
    }
    write(file, layout.refcount_table_offset, &layout.refcount_table(options)).await?;
    for (index, cluster) in &layout.refcount_blocks {
        let written = write(file, cluster << options.cluster_bits, &layout.refcount_block(options, *index)).await;
        written.map_err(|error| match options.preallocation {
            Preallocation::Falloc | Preallocation::Full if options.data_file.is_none() => {
                no_space_in(error, "Could not resize image: Failed to resize refcount structures")
            }
            Preallocation::Off => error,
            _ => no_space(error, "Could not resize image: ", Preallocation::Metadata),
        })?;
    }
    if let Some(table) = layout.l1_table(options) {
        write(file, layout.l1_offset, &table).await?;
    }
    if options.data_file.is_none() && layout.mapped_clusters > 0 {
        let start = layout.mapped_start << options.cluster_bits;
        let reserved = reserve(file, start, layout.file_bytes - start, options.preallocation).await;
        let place = "Could not resize image: Failed to resize underlying file: ";
        reserved.map_err(|error| no_space(error, place, options.preallocation))?;
    }
    if let Some(volume) = made.as_ref().and_then(|made| made.volume.as_ref()) {
        volume.write_rest(file, layout.encryption_offset).await?;
        volume.write_first_sector(file, layout.encryption_offset).await?;
    }
    for index in 0..layout.l2_tables() {
        let (offset, table) = layout.l2_table(options, index);
        let written = write(file, offset, &table).await;
        written.map_err(|error| no_space(error, "Could not resize image: ", Preallocation::Metadata))?;
        if let Some(made) = made.as_ref().filter(|_| options.version < 3) {
            // There is no zero flag, so the encrypted zeroes themselves are written.
            let bytes = layout.l2_data_clusters(options, index) << options.cluster_bits;
            let guest = index * options.l2_entries() * options.cluster_bytes();
            write_encrypted_zeroes(file, &made.cipher, guest, offset + options.cluster_bytes(), bytes).await?;
        }
    }
    // The magic number goes last, with the one sector that it is in: a torn file is no image.
    let (magic, rest) = header.split_at(header.len().min(SECTOR_BYTES));
    if !rest.is_empty() {
        write(file, SECTOR_BYTES as u64, rest).await?;
    }
    file.sync().await?;
    write(file, 0, magic).await?;
    file.sync().await
}

/// Reserves the space of a range that reads as zeroes.
async fn reserve(file: &File, offset: u64, len: u64, preallocation: Preallocation) -> Result<()> {
    match preallocation {
        Preallocation::Off | Preallocation::Metadata => Ok(()),
        Preallocation::Falloc => match file.allocate(offset, len).await {
            // A file system that reserves no space has only the written bytes (ZFS, NFS before 4.2).
            Err(error) if error.kind() == ErrorKind::Unsupported && !file.is_device() => {
                write_zeroes(file, offset, len).await
            }
            allocated => allocated,
        },
        Preallocation::Full => write_zeroes(file, offset, len).await,
    }
}

/// Words the lack of space for preallocation as QEMU does. `place` comes before its sentence.
fn no_space(error: Error, place: &str, preallocation: Preallocation) -> Error {
    no_space_in(error, format!("{place}{}", preallocation.failed_sentence()))
}

fn no_space_in(error: Error, sentence: impl Into<String>) -> Error {
    match error.kind() {
        ErrorKind::NoSpace => {
            let errno = error.errno();
            error.qemu(sentence).with_errno(errno)
        }
        _ => error,
    }
}

async fn write(file: &File, offset: u64, bytes: &[u8]) -> Result<()> {
    file.write_at(IoBuf::copy_from(bytes), offset).await.0
}

pub(super) async fn write_zeroes(file: &File, offset: u64, len: u64) -> Result<()> {
    let end = offset.checked_add(len).ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "range past 2^64"))?;
    let mut buf = IoBuf::zeroed(usize::try_from(len.min(ZERO_CHUNK_BYTES)).unwrap_or(0));
    let mut at = offset;
    while at < end {
        if end - at < buf.len() as u64 {
            buf = IoBuf::zeroed(usize::try_from(end - at).unwrap_or(0));
        }
        let step = buf.len() as u64;
        let (done, back) = file.write_at(buf, at).await;
        done?;
        buf = back;
        at += step;
    }
    Ok(())
}
