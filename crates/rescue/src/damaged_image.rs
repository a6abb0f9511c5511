// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A damaged image, open for reading.

use crate::header::{self, Fields};
use crate::orphans::is_plausible;
use crate::place::{EntryRules, Places, Source, places};
use crate::{Doubt, Loss, Overrides};
use cowshed_codec::Codec;
use cowshed_image::Node;
use cowshed_image::encryption::Cipher;
use cowshed_layout::qcow2::{CompressedDescriptor, Geometry, Header, L1Entry};
use cowshed_storage::IoBuf;
use cowshed_types::memory::expect_memory;
use cowshed_types::{Compression, Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A failed large read is tried again in pieces of this many bytes.
const PIECE_BYTES: usize = 4096;
/// Header, extensions and names lie in the first cluster.
const HEAD_BYTES: u64 = 2 << 20;

/// A damaged image. The nodes are views of the bare files.
pub struct DamagedImage {
    pub(super) image: Arc<Node>,
    pub(super) fields: Fields,
    pub(super) shape: EntryRules,
    pub(super) l1: Vec<u64>,
    /// Where the active L1 table starts and its entries, while a snapshot's is read.
    pub(super) active_l1: Option<(Option<u64>, u64)>,
    /// Parts of the L1 table that can't be read, in bytes, and why.
    bad_l1: Vec<(Range<u64>, Loss)>,
    pub(super) data: Option<Arc<Node>>,
    backing: Option<Arc<Node>>,
    pub(super) cipher: Option<Arc<dyn Cipher>>,
    /// The reason for which the backing file can't be read, where there should be one.
    backing_fault: Option<String>,
    /// L1 index → L2 table, by the user's word.
    assigned: BTreeMap<u64, u64>,
}

/// The target of an L1 entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum L1Target {
    /// No table: the backing file, or zeroes.
    Empty,
    /// An L2 table at a host offset; `assigned` by the user.
    Table {
        /// Host offset in bytes.
        offset: u64,
        /// By the user's word.
        assigned: bool,
    },
    /// There was a table.
    Lost(Loss),
}

/// An L2 table, as far as it could be read.
pub struct Table {
    /// Host offset in bytes.
    pub offset: u64,
    bytes: Vec<u8>,
    bad: Vec<(Range<u64>, Loss)>,
    assigned: bool,
}

/// The result of reading a guest cluster. Ranges are offsets inside of it.
#[derive(Debug, Default)]
pub struct Salvaged {
    /// The bytes, zeroes where they are lost; `None`: nothing but zeroes.
    pub bytes: Option<Vec<u8>>,
    /// The lost ranges.
    pub lost: Vec<(Range<u64>, Loss)>,
    /// The possible fault of the rest.
    pub doubt: Option<Doubt>,
    /// The entry, and where it is.
    pub entry: Option<(u64, u64)>,
}

impl DamagedImage {
    /// Reads header and L1 table of the image in `image`, a view of the bare file.
    pub async fn open(image: Arc<Node>, overrides: &Overrides) -> Result<DamagedImage> {
        let name = image.filename();
        let len = image.size();
        let (head, bad) = salvage(&image, 0, len.min(HEAD_BYTES) as usize).await;
        let mut fields = header::read(&head, len, overrides).map_err(|error| error.file(name))?;
        fields.notes.extend(bad.iter().map(|(range, loss)| {
            format!("bytes {:#x} to {:#x} can't be read: {}", range.start, range.end, loss.detail().unwrap_or_default())
        }));
        let data_len = if fields.data_file { 0 } else { len };
        let shape = EntryRules {
            geometry: fields.geometry,
            version: fields.version,
            data_file: fields.data_file,
            file_len: len,
            data_len,
        };
        let mut wreck = DamagedImage {
            image,
            shape,
            l1: Vec::new(),
            active_l1: None,
            bad_l1: Vec::new(),
            data: None,
            backing: None,
            cipher: None,
            backing_fault: fields.backing_doubt.clone(),
            assigned: BTreeMap::new(),
            fields,
        };
        wreck.load_l1(wreck.slots()).await?;
        Ok(wreck)
    }

    /// Reads this many entries of the L1 table.
    pub(super) async fn load_l1(&mut self, entries: u64) -> Result<()> {
        (self.l1, self.bad_l1) = (Vec::new(), Vec::new());
        let Some(start) = self.fields.l1_offset else { return Ok(()) };
        // The buffer, the bytes of it, the entries, and room for those that a shorter table lacks.
        expect_memory(usize::try_from(self.slots().max(entries).saturating_mul(8 * 5)).unwrap_or(usize::MAX))?;
        let (bytes, bad) = salvage(&self.image, start, (entries * 8) as usize).await;
        self.l1 = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_be_bytes(*word)).collect();
        self.bad_l1 = bad;
        let inside = self.shape.file_len.saturating_sub(start);
        if inside < entries * 8 {
            self.bad_l1.push((inside..entries * 8, Loss::PastEnd));
        }
        Ok(())
    }

    /// Size of the virtual disk in bytes.
    pub fn size(&self) -> u64 {
        self.fields.size
    }

    /// Sizes.
    pub fn geometry(&self) -> Geometry {
        self.shape.geometry
    }

    /// The faults of the header, in words.
    pub fn notes(&self) -> &[String] {
        &self.fields.notes
    }

    /// The header, where it is whole.
    pub fn header(&self) -> Option<&Header> {
        self.fields.header.as_ref()
    }

    /// Name and format of the backing file, from a header that is whole.
    pub fn backing_name(&self) -> Option<(&str, Option<&str>)> {
        self.fields.backing.as_ref().map(|(name, format)| (name.as_str(), format.as_deref()))
    }

    /// Unallocated parts come from this node…
    pub fn set_backing(&mut self, backing: Arc<Node>) {
        self.backing = Some(backing);
    }

    /// …or are lost, because there is no such node; why.
    pub fn miss_backing(&mut self, why: String) {
        self.backing_fault = Some(why);
    }

    /// True when guest data are in an external data file; and its name, where it is known.
    pub fn needs_data_file(&self) -> (bool, Option<&str>) {
        (self.fields.data_file, self.fields.data_file_name.as_deref())
    }

    /// Guest data come from this node.
    pub fn set_data_file(&mut self, data: Arc<Node>) {
        self.shape.data_len = data.size();
        self.data = Some(data);
    }

    /// Number of L1 entries that the disk needs.
    pub fn slots(&self) -> u64 {
        self.shape.geometry.l1_entries_needed(self.fields.size)
    }

    /// The target of the entry of the L1 table.
    pub fn slot(&self, index: u64) -> L1Target {
        if let Some(offset) = self.assigned.get(&index) {
            return L1Target::Table { offset: *offset, assigned: true };
        }
        let lost = |why: String| L1Target::Lost(Loss::TableLost(why));
        let Some(raw) = usize::try_from(index).ok().and_then(|index| self.l1.get(index)) else {
            return lost("the L1 table is lost".to_owned());
        };
        let after = self.bad_l1.partition_point(|(range, _)| range.end <= index * 8);
        if let Some((_, loss)) = self.bad_l1.get(after).filter(|(range, _)| range.contains(&(index * 8))) {
            return lost(format!("the L1 table can't be read: {}", loss.detail().unwrap_or(loss.name())));
        }
        let offset = L1Entry(*raw).offset().0;
        if *raw == 0 {
            L1Target::Empty
        } else if offset == 0 || self.shape.geometry.in_cluster(offset) != 0 {
            lost(format!("L1 entry {raw:#018x} is damaged"))
        } else if offset >= self.shape.file_len {
            lost(format!("the table at {offset:#x} is behind the end of the file"))
        } else {
            L1Target::Table { offset, assigned: false }
        }
    }

    /// Takes the L2 table at host offset `offset` for the guest range from `guest` on, which must have none.
    pub async fn assign(&mut self, offset: u64, guest: u64) -> Result<()> {
        let coverage = self.shape.geometry.l2_coverage();
        let error = |message: String| Err(Error::invalid_argument(message).field("assign"));
        if !guest.is_multiple_of(coverage) || guest >= self.fields.size {
            return error(format!("an L2 table maps {coverage} bytes: the guest offset is a multiple of that"));
        }
        let index = guest / coverage;
        if matches!(self.slot(index), L1Target::Table { .. }) {
            return error(format!("guest offset {guest:#x} has an L2 table already"));
        }
        let table = self.table(offset, false).await;
        if self.shape.geometry.in_cluster(offset) != 0 || !is_plausible(&self.shape, offset, &table.bytes) {
            return error(format!("there is no L2 table at {offset:#x}"));
        }
        self.assigned.insert(index, offset);
        Ok(())
    }

    /// Reads an L2 table.
    pub async fn table(&self, offset: u64, assigned: bool) -> Table {
        let (bytes, bad) = salvage(&self.image, offset, self.shape.geometry.cluster_size() as usize).await;
        Table { offset, bytes, bad, assigned }
    }

    /// True for a cluster of the table that is neither allocated nor zero, so that the backing file alone decides.
    pub fn is_unallocated(&self, table: &Table, index: u64) -> bool {
        let len = self.shape.geometry.l2_entry_size();
        let entry = &table.bytes[(index * len) as usize..][..len as usize];
        entry.iter().all(|byte| *byte == 0) && table.bad.is_empty()
    }

    /// True when unallocated ranges are zeroes.
    pub fn has_no_backing(&self) -> bool {
        self.backing.is_none() && self.backing_fault.is_none()
    }

    /// The reason for which unallocated ranges are lost, where they are.
    pub fn backing_fault(&self) -> Option<&str> {
        self.backing_fault.as_deref().filter(|_| self.backing.is_none())
    }

    /// Size of the backing file's disk in bytes; 0 without one.
    pub fn backing_bytes(&self) -> u64 {
        self.backing.as_deref().map_or(0, Node::size)
    }

    /// Reads the guest cluster at guest offset `guest`, entry `index` of the table.
    pub async fn cluster(&self, table: &Table, index: u64, guest: u64) -> Salvaged {
        let len = self.shape.geometry.l2_entry_size();
        let at = index * len;
        if let Some((_, loss)) = table.bad.iter().find(|(range, _)| range.contains(&at)) {
            let why =
                format!("the L2 table at {:#x} can't be read: {}", table.offset, loss.detail().unwrap_or_default());
            return self.lost_cluster(Loss::TableLost(why));
        }
        let word = |at: u64| table.bytes[at as usize..].first_chunk().map_or(0, |word| u64::from_be_bytes(*word));
        let raw = word(at);
        let bitmap = self.shape.geometry.extended_l2().then(|| word(at + 8));
        let Places { parts, doubt } = places(&self.shape, raw, bitmap);
        let assigned = (table.assigned && raw != 0).then_some(Doubt::AssignedTable);
        let mut salvaged =
            Salvaged { doubt: doubt.or(assigned), entry: Some((table.offset + at, raw)), ..Salvaged::default() };
        for (range, source) in parts {
            self.fill(&mut salvaged, range, source, guest).await;
        }
        salvaged
    }

    /// A cluster without a table: the backing file's.
    pub async fn backing_cluster(&self, guest: u64) -> Salvaged {
        let mut salvaged = Salvaged::default();
        self.fill(&mut salvaged, 0..self.shape.geometry.cluster_size(), Source::Unallocated, guest).await;
        salvaged
    }

    fn lost_cluster(&self, loss: Loss) -> Salvaged {
        let lost = std::iter::once((0..self.shape.geometry.cluster_size(), loss)).collect();
        Salvaged { lost, ..Salvaged::default() }
    }

    async fn fill(&self, salvaged: &mut Salvaged, range: Range<u64>, source: Source, guest: u64) {
        let len = (range.end - range.start) as usize;
        let (bytes, bad) = match source {
            Source::Zero => return,
            Source::Lost(loss) => return salvaged.lost.push((range, loss)),
            Source::Unallocated => match (&self.backing, &self.backing_fault) {
                (Some(backing), _) => salvage_backing(backing, guest + range.start, len).await,
                (None, Some(why)) => return salvaged.lost.push((range, Loss::Backing(why.clone()))),
                (None, None) => return,
            },
            Source::Data { host } => {
                let (mut bytes, bad) = salvage(self.data.as_ref().unwrap_or(&self.image), host, len).await;
                self.decrypt(guest + range.start, host, &mut bytes, bad.iter().map(|(bad, _)| bad.clone()));
                (bytes, bad)
            }
            Source::Compressed(descriptor) => match self.decompress(descriptor).await {
                Ok(bytes) => (bytes, Vec::new()),
                Err(loss) => return salvaged.lost.push((range, loss)),
            },
        };
        let whole = salvaged.bytes.get_or_insert_with(|| vec![0; self.shape.geometry.cluster_size() as usize]);
        whole[range.start as usize..range.end as usize].copy_from_slice(&bytes);
        let moved = |(bad, loss): (Range<u64>, Loss)| (range.start + bad.start..range.start + bad.end, loss);
        salvaged.lost.extend(bad.into_iter().map(moved));
    }

    /// A compressed cluster. Where the header's compression type doesn't fit, the other one is tried.
    async fn decompress(&self, descriptor: CompressedDescriptor) -> std::result::Result<Vec<u8>, Loss> {
        let (compressed, bad) = salvage(&self.image, descriptor.host_offset.0, descriptor.len_max() as usize).await;
        let mut cluster = vec![0; self.shape.geometry.cluster_size() as usize];
        let other = match self.fields.compression {
            Compression::Zlib => Compression::Zstd,
            Compression::Zstd => Compression::Zlib,
        };
        let failure = match Codec::new(self.fields.compression).decompress(&compressed, &mut cluster) {
            Ok(()) => return Ok(cluster),
            Err(error) => error,
        };
        if Codec::new(other).decompress(&compressed, &mut cluster).is_ok() {
            return Ok(cluster);
        }
        Err(bad.into_iter().next().map_or_else(|| Loss::BadCompressedData(failure.to_string()), |(_, loss)| loss))
    }
}

/// Reads as much as possible; the rest is zero and listed. Zeroes behind the end.
pub(super) async fn salvage(node: &Arc<Node>, offset: u64, len: usize) -> (Vec<u8>, Vec<(Range<u64>, Loss)>) {
    read_in_pieces(node, offset, len, |error| Loss::Io(error.message().to_owned())).await
}

async fn salvage_backing(node: &Arc<Node>, offset: u64, len: usize) -> (Vec<u8>, Vec<(Range<u64>, Loss)>) {
    read_in_pieces(node, offset, len, |error| Loss::Backing(error.to_string())).await
}

async fn read_in_pieces(
    node: &Arc<Node>,
    offset: u64,
    len: usize,
    loss: impl Fn(&Error) -> Loss,
) -> (Vec<u8>, Vec<(Range<u64>, Loss)>) {
    let (result, buf) = node.read_padded(offset, IoBuf::zeroed(len)).await;
    if result.is_ok() {
        return (buf.to_vec(), Vec::new());
    }
    let mut bytes = vec![0; len];
    let mut bad: Vec<(Range<u64>, Loss)> = Vec::new();
    let mut at = 0;
    while at < len {
        // Pieces end where the disk's blocks do.
        let place = offset + at as u64;
        let piece = (PIECE_BYTES - (place % PIECE_BYTES as u64) as usize).min(len - at);
        let (result, buf) = node.read_padded(place, IoBuf::zeroed(piece)).await;
        let range = at as u64..(at + piece) as u64;
        match (result, bad.last_mut()) {
            (Ok(()), _) => bytes[at..at + piece].copy_from_slice(&buf),
            (Err(error), Some((last, before))) if last.end == range.start && *before == loss(&error) => {
                last.end = range.end;
            }
            (Err(error), _) => bad.push((range, loss(&error))),
        }
        at += piece;
    }
    (bytes, bad)
}
