// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of a connection that is dead are not begun.

use crate::served;

use crate::served::Served;
use crate::served::wire::Wire;
use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::{Command, ReplyStyle, Request};
use cowshed_nbd_server::{Event, Limits, ServerConfig};
use cowshed_storage::{Socket, SocketAddress, rt};
use cowshed_testkit::waiting::await_that;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SIZE: u64 = 64 << 20;
const NONE: CommandFlags = CommandFlags(0);
/// The place of the writes.
const AT: u64 = 1 << 20;
const LEN: usize = 4096;
/// Reads of 1 MiB that fill the budget and every buffer of the sockets.
const READS: u64 = 40;

/// The end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Closed with replies unread: the server's next send fails.
    Reset,
    /// Both directions are shut down first, as by a client that connects again.
    Shutdown,
    /// The client's direction is shut down, and the server's bytes are still taken.
    HalfClosed,
}

fn serve(limits: Limits) -> (Served, Arc<Node>) {
    let served = Served::start(ServerConfig { limits, ..ServerConfig::default() });
    let image = served.path("disk.raw");
    served::write_pattern(&image, SIZE, 4);
    let node = served.export(OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true), |_| ());
    (served, node)
}

fn small_budget() -> Limits {
    Limits { max_bytes_in_flight: 2 << 20, ..Limits::default() }
}

fn operations(node: &Node) -> u64 {
    let stats = node.statistics();
    IoKind::ALL.into_iter().map(|kind| stats.kind(kind).operations).sum()
}

/// Waits until the server can begin nothing more for its clients.
fn await_standstill(node: &Node) {
    let mut last = (operations(node), Instant::now());
    await_that("the server stands still", || {
        let now = operations(node);
        if now != last.0 {
            last = (now, Instant::now());
        }
        now > 0 && last.1.elapsed() > Duration::from_millis(300)
    });
}

fn await_departure(served: &Served, count: usize) {
    await_that("the client is gone", || {
        let events = served.events.lock().unwrap();
        events.iter().filter(|event| matches!(event, Event::ClientDisconnected { .. })).count() >= count
    });
}

/// A client in the transmission phase, over a pair of sockets or over TCP, whose raw stream is at hand.
fn enter(served: &Served, tcp: bool) -> Wire {
    if !tcp {
        return Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0;
    }
    let address = SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let bound = served.server.listen(&address).expect("listen").remove(0);
    let stream = TcpStream::connect(bound.to_string()).expect("connect");
    // The file descriptor is a stream's, whatever its family: `Wire` uses the operations that all streams have.
    Wire::enter_on(UnixStream::from(OwnedFd::from(stream)), ReplyStyle::Simple, "", &[]).0
}

/// Leaves replies unread, and a write of `[1; LEN]` behind them that the server has no budget to begin.
fn fill_up(wire: &mut Wire) {
    for _ in 0..READS {
        wire.request(Command::Read, NONE, 0, 1 << 20, &[]);
    }
    wire.request(Command::Write, NONE, AT, LEN as u64, &[1; LEN]);
}

/// A proxy between a client and the server, as `ssh -L` or a load balancer. It passes on the client's bytes, and takes
/// no replies.
struct Proxy {
    /// To the server, over TCP.
    line: UnixStream,
    /// From the client; it returns when nothing more comes.
    passing: std::thread::JoinHandle<()>,
}

/// The way in which a proxy lets go of the server, some time after its client has gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LettingGo {
    /// With replies unread: a reset.
    Reset,
    /// It ends its direction, and takes the bytes that the server still sends.
    HalfClosed,
    /// It ends both directions first.
    Shutdown,
}

impl Proxy {
    /// A client through a proxy, and the proxy.
    fn between(served: &Served) -> (Wire, Proxy) {
        // The handshake goes past the proxy.
        let mut wire = enter(served, true);
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("connect");
        let line = std::mem::replace(&mut wire.stream, UnixStream::from(OwnedFd::from(client)));
        let (mut from_client, _) = listener.accept().expect("accept");
        let mut to_server = line.try_clone().expect("a copy");
        let passing = std::thread::spawn(move || {
            let _ = std::io::copy(&mut from_client, &mut to_server);
        });
        (wire, Proxy { line, passing })
    }

    fn let_go(self, how: LettingGo) {
        let mut bytes = vec![0; 1 << 20];
        match how {
            LettingGo::Reset => {}
            LettingGo::HalfClosed => {
                self.line.shutdown(std::net::Shutdown::Write).expect("shutdown");
                let mut line = &self.line;
                while line.read(&mut bytes).is_ok_and(|count| count > 0) {}
            }
            LettingGo::Shutdown => self.line.shutdown(std::net::Shutdown::Both).expect("shutdown"),
        }
        drop(self.line);
    }
}

fn disconnect(wire: &mut Wire) {
    wire.request(Command::Disconnect, NONE, 0, 0, &[]);
}

/// Takes whatever comes up to the end; how many bytes.
fn drain(wire: &mut Wire) -> u64 {
    let mut bytes = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match wire.stream.read(&mut bytes) {
            Ok(0) | Err(_) => return total,
            Ok(count) => total += count as u64,
        }
    }
}

#[test]
fn old_write_never_lands_after_a_new_connection() {
    for tcp in [false, true] {
        for ending in [Ending::Reset, Ending::Shutdown, Ending::HalfClosed] {
            let (served, node) = serve(small_budget());
            let mut old = enter(&served, tcp);
            fill_up(&mut old);
            await_standstill(&node);
            // The client takes the connection for dead and goes on with another; the bytes in between linger.
            let (mut new, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
            assert_eq!(new.write(NONE, AT, &[1; LEN]).errno, 0);
            assert_eq!(new.write(NONE, AT, &[2; LEN]).errno, 0);
            assert_eq!(new.ask(Command::Flush, NONE, 0, 0).errno, 0);
            match ending {
                Ending::Reset => drop(old),
                Ending::Shutdown => {
                    old.stream.shutdown(std::net::Shutdown::Both).expect("shutdown");
                    drop(old);
                }
                Ending::HalfClosed => {
                    old.stream.shutdown(std::net::Shutdown::Write).expect("shutdown");
                    let taken = drain(&mut old);
                    assert!(taken >= 2 << 20, "what was begun is answered: {taken} bytes");
                }
            }
            await_departure(&served, 1);
            let found = new.ask(Command::Read, NONE, AT, LEN as u64).data;
            assert!(found == [2; LEN], "TCP {tcp}, {ending:?}: the old write lies over the new one");
            drop(new);
            served.stop();
        }
    }
}

/// The client's connection ends at a proxy, which keeps its own to the server for a while. The client's requests lie
/// there and in the proxy's buffers; the client writes over another connection meanwhile.
#[test]
fn lingering_proxy_brings_no_old_write_later() {
    for how in [LettingGo::Reset, LettingGo::HalfClosed, LettingGo::Shutdown] {
        let (served, node) = serve(small_budget());
        let (mut old, proxy) = Proxy::between(&served);
        fill_up(&mut old);
        await_standstill(&node);
        let begun = node.statistics().kind(IoKind::Write).operations;
        drop(old);
        // The proxy has passed everything on, and knows that its client has gone.
        await_that("the proxy has passed everything on", || proxy.passing.is_finished());
        let (mut new, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
        assert_eq!(new.write(NONE, AT, &[1; LEN]).errno, 0);
        assert_eq!(new.write(NONE, AT, &[2; LEN]).errno, 0);
        assert_eq!(new.ask(Command::Flush, NONE, 0, 0).errno, 0);
        let departed = |event: &Event| matches!(event, Event::ClientDisconnected { .. });
        assert!(!served.events.lock().unwrap().iter().any(departed), "{how:?}: the server can't know yet of the end");
        proxy.let_go(how);
        await_departure(&served, 1);
        let found = new.ask(Command::Read, NONE, AT, LEN as u64).data;
        assert!(found == [2; LEN], "{how:?}: the old write lies over the new one");
        let written = node.statistics().kind(IoKind::Write).operations;
        assert_eq!(written, begun + 2, "{how:?}: a write of the old connection was begun");
        drop(new);
        served.stop();
    }
}

#[test]
fn what_comes_before_a_goodbye_is_carried_out() {
    for tcp in [false, true] {
        for half_closes in [false, true] {
            let (served, node) = serve(small_budget());
            let mut wire = enter(&served, tcp);
            fill_up(&mut wire);
            disconnect(&mut wire);
            await_standstill(&node);
            if half_closes {
                wire.stream.shutdown(std::net::Shutdown::Write).expect("shutdown");
            }
            assert_eq!(drain(&mut wire), READS * ((1 << 20) + 16) + 16, "every request has its whole reply");
            await_departure(&served, 1);
            let (mut next, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
            assert!(next.ask(Command::Read, NONE, AT, LEN as u64).data == [1; LEN]);
            drop(next);
            served.stop();
        }
    }
}

#[test]
fn a_client_that_leaves_a_flood_behind_costs_nothing_more() {
    let (served, node) = serve(Limits::default());
    let mut wire = enter(&served, true);
    let request = Request { command: Command::Read, flags: NONE, cookie: 1, offset: 0, length: 65_536 };
    let (bytes, len) = request.encode(wire.headers);
    let flood = bytes[..len].repeat(150_000);
    wire.stream.set_nonblocking(true).expect("nonblocking");
    let mut sent = 0;
    let mut standstill = (0, Instant::now());
    await_that("the server takes nothing more", || {
        match wire.stream.write(&flood[sent..]) {
            Ok(count) => sent += count,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock, "{error}"),
        }
        let now = (sent, operations(&node));
        if now.0 + now.1 as usize != standstill.0 {
            standstill = (now.0 + now.1 as usize, Instant::now());
        }
        standstill.1.elapsed() > Duration::from_millis(500)
    });
    let before = operations(&node);
    let waiting = (sent / len) as u64 - before;
    assert!(waiting > 10_000, "{waiting} requests lie in the buffers");
    drop(wire);
    await_departure(&served, 1);
    let after = operations(&node);
    assert!(after - before <= 256, "{} of {waiting} requests were begun for nobody", after - before);
    let (mut next, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    assert_eq!(next.ask(Command::Read, NONE, 0, 512).errno, 0);
    drop(next);
    served.stop();
}

#[test]
fn the_same_over_a_pair_of_sockets() {
    let (served, node) = serve(small_budget());
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    served.server.serve(Socket::from_descriptor(theirs.into())).expect("serve");
    let (mut wire, _) = Wire::enter_on(ours, ReplyStyle::Simple, "", &[]);
    fill_up(&mut wire);
    await_standstill(&node);
    let before = node.statistics().kind(IoKind::Write).operations;
    drop(wire);
    await_departure(&served, 1);
    assert_eq!(node.statistics().kind(IoKind::Write).operations, before, "the write behind the reads is not begun");
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}
