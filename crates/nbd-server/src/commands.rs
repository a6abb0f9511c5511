// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Carrying requests out and wording the replies.

use crate::budget::Permit;
use crate::intake::{IntakeRequest, IntakeWork};
use crate::outbox::ReplyPart;
use crate::session::Session;
use crate::{Disk, DiskQueue};
use cowshed_image::ZeroFlags;
use cowshed_nbd_proto::flags::{CommandFlags, ReplyFlags};
use cowshed_nbd_proto::reply::{self, Answered, kind};
use cowshed_nbd_proto::{Command, NbdErrno, ReplyStyle, Request};
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, Result, slip};

/// Data that `NBD_CMD_CACHE` reads at once, in bytes.
pub(crate) const CACHE_PIECE_BYTES: u64 = 1 << 20;

impl<D: Disk> Session<D> {
    /// Carries a request out and queues the reply.
    pub(crate) async fn carry_out(&self, job: IntakeRequest) {
        let IntakeRequest { request, work, permit } = job;
        permit.iter().for_each(Permit::begin_work);
        match work {
            IntakeWork::Fail(errno, why) => {
                self.disk.count_invalid(request.command);
                self.refuse(&request, errno, why);
            }
            IntakeWork::Write(buf) => {
                let result = self.write(&request, buf).await;
                self.answer(&request, result, "writing failed");
            }
            IntakeWork::Done(result) => self.answer(&request, result, "writing failed"),
            IntakeWork::Answered => {}
            // Rare requests are in boxes: each request moves its whole future.
            IntakeWork::Status(contexts) => Box::pin(self.status(&request, &contexts)).await,
            // No future of its own, which each read would move once more.
            IntakeWork::Plain if request.command == Command::Read => {
                if let Some(buf) = self.buffer_for(&request) {
                    let (result, buf) = self.disk.read(request.offset, buf).await;
                    if let Some(long) = self.answer_read(&request, result, buf) {
                        Box::pin(self.push_long(&request, long)).await;
                    }
                }
            }
            IntakeWork::Plain => {
                let result = Box::pin(self.plain(&request)).await;
                self.answer(&request, result, "the request failed");
            }
        }
        if let Some(permit) = permit {
            permit.end_work();
            self.outbox.push([ReplyPart::Sent(permit)]);
        }
    }

    async fn write(&self, request: &Request, buf: IoBuf) -> Result<()> {
        let is_durable = self.is_durable(request) && !slip!("fua_left_out_by_the_nbd_server");
        self.disk.write(request.offset, buf, is_durable).await.0
    }

    /// A change is to be durable before it is answered.
    pub(crate) fn is_durable(&self, request: &Request) -> bool {
        self.terms.writethrough || request.flags.contains(CommandFlags::FUA)
    }

    async fn flush_if_asked(&self, request: &Request) -> Result<()> {
        if self.is_durable(request) { self.disk.flush().await } else { Ok(()) }
    }

    /// A request without data in either direction.
    async fn plain(&self, request: &Request) -> Result<()> {
        let Request { offset, length, flags, .. } = *request;
        match request.command {
            Command::Flush => self.disk.flush().await,
            Command::Trim => {
                self.disk.discard(offset, length).await?;
                self.flush_if_asked(request).await
            }
            Command::WriteZeroes => {
                let zero_flags = ZeroFlags {
                    may_unmap: !flags.contains(CommandFlags::NO_HOLE),
                    no_fallback: flags.contains(CommandFlags::FAST_ZERO),
                };
                self.disk.write_zeroes(offset, length, zero_flags).await?;
                self.flush_if_asked(request).await
            }
            Command::Cache => self.cache(offset, length).await,
            _ => Err(Error::internal("a command that was let through and can't be carried out")),
        }
    }

    async fn cache(&self, offset: u64, length: u64) -> Result<()> {
        let mut at = offset;
        while at < offset + length {
            let piece = (offset + length - at).min(CACHE_PIECE_BYTES);
            self.disk.read(at, IoBuf::try_scratch(piece as usize)?).await.0?;
            at += piece;
        }
        Ok(())
    }

    /// The reply to a request without data.
    pub(crate) fn answer(&self, request: &Request, result: Result<()>, what: &'static str) {
        let Err(error) = result else {
            let head = match self.terms.replies {
                ReplyStyle::Extended => reply::chunk(true, answered(request), kind::NONE, ReplyFlags::DONE, 0),
                ReplyStyle::Structured if request.command == Command::Read => {
                    reply::chunk(false, answered(request), kind::NONE, ReplyFlags::DONE, 0)
                }
                _ => reply::simple(request.cookie, 0),
            };
            self.outbox.push([ReplyPart::Head(head)]);
            return;
        };
        let is_fast_zero = request.command == Command::WriteZeroes && request.flags.contains(CommandFlags::FAST_ZERO);
        if is_fast_zero && error.kind() == ErrorKind::Unsupported {
            self.refuse(request, NbdErrno::ENOTSUP, "zeroes would be slow here");
            return;
        }
        if error.kind() == ErrorKind::Cancelled && self.life.is_dead() {
            return;
        }
        let export = &self.stay.served.export.name;
        tracing::warn!(export, command = ?request.command, offset = request.offset, length = request.length, %error, "{what}");
        self.refuse(request, NbdErrno::from_errno(error.errno()), what);
    }

    /// A reply that is an error. The text is for the client's user, an untrusted party: it shows nothing of the server.
    pub(crate) fn refuse(&self, request: &Request, errno: NbdErrno, why: &'static str) {
        match self.terms.replies {
            ReplyStyle::Simple => self.outbox.push([ReplyPart::Head(reply::simple(request.cookie, errno.0))]),
            style => {
                let extended = style == ReplyStyle::Extended;
                let head = reply::error(extended, answered(request), errno, why.len() as u16);
                self.outbox.push([ReplyPart::Head(head), ReplyPart::Data(IoBuf::copy_from(why.as_bytes()))]);
            }
        }
    }

    /// Reports an error of the disk as the reply.
    pub(crate) fn fail(&self, request: &Request, error: Error, what: &'static str) {
        self.answer(request, Err(error), what);
    }
}

pub(crate) fn answered(request: &Request) -> Answered {
    Answered { cookie: request.cookie, offset: request.offset }
}
