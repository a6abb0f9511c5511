// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client, from its first request to its last; and the places of all.

use crate::content::{Content, Packing, Reading, Version};
use crate::proto::answer::{About, Answer, AnswerPart, Tag, answer, message, phrase};
use crate::proto::request::{MAX_HEAD_BYTES, Request, parse};
use crate::server::{Contents, Event, ServerConfig};
use cowshed_nbd::Stream;
use cowshed_storage::rt::{self, within};
use cowshed_storage::signal::lock;
use cowshed_storage::{Dispatch, IoBuf, Socket, Want};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::join;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// The query that asks for the content where there is a page besides.
const DOWNLOAD: &str = "download";

/// The time that a client may take to send the head of a request while others wait for its place.
const HEAD_PATIENCE: Duration = Duration::from_secs(1);

/// The time that a client may take to receive the end of the encryption.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Received at once.
const RECEIVE_BYTES: usize = 4096;

/// Hosts whose versions are known.
const MOST_HOSTS: usize = 1024;

fn host_of(peer: &str) -> &str {
    peer.rsplit_once(':').map_or(peer, |(host, _)| host)
}

/// The contents that the server serves, and its settings.
pub(crate) struct Site {
    pub contents: Arc<Contents>,
    pub config: ServerConfig,
}

/// The clients of one server; its thread's own.
pub(crate) struct Clients {
    site: Site,
    /// In the order of the last change between waiting and answering.
    seated: RefCell<Vec<Rc<Seat>>>,
    waiting: RefCell<Vec<Waker>>,
    /// The versions of which a host has had bytes, by the host and the path.
    begun: RefCell<BTreeMap<(String, String), Begun>>,
    is_closing: Cell<bool>,
}

/// The versions of a content of which a host has had bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begun {
    One(u64),
    /// Which of them a file of this host has is unknown.
    Several,
}

struct Seat {
    socket: Socket,
    /// It waits for a request, and has none of its bytes.
    is_idle: Cell<bool>,
    /// Since then it has a part of a request's head.
    head_since: Cell<Option<Duration>>,
    was_cut: Cell<bool>,
}

impl Seat {
    fn cut(&self) {
        self.was_cut.set(true);
        self.socket.shutdown();
    }
}

/// The right of one client to be served; dropping it lets the next one in.
pub(crate) struct ConnectionPermit {
    clients: Rc<Clients>,
    seat: Rc<Seat>,
}

impl Clients {
    pub(crate) fn new(site: Site) -> Clients {
        Clients {
            site,
            seated: RefCell::default(),
            waiting: RefCell::default(),
            begun: RefCell::default(),
            is_closing: Cell::new(false),
        }
    }

    /// Waits for room; the client that has been idle for longest makes it, or else one that sends a request too slowly.
    pub(crate) async fn permit(self: &Rc<Self>, socket: Socket) -> ConnectionPermit {
        while within(HEAD_PATIENCE, self.room()).await.is_none() {
            self.cut_slowest_head();
        }
        let (is_idle, head_since, was_cut) = (Cell::new(true), Cell::default(), Cell::new(false));
        let seat = Rc::new(Seat { socket, is_idle, head_since, was_cut });
        self.seated.borrow_mut().push(Rc::clone(&seat));
        ConnectionPermit { clients: Rc::clone(self), seat }
    }

    /// Cuts the client that has been sending the head of a request for longest, if that is longer than usual.
    fn cut_slowest_head(&self) {
        let seated = self.seated.borrow();
        let heads = seated.iter().filter(|seat| !seat.was_cut.get());
        let slowest = heads.filter_map(|seat| Some((seat.head_since.get()?, seat))).min_by_key(|(since, _)| *since);
        if let Some((since, seat)) = slowest
            && since + HEAD_PATIENCE <= rt::now()
        {
            seat.cut();
        }
    }

    async fn room(&self) {
        self.until(|seated| {
            let is_full = seated.len() >= self.site.config.limits.max_connections;
            if is_full
                && !seated.iter().any(|seat| seat.was_cut.get())
                && let Some(idle) = seated.iter().find(|seat| seat.is_idle.get())
            {
                idle.cut();
            }
            !is_full
        })
        .await;
    }

    /// Notes that a client gets bytes of a version.
    fn note_version(&self, peer: &str, path: &str, version: u64) {
        let mut begun = self.begun.borrow_mut();
        let key = (host_of(peer).to_owned(), path.to_owned());
        if begun.len() >= MOST_HOSTS && !begun.contains_key(&key) {
            begun.pop_first();
        }
        let begun = begun.entry(key).or_insert(Begun::One(version));
        if *begun != Begun::One(version) {
            *begun = Begun::Several;
        }
    }

    /// True where the client's host has bytes of another version.
    fn has_another_version(&self, peer: &str, path: &str, version: u64) -> bool {
        let key = (host_of(peer).to_owned(), path.to_owned());
        self.begun.borrow().get(&key).is_some_and(|known| *known != Begun::One(version))
    }

    /// The name of the export in log lines.
    pub(crate) fn export(&self) -> Option<&str> {
        self.site.config.export.as_deref()
    }

    pub(crate) async fn all_gone(&self) {
        self.until(<[Rc<Seat>]>::is_empty).await;
    }

    /// From now on a connection ends after its response.
    pub(crate) fn close_idle(&self) {
        self.is_closing.set(true);
        self.seated.borrow().iter().filter(|seat| seat.is_idle.get()).for_each(|seat| seat.cut());
    }

    pub(crate) fn cut_all(&self) {
        self.seated.borrow().iter().for_each(|seat| seat.cut());
    }

    /// Waits until the seats satisfy `wanted`; looked at after each change.
    async fn until(&self, wanted: impl Fn(&[Rc<Seat>]) -> bool) {
        poll_fn(|context| {
            if wanted(&self.seated.borrow()) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn changed(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl ConnectionPermit {
    /// Notes whether the client is between two requests.
    fn set_idle(&self, is_idle: bool) {
        if self.seat.is_idle.replace(is_idle) == is_idle {
            return;
        }
        let mut seated = self.clients.seated.borrow_mut();
        seated.retain(|seat| !Rc::ptr_eq(seat, &self.seat));
        seated.push(Rc::clone(&self.seat));
        drop(seated);
        self.clients.changed();
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.clients.seated.borrow_mut().retain(|seat| !Rc::ptr_eq(seat, &self.seat));
        self.clients.changed();
    }
}

/// Serves one client until it leaves, or its time is up.
pub(crate) async fn serve(permit: ConnectionPermit, socket: Socket) {
    let peer = socket.peer();
    socket.keep_alive();
    tracing::debug!(peer, "HTTP client connected");
    let stream = Stream::new(socket);
    let (received, has_sent) = (Vec::new(), Cell::new(false));
    let mut connection = Connection { permit: &permit, stream: &stream, peer: &peer, received, has_sent };
    match connection.run().await {
        Ok(()) => tracing::debug!(peer, "HTTP client left"),
        Err(error) => tracing::info!(peer, export = permit.clients.export(), %error, "HTTP client lost"),
    }
    // The client may take nothing any more, nor the end of the encryption.
    if within(CLOSE_LIMIT, stream.close()).await.is_none() {
        stream.socket().shutdown();
    }
}

struct Connection<'a> {
    permit: &'a ConnectionPermit,
    stream: &'a Stream,
    peer: &'a str,
    /// Bytes that no request has used yet.
    received: Vec<u8>,
    /// Something of the response was sent.
    has_sent: Cell<bool>,
}

fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Limit, format!("the client {what}"))
}

impl Connection<'_> {
    fn config(&self) -> &ServerConfig {
        &self.permit.clients.site.config
    }

    async fn run(&mut self) -> Result<()> {
        if let Some(tls) = &self.config().tls {
            let started = within(self.config().limits.head_timeout, self.stream.start_server_tls(tls)).await;
            started.ok_or_else(|| timed_out("did not encrypt in time"))??;
        }
        loop {
            let request = match self.request().await? {
                Ok(Some(request)) => request,
                Ok(None) => return Ok(()),
                Err(refused) => return self.refuse(&refused).await,
            };
            let keeps_alive = request.keeps_alive && !request.has_content && !self.permit.clients.is_closing.get();
            self.respond(&request, keeps_alive).await?;
            if !keeps_alive || self.permit.clients.is_closing.get() {
                return Ok(());
            }
        }
    }

    /// The next request; `None` when the client has left. An answer that ends the connection when it is no request.
    async fn request(&mut self) -> Result<std::result::Result<Option<Request>, Answer>> {
        let limits = self.config().limits;
        let mut deadline = None;
        loop {
            match parse(&self.received) {
                Ok(Some((request, len))) => {
                    self.received.drain(..len);
                    self.permit.set_idle(false);
                    self.permit.seat.head_since.set(None);
                    return Ok(Ok(Some(request)));
                }
                Ok(None) => {}
                Err(refused) => return Ok(Err(message(refused.status, refused.reason))),
            }
            let is_first = self.received.is_empty();
            self.permit.set_idle(is_first);
            if !is_first && self.permit.seat.head_since.get().is_none() {
                self.permit.seat.head_since.set(Some(rt::now()));
            }
            let limit = if is_first { limits.idle_timeout } else { limits.head_timeout };
            let end = *deadline.get_or_insert_with(|| rt::now() + limit);
            let buf = IoBuf::zeroed(RECEIVE_BYTES);
            let received = within(end.saturating_sub(rt::now()), self.stream.receive(buf, Want::Some)).await;
            match received {
                None if is_first => return Ok(Ok(None)),
                None => return Ok(Err(message(408, "the request did not come in time"))),
                Some((result, buf)) => match result? {
                    0 => return Ok(Ok(None)),
                    count => self.received.extend_from_slice(&buf[..count.min(MAX_HEAD_BYTES)]),
                },
            }
            if is_first {
                // The head's own time begins with its first byte.
                deadline = None;
            }
        }
    }

    async fn refuse(&self, refused: &Answer) -> Result<()> {
        let (peer, export) = (self.peer, self.permit.clients.export());
        tracing::info!(peer, export, status = refused.status, "HTTP request refused");
        self.send_answer(refused, None, false).await
    }

    async fn respond(&self, request: &Request, keeps_alive: bool) -> Result<()> {
        let clients = &self.permit.clients;
        if request.has_content && matches!(request.method.as_str(), "GET" | "HEAD") {
            return self.refuse(&message(413, "a request for reading has no content")).await;
        }
        if self.config().only_local_names && !request.has_local_name() {
            return self.refuse(&message(421, "this server is read by its address or as localhost")).await;
        }
        let found = lock(&clients.site.contents).get(&request.path).cloned();
        let Some(place) = found else {
            tracing::info!(peer = self.peer, export = clients.export(), "HTTP request for a path that isn't there");
            let mut missing = message(404, "there is nothing at this path");
            if request.method == "HEAD" {
                missing.body.clear();
            }
            return self.send_answer(&missing, None, keeps_alive).await;
        };
        let wants_page = request.shows_pages && request.query.as_deref() != Some(DOWNLOAD);
        let content = place.page.as_ref().filter(|_| wants_page).unwrap_or(&place.content);
        let packing = content.packing();
        if packing.is_some() && request.is_old {
            // The end of the connection would be the end of the content, wherever it breaks off.
            let mut refused = message(505, "the length of this file is unknown before its end: that takes HTTP/1.1");
            if request.method == "HEAD" {
                refused.body.clear();
            }
            return self.send_answer(&refused, None, keeps_alive).await;
        }
        content.follow().await;
        let reading = content.open();
        let version = reading.version().number;
        // A client that goes on without naming the version (curl -C -) would join two disks.
        let is_rest = request.range.as_deref().is_some_and(is_rest) && request.if_range.is_none();
        let is_refused = is_rest && clients.has_another_version(self.peer, &request.path, version);
        let mut answer = match is_refused {
            true => response(&Request { range: None, ..request.clone() }, &**content, &*reading),
            false => response(request, &**content, &*reading),
        };
        // The client's file has the other version still: its next attempt is refused as well.
        if !is_refused && matches!(&answer.body[..], [AnswerPart::Part(part)] if !part.is_empty()) {
            clients.note_version(self.peer, &request.path, version);
        }
        if place.page.is_some() {
            answer.fields.push_str("Vary: Accept\r\nCache-Control: no-store\r\n");
        }
        tracing::debug!(peer = self.peer, status = answer.status, method = request.method, "HTTP request");
        self.has_sent.set(false);
        let sent = self.send_answer(&answer, Some((&request.path, &*reading, packing)), keeps_alive).await;
        if answer.body.iter().any(|piece| matches!(piece, AnswerPart::Part(_))) {
            let (len, is_complete) = (reading.size(), sent.is_ok());
            self.config().notify(&Event::Ended { peer: self.peer, path: &request.path, len, is_complete });
        }
        if sent.is_err() && !self.has_sent.get() {
            self.send_answer(&message(500, "the content could not be read"), None, false).await?;
        }
        sent
    }

    async fn send_answer(
        &self,
        answer: &Answer,
        content: Option<(&str, &dyn Reading, Option<Packing>)>,
        keeps_alive: bool,
    ) -> Result<()> {
        let connection = if keeps_alive { "keep-alive" } else { "close" };
        let head = format!(
            "HTTP/1.1 {} {}\r\nDate: {}\r\nConnection: {connection}\r\n{}\r\n",
            answer.status,
            phrase(answer.status),
            date(),
            answer.fields,
        );
        let mut text = head.into_bytes();
        let version = content.as_ref().map(|(_, reading, _)| reading.version());
        for piece in &answer.body {
            match (piece, content.as_ref().zip(version)) {
                (AnswerPart::Text(more), _) => text.extend_from_slice(more.as_bytes()),
                (AnswerPart::Part(part), Some(((path, reading, packing), version))) => {
                    let before = std::mem::take(&mut text);
                    let sending =
                        Sending { connection: self, path, reading: *reading, version, packing: packing.as_ref() };
                    sending.part(part.clone(), before).await?;
                    if packing.is_some() {
                        text.extend_from_slice(LAST_CHUNK);
                    }
                }
                (AnswerPart::Part(_), None) => return Err(Error::internal("a part of no content")),
            }
        }
        match text.is_empty() {
            true => Ok(()),
            false => self.send(vec![IoBuf::copy_from(&text)]).await,
        }
    }

    async fn send(&self, bufs: Vec<IoBuf>) -> Result<()> {
        self.has_sent.set(true);
        match within(self.config().limits.stall_limit, self.stream.send(bufs, Dispatch::Together)).await {
            Some((result, _)) => result,
            None => {
                self.stream.socket().shutdown();
                Err(timed_out("took nothing of its response"))
            }
        }
    }
}

/// The end of a response in chunks (RFC 9112, 7.1).
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A chunk with the bytes to send of a piece.
async fn chunk(packing: &Packing, piece: IoBuf) -> Result<IoBuf> {
    let packing = Arc::clone(packing);
    let packed = rt::run_on_cpu_pool(move || packing(&piece)).await?;
    if packed.is_empty() {
        // A chunk without bytes would be the last one.
        return Ok(IoBuf::default());
    }
    let head = format!("{:x}\r\n", packed.len());
    Ok(IoBuf::copy_from(&[head.as_bytes(), &packed, b"\r\n"].concat()))
}

/// A content on its way to the client.
struct Sending<'a> {
    connection: &'a Connection<'a>,
    path: &'a str,
    reading: &'a dyn Reading,
    /// The version that the head names.
    version: Version,
    packing: Option<&'a Packing>,
}

impl Sending<'_> {
    /// Sends a range, behind some text. The next piece is read while the one before it is sent.
    async fn part(&self, part: Range<u64>, text: Vec<u8>) -> Result<()> {
        let piece_bytes = self.connection.config().limits.piece_bytes as u64;
        let mut bufs = if text.is_empty() { Vec::new() } else { vec![IoBuf::copy_from(&text)] };
        let piece_at = |at: u64| at..part.end.min(at.saturating_add(piece_bytes));
        let mut sending = piece_at(part.start);
        // Nothing is promised before the first bytes are there.
        if !sending.is_empty() || self.packing.is_some() {
            bufs.push(self.read(sending.clone()).await?);
        }
        loop {
            let next = piece_at(sending.end);
            let send = async {
                self.connection.send(std::mem::take(&mut bufs)).await?;
                self.notify_sent(sending.clone());
                Ok(())
            };
            if next.is_empty() {
                return send.await;
            }
            let (sent, read) = join(send, self.read(next.clone())).await;
            sent?;
            bufs = vec![read?];
            sending = next;
        }
    }

    async fn read(&self, range: Range<u64>) -> Result<IoBuf> {
        let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let (result, buf) = match len {
            0 => (Ok(()), IoBuf::default()),
            len => self.reading.read(range.start, IoBuf::try_scratch(len)?).await,
        };
        // The bytes sent so far must not be taken for a disk that never was.
        let result = result.and_then(|()| match self.reading.version() == self.version {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Busy, "the disk was written to while it was sent")),
        });
        if let Err(error) = &result {
            let (peer, path) = (self.connection.peer, self.path);
            self.connection.config().notify(&Event::Failed { peer, path, error });
        }
        result?;
        match self.packing {
            Some(packing) => chunk(packing, buf).await,
            None => Ok(buf),
        }
    }

    fn notify_sent(&self, range: Range<u64>) {
        if !range.is_empty() {
            let (peer, path, len) = (self.connection.peer, self.path, self.reading.size());
            self.connection.config().notify(&Event::Sent { peer, path, range, len, version: self.version.number });
        }
    }
}

/// True for all bytes from some place on: the rest of a download that broke off.
fn is_rest(range: &str) -> bool {
    let first = range.trim().strip_suffix('-').and_then(|range| range.split_once('=')).map(|(_, first)| first.trim());
    first.is_some_and(|first| first.parse().is_ok_and(|first: u64| first > 0))
}

fn response(request: &Request, content: &dyn Content, reading: &dyn Reading) -> Answer {
    let version = reading.version();
    let about = About {
        len: reading.size(),
        tag: Tag { text: format!("{:016x}", version.number), is_weak: version.may_change },
        media_type: content.media_type(),
        file_name: content.file_name(),
        is_packed: content.packing().is_some(),
    };
    answer(request, &about)
}

/// The time as the field `Date` has it (RFC 9110, 5.6.7).
fn date() -> String {
    let printer = jiff::fmt::rfc2822::DateTimePrinter::new();
    printer.timestamp_to_rfc9110_string(&jiff::Timestamp::now()).unwrap_or_default()
}
