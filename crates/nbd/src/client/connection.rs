// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests and replies of one connection.

use super::handshake::{Agreed, choose_export};
use super::pending::{PendingRequest, PendingTable, Progress};
use super::{CONNECT_TIMEOUT, ClientOptions, ExportFacts, lock};
use crate::{Receiver, Stream};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::reply::{StatusRun, kind};
use cowshed_nbd_proto::{Chunk, Command, HeaderStyle, Malformed, ReplyHeader, Request};
use cowshed_storage::{Dispatch, IoBuf, Socket, rt};
use cowshed_types::{Errno, Error, ErrorKind, Result, slip};
use futures_util::future::{Either, select};
use futures_util::lock::{Mutex as AsyncMutex, MutexGuard as AsyncMutexGuard};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Mutex;
use std::task::Poll;

/// The longest payload of a reply other than data, in bytes: a status with a million runs.
const MAX_PAYLOAD_BYTES: u64 = 16 << 20;
/// Payloads up to that are looked at where they were received.
const SMALL_PAYLOAD_BYTES: u64 = 32 << 10;

/// One connection in the transmission phase.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: Stream,
    agreed: Agreed,
    /// Held by the sending task.
    sending: AsyncMutex<()>,
    /// Held by the task that receives for all.
    receiving: AsyncMutex<Receiver>,
    table: Mutex<PendingTable>,
}

/// The reason of a request's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server refuses it.
    Refused(Errno),
    /// The connection was lost, and whether the request was carried out is not known.
    Lost,
}

/// The result of a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub result: std::result::Result<(), Failure>,
    /// The memory of a read or write.
    pub buf: IoBuf,
    /// The runs of a block status.
    pub runs: Vec<StatusRun>,
}

fn broken(why: Malformed) -> Error {
    Error::new(ErrorKind::Io, format!("the server breaks the protocol: {why}"))
}

/// While a message is half sent or half received, the connection is good for nothing else: given up there, it is lost.
struct Midway<'a>(Option<&'a Connection>);

impl Drop for Midway<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.0 {
            connection.lose(&Error::new(ErrorKind::Cancelled, "given up in the middle of a message"));
        }
    }
}

impl Connection {
    /// Connects and chooses the export.
    pub(crate) async fn open(options: &ClientOptions) -> Result<Connection> {
        let opening = pin!(async {
            let socket = Socket::connect(&options.address, CONNECT_TIMEOUT).await?;
            let stream = Stream::new(socket);
            let mut receiver = Receiver::default();
            let agreed = choose_export(&stream, &mut receiver, options).await?;
            Ok((stream, receiver, agreed))
        });
        let (stream, receiver, agreed) = match select(opening, pin!(rt::sleep(CONNECT_TIMEOUT))).await {
            Either::Left((opened, _)) => opened?,
            Either::Right(_) => return Err(Error::new(ErrorKind::Io, "the server took too long to answer")),
        };
        Ok(Connection {
            stream,
            agreed,
            sending: AsyncMutex::new(()),
            receiving: AsyncMutex::new(receiver),
            table: Mutex::default(),
        })
    }

    pub(crate) fn facts(&self) -> &ExportFacts {
        &self.agreed.facts
    }

    /// True when lengths of 64 bits are understood.
    pub(crate) fn is_extended(&self) -> bool {
        self.agreed.headers == HeaderStyle::Extended
    }

    /// A metadata context was chosen.
    pub(crate) fn has_context(&self) -> bool {
        self.agreed.context.is_some()
    }

    /// The longest range of a request without data, in bytes: aligned, and within 32 bits unless both sides can do more. Zeroes
    /// may be data to the server, which then takes no more of them than of data.
    pub(crate) fn longest_effect(&self, command: Command) -> u64 {
        match self.is_extended() {
            _ if command == Command::WriteZeroes && !slip!("zeroes_beyond_the_servers_maximum") => {
                self.facts().block_sizes.maximum.into()
            }
            true => u64::MAX / 2 + 1,
            false => (1 << 32) - (1 << 16),
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        lock(&self.table).lost
    }

    /// Gives the connection up: no request waits for a reply any more.
    fn lose(&self, error: &Error) {
        let (wakers, is_news) = {
            let mut table = lock(&self.table);
            let is_news = !table.lost;
            (table.lose_all(), is_news)
        };
        if is_news {
            tracing::warn!(%error, "the connection to the NBD server was lost");
            self.stream.socket().shutdown();
        }
        wakers.into_iter().for_each(std::task::Waker::wake);
    }

    pub(crate) async fn read(&self, offset: u64, length: u64, buf: IoBuf) -> Answer {
        let request = Request { command: Command::Read, flags: CommandFlags::default(), cookie: 0, offset, length };
        let pending = PendingRequest { buf, offset, length, reads: true, ..PendingRequest::default() };
        self.transact(request, pending, None).await
    }

    pub(crate) async fn write(&self, offset: u64, flags: CommandFlags, buf: IoBuf) -> Answer {
        let flags = flags.with(CommandFlags::PAYLOAD_LEN, self.is_extended());
        let request = Request { command: Command::Write, flags, cookie: 0, offset, length: buf.len() as u64 };
        self.transact(request, PendingRequest::default(), Some(buf)).await
    }

    pub(crate) async fn simple(&self, command: Command, flags: CommandFlags, offset: u64, length: u64) -> Answer {
        let request = Request { command, flags, cookie: 0, offset, length };
        self.transact(request, PendingRequest { offset, length, ..PendingRequest::default() }, None).await
    }

    /// Sends a request and waits for its reply.
    async fn transact(&self, mut request: Request, pending: PendingRequest, data: Option<IoBuf>) -> Answer {
        let added = lock(&self.table).add(pending);
        let key = match added {
            Ok(key) => key,
            Err(PendingRequest { buf, .. }) => {
                let buf = data.unwrap_or(buf);
                return Answer { result: Err(Failure::Lost), buf, runs: Vec::new() };
            }
        };
        let mut ticket = Ticket { connection: self, key: Some(key) };
        request.cookie = key as u64;
        let data = self.send(&request, data).await;
        let pending = self.wait(key).await;
        ticket.key = None;
        let result = match (pending.state, pending.error) {
            (Progress::Done, None) => Ok(()),
            (Progress::Done, Some(errno)) => Err(Failure::Refused(errno)),
            _ if slip!("lost_nbd_write_is_success") && request.command == Command::Write => Ok(()),
            _ => Err(Failure::Lost),
        };
        Answer { result, buf: data.unwrap_or(pending.buf), runs: pending.runs }
    }

    /// Sends a request; a failure shows as the loss of the connection. Gives the data back.
    async fn send(&self, request: &Request, data: Option<IoBuf>) -> Option<IoBuf> {
        let has_data = data.is_some();
        let (head, len) = request.encode(self.agreed.headers);
        let mut bufs = Vec::with_capacity(2);
        bufs.push(IoBuf::copy_from(&head[..len]));
        bufs.extend(data);
        let _turn = self.sending.lock().await;
        let mut midway = Midway(Some(self));
        let (result, mut bufs) = self.stream.send(bufs, Dispatch::Together).await;
        midway.0 = None;
        if let Err(error) = result {
            self.lose(&error);
        }
        if has_data { bufs.pop() } else { None }
    }

    /// Waits for the reply to a request: by receiving, or for the task that receives.
    async fn wait(&self, key: usize) -> PendingRequest {
        loop {
            let turn = {
                let mut turn = pin!(self.receiving.lock());
                poll_fn(|context| {
                    if let Some(pending) = lock(&self.table).take_finished(key, context.waker()) {
                        return Poll::Ready(Err(pending));
                    }
                    turn.as_mut().poll(context).map(Ok)
                })
                .await
            };
            match turn {
                Err(pending) => return pending,
                Ok(mut receiver) => self.receive_for_all(key, &mut receiver).await,
            }
        }
    }

    /// Receives until the reply to the own request is there.
    async fn receive_for_all(&self, key: usize, receiver: &mut AsyncMutexGuard<'_, Receiver>) {
        loop {
            let is_over = {
                let mut table = lock(&self.table);
                table.lost || table.get(key as u64).is_err()
            };
            if is_over {
                return;
            }
            let mut midway = Midway(Some(self));
            let result = self.receive_reply(receiver).await;
            midway.0 = None;
            if let Err(error) = result {
                self.lose(&error);
                return;
            }
        }
    }

    /// Receives one reply, or one part of one.
    async fn receive_reply(&self, receiver: &mut Receiver) -> Result<()> {
        let stream = &self.stream;
        let ended = || Error::new(ErrorKind::Io, "the server closed the connection");
        let Some(magic) = receiver.peek(stream, 4).await? else { return Err(ended()) };
        let mut first = [0; 4];
        first.copy_from_slice(magic);
        let needed = ReplyHeader::bytes_needed(self.agreed.replies, first).map_err(broken)?;
        let Some(bytes) = receiver.peek(stream, needed).await? else { return Err(ended()) };
        let header = ReplyHeader::parse(bytes).map_err(broken)?;
        receiver.consume(needed);
        match header {
            ReplyHeader::Simple { cookie, errno } => {
                let length = {
                    let mut table = lock(&self.table);
                    let pending = table.get(cookie).map_err(broken)?;
                    pending.error = (errno.0 != 0).then(|| errno.to_errno());
                    if pending.reads && errno.0 == 0 { Some((pending.offset, pending.length)) } else { None }
                };
                if let Some((offset, length)) = length {
                    self.receive_data(receiver, cookie, offset, length).await?;
                }
                self.finish(cookie)
            }
            ReplyHeader::Chunk { done: false, kind: kind::NONE, .. } => {
                Err(broken(Malformed("a part of a reply is empty and isn't the last one")))
            }
            ReplyHeader::Chunk { cookie, done, kind, payload_bytes } => {
                self.receive_chunk(receiver, cookie, kind, payload_bytes).await?;
                if done { self.finish(cookie) } else { Ok(()) }
            }
        }
    }

    async fn receive_chunk(&self, receiver: &mut Receiver, cookie: u64, kind: u16, payload_bytes: u64) -> Result<()> {
        if kind == kind::OFFSET_DATA {
            let length = payload_bytes.checked_sub(8).filter(|&length| length > 0);
            let length = length.ok_or_else(|| broken(Malformed("a part of a reply has no data")))?;
            lock(&self.table).get(cookie).and_then(|pending| pending.expect_data(length)).map_err(broken)?;
            let offset = u64::from_be_bytes(receiver.array(&self.stream).await?);
            return self.receive_data(receiver, cookie, offset, length).await;
        }
        if payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(broken(Malformed("a reply is too long")));
        }
        if payload_bytes <= SMALL_PAYLOAD_BYTES {
            let len = payload_bytes as usize;
            let payload = match receiver.peek(&self.stream, len).await? {
                Some(payload) => payload,
                None if len == 0 => &[],
                None => return Err(Error::new(ErrorKind::Io, "the server left in the middle of a reply")),
            };
            self.take_chunk(cookie, kind, payload)?;
            receiver.consume(len);
            return Ok(());
        }
        let (result, payload) = receiver.fill(&self.stream, IoBuf::try_scratch(payload_bytes as usize)?).await;
        result?;
        self.take_chunk(cookie, kind, &payload)
    }

    /// Notes the content of a part without data.
    fn take_chunk(&self, cookie: u64, kind: u16, payload: &[u8]) -> Result<()> {
        let chunk = Chunk::parse(kind, payload).map_err(broken)?;
        let mut table = lock(&self.table);
        let pending = table.get(cookie).map_err(broken)?;
        match chunk {
            Chunk::None => {}
            Chunk::Hole { offset, len } => {
                pending.cover(offset, len.into()).map_err(broken)?;
                let start = (offset - pending.offset) as usize;
                if let Some(hole) = pending.buf.get_mut(start..start + len as usize) {
                    hole.fill(0);
                }
            }
            Chunk::Status(status) => {
                pending.remark().map_err(broken)?;
                if Some(status.context) == self.agreed.context {
                    pending.runs = status.runs().collect();
                }
            }
            Chunk::Error { errno, message } => {
                pending.remark().map_err(broken)?;
                if !message.is_empty() {
                    tracing::debug!(message, "the NBD server refuses a request");
                }
                pending.error.get_or_insert(errno.to_errno());
            }
        }
        Ok(())
    }

    /// Receives data of a read straight to where it goes.
    async fn receive_data(&self, receiver: &mut Receiver, cookie: u64, offset: u64, length: u64) -> Result<()> {
        let (mut head, start) = {
            let mut table = lock(&self.table);
            let pending = table.get(cookie).map_err(broken)?;
            pending.cover(offset, length).map_err(broken)?;
            pending.filling = true;
            (std::mem::take(&mut pending.buf), (offset - pending.offset) as usize)
        };
        // The range was checked against the request, whose buffer is as long as it.
        let mut middle = head.split_off(start);
        let tail = middle.split_off(length as usize);
        let (result, middle) = receiver.fill(&self.stream, middle).await;
        let joined = head.unsplit(middle).is_ok() && head.unsplit(tail).is_ok();
        let waker = lock(&self.table).put_back(cookie, head);
        if let Some(waker) = waker {
            waker.wake();
        }
        match joined {
            true => result,
            false => Err(Error::internal("the parts of a split buffer did not join")),
        }
    }

    fn finish(&self, cookie: u64) -> Result<()> {
        let waker = lock(&self.table).finish(cookie).map_err(broken)?;
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// Sends a goodbye and closes.
    pub(crate) async fn close(&self) {
        if !self.is_lost() {
            let request = goodbye();
            self.send(&request, None).await;
        }
        let wakers = lock(&self.table).lose_all();
        wakers.into_iter().for_each(std::task::Waker::wake);
        self.stream.close().await;
    }
}

fn goodbye() -> Request {
    Request { command: Command::Disconnect, flags: CommandFlags::default(), cookie: 0, offset: 0, length: 0 }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if self.is_lost() || self.stream.is_encrypted() {
            return;
        }
        // Politeness, where it costs no waiting; the server copes without.
        let (bytes, len) = goodbye().encode(self.agreed.headers);
        self.stream.socket().send_now(&bytes[..len]);
    }
}

/// Takes a request without a waiter out of the table.
struct Ticket<'a> {
    connection: &'a Connection,
    key: Option<usize>,
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            lock(&self.connection.table).abandon(key);
        }
    }
}
