// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Creating files and images, as a job.

use super::names;
use super::snapshot::free_name;
use super::{Arguments, Group, command, nothing};
use crate::jobs::{JobFinish, JobSpec};
use crate::state::Daemon;
use cowshed_create::schema::monitor_rules_of;
use cowshed_create::{CreateRequest, MonitorRules, path_of_name, prepare};
use cowshed_image::Node;
use cowshed_image::graph::{AttachRequest, Attachment, storage_of};
use cowshed_image::options::BlockdevOptions;
use cowshed_qmp::{QmpError, QmpResult};
use cowshed_storage::{File, PermissionSet, Permissions, path_of_text, text_of_path};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use serde_json::Value;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Whole sectors that the system has a number for, in bytes.
const LONGEST_FILE_BYTES: u64 = (1 << 63) - 512;

pub(super) const GROUP: Group = Group {
    schema: "
enum BlockdevCreateDriver: file qcow2 luks parallels qcow qed vdi vhdx vpc raw nbd host_device null-co null-aio vmdk blkdebug throttle copy-on-read
  copy-before-write
enum PreallocMode: off metadata falloc full
object BlockdevCreateOptionsFile: filename: str, size: uint64, preallocation?: PreallocMode, nocow?: bool
  , extent-size-hint?: uint64
enum BlockdevQcow2Version: v2 v3
enum Qcow2CompressionType: zlib zstd
object BlockdevCreateOptionsQcow2: file: BlockdevRef, extended-l2?: bool, size: uint64, version?: BlockdevQcow2Version
  , backing-file?: str, backing-fmt?: str, cluster-size?: uint64, preallocation?: PreallocMode, lazy-refcounts?: bool
  , refcount-bits?: int, compression-type?: Qcow2CompressionType, encrypt?: QCryptoBlockCreateOptions
  , data-file?: BlockdevRef, data-file-raw?: bool
enum QCryptoCipherAlgo: aes-128 aes-192 aes-256 des 3des cast5-128 serpent-128 serpent-192 serpent-256 twofish-128
  twofish-192 twofish-256 sm4
enum QCryptoCipherMode: ecb cbc xts ctr
enum QCryptoIVGenAlgo: plain plain64 essiv
enum QCryptoHashAlgo: md5 sha1 sha224 sha256 sha384 sha512 ripemd160 sm3
object QCryptoBlockOptionsQCow: key-secret?: str
object QCryptoBlockCreateOptionsLUKS: key-secret?: str, cipher-alg?: QCryptoCipherAlgo, cipher-mode?: QCryptoCipherMode
  , ivgen-alg?: QCryptoIVGenAlgo, ivgen-hash-alg?: QCryptoHashAlgo, hash-alg?: QCryptoHashAlgo, iter-time?: int
enum QCryptoBlockFormat: qcow luks
object QCryptoBlockCreateOptions: format: QCryptoBlockFormat | format = qcow: QCryptoBlockOptionsQCow
  , luks: QCryptoBlockCreateOptionsLUKS
object BlockdevCreateOptionsLUKS: file: BlockdevRef, size: uint64, preallocation?: PreallocMode, key-secret?: str
  , cipher-alg?: QCryptoCipherAlgo, cipher-mode?: QCryptoCipherMode, ivgen-alg?: QCryptoIVGenAlgo
  , ivgen-hash-alg?: QCryptoHashAlgo, hash-alg?: QCryptoHashAlgo, iter-time?: int
object BlockdevCreateOptionsVdi: file: BlockdevRef, size: uint64, preallocation?: PreallocMode
enum BlockdevVpcSubformat: dynamic fixed
object BlockdevCreateOptionsVpc: file: BlockdevRef, size: uint64, subformat?: BlockdevVpcSubformat, force-size?: bool
enum BlockdevVhdxSubformat: dynamic fixed
object BlockdevCreateOptionsVhdx: file: BlockdevRef, size: uint64, log-size?: uint64, block-size?: uint64
  , subformat?: BlockdevVhdxSubformat, block-state-zero?: bool
object BlockdevCreateOptionsParallels: file: BlockdevRef, size: uint64, cluster-size?: uint64
object BlockdevCreateOptionsQcow: file: BlockdevRef, size: uint64, backing-file?: str
object BlockdevCreateOptionsQed: file: BlockdevRef, size: uint64, backing-file?: str, backing-fmt?: str
  , cluster-size?: uint64, table-size?: int
object BlockdevCreateOptions: driver: BlockdevCreateDriver | driver = file: BlockdevCreateOptionsFile
  , luks: BlockdevCreateOptionsLUKS, qcow2: BlockdevCreateOptionsQcow2, vdi: BlockdevCreateOptionsVdi
  , parallels: BlockdevCreateOptionsParallels, qcow: BlockdevCreateOptionsQcow, qed: BlockdevCreateOptionsQed
  , vhdx: BlockdevCreateOptionsVhdx, vmdk: BlockdevCreateOptionsVmdk, vpc: BlockdevCreateOptionsVpc
enum BlockdevVmdkSubformat: monolithicSparse monolithicFlat twoGbMaxExtentSparse twoGbMaxExtentFlat streamOptimized
enum BlockdevVmdkAdapterType: ide buslogic lsilogic legacyESX
object BlockdevCreateOptionsVmdk: file: BlockdevRef, size: uint64, extents?: [BlockdevRef], subformat?: BlockdevVmdkSubformat
  , backing-file?: str, adapter-type?: BlockdevVmdkAdapterType, hwversion?: str, toolsversion?: str, zeroed-grain?: bool
command blockdev-create: job-id: str, options: BlockdevCreateOptions
",
    commands: &[command!("blockdev-create", blockdev_create)],
};

/// QMP's names of the options that only differ in spelling, and the names on the command line.
const OPTIONS: &[(&str, &str)] = &[
    ("preallocation", "preallocation"),
    ("nocow", "nocow"),
    ("extent-size-hint", "extent_size_hint"),
    ("extended-l2", "extended_l2"),
    ("cluster-size", "cluster_size"),
    ("lazy-refcounts", "lazy_refcounts"),
    ("refcount-bits", "refcount_bits"),
    ("compression-type", "compression_type"),
    ("data-file-raw", "data_file_raw"),
    ("key-secret", "key-secret"),
    ("cipher-alg", "cipher-alg"),
    ("cipher-mode", "cipher-mode"),
    ("ivgen-alg", "ivgen-alg"),
    ("ivgen-hash-alg", "ivgen-hash-alg"),
    ("hash-alg", "hash-alg"),
    ("iter-time", "iter-time"),
    ("subformat", "subformat"),
    ("force-size", "force_size"),
    ("log-size", "log_size"),
    ("table-size", "table_size"),
    ("block-size", "block_size"),
    ("block-state-zero", "block_state_zero"),
    ("adapter-type", "adapter_type"),
    ("hwversion", "hwversion"),
    ("toolsversion", "toolsversion"),
    ("zeroed-grain", "zeroed_grain"),
];

async fn blockdev_create(daemon: Rc<Daemon>, arguments: Arguments) -> QmpResult<Value> {
    let options = Arguments::new(arguments.object("options").cloned().unwrap_or_default());
    // A raw image is the file that driver 'file' creates; an export is its server's.
    let unsupported = || QmpError::generic("Driver does not support blockdev-create");
    let rules = monitor_rules_of(options.text("driver")).ok_or_else(unsupported)?;
    names::check_job_id(arguments.text("job-id"))?;
    let spec = JobSpec {
        id: arguments.text("job-id").to_owned(),
        kind: "create",
        auto_finalize: true,
        auto_dismiss: false,
        speed: 0,
        nodes: Vec::new(),
        readable: Vec::new(),
        on_error: Default::default(),
    };
    let job = daemon.jobs.add(spec, &daemon.events)?;
    let ends_at_once = match options.get("file") {
        None => has_no_place(options.text("filename")),
        Some(_) => false,
    };
    let ends_at_once = ends_at_once || (rules.ends_at_once && request_of(&options, rules).is_err());
    let (jobs, handle) = (Rc::clone(&daemon.jobs), job.handle.clone());
    let work = async move {
        handle.set_progress(0, 1);
        let created = create(&daemon, &options, rules).await;
        handle.set_progress(1, 1);
        created
    };
    let finish = JobFinish::new(|_| Box::pin(async { Ok(()) }));
    jobs.start(Rc::clone(&job), async move { (work.await, finish) });
    if ends_at_once {
        job.await_end().await;
    }
    nothing()
}

/// True where no file of this name can be made. QEMU finds that out before its answer.
fn has_no_place(name: &str) -> bool {
    let path = path_of_name(name);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    path.is_dir() || !folder.is_dir()
}

/// QEMU's words for a length that a new file doesn't get.
fn not_resized(preallocation: Option<&str>) -> &'static str {
    match preallocation {
        Some("falloc") => "Could not preallocate new data",
        _ => "Could not resize file",
    }
}

async fn create(daemon: &Rc<Daemon>, options: &Arguments, rules: &MonitorRules) -> Result<()> {
    let request = CreateRequest { secrets: daemon.objects.secrets(), ..request_of(options, rules)? };
    match options.get("file") {
        None => prepare(&request).await?.run().await.map(drop).map_err(|error| {
            let is_length = error.sentence().starts_with("could not change the size: ");
            let errno = error.errno();
            match is_length {
                true => error.qemu(not_resized(options.maybe_text("preallocation"))).with_errno(errno),
                false => error,
            }
        }),
        Some(file) => {
            let extents = options.get("extents").and_then(Value::as_array).into_iter().flatten();
            let others: Vec<&Value> = options.get("data-file").into_iter().chain(extents).collect();
            create_in(daemon, (file, &others), request, rules).await
        }
    }
}

fn request_of(options: &Arguments, rules: &MonitorRules) -> Result<CreateRequest> {
    let mut list = Vec::new();
    let preallocation = options.maybe_text("preallocation");
    let allocated = rules.when_allocated.filter(|_| preallocation == Some("metadata"));
    list.extend(allocated.map(str::to_owned));
    for (key, name) in OPTIONS.iter().filter(|(key, _)| allocated.is_none() || *key != "preallocation") {
        list.extend(options.get(key).map(|value| assignment(name, value)));
    }
    for (key, value) in options.object("encrypt").into_iter().flatten() {
        let value = if key == "format" && value == "qcow" { &Value::from("aes") } else { value };
        list.push(assignment(&format!("encrypt.{key}"), value));
    }
    match options.maybe_text("version") {
        Some("v2") => list.push("compat=0.10".to_owned()),
        Some(_) => list.push("compat=1.1".to_owned()),
        None => {}
    }
    let driver = options.text("driver");
    if rules.when_allocated.is_some() && matches!(preallocation, Some("falloc" | "full")) {
        return Err(Error::unsupported(format!("Preallocation mode not supported for {driver}")));
    }
    let number = |key: &str| options.number(key).map_err(|error| Error::invalid_argument(error.description));
    let size = number("size")?;
    if rules.checks_offset && size.is_some_and(|size| i64::try_from(size).is_err()) {
        return Err(Error::invalid_argument("Could not resize file: Invalid argument"));
    }
    if rules.checks_offset && size.is_some_and(|size| size > LONGEST_FILE_BYTES) {
        return Err(Error::os(Errno::EFBIG, "the file is too long").qemu(not_resized(preallocation)));
    }
    size.map_or(Ok(()), rules.check_size)?;
    if let Some(sentence) = rules.refuses_odd_size
        && size.is_some_and(|size| !size.is_multiple_of(512))
    {
        return Err(Error::invalid_argument(sentence));
    }
    (rules.check_units)(&number)?;
    let unsaid = rules.unsaid_backing_format.filter(|_| options.maybe_text("backing-file").is_some());
    let backing_format = options.maybe_text("backing-fmt").or(unsaid);
    Ok(CreateRequest {
        filename: options.text("filename").to_owned(),
        format: rules.format.unwrap_or(driver).to_owned(),
        size,
        options: list,
        backing_file: options.maybe_text("backing-file").map(str::to_owned),
        backing_format: backing_format.map(str::to_owned),
        backing_unchecked: true,
        ..CreateRequest::default()
    })
}

/// As `-o` takes it.
pub(super) fn assignment(name: &str, value: &Value) -> String {
    match value {
        Value::Bool(flag) => format!("{name}={}", if *flag { "on" } else { "off" }),
        Value::String(text) => format!("{name}={}", text.replace(',', ",,")),
        number => format!("{name}={number}"),
    }
}

fn named(daemon: &Daemon, name: &str) -> Result<Arc<Node>> {
    let found = names::device(daemon, name);
    found.map(|found| found.node()).map_err(|error| Error::new(ErrorKind::NotFound, error.description))
}

/// A node in whose file an image is made: one that is there, or one that is opened for this.
struct Place {
    node: Arc<Node>,
    opened: bool,
    user: Arc<Attachment>,
}

impl Place {
    /// Takes the node for the job alone.
    async fn take(daemon: &Rc<Daemon>, reference: &Value) -> Result<Place> {
        let (node, opened) = match reference {
            Value::String(name) => (named(daemon, name)?, false),
            other => {
                let mut map = other.as_object().cloned().unwrap_or_default();
                map.entry("node-name").or_insert_with(|| free_name(daemon, "create").into());
                (daemon.graph.add(BlockdevOptions::from_map(map)?).await?, true)
            }
        };
        let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE | PermissionSet::RESIZE;
        let alone = Permissions { used, shared: PermissionSet::NONE };
        match daemon.graph.attach(&node, AttachRequest::job(format!("create-{}", node.name()), alone)).await {
            Ok(user) => Ok(Place { node, opened, user }),
            Err(error) if opened => daemon.graph.delete(node.name()).await.and(Err(error)),
            Err(error) => Err(error),
        }
    }

    async fn give_back(self, daemon: &Rc<Daemon>) -> Result<()> {
        let detached = self.user.detach().await;
        let closed = if self.opened { daemon.graph.delete(self.node.name()).await } else { Ok(()) };
        detached.and(closed)
    }

    /// The node's bytes: its file, or what requests of the node reach.
    fn file(&self) -> Result<File> {
        let file = self.node.storage();
        if file.is_null() {
            let message = format!("'{}' ({}) keeps nothing", self.node.name(), self.node.driver_name());
            return Err(Error::unsupported(message).field("file"));
        }
        Ok(file)
    }

    /// A name for the image. One that is made of options is none of a file.
    fn filename(&self) -> String {
        let name = self.node.filename();
        if name.starts_with("json:") { self.node.name().to_owned() } else { name }
    }
}

/// Creates an image in the file of a node, and in those of its data file or its extents.
async fn create_in(
    daemon: &Rc<Daemon>,
    (file, others): (&Value, &[&Value]),
    request: CreateRequest,
    rules: &MonitorRules,
) -> Result<()> {
    let mut places = Vec::with_capacity(others.len() + 1);
    let mut result = Ok(());
    for reference in std::iter::once(&file).chain(others) {
        match Place::take(daemon, reference).await {
            Ok(place) => places.push(place),
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    if let (Ok(()), Some((image, others))) = (&result, places.split_first()) {
        result = fill(image, others, request, rules).await;
    }
    for place in places.into_iter().rev() {
        result = result.and(place.give_back(daemon).await);
    }
    result
}

async fn fill(image: &Place, others: &[Place], mut request: CreateRequest, rules: &MonitorRules) -> Result<()> {
    request.filename = image.filename();
    match rules.has_extents {
        true => request.extents = others.iter().map(|extent| name_beside(&extent.node, &request.filename)).collect(),
        false => {
            let data_file = others.first().map(|data| assignment("data_file", &data.node.filename().into()));
            request.options.extend(data_file);
        }
    }
    let plan = prepare(&request).await?;
    // The files behind the nodes, too: a window of a file is no file of its own.
    for node in std::iter::once(image).chain(others).flat_map(|place| storage_of(&place.node)) {
        plan.check_apart(node.storage().identity())?;
    }
    let files: Vec<File> = others.iter().map(Place::file).collect::<Result<_>>()?;
    plan.run_on_with(&image.file()?, &files.iter().collect::<Vec<_>>()).await
}

/// The name of a node's file for an image: without its folder where that is the image's.
fn name_beside(node: &Node, image: &str) -> String {
    let (path, image) = (path_of_text(&node.filename()), path_of_text(image));
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    let folder = |path: &Path| real(path).and_then(|path| path.parent().map(Path::to_path_buf));
    match (folder(&path), path.file_name()) {
        (Some(one), Some(name)) if Some(&one) == folder(&image).as_ref() => text_of_path(Path::new(name)),
        _ => real(&path).map_or_else(|| node.filename(), |path| text_of_path(&path)),
    }
}
