// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading requests and judging them.

use crate::budget::Permit;
use crate::commands::CACHE_PIECE_BYTES;
use crate::negotiation::NegotiatedOptions;
use crate::session::Session;
use crate::status::status_bytes;
use crate::{Disk, DiskQueue};
use cowshed_nbd::{Receiver, Stream};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::request::StatusFilter;
use cowshed_nbd_proto::{Command, HeaderStyle, Malformed, NbdErrno, PORTABLE_PAYLOAD_BYTES, ReplyStyle, Request};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result, slip};
use std::collections::VecDeque;

/// The most requests that are gathered behind the end of a connection: more count as a flood.
const MAX_GATHERED: usize = 1 << 16;

/// Data of a request that are received at once, in bytes: so often other clients of the thread come in between.
const PIECE_BYTES: usize = 1 << 20;

/// The end of a connection from which requests come.
#[derive(Debug)]
pub(crate) struct Intake {
    pub receiver: Receiver,
    /// No further request comes.
    pub ended: bool,
    /// All requests up to the client's goodbye, received after its end was known.
    last: Option<VecDeque<IntakeRequest>>,
}

/// A request that is to be carried out, or answered with an error.
#[derive(Debug)]
pub(crate) struct IntakeRequest {
    pub request: Request,
    pub work: IntakeWork,
    /// For the data of the request.
    pub permit: Option<Permit>,
}

/// A message from the client.
enum Taken {
    Job(IntakeRequest),
    /// The client's goodbye.
    Goodbye,
    /// Nothing more comes.
    End,
}

#[derive(Debug)]
pub(crate) enum IntakeWork {
    /// A request by its own fields.
    Plain,
    /// A write of this.
    Write(IoBuf),
    /// Block status of these contexts, by their numbers.
    Status(Vec<u32>),
    /// A write that was carried out in pieces.
    Done(Result<()>),
    /// A read whose reply is sent already.
    Answered,
    /// Nothing but this answer.
    Fail(NbdErrno, &'static str),
}

/// The purpose of receiving a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// It begins at once.
    Begin,
    /// It begins if a goodbye is behind it.
    Gather,
}

type Verdict = std::result::Result<(), (NbdErrno, &'static str)>;

impl Intake {
    pub(crate) fn new(receiver: Receiver) -> Intake {
        Intake { receiver, ended: false, last: None }
    }

    /// True when no request has been received that was not handed out.
    pub(crate) fn is_empty(&self) -> bool {
        self.receiver.is_empty() && self.last.as_ref().is_none_or(VecDeque::is_empty)
    }

    /// The next request with its data, which may begin at once; `None` at the end.
    pub(crate) async fn next<D: Disk>(&mut self, session: &Session<D>) -> Result<Option<IntakeRequest>> {
        let life = &session.life;
        let mut job = match &mut self.last {
            Some(last) => match last.pop_front() {
                Some(job) => job,
                None => return Ok(None),
            },
            None => match self.take(session, Purpose::Begin).await? {
                Taken::Job(job) => job,
                Taken::Goodbye | Taken::End => return Ok(None),
            },
        };
        // Both may have become true while this waited for data or for the budget.
        let has_left = life.is_ending() && !session.stay.client.is_closing();
        if has_left && self.last.is_none() && !life.is_dead() {
            job = match Box::pin(self.gather(session, job)).await? {
                Some(job) => job,
                None => return Ok(None),
            };
        }
        if job.permit.is_none() {
            let bytes = memory_of(&job.request, &job.work);
            let limit = session.stall_limit.saturating_mul(2);
            // Several connections may hold data of writes behind such a request: the wait must end.
            job.permit = match bytes {
                0 => None,
                bytes => match Box::pin(session.budget.take_within(bytes, limit)).await {
                    Some(permit) => Some(permit),
                    None => return Ok(None),
                },
            };
        }
        Ok((!life.is_dead()).then_some(job))
    }

    /// The client sends nothing more: receives the rest, with `first` before it. A goodbye at its end means that the
    /// client wants all of it done. Without one the client has dropped the connection, has perhaps made another, and
    /// repeats the requests without a reply there. Then none of this may begin.
    async fn gather<D: Disk>(&mut self, session: &Session<D>, first: IntakeRequest) -> Result<Option<IntakeRequest>> {
        let mut last = VecDeque::new();
        let limit_bytes = session.budget.limit_bytes();
        let mut bytes = 0;
        loop {
            match self.take(session, Purpose::Gather).await {
                Ok(Taken::Job(job)) => {
                    if let IntakeWork::Write(buf) = &job.work {
                        bytes += buf.len() as u64;
                    }
                    last.push_back(job);
                    if bytes <= limit_bytes && last.len() < MAX_GATHERED {
                        continue;
                    }
                }
                Ok(Taken::Goodbye) => {
                    self.last = Some(last);
                    return Ok(Some(first));
                }
                // Half a request is the end of a connection that was dropped, too.
                Ok(Taken::End) | Err(_) => {}
            }
            let peer = session.stream.socket().peer();
            let count = last.len() + 1;
            tracing::info!(peer, count, "requests of a client that dropped its connection are not begun");
            return Ok(None);
        }
    }

    /// Receives a request. The memory for its data, and for requests that are to begin at once, is reserved.
    async fn take<D: Disk>(&mut self, session: &Session<D>, purpose: Purpose) -> Result<Taken> {
        let Session { stay, terms, stream, disk, life, .. } = session;
        let header_bytes = terms.headers.request_bytes();
        let Some(bytes) = self.receiver.peek(stream, header_bytes).await? else { return Ok(Taken::End) };
        if (stay.client.is_closing() && !slip!("closing_left_out_of_the_intake")) || life.is_dead() {
            return Ok(Taken::End);
        }
        let request = Request::parse(terms.headers, bytes)
            .map_err(|Malformed(why)| Error::new(ErrorKind::Io, format!("the client breaks the protocol: {why}")))?;
        self.receiver.consume(header_bytes);
        let payload_bytes = request.payload_bytes(terms.headers);
        self.receiver.note_data(payload_bytes);
        if payload_bytes > terms.block_sizes.maximum.max(PORTABLE_PAYLOAD_BYTES).into() {
            let message = format!("the client announced {payload_bytes} bytes of data");
            return Err(Error::new(ErrorKind::Limit, message));
        }
        if request.command == Command::Disconnect {
            return Ok(Taken::Goodbye);
        }
        let export = &stay.served.export;
        if let Err((errno, why)) = judge(&request, terms, disk.size(), export.is_read_only()) {
            self.receiver.skip(stream, payload_bytes).await?;
            return Ok(Taken::Job(IntakeRequest { request, work: IntakeWork::Fail(errno, why), permit: None }));
        }
        match request.command {
            Command::Write => {
                let permit = match purpose {
                    Purpose::Begin => session.budget.take_some(request.length, || !life.is_ending()).await,
                    Purpose::Gather => session.budget.take_aside(request.length, session.stall_limit).await,
                };
                let Some(permit) = permit else { return Ok(Taken::End) };
                if permit.bytes() < request.length {
                    let job = Box::pin(self.write_in_pieces(session, request, permit)).await?;
                    return Ok(job.map_or(Taken::End, Taken::Job));
                }
                let Ok(buf) = IoBuf::try_scratch(payload_bytes as usize) else {
                    self.receiver.skip(stream, payload_bytes).await?;
                    let work = IntakeWork::Fail(NbdErrno::ENOMEM, "the server is out of memory");
                    return Ok(Taken::Job(IntakeRequest { request, work, permit: Some(permit) }));
                };
                let buf = self.payload(session, buf, permit.is_shared()).await?;
                Ok(Taken::Job(IntakeRequest { request, work: IntakeWork::Write(buf), permit: Some(permit) }))
            }
            Command::BlockStatus => {
                let (request, work) = self.status(stream, terms, disk, request, payload_bytes).await?;
                self.begin(session, purpose, request, work).await
            }
            _ => self.begin(session, purpose, request, IntakeWork::Plain).await,
        }
    }

    /// A request without data that was received. The memory of its reply is reserved if it is to begin.
    async fn begin<D: Disk>(
        &self,
        session: &Session<D>,
        purpose: Purpose,
        request: Request,
        work: IntakeWork,
    ) -> Result<Taken> {
        let bytes = memory_of(&request, &work);
        if purpose == Purpose::Gather || bytes == 0 {
            return Ok(Taken::Job(IntakeRequest { request, work, permit: None }));
        }
        let may_be_some = || request.command == Command::Read && !session.life.is_ending();
        let Some(permit) = session.budget.take_some(bytes, may_be_some).await else { return Ok(Taken::End) };
        let work = match permit.bytes() < bytes {
            true => {
                Box::pin(session.read_in_pieces(&request)).await?;
                IntakeWork::Answered
            }
            false => work,
        };
        Ok(Taken::Job(IntakeRequest { request, work, permit: Some(permit) }))
    }

    /// Receives the data of a write. `is_shared`: into memory that others may wait for.
    pub(crate) async fn payload<D: Disk>(
        &mut self,
        session: &Session<D>,
        mut rest: IoBuf,
        is_shared: bool,
    ) -> Result<IoBuf> {
        let stream = &session.stream;
        if !is_shared {
            let (result, buf) = self.receiver.fill(stream, rest).await;
            return result.map(|()| buf);
        }
        let patience = &session.budget.account.receiving;
        let mut filled = rest.split_to(0);
        while !rest.is_empty() {
            let piece = rest.split_to(rest.len().min(PIECE_BYTES));
            patience.begin(piece.len(), true);
            let (result, piece) = self.receiver.fill(stream, piece).await;
            patience.end(session.budget.account.holds());
            result?;
            if filled.unsplit(piece).is_err() {
                return Err(Error::internal("the parts of a split buffer did not join"));
            }
            rt::yield_now().await;
        }
        Ok(filled)
    }

    /// The contexts of a block status.
    async fn status(
        &mut self,
        stream: &Stream,
        terms: &NegotiatedOptions,
        disk: &impl DiskQueue,
        mut request: Request,
        payload_bytes: u64,
    ) -> Result<(Request, IntakeWork)> {
        let known = terms.contexts.len() as u32;
        if !request.flags.contains(CommandFlags::PAYLOAD_LEN) {
            return Ok((request, IntakeWork::Status((0..known).collect())));
        }
        let invalid = |why| IntakeWork::Fail(NbdErrno::EINVAL, why);
        if payload_bytes == 0 || payload_bytes > StatusFilter::MAX_BYTES {
            self.receiver.skip(stream, payload_bytes).await?;
            return Ok((request, invalid("the payload of the block status has an impossible length")));
        }
        let len = payload_bytes as usize;
        let payload = match self.receiver.peek(stream, len).await? {
            Some(payload) => StatusFilter::parse(payload),
            None => return Err(Error::new(ErrorKind::Io, "the client left in the middle of a request")),
        };
        self.receiver.consume(len);
        let filter = match payload {
            Ok(filter) => filter,
            Err(Malformed(why)) => return Ok((request, invalid(why))),
        };
        if filter.contexts.iter().any(|&context| context >= known) {
            return Ok((request, invalid("the block status names a context that wasn't chosen")));
        }
        request.length = filter.effect_bytes;
        let work = match judge_range(&request, terms, disk.size()) {
            Ok(()) => IntakeWork::Status(filter.contexts),
            Err((errno, why)) => IntakeWork::Fail(errno, why),
        };
        Ok((request, work))
    }
}

/// The memory that a request takes at most, in bytes, that of its reply included.
fn memory_of(request: &Request, work: &IntakeWork) -> u64 {
    match work {
        IntakeWork::Plain if request.command == Command::Read => request.length,
        IntakeWork::Plain if request.command == Command::Cache => request.length.min(CACHE_PIECE_BYTES),
        IntakeWork::Status(contexts) => status_bytes(request, contexts.len()),
        IntakeWork::Write(buf) => buf.len() as u64,
        IntakeWork::Plain | IntakeWork::Done(_) | IntakeWork::Answered | IntakeWork::Fail(..) => 0,
    }
}

/// Whether a request is one that may be carried out.
fn judge(request: &Request, terms: &NegotiatedOptions, size: u64, read_only: bool) -> Verdict {
    let invalid = |why| Err((NbdErrno::EINVAL, why));
    let allowed = match request.command {
        Command::Read if terms.replies != ReplyStyle::Simple => CommandFlags::DF,
        Command::Write if terms.headers == HeaderStyle::Extended => CommandFlags::PAYLOAD_LEN,
        Command::WriteZeroes => CommandFlags::NO_HOLE | CommandFlags::FAST_ZERO,
        Command::BlockStatus if terms.headers == HeaderStyle::Extended => {
            CommandFlags::REQ_ONE | CommandFlags::PAYLOAD_LEN
        }
        Command::BlockStatus => CommandFlags::REQ_ONE,
        Command::Unknown(_) => return invalid("unknown command"),
        _ => CommandFlags::default(),
    };
    // "The server MUST accept all commands with this bit set."
    if request.flags.without(allowed | CommandFlags::FUA) != CommandFlags::default() {
        return invalid("the request has a flag that doesn't belong to it");
    }
    if read_only && request.command.writes() {
        return Err((NbdErrno::EPERM, "the export is read-only"));
    }
    if request.command == Command::Flush {
        return Ok(());
    }
    if request.command == Command::BlockStatus {
        if terms.contexts.is_empty() {
            return invalid("no metadata context was chosen");
        }
        if request.flags.contains(CommandFlags::PAYLOAD_LEN) {
            // The length is that of the payload, which has the range.
            return Ok(());
        }
    }
    judge_range(request, terms, size)
}

fn judge_range(request: &Request, terms: &NegotiatedOptions, size: u64) -> Verdict {
    let Request { command, offset, length, .. } = *request;
    if offset.checked_add(length).is_none_or(|end| end > size) {
        let errno = match command {
            Command::Write | Command::WriteZeroes => NbdErrno::ENOSPC,
            _ => NbdErrno::EINVAL,
        };
        return Err((errno, "the range is past the end of the export"));
    }
    let minimum = u64::from(terms.smallest_block);
    if !offset.is_multiple_of(minimum) || !length.is_multiple_of(minimum) {
        return Err((NbdErrno::EINVAL, "the range is not aligned to the smallest block of the export"));
    }
    let is_limited = matches!(command, Command::Read | Command::Write | Command::Cache);
    if is_limited && length > terms.block_sizes.maximum.into() {
        return Err((NbdErrno::EINVAL, "the request is longer than the export allows"));
    }
    if command == Command::BlockStatus && length == 0 {
        return Err((NbdErrno::EINVAL, "a block status of nothing"));
    }
    Ok(())
}
