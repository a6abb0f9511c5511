// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread that takes requests of the kernel.

use crate::operations::{Given, Outcome, Work};
use crate::server::{MAX_REQUEST_BYTES, Shared};
use cowshed_block::{Errno, Result};
use cowshed_fuse_proto::request::{HEADER_BYTES, MAX_FIELDS_BYTES};
use cowshed_fuse_proto::{
    Header, InitReply, MAJOR, MIN_BUFFER_BYTES, MIN_MINOR, Malformed, Operation, WRITE_HEAD_BYTES, features, reply,
};
use cowshed_image::graph::Queue;
use cowshed_storage::{FuseDevice, IoBuf, rt};
use futures_util::future::{Either, LocalBoxFuture, select};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt, poll};
use rustix::io::Errno as Number;
use std::io::{IoSlice, IoSliceMut};
use std::pin::pin;
use std::sync::Arc;

/// Buffers of the requests of one thread, in bytes; one request may always run.
const MAX_BYTES_IN_FLIGHT: u64 = 32 << 20;
/// Requests that a thread takes before it looks at those that run.
const MAX_AT_ONCE: usize = 64;
/// Data of a write up to so many bytes is copied into a buffer of its own length.
const COPIED_BYTES: usize = 64 << 10;
/// Requests that the kernel may have in the background, where direct asynchronous I/O is.
const MAX_BACKGROUND: u16 = 256;
/// A page of the kernel, in bytes: the smallest there is, so that the count holds everywhere.
const PAGE_BYTES: u32 = 4096;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was told to.
    Told,
    /// The file system is not mounted any more.
    Unmounted,
    /// The device gave an error.
    Failed(Errno),
}

/// A request that runs; the bytes of its buffers come back.
type Running = LocalBoxFuture<'static, u64>;

/// The buffers of the next request.
struct Intake {
    head: [u8; WRITE_HEAD_BYTES],
    data: IoBuf,
}

struct Session {
    shared: Arc<Shared>,
    device: FuseDevice,
    disk: Queue,
    intake: Intake,
    bytes: u64,
    running: FuturesUnordered<Running>,
}

/// Serves until the end.
pub(crate) async fn serve(shared: Arc<Shared>, device: FuseDevice) -> Result<End> {
    let disk = shared.attachment.queue();
    let data = IoBuf::try_scratch(MAX_REQUEST_BYTES as usize + MIN_BUFFER_BYTES)?;
    let intake = Intake { head: [0; WRITE_HEAD_BYTES], data };
    let mut session = Session { shared, device, disk, intake, bytes: 0, running: FuturesUnordered::new() };
    let end = session.run().await;
    while session.running.next().await.is_some() {}
    end
}

impl Session {
    async fn run(&mut self) -> Result<End> {
        let shared = Arc::clone(&self.shared);
        let device = self.device.clone();
        let mut told = pin!(shared.stopping.wait(|stopping| stopping.then_some(())));
        loop {
            if told.as_mut().now_or_never().is_some() {
                return Ok(End::Told);
            }
            let took = match self.take().await? {
                Ok(took) => took,
                Err(end) => return Ok(end),
            };
            if self.collect() || took {
                // Completions, and other threads' wakes, are looked at in between.
                rt::yield_now().await;
                continue;
            }
            let has_room = self.has_room();
            let ready = async {
                match has_room {
                    true => device.wait().await,
                    false => std::future::pending().await,
                }
            };
            let mut ready = pin!(ready);
            let news = select(told.as_mut(), ready.as_mut());
            let ended = async {
                match self.running.is_empty() {
                    true => std::future::pending().await,
                    false => self.running.next().await,
                }
            };
            match select(news, pin!(ended)).await {
                Either::Left((Either::Left(_), _)) => return Ok(End::Told),
                Either::Left((Either::Right((Ok(()), _)), _)) => {}
                Either::Left((Either::Right((Err(errno), _)), _)) => return Ok(End::Failed(errno)),
                Either::Right((bytes, _)) => self.bytes -= bytes.unwrap_or(0),
            }
        }
    }

    fn has_room(&self) -> bool {
        self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Takes what is there and begins it. True: there was something.
    async fn take(&mut self) -> Result<std::result::Result<bool, End>> {
        let mut count = 0;
        while count < MAX_AT_ONCE && self.has_room() {
            let Intake { head, data } = &mut self.intake;
            let received = self.device.receive_now(&mut [IoSliceMut::new(head), IoSliceMut::new(data)]);
            match received {
                Ok(received) => self.begin(received).await?,
                Err(Errno(errno)) if errno == Number::AGAIN.raw_os_error() => break,
                Err(Errno(errno)) if errno == Number::NODEV.raw_os_error() => return Ok(Err(End::Unmounted)),
                Err(errno) => return Ok(Err(End::Failed(errno))),
            }
            count += 1;
        }
        if count > 0 {
            rt::note_request();
        }
        Ok(Ok(count > 0))
    }

    /// Begins the request in the intake, and answers it where that needs no waiting.
    async fn begin(&mut self, received: usize) -> Result<()> {
        let (header, operation) = match self.parse(received) {
            Ok(parsed) => parsed,
            Err(error) => {
                tracing::warn!(export = self.shared.config.id, %error, "a request that breaks the protocol");
                // Without its number there is no reply.
                if let Ok(header) = Header::parse(&self.intake.head, received) {
                    self.answer(header.unique, Err(Errno(Number::IO.raw_os_error())));
                }
                return Ok(());
            }
        };
        tracing::trace!(export = self.shared.config.id, unique = header.unique, ?operation, "request");
        let data = match operation {
            Operation::Unanswered => return Ok(()),
            Operation::Init { major, minor, features, max_readahead } => {
                self.answer(header.unique, init(major, minor, features, max_readahead));
                return Ok(());
            }
            Operation::Write { len, .. } => Some(self.data(len as usize)?),
            _ => None,
        };
        let bytes = match operation {
            Operation::Read { len, .. } | Operation::Write { len, .. } => u64::from(len),
            _ => 0,
        };
        let work = Work { shared: Arc::clone(&self.shared), disk: self.disk.clone() };
        let device = self.device.clone();
        let shared = Arc::clone(&self.shared);
        let mut running = async move {
            let outcome = work.run(operation, data).await;
            answer(&shared, &device, header.unique, outcome);
            bytes
        }
        .boxed_local();
        if poll!(&mut running).is_pending() {
            self.bytes += bytes;
            self.running.push(running);
        }
        Ok(())
    }

    fn parse(&self, received: usize) -> std::result::Result<(Header, Operation), Malformed> {
        let Intake { head, data } = &self.intake;
        let header = Header::parse(head, received)?;
        let mut fields = [0; MAX_FIELDS_BYTES];
        let (first, rest) = fields.split_at_mut(WRITE_HEAD_BYTES - HEADER_BYTES);
        first.copy_from_slice(&head[HEADER_BYTES..]);
        rest.copy_from_slice(&data[..MAX_FIELDS_BYTES - (WRITE_HEAD_BYTES - HEADER_BYTES)]);
        let len = (received - HEADER_BYTES).min(MAX_FIELDS_BYTES);
        Operation::parse(&header, &fields[..len]).map(|operation| (header, operation))
    }

    /// The data of a write: a copy, or the intake's own buffer, which gets another one.
    fn data(&mut self, len: usize) -> Result<IoBuf> {
        let data = &mut self.intake.data;
        if len <= COPIED_BYTES {
            return Ok(IoBuf::copy_from(&data[..len]));
        }
        let mut taken = std::mem::replace(data, IoBuf::try_scratch(data.len())?);
        taken.truncate(len);
        Ok(taken)
    }

    /// Lets requests go on, and counts those that have ended. True: there was one.
    fn collect(&mut self) -> bool {
        let mut any = false;
        while let Some(Some(bytes)) = self.running.next().now_or_never() {
            self.bytes -= bytes;
            any = true;
        }
        any
    }

    fn answer(&self, unique: u64, outcome: Outcome) {
        answer(&self.shared, &self.device, unique, outcome);
    }
}

fn answer(shared: &Shared, device: &FuseDevice, unique: u64, outcome: Outcome) {
    let sent = match &outcome {
        Ok(Given::Fields(fields)) => {
            device.send(&[IoSlice::new(&reply::header(unique, 0, fields.len())), IoSlice::new(fields)])
        }
        Ok(Given::Data(data)) => {
            device.send(&[IoSlice::new(&reply::header(unique, 0, data.len())), IoSlice::new(data)])
        }
        Err(errno) => device.send(&[IoSlice::new(&reply::reply(unique, Err(errno.0)))]),
    };
    if let Err(errno) = sent {
        tracing::warn!(export = shared.config.id, errno = errno.0, "the kernel takes a reply not");
    }
}

fn init(major: u32, minor: u32, offered: u64, max_readahead: u32) -> Outcome {
    if major > MAJOR {
        return Ok(Given::Fields(reply::older_version()));
    }
    if major < MAJOR || minor < MIN_MINOR {
        tracing::error!(major, minor, "the kernel's FUSE is too old");
        return Err(Errno(Number::PROTO.raw_os_error()));
    }
    let reply = InitReply {
        features: offered & features::WANTED,
        max_readahead,
        max_background: MAX_BACKGROUND,
        max_write: MAX_REQUEST_BYTES,
        max_pages: (MAX_REQUEST_BYTES / PAGE_BYTES) as u16,
    };
    Ok(Given::Fields(reply.body()))
}
