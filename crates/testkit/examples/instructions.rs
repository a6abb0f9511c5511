// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Holds the paths that every request takes to a budget of instructions: `scripts/instructions` builds and runs it.
//!
//! A run of one case is a process of one thread. Files are the host's and operations are carried out inline, with no
//! ring and no pool, under valgrind's callgrind. Two runs with different numbers of requests give the cost of one;
//! nothing that the machine does besides changes that. The C library is kept from choosing other ways to copy memory on
//! other processors. The figures of another compiler are compared with its own figures for the same request to a raw
//! file.
//!
//! `instructions [CASE]...` compares these cases, or all, with the budgets, and fails where one takes too many;
//! `instructions record` writes the budgets anew.

use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_jobs::convert::{self, ConvertOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_nbd_server::{Export, Server, ServerConfig};
use cowshed_storage::{IoBuf, SharedMemory, Socket, rt};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::Random;
use cowshed_vhost_user::proto::ring::RingPlace;
use cowshed_vhost_user::simulated::serve_shared_ring;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, ExitCode};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

const BUDGETS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/instructions.txt");
/// Above its budget by this much a case fails, in percent.
const ABOVE_PERCENT: f64 = 2.0;
/// The same where a server and its client take turns, and over the deep chain. Their counts differ from run to run.
const VARIED_ABOVE_PERCENT: f64 = 5.0;
/// Requests of the shorter run; the longer one has twice as many.
const REQUESTS: u64 = 1000;
const BYTES: u64 = 4096;
const CLUSTER: u64 = 65536;
/// The disk of images that requests allocate in.
const SIZE: u64 = 4 * REQUESTS * CLUSTER;
/// Reads and overwrites go to this much of the disk.
const WINDOW: u64 = 8 << 20;
const LAYERS: u64 = 8;
/// Overlays of the deep chain, which are empty.
const DEEP_LAYERS: u64 = 64;

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    /// To clusters that are there.
    Overwrite,
    /// To one new cluster each.
    Allocate,
    /// From one compressed cluster each, of which none is kept.
    Decompress,
    /// By an export's queue.
    Queued,
    /// The same, with a throttle node whose limit isn't reached on top.
    Throttled,
    /// Served to an NBD client, a window of requests at a time.
    Served,
    /// The same below a limit that isn't reached.
    ServedThrottled,
    /// By a guest, over a ring of vhost-user-blk, a window of requests at a time.
    Ringed,
    /// Of one cluster by `convert`.
    Convert,
}

impl Kind {
    /// The number of requests that the second run has more than the first: fewer of those that take a hundred times the
    /// instructions.
    fn requests(self) -> u64 {
        if self == Kind::Decompress { 50 } else { REQUESTS }
    }
}

struct Case {
    name: &'static str,
    about: &'static str,
    /// Name of the image in the folder, and its format.
    image: (&'static str, &'static str),
    kind: Kind,
}

impl Case {
    /// The number of requests that the second run has more than the first. The deep chain's opening varies by 300,000
    /// instructions: reads through it are many.
    fn requests(&self) -> u64 {
        if (self.image.0, self.kind) == (DEEP, Kind::Read) { 20 * REQUESTS } else { self.kind.requests() }
    }

    fn above_percent(&self) -> f64 {
        match (self.image.0, self.kind) {
            (DEEP, _) | (_, Kind::Served | Kind::ServedThrottled) => VARIED_ABOVE_PERCENT,
            _ => ABOVE_PERCENT,
        }
    }
}

/// The uppermost image of the deep chain.
const DEEP: &str = "deep";

/// With this one the others are compared where the compiler is another.
const RAW: &str = "raw-read";

const CASES: &[Case] = &[
    Case { name: RAW, about: "4 KiB from a raw image", image: ("raw", "raw"), kind: Kind::Read },
    Case { name: "read", about: "4 KiB whose mapping is cached", image: ("full", "qcow2"), kind: Kind::Read },
    Case {
        name: "read-subclusters",
        about: "the same, extended L2 entries",
        image: ("sub", "qcow2"),
        kind: Kind::Read,
    },
    Case { name: "read-8-layers", about: "4 KiB through 8 layers", image: ("top", "qcow2"), kind: Kind::Read },
    Case {
        name: "read-64-layers",
        about: "4 KiB of a raw file through 64 empty overlays",
        image: (DEEP, "qcow2"),
        kind: Kind::Read,
    },
    Case {
        name: "read-decompressed",
        about: "4 KiB of a kept cluster",
        image: ("compressed", "qcow2"),
        kind: Kind::Read,
    },
    Case { name: "overwrite", about: "4 KiB in place, checked", image: ("full", "qcow2"), kind: Kind::Overwrite },
    Case { name: "allocate", about: "4 KiB into a new cluster", image: ("empty", "qcow2"), kind: Kind::Allocate },
    Case {
        name: "copy-on-write",
        about: "the same over a backing file",
        image: ("overlay", "qcow2"),
        kind: Kind::Allocate,
    },
    Case {
        name: "copy-on-write-64-layers",
        about: "the same over 63 empty overlays of it",
        image: (DEEP, "qcow2"),
        kind: Kind::Allocate,
    },
    Case {
        name: "decompress-zlib",
        about: "4 KiB of a cluster that must be decompressed",
        image: ("text-zlib", "qcow2"),
        kind: Kind::Decompress,
    },
    Case { name: "decompress-zstd", about: "the same, zstd", image: ("text-zstd", "qcow2"), kind: Kind::Decompress },
    Case { name: "queued-read", about: "`read` by an export's queue", image: ("full", "qcow2"), kind: Kind::Queued },
    Case { name: "throttled-read", about: "the same below a limit", image: ("full", "qcow2"), kind: Kind::Throttled },
    Case { name: "nbd-read", about: "`queued-read` over NBD", image: ("full", "qcow2"), kind: Kind::Served },
    Case {
        name: "nbd-throttled-read",
        about: "the same below a limit",
        image: ("full", "qcow2"),
        kind: Kind::ServedThrottled,
    },
    Case { name: "vhost-read", about: "`queued-read` over vhost-user", image: ("full", "qcow2"), kind: Kind::Ringed },
    Case { name: "convert", about: "64 KiB, raw to qcow2", image: ("text", "raw"), kind: Kind::Convert },
];

fn main() -> ExitCode {
    cowshed_storage::fill_no_scratch_buffers();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["run", case, folder, count] => run(case, Path::new(folder), count.parse().expect("a count")),
        ["record"] => record(),
        names => check(names),
    }
}

/// Nothing is simulated but that there is neither ring nor pool.
struct OneThread;

impl rt::Simulation for OneThread {
    fn advance(&self) {
        panic!("a request waits for something");
    }

    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }

    /// Not 0, which stands for an unread clock: a request looks at it once.
    fn now(&self) -> Duration {
        Duration::from_nanos(1)
    }
}

fn alone<F: Future>(future: F) -> F::Output {
    rt::Local::simulated(Rc::new(OneThread)).block_on(future)
}

/// The run that is counted.
fn run(name: &str, folder: &Path, count: u64) -> ! {
    let case = CASES.iter().find(|case| case.name == name).expect("a case of the table");
    let path = folder.join(case.image.0);
    match case.kind {
        Kind::Convert => alone(copy(&path, &folder.join("copy"), count)),
        Kind::Served | Kind::ServedThrottled => served(&path, case.kind == Kind::ServedThrottled, count),
        Kind::Ringed => ringed(&path, count),
        Kind::Queued | Kind::Throttled => alone(queued(&path, case.kind == Kind::Throttled, count)),
        _ => alone(requests(case, &path, count)),
    }
    // Without a close, which is no part of a request.
    std::process::exit(0)
}

async fn requests(case: &Case, path: &Path, count: u64) {
    let writable = matches!(case.kind, Kind::Overwrite | Kind::Allocate);
    let request = OpenRequest::file(path.to_string_lossy()).format(case.image.1).writable(writable);
    let node = open(request).await.expect("the image opens");
    let mut buf = IoBuf::zeroed(BYTES as usize);
    if !matches!(case.kind, Kind::Allocate | Kind::Decompress) {
        for at in (0..WINDOW).step_by(CLUSTER as usize) {
            buf = read(&node, at, buf).await;
        }
    }
    buf.fill(7);
    for number in 0..count {
        let at = match case.kind {
            Kind::Allocate => number * CLUSTER,
            // Never the next one, which would be decompressed ahead of its reader.
            Kind::Decompress => number * 7 % (2 * case.kind.requests()) * CLUSTER,
            _ => place(number),
        };
        buf = match case.kind {
            Kind::Overwrite | Kind::Allocate => write(&node, at, buf).await,
            _ => read(&node, at, buf).await,
        };
    }
}

/// The place of the request with this number.
fn place(number: u64) -> u64 {
    number * 0x9e37_79b9 % (WINDOW / BYTES) * BYTES
}

/// An attachment for exports, above a throttle node if `throttled`.
async fn attached(graph: &Arc<Graph>, path: &Path, throttled: bool) -> Arc<Attachment> {
    let options = format!("driver=qcow2,node-name=n,file.driver=file,file.filename={}", path.display());
    let node = graph.add(BlockdevOptions::from_keyval(&options).expect("options")).await.expect("the image opens");
    let attachment = graph.attach(&node, AttachRequest::export("e", false)).await.expect("an attachment");
    if throttled {
        let mut limits = Limits::new();
        limits.set("iops-total", 1_000_000_000).expect("a limit");
        graph.throttle_groups().create("g", limits).expect("a group");
        let filter = BlockdevOptions::from_keyval("driver=throttle,node-name=t,throttle-group=g").expect("options");
        graph.insert_filter(&node, filter).await.expect("a filter");
    }
    attachment
}

/// Reads as exports do.
async fn queued(path: &Path, throttled: bool, count: u64) {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let attachment = attached(&graph, path, throttled).await;
    let (queue, mut buf) = (attachment.queue(), IoBuf::zeroed(BYTES as usize));
    let known = (0..WINDOW).step_by(CLUSTER as usize);
    for at in known.chain((0..count).map(place)) {
        let result;
        (result, buf) = queue.read(at, buf).await;
        result.expect("a read");
    }
}

/// Serves an image to a client of the same thread.
fn served(path: &Path, throttled: bool, count: u64) {
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    for socket in [&ours, &theirs] {
        socket.set_nonblocking(true).expect("a socket that doesn't wait");
    }
    let known = (0..WINDOW).step_by(CLUSTER as usize);
    let client = Client::new(theirs, known.chain((0..count).map(place)).collect());
    rt::Local::simulated(Rc::new(client)).block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = attached(&graph, path, throttled).await;
        let server = Server::new(ServerConfig::default()).expect("a server");
        server.add_export(Export::new("e", attachment)).expect("an export");
        server.serve_here(Socket::from_descriptor(ours.into())).await;
    });
}

/// Requests that a client has in flight: their replies fit into the buffer of a socket.
const IN_FLIGHT: usize = 32;

/// An NBD client without a thread of its own: it has its turn when the server has nothing left to do. Its own work is
/// two system calls for each window of requests.
struct Client {
    socket: UnixStream,
    /// Places of requests that haven't been sent, the next one first.
    left: RefCell<VecDeque<u64>>,
    /// Bytes that are still to come.
    due: Cell<usize>,
    replies: RefCell<Vec<u8>>,
}

impl Client {
    fn new(socket: UnixStream, places: VecDeque<u64>) -> Client {
        let mut hello = Vec::new();
        // Fixed newstyle, no zeroes; then the options for structured replies, and for the export "e".
        hello.extend_from_slice(&3u32.to_be_bytes());
        for (option, data) in [(8u32, &b""[..]), (1, b"e")] {
            hello.extend_from_slice(b"IHAVEOPT");
            hello.extend_from_slice(&option.to_be_bytes());
            hello.extend_from_slice(&(data.len() as u32).to_be_bytes());
            hello.extend_from_slice(data);
        }
        (&socket).write_all(&hello).expect("room for the options");
        // The greeting, the reply to the first option, and the size and flags of the export.
        let due = Cell::new(18 + 20 + 10);
        Client { socket, left: RefCell::new(places), due, replies: RefCell::new(vec![0; 256 << 10]) }
    }

    /// Takes the received bytes; true when all have come.
    fn receive(&self) -> bool {
        let mut replies = self.replies.borrow_mut();
        while self.due.get() > 0 {
            match (&self.socket).read(&mut replies) {
                Ok(0) => panic!("the server left with {} bytes due", self.due.get()),
                Ok(count) => self.due.set(self.due.get().checked_sub(count).expect("no more than was asked for")),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return false,
                Err(error) => panic!("{error}"),
            }
        }
        true
    }

    fn send(&self) {
        let mut left = self.left.borrow_mut();
        let window = left.len().min(IN_FLIGHT);
        if window == 0 {
            self.socket.shutdown(Shutdown::Write).expect("the server is there");
            return;
        }
        let mut requests = Vec::with_capacity(window * 28);
        for place in left.drain(..window) {
            // In one piece: the client is counted too.
            let mut request = [0; 28];
            request[..4].copy_from_slice(&0x2560_9513u32.to_be_bytes());
            request[8..16].copy_from_slice(&place.to_be_bytes());
            request[16..24].copy_from_slice(&place.to_be_bytes());
            request[24..].copy_from_slice(&(BYTES as u32).to_be_bytes());
            requests.extend_from_slice(&request);
        }
        (&self.socket).write_all(&requests).expect("room for the requests");
        // Each has one chunk: a header, the offset, the data.
        self.due.set(window * (20 + 8 + BYTES as usize));
    }
}

impl rt::Simulation for Client {
    fn advance(&self) {
        if self.receive() {
            self.send();
        }
        // The thread that watches the server's end has news by then, as a rule.
        std::thread::sleep(Duration::from_millis(2));
    }

    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::pending())
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(1)
    }
}

/// Serves an image to a guest of the same thread.
fn ringed(path: &Path, count: u64) {
    let known = (0..WINDOW).step_by(CLUSTER as usize);
    let guest = Guest::new(known.chain((0..count).map(place)).collect());
    let memory = guest.memory.clone();
    rt::Local::simulated(Rc::new(guest)).block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let attachment = attached(&graph, path, false).await;
        serve_shared_ring(&attachment.queue(), memory, GUEST_RING).await.expect("a ring");
    });
}

const GUEST_RING: RingPlace = RingPlace {
    size: 2 * IN_FLIGHT as u16,
    descriptors: 0,
    available: 0x1000,
    used: 0x2000,
    event_index: true,
    indirect: false,
};
/// Where the memory of a request is, in room of two pages for each. The data are a page, with the header before and the status behind.
const ROOM_AT: usize = 0x4000;

/// A guest that has its turn when the ring has nothing left to do: a window of requests has ended then.
struct Guest {
    memory: SharedMemory,
    /// Places of requests that haven't been offered, the next one first.
    left: RefCell<VecDeque<u64>>,
    offered: Cell<u16>,
    /// The look at the ring, where it waits for its time.
    sleeper: Rc<Cell<Option<Waker>>>,
}

impl Guest {
    fn new(places: VecDeque<u64>) -> Guest {
        let bytes = ROOM_AT + IN_FLIGHT * 3 * BYTES as usize;
        let memory = SharedMemory::create("guest", bytes as u64).expect("memory").0;
        for slot in 0..IN_FLIGHT {
            let data = Self::data(slot) as u64;
            // One descriptor for the header, and one for data and status: flags and the next one's number come last.
            for (part, (address, len, flags)) in
                [(data - 16, 16, 1), (data, BYTES as u32 + 1, 2)].into_iter().enumerate()
            {
                let at = 16 * (2 * slot + part);
                memory.write(at, &u64::to_le_bytes(address));
                memory.write(at + 8, &u32::to_le_bytes(len));
                memory.store(at + 12, flags);
                memory.store(at + 14, 2 * slot as u16 + 1);
            }
        }
        Guest { memory, left: RefCell::new(places), offered: Cell::new(0), sleeper: Rc::default() }
    }

    fn data(slot: usize) -> usize {
        ROOM_AT + slot * 3 * BYTES as usize + BYTES as usize
    }
}

impl rt::Simulation for Guest {
    fn advance(&self) {
        let used = self.memory.load(GUEST_RING.used as usize + 2);
        assert_eq!(used, self.offered.get(), "requests that don't end");
        let mut left = self.left.borrow_mut();
        if left.is_empty() {
            std::process::exit(0);
        }
        let window = left.len().min(IN_FLIGHT);
        for (slot, place) in left.drain(..window).enumerate() {
            let header = Self::data(slot) - 16;
            self.memory.write(header + 8, &(place / 512).to_le_bytes());
            let entry = GUEST_RING.available as usize + 4 + 2 * usize::from(self.offered.get() % GUEST_RING.size);
            self.memory.store(entry, 2 * slot as u16);
            self.offered.set(self.offered.get().wrapping_add(1));
        }
        self.memory.store(GUEST_RING.available as usize + 2, self.offered.get());
        self.sleeper.take().expect("the ring waits").wake();
    }

    fn sleep(&self, _: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let sleeper = Rc::clone(&self.sleeper);
        let mut slept = false;
        Box::pin(std::future::poll_fn(move |context| {
            if std::mem::replace(&mut slept, true) && sleeper.take().is_none() {
                return Poll::Ready(());
            }
            sleeper.set(Some(context.waker().clone()));
            Poll::Pending
        }))
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(1)
    }
}

/// Converts the first `count` clusters of a raw file.
async fn copy(source: &Path, target: &Path, count: u64) {
    let source = ImageSpec {
        name: format!("driver=raw,size={},file.filename={}", count * CLUSTER, source.display()),
        image_opts: true,
        ..ImageSpec::default()
    };
    let target = ImageSpec::file(target.to_string_lossy()).format("qcow2");
    convert::run(&ConvertOptions::new(vec![source], target), &JobHandle::new()).await.expect("a copy");
}

async fn read(node: &Node, at: u64, buf: IoBuf) -> IoBuf {
    let (result, buf) = node.read(at, buf).await;
    result.expect("a read");
    buf
}

async fn write(node: &Node, at: u64, buf: IoBuf) -> IoBuf {
    let (result, buf) = node.write(at, buf).await;
    result.expect("a write");
    buf
}

/// The images that one run of a case needs, fresh.
fn build(folder: &Path, qemu: &Qemu, case: &Case) {
    let (path, kind) = (|name: &str| folder.join(name), case.kind);
    if case.image.0 == DEEP {
        return alone(build_deep(folder));
    }
    if matches!(kind, Kind::Decompress | Kind::Convert) {
        // Large, and for these alone.
        std::fs::write(path("text"), text(2 * kind.requests() * CLUSTER)).expect("a raw file");
    }
    if kind == Kind::Decompress {
        qemu.convert((&path("text"), "raw"), (&path("text-zlib"), "qcow2"), &["-c"]);
        let zstd = ["-c", "-o", "compression_type=zstd"];
        qemu.convert((&path("text"), "raw"), (&path("text-zstd"), "qcow2"), &zstd);
        return;
    }
    std::fs::write(path("raw"), plain()).expect("a raw file");
    qemu.convert((&path("raw"), "raw"), (&path("full"), "qcow2"), &[]);
    qemu.convert((&path("raw"), "raw"), (&path("sub"), "qcow2"), &["-o", "cluster_size=128k,extended_l2=on"]);
    qemu.convert((&path("raw"), "raw"), (&path("compressed"), "qcow2"), &["-c"]);
    for layer in 0..LAYERS {
        let name = if layer + 1 == LAYERS { "top".to_owned() } else { format!("layer-{layer}") };
        let below = format!("backing_file=layer-{},backing_fmt=qcow2", layer.saturating_sub(1));
        qemu.create(&path(&name), "qcow2", if layer == 0 { "" } else { &below }, WINDOW);
        alone(fill(&path(&name), layer));
    }
    qemu.create(&path("empty"), "qcow2", "", SIZE);
    let base = std::fs::File::create(path("base")).expect("a base");
    base.set_len(SIZE).expect("a length");
    qemu.create(&path("overlay"), "qcow2", "backing_file=base,backing_fmt=raw", SIZE);
}

/// A raw file with [`WINDOW`] bytes of data, below empty overlays.
async fn build_deep(folder: &Path) {
    let base = folder.join("base");
    std::fs::write(&base, plain()).expect("a base");
    std::fs::File::options().write(true).open(&base).and_then(|base| base.set_len(SIZE)).expect("a length");
    let mut below = ("base".to_owned(), "raw");
    for layer in (0..DEEP_LAYERS).rev() {
        let name = if layer == 0 { DEEP.to_owned() } else { format!("{DEEP}-{layer}") };
        let request = CreateRequest {
            filename: folder.join(&name).to_string_lossy().into_owned(),
            format: "qcow2".to_owned(),
            backing_file: Some(below.0),
            backing_format: Some(below.1.to_owned()),
            backing_unchecked: true,
            ..CreateRequest::default()
        };
        prepare_sized(&request, SIZE).await.expect("an overlay").run().await.expect("an overlay");
        below = (name, "qcow2");
    }
}

/// The data of the window.
fn plain() -> Vec<u8> {
    (0..WINDOW).map(|at| (at ^ at >> 9) as u8 | 1).collect()
}

/// Words in random order, the same in each run: they compress as text does.
fn text(bytes: u64) -> Vec<u8> {
    let mut random = Random::new(1);
    let words: Vec<Vec<u8>> = (0..4096)
        .map(|_| (0..2 + random.below(9)).map(|_| b'a' + random.below(26) as u8).chain([b' ']).collect())
        .collect();
    let mut text = Vec::with_capacity(bytes as usize + 16);
    while text.len() < bytes as usize {
        text.extend_from_slice(&words[random.below(4096) as usize]);
    }
    text.truncate(bytes as usize);
    text
}

/// Writes to every eighth cluster.
async fn fill(path: &Path, first: u64) {
    let request = OpenRequest::file(path.to_string_lossy()).format("qcow2").writable(true);
    let node: Arc<Node> = open(request).await.expect("the layer opens");
    let mut buf = IoBuf::zeroed(CLUSTER as usize);
    buf.fill(first as u8 + 1);
    for cluster in (first..WINDOW / CLUSTER).step_by(LAYERS as usize) {
        buf = write(&node, cluster * CLUSTER, buf).await;
    }
    node.close().await.expect("the layer closes");
}

/// Instructions of a run, in user space.
fn count(case: &Case, qemu: &Qemu, requests: u64) -> u64 {
    let folder = temp_dir();
    build(folder.path(), qemu, case);
    let program = std::env::current_exe().expect("the path of this program");
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(program);
    command.args(["run", case.name]).arg(folder.path()).arg(requests.to_string());
    // The plainest ways of copying and filling memory, whatever the processor has.
    let plain = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM";
    command.env("GLIBC_TUNABLES", plain);
    let output = command.output().expect("valgrind is installed (scripts/setup test)");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{}: {text}", case.name);
    let collected = text.lines().find_map(|line| line.split_once("Collected : ")).expect("a count of instructions");
    collected.1.trim().parse().unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Instructions of one request of a case.
fn measure(case: &Case, qemu: &Qemu) -> f64 {
    let requests = case.requests();
    let runs = [requests, 2 * requests].map(|requests| count(case, qemu, requests));
    (runs[1] as f64 - runs[0] as f64) / requests as f64
}

fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output().expect("rustc runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn record() -> ExitCode {
    let mut text = String::from(
        "# Instructions of one request, user space, measured and written by `scripts/instructions record`.\n\
         # A rise is to be explained in the commit that brings it.\n",
    );
    text += &format!("compiler {}\n", compiler());
    let qemu = Qemu::system();
    for case in CASES {
        text += &format!("{} {:.0}\n", case.name, measure(case, &qemu));
    }
    std::fs::write(PathBuf::from(BUDGETS), &text).expect("the budgets can be written");
    print!("{text}");
    ExitCode::SUCCESS
}

fn check(names: &[&str]) -> ExitCode {
    for name in names {
        assert!(CASES.iter().any(|case| case.name == *name), "there is no case {name}");
    }
    let text = std::fs::read_to_string(BUDGETS).expect("the budgets are there");
    let fields: BTreeMap<&str, &str> =
        text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' ')).collect();
    let budget = |name: &str| -> Option<f64> {
        let field = fields.get(name)?;
        Some(field.parse().unwrap_or_else(|error| panic!("{BUDGETS}: {name}: {error}")))
    };
    let qemu = Qemu::system();
    let compiler = compiler();
    let is_same = fields.get("compiler") == Some(&compiler.as_str());
    let scale = if is_same {
        1.0
    } else {
        measure(&CASES[0], &qemu) / budget(RAW).expect("the budgets have one of a raw file")
    };
    if !is_same {
        println!(
            "budgets are of another compiler: compared with a raw file's request, which takes {scale:.3} of theirs"
        );
    }
    println!("| request | instructions | budget | |\n|---|--:|--:|--:|");
    let mut is_over = false;
    for case in CASES.iter().filter(|case| names.is_empty() || names.contains(&case.name)) {
        let (now, above) = (measure(case, &qemu), case.above_percent());
        let Some(allowed) = budget(case.name).map(|budget| budget * scale) else {
            println!("| {}: {} | {now:.0} | none: record it | |", case.name, case.about);
            is_over = true;
            continue;
        };
        let percent = (now / allowed - 1.0) * 100.0;
        let verdict = match percent {
            percent if percent > above => " TOO MANY",
            percent if percent < -above => " less: record it",
            _ => "",
        };
        is_over |= percent > above;
        println!("| {}: {} | {now:.0} | {allowed:.0} | {percent:+.1} %{verdict} |", case.name, case.about);
    }
    if is_over {
        eprintln!("instructions: a request takes more than {BUDGETS} allows, or has no budget there");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
