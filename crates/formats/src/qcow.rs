// SPDX-License-Identifier: Apache-2.0 OR MIT
//! qcow, version 1: docs/formats/block-formats.md.

use super::blocks::{BACKING_KEY, BlockFormat, FILE_KEY, FileTable, ImageFile, MissingTable, finish};
use super::mapped::RunSource;
use super::units::{Units, check_metadata};
use cowshed_codec::Codec;
use cowshed_crypto::legacy_aes;
use cowshed_graph::encryption::{Cipher, SectorsOf};
use cowshed_graph::node::Description;
use cowshed_graph::open::{BackingReference, Draft, DriverLine, Opened, Opener, Telling};
use cowshed_graph::options::{DriverKind, DriverSchema, Key, KeyType, key};
use cowshed_layout::qcow::{ENTRY_BYTES, HEADER_BYTES, QcowCluster, QcowHeader};
use cowshed_storage::rt;
use cowshed_types::memory::try_push;
use cowshed_types::{Compression, Error, ErrorKind, GuestOffset, HostOffset, Result};
use std::rc::Rc;
use std::sync::Arc;

/// Unit of places in the file.
const SECTOR_BYTES: u64 = 512;

const SCHEMA: DriverSchema = DriverSchema {
    name: "qcow",
    kind: DriverKind::Format,
    about: "QEMU's image format before qcow2",
    keys: &[
        FILE_KEY,
        BACKING_KEY,
        Key {
            name: "encrypt",
            value: KeyType::Struct(ENCRYPT),
            default: "as the image says",
            help: "the key of an encrypted image",
        },
    ],
};

const ENCRYPT: &[Key] = &[
    key("format", KeyType::Choice(&["aes"]), "as the image says", "the method that the image must have"),
    key("key-secret", KeyType::Text, "", "id of the secret with the passphrase"),
];

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .telling(Telling::Keys(&["encrypt.key-secret"]));

struct Qcow {
    header: QcowHeader,
    l1: FileTable,
    backing_name: Option<String>,
    /// Of an encrypted image, where there is a key.
    cipher: Option<Arc<SectorsOf>>,
}

/// Opens a qcow image.
async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let file = ImageFile::open(opener, draft).await?;
    let mut qcow = load(&file).await.map_err(|error| file.named(error))?;
    qcow.cipher = cipher_of(opener, draft, qcow.header.is_encrypted).map_err(|error| file.named(error))?;
    // The header has no place for the backing file's format.
    let backing = BackingReference { name: qcow.backing_name.clone(), format: None };
    finish(opener, draft, file, qcow, backing).await
}

async fn load(file: &ImageFile) -> Result<Qcow> {
    let header = QcowHeader::parse(&file.read(0, HEADER_BYTES).await?)?;
    let l1 = FileTable { field: "l1_table_offset", offset: header.l1_offset, bytes: header.l1_bytes() };
    file.check_table(&l1)?;
    let backing_name = match header.backing_name {
        Some(place) => Some(file.name("backing_file_offset", place).await?).filter(|name| !name.is_empty()),
        None => None,
    };
    Ok(Qcow { header, l1, backing_name, cipher: None })
}

/// The cipher of an image; `None` for one that isn't encrypted, and where the disk isn't read.
fn cipher_of(opener: &Opener, draft: &Draft, is_encrypted: bool) -> Result<Option<Arc<SectorsOf>>> {
    let option = |key: &str| draft.options.get("encrypt").and_then(|encrypt| encrypt.get(key)?.as_str());
    if let Some(wanted) = option("format").filter(|_| !is_encrypted) {
        let message = format!("No encryption in image header, but options specified format '{wanted}'");
        return Err(Error::invalid_argument(message));
    }
    opener.require_key(draft, is_encrypted, option("key-secret"), "encrypt.key-secret")?;
    match option("key-secret").filter(|_| is_encrypted && opener.needs_keys(draft)) {
        Some(id) => {
            let cipher = legacy_aes(opener.secret(id)?.as_bytes())?;
            Ok(Some(Arc::new(SectorsOf { cipher, by_host: false })))
        }
        None => Ok(None),
    }
}

impl Qcow {
    /// The cluster that byte `at` is in, and where its entry is. `None`: its L2 table isn't there.
    async fn cluster(&self, file: &ImageFile, at: u64) -> Result<Option<(QcowCluster, FileTable, u64)>> {
        let span = self.header.l2_span_bytes();
        let offset = u64::from_be_bytes(file.entry(self.l1, at / span).await?);
        if offset == 0 {
            return Ok(None);
        }
        if offset < HEADER_BYTES as u64 {
            return Err(Error::invalid_image("L1 table entry", offset, "an L2 table lies on the header"));
        }
        let l2 = FileTable { field: "L1 table entry", offset, bytes: self.header.l2_bytes() };
        let index = at % span / self.header.cluster_bytes();
        debug_assert!(index < l2.bytes / ENTRY_BYTES);
        let cluster = self.header.cluster(u64::from_be_bytes(file.entry(l2, index).await?));
        Ok(Some((cluster, l2, index)))
    }
}

impl Qcow {
    /// An encrypted cluster. Its sectors have the numbers of the disk.
    async fn decrypted(&self, file: &ImageFile, block: u64, host: u64) -> Result<Vec<u8>> {
        let cipher = self.cipher.clone().ok_or_else(|| {
            Error::invalid_argument("the image is encrypted: reading needs 'encrypt.key-secret'").offset(block)
        })?;
        // The disk may end in a cluster, and the file with it.
        let len = self.header.cluster_bytes().min(self.header.size - block);
        let bytes = file.read(host, len as usize).await?;
        let cluster_bytes = self.header.cluster_bytes() as usize;
        Ok(rt::run_on_cpu_pool(move || {
            let mut bytes = bytes.to_vec();
            cipher.decrypt(GuestOffset(block), HostOffset(host), &mut bytes);
            bytes.resize(cluster_bytes, 0);
            bytes
        })
        .await)
    }

    /// For how many of the `len` bytes from byte `at` of the disk on there is no L2 table, where there is none for `at`.
    async fn without_table(&self, file: &ImageFile, at: u64, len: u64) -> Result<u64> {
        let span = self.header.l2_span_bytes();
        file.same::<8>(self.l1, at / span, (at, len, span)).await
    }

    /// For how many of the `len` bytes from byte `at` of the disk on there is no cluster, where there is none for `at`.
    async fn unallocated(&self, file: &ImageFile, found: (FileTable, u64), at: u64, len: u64) -> Result<u64> {
        let to_table = |entry| {
            let offset = u64::from_be_bytes(entry);
            Some(offset).filter(|offset| *offset == 0 || *offset >= HEADER_BYTES as u64)
        };
        let slot = (self.l1, at / self.header.l2_span_bytes());
        file.unallocated(slot, found, (at, len, self.header.cluster_bytes()), to_table).await
    }
}

impl BlockFormat for Qcow {
    const NAME: &'static str = SCHEMA.name;

    fn size(&self) -> u64 {
        self.header.size
    }

    fn described_bytes(&self) -> u64 {
        let size = self.size();
        size.checked_next_multiple_of(self.header.l2_span_bytes()).unwrap_or(size)
    }

    fn describe(&self) -> Description {
        Description {
            in_sectors: true,
            has_packed_clusters: true,
            cluster_bytes: Some(self.header.cluster_bytes()),
            backing_name: self.backing_name.clone(),
            ..Description::default()
        }
    }

    async fn place(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let Some((cluster, l2, index)) = self.cluster(file, at).await? else {
            return Ok((RunSource::Unallocated, self.without_table(file, at, len).await?));
        };
        let skip = at % self.header.cluster_bytes();
        let (all, len) = (len, len.min(self.header.cluster_bytes() - skip));
        match cluster {
            QcowCluster::Unallocated => {
                Ok((RunSource::Unallocated, self.unallocated(file, (l2, index), at, all).await?))
            }
            QcowCluster::At(host) => {
                if !host.is_multiple_of(SECTOR_BYTES) {
                    let message = format!("the cluster at byte {} of the disk is not at a sector", at - skip);
                    return Err(Error::invalid_image("L2 table entry", format!("{host:#x}"), message));
                }
                file.check_data("L2 table entry", host, skip + len, at)?;
                match self.header.is_encrypted {
                    // It is read whole.
                    true => Ok((RunSource::Packed { block: at - skip }, len)),
                    false => Ok((RunSource::Data { file: 0, host: host + skip }, len)),
                }
            }
            QcowCluster::Compressed { host, len: packed } => {
                if packed == 0 {
                    let message = format!("the compressed cluster at byte {} of the disk has no length", at - skip);
                    return Err(Error::invalid_image("L2 table entry", format!("{host:#x}"), message));
                }
                if host < HEADER_BYTES as u64 {
                    let message =
                        format!("the compressed cluster at byte {} of the disk lies on the header", at - skip);
                    return Err(Error::invalid_image("L2 table entry", format!("{host:#x}"), message));
                }
                file.check_data("L2 table entry", host, packed, at)?;
                Ok((RunSource::Packed { block: at - skip }, len))
            }
        }
    }

    async fn run(&self, file: &ImageFile, at: u64, len: u64) -> Result<(RunSource, u64)> {
        let (place, first) = self.place(file, at, len).await?;
        let cluster_bytes = self.header.cluster_bytes();
        match (place, self.cluster(file, at).await?) {
            (RunSource::Data { host, .. }, Some((_, l2, index))) if at.is_multiple_of(cluster_bytes) => {
                let of = |entry| match self.header.cluster(u64::from_be_bytes(entry)) {
                    QcowCluster::At(offset) => Some(offset),
                    _ => None,
                };
                let range = (host, cluster_bytes, len.div_ceil(cluster_bytes));
                let blocks = file.blocks_in_a_row(l2, index, range, of).await?;
                Ok((place, (blocks * cluster_bytes).min(len)))
            }
            _ => Ok((place, first)),
        }
    }

    async fn unpack(&self, file: &ImageFile, block: u64) -> Result<Vec<u8>> {
        match self.cluster(file, block).await? {
            Some((QcowCluster::Compressed { host, len }, ..)) => self.unpack_at(file, host, len).await,
            Some((QcowCluster::At(host), ..)) if self.header.is_encrypted => self.decrypted(file, block, host).await,
            _ => Err(Error::internal("a packed cluster went away").offset(block)),
        }
    }

    async fn unpack_at(&self, file: &ImageFile, host: u64, len: u64) -> Result<Vec<u8>> {
        // A cluster is 64 KiB at most, and its compressed bytes are fewer.
        let packed = file.read(host, len as usize).await?;
        let cluster_bytes = self.header.cluster_bytes() as usize;
        rt::run_on_cpu_pool(move || {
            let mut cluster = vec![0; cluster_bytes];
            Codec::new(Compression::Zlib).decompress(&packed, &mut cluster)?;
            Ok(cluster)
        })
        .await
        .map_err(|error: Error| error.offset(host))
    }

    fn is_encrypted(&self) -> bool {
        self.header.is_encrypted
    }

    async fn before_writing(&self, _file: &ImageFile) -> Result<()> {
        match self.header.is_encrypted {
            true => Err(Error::new(ErrorKind::ReadOnly, "qcow images that are encrypted can only be read")
                .hint(": convert it to qcow2 to write to it")),
            false => Ok(()),
        }
    }

    const LINKS_BACKING: bool = true;

    const PACKS: bool = true;

    fn packed_entry(&self, host: u64, len: u64) -> Result<Vec<u8>> {
        Ok(self.header.compressed_entry(host, len)?.to_be_bytes().to_vec())
    }

    fn units(&self) -> Option<Units> {
        let (block_bytes, head, tail) = (self.header.cluster_bytes(), Vec::new(), Vec::new());
        Some(Units { file: 0, block_bytes, head, first: 0, grid: block_bytes, tail, is_at_end: true })
    }

    async fn occupied(&self, file: &ImageFile) -> Result<Vec<(u64, u64)>> {
        let (span, cluster_bytes) = (self.header.l2_span_bytes(), self.header.cluster_bytes());
        let mut parts = vec![(0, HEADER_BYTES as u64), (self.l1.offset, self.l1.offset + self.l1.bytes)];
        if let Some((at, len)) = self.header.backing_name {
            try_push(&mut parts, (at, at + u64::from(len)))?;
        }
        let mut at = 0;
        while at < self.header.size {
            let (index, rest) = (at / span, self.header.size - at);
            let offset = u64::from_be_bytes(file.entry(self.l1, index).await?);
            if offset == 0 {
                at += file.same::<8>(self.l1, index, (at, rest, span)).await?;
                continue;
            }
            let table = FileTable { field: "L1 table entry", offset, bytes: self.header.l2_bytes() };
            file.check_table(&table)?;
            try_push(&mut parts, (offset, offset + table.bytes))?;
            at += rest.min(span);
        }
        check_metadata(&mut parts, "L1 table entry")?;
        let mut at = 0;
        while at < self.header.size {
            let rest = self.header.size - at;
            let Some((cluster, table, index)) = self.cluster(file, at).await? else {
                at += self.without_table(file, at, rest).await?;
                continue;
            };
            at += match cluster {
                // Compressed clusters are no blocks of their own: nothing may lie on them either.
                QcowCluster::Compressed { host, len } => {
                    match parts.last_mut() {
                        Some(last) if last.1 == host => last.1 = host + len,
                        _ => try_push(&mut parts, (host, host + len))?,
                    }
                    cluster_bytes
                }
                QcowCluster::At(_) => self.run(file, at, rest).await?.1,
                QcowCluster::Unallocated => self.unallocated(file, (table, index), at, rest).await?,
            };
        }
        Ok(parts)
    }

    async fn slot(&self, file: &ImageFile, block: u64) -> Result<(FileTable, u64)> {
        let at = block * self.header.cluster_bytes();
        let found = self.cluster(file, at).await?;
        let (_, table, index) = found.ok_or_else(|| Error::internal("an L2 table is missing").offset(at))?;
        Ok((table, index))
    }

    async fn missing_table(&self, file: &ImageFile, block: u64) -> Result<Option<MissingTable>> {
        let at = block * self.header.cluster_bytes();
        if self.cluster(file, at).await?.is_some() {
            return Ok(None);
        }
        let entry_offset = self.l1.offset + at / self.header.l2_span_bytes() * ENTRY_BYTES;
        let (bytes, blocks) = (self.header.l2_bytes(), 1 << self.header.l2_bits);
        Ok(Some(MissingTable { entry_offset, field: "L1 table entry", bytes, blocks }))
    }

    fn entry_bytes(&self) -> u64 {
        ENTRY_BYTES
    }

    fn entry(&self, host: u64) -> Result<Vec<u8>> {
        Ok(host.to_be_bytes().to_vec())
    }

    fn table_entry(&self, host: u64) -> Result<Vec<u8>> {
        Ok(host.to_be_bytes().to_vec())
    }
}
