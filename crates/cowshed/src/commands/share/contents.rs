// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The contents of a share: the disk as it is, a qcow2 file of it, and the page.

use cowshed_http_server::{Content, Packing, Reading, Version};
use cowshed_image::Node;
use cowshed_image::graph::{Attachment, Queue};
use cowshed_layout::qcow2::sequential::{Sequential, Stretch};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, Result};
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

type Read<'a> = Pin<Box<dyn Future<Output = (Result<()>, IoBuf)> + 'a>>;

/// The bytes of the disk, or their packed form made on the way.
pub struct Raw {
    pub disk: Arc<Attachment>,
    pub file_name: String,
    pub packing: Option<Packing>,
}

impl Content for Raw {
    fn open(&self) -> Box<dyn Reading> {
        self.disk.open()
    }

    fn file_name(&self) -> Option<&str> {
        Some(&self.file_name)
    }

    fn media_type(&self) -> &str {
        if self.packing.is_some() { "application/zstd" } else { "application/octet-stream" }
    }

    fn packing(&self) -> Option<Packing> {
        self.packing.clone()
    }
}

/// A qcow2 file of the disk, made while it is read.
pub struct PackedContent {
    disk: Arc<Attachment>,
    packed: Mutex<Arc<Packed>>,
    /// Length of the file in bytes.
    len: Arc<AtomicU64>,
    file_name: String,
}

/// The places of a version of the disk in a qcow2 file.
struct Packed {
    layout: Sequential,
    version: Version,
    /// No change since that was looked at has the same version.
    is_sure: bool,
    /// They could not be looked for again.
    trouble: Option<Error>,
}

/// The disk may change meanwhile. Then the places are of no version, and nothing of them is sent.
async fn layout_of(disk: &Arc<Attachment>) -> Result<Sequential> {
    let node = disk.node();
    let layout = Sequential::new(node.size(), &data_of(&node).await?)?;
    // The places came from tables, which an image that has taken the place of this one doesn't have.
    Reading::check(&disk.queue()).map(|()| layout)
}

impl PackedContent {
    /// `len` gets the length of the file in bytes, and follows the disk.
    pub async fn new(disk: Arc<Attachment>, file_name: String, len: Arc<AtomicU64>) -> Result<PackedContent> {
        let version = Reading::version(&disk.queue());
        let is_sure = Reading::is_settled(&disk.queue());
        let layout = layout_of(&disk).await?;
        len.store(layout.len(), Ordering::Relaxed);
        let packed = Mutex::new(Arc::new(Packed { layout, version, is_sure, trouble: None }));
        Ok(PackedContent { disk, packed, len, file_name })
    }

    fn packed(&self) -> Arc<Packed> {
        Arc::clone(&self.packed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn look_again(&self) {
        let (known, version) = (self.packed(), Reading::version(&self.disk.queue()));
        let is_sure = Reading::is_settled(&self.disk.queue());
        // Places that are looked for while the version is unsure would have to be looked for again.
        let is_known = version.number == known.version.number && (known.is_sure || !is_sure);
        if is_known && known.trouble.is_none() {
            return;
        }
        let packed = match layout_of(&self.disk).await {
            Ok(layout) => Packed { layout, version, is_sure, trouble: None },
            Err(error) => Packed { layout: known.layout.clone(), version, is_sure, trouble: Some(error) },
        };
        self.len.store(packed.layout.len(), Ordering::Relaxed);
        *self.packed.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(packed);
    }
}

impl Content for PackedContent {
    fn follow(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        Box::pin(self.look_again())
    }

    fn open(&self) -> Box<dyn Reading> {
        Box::new(PackedReading { queue: self.disk.queue(), packed: self.packed() })
    }

    fn file_name(&self) -> Option<&str> {
        Some(&self.file_name)
    }
}

struct PackedReading {
    queue: Queue,
    packed: Arc<Packed>,
}

impl Reading for PackedReading {
    fn size(&self) -> u64 {
        self.packed.layout.len()
    }

    fn version(&self) -> Version {
        self.queue.version()
    }

    fn is_settled(&self) -> bool {
        self.packed.is_sure && self.queue.is_settled()
    }

    fn may_be_amid_write(&self) -> bool {
        self.queue.may_be_amid_write()
    }

    fn check(&self) -> Result<()> {
        Reading::check(&self.queue)
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Read<'_> {
        Box::pin(self.fill(offset, buf))
    }
}

impl PackedReading {
    async fn fill(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        // The server compares the version before and behind a read. This one compares it with that of the places.
        if let Some(error) = &self.packed.trouble {
            return (Err(error.clone()), buf);
        }
        // Metadata is made without a read of the disk.
        if let Err(error) = self.check() {
            return (Err(error), buf);
        }
        if Reading::version(&self.queue).number != self.packed.version.number {
            let message = "the disk was written to while its file was made";
            return (Err(Error::new(ErrorKind::Busy, message)), buf);
        }
        let mut done: Option<IoBuf> = None;
        let mut at = offset;
        while !buf.is_empty() {
            let stretch = self.packed.layout.at(at, buf.len() as u64);
            let (Stretch::Metadata(len) | Stretch::Data { len, .. }) = stretch;
            let part = buf.split_to(usize::try_from(len).unwrap_or(usize::MAX).min(buf.len()));
            at += part.len() as u64;
            let (result, part) = match stretch {
                Stretch::Metadata(_) => {
                    let mut part = part;
                    self.packed.layout.fill(at - part.len() as u64, &mut part);
                    (Ok(()), part)
                }
                Stretch::Data { guest, .. } => self.data(guest, part).await,
            };
            let joined = match &mut done {
                None => {
                    done = Some(part);
                    Ok(())
                }
                Some(done) => done.unsplit(part).map_err(|_| Error::internal("parts of one buffer lie apart")),
            };
            if let Err(error) = result.and(joined) {
                return (Err(error), done.unwrap_or(buf));
            }
        }
        (Ok(()), done.unwrap_or(buf))
    }

    /// Bytes of the disk; zeroes behind its end, in its last cluster.
    async fn data(&self, guest: u64, mut part: IoBuf) -> (Result<()>, IoBuf) {
        let there = usize::try_from(self.queue.size().saturating_sub(guest)).unwrap_or(usize::MAX);
        let mut behind = part.split_off(there.min(part.len()));
        behind.fill(0);
        let (result, mut part) = match part.is_empty() {
            true => (Ok(()), part),
            // Not the queue's own: this one looks after the files.
            false => Reading::read(&self.queue, guest, part).await,
        };
        let joined = match behind.is_empty() {
            true => Ok(()),
            false => part.unsplit(behind).map_err(|_| Error::internal("parts of one buffer lie apart")),
        };
        (result.and(joined), part)
    }
}

/// Most runs of data that are kept: 16 bytes for each.
const MAX_RUNS: usize = 16 << 20;

/// Where a disk has data, in order.
pub async fn data_of(node: &Node) -> Result<Vec<Range<u64>>> {
    const AT_ONCE: usize = 4096;
    let size = node.size();
    let mut data: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < size {
        for run in node.block_status_chain(at, size - at, AT_ONCE).await? {
            let end = at + run.len;
            match data.last_mut() {
                _ if !run.data || run.zero => {}
                Some(last) if last.end == at => last.end = end,
                _ => data.push(at..end),
            }
            at = end;
        }
        if data.len() > MAX_RUNS {
            let message = format!("the disk's data is in more than {MAX_RUNS} runs: share it with --as raw");
            return Err(Error::new(ErrorKind::Limit, message));
        }
    }
    Ok(data)
}

/// A page that changes.
#[derive(Default)]
pub struct Page(Mutex<Arc<str>>);

impl Page {
    pub fn set(&self, html: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = html.into();
    }
}

/// The page, shared with the task that changes it.
pub struct Shown(pub Arc<Page>);

impl Content for Shown {
    fn open(&self) -> Box<dyn Reading> {
        Box::new(PageReading(Arc::clone(&self.0.0.lock().unwrap_or_else(PoisonError::into_inner))))
    }

    fn media_type(&self) -> &str {
        "text/html; charset=utf-8"
    }
}

struct PageReading(Arc<str>);

impl Reading for PageReading {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn version(&self) -> Version {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        Version { number: hasher.finish(), may_change: false, is_unsure: false }
    }

    fn read(&self, offset: u64, mut buf: IoBuf) -> Read<'_> {
        let at = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        let bytes = &self.0.as_bytes()[at..];
        let len = bytes.len().min(buf.len());
        buf[..len].copy_from_slice(&bytes[..len]);
        Box::pin(std::future::ready((Ok(()), buf)))
    }
}
