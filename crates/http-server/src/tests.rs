// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server with clients that speak by hand; curl, browsers and QEMU are tested with the tool.

mod versions;

use crate::{Content, Event, EventHandler, Limits, Reading, Server, ServerConfig, Version};
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::LocalBoxFuture;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A wait that is over before means a fault.
const PATIENCE: Duration = Duration::from_secs(30);

/// A disk whose bytes have their own offsets.
#[derive(Debug, Default)]
struct Pattern {
    len: u64,
    version: AtomicU64,
    /// Each read of the second half makes another version.
    changes: bool,
    is_unsure: bool,
    /// Something may write to it, but doesn't.
    is_in_use: bool,
    /// Another source has taken its place.
    was_replaced: AtomicBool,
    fails: AtomicBool,
    /// Reads find a shorter disk.
    shrinks: bool,
    /// A write may be under way.
    is_amid_write: AtomicBool,
    /// This number of looks finds the content changed just now.
    fresh_looks: AtomicU64,
}

fn byte(at: u64) -> u8 {
    (at % 251) as u8
}

fn bytes(range: std::ops::Range<u64>) -> Vec<u8> {
    range.map(byte).collect()
}

struct Open(Arc<Pattern>);

impl Content for Arc<Pattern> {
    fn open(&self) -> Box<dyn Reading> {
        Box::new(Open(Arc::clone(self)))
    }
}

impl Reading for Open {
    fn size(&self) -> u64 {
        self.0.len
    }

    fn version(&self) -> Version {
        Version {
            number: self.0.version.load(Ordering::SeqCst),
            may_change: self.0.changes || self.0.is_unsure || self.0.is_in_use,
            is_unsure: self.0.is_unsure,
        }
    }

    fn is_settled(&self) -> bool {
        let look = |left: u64| left.checked_sub(1);
        self.0.fresh_looks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, look).is_err()
    }

    fn may_be_amid_write(&self) -> bool {
        self.0.is_amid_write.load(Ordering::SeqCst)
    }

    fn check(&self) -> Result<()> {
        match self.0.was_replaced.load(Ordering::SeqCst) {
            true => Err(Error::new(ErrorKind::Io, "it is another disk")),
            false => Ok(()),
        }
    }

    fn read(&self, offset: u64, mut buf: IoBuf) -> LocalBoxFuture<'_, (Result<()>, IoBuf)> {
        Box::pin(async move {
            if self.0.fails.load(Ordering::SeqCst) {
                return (Err(Error::new(ErrorKind::Io, "a sector is unreadable")), buf);
            }
            if self.0.shrinks {
                self.0.version.fetch_add(1, Ordering::SeqCst);
                return (Err(Error::invalid_argument("past the end of the disk")), buf);
            }
            for (at, place) in (offset..).zip(buf.iter_mut()) {
                *place = byte(at);
            }
            if self.0.changes && offset >= self.0.len / 2 {
                self.0.version.fetch_add(1, Ordering::SeqCst);
            }
            (Ok(()), buf)
        })
    }
}

struct Served {
    server: Server,
    address: String,
    content: Arc<Pattern>,
}

fn serve(pattern: Pattern, limits: Limits) -> Served {
    let server = Server::start(ServerConfig { limits, ..ServerConfig::default() }).expect("a thread");
    listening(server, Arc::new(pattern))
}

fn listening(server: Server, content: Arc<Pattern>) -> Served {
    server.add("/disk", Arc::new(Arc::clone(&content))).expect("a free path");
    let address = SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let Some(SocketAddress::Tcp { port, .. }) = server.listen(&address).expect("a free port").pop() else {
        panic!("a port")
    };
    Served { server, address: format!("127.0.0.1:{port}"), content }
}

fn small() -> Limits {
    Limits { piece_bytes: 1000, ..Limits::default() }
}

/// A response: the status line and fields, and the content.
#[derive(Debug)]
struct Response {
    head: String,
    body: Vec<u8>,
}

impl Response {
    fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.split_once(": ").filter(|(field, _)| *field == name)).map(|(_, v)| v)
    }
}

struct Client(TcpStream);

impl Served {
    fn client(&self) -> Client {
        let stream = TcpStream::connect(&self.address).expect("a server");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        Client(stream)
    }

    fn stop(self) {
        rt::block_on(self.server.stop(PATIENCE));
    }
}

impl Client {
    fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).expect("the server takes it");
    }

    /// One response, by its length.
    fn response(&mut self, has_body: bool) -> Response {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0
                .read_exact(&mut byte)
                .unwrap_or_else(|error| panic!("{error} after {:?}", String::from_utf8_lossy(&head)));
            head.push(byte[0]);
        }
        let mut response = Response { head: String::from_utf8(head).expect("text"), body: Vec::new() };
        let len = response.field("Content-Length").map_or(0, |len| len.parse().expect("a number"));
        response.body = vec![0; if has_body { len } else { 0 }];
        self.0.read_exact(&mut response.body).expect("the content");
        response
    }

    fn get_by(&mut self, method: &str, path: &str) -> Response {
        self.send(&format!("{method} {path} HTTP/1.1\r\nHost: h\r\n\r\n"));
        self.response(true)
    }

    fn get(&mut self, path: &str, fields: &str) -> Response {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: h\r\n{fields}\r\n"));
        self.response(true)
    }

    /// Waits until its system has so many bytes that the client hasn't read.
    fn await_bytes(&mut self, count: usize) {
        let (mut waiting, before) = (vec![0; count], rt::now());
        while self.0.peek(&mut waiting).expect("bytes") < count {
            assert!(rt::now() - before < PATIENCE, "{count} bytes");
            std::thread::yield_now();
        }
    }

    fn is_at_end(&mut self) -> bool {
        self.0.read(&mut [0]).is_ok_and(|count| count == 0)
    }
}

#[test]
fn a_connection_serves_many_requests() {
    let served = serve(Pattern { len: 10_500, ..Pattern::default() }, small());
    let mut client = served.client();
    let all = client.get("/disk", "");
    assert_eq!((all.status(), &all.body), (200, &bytes(0..10_500)));
    assert!(all.field("Date").is_some_and(|date| date.ends_with(" GMT")), "{}", all.head);
    let part = client.get("/disk", "Range: bytes=999-3001\r\n");
    assert_eq!((part.status(), &part.body), (206, &bytes(999..3002)));
    let tag = all.field("ETag").expect("a tag").to_owned();
    assert_eq!(client.get("/disk", &format!("If-None-Match: {tag}\r\n")).status(), 304);
    assert_eq!(client.get("/other", "").status(), 404);
    client.send("HEAD /disk HTTP/1.1\r\nHost: h\r\n\r\nGET /disk HTTP/1.1\r\nHost: h\r\nRange: bytes=-1\r\nConnection: close\r\n\r\n");
    assert_eq!(client.response(false).field("Content-Length"), Some("10500"));
    assert_eq!(client.response(true).body, bytes(10_499..10_500));
    assert!(client.is_at_end());
    served.stop();
}

#[test]
fn several_ranges_come_in_one_response() {
    let served = serve(Pattern { len: 5000, ..Pattern::default() }, small());
    let response = served.client().get("/disk", "Range: bytes=0-1,1500-3999\r\n");
    assert_eq!(response.status(), 206);
    let kind = response.field("Content-Type").expect("a type");
    let boundary = kind.strip_prefix("multipart/byteranges; boundary=").expect("several ranges");
    let mut expected = Vec::new();
    for part in [0..2, 1500..4000] {
        let head = format!(
            "\r\n--{boundary}\r\nContent-Type: application/octet-stream\r\nContent-Range: bytes {}-{}/5000\r\n\r\n",
            part.start,
            part.end - 1
        );
        expected.extend_from_slice(head.as_bytes());
        expected.extend(bytes(part));
    }
    expected.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    assert_eq!(response.body, expected);
    // The content can't hold the separator of the next one.
    let again = served.client().get("/disk", "Range: bytes=0-1,1500-3999\r\n");
    assert_ne!(again.field("Content-Type").expect("a type"), kind);
    served.stop();
}

#[test]
fn a_browser_gets_the_page_and_others_the_content() {
    let served = serve(Pattern { len: 500, ..Pattern::default() }, small());
    let page = Arc::new(Arc::new(Pattern { len: 7, ..Pattern::default() }));
    let content = Arc::new(Arc::clone(&served.content));
    served.server.add_with_page("/both", content, Some(page)).expect("a free path");
    let accept = "Accept: text/html, */*\r\n";
    let mut client = served.client();
    for (path, fields, len) in
        [("/both", accept, 7), ("/both", "", 500), ("/both?download", accept, 500), ("/both?other", accept, 7)]
    {
        let response = client.get(path, fields);
        assert_eq!((response.status(), response.body.len()), (200, len), "{path} {fields}");
        assert_eq!(response.field("Vary"), Some("Accept"));
    }
    served.stop();
}

#[test]
fn the_owner_learns_what_was_sent() {
    let told: Arc<std::sync::Mutex<Vec<String>>> = Arc::default();
    let events = Arc::clone(&told);
    let handler = EventHandler(Arc::new(move |event: &Event<'_>| {
        events.lock().expect("no panic").push(match event {
            Event::Sent { path, range, len, .. } => format!("{path} {}-{} of {len}", range.start, range.end),
            Event::Resumed { path, start, .. } => format!("{path} resumed at {start}"),
            Event::Ended { path, is_complete, .. } => format!("{path} ended {is_complete}"),
            Event::Failed { path, error, .. } => format!("{path} failed {error}"),
        });
    }));
    let server = Server::start(ServerConfig { limits: small(), events: Some(handler), ..ServerConfig::default() })
        .expect("a thread");
    let content = Arc::new(Pattern { len: 2500, ..Pattern::default() });
    let served = listening(server, content);
    assert_eq!(served.client().get("/disk", "Range: bytes=100-\r\n").body, bytes(100..2500));
    served.client().get("/other", "");
    served.stop();
    let told = told.lock().expect("no panic");
    assert_eq!(
        *told,
        ["/disk 100-1100 of 2500", "/disk 1100-2100 of 2500", "/disk 2100-2500 of 2500", "/disk ended true"]
    );
}

/// The range was there when the client was told of it.
#[test]
fn a_disk_that_shrinks_while_it_is_sent_is_another_version() {
    let (sender, told) = std::sync::mpsc::channel();
    let handler = EventHandler(Arc::new(move |event: &Event<'_>| {
        if let Event::Failed { error, .. } = event {
            sender.send((*error).to_string()).expect("the test waits");
        }
    }));
    let config = ServerConfig { limits: small(), events: Some(handler), ..ServerConfig::default() };
    let content = Arc::new(Pattern { len: 5000, shrinks: true, ..Pattern::default() });
    let served = listening(Server::start(config).expect("a thread"), content);
    assert_eq!(served.client().get("/disk", "").status(), 500);
    assert_eq!(told.recv_timeout(PATIENCE).expect("an event"), "the disk was written to while it was sent");
    served.stop();
}

#[test]
fn what_is_no_request_ends_the_connection() {
    let served = serve(Pattern { len: 10, ..Pattern::default() }, small());
    for (sent, status) in [
        ("hello\r\n\r\n", 400),
        ("GET /disk HTTP/3.0\r\nHost: h\r\n\r\n", 505),
        // The beginning of HTTP/2, HTTP/0.9, and a hello of TLS.
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        ("GET /disk\r\n\r\n", 400),
        ("\u{16}\u{3}\u{1}\u{2}\0\u{1}", 400),
        ("GET /disk HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nGET ", 413),
        ("POST /disk HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\nGET ", 405),
    ] {
        let mut client = served.client();
        client.send(sent);
        assert_eq!(client.response(true).status(), status, "{sent}");
        assert!(client.is_at_end(), "{sent}");
    }
    served.stop();
}

#[test]
fn a_disk_that_is_written_to_is_not_sent_as_one() {
    let served = serve(Pattern { len: 5000, changes: true, ..Pattern::default() }, small());
    let mut client = served.client();
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut all = Vec::new();
    client.0.read_to_end(&mut all).expect("an end");
    let text = String::from_utf8_lossy(&all);
    assert!(text.contains("ETag: W/\"") && text.contains("Content-Length: 5000"), "{text}");
    let body = all.len() - (text.find("\r\n\r\n").expect("a head") + 4);
    assert!((1..5000).contains(&body), "the client must see that something is missing");
    served.stop();
}

#[test]
fn replaced_disk_without_bytes_is_not_sent() {
    let served = serve(Pattern::default(), small());
    assert_eq!(served.client().get("/disk", "").status(), 200);
    served.content.was_replaced.store(true, Ordering::SeqCst);
    assert_eq!(served.client().get("/disk", "").status(), 500);
    served.stop();
}

#[test]
fn answers_to_head_have_no_content() {
    let server = Server::start(ServerConfig { local_names: Some(Vec::new()), ..ServerConfig::default() });
    let served = listening(server.expect("a thread"), Arc::new(Pattern { len: 5000, ..Pattern::default() }));
    for (fields, status) in [("Host: rebound.example.org\r\n", 421), ("Host: localhost\r\nContent-Length: 4\r\n", 413)]
    {
        for method in ["HEAD", "GET"] {
            let mut client = served.client();
            client.send(&format!("{method} /disk HTTP/1.1\r\n{fields}\r\n"));
            let response = client.response(method == "GET");
            assert_eq!((response.status(), response.body.is_empty()), (status, method == "HEAD"));
            assert!(client.is_at_end(), "{method} {status}");
        }
    }
    served.stop();
}

/// A server that tells what has arrived, and its events.
fn confirming(limits: Limits, len: u64) -> (Served, std::sync::mpsc::Receiver<bool>) {
    let (sender, told) = std::sync::mpsc::channel();
    let handler = EventHandler(Arc::new(move |event: &Event<'_>| {
        if let Event::Ended { is_complete, .. } = event {
            sender.send(*is_complete).expect("the test waits");
        }
    }));
    let config = ServerConfig { limits, events: Some(handler), confirms: true, ..ServerConfig::default() };
    (listening(Server::start(config).expect("a thread"), Arc::new(Pattern { len, ..Pattern::default() })), told)
}

#[test]
fn what_has_arrived_its_clients_end_tells() {
    const LEN: u64 = 50_000;
    let (served, told) = confirming(Limits { idle_timeout: PATIENCE * 2, ..Limits::default() }, LEN);
    let told = || told.recv_timeout(PATIENCE).expect("an event");
    let request = "GET /disk HTTP/1.1\r\nHost: h\r\n\r\n";
    let all = served.client().get("/disk", "");
    assert_eq!((all.body.len() as u64, all.field("Connection")), (LEN, Some("close")));
    assert!(told());
    // Its system has all of it, but not the client.
    let mut client = served.client();
    client.send(request);
    client.await_bytes(LEN as usize);
    drop(client);
    assert!(!told());
    let mut client = served.client();
    client.get("/disk", "");
    client.send(request);
    drop(client);
    assert!(told(), "a further request changes nothing");
    // Pieces are told of together, with the end.
    let mut client = served.client();
    assert_eq!(client.get("/disk", "Range: bytes=0-99\r\n").field("Connection"), Some("keep-alive"));
    assert_eq!(client.get("/disk", "Range: bytes=100-199\r\n").body, bytes(100..200));
    drop(client);
    assert!(told());
    let mut client = served.client();
    client.get("/disk", "Range: bytes=0-99\r\n");
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\nRange: bytes=0-9\r\n\r\n");
    client.await_bytes(10);
    drop(client);
    assert!(!told());
    // A client that waits for the server's end gets it.
    let mut client = served.client();
    client.get("/disk", "");
    assert!(client.is_at_end());
    drop(client);
    assert!(told());
    served.stop();
}

#[test]
fn of_a_client_that_stays_the_system_knows() {
    let limits = Limits { stall_limit: Duration::from_millis(300), ..Limits::default() };
    let (served, told) = confirming(limits, 50_000);
    let mut client = served.client();
    client.get("/disk", "");
    assert!(told.recv_timeout(PATIENCE).expect("an event"), "it has all, and stays");
    served.stop();
}

#[test]
fn end_before_the_bytes_says_nothing_of_them() {
    const LEN: u64 = 50_000;
    let ended = |served: &Served| {
        let mut client = served.client();
        client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
        client.0.shutdown(std::net::Shutdown::Write).expect("a connection");
        client
    };
    let limits = Limits { stall_limit: Duration::from_secs(2), ..Limits::default() };
    let (served, told) = confirming(limits, LEN);
    let mut client = ended(&served);
    assert_eq!(client.response(true).body.len() as u64, LEN);
    assert!(told.recv_timeout(PATIENCE).expect("an event"), "it stays");
    served.stop();
    // On a busy machine a client may get its turn late: the limit is longer than that.
    let (served, told) = confirming(Limits { stall_limit: PATIENCE, ..limits }, LEN);
    let mut client = ended(&served);
    client.await_bytes(LEN as usize);
    drop(client);
    assert!(!told.recv_timeout(PATIENCE).expect("an event"), "it has read nothing");
    served.stop();
}

/// The last bytes lie in the system's buffers for longer than a client may take for one piece.
#[test]
fn slow_client_is_waited_for_to_its_end() {
    let limits = Limits { stall_limit: Duration::from_millis(500), ..Limits::default() };
    let (served, told) = confirming(limits, 3 << 20);
    let mut client = served.client();
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
    let (mut piece, mut count) = (vec![0; 64 << 10], 0);
    while count < 3 << 20 {
        count += client.0.read(&mut piece).expect("bytes");
        // A load: a slow network.
        std::thread::sleep(Duration::from_millis(100));
    }
    while !client.is_at_end() {}
    drop(client);
    assert!(told.recv_timeout(PATIENCE).expect("an event"));
    served.stop();
}

#[test]
fn client_that_takes_nothing_ends_with_its_server() {
    let (served, told) = confirming(Limits::default(), 3 << 19);
    let mut client = served.client();
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
    client.await_bytes(50_000);
    let before = rt::now();
    rt::block_on(served.server.stop(Duration::from_millis(200)));
    assert!(rt::now() - before < Duration::from_secs(10));
    assert!(!told.recv_timeout(PATIENCE).expect("an event"));
}

#[test]
fn clients_that_stay_after_their_bytes_make_room() {
    let (served, _told) = confirming(Limits { max_connections: 2, ..Limits::default() }, 50_000);
    let mut others = [served.client(), served.client()];
    for other in &mut others {
        assert_eq!(other.get("/disk", "Range: bytes=-1\r\n").body.len(), 1);
    }
    let before = rt::now();
    assert_eq!(served.client().get("/disk", "").body.len(), 50_000);
    assert!(rt::now() - before < Duration::from_secs(10));
    drop(others);
    served.stop();
}

/// They die in the middle of a response, or of a request.
#[test]
fn clients_that_break_off_leave_room_for_others() {
    let limits = Limits { max_connections: 2, ..small() };
    let served = serve(Pattern { len: 64 << 20, ..Pattern::default() }, limits);
    for round in 0..20 {
        let mut client = served.client();
        client.send(if round % 2 == 0 { "GET /disk HTTP/1.1\r\nHost: h\r\n\r\n" } else { "GET /di" });
        if round % 2 == 0 {
            client.await_bytes(1);
        }
    }
    assert_eq!(served.client().get("/disk", "Range: bytes=5-9\r\n").body, bytes(5..10));
    served.stop();
}

#[test]
fn names_of_other_hosts_are_refused_where_told() {
    let local_names = Some(vec!["disks.example.org".to_owned()]);
    let config = ServerConfig { local_names, ..ServerConfig::default() };
    let served =
        listening(Server::start(config).expect("a thread"), Arc::new(Pattern { len: 5000, ..Pattern::default() }));
    let status = |host: &str| {
        let mut client = served.client();
        client.send(&format!("GET /disk HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        client.response(true).status()
    };
    assert_eq!([&served.address, "localhost:80", "[::1]", "disks.example.org:80"].map(status), [200; 4]);
    assert_eq!(["rebound.example.org", "localhost.example.org:80"].map(status), [421; 2]);
    served.stop();
}

#[test]
fn unreadable_disk_is_a_server_error() {
    let served = serve(Pattern { len: 5000, ..Pattern::default() }, small());
    served.content.fails.store(true, Ordering::SeqCst);
    let mut client = served.client();
    // Nothing was read, so nothing of the disk is promised.
    assert_eq!(client.get("/disk", "").status(), 500);
    assert!(client.is_at_end());
    served.content.fails.store(false, Ordering::SeqCst);
    assert_eq!(served.client().get("/disk", "").body, bytes(0..5000));
    served.stop();
}

#[test]
fn idle_clients_make_room_and_slow_heads_are_cut() {
    let limits = Limits { max_connections: 2, head_timeout: Duration::from_millis(200), ..small() };
    let served = serve(Pattern { len: 10, ..Pattern::default() }, limits);
    let mut idle = served.client();
    assert_eq!(idle.get("/disk", "").status(), 200);
    let mut slow = served.client();
    slow.send("GET /di");
    let mut third = served.client();
    assert_eq!(third.get("/disk", "").status(), 200);
    assert!(idle.is_at_end(), "the idle one has made room");
    assert_eq!(slow.response(true).status(), 408);
    assert!(slow.is_at_end());
    served.stop();
}

#[test]
fn silent_client_is_cut_and_never_delays_a_stop() {
    let limits = Limits { stall_limit: Duration::from_millis(200), ..Limits::default() };
    let served = serve(Pattern { len: 1 << 40, ..Pattern::default() }, limits);
    let mut client = served.client();
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
    // Its place is free once it was cut, or the stop would take as long as its grace.
    let before = rt::now();
    served.stop();
    assert!(rt::now() - before < PATIENCE);
}

#[test]
fn responses_under_way_end_before_the_server_does() {
    let served = serve(Pattern { len: 64 << 20, ..Pattern::default() }, Limits::default());
    let mut client = served.client();
    let mut idle = served.client();
    assert_eq!(idle.get("/disk", "Range: bytes=0-0\r\n").status(), 206);
    client.send("GET /disk HTTP/1.1\r\nHost: h\r\n\r\n");
    let mut first = [0; 1];
    client.0.read_exact(&mut first).expect("a response has begun");
    let before = rt::now();
    let stopping = std::thread::spawn(move || served.stop());
    let mut rest = Vec::new();
    client.0.read_to_end(&mut rest).expect("all of it");
    assert!(rest.len() > 64 << 20, "{} bytes", rest.len());
    assert!(idle.is_at_end());
    stopping.join().expect("a stop");
    assert!(rt::now() - before < PATIENCE, "the connection ends with its response");
}

/// Two bytes are sent for each.
struct Doubled(Arc<Pattern>);

impl Content for Doubled {
    fn open(&self) -> Box<dyn Reading> {
        Box::new(Open(Arc::clone(&self.0)))
    }

    fn packing(&self) -> Option<crate::Packing> {
        Some(Arc::new(|bytes: &[u8]| Ok([bytes, b"|"].concat())))
    }
}

#[test]
fn what_is_made_on_the_way_comes_in_chunks() {
    let served = serve(Pattern { len: 2500, ..Pattern::default() }, small());
    let empty = Arc::new(Pattern::default());
    served.server.add("/packed", Arc::new(Doubled(Arc::clone(&served.content)))).expect("a free path");
    served.server.add("/empty", Arc::new(Doubled(empty))).expect("a free path");
    let all = |request: &str| {
        let mut client = served.client();
        client.send(request);
        let mut response = Vec::new();
        client.0.read_to_end(&mut response).expect("an end");
        let at = response.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head") + 4;
        (String::from_utf8(response[..at].to_vec()).expect("text"), response[at..].to_vec())
    };
    let packed = [&bytes(0..1000)[..], b"|", &bytes(1000..2000), b"|", &bytes(2000..2500), b"|"].concat();
    let (head, old) = all("GET /packed HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 505 ") && head.contains("Connection: close\r\n"), "{head}");
    assert!(!old.is_empty() && !old.contains(&b'|'), "the end of the connection would be that of the content");
    let (head, old) = all("HEAD /packed HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 505 ") && old.is_empty(), "{head}");
    let (head, chunked) = all("GET /packed HTTP/1.1\r\nHost: h\r\nRange: bytes=5-9\r\nConnection: close\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && head.contains("Transfer-Encoding: chunked\r\n"), "{head}");
    let chunks = [
        b"3e9\r\n",
        &packed[..1001],
        b"\r\n3e9\r\n",
        &packed[1001..2002],
        b"\r\n1f5\r\n",
        &packed[2002..],
        b"\r\n0\r\n\r\n",
    ];
    assert_eq!(chunked, chunks.concat());
    let (_, chunked) = all("GET /empty HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert_eq!(chunked, b"1\r\n|\r\n0\r\n\r\n");
    // A client must not take a part that broke off for the whole.
    served.content.fails.store(true, Ordering::SeqCst);
    let (head, _) = all("GET /packed HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 500 "), "{head}");
    // Between two pieces, the same: the chunk that ends a response doesn't come.
    let changing = Arc::new(Pattern { len: 2500, changes: true, ..Pattern::default() });
    served.server.add("/changing", Arc::new(Doubled(changing))).expect("a free path");
    let (head, cut) = all("GET /changing HTTP/1.1\r\nHost: h\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 ") && cut.starts_with(b"3e9\r\n"), "{head}");
    assert!(!cut.ends_with(b"0\r\n\r\n"), "{} bytes", cut.len());
    served.stop();
}
