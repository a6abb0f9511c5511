// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests whose futures are dropped half-way, on the simulated disk. The kernel carries on with the I/O of such a request, so the
//! request must keep its rights to the clusters until that I/O ends.

use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{AttachRequest, Attachment, Graph, Queue};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation, ZeroFlags};
use cowshed_simulator::{Config, Effect, Event, Fault, OpKind, World};
use cowshed_storage::{IoBuf, SharedBufs, SharedMemory, rt};
use cowshed_testkit::audit::{audit, host_offset, l2_entry};
use cowshed_testkit::crash::CrashPlan;
use cowshed_testkit::images::{Chain, Format, Layer, Op, Qcow2Spec, Texture};
use cowshed_testkit::random::{Random, for_each_seed};
use cowshed_testkit::scenario::{ImageDisk, Prepared, Trial};
use cowshed_types::Result;
use futures_util::poll;
use std::collections::BTreeSet;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

const CLUSTER: u64 = 4096;
const SECTOR: usize = 512;
/// The guest cluster that the dropped write of the first tests uses. Its place is behind those that opening looks at.
const SLOW: u64 = 28;

fn image(size: u64, written: Range<u64>) -> Layer {
    let write = Op::Write { offset: written.start, len: written.end - written.start, texture: Texture::Random(size) };
    let sessions = if written.is_empty() { Vec::new() } else { vec![vec![write]] };
    let spec = Qcow2Spec { cluster_size: CLUSTER, ..Qcow2Spec::default() };
    Layer { format: Format::Qcow2(spec), size, sessions }
}

fn trial(seed: u64, faults: Vec<Fault>) -> Trial {
    Trial {
        config: Config::new(seed),
        faults,
        options: "",
        steps: Vec::new(),
        queues: 1,
        plan: CrashPlan::new(seed),
        sample_qemu: 0,
        amend: "",
        shared: None,
    }
}

/// An image with guest cluster [`SLOW`], and a machine whose writes there take a second.
fn slow_machine() -> (Prepared, World, u64) {
    let prepared = Prepared::new(&Chain { layers: vec![image(1 << 20, 0..128 << 10)] });
    let host = host_offset(l2_entry(&prepared.files[&prepared.top], SLOW));
    assert_ne!(host, 0, "guest cluster {SLOW} is not allocated");
    let slow = Fault::new(Effect::Delay(Duration::from_secs(1))).kind(OpKind::Write).range(host..host + CLUSTER);
    let world = prepared.world(&trial(1, vec![slow]));
    (prepared, world, host)
}

fn cluster_of(byte: u8) -> IoBuf {
    IoBuf::copy_from(&[byte; CLUSTER as usize])
}

/// Memory of a guest, and the same in two pieces.
fn guest_memory(byte: u8, len: usize) -> (SharedMemory, SharedBufs) {
    let (memory, _) = SharedMemory::create("guest", len as u64).expect("memory");
    memory.write(0, &vec![byte; len]);
    let mut bufs = SharedBufs::default();
    bufs.push(memory.part(0, len / 3));
    bufs.push(memory.part(len / 3, len - len / 3));
    (memory, bufs)
}

#[test]
fn a_dropped_write_never_lands_in_the_next_owner() {
    no_dropped_write_lands_in_the_next_owner(async |disk| disk.write(SLOW * CLUSTER, cluster_of(9)).await.0);
}

/// A ring of the kernel takes the bytes out of the guest's memory until its write ends.
#[test]
fn dropped_shared_write_never_lands_in_the_next_owner() {
    no_dropped_write_lands_in_the_next_owner(async |disk| {
        let (_, bufs) = guest_memory(9, CLUSTER as usize);
        disk.write_shared(SLOW * CLUSTER, bufs).await.0
    });
}

fn no_dropped_write_lands_in_the_next_owner(request: impl AsyncFn(&Node) -> Result<()>) {
    let (prepared, world, host) = slow_machine();
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("it opens").0;
        // The table is cached then, so the write reaches the disk at its first poll.
        disk.read(0, IoBuf::zeroed(512)).await.0.expect("a read");
        let mut write = Box::pin(request(&disk));
        assert!(poll!(&mut write).is_pending());
        drop(write);
        assert_eq!(world.fault_hits(), 1, "the write did not reach the disk");
        disk.discard(SLOW * CLUSTER, CLUSTER).await.expect("a discard");
        for cluster in 64..80 {
            disk.write(cluster * CLUSTER, cluster_of(7)).await.0.expect("a write");
            disk.flush().await.expect("a flush");
            if cluster == 71 {
                // Simulated time, behind the delay of the write.
                rt::sleep(Duration::from_secs(2)).await;
                disk.flush().await.expect("a flush");
            }
        }
        for cluster in 64..80 {
            let (result, bytes) = disk.read(cluster * CLUSTER, IoBuf::zeroed(CLUSTER as usize)).await;
            result.expect("a read");
            assert!(bytes.iter().all(|byte| *byte == 7), "the dropped write destroyed guest cluster {cluster}");
        }
        disk.close().await.expect("a good close");
    });
    let end = world.contents(&prepared.top).expect("the image");
    assert_eq!(audit(&end).expect("a good image").leaks, 0);
    let owners = (64..80).filter(|at| host_offset(l2_entry(&end, *at)) == host).count();
    assert_eq!(owners, 1, "no cluster took the freed place: the test shows nothing");
}

#[test]
fn a_drain_waits_for_a_dropped_write() {
    let (prepared, world, _) = slow_machine();
    world.run(async {
        let guest = Guest::open(&prepared.top, "").await;
        guest.queue.read(0, IoBuf::zeroed(512)).await.0.expect("a read");
        let mut write = Box::pin(guest.queue.write(SLOW * CLUSTER, cluster_of(9)));
        assert!(poll!(&mut write).is_pending());
        drop(write);
        assert_eq!((world.fault_hits(), guest.attachment.statistics().in_flight), (1, 1));
        let begun = rt::now();
        drop(guest.attachment.drain().await);
        assert!(rt::now() - begun > Duration::from_millis(900), "the drain has overtaken the write");
        let (result, bytes) = guest.queue.read(SLOW * CLUSTER, IoBuf::zeroed(CLUSTER as usize)).await;
        result.expect("a read");
        assert!(bytes.iter().all(|byte| *byte == 9), "the drained write is not on the disk");
        guest.close().await;
    });
}

/// The kernel fills the guest's memory to the end. The place on the disk must not be another one's before.
#[test]
fn a_drain_waits_for_a_dropped_shared_read() {
    let (prepared, _, host) = slow_machine();
    let slow = Fault::new(Effect::Delay(Duration::from_secs(1))).kind(OpKind::Read).range(host..host + CLUSTER);
    let world = prepared.world(&trial(1, vec![slow]));
    world.run(async {
        let guest = Guest::open(&prepared.top, "").await;
        guest.queue.read(0, IoBuf::zeroed(512)).await.0.expect("a read");
        let (_, bufs) = guest_memory(0, CLUSTER as usize);
        let mut read = Box::pin(guest.queue.read_shared(SLOW * CLUSTER, bufs));
        assert!(poll!(&mut read).is_pending());
        drop(read);
        assert_eq!((world.fault_hits(), guest.attachment.statistics().in_flight), (1, 1));
        let begun = rt::now();
        drop(guest.attachment.drain().await);
        assert!(rt::now() - begun > Duration::from_millis(900), "the drain has overtaken the read");
        guest.close().await;
    });
}

#[test]
fn a_close_waits_for_a_dropped_write() {
    let (prepared, world, _) = slow_machine();
    world.run(async {
        let disk = ImageDisk::open(&prepared.top, true, false).await.expect("it opens").0;
        disk.read(0, IoBuf::zeroed(512)).await.0.expect("a read");
        let mut write = Box::pin(disk.write(SLOW * CLUSTER, cluster_of(9)));
        assert!(poll!(&mut write).is_pending());
        drop(write);
        let begun = rt::now();
        disk.close().await.expect("a good close");
        assert!(rt::now() - begun > Duration::from_millis(900), "the close has overtaken the write");
    });
}

/// Otherwise the end of the program would wait for the limits.
#[test]
fn a_throttle_lets_dropped_writes_go() {
    let (prepared, world, _) = slow_machine();
    world.run(async {
        let guest = Guest::open(&prepared.top, "").await;
        let mut limits = Limits::new();
        limits.set("iops-total", 1).expect("a limit");
        guest.graph.throttle_groups().create("g", limits).expect("a group");
        let options = keyval("driver=throttle,node-name=t,throttle-group=g");
        guest.graph.insert_filter(&guest.node(), options).await.expect("a filter");
        let mut writes: Vec<_> =
            (0..16).map(|cluster| Box::pin(guest.queue.write(cluster * CLUSTER, cluster_of(9)))).collect();
        for write in &mut writes {
            let _ = poll!(write);
        }
        // Simulated time, in which the limit holds most back.
        rt::sleep(Duration::from_millis(100)).await;
        assert!(guest.attachment.statistics().in_flight > 10, "nothing was held back");
        drop(writes);
        // Simulated time, in which what can end ends.
        rt::sleep(Duration::from_millis(100)).await;
        assert_eq!(guest.attachment.statistics().in_flight, 0);
        let (result, bytes) = guest.node().read(0, IoBuf::zeroed(16 * CLUSTER as usize)).await;
        result.expect("a read");
        assert!(bytes.iter().all(|byte| *byte == 9));
        guest.close().await;
    });
}

/// An image as an export has it.
struct Guest {
    graph: Arc<Graph>,
    attachment: Arc<Attachment>,
    queue: Queue,
}

impl Guest {
    async fn open(top: &str, filter: &str) -> Guest {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = format!("driver=qcow2,node-name=n,file.filename={top},discard=unmap");
        let node = graph.add(keyval(&options)).await.expect("it opens");
        let permissions = cowshed_storage::Permissions {
            used: cowshed_storage::PermissionSet::ALL & !cowshed_storage::PermissionSet::WRITE_UNCHANGED,
            shared: cowshed_storage::PermissionSet::ALL,
        };
        let attachment = graph.attach(&node, AttachRequest::job("guest", permissions)).await.expect("an attachment");
        if !filter.is_empty() {
            graph.insert_filter(&node, keyval(&format!("driver={filter},node-name=f"))).await.expect("a filter");
        }
        let queue = attachment.queue();
        Guest { graph, attachment, queue }
    }

    fn node(&self) -> Arc<Node> {
        self.graph.find("n").expect("the image is in the graph")
    }

    async fn close(&self) {
        self.attachment.detach().await.expect("a good end");
        self.graph.close_all().await.expect("a good close");
    }
}

fn keyval(options: &str) -> BlockdevOptions {
    BlockdevOptions::from_keyval(options).expect("good options")
}

/// The dropped request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    InPlace,
    /// A part of a cluster that only the backing file has.
    CopyOnWrite,
    /// Several new clusters.
    Allocate,
    Durable,
    /// The same writes, whose data stand in memory that a guest goes on changing.
    SharedInPlace,
    SharedCopyOnWrite,
    SharedAllocate,
    SharedDurable,
    Compressed,
    /// Whole clusters and parts of others.
    Zero,
    Unmap,
    Discard,
    Flush,
    Grow,
    Shrink,
    /// A read that copies.
    CopyOnRead,
    Snapshot,
    InternalSnapshot,
}

const KINDS: &[Kind] = &[
    Kind::InPlace,
    Kind::CopyOnWrite,
    Kind::Allocate,
    Kind::Durable,
    Kind::SharedInPlace,
    Kind::SharedCopyOnWrite,
    Kind::SharedAllocate,
    Kind::SharedDurable,
    Kind::Compressed,
    Kind::Zero,
    Kind::Unmap,
    Kind::Discard,
    Kind::Flush,
    Kind::Grow,
    Kind::Shrink,
    Kind::CopyOnRead,
    Kind::Snapshot,
    Kind::InternalSnapshot,
];

/// Size of the disk in bytes.
const SIZE: u64 = 1 << 20;
const BASE: Range<u64> = 256 << 10..512 << 10;
const TOP: Range<u64> = 0..256 << 10;
/// The bytes of a guest's memory after it gave a write up.
const CHANGED: u8 = 0x6b;
/// New clusters of the requests that come later, in bytes.
const LATER: Range<u64> = 768 << 10..896 << 10;

impl Kind {
    /// The bytes that it may change.
    fn range(self) -> Range<u64> {
        let of = |start: u64, len: u64| start..start + len;
        match self {
            Kind::InPlace | Kind::SharedInPlace => of(SLOW * CLUSTER + 512, 2 * CLUSTER),
            Kind::CopyOnWrite | Kind::SharedCopyOnWrite => of(BASE.start + 3 * CLUSTER + 1024, 2 * CLUSTER),
            Kind::Allocate | Kind::SharedAllocate => of(576 << 10, 16 * CLUSTER),
            Kind::Durable | Kind::SharedDurable => of(SLOW * CLUSTER, 512),
            Kind::Compressed => of(SLOW * CLUSTER, 2 * CLUSTER),
            Kind::Zero | Kind::Unmap | Kind::Discard => of(SLOW * CLUSTER - 1024, 4 * CLUSTER + 512),
            Kind::Shrink => SIZE - (64 << 10)..SIZE,
            Kind::Flush | Kind::Grow | Kind::CopyOnRead | Kind::Snapshot | Kind::InternalSnapshot => 0..0,
        }
    }

    /// The byte that it writes there, where it doesn't write zeroes.
    fn byte(self) -> u8 {
        match self {
            Kind::InPlace | Kind::CopyOnWrite | Kind::Allocate | Kind::Durable | Kind::Compressed => 0xd5,
            _ if self.is_shared() => 0xd5,
            _ => 0,
        }
    }

    fn is_shared(self) -> bool {
        use Kind::{SharedAllocate, SharedCopyOnWrite, SharedDurable, SharedInPlace};
        matches!(self, SharedInPlace | SharedCopyOnWrite | SharedAllocate | SharedDurable)
    }

    /// The request. `by_node`: not through the gate. `shared`: its data, where a guest's memory has it.
    async fn request(self, guest: &Guest, world: &World, by_node: bool, shared: SharedBufs) {
        let (queue, node, range) = (&guest.queue, guest.node(), self.range());
        let (start, len) = (range.start, range.end - range.start);
        let buf = IoBuf::copy_from(&vec![self.byte(); len as usize]);
        let unmap = ZeroFlags { may_unmap: self == Kind::Unmap, no_fallback: false };
        let off = Preallocation::Off;
        let result = match self {
            Kind::Durable => queue.write_durable(start, buf).await.0,
            Kind::SharedDurable => queue.write_shared_durable(start, shared).await.0,
            _ if self.is_shared() && by_node => node.write_shared(start, shared).await.0,
            Kind::SharedInPlace | Kind::SharedCopyOnWrite | Kind::SharedAllocate => {
                queue.write_shared(start, shared).await.0
            }
            Kind::InPlace | Kind::CopyOnWrite | Kind::Allocate if by_node => node.write(start, buf).await.0,
            Kind::InPlace | Kind::CopyOnWrite | Kind::Allocate => queue.write(start, buf).await.0,
            Kind::Compressed => {
                let cluster = |at: u64| (start + at * CLUSTER, cluster_of(self.byte()));
                node.write_compressed(vec![cluster(0), cluster(1)]).await
            }
            Kind::Zero | Kind::Unmap if by_node => node.write_zeroes(start, len, unmap).await,
            Kind::Zero | Kind::Unmap => queue.write_zeroes(start, len, unmap).await,
            Kind::Discard if by_node => node.discard(start, len).await,
            Kind::Discard => queue.discard(start, len).await,
            Kind::Flush if by_node => node.flush().await,
            Kind::Flush => queue.flush().await,
            Kind::Grow => queue.resize(SIZE + (64 << 10), off).await,
            Kind::Shrink => queue.resize(SIZE - (64 << 10), off).await,
            Kind::CopyOnRead => queue.read(BASE.start, IoBuf::zeroed(64 << 10)).await.0,
            Kind::InternalSnapshot => guest.graph.take_internal_snapshot(&node, "s").await.map(drop),
            Kind::Snapshot => {
                let overlay = guest.graph.find("o").expect("the overlay is there");
                guest.graph.take_snapshot(&node, &overlay).await.map(drop)
            }
        };
        result.unwrap_or_else(|error| panic!("{self:?} at {:?}: {error}", world.now()));
    }
}

/// Polls `times` times at most; true at the end of the future.
async fn poll_times(mut future: Pin<&mut impl Future<Output = ()>>, times: usize) -> bool {
    let mut left = times;
    std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(false);
        }
        left -= 1;
        future.as_mut().poll(context).map(|()| true)
    })
    .await
}

/// The disk's contents as they may be, sector by sector.
struct Allowed(Vec<BTreeSet<Vec<u8>>>);

impl Allowed {
    fn new(content: &[u8]) -> Allowed {
        Allowed(content.chunks(SECTOR).map(|sector| BTreeSet::from([sector.to_vec()])).collect())
    }

    fn sectors(&mut self, range: &Range<u64>) -> &mut [BTreeSet<Vec<u8>>] {
        &mut self.0[range.start as usize / SECTOR..range.end as usize / SECTOR]
    }

    fn may_be(&mut self, range: &Range<u64>, byte: u8) {
        for sector in self.sectors(range) {
            sector.insert(vec![byte; SECTOR]);
        }
    }

    fn is(&mut self, range: &Range<u64>, byte: u8) {
        self.sectors(range).iter_mut().for_each(|sector| *sector = BTreeSet::from([vec![byte; SECTOR]]));
    }

    #[track_caller]
    fn check(&self, bytes: &[u8], about: &str) {
        for (number, sector) in bytes.chunks(SECTOR).enumerate().take(self.0.len()) {
            let known = &self.0[number];
            let at = number * SECTOR;
            assert!(known.contains(sector), "{about}: offset {at:#x} begins with {:?}", &sector[..4]);
        }
    }
}

/// Changes of the image's files that the machine has begun and not ended.
fn changes_under_way(world: &World) -> usize {
    let mut open = BTreeSet::new();
    for event in &world.trace().log {
        match event {
            Event::Submitted { op, .. } => _ = open.insert(*op),
            Event::Completed { op, .. } => _ = open.remove(op),
            _ => {}
        }
    }
    open.len()
}

struct Case {
    seed: u64,
    kind: Kind,
    /// Polls before the drop.
    polls: usize,
}

impl Case {
    fn about(&self) -> String {
        format!("seed {}, {:?} dropped after {} polls", self.seed, self.kind, self.polls)
    }

    /// True when the request has ended before it could be dropped.
    fn run(&self, prepared: &Prepared) -> bool {
        let world = prepared.world(&trial(self.seed, Vec::new()));
        let mut allowed = Allowed::new(&prepared.content);
        let top = format!("{}.over", prepared.top);
        let ended = world.run(self.drop_and_go_on(prepared, &world, &top, &mut allowed));
        let read = if self.kind == Kind::Snapshot && world.contents(&top).is_some() { &top } else { &prepared.top };
        world.run(async {
            // The new image can't have been used if the snapshot was not taken: it shows the content of the old one.
            let disk = ImageDisk::open(read, false, false).await.expect("it opens again").0;
            let (result, bytes) = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await;
            result.expect("a read");
            allowed.check(&bytes, &format!("{} after closing", self.about()));
            disk.close().await.expect("a good close");
        });
        for name in [&prepared.top, &top] {
            let Some(end) = world.contents(name) else { continue };
            let found = audit(&end).unwrap_or_else(|wrong| panic!("{}: {name}: {wrong}", self.about()));
            assert_eq!(found.leaks, 0, "{}: {name} leaks", self.about());
        }
        ended
    }

    async fn drop_and_go_on(&self, prepared: &Prepared, world: &World, top: &str, allowed: &mut Allowed) -> bool {
        let mut random = Random::new(self.seed ^ ((self.kind as u64) << 16) ^ ((self.polls as u64) << 32));
        let filter = if self.kind == Kind::CopyOnRead { "copy-on-read" } else { "" };
        let guest = Guest::open(&prepared.top, filter).await;
        if self.kind == Kind::Snapshot {
            self.make_overlay(&guest, prepared, top).await;
        }
        // Something dirty for flushes to write. A discard waits for nothing once its table is in memory.
        if self.kind != Kind::Discard {
            let first = LATER.end..LATER.end + 8 * CLUSTER;
            write(&guest, allowed, &first, 0x11).await;
        }
        let (range, by_node) = (self.kind.range(), random.chance(50));
        let (memory, shared) = guest_memory(self.kind.byte(), if self.kind.is_shared() { len(&range) } else { 1 });
        let ended = {
            let mut request = Box::pin(self.kind.request(&guest, world, by_node, shared));
            poll_times(request.as_mut(), self.polls).await
        };
        if self.kind.is_shared() {
            // A write that goes on may take these bytes; no other sector may show them.
            memory.write(0, &vec![CHANGED; memory.len()]);
            allowed.may_be(&range, CHANGED);
        }
        allowed.may_be(&range, self.kind.byte());
        // A discard leaves parts of clusters as they are.
        if ended && self.kind != Kind::Discard {
            allowed.is(&range, self.kind.byte());
        }
        if random.chance(25) {
            // At once, and without a drain of the node.
            guest.close().await;
            return ended;
        }
        self.go_on(&guest, &mut random, allowed).await;
        let drained = guest.graph.drain(&[&guest.node(), &guest.attachment.node()]).await;
        assert_eq!(changes_under_way(world), 0, "{}: a drain has overtaken it", self.about());
        drop(drained);
        let (result, bytes) = guest.queue.read(0, IoBuf::zeroed(guest.queue.size() as usize)).await;
        result.expect("a read");
        allowed.check(&bytes, &self.about());
        guest.close().await;
        ended
    }

    async fn make_overlay(&self, guest: &Guest, prepared: &Prepared, top: &str) {
        let request = CreateRequest {
            filename: top.to_owned(),
            format: "qcow2".to_owned(),
            options: vec!["cluster_size=4k".to_owned()],
            backing_file: Some(prepared.top.clone()),
            backing_format: Some("qcow2".to_owned()),
            backing_unchecked: true,
            ..CreateRequest::default()
        };
        prepare_sized(&request, SIZE).await.expect("an overlay").run().await.expect("an overlay");
        let options = format!("driver=qcow2,node-name=o,file.filename={top},discard=unmap,backing=");
        guest.graph.add(keyval(&options)).await.expect("the overlay opens");
    }

    /// Other requests then free the clusters that the request used, and take new ones.
    async fn go_on(&self, guest: &Guest, random: &mut Random, allowed: &mut Allowed) {
        let range = self.kind.range();
        if !range.is_empty() && self.kind != Kind::Shrink && random.chance(70) {
            let whole = range.start / CLUSTER * CLUSTER..range.end.next_multiple_of(CLUSTER);
            match random.chance(50) {
                true => guest.queue.discard(whole.start, whole.end - whole.start).await.expect("a discard"),
                false => {
                    let flags = ZeroFlags { may_unmap: true, no_fallback: false };
                    let zeroes = guest.queue.write_zeroes(whole.start, whole.end - whole.start, flags);
                    zeroes.await.expect("zeroes");
                }
            }
            allowed.may_be(&whole, 0);
        }
        for at in (LATER.start..LATER.end).step_by(2 * CLUSTER as usize) {
            if random.chance(60) {
                guest.queue.flush().await.expect("a flush");
            }
            write(guest, allowed, &(at..at + 2 * CLUSTER), 0x77).await;
        }
    }
}

fn len(range: &Range<u64>) -> usize {
    (range.end - range.start) as usize
}

async fn write(guest: &Guest, allowed: &mut Allowed, range: &Range<u64>, byte: u8) {
    let bytes = vec![byte; (range.end - range.start) as usize];
    guest.queue.write(range.start, IoBuf::copy_from(&bytes)).await.0.expect("a write");
    allowed.is(range, byte);
}

/// Drops requests of every kind after each number of polls, and goes on. Only their own sectors may have changed,
/// drains wait for them, and after closing nothing is lost or leaked.
#[test]
fn requests_dropped_at_every_poll_harm_nothing() {
    let (base, top) = (image(SIZE, BASE), image(SIZE, TOP));
    let prepared = Prepared::new(&Chain { layers: vec![base, top] });
    for_each_seed(3, |seed| {
        for &kind in KINDS {
            let mut polls = 0;
            while !(Case { seed, kind, polls }).run(&prepared) {
                polls += 1;
                assert!(polls < 1000, "{kind:?} does not end");
            }
            assert!(polls > 1, "{kind:?} was never dropped half-way");
        }
    });
}
