// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reading requests and judging them.

use crate::budget::{Budget, Permit};
use crate::negotiation::Terms;
use crate::registry::Stay;
use crate::{Disk, DiskQueue};
use cowshed_block::{Error, ErrorKind, Result};
use cowshed_nbd::{Receiver, Stream};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::request::StatusFilter;
use cowshed_nbd_proto::{Command, HeaderStyle, Malformed, NbdErrno, PORTABLE_PAYLOAD_BYTES, ReplyStyle, Request};
use cowshed_storage::IoBuf;
use std::rc::Rc;

/// The end of a connection from which requests come.
#[derive(Debug)]
pub(crate) struct Intake {
    pub receiver: Receiver,
    /// No further request comes.
    pub ended: bool,
}

/// A request that is to be carried out, or answered with an error.
#[derive(Debug)]
pub(crate) struct Job {
    pub request: Request,
    pub work: Work,
    /// For the data of the request.
    pub permit: Option<Permit>,
}

#[derive(Debug)]
pub(crate) enum Work {
    /// As the request says.
    Plain,
    /// A write of this.
    Write(IoBuf),
    /// Block status of these contexts, by their numbers.
    Status(Vec<u32>),
    /// Nothing but this answer.
    Fail(NbdErrno, &'static str),
}

type Verdict = std::result::Result<(), (NbdErrno, &'static str)>;

impl Intake {
    /// The next request with its data; `None` at the end.
    pub(crate) async fn next<D: Disk>(
        &mut self,
        stream: &Stream,
        stay: &Stay<D>,
        terms: &Terms,
        disk: &D::Queue,
        budget: &Rc<Budget>,
    ) -> Result<Option<Job>> {
        let header_bytes = terms.headers.request_bytes();
        let Some(bytes) = self.receiver.peek(stream, header_bytes).await? else { return Ok(None) };
        if stay.client.is_closing() {
            return Ok(None);
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
            return Ok(None);
        }
        let export = &stay.served.export;
        if let Err((errno, why)) = judge(&request, terms, disk.size(), export.is_read_only()) {
            self.receiver.skip(stream, payload_bytes).await?;
            return Ok(Some(Job { request, work: Work::Fail(errno, why), permit: None }));
        }
        match request.command {
            Command::Write => {
                let permit = budget.take(payload_bytes).await;
                let buf = IoBuf::scratch(payload_bytes as usize);
                let (result, buf) = self.receiver.fill(stream, buf).await;
                result?;
                Ok(Some(Job { request, work: Work::Write(buf), permit: Some(permit) }))
            }
            Command::Read => {
                let permit = budget.take(request.length).await;
                Ok(Some(Job { request, work: Work::Plain, permit: Some(permit) }))
            }
            Command::BlockStatus => {
                let (request, work) = self.status(stream, terms, disk, request, payload_bytes).await?;
                Ok(Some(Job { request, work, permit: None }))
            }
            _ => Ok(Some(Job { request, work: Work::Plain, permit: None })),
        }
    }

    /// Which contexts a block status is about.
    async fn status(
        &mut self,
        stream: &Stream,
        terms: &Terms,
        disk: &impl DiskQueue,
        mut request: Request,
        payload_bytes: u64,
    ) -> Result<(Request, Work)> {
        let known = terms.contexts.len() as u32;
        if payload_bytes == 0 {
            return Ok((request, Work::Status((0..known).collect())));
        }
        let invalid = |why| Work::Fail(NbdErrno::EINVAL, why);
        if payload_bytes > StatusFilter::MAX_BYTES {
            self.receiver.skip(stream, payload_bytes).await?;
            return Ok((request, invalid("the payload of the block status is too long")));
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
            Ok(()) => Work::Status(filter.contexts),
            Err((errno, why)) => Work::Fail(errno, why),
        };
        Ok((request, work))
    }
}

/// Whether a request is one that may be carried out.
fn judge(request: &Request, terms: &Terms, size: u64, read_only: bool) -> Verdict {
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
    if request.command == Command::Write
        && terms.headers == HeaderStyle::Extended
        && !request.flags.contains(CommandFlags::PAYLOAD_LEN)
    {
        return invalid("a write with extended headers needs the flag for a payload");
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
            // The length is that of the payload, which says the range.
            return Ok(());
        }
    }
    judge_range(request, terms, size)
}

fn judge_range(request: &Request, terms: &Terms, size: u64) -> Verdict {
    let Request { command, offset, length, .. } = *request;
    if offset.checked_add(length).is_none_or(|end| end > size) {
        let errno = match command {
            Command::Write | Command::WriteZeroes => NbdErrno::ENOSPC,
            _ => NbdErrno::EINVAL,
        };
        return Err((errno, "the range is past the end of the export"));
    }
    let minimum = u64::from(terms.block_sizes.minimum);
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
