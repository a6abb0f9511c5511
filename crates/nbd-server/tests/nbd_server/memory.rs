// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The memory of requests is bounded for all connections together, and no connection keeps it from the others.

use crate::served;

use crate::served::Served;
use crate::served::held::{HELD_FROM, Held, HeldDisk};
use crate::served::wire::Wire;
use cowshed_image::OpenRequest;
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::{Command, ReplyStyle};
use cowshed_nbd_server::{Event, EventHandler, Export, Limits, Server, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use cowshed_testkit::waiting::await_with;
use std::io::Read;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const NONE: CommandFlags = CommandFlags(0);
const MIB: u64 = 1 << 20;
/// The memory of a long request at a time when the pool is taken.
const PIECE_BYTES: u64 = 512 << 10;
const PATIENCE: Duration = Duration::from_secs(60);

struct Setup {
    server: Arc<Server<HeldDisk>>,
    disk: Arc<Held>,
    other_disk: Arc<Held>,
    socket: PathBuf,
    events: Arc<Mutex<Vec<Event>>>,
    _dir: tempfile::TempDir,
}

/// A server with the exports "a" and "b", and "c", whose disk never waits below its middle.
fn serve(memory_bytes: u64, stall_limit: Duration, queues: usize) -> Setup {
    let max_payload_bytes = (memory_bytes as u32).min(32 << 20);
    let limits = Limits { memory_bytes, stall_limit, max_payload_bytes, ..Limits::default() };
    let events: Arc<Mutex<Vec<Event>>> = Arc::default();
    let seen = Arc::clone(&events);
    let handler = EventHandler(Arc::new(move |event| seen.lock().unwrap().push(event)));
    let server = Server::new(ServerConfig { limits, queues, events: Some(handler), ..ServerConfig::default() });
    let server = Arc::new(server.expect("server"));
    let (disk, other_disk) = (HeldDisk::default(), HeldDisk::default());
    for (name, disk) in [("a", &disk), ("b", &other_disk), ("c", &HeldDisk::default())] {
        server.add_export(Export { writable: true, ..Export::new(name, disk.clone()) }).expect("export");
    }
    let dir = cowshed_testkit::qemu::temp_dir();
    let socket = dir.path().join("nbd.sock");
    server.listen(&SocketAddress::Unix(socket.to_str().unwrap().to_owned())).expect("listen");
    Setup { server, disk: disk.0, other_disk: other_disk.0, socket, events, _dir: dir }
}

impl Setup {
    fn enter(&self, export: &str) -> Wire {
        let wire = Wire::enter(&self.socket, ReplyStyle::Simple, export, &[]).0;
        wire.stream.set_read_timeout(Some(PATIENCE)).expect("a bound");
        wire
    }

    fn await_that(&self, what: &str, holds: impl FnMut() -> bool) {
        await_with(holds, || format!("{what}; {:?}", self.server.memory()));
    }

    fn losses(&self) -> Vec<String> {
        let events = self.events.lock().unwrap();
        events
            .iter()
            .filter_map(|event| match event {
                Event::ClientDisconnected { error: Some(error), .. } => Some(error.clone()),
                _ => None,
            })
            .collect()
    }

    fn stop(self) {
        rt::block_on(self.server.stop(Duration::from_secs(20))).expect("stop");
        assert_eq!(self.server.memory().used_bytes, 0, "all memory is given back");
        assert_eq!(self.server.memory().waiting, 0);
    }
}

/// Takes the simple reply to a read of zeroes.
fn take_read(wire: &mut Wire, len: u64) {
    let head = wire.bytes(16);
    assert_eq!(head[4..8], [0; 4], "no error");
    assert!(wire.bytes(len as usize).iter().all(|byte| *byte == 0));
}

#[test]
fn all_connections_together_hold_the_pool_and_their_own_shares() {
    const CLIENTS: u64 = 6;
    const READS: u64 = 8;
    let setup = serve(8 * MIB, Duration::from_secs(3600), 2);
    let mut clients: Vec<Wire> = (0..CLIENTS).map(|n| setup.enter(["a", "b"][(n % 2) as usize])).collect();
    for wire in &mut clients {
        for _ in 0..READS {
            wire.request(Command::Read, NONE, HELD_FROM, MIB, &[]);
        }
    }
    let begun = || setup.disk.bytes.load(Ordering::SeqCst) + setup.other_disk.bytes.load(Ordering::SeqCst);
    setup.await_that("the pool is taken", || begun() >= 8 * MIB + CLIENTS * MIB);
    setup.await_that("all others wait", || setup.server.memory().waiting == CLIENTS as usize);
    assert_eq!(begun(), 8 * MIB + CLIENTS * MIB);
    assert_eq!(setup.server.memory().used_bytes, 8 * MIB);
    setup.disk.open();
    setup.other_disk.open();
    for wire in &mut clients {
        (0..READS).for_each(|_| take_read(wire, MIB));
    }
    drop(clients);
    setup.stop();
}

#[test]
fn connection_keeps_its_share_of_a_full_pool() {
    let setup = serve(8 * MIB, Duration::from_secs(3600), 1);
    let mut hogs: Vec<Wire> = ["a", "a", "b"].map(|export| setup.enter(export)).into();
    for wire in &mut hogs {
        wire.request(Command::Read, NONE, HELD_FROM, 3 * MIB, &[]);
    }
    setup.await_that("the pool is taken", || setup.server.memory().used_bytes == 6 * MIB);
    let held = || setup.disk.bytes.load(Ordering::SeqCst) + setup.other_disk.bytes.load(Ordering::SeqCst);
    setup.await_that("the third goes on in pieces", || held() == 6 * MIB + PIECE_BYTES);
    let mut small = setup.enter("a");
    for _ in 0..100 {
        assert_eq!(small.ask(Command::Read, NONE, 0, MIB).errno, 0);
        assert_eq!(small.write(NONE, 0, &[0; 4096]).errno, 0);
    }
    setup.disk.open();
    setup.other_disk.open();
    hogs.iter_mut().for_each(|wire| take_read(wire, 3 * MIB));
    drop((hogs, small));
    setup.stop();
}

#[test]
fn a_disk_that_hangs_leaves_memory_for_the_clients_of_others() {
    let setup = serve(8 * MIB, Duration::from_secs(3600), 1);
    let mut hogs: Vec<Wire> = (0..4).map(|_| setup.enter("a")).collect();
    for wire in &mut hogs {
        for _ in 0..2 {
            wire.request(Command::Read, NONE, HELD_FROM, 2 * MIB, &[]);
        }
    }
    setup.await_that("its part is taken", || setup.server.memory().used_bytes == 6 * MIB);
    let mut other = setup.enter("b");
    for _ in 0..10 {
        assert_eq!(other.ask(Command::Read, NONE, 0, 2 * MIB).errno, 0);
    }
    setup.disk.open();
    for wire in &mut hogs {
        (0..2).for_each(|_| take_read(wire, 2 * MIB));
    }
    drop((hogs, other));
    setup.stop();
}

#[test]
fn hanging_disks_leave_memory_to_others() {
    let setup = serve(8 * MIB, Duration::from_millis(200), 1);
    let mut hogs: Vec<Wire> = ["a", "a", "a", "b", "b"].map(|export| setup.enter(export)).into();
    for wire in &mut hogs {
        wire.request(Command::Read, NONE, HELD_FROM, 2 * MIB, &[]);
    }
    setup.await_that("all is taken", || setup.server.memory().used_bytes == 8 * MIB);
    let held = || setup.disk.bytes.load(Ordering::SeqCst) + setup.other_disk.bytes.load(Ordering::SeqCst);
    setup.await_that("the last one has its own share", || held() == 8 * MIB + PIECE_BYTES);
    let mut other = setup.enter("c");
    for _ in 0..10 {
        assert_eq!(other.ask(Command::Read, NONE, 0, 2 * MIB).errno, 0);
        assert_eq!(other.write(NONE, 0, &vec![0; 8 * MIB as usize]).errno, 0, "also the longest one");
    }
    // The exports whose disks hang keep their memory, and get no more.
    assert_eq!(setup.server.memory().stuck_bytes, 8 * MIB);
    setup.await_that("the long write is given back", || setup.server.memory().used_bytes == 8 * MIB);
    assert_eq!(held(), 8 * MIB + PIECE_BYTES);
    setup.other_disk.open();
    (3..5).for_each(|hog| take_read(&mut hogs[hog], 2 * MIB));
    setup.disk.open();
    (0..3).for_each(|hog| take_read(&mut hogs[hog], 2 * MIB));
    drop((hogs, other));
    assert_eq!(setup.server.memory().stuck_bytes, 0);
    assert_eq!(setup.server.memory().cut, 0, "no client is to blame");
    setup.stop();
}

/// `hold` has a client take the whole pool and keep it; another client's request must go on.
fn expect_cut(hold: impl FnOnce(&mut Wire)) {
    let setup = serve(4 * MIB, Duration::from_millis(200), 1);
    let mut greedy = setup.enter("a");
    hold(&mut greedy);
    setup.await_that("the pool is taken", || setup.server.memory().used_bytes == 3 * MIB);
    let mut other = setup.enter("b");
    setup.await_that("the greedy one is cut off", || {
        other.request(Command::Read, NONE, 0, 3 * MIB, &[]);
        take_read(&mut other, 3 * MIB);
        setup.server.memory().cut == 1
    });
    setup.await_that("the owner is told", || setup.losses().iter().any(|loss| loss.contains("kept memory")));
    drop((greedy, other));
    setup.stop();
}

#[test]
fn client_without_reading_loses_memory_to_others() {
    expect_cut(|wire| {
        wire.request(Command::Read, NONE, 0, 3 * MIB, &[]);
    });
}

#[test]
fn client_without_sending_loses_memory_to_others() {
    expect_cut(|wire| {
        wire.request(Command::Write, NONE, 0, 3 * MIB, &[0; 1000]);
    });
}

#[test]
fn memory_taken_while_a_send_stands_still_is_lost_too() {
    expect_cut(|wire| {
        // The share of its own is enough for the first one, whose reply is not taken.
        wire.request(Command::Read, NONE, 0, MIB, &[]);
        wire.request(Command::Read, NONE, 0, 3 * MIB, &[]);
    });
}

#[test]
fn a_slow_client_that_does_its_part_stays() {
    let setup = serve(4 * MIB, Duration::from_millis(200), 1);
    let mut slow = setup.enter("a");
    slow.request(Command::Read, NONE, 0, 3 * MIB, &[]);
    setup.await_that("the pool is taken", || setup.server.memory().used_bytes == 3 * MIB);
    let (is_over, over) = std::sync::mpsc::channel::<()>();
    let mut other = setup.enter("b");
    let asking = std::thread::spawn(move || {
        while over.recv_timeout(Duration::from_millis(50)) == Err(RecvTimeoutError::Timeout) {
            other.request(Command::Read, NONE, 0, 3 * MIB, &[]);
            take_read(&mut other, 3 * MIB);
        }
    });
    // About 640 KiB in a second, while the other asks for memory again and again.
    let mut left = 16 + 3 * MIB as usize;
    let mut piece = vec![0; 64 << 10];
    while left > 0 {
        let len = left.min(piece.len());
        slow.stream.read_exact(&mut piece[..len]).expect("the rest of the reply");
        left -= len;
        // The client reads slowly: that is the case.
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(is_over);
    asking.join().expect("the other is served");
    assert_eq!(setup.server.memory().cut, 0);
    assert_eq!(setup.losses(), Vec::<String>::new());
    drop(slow);
    setup.stop();
}

#[test]
fn connections_that_each_hold_a_part_all_come_to_their_end() {
    let setup = serve(5 * MIB, Duration::from_secs(3600), 2);
    std::thread::scope(|scope| {
        for client in 0..8u64 {
            let mut wire = setup.enter(["a", "b"][(client % 2) as usize]);
            scope.spawn(move || {
                for round in 0..6 {
                    let lengths: Vec<u64> =
                        (0..5).map(|n| 512 + (client * 7 + round * 3 + n * 5) % 11 * 409_600).collect();
                    let writes = round % 2 == 1;
                    for &len in &lengths {
                        match writes {
                            true => wire.request(Command::Write, NONE, 0, len, &vec![0; len as usize]),
                            false => wire.request(Command::Read, NONE, 0, len, &[]),
                        };
                    }
                    let bytes: u64 = lengths.iter().map(|len| 16 + if writes { 0 } else { *len }).sum();
                    wire.bytes(bytes as usize);
                }
            });
        }
    });
    let most = setup.disk.most_bytes.load(Ordering::SeqCst) + setup.other_disk.most_bytes.load(Ordering::SeqCst);
    assert!(most <= 2 * (5 + 8) * MIB, "{most}");
    setup.stop();
}

/// The stall limit is far away, so no client is cut off.
#[test]
fn clients_without_reading_delay_no_export() {
    let setup = serve(8 * MIB, Duration::from_secs(3600), 1);
    let mut hogs: Vec<Wire> = (0..24).map(|n| setup.enter(["a", "b"][n % 2])).collect();
    for wire in &mut hogs {
        for _ in 0..2 {
            wire.request(Command::Read, NONE, 0, 2 * MIB, &[]);
        }
    }
    // Writes whose data doesn't come hold memory, too.
    let mut halves: Vec<Wire> = (0..8).map(|_| setup.enter("a")).collect();
    for wire in &mut halves {
        wire.request(Command::Write, NONE, 0, 2 * MIB, &[1; 1000]);
    }
    setup.await_that("the pool is taken", || setup.server.memory().used_bytes == 8 * MIB);
    for export in ["c", "a", "b"] {
        let mut other = setup.enter(export);
        for _ in 0..5 {
            assert_eq!(other.ask(Command::Read, NONE, 0, 8 * MIB).errno, 0);
            assert_eq!(other.write(NONE, 0, &vec![0; 8 * MIB as usize]).errno, 0);
        }
    }
    assert_eq!(setup.server.memory().cut, 0);
    assert_eq!(setup.server.memory().used_bytes, 8 * MIB, "the others needed none of it");
    drop((hogs, halves));
    setup.stop();
}

/// A server of one image whose pool a client holds that takes no replies.
fn serve_pattern(stall_limit: Duration) -> (Served, Wire, Vec<u8>) {
    let limits = Limits { memory_bytes: 4 * MIB, max_payload_bytes: 4 << 20, stall_limit, ..Limits::default() };
    let served = Served::start(ServerConfig { limits, ..ServerConfig::default() });
    let image = served.path("disk.raw");
    let content = served::write_pattern(&image, 16 * MIB, 7);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true), |_| ());
    let mut greedy = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0;
    greedy.request(Command::Read, NONE, 0, 3 * MIB, &[]);
    let memory = || served.server.memory();
    await_with(|| memory().used_bytes >= 3 * MIB, || format!("the pool isn't taken: {:?}", memory()));
    (served, greedy, content)
}

#[test]
fn requests_that_go_in_pieces_are_whole() {
    let (served, greedy, mut content) = serve_pattern(Duration::from_secs(3600));
    // Odd offsets and lengths: no piece ends where the request does.
    let (offset, len) = (12_345u64, 3 * MIB + 777);
    let range = offset as usize..(offset + len) as usize;
    for (round, style) in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended].into_iter().enumerate() {
        let mut wire = Wire::enter(&served.socket, style, "", &[]).0;
        wire.stream.set_read_timeout(Some(PATIENCE)).expect("a bound");
        for flags in [NONE, CommandFlags::DF] {
            if style == ReplyStyle::Simple && flags != NONE {
                continue;
            }
            let read = wire.ask(Command::Read, flags, offset, len);
            assert!(read.errno == 0 && read.data == content[range.clone()], "{style:?} {flags:?}");
            assert!(flags == NONE || read.pieces == [(offset, len, false)], "one part: {:?}", read.pieces);
        }
        let data: Vec<u8> = (0..len as u32).map(|byte| (byte / 251) as u8 ^ round as u8).collect();
        let fua = CommandFlags::FUA;
        assert_eq!(wire.write(fua, offset, &data).errno, 0);
        content[range.clone()].copy_from_slice(&data);
        // Other requests follow the long ones, in order.
        let cookies: Vec<u64> = (0..4).map(|n| wire.request(Command::Read, NONE, n * MIB, 2 * MIB, &[])).collect();
        for (n, cookie) in cookies.into_iter().enumerate() {
            let read = wire.collect(cookie, n as u64 * MIB, 2 * MIB);
            assert!(read.errno == 0 && read.data == content[n << 20..(n + 2) << 20], "{style:?} {n}");
        }
    }
    assert_eq!(served.server.memory().used_bytes, 3 * MIB);
    drop(greedy);
    let dir = served.stop();
    assert!(std::fs::read(dir.path().join("disk.raw")).expect("read") == content, "it reached the file");
}

#[test]
fn write_waiting_for_memory_precedes_a_disconnect() {
    for says_goodbye in [true, false] {
        let (served, greedy, content) = serve_pattern(Duration::from_millis(200));
        let data = vec![0x5a; 3 << 20];
        let mut wire = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0;
        let mut sender = wire.stream.try_clone().expect("a clone");
        wire.request(Command::Write, NONE, 0, 3 * MIB, &[]);
        let sending = std::thread::spawn(move || {
            use std::io::Write;
            sender.write_all(&data).expect("the data");
            if says_goodbye {
                let goodbye = cowshed_nbd_proto::Request {
                    command: Command::Disconnect,
                    flags: NONE,
                    cookie: 99,
                    offset: 0,
                    length: 0,
                };
                let (bytes, len) = goodbye.encode(cowshed_nbd_proto::HeaderStyle::Compact);
                sender.write_all(&bytes[..len]).expect("the goodbye");
            }
            sender.shutdown(std::net::Shutdown::Write).expect("shutdown");
        });
        let mut reply = Vec::new();
        wire.stream.set_read_timeout(Some(PATIENCE)).expect("a bound");
        wire.stream.read_to_end(&mut reply).expect("the end");
        sending.join().expect("sent");
        drop((greedy, wire));
        let dir = served.stop();
        let found = std::fs::read(dir.path().join("disk.raw")).expect("read");
        let is_done = found[..3 << 20].iter().all(|byte| *byte == 0x5a);
        assert!(found[3 << 20..] == content[3 << 20..], "nothing else is touched");
        let is_answered = reply.len() == 16 && reply[4..8] == [0; 4];
        assert!(is_answered || reply.is_empty(), "{reply:?}");
        assert!(is_done || !is_answered, "an answer to what isn't done");
        assert!(is_answered || !says_goodbye, "a goodbye stood behind the write");
    }
}

#[test]
fn a_pool_that_holds_no_request_is_refused() {
    let limits = Limits { memory_bytes: 16 << 20, ..Limits::default() };
    let error = Server::<HeldDisk>::new(ServerConfig { limits, ..ServerConfig::default() }).expect_err("too small");
    assert!(error.to_string().contains("must hold the longest one"), "{error}");
}
