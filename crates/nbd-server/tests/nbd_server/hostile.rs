// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that break the rules, go away or stand still cost only themselves.

use crate::served;

use crate::served::Served;
use crate::served::wire::Wire;
use cowshed_image::OpenRequest;
use cowshed_nbd_proto::flags::{ClientFlags, CommandFlags};
use cowshed_nbd_proto::option::{self, OptionHeader, code, rep};
use cowshed_nbd_proto::{Command, NbdErrno, ReplyStyle};
use cowshed_nbd_server::{Event, Limits, Removal, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use cowshed_testkit::waiting::await_with;
use cowshed_types::ErrorKind;
use std::io::Write;
use std::net::{SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

const SIZE: u64 = 4 << 20;
const NONE: CommandFlags = CommandFlags(0);

fn serve(limits: Limits) -> Served {
    let served = Served::start(ServerConfig { limits, ..ServerConfig::default() });
    let image = served.path("disk.raw");
    served::write_pattern(&image, SIZE, 4);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true), |_| ());
    served
}

/// Others are served as if nothing had happened.
fn expect_service(served: &Served) {
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Structured, "", &[]);
    assert_eq!(wire.ask(Command::Read, NONE, 0, 65_536).errno, 0);
}

/// Waits until an event of that kind has come.
fn expect_event(served: &Served, wanted: impl Fn(&Event) -> bool) {
    let events = || served.events.lock().unwrap();
    await_with(|| events().iter().any(&wanted), || format!("such an event: {:?}", events()));
}

fn is_refusal(event: &Event, part: &str) -> bool {
    matches!(event, Event::ClientRefused { reason, .. } if reason.contains(part))
}

fn is_loss(event: &Event, part: &str) -> bool {
    matches!(event, Event::ClientDisconnected { error: Some(error), .. } if error.contains(part))
}

#[test]
fn nonsense_in_the_handshake_ends_it() {
    let served = serve(Limits::default());
    let mut wire = Wire::connect_with(&served.socket, ClientFlags(0x80));
    wire.expect_end();
    expect_event(&served, |event| is_refusal(event, "unknown flags"));
    let mut wire = Wire::connect(&served.socket);
    wire.send(b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n");
    wire.expect_end();
    expect_event(&served, |event| is_refusal(event, "magic"));
    // Too long to be taken, and too long even to be thrown away.
    let mut wire = Wire::connect(&served.socket);
    assert_eq!(wire.outcome(code::GO, &vec![0; 100_000]), rep::ERR_TOO_BIG);
    assert_eq!(wire.outcome(code::LIST, &[]), rep::ACK);
    wire.send(&OptionHeader { option: code::GO, len: u32::MAX }.encode());
    wire.expect_end();
    expect_event(&served, |event| is_refusal(event, "4294967295"));
    // An option sent before TLS can't count as sent under it; here there is no TLS, so both are just options.
    let mut wire = Wire::connect(&served.socket);
    let mut both = option::encode(code::STARTTLS, &[]);
    both.extend(option::encode(code::LIST, &[]));
    wire.send(&both);
    assert_eq!(wire.option_replies(code::STARTTLS)[0].0, rep::ERR_POLICY);
    assert_eq!(wire.option_replies(code::LIST).last().unwrap().0, rep::ACK);
    expect_service(&served);
    served.stop();
}

#[test]
fn a_flood_of_options_ends() {
    let served = serve(Limits::default());
    let mut wire = Wire::connect(&served.socket);
    let mut answered = 0;
    let flood = option::encode(77, &[]);
    for _ in 0..5000 {
        use std::io::{Read, Write};
        if wire.stream.write_all(&flood).is_err() {
            break;
        }
        let mut header = [0; 20];
        if wire.stream.read_exact(&mut header).is_err() {
            break;
        }
        let len = u32::from_be_bytes(header[16..].try_into().unwrap());
        wire.bytes(len as usize);
        answered += 1;
    }
    assert_eq!(answered, 4096);
    expect_event(&served, |event| is_refusal(event, "options"));
    expect_service(&served);
    served.stop();
}

#[test]
fn who_never_chooses_an_export_is_sent_away() {
    let limits = Limits { handshake_timeout: Duration::from_millis(200), ..Limits::default() };
    let served = serve(limits);
    // One is silent, one sends half of an option, one goes away at once.
    let mut silent = Wire::connect(&served.socket);
    let mut halfway = Wire::connect(&served.socket);
    halfway.send(&option::encode(code::LIST, &[])[..9]);
    drop(Wire::connect(&served.socket));
    silent.expect_end();
    halfway.expect_end();
    expect_event(&served, |event| is_refusal(event, "too long"));
    served.stop();
}

#[test]
fn broken_requests_cost_the_connection_and_nothing_else() {
    let served = serve(Limits::default());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    wire.send(&[0xff; 28]);
    wire.expect_end();
    expect_event(&served, |event| is_loss(event, "magic"));
    // More data than the limit allows, announced only.
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    wire.request(Command::Write, NONE, 0, u32::MAX.into(), &[]);
    wire.expect_end();
    expect_event(&served, |event| is_loss(event, "4294967295"));
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Extended, "", &[]);
    wire.request(Command::Read, CommandFlags::PAYLOAD_LEN, 0, u64::MAX, &[]);
    wire.expect_end();
    // Gone in the middle of a header, and in the middle of data.
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    wire.send(&[0x25, 0x60]);
    drop(wire);
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    wire.request(Command::Write, NONE, 0, 1 << 20, &[5; 1000]);
    drop(wire);
    expect_event(&served, |event| is_loss(event, "in the middle"));
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let first = wire.ask(Command::Read, NONE, 0, 1000).data;
    assert_ne!(first, vec![5; 1000], "half a write is no write");
    expect_service(&served);
    served.stop();
}

#[test]
fn a_client_that_does_not_read_holds_no_other_up() {
    let limits = Limits { max_bytes_in_flight: 4 << 20, ..Limits::default() };
    let served = serve(limits);
    let (mut greedy, _) = Wire::enter(&served.socket, ReplyStyle::Structured, "", &[]);
    greedy.stream.set_nonblocking(true).expect("nonblocking");
    // As many requests as the socket takes, each for 1 MiB, and not one reply is read.
    let (mut sent, mut full) = (0, 0);
    let request =
        cowshed_nbd_proto::Request { command: Command::Read, flags: NONE, cookie: 1, offset: 0, length: 1 << 20 };
    let (bytes, len) = request.encode(greedy.headers);
    while full < 20 && sent < 100_000 {
        use std::io::Write;
        match greedy.stream.write(&bytes[..len]) {
            Ok(count) => {
                assert_eq!(count, len);
                sent += 1;
            }
            Err(_) => {
                full += 1;
                expect_service(&served);
            }
        }
    }
    assert!(full > 0, "the server stopped reading after {sent} requests");
    let resident_kib = || -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS").to_owned();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    };
    // Thousands of replies of 1 MiB each were asked for.
    assert!(resident_kib() < 1 << 20, "{} KiB", resident_kib());
    drop(greedy);
    expect_service(&served);
    served.stop();
}

#[test]
fn many_clients_that_come_and_go_leave_nothing_behind() {
    let served = serve(Limits::default());
    for _ in 0..500 {
        drop(Wire::connect(&served.socket));
    }
    expect_service(&served);
    rt::block_on(served.server.wait_until_idle());
    assert_eq!(served.server.exports()[0].clients, 0);
    served.stop();
}

#[test]
fn connections_are_limited_and_the_rest_waits() {
    let limits = Limits { max_connections: 2, ..Limits::default() };
    let served = serve(limits);
    let (first, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let (mut second, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    assert_eq!(served.server.connections(), 2);
    let socket = served.socket.clone();
    let waiting = std::thread::spawn(move || {
        let (mut third, _) = Wire::enter(&socket, ReplyStyle::Simple, "", &[]);
        third.ask(Command::Read, NONE, 0, 512).errno
    });
    assert_eq!(second.ask(Command::Read, NONE, 0, 512).errno, 0);
    drop(first);
    assert_eq!(waiting.join().expect("the third client"), 0);
    drop(second);
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}

/// Their time is far from up.
fn serve_patiently(max_connections: usize) -> Served {
    serve(Limits { max_connections, handshake_timeout: Duration::from_secs(3600), ..Limits::default() })
}

fn refusals(served: &Served) -> Vec<Event> {
    let events = served.events.lock().unwrap();
    events.iter().filter(|event| is_refusal(event, "")).cloned().collect()
}

/// Waits until there are this many connections.
fn await_connections(served: &Served, wanted: usize) {
    let connections = || served.server.connections();
    await_with(|| connections() == wanted, || format!("{} connections, not {wanted}", connections()));
}

#[test]
fn silent_connections_keep_no_place_from_others() {
    let served = serve_patiently(2);
    let silent: Vec<Wire> = (0..40).map(|_| Wire::connect(&served.socket)).collect();
    let mut clients = [(); 2].map(|()| Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0);
    for wire in &mut clients {
        assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0);
    }
    assert_eq!(served.server.connections(), 42);
    assert_eq!(refusals(&served), [], "nobody had to go");
    drop((silent, clients));
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}

/// A guest may rest for days, so no client of an export is disconnected.
#[test]
fn a_peer_that_takes_all_places_keeps_no_other_peer_out() {
    let limits = Limits { max_connections: 6, spare_connections: 2, ..Limits::default() };
    let served = serve(Limits { handshake_timeout: Duration::from_secs(3600), ..limits });
    let address = SocketAddress::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let SocketAddress::Tcp { port, .. } = served.server.listen(&address).expect("listens").remove(0) else {
        panic!("another kind of address");
    };
    let mut idle: Vec<Wire> = (0..6).map(|_| Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0).collect();
    let mut waiting = Wire::connect(&served.socket);
    waiting.send(&option::encode(code::LIST, &[]));
    for _ in 0..3 {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("a connection");
        let (mut wire, _) = Wire::enter_on(OwnedFd::from(stream).into(), ReplyStyle::Simple, "", &[]);
        assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0);
        drop(wire);
        await_connections(&served, 7);
    }
    assert_eq!(refusals(&served), [], "nobody had to go");
    assert_eq!(idle[0].ask(Command::Read, NONE, 0, 512).errno, 0);
    drop(idle.pop());
    assert_eq!(waiting.option_replies(code::LIST).last().expect("an answer").0, rep::ACK);
    drop((idle, waiting));
    served.stop();
}

#[test]
fn silent_connections_delay_a_client_by_seconds_only() {
    let served = serve_patiently(2);
    let silent: Vec<_> =
        (0..100).map(|_| std::os::unix::net::UnixStream::connect(&served.socket).expect("a connection")).collect();
    let begun = std::time::Instant::now();
    expect_service(&served);
    // One by one, in two places, they would take 50 s.
    assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
    drop(silent);
    served.stop();
}

#[test]
fn silent_connections_in_all_seats_make_room() {
    let served = serve_patiently(2);
    let mut silent: Vec<Wire> = (0..64).map(|_| Wire::connect(&served.socket)).collect();
    let mut next = Wire::connect(&served.socket);
    assert_eq!(next.outcome(code::LIST, &[]), rep::ACK);
    // Only one had to go, the first.
    let refused = refusals(&served);
    assert!(refused.len() == 1 && is_refusal(&refused[0], "silent"), "{refused:?}");
    silent[0].expect_end();
    assert_eq!(silent[63].outcome(code::LIST, &[]), rep::ACK);
    assert_eq!(served.server.connections(), 64);
    drop((silent, next));
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}

#[test]
fn silent_connections_in_all_places_make_room() {
    let served = serve_patiently(4);
    let (mut busy, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let mut silent: Vec<Wire> = (0..3).map(|_| Wire::connect(&served.socket)).collect();
    for wire in &mut silent {
        assert_eq!(wire.outcome(code::LIST, &[]), rep::ACK, "each has a place");
    }
    let (mut fifth, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    assert_eq!(fifth.ask(Command::Read, NONE, 0, 512).errno, 0);
    // Only one had to go, the first, and a client that has an export keeps its place.
    let refused = refusals(&served);
    assert!(refused.len() == 1 && is_refusal(&refused[0], "silent"), "{refused:?}");
    silent[0].expect_end();
    assert_eq!(busy.ask(Command::Read, NONE, 0, 512).errno, 0);
    assert_eq!(silent[2].outcome(code::LIST, &[]), rep::ACK);
    assert_eq!(served.server.connections(), 4);
    drop((busy, silent, fifth));
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}

#[test]
fn an_option_without_its_data_takes_no_place() {
    let served = serve_patiently(2);
    let mut halves: Vec<Wire> = (0..64).map(|_| Wire::connect(&served.socket)).collect();
    for wire in &mut halves {
        wire.send(&OptionHeader { option: code::INFO, len: 100 }.encode());
    }
    let mut next = Wire::connect(&served.socket);
    assert_eq!(next.outcome(code::LIST, &[]), rep::ACK);
    let refused = refusals(&served);
    assert!(refused.len() == 1 && is_refusal(&refused[0], "silent"), "one gave its seat up: {refused:?}");
    // Both places are there for clients that send an option.
    let mut clients = [(); 2].map(|()| Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]).0);
    drop(next);
    for wire in &mut clients {
        assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0);
    }
    drop((halves, clients));
    rt::block_on(served.server.wait_until_idle());
    served.stop();
}

/// A connection from this address of the loopback network.
fn connect_from(last_byte: u8, port: u16) -> OwnedFd {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let fd = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&fd, &SocketAddrV4::new([127, 0, 0, last_byte].into(), 0)).expect("bind");
    connect(&fd, &SocketAddrV4::new([127, 0, 0, 1].into(), port)).expect("connect");
    fd
}

#[test]
fn endless_negotiations_keep_no_other_address_out() {
    // Alone, no rule ends the negotiation of any of them.
    let served = serve_patiently(2);
    let address = SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let SocketAddress::Tcp { port, .. } = served.server.listen(&address).expect("listen").remove(0) else {
        panic!("TCP")
    };
    // All seats and places, and more than that behind them.
    let mut crowd: Vec<UnixStream> = (0..100).map(|_| connect_from(2, port).into()).collect();
    let (is_over, over) = std::sync::mpsc::channel::<()>();
    let talking = std::thread::spawn(move || {
        let begin = [&3u32.to_be_bytes()[..], &option::encode(77, &[])].concat();
        crowd.iter_mut().for_each(|stream| drop(stream.write_all(&begin)));
        while over.recv_timeout(Duration::from_millis(200)) == Err(RecvTimeoutError::Timeout) {
            crowd.iter_mut().for_each(|stream| drop(stream.write_all(&option::encode(77, &[]))));
        }
    });
    await_connections(&served, 66);
    for _ in 0..3 {
        let stream = UnixStream::from(connect_from(3, port));
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound");
        let mut wire = Wire::enter_on(stream, ReplyStyle::Structured, "", &[]).0;
        assert_eq!(wire.ask(Command::Read, NONE, 0, 65_536).errno, 0);
    }
    drop(is_over);
    talking.join().expect("the crowd goes");
    served.stop();
}

#[test]
fn waiting_client_keeps_its_time_and_frees_its_seat() {
    let timeout = Duration::from_millis(300);
    let served = serve(Limits { max_connections: 1, handshake_timeout: timeout, ..Limits::default() });
    let (mut busy, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let mut gone = Wire::connect(&served.socket);
    gone.send(&option::encode(code::LIST, &[]));
    let mut waiting = Wire::connect(&served.socket);
    waiting.send(&option::encode(code::LIST, &[]));
    await_connections(&served, 3);
    drop(gone);
    await_connections(&served, 2);
    // The time that a client in negotiation has is over by then.
    std::thread::sleep(2 * timeout);
    assert_eq!(busy.ask(Command::Read, NONE, 0, 512).errno, 0);
    drop(busy);
    assert_eq!(waiting.option_replies(code::LIST).last().expect("an answer").0, rep::ACK);
    drop(waiting);
    served.stop();
}

#[test]
fn exports_come_and_go_under_their_clients() {
    let served = serve(Limits::default());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Structured, "", &[]);
    assert_eq!(served.server.exports()[0].clients, 1);
    let error = rt::block_on(served.server.remove_export("", Removal::Safe)).expect_err("in use");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0, "still served");
    rt::block_on(served.server.remove_export("", Removal::Hard)).expect("removed");
    wire.expect_end();
    assert!(served.server.exports().is_empty());
    let mut other = Wire::connect(&served.socket);
    assert_eq!(other.outcome(code::LIST, &[]), rep::ACK);
    let request = cowshed_nbd_proto::option::InfoRequest {
        name: "",
        block_size: false,
        canonical_name: false,
        description: false,
    };
    assert_eq!(other.outcome(code::GO, &request.encode()), rep::ERR_UNKNOWN);
    let error = rt::block_on(served.server.remove_export("", Removal::Hard)).expect_err("gone");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    expect_event(&served, |event| matches!(event, Event::ExportRemoved { name } if name.is_empty()));
    // Those in negotiation don't hold the end up.
    served.stop();
    other.expect_end();
}

#[test]
fn what_was_taken_is_answered_before_the_end() {
    let served = serve(Limits::default());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let cookies: Vec<u64> =
        (0..50).map(|i| wire.request(Command::Write, NONE, i * 4096, 4096, &[i as u8; 4096])).collect();
    // The first reply is there: the rest has been sent, and some of it taken.
    let mut answered: Vec<u64> = Vec::new();
    let mut take = |wire: &mut Wire| {
        use std::io::Read;
        let mut header = [0; 16];
        wire.stream.read_exact(&mut header).ok()?;
        assert_eq!(header[4..8], [0; 4], "success");
        answered.push(u64::from_be_bytes(header[8..].try_into().unwrap()));
        Some(())
    };
    take(&mut wire).expect("a reply");
    let image = served.path("disk.raw");
    let dir = served.stop();
    while take(&mut wire).is_some() {}
    let content = std::fs::read(&image).expect("read");
    for cookie in &answered {
        let index = cookies.iter().position(|known| known == cookie).expect("a known cookie");
        assert!(content[index * 4096..][..4096] == [index as u8; 4096], "what was answered was written");
    }
    drop(dir);
}

#[test]
fn errors_of_the_disk_reach_the_client_as_numbers() {
    let served = Served::start(ServerConfig::default());
    let image = served.path("disk.raw");
    let content = served::write_pattern(&image, SIZE, 4);
    let options = format!(
        "driver=fault,file.driver=file,file.filename={},rules.0.op=read,rules.0.errno=5,rules.0.offset=64k,rules.0.len=64k,\
         rules.1.op=write,rules.1.errno=28,rules.1.offset=1M,rules.1.len=1M,rules.2.op=flush,rules.2.errno=122",
        image.display()
    );
    served.export(OpenRequest::image_opts(&options).expect("options").writable(true), |_| ());
    for style in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
        let (mut wire, _) = Wire::enter(&served.socket, style, "", &[]);
        assert_eq!(wire.ask(Command::Read, NONE, 60 << 10, 64 << 10).errno, NbdErrno::EIO.0);
        assert_eq!(wire.write(NONE, 1 << 20, &[1; 512]).errno, NbdErrno::ENOSPC.0);
        let reply = wire.ask(Command::Flush, NONE, 0, 0);
        assert_eq!(reply.errno, NbdErrno::ENOSPC.0);
        assert!(!reply.message.contains("disk.raw"), "strangers don't learn names: {}", reply.message);
        assert!(wire.ask(Command::Read, NONE, 0, 4096).data == content[..4096], "the connection lives on");
    }
    rt::block_on(served.server.stop(served::GRACE)).expect_err("the last flush fails too");
}
