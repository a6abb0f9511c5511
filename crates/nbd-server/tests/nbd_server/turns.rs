// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A long request lets the other clients of its thread in.

use crate::served::wire::Wire;
use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::{Command, ReplyStyle};
use cowshed_nbd_server::{Disk, DiskQueue, DiskRun, Export, Server, ServerConfig};
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_types::Result;
use std::future::Future;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const NONE: CommandFlags = CommandFlags(0);
const LONG: u64 = 32 << 20;
const SMALL: u64 = 4096;
const PATIENCE: Duration = Duration::from_secs(60);

/// The events on the server's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    LongBegins,
    LongEnds,
    SmallEnds,
}

/// A node whose long requests stop the whole thread before they begin, until the test lets it go.
#[derive(Clone)]
struct Watched {
    node: Arc<Node>,
    steps: Arc<Mutex<Vec<Step>>>,
    stopped: SyncSender<()>,
    go: Arc<Mutex<Receiver<()>>>,
}

impl Watched {
    fn begin(&self, len: usize) {
        if len as u64 == LONG {
            self.stopped.send(()).expect("the test listens");
            self.go.lock().unwrap().recv_timeout(PATIENCE).expect("the test lets it go");
            self.steps.lock().unwrap().push(Step::LongBegins);
        }
    }

    fn end(&self, len: usize) {
        let step = if len as u64 == LONG { Step::LongEnds } else { Step::SmallEnds };
        self.steps.lock().unwrap().push(step);
    }
}

impl Disk for Watched {
    type Queue = Watched;

    fn queue(&self) -> Watched {
        self.clone()
    }

    fn size(&self) -> u64 {
        Node::size(&self.node)
    }

    fn is_read_only(&self) -> bool {
        false
    }
}

impl DiskQueue for Watched {
    fn size(&self) -> u64 {
        Node::size(&self.node)
    }

    async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let len = buf.len();
        self.begin(len);
        let outcome = Node::read(&self.node, offset, buf).await;
        self.end(len);
        outcome
    }

    async fn write(&self, offset: u64, buf: IoBuf, _durable: bool) -> (Result<()>, IoBuf) {
        let len = buf.len();
        self.begin(len);
        let outcome = Node::write(&self.node, offset, buf).await;
        self.end(len);
        outcome
    }

    async fn write_zeroes(&self, _offset: u64, _len: u64, _flags: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> impl Future<Output = Result<()>> {
        Node::flush(&self.node)
    }

    async fn block_status(&self, _offset: u64, len: u64, _max: usize) -> Result<Vec<DiskRun>> {
        Ok(vec![DiskRun { len, data: true, zero: false, depth: 1 }])
    }
}

/// The steps of a long request of one client and a small read of another that came before the long one began.
fn steps_of(writes: bool, style: ReplyStyle, data: &[u8]) -> Vec<Step> {
    let dir = cowshed_testkit::qemu::temp_dir();
    let image = dir.path().join("disk.raw");
    std::fs::write(&image, data).expect("an image");
    let request = OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true);
    let node = rt::block_on(open(request)).expect("open");
    let (stopped, is_stopped) = sync_channel(1);
    let (go, may_go) = sync_channel(1);
    let steps: Arc<Mutex<Vec<Step>>> = Arc::default();
    let go_end = Arc::new(Mutex::new(may_go));
    let disk = Watched { node: Arc::clone(&node), steps: Arc::clone(&steps), stopped, go: go_end };
    let server = Server::new(ServerConfig { queues: 1, ..ServerConfig::default() }).expect("server");
    server.add_export(Export { writable: true, ..Export::new("", disk) }).expect("export");
    let socket = dir.path().join("nbd.sock");
    server.listen(&SocketAddress::Unix(socket.to_str().unwrap().to_owned())).expect("listen");
    let mut one = Wire::enter(&socket, style, "", &[]).0;
    let mut other = Wire::enter(&socket, style, "", &[]).0;
    for wire in [&mut one, &mut other] {
        wire.stream.set_read_timeout(Some(PATIENCE)).expect("a bound");
    }
    // The read data are in the page cache, and the other client is known.
    assert_eq!(other.ask(Command::Read, NONE, 0, SMALL).errno, 0);
    steps.lock().unwrap().clear();
    let command = if writes { Command::Write } else { Command::Read };
    let payload = if writes { data } else { &[] };
    let cookie = one.request(command, NONE, 0, LONG, payload);
    is_stopped.recv_timeout(PATIENCE).expect("the long request begins");
    let small = other.request(Command::Read, NONE, SMALL, SMALL, &[]);
    go.send(()).expect("the server listens");
    let reader = std::thread::spawn(move || {
        let found = one.collect(cookie, 0, if writes { 0 } else { LONG });
        (found, one)
    });
    assert!(other.collect(small, SMALL, SMALL).data == data[SMALL as usize..2 * SMALL as usize]);
    let (found, one) = reader.join().expect("the reply");
    assert_eq!(found.errno, 0);
    assert!(writes || found.data == data, "every byte is as it was");
    drop((one, other));
    rt::block_on(async {
        server.stop(Duration::from_secs(20)).await.expect("stop");
        node.close().await.expect("close");
    });
    steps.lock().unwrap().clone()
}

/// Data, and holes of many lengths, also across the places where a search pauses.
fn pattern() -> Vec<u8> {
    let mut data = vec![0; LONG as usize];
    let mut random = 7u64;
    let mut at = 0;
    while at < data.len() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let run = (1 + (random >> 40) as usize % 600) * 2048;
        let end = (at + run).min(data.len());
        if random >> 63 == 0 {
            data[at..end].fill((random >> 20) as u8 | 1);
        }
        at = end;
    }
    data
}

#[test]
fn small_request_overtakes_a_long_one() {
    let data = pattern();
    for writes in [false, true] {
        for style in [ReplyStyle::Simple, ReplyStyle::Structured] {
            let steps = steps_of(writes, style, &data);
            assert_eq!(steps, [Step::LongBegins, Step::SmallEnds, Step::LongEnds], "writes: {writes}, {style:?}");
        }
    }
}
