// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads everything that can still be reached out of a damaged qcow2 image, into a new one, with a map of the losses.
//! The damaged image is opened for reading only.

mod map;

use crate::zeroes::is_zero;
use crate::{ImageSpec, JobHandle};
use cowshed_create::{CreateRequest, INCOMPLETE};
use cowshed_image::open::resolve_name;
use cowshed_image::{DRIVERS, Node};
use cowshed_layout::qcow2::SnapshotName;
pub use cowshed_rescue::Overrides;
use cowshed_rescue::{DamagedImage, L1Target, Loss};
use cowshed_storage::{FileIdentity, IoBuf, path_of_text};
use cowshed_types::{Error, ErrorKind, Result};
pub use map::{Doubtful, Lost, OrphanTable, RescueMap};
use std::sync::Arc;

/// The image to rescue, and the way to do it.
#[derive(Clone, Debug, Default)]
pub struct RescueOptions {
    /// The damaged image, by the name of its file; the format is not looked at.
    pub image: ImageSpec,
    /// The new image; `None`: only list the losses. Its format is "raw" if `None`.
    pub target: Option<ImageSpec>,
    /// Options of the new image, each a `key=value,key=value` list.
    pub create_options: Vec<String>,
    /// The internal snapshot to read instead of the disk.
    pub snapshot: Option<SnapshotName>,
    /// The user's values in place of the header's.
    pub overrides: Overrides,
    /// The backing file instead of the one that the header names: name and format. An empty name: there is none.
    pub backing: Option<(String, Option<String>)>,
    /// The external data file instead of the one that the header names.
    pub data_file: Option<String>,
    /// Id of the secret that opens an encrypted image, one of the image's secrets.
    pub key_secret: Option<String>,
    /// Look for L2 tables that nothing leads to.
    pub scan: bool,
    /// L2 tables by the user's word: host offset and guest offset, in bytes.
    pub assign: Vec<(u64, u64)>,
    /// The new image replaces no file that is there already.
    pub keeps_existing: bool,
}

/// Written at a time, at least, where data follow each other.
const RUN_BYTES: usize = 1 << 20;

/// Rescues. An error means that nothing more could be done; mere losses are in the map.
pub async fn run(options: &RescueOptions, job: &JobHandle) -> Result<RescueMap> {
    let mut opened = Vec::new();
    let result = rescue(options, job, &mut opened).await;
    let mut closed = Ok(());
    for node in opened.into_iter().rev() {
        closed = closed.and(node.close().await);
    }
    result.and_then(|map| closed.map(|()| map))
}

async fn rescue(options: &RescueOptions, job: &JobHandle, opened: &mut Vec<Arc<Node>>) -> Result<RescueMap> {
    let image = bare(&options.image).open_for_reading().await?;
    opened.push(Arc::clone(&image));
    if image.cluster_bytes().is_some() {
        return Err(Error::invalid_argument("a rescue needs the bare file: driver=raw or driver=file"));
    }
    let overrides = Overrides { backing_is_given: options.backing.is_some(), ..options.overrides };
    let mut wreck = DamagedImage::open(Arc::clone(&image), &overrides).await?;
    if let Some(header) = wreck.header() {
        options.image.policy.check_header(header).map_err(|error| error.file(image.filename()))?;
    }
    unlock(options, &mut wreck).await.map_err(|error| error.file(image.filename()))?;
    let listed = wreck.snapshots().await;
    if let Some(snapshot) = &options.snapshot {
        wreck.enter_snapshot(snapshot, &overrides).await?;
    }
    let mut map = RescueMap::new(&image.filename(), &wreck);
    map.note_snapshots(listed, options.snapshot.as_ref());
    let mut sources = vec![options.image.name.clone()];
    open_data_file(options, &mut wreck, opened, &mut sources, &mut map).await?;
    open_backing(options, &mut wreck, opened, &mut sources, &mut map).await?;
    if options.scan {
        let watch = |done: u64, total: u64| {
            job.set_progress(done, total);
            !job.is_cancelled()
        };
        map.orphans = wreck.scan(&watch).await?.into_iter().map(OrphanTable::from).collect();
    }
    map.note_slots(&wreck);
    for (offset, guest) in &options.assign {
        wreck.assign(*offset, *guest).await?;
        map.note_assigned(*offset, *guest);
    }
    let target = match &options.target {
        None => None,
        Some(spec) => {
            let node = create_target(options, spec, &sources, wreck.size()).await?;
            opened.push(Arc::clone(&node));
            Some(node)
        }
    };
    let mut copy = Copy { wreck: &wreck, target: target.as_deref(), map: &mut map, run: Vec::new(), start: 0 };
    let copied = copy.all(job).await;
    copied.map_err(|error| match &target {
        Some(_) => error.context(INCOMPLETE),
        None => error,
    })?;
    if let Some(target) = &target {
        target.flush().await?;
    }
    Ok(map)
}

async fn unlock(options: &RescueOptions, wreck: &mut DamagedImage) -> Result<()> {
    match (&options.key_secret, wreck.is_encrypted()) {
        (None, false) => Ok(()),
        (None, true) => {
            let message = "the image is encrypted: --key-secret names the secret with its passphrase";
            Err(Error::invalid_argument(message))
        }
        (Some(_), false) => Err(Error::invalid_argument("--key-secret is given, but the image isn't encrypted")),
        (Some(id), true) => {
            let found = options.image.secrets.iter().find(|(known, _)| known == id);
            let (_, secret) = found.ok_or_else(|| Error::invalid_argument(format!("No secret with id '{id}'")))?;
            wreck.unlock(secret).await
        }
    }
}

/// The file itself, whatever its bytes look like.
fn bare(spec: &ImageSpec) -> ImageSpec {
    let mut spec = spec.clone();
    if !spec.image_opts {
        spec.format = Some("raw".to_owned());
    }
    spec
}

async fn open_data_file(
    options: &RescueOptions,
    wreck: &mut DamagedImage,
    opened: &mut Vec<Arc<Node>>,
    sources: &mut Vec<String>,
    map: &mut RescueMap,
) -> Result<()> {
    let (needed, name) = wreck.needs_data_file();
    let name = match (&options.data_file, name) {
        (Some(_), _) if !needed => {
            return Err(Error::invalid_argument("a data file is given, but the image has its data in itself"));
        }
        (Some(given), _) => given.clone(),
        (None, _) if !needed => return Ok(()),
        (None, Some(name)) if options.image.policy.allow_data_file => name.to_owned(),
        (None, name) => {
            map.notes.push(match name {
                Some(name) => format!("the image names the data file '{name}', which the policy doesn't allow"),
                None => "the image doesn't say where its data file is: it must be given".to_owned(),
            });
            return Ok(());
        }
    };
    sources.push(name.clone());
    match bare(&ImageSpec::file(&name)).open_for_reading().await {
        Ok(node) => {
            opened.push(Arc::clone(&node));
            wreck.set_data_file(node);
        }
        Err(error) => map.notes.push(format!("the data file can't be opened: {error}")),
    }
    Ok(())
}

async fn open_backing(
    options: &RescueOptions,
    wreck: &mut DamagedImage,
    opened: &mut Vec<Arc<Node>>,
    sources: &mut Vec<String>,
    map: &mut RescueMap,
) -> Result<()> {
    let policy = &options.image.policy;
    let spec = match (&options.backing, wreck.backing_name()) {
        (Some((name, _)), _) if name.is_empty() => return Ok(()),
        (Some((name, format)), _) => ImageSpec { format: format.clone(), ..ImageSpec::file(name) },
        (None, None) => return Ok(()),
        (None, Some((name, format))) => {
            let allowed = policy.check_backing(&DRIVERS, name, &options.image.name).and_then(|()| match format {
                None if !policy.allow_backing_probe => {
                    Err(Error::new(ErrorKind::PermissionDenied, "the image doesn't say the format of its backing file"))
                }
                _ => resolve_name(name, Some(&options.image.name)),
            });
            match allowed {
                Ok(name) => ImageSpec { format: format.map(str::to_owned), ..ImageSpec::file(name) },
                Err(error) => {
                    map.notes.push(format!("the backing file is left out: {error}"));
                    wreck.miss_backing(error.to_string());
                    return Ok(());
                }
            }
        }
    };
    let spec = ImageSpec { policy: policy.clone(), on_warning: options.image.on_warning, ..spec };
    sources.push(spec.name.clone());
    match spec.open_for_reading().await {
        Ok(node) => {
            opened.push(Arc::clone(&node));
            wreck.set_backing(node);
        }
        // A backing file that the user names has to be there.
        Err(error) if options.backing.is_some() => return Err(error),
        Err(error) => {
            map.notes.push(format!("the backing file can't be opened: {error}"));
            wreck.miss_backing(error.to_string());
        }
    }
    Ok(())
}

async fn create_target(options: &RescueOptions, spec: &ImageSpec, sources: &[String], size: u64) -> Result<Arc<Node>> {
    let identity = |name: &String| FileIdentity::of_path(&path_of_text(name));
    let same = |source: &String| identity(source).is_some_and(|source| identity(&spec.name) == Some(source));
    if sources.iter().any(same) {
        let message = "the target is one of the files that are read: a rescue writes to a new image";
        return Err(Error::invalid_argument(message).file(&spec.name));
    }
    let format = spec.format.clone().unwrap_or_else(|| "raw".to_owned());
    let request = CreateRequest {
        filename: spec.name.clone(),
        format: format.clone(),
        options: options.create_options.clone(),
        secrets: spec.secrets.clone(),
        tls: spec.tls.clone(),
        keeps_existing: options.keeps_existing,
        ..CreateRequest::default()
    };
    let plan = cowshed_create::prepare_sized(&request, size).await?;
    plan.run().await?;
    let writable = ImageSpec { format: Some(format), extra: plan.opening_options(), ..spec.clone() };
    let node = writable.open_for_writing().await?;
    if node.backing().is_some() {
        let _ = node.close().await;
        return Err(Error::invalid_argument("the target of a rescue has no backing file").file(&spec.name));
    }
    Ok(node)
}

/// The copy in progress: data that follow each other are written together.
struct Copy<'a> {
    wreck: &'a DamagedImage,
    target: Option<&'a Node>,
    map: &'a mut RescueMap,
    run: Vec<u8>,
    start: u64,
}

impl Copy<'_> {
    async fn all(&mut self, job: &JobHandle) -> Result<()> {
        let coverage = self.wreck.geometry().l2_coverage();
        let size = self.wreck.size();
        job.set_progress(0, size);
        for index in 0..self.wreck.slots() {
            job.pause_point().await?;
            let start = index * coverage;
            let end = start.saturating_add(coverage).min(size);
            match self.wreck.slot(index) {
                L1Target::Empty if self.wreck.has_no_backing() => self.map.zero_bytes += end - start,
                L1Target::Empty => self.copy_from_backing(start..end, job).await?,
                L1Target::Lost(loss) => self.lose(start..end, loss, None),
                L1Target::Table { offset, assigned } => self.table(offset, assigned, start..end, job).await?,
            }
            job.set_progress(end, size);
        }
        self.write_run().await
    }

    /// A range without a table. The part that the backing file doesn't have or reach is done with at once, however
    /// large.
    async fn copy_from_backing(&mut self, range: std::ops::Range<u64>, job: &JobHandle) -> Result<()> {
        if let Some(why) = self.wreck.backing_fault() {
            self.lose(range, Loss::Backing(why.to_owned()), None);
            return Ok(());
        }
        let cluster_size = self.wreck.geometry().cluster_size();
        let reach = self.wreck.backing_bytes().next_multiple_of(cluster_size).clamp(range.start, range.end);
        for guest in (range.start..reach).step_by(cluster_size as usize) {
            job.pause_point().await?;
            let salvaged = self.wreck.backing_cluster(guest).await;
            self.take(guest, salvaged).await?;
        }
        self.map.zero_bytes += range.end - reach;
        Ok(())
    }

    async fn table(&mut self, offset: u64, assigned: bool, range: std::ops::Range<u64>, job: &JobHandle) -> Result<()> {
        let table = self.wreck.table(offset, assigned).await;
        let cluster_size = self.wreck.geometry().cluster_size();
        for (guest, index) in range.clone().step_by(cluster_size as usize).zip(0..) {
            if self.wreck.has_no_backing() && self.wreck.is_unallocated(&table, index) {
                self.map.zero_bytes += cluster_size.min(range.end - guest);
                continue;
            }
            job.throttle(cluster_size).await?;
            let salvaged = self.wreck.cluster(&table, index, guest).await;
            self.take(guest, salvaged).await?;
        }
        Ok(())
    }

    fn lose(&mut self, range: std::ops::Range<u64>, loss: Loss, entry: Option<(u64, u64)>) {
        self.map.lose(range, &loss, entry);
    }

    /// Takes the salvaged bytes of the cluster at `guest`.
    async fn take(&mut self, guest: u64, salvaged: cowshed_rescue::Salvaged) -> Result<()> {
        let len = self.wreck.geometry().cluster_size().min(self.wreck.size() - guest);
        let mut lost_bytes = 0;
        for (range, loss) in salvaged.lost {
            let range = range.start.min(len)..range.end.min(len);
            lost_bytes += range.end - range.start;
            self.lose(guest + range.start..guest + range.end, loss, salvaged.entry);
        }
        if let Some(doubt) = salvaged.doubt
            && lost_bytes < len
        {
            self.map.doubt(guest..guest + len, doubt, salvaged.entry);
        }
        let bytes = salvaged.bytes.unwrap_or_default();
        let bytes = &bytes[..bytes.len().min(len as usize)];
        if is_zero(bytes) {
            self.map.zero_bytes += len - lost_bytes;
            return Ok(());
        }
        self.map.data_bytes += len - lost_bytes;
        if self.start + self.run.len() as u64 != guest || self.run.len() >= RUN_BYTES {
            self.write_run().await?;
            self.start = guest;
        }
        self.run.extend_from_slice(bytes);
        Ok(())
    }

    async fn write_run(&mut self) -> Result<()> {
        let bytes = std::mem::take(&mut self.run);
        match self.target {
            Some(target) if !bytes.is_empty() => target.write(self.start, IoBuf::copy_from(&bytes)).await.0,
            _ => Ok(()),
        }
    }
}
