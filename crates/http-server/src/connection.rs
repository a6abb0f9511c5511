// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One client, from its first request to its last; and the places of all.

mod sending;

use crate::content::{Content, Reading, Version};
use crate::proto::answer::{About, Answer, AnswerPart, Tag, answer, message, phrase};
use crate::proto::range::LaterRange;
use crate::proto::request::{MAX_HEAD_BYTES, Request, parse};
use crate::server::{Contents, Event, ServerConfig};
use crate::versions::SentVersions;
use cowshed_nbd::Stream;
use cowshed_storage::rt::{self, within};
use cowshed_storage::signal::lock;
use cowshed_storage::{Dispatch, HangUp, IoBuf, Socket, Want};
use cowshed_types::{Error, ErrorKind, Result};
use sending::{AnsweredContent, LAST_CHUNK, Sending};
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

/// The parameter that names the version whose bytes are wanted, by the text of its entity tag.
const VERSION: &str = "version";

/// The time that a client may take to send the head of a request while others wait for its place.
const HEAD_PATIENCE: Duration = Duration::from_secs(1);

/// The time that a client may take to receive the end of the encryption.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Received at once.
const RECEIVE_BYTES: usize = 4096;

/// The time that a client which has all bytes may take to end its connection by itself.
const LEAVE_PATIENCE: Duration = Duration::from_secs(1);

/// Between two looks whether bytes have arrived.
const LOOK: Duration = Duration::from_millis(50);

/// The longest wait for a content that was changed just now.
const SETTLE_LIMIT: Duration = Duration::from_secs(3);

/// To a client that would join two versions.
const OTHER_VERSION: &str = "the bytes before may be of another version: remove them and begin anew, or name the version of the part by If-Range";

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
    sent: RefCell<SentVersions>,
    is_closing: Cell<bool>,
}

struct Seat {
    socket: Socket,
    /// It waits for a request, and has none of its bytes.
    is_idle: Cell<bool>,
    /// It has all of its last response, and hasn't ended its connection yet.
    is_leaving: Cell<bool>,
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
            sent: RefCell::default(),
            is_closing: Cell::new(false),
        }
    }

    /// Waits for room. The client that has been idle for longest makes it, or else one that doesn't leave after its last response. A
    /// client that sends a request too slowly comes last.
    pub(crate) async fn permit(self: &Rc<Self>, socket: Socket) -> ConnectionPermit {
        while within(HEAD_PATIENCE, self.room()).await.is_none() {
            self.cut_slowest_head();
        }
        let (is_idle, is_leaving) = (Cell::new(true), Cell::new(false));
        let (head_since, was_cut) = (Cell::default(), Cell::new(false));
        let seat = Rc::new(Seat { socket, is_idle, is_leaving, head_since, was_cut });
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
            let first = |is_it: &dyn Fn(&Seat) -> bool| seated.iter().find(|seat| is_it(seat));
            if is_full
                && !seated.iter().any(|seat| seat.was_cut.get())
                && let Some(seat) = first(&|seat| seat.is_idle.get()).or_else(|| first(&|seat| seat.is_leaving.get()))
            {
                seat.cut();
            }
            !is_full
        })
        .await;
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
        if self.seat.is_idle.replace(is_idle) != is_idle {
            self.set_last();
        }
    }

    /// From now on another client may have its place.
    fn set_leaving(&self) {
        self.seat.is_leaving.set(true);
        self.set_last();
    }

    /// Its state is the one that has changed last.
    fn set_last(&self) {
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
    let (received, unconfirmed) = (Vec::new(), RefCell::default());
    let (has_sent, ends_early) = (Cell::new(false), Cell::new(false));
    let mut connection =
        Connection { permit: &permit, stream: &stream, peer: &peer, received, has_sent, ends_early, unconfirmed };
    let outcome = connection.run().await;
    connection.confirm(outcome.is_ok()).await;
    match outcome {
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
    /// The client has ended its direction before it can have had all bytes.
    ends_early: Cell<bool>,
    /// The lengths, by the paths, of contents with bytes that may not have arrived.
    unconfirmed: RefCell<BTreeMap<String, u64>>,
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
            let keeps_alive = self.respond(&request, keeps_alive).await?;
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

    /// Answers a request; false where its connection ends with that.
    async fn respond(&self, request: &Request, keeps_alive: bool) -> Result<bool> {
        let clients = &self.permit.clients;
        // An answer to HEAD has the fields alone.
        let without_content = |status, reason| {
            let mut answer = message(status, reason);
            if request.method == "HEAD" {
                answer.body.clear();
            }
            answer
        };
        if request.has_content && matches!(request.method.as_str(), "GET" | "HEAD") {
            self.refuse(&without_content(413, "a request for reading has no content")).await?;
            return Ok(false);
        }
        if self.config().local_names.as_ref().is_some_and(|names| !request.has_local_name(names)) {
            self.refuse(&without_content(421, "this server is read by its address or as localhost")).await?;
            return Ok(false);
        }
        let found = lock(&clients.site.contents).get(&request.path).cloned();
        let Some(place) = found else {
            tracing::info!(peer = self.peer, export = clients.export(), "HTTP request for a path that isn't there");
            self.send_answer(&without_content(404, "there is nothing at this path"), None, keeps_alive).await?;
            return Ok(keeps_alive);
        };
        // A method that no version has is no question of versions.
        if !matches!(request.method.as_str(), "GET" | "HEAD") {
            self.send_answer(&without_content(405, "only GET and HEAD"), None, keeps_alive).await?;
            return Ok(keeps_alive);
        }
        let wants_page = request.shows_pages && request.parameter(DOWNLOAD).is_none();
        let page = place.page.as_ref().filter(|_| wants_page);
        let content = page.unwrap_or(&place.content);
        let packing = content.packing();
        if packing.is_some() && request.is_old {
            // The end of the connection would be the end of the content, wherever it breaks off.
            let refused =
                without_content(505, "the length of this file is unknown before its end: that takes HTTP/1.1");
            self.send_answer(&refused, None, keeps_alive).await?;
            return Ok(keeps_alive);
        }
        let reading = settled(&**content).await;
        // All that follows is of this version, or breaks off.
        let of_source = reading.version();
        // A change since then leaves it unsettled.
        let is_settled = reading.is_settled();
        let version = told(of_source, is_settled);
        // A version that may change at any time counts the writes of this process.
        let tag = tag_of(version, is_settled && !version.may_change && reading.may_be_amid_write());
        let named = request.parameter(VERSION).filter(|_| page.is_none());
        let mut answer = if named.is_some_and(|named| named != tag.text) {
            without_content(412, "the content is another version by now")
        } else if page.is_none() && self.may_join_versions(request, version, reading.size(), packing.is_some()) {
            // A whole content in place of its rest would do as well, but wget takes its own rest out of that.
            refused_rest(tag)
        } else {
            response(request, &**content, reading.size(), tag)
        };
        if place.page.is_some() {
            answer.fields.push_str("Vary: Accept\r\nCache-Control: no-store\r\n");
        }
        tracing::debug!(peer = self.peer, status = answer.status, method = request.method, "HTTP request");
        self.has_sent.set(false);
        let ends = answer.body.iter().filter_map(|piece| match piece {
            AnswerPart::Part(part) => Some(part.end),
            AnswerPart::Text(_) => None,
        });
        let end = ends.max();
        // The end of the connection shows the arrival of the end of the content.
        let confirms = self.config().confirms;
        let keeps_alive = keeps_alive && !(confirms && end.is_some_and(|end| end >= reading.size()));
        if confirms && end.is_some() {
            self.unconfirmed.borrow_mut().insert(request.path.clone(), reading.size());
        }
        let is_one_part = page.is_none() && matches!(&answer.body[..], [AnswerPart::Part(_)]);
        let noted_path = is_one_part.then_some(&*request.path);
        let path = &*request.path;
        if confirms
            && is_one_part
            && answer.status == 206
            && let [AnswerPart::Part(Range { start, end })] = answer.body[..]
            && later_range(request).is_some_and(|_| end == reading.size())
        {
            self.config().notify(&Event::Resumed { peer: self.peer, path, version: version.number, start });
        }
        let source = AnsweredContent {
            path,
            noted_path,
            reading: &*reading,
            version: of_source,
            number: version.number,
            packing,
        };
        let sent = self.send_answer(&answer, Some(&source), keeps_alive).await;
        if !confirms && end.is_some() {
            let (len, is_complete) = (reading.size(), sent.is_ok());
            self.config().notify(&Event::Ended { peer: self.peer, path: &request.path, len, is_complete });
        }
        if sent.is_err() && !self.has_sent.get() {
            self.send_answer(&message(500, "the content could not be read"), None, false).await?;
        }
        sent.map(|()| keeps_alive)
    }

    /// True where a client that goes on without naming the version (curl -C -) may join two of them. Pieces of a content that may
    /// change at any time are another matter: its tag is weak, which forbids to join them.
    fn may_join_versions(&self, request: &Request, version: Version, size: u64, is_packed: bool) -> bool {
        let Some(LaterRange { start, last }) = later_range(request).filter(|_| request.if_range.is_none()) else {
            return false;
        };
        // A client that names the version has bytes of that version alone, as far as they tell it.
        if !version.may_change && request.parameter(VERSION).is_some() {
            return false;
        }
        // Places in a packed form are others than those of the content.
        let len = if is_packed { 1 } else { start };
        let sent = self.permit.clients.sent.borrow();
        let may_be = || sent.may_be_of_another(host_of(self.peer), &request.path, version.number, len);
        match last {
            None => version.is_unsure || may_be(),
            Some(last) => (!version.may_change || last.saturating_add(1) >= size) && may_be(),
        }
    }

    /// Tells of the contents that were sent, once it is known whether they have arrived.
    async fn confirm(&self, is_sound: bool) {
        let unconfirmed = self.unconfirmed.take();
        if unconfirmed.is_empty() {
            return;
        }
        let is_complete = is_sound && self.has_arrived().await;
        for (path, len) in unconfirmed {
            self.config().notify(&Event::Ended { peer: self.peer, path: &path, len, is_complete });
        }
    }

    /// True once the client has ended the connection in order. It does so with all bytes alone: the system resets the connection of a
    /// client that leaves some. Of a client that stays, or whose end came before it can have had all, the system's word counts in the
    /// end. The wait goes on as long as the client takes bytes.
    async fn has_arrived(&self) -> bool {
        let (socket, limit) = (self.stream.socket(), self.config().limits.stall_limit);
        self.permit.set_leaving();
        let (mut left, mut since) = (u64::MAX, rt::now());
        let mut has_ended = false;
        loop {
            let wait = match left {
                0 if has_ended => (since + limit).saturating_sub(rt::now()),
                0 => LEAVE_PATIENCE.min((since + limit).saturating_sub(rt::now())),
                _ => LOOK,
            };
            let end = within(wait, socket.hung_up()).await;
            // A cut is an end, too, and this side's own end looks like one of the whole connection.
            let is_broken = end == Some(HangUp::Broken) || (!has_ended && socket.is_broken());
            if is_broken || self.permit.seat.was_cut.get() {
                return false;
            }
            let now_left = socket.unacknowledged_bytes().unwrap_or(0);
            if now_left < left {
                (left, since) = (now_left, rt::now());
            }
            if end.is_some() && left > 0 && !has_ended {
                self.ends_early.set(true);
            }
            let ends_early = self.ends_early.get();
            if end.is_some() && left == 0 && !ends_early {
                return true;
            }
            if rt::now() >= since + limit {
                return left == 0;
            }
            // Its own end may have to come first. An end that the client doesn't read could make a reset of its leaving, so it waits. A
            // client that has ended its direction shows a reset only while this one is open.
            if left == 0 && !has_ended && !ends_early && rt::now() >= since + LEAVE_PATIENCE {
                self.stream.end().await;
                (has_ended, left, since) = (true, u64::MAX, rt::now());
            } else if end.is_some() {
                rt::sleep(LOOK).await;
            }
        }
    }

    /// Notes an end of the client's direction that comes before the end of a response. Bytes that its system takes tell nothing then.
    fn note_early_end(&self) {
        if self.config().confirms && self.stream.socket().has_hung_up() {
            self.ends_early.set(true);
        }
    }

    async fn send_answer(
        &self,
        answer: &Answer,
        content: Option<&AnsweredContent<'_>>,
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
        for piece in &answer.body {
            match (piece, content) {
                (AnswerPart::Text(more), _) => text.extend_from_slice(more.as_bytes()),
                (AnswerPart::Part(part), Some(source)) => {
                    let before = std::mem::take(&mut text);
                    Sending { connection: self, source }.part(part.clone(), before).await?;
                    if source.packing.is_some() {
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

/// Takes a content into use, once a change of it can't go unseen.
async fn settled(content: &dyn Content) -> Box<dyn Reading> {
    let begin = rt::now();
    loop {
        content.follow().await;
        let reading = content.open();
        if reading.is_settled() || rt::now() >= begin + SETTLE_LIMIT {
            return reading;
        }
        rt::sleep(LOOK).await;
    }
}

/// The version of a content as clients learn it. One that is written to all the time has a number of its own: the next change may leave
/// the other one.
fn told(version: Version, is_settled: bool) -> Version {
    match is_settled {
        true => version,
        false => Version { number: !version.number, may_change: true, is_unsure: true },
    }
}

/// The tag of a version. While a write may be under way it is another one, which no condition relies on. The write has moved the times
/// of the file, and its last bytes may come later.
fn tag_of(version: Version, may_be_amid_write: bool) -> Tag {
    let number = if may_be_amid_write { !version.number } else { version.number };
    Tag {
        text: format!("{number:016x}"),
        is_weak: version.may_change || may_be_amid_write,
        is_unsure: version.is_unsure || may_be_amid_write,
    }
}

/// The answer to a client that would join two versions. A program that reads by pieces names the version in its address.
fn refused_rest(tag: Tag) -> Answer {
    match tag {
        Tag { is_weak: true, .. } => message(412, OTHER_VERSION),
        Tag { text, .. } => message(
            412,
            &format!(
                "{OTHER_VERSION}; a program that reads by pieces begins anew with ?{VERSION}={text} behind the address"
            ),
        ),
    }
}

fn later_range(request: &Request) -> Option<LaterRange> {
    request.range.as_deref().filter(|_| request.method == "GET").and_then(LaterRange::of)
}

fn response(request: &Request, content: &dyn Content, len: u64, tag: Tag) -> Answer {
    let mut random = [0; 16];
    if getrandom::fill(&mut random).is_err() {
        return message(503, "the system has no random numbers");
    }
    let about = About {
        len,
        tag,
        media_type: content.media_type(),
        file_name: content.file_name(),
        is_packed: content.packing().is_some(),
        boundary: u128::from_ne_bytes(random),
    };
    answer(request, &about)
}

/// The time as the field `Date` has it (RFC 9110, 5.6.7).
fn date() -> String {
    let printer = jiff::fmt::rfc2822::DateTimePrinter::new();
    printer.timestamp_to_rfc9110_string(&jiff::Timestamp::now()).unwrap_or_default()
}
