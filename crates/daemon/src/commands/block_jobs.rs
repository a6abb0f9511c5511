// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Starting the jobs that move data between nodes.

use super::names;
use super::{Arguments, Group, change, failed, nothing};
use crate::jobs::{Closing, Job, JobFilter, JobSpec, JobWork, Needed, run_backup, run_merge, run_mirror, run_stream};
use crate::state::Daemon;
use crate::warnings::report_unit;
use cowshed_image::Node;
use cowshed_image::graph::{Chain, GeneratedName, below_filters};
use cowshed_image::node::ChildRole;
use cowshed_jobs::backup::{Backup, BackupBitmap, BackupRequest, BitmapMode};
use cowshed_jobs::commit::merge::{Merge, MergeRequest};
use cowshed_jobs::faults::OnError;
use cowshed_jobs::mirror::{Mirror, MirrorOptions, Sync};
use cowshed_jobs::stream::{StreamJob, StreamRequest};
use cowshed_qmp::{ErrorClass, QmpError, QmpResult};
use cowshed_types::Error;
use serde_json::{Value, json};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const GROUP: Group = Group {
    schema: "
enum BlockdevOnError: report ignore enospc stop auto
enum MirrorSyncMode: top full incremental none bitmap
enum MirrorCopyMode: background write-blocking
command blockdev-mirror: job-id?: str, device: str, target: str, replaces?: str, sync: MirrorSyncMode, speed?: int
  , granularity?: uint32, target-is-zero?: bool, buf-size?: int, on-source-error?: BlockdevOnError, on-target-error?: BlockdevOnError, filter-node-name?: str
  , copy-mode?: MirrorCopyMode, auto-finalize?: bool, auto-dismiss?: bool
command block-commit: job-id?: str, device: str, base-node?: str, base?: str, top-node?: str, top?: str
  , backing-file?: str, backing-mask-protocol?: bool, speed?: int, on-error?: BlockdevOnError
  , filter-node-name?: str, auto-finalize?: bool, auto-dismiss?: bool
command block-stream: job-id?: str, device: str, base?: str, base-node?: str, backing-file?: str
  , backing-mask-protocol?: bool, bottom?: str, speed?: int, on-error?: BlockdevOnError, filter-node-name?: str, auto-finalize?: bool, auto-dismiss?: bool
enum BackupSyncMode: top full incremental none bitmap
enum OnCbwError: break-guest-write break-snapshot
enum BitmapSyncMode: on-success never always
object BlockdevBackup: job-id?: str, device: str, sync: BackupSyncMode, speed?: int, bitmap?: str
  , bitmap-mode?: BitmapSyncMode, compress?: bool
  , on-source-error?: BlockdevOnError, on-target-error?: BlockdevOnError, on-cbw-error?: OnCbwError
  , auto-finalize?: bool, auto-dismiss?: bool, filter-node-name?: str, discard-source?: bool, x-perf?: BackupPerf
  , target: str
object BackupPerf: use-copy-range?: bool, max-workers?: int, max-chunk?: int, min-cluster-size?: uint64
command blockdev-backup(BlockdevBackup)
",
    commands: &[
        change!("blockdev-mirror", blockdev_mirror),
        change!("block-commit", block_commit),
        change!("block-stream", block_stream),
        change!("blockdev-backup", blockdev_backup),
    ],
};

/// The names that commands of jobs have in common, checked.
#[derive(Clone)]
pub(super) struct JobArguments {
    pub id: String,
    pub speed: u64,
    auto_finalize: bool,
    auto_dismiss: bool,
}

/// The moment of the look whether another job has the id.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Checks {
    Id,
    /// Behind the nodes, as with a backup in QEMU.
    IdLater,
}

impl JobArguments {
    pub fn of(daemon: &Daemon, arguments: &Arguments) -> QmpResult<JobArguments> {
        Self::checked(daemon, arguments, Checks::Id)
    }

    fn check_unused(daemon: &Daemon, id: &str) -> QmpResult<()> {
        match daemon.jobs.find(id) {
            Ok(_) => Err(QmpError::generic(format!("Job ID '{id}' already in use"))),
            Err(_) => Ok(()),
        }
    }

    fn checked(daemon: &Daemon, arguments: &Arguments, checks: Checks) -> QmpResult<JobArguments> {
        // As in QEMU, where a disk's name serves too, and a node's doesn't.
        let device = arguments.maybe_text("device").filter(|device| daemon.find_export(device).is_some());
        let id = arguments.maybe_text("job-id").or(device).unwrap_or_default().to_owned();
        names::check_job_id(&id)?;
        if checks == Checks::Id {
            Self::check_unused(daemon, &id)?;
        }
        let speed = speed(arguments).inspect_err(|_| Self::was_there(daemon, &id))?;
        Ok(JobArguments {
            id,
            speed,
            auto_finalize: arguments.flag("auto-finalize", true),
            auto_dismiss: arguments.flag("auto-dismiss", true),
        })
    }

    /// Tells of a job that ends before it begins: as in QEMU, some arguments are refused behind its creation.
    fn was_there(daemon: &Daemon, id: &str) {
        for status in ["created", "null"] {
            daemon.events.emit("JOB_STATUS_CHANGE", json!({"status": status, "id": id}));
        }
    }

    /// The refusal of a job that could not start. Where others use its nodes, QEMU has created it by then.
    fn not_started(&self, daemon: &Daemon, error: Error) -> QmpError {
        let refused = failed(error);
        if refused.description.starts_with("Permission conflict on node") {
            Self::was_there(daemon, &self.id);
        }
        refused
    }

    /// The same of a job for which it opens no node for writing before.
    fn not_started_on(&self, daemon: &Daemon, error: Error) -> QmpError {
        if error.sentence() == "Block node is read-only" {
            Self::was_there(daemon, &self.id);
        }
        self.not_started(daemon, error)
    }

    pub fn spec(self, kind: &'static str, nodes: Vec<Arc<Node>>, on_error: (OnError, OnError)) -> JobSpec {
        let JobArguments { id, speed, auto_finalize, auto_dismiss } = self;
        JobSpec { id, kind, auto_finalize, auto_dismiss, speed, nodes, readable: Vec::new(), on_error }
    }
}

/// Bytes a second; 0 is no limit.
pub(super) fn speed(arguments: &Arguments) -> QmpResult<u64> {
    let negative = |_| QmpError::generic("Parameter 'speed' expects a non-negative value");
    Ok(arguments.number("speed").map_err(negative)?.unwrap_or(0))
}

/// The treatment of errors, by the argument of this name.
pub(super) fn on_error(arguments: &Arguments, key: &str) -> OnError {
    arguments.maybe_text(key).and_then(OnError::parse).unwrap_or_default()
}

/// The node that a job is to fill.
fn target_named(daemon: &Daemon, name: &str) -> QmpResult<Arc<Node>> {
    names::device(daemon, name).map(|found| found.node())
}

async fn blockdev_mirror(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let named = names::root(&daemon, arguments.text("device"))?;
    let (source, disk) = (named.image(), named.disk(&daemon));
    let target = target_named(&daemon, arguments.text("target"))?;
    names::check_no_overlay(&daemon, &target)?;
    prepare_mirror(&daemon, &arguments, (&source, &disk), &target, false).await?.start(&daemon, None)
}

/// The parts that a mirror copies at first. It has no use for bitmaps, as in QEMU.
pub(super) fn mirror_sync(arguments: &Arguments) -> QmpResult<Sync> {
    match arguments.text("sync") {
        "top" => Ok(Sync::Top),
        "none" => Ok(Sync::None),
        "full" => Ok(Sync::Full),
        other => Err(QmpError::generic(format!("Sync mode '{other}' not supported"))),
    }
}

/// The unit in which a job copies by default, in bytes: a cluster of the target, from 4 KiB to 64 KiB.
fn granularity_for(target: &Node) -> u64 {
    const LARGEST: u64 = 64 << 10;
    target.cluster_bytes().map_or(LARGEST, |cluster| cluster.clamp(4 << 10, LARGEST))
}

/// Readies a mirror of the image `source`. Its id and its speed are looked at last, as in QEMU. `disk`: the node in front of it,
/// which users see and the target replaces. `closes_target`: an unused target is closed at its end.
pub(super) async fn prepare_mirror(
    daemon: &Rc<Daemon>,
    arguments: &Arguments,
    (source, disk): (&Arc<Node>, &Arc<Node>),
    target: &Arc<Node>,
    closes_target: bool,
) -> QmpResult<MirrorPrepared> {
    daemon.jobs.check_free(source)?;
    daemon.jobs.check_disk_free(target)?;
    let mut options = MirrorOptions { granularity_bytes: granularity_for(target), ..MirrorOptions::default() };
    if let Some(granularity) = arguments.number("granularity")?.filter(|&bytes| bytes != 0) {
        if !(512..=64 << 20).contains(&granularity) {
            return Err(QmpError::generic("Parameter 'granularity' expects a value in range [512B, 64MB]"));
        }
        if !granularity.is_power_of_two() {
            return Err(QmpError::generic("Parameter 'granularity' expects a power of 2"));
        }
        options.granularity_bytes = granularity;
    }
    options.sync = mirror_sync(arguments)?;
    let no_buffer = |_| QmpError::generic("Invalid parameter 'buf-size'");
    if let Some(bytes) = arguments.number("buf-size").map_err(no_buffer)?.filter(|&bytes| bytes != 0) {
        options.buffer_bytes = bytes;
    }
    if closes_target && let Some(unit) = target.filled_unit_bytes() {
        // A part of a cluster would be filled up with data from below the target, and nothing may.
        options.granularity_bytes = options.granularity_bytes.max(unit);
    }
    options.target_is_zero = arguments.flag("target-is-zero", false);
    options.replaces = replaced(daemon, arguments, source)?.or_else(|| Some(Arc::clone(disk)));
    let common = JobArguments::of(daemon, arguments)?;
    let blocking = arguments.maybe_text("copy-mode") == Some("write-blocking");
    let (name, _generated) = blocking.then(|| filter_name(daemon, arguments)).unzip();
    options.write_blocking = name;
    let filter = match options.write_blocking {
        // It has one of its own.
        Some(_) => None,
        None => named_filter(daemon, arguments, "mirror_top", source)?,
    };
    if Arc::ptr_eq(disk, target) {
        return Err(QmpError::generic("Can't mirror node into itself"));
    }
    let mirror = Mirror::start(&daemon.graph, &common.id, (source, target), options).await;
    let mirror = mirror.map_err(|error| common.not_started_on(daemon, error))?;
    let policies = (on_error(arguments, "on-source-error"), on_error(arguments, "on-target-error"));
    let mut nodes = mirror.nodes();
    if !nodes.iter().any(|node| Arc::ptr_eq(node, disk)) {
        nodes.push(Arc::clone(disk));
    }
    let spec = common.spec("mirror", nodes, policies);
    Ok(MirrorPrepared { mirror, spec, filter })
}

/// The filter that the arguments name.
fn named_filter(
    daemon: &Daemon,
    arguments: &Arguments,
    driver: &'static str,
    below: &Arc<Node>,
) -> QmpResult<Option<JobFilter>> {
    let Some(name) = arguments.maybe_text("filter-node-name") else { return Ok(None) };
    let held = daemon.graph.hold_name(name).map_err(failed)?;
    Ok(Some(JobFilter { held, driver, below: Arc::clone(below) }))
}

/// The node whose place the target of a mirror takes. Its users must not see other data after that, so it is the disk,
/// or a filter between the disk and its users.
fn replaced(daemon: &Daemon, arguments: &Arguments, source: &Arc<Node>) -> QmpResult<Option<Arc<Node>>> {
    let Some(name) = arguments.maybe_text("replaces") else { return Ok(None) };
    let node = daemon.node(name)?;
    daemon.jobs.check_free(&node)?;
    names::check_no_overlay(daemon, &node)?;
    match Arc::ptr_eq(&below_filters(&node), source) {
        true => Ok(Some(node)),
        false => Err(QmpError::generic(format!(
            "Cannot replace '{name}' by a node mirrored from '{}', because it cannot be guaranteed that doing so would \
             not lead to an abrupt change of visible data",
            source.name()
        ))),
    }
}

/// A mirror that follows its source, and copies when its job is started.
pub(super) struct MirrorPrepared {
    mirror: Mirror,
    spec: JobSpec,
    filter: Option<JobFilter>,
}

impl MirrorPrepared {
    /// `closing`: a target that goes with the job.
    pub(super) fn start(self, daemon: &Rc<Daemon>, closing: Option<Closing>) -> QmpResult<Value> {
        let mirror = self.mirror;
        let job = daemon.jobs.add(self.spec, &daemon.events)?;
        let done = mirror.skipped_bytes();
        job.handle.set_progress(done, done + mirror.remaining_bytes());
        job.follow_target(mirror.active_map());
        job.set_filter(self.filter);
        let mirror = Rc::new(mirror);
        // Before the job's first step: the next command may be to change it.
        job.set_mirror(Some(Rc::clone(&mirror)));
        let work = run_mirror(Rc::clone(&job), mirror);
        match closing {
            Some(closing) => daemon.jobs.start(Rc::clone(&job), closing.after(work, job, Arc::clone(&daemon.graph))),
            None => daemon.jobs.start(job, work),
        }
        nothing()
    }
}

async fn block_commit(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let name = arguments.text("device");
    // This one command has the older class for it.
    let not_found = |_| QmpError::new(ErrorClass::DeviceNotFound, format!("Device '{name}' not found"));
    names::device(&daemon, name).map_err(not_found)?;
    let named = names::root(&daemon, name)?;
    let device = named.image();
    let layers = Chain::between(&device, None).map_err(failed)?.layers().to_vec();
    let top = match one_of(&daemon, &arguments, &layers, "top")? {
        Some(top) => top,
        None => Arc::clone(&device),
    };
    let base = match (one_of(&daemon, &arguments, &layers, "base")?, layers.last()) {
        (Some(base), _) => base,
        (None, Some(last)) => Arc::clone(last),
        (None, None) => return Err(QmpError::generic("a chain without layers")),
    };
    if Arc::ptr_eq(&top, &base) {
        let message = match named.node().is_filter() {
            true => "Can't mirror node into itself",
            false => "cannot commit an image into itself",
        };
        return Err(QmpError::generic(message));
    }
    let chain = Chain::between(&top, Some(&base)).map_err(failed)?;
    check_chain_free(&daemon, &chain)?;
    let policy = on_error(&arguments, "on-error");
    let above_top = layers.iter().position(|layer| Arc::ptr_eq(layer, &top)).and_then(|at| at.checked_sub(1));
    let Some(overlay) = above_top.and_then(|at| layers.get(at)).cloned() else {
        if arguments.maybe_text("backing-file").is_some() {
            return Err(QmpError::generic("'backing-file' specified, but 'top' is the active layer"));
        }
        let options = MirrorOptions {
            buffer_bytes: u64::MAX,
            granularity_bytes: granularity_for(&base),
            replaces: Some(named.disk(&daemon)),
            ..MirrorOptions::default()
        };
        let filter = named_filter(&daemon, &arguments, "mirror_top", &top)?;
        let common = JobArguments::of(&daemon, &arguments)?;
        let mirror = Mirror::commit(&daemon.graph, &common.id, (&top, &base), options).await;
        let mirror = mirror.map_err(|error| common.not_started(&daemon, error))?;
        let spec = common.spec("commit", mirror.nodes(), (policy, policy));
        return MirrorPrepared { mirror, spec, filter }.start(&daemon, None);
    };
    let common = JobArguments::of(&daemon, &arguments)?;
    daemon.jobs.check_free_but_for_backups(&overlay)?;
    let backing_file = arguments.maybe_text("backing-file").map(str::to_owned);
    let mask_protocol = arguments.flag("backing-mask-protocol", false);
    let filter = named_filter(&daemon, &arguments, "commit_top", &top)
        .inspect_err(|_| JobArguments::was_there(&daemon, &common.id))?;
    // As in QEMU the job holds the disk that was named, and not the layer above the top.
    let lent = if Arc::ptr_eq(&overlay, &device) { Vec::new() } else { vec![Arc::clone(&overlay)] };
    let request = MergeRequest { overlay, top, base, backing_file, mask_protocol };
    let merge = Merge::start(&daemon.graph, &common.id, request).await;
    let merge = merge.map_err(|error| common.not_started_on(&daemon, error))?;
    let mut nodes = merge.nodes();
    nodes.push(device);
    let job = daemon.jobs.add(common.spec("commit", nodes, (policy, policy)).lending(lent), &daemon.events)?;
    job.set_filter(filter);
    daemon.jobs.start(Rc::clone(&job), run_merge(job, merge));
    nothing()
}

/// Refuses a chain of which a job uses a node. Backups may read its top: their filters are above it, so that changes of
/// the layers below don't reach them. The filters come first, as QEMU meets them.
fn check_chain_free(daemon: &Daemon, chain: &Chain) -> QmpResult<()> {
    let nodes = chain.nodes();
    nodes.iter().filter(|node| node.is_filter()).try_for_each(|filter| daemon.jobs.check_free(filter))?;
    let (top, below) = nodes.split_first().ok_or_else(|| QmpError::generic("a chain without layers"))?;
    daemon.jobs.check_free_but_for_backups(top)?;
    below.iter().try_for_each(|node| daemon.jobs.check_free(node))
}

async fn block_stream(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let node = names::for_job(&daemon, arguments.text("device"))?;
    let layers = Chain::between(&node, None).map_err(failed)?.layers().to_vec();
    let base = stream_base(&daemon, &arguments, &layers)?;
    if base.is_none() && arguments.maybe_text("backing-file").is_some() {
        return Err(QmpError::generic("backing file specified, but streaming the entire chain"));
    }
    check_chain_free(&daemon, &Chain::between(&node, base.as_ref()).map_err(failed)?)?;
    let free = arguments.maybe_text("filter-node-name").map(|name| daemon.graph.hold_name(name).map(drop));
    free.transpose().map_err(|error| failed(error.context("Could not create node")))?;
    let (filter_name, _generated) = filter_name(&daemon, &arguments);
    let common = JobArguments::of(&daemon, &arguments)?;
    let has_nothing = match (layers.get(1), &base) {
        (Some(next), Some(base)) => Arc::ptr_eq(next, base),
        (next, _) => next.is_none(),
    };
    let storage = node.children().into_iter().filter(|child| child.role != ChildRole::Backing);
    if has_nothing && storage.map(|child| child.node).any(|below| below.stays_read_only()) {
        return Err(QmpError::generic("Block node is read-only"));
    }
    let ends_at_once = has_nothing && common.auto_finalize;
    let backing_file = arguments.maybe_text("backing-file").map(str::to_owned);
    let mask_protocol = arguments.flag("backing-mask-protocol", false);
    let request = StreamRequest { node, base, backing_file, mask_protocol, filter_name };
    let base: Vec<Arc<Node>> = request.base.iter().cloned().collect();
    let stream = StreamJob::start(&daemon.graph, &common.id, request).await;
    let stream = stream.map_err(|error| common.not_started(&daemon, error))?;
    let policy = on_error(&arguments, "on-error");
    let spec = common.spec("stream", stream.nodes(), (policy, policy)).lending(base);
    let job = daemon.jobs.add(spec, &daemon.events)?;
    daemon.jobs.start(Rc::clone(&job), run_stream(Rc::clone(&job), stream));
    if ends_at_once {
        // As in QEMU it ends before its answer.
        job.await_end().await;
    }
    nothing()
}

/// The layer that becomes the backing node of a streamed image.
fn stream_base(daemon: &Daemon, arguments: &Arguments, layers: &[Arc<Node>]) -> QmpResult<Option<Arc<Node>>> {
    let top = layers.first().map(|top| top.name().to_owned()).unwrap_or_default();
    for (one, other) in [("base", "base-node"), ("base", "bottom"), ("bottom", "base-node")] {
        if arguments.maybe_text(one).is_some() && arguments.maybe_text(other).is_some() {
            let message = format!("'{one}' and '{other}' cannot be specified at the same time");
            return Err(QmpError::generic(message));
        }
    }
    let Some(name) = arguments.maybe_text("bottom") else {
        if let Some(name) = arguments.maybe_text("base-node") {
            let wanted = below_filters(&names::node(daemon, name)?);
            let found = layers.iter().skip(1).find(|layer| Arc::ptr_eq(layer, &wanted)).cloned();
            let refused = || QmpError::generic(format!("Node '{name}' is not a backing image of '{top}'"));
            return found.ok_or_else(refused).map(Some);
        }
        return one_of(daemon, arguments, layers, "base");
    };
    let wanted = names::node(daemon, name)?;
    if wanted.is_filter() {
        return Err(QmpError::generic(format!("Node '{name}' is a filter, use a non-filter node as 'bottom'")));
    }
    match layers.iter().position(|layer| Arc::ptr_eq(layer, &wanted)) {
        Some(at) => Ok(layers.get(at + 1).cloned()),
        None => Err(QmpError::generic(format!("Node '{name}' is not in a chain starting from '{top}'"))),
    }
}

/// The node-name of a job's filter. A generated one is taken as long as it is kept, and then by the filter.
fn filter_name(daemon: &Daemon, arguments: &Arguments) -> (String, Option<GeneratedName>) {
    match arguments.maybe_text("filter-node-name") {
        Some(name) => (name.to_owned(), None),
        None => {
            let generated = daemon.graph.generate_name();
            (generated.name().to_owned(), Some(generated))
        }
    }
}

async fn blockdev_backup(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let plan = plan_backup(&daemon, &arguments).await?;
    daemon.jobs.start_backups(vec![plan.start(&daemon).await?.work()], false).await;
    nothing()
}

/// A backup whose arguments are right.
pub(super) struct BackupPlan {
    common: JobArguments,
    request: BackupRequest,
    policies: (OnError, OnError),
    /// The filter's name, until the filter has it.
    _generated: Option<GeneratedName>,
}

/// A backup whose moment has come; it copies when it is run.
pub(super) struct BackupStarted {
    job: Rc<Job>,
    backup: Backup,
}

pub(super) async fn plan_backup(daemon: &Daemon, arguments: &Arguments) -> QmpResult<BackupPlan> {
    let source = names::for_job(daemon, arguments.text("device"))?;
    let target = target_named(daemon, arguments.text("target"))?;
    let sync = match arguments.text("sync") {
        "full" => Sync::Full,
        "top" => Sync::Top,
        "none" => Sync::None,
        // The dirty parts of the whole disk.
        _ => Sync::Full,
    };
    let has_wrong_mode = arguments.text("sync") == "incremental"
        && arguments.maybe_text("bitmap-mode").is_some_and(|mode| mode != "on-success");
    if let Some(name) = arguments.maybe_text("bitmap")
        && !has_wrong_mode
        && !source.has_bitmap(name).await.map_err(failed)?
    {
        return Err(QmpError::generic(format!("Bitmap '{name}' could not be found")));
    }
    let bitmap = backup_bitmap(arguments)?;
    // As in QEMU before a look at the job.
    let named = names::device(daemon, arguments.text("device"))?.node();
    if [&named, &source].iter().any(|end| Arc::ptr_eq(end, &target)) {
        return Err(QmpError::generic("Source and target cannot be the same"));
    }
    check_perf(arguments)?;
    let free = arguments.maybe_text("filter-node-name").map(|name| daemon.graph.hold_name(name).map(drop));
    free.transpose().map_err(|error| failed(error.context("Could not create node")))?;
    let (filter_name, generated) = filter_name(daemon, arguments);
    let request = BackupRequest {
        source,
        target,
        sync,
        compress: arguments.flag("compress", false),
        discard_source: arguments.flag("discard-source", false),
        breaks_writes: arguments.maybe_text("on-cbw-error") != Some("break-snapshot"),
        filter_name,
        bitmap,
    };
    let policies = (on_error(arguments, "on-source-error"), on_error(arguments, "on-target-error"));
    let common = JobArguments::checked(daemon, arguments, Checks::IdLater)?;
    Ok(BackupPlan { common, request, policies, _generated: generated })
}

/// Bounds of QEMU's own steps: checked as there, and without effect, because the copy sizes its steps itself.
fn check_perf(arguments: &Arguments) -> QmpResult<()> {
    let Some(perf) = arguments.object("x-perf") else { return Ok(()) };
    let refuse = |message: &str| Err(QmpError::generic(message));
    let number = |key: &str, default: i64| perf.get(key).map_or(Some(default), Value::as_i64);
    if !number("max-workers", 1).is_some_and(|workers| (1..=i64::from(i32::MAX)).contains(&workers)) {
        return refuse("max-workers must be between 1 and 2147483647");
    }
    let chunk = number("max-chunk", 0);
    if chunk.is_none_or(|chunk| chunk < 0) {
        return refuse("max-chunk must be zero (which means no limit) or positive");
    }
    let smallest = perf.get("min-cluster-size").map_or(Some(0), Value::as_u64).unwrap_or(0);
    if i64::try_from(smallest).is_err() {
        return refuse(&format!("min-cluster-size too large: {smallest} > {}", i64::MAX));
    }
    if smallest != 0 && !smallest.is_power_of_two() {
        return refuse(
            "Could not create node: Cannot create block-copy-state: min-cluster-size needs to be a power of 2",
        );
    }
    let cluster = smallest.max(1 << 16);
    match chunk.map(i64::cast_unsigned) {
        Some(chunk) if chunk != 0 && chunk < cluster => {
            Err(QmpError::generic(format!("Required max-chunk ({chunk}) is less than backup cluster size ({cluster})")))
        }
        _ => Ok(()),
    }
}

/// The bitmap of a backup, by QEMU's rules of combinations.
fn backup_bitmap(arguments: &Arguments) -> QmpResult<Option<BackupBitmap>> {
    let refuse = |message: String| Err(QmpError::generic(message));
    let (sync, mode) = (arguments.text("sync"), arguments.maybe_text("bitmap-mode"));
    let selects = matches!(sync, "incremental" | "bitmap");
    let Some(name) = arguments.maybe_text("bitmap") else {
        return match mode {
            _ if selects => refuse(format!("must provide a valid bitmap name for '{sync}' sync mode")),
            Some(_) => refuse("Cannot specify bitmap sync mode without a bitmap".to_owned()),
            None => Ok(None),
        };
    };
    let mode = match (sync, mode) {
        ("none", Some(_)) => return refuse("sync mode 'none' does not produce meaningful bitmap outputs".to_owned()),
        ("incremental", None | Some("on-success")) => "on-success",
        ("incremental", Some(_)) => {
            return refuse("Bitmap sync mode must be 'on-success' when using sync mode 'incremental'".to_owned());
        }
        (_, None) => return refuse("Bitmap sync mode must be given when providing a bitmap".to_owned()),
        (_, Some("never")) if !selects => {
            return refuse(format!(
                "Bitmap sync mode 'never' has no meaningful effect when combined with sync mode '{sync}'"
            ));
        }
        (_, Some(mode)) => mode,
    };
    let mode = match mode {
        "always" => BitmapMode::Always,
        "never" => BitmapMode::Never,
        _ => BitmapMode::OnSuccess,
    };
    Ok(Some(BackupBitmap { name: name.to_owned(), mode, selects }))
}

impl BackupPlan {
    pub(super) fn source(&self) -> &Arc<Node> {
        &self.request.source
    }

    /// The name of the bitmap that it uses.
    pub(super) fn bitmap(&self) -> Option<&str> {
        self.request.bitmap.as_ref().map(|bitmap| bitmap.name.as_str())
    }

    /// Refuses it where other jobs are in its way.
    fn check(&self, daemon: &Daemon) -> QmpResult<()> {
        daemon.jobs.check_readable(&self.request.source)?;
        daemon.jobs.check_disk_free(&self.request.target)?;
        JobArguments::check_unused(daemon, &self.common.id)
    }

    /// Its job alone: what follows in the transaction fails.
    pub(super) fn announce(&self, daemon: &Daemon) -> QmpResult<Rc<Job>> {
        self.check(daemon)?;
        let (source, target) = (Arc::clone(&self.request.source), Arc::clone(&self.request.target));
        let spec =
            self.common.clone().spec("backup", vec![Arc::clone(&source), target], self.policies).lending(vec![source]);
        daemon.jobs.add(spec, &daemon.events)
    }

    pub(super) async fn start(self, daemon: &Rc<Daemon>) -> QmpResult<BackupStarted> {
        self.check(daemon)?;
        let (is_idle, empties_source) = (self.request.sync == Sync::None, self.request.discard_source);
        let target = Arc::clone(&self.request.target);
        let backup = Backup::start(&daemon.graph, &self.common.id, self.request).await;
        let backup = backup.map_err(|error| self.common.not_started(daemon, error))?;
        report_unit(&target);
        let (nodes, source) = (backup.nodes(), vec![Arc::clone(backup.source())]);
        let spec = self.common.spec("backup", nodes, self.policies).lending(source);
        match daemon.jobs.add(spec, &daemon.events) {
            Ok(job) => {
                job.set_idle(is_idle);
                job.set_empty(backup.is_empty());
                job.set_empties_source(empties_source);
                Ok(BackupStarted { job, backup })
            }
            Err(error) => {
                backup.undo().await.map_err(failed)?;
                Err(error)
            }
        }
    }
}

impl BackupStarted {
    pub(super) fn work(self) -> JobWork {
        (Rc::clone(&self.job), Box::pin(run_backup(self.job, self.backup)))
    }

    /// Its work; its target goes with it.
    pub(super) fn work_and_close(self, daemon: &Rc<Daemon>, closing: Closing) -> JobWork {
        let needed = Needed { parts: self.backup.gives_up_parts(), whole: self.backup.gives_up_whole() };
        let closing = Closing { needed, ..closing };
        let work = run_backup(Rc::clone(&self.job), self.backup);
        (Rc::clone(&self.job), Box::pin(closing.after(work, self.job, Arc::clone(&daemon.graph))))
    }

    /// As if it had not been started.
    pub(super) async fn roll_back(self, daemon: &Rc<Daemon>) {
        if let Err(error) = self.backup.undo().await {
            tracing::error!(%error, job = self.job.id, "could not take a backup back");
        }
        daemon.jobs.abandon(&self.job);
    }
}

/// The layer that `KEY-node` names, or `KEY` by its file.
pub(super) fn one_of(
    daemon: &Daemon,
    arguments: &Arguments,
    layers: &[Arc<Node>],
    key: &str,
) -> QmpResult<Option<Arc<Node>>> {
    let node_key = format!("{key}-node");
    let found = match (arguments.maybe_text(&node_key), arguments.maybe_text(key)) {
        (Some(_), Some(_)) => {
            return Err(QmpError::generic(format!("'{node_key}' and '{key}' are mutually exclusive")));
        }
        (None, None) => return Ok(None),
        (Some(name), None) => {
            let wanted = below_filters(&names::node(daemon, name)?);
            let refused = format!("'{name}' is not in this backing file chain");
            (layers.iter().find(|layer| Arc::ptr_eq(layer, &wanted)), refused)
        }
        (None, Some(file)) => {
            let refused = match key {
                "top" => format!("Top image file {file} not found"),
                _ => format!("Can't find '{file}' in the backing chain"),
            };
            (layers.iter().find(|layer| is_file(layer, file)), refused)
        }
    };
    match found {
        (Some(layer), _) => Ok(Some(Arc::clone(layer))),
        (None, refused) => Err(QmpError::generic(refused)),
    }
}

fn is_file(node: &Node, file: &str) -> bool {
    let same = |one: &str, other: &str| {
        std::fs::canonicalize(one).is_ok_and(|one| std::fs::canonicalize(other).is_ok_and(|other| one == other))
    };
    node.filename() == file || node.reference() == file || same(&node.filename(), file)
}
