// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Long reads and writes in the memory that a connection has for itself, while others hold the pool.
//!
//! Such a request is the only one of its connection that runs. Its pieces follow one another, and no other reply comes
//! between the parts of its own. So it needs no memory that another client could keep from it.

use crate::budget::{PIECE_BYTES, Permit};
use crate::commands::answered;
use crate::intake::{Intake, IntakeRequest, IntakeWork};
use crate::outbox::ReplyPart;
use crate::session::Session;
use crate::sparse::leading_zeroes;
use crate::{Disk, DiskQueue};
use cowshed_nbd_proto::flags::{CommandFlags, ReplyFlags};
use cowshed_nbd_proto::{ReplyStyle, Request, reply};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, Result, slip};
use std::time::Duration;

/// The time beside twice the stall limit that peers have for the data that they are sending or taking.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// The next piece of a request of which `left` bytes are left.
fn piece_bytes(left: u64) -> usize {
    left.min(PIECE_BYTES) as usize
}

impl<D: Disk> Session<D> {
    /// Carries a read out and sends its reply, piece by piece. An error when the reply can't be ended.
    pub(crate) async fn read_in_pieces(&self, request: &Request) -> Result<()> {
        let is_whole = self.terms.replies == ReplyStyle::Simple || request.flags.contains(CommandFlags::DF);
        let mut done = 0;
        while done < request.length && self.wait_until_alone().await {
            let data = match self.read_piece(request.offset + done, piece_bytes(request.length - done)).await {
                Ok(data) => data,
                Err(error) if is_whole && done > 0 => {
                    return Err(error.context("the reply to a read broke off, and the connection with it"));
                }
                Err(error) => {
                    self.answer(request, Err(error), "reading failed");
                    done = request.length;
                    self.send_alone().await;
                    continue;
                }
            };
            let (offset, len) = (request.offset + done, data.len() as u64);
            done += len;
            let flags = if done == request.length { ReplyFlags::DONE } else { ReplyFlags::default() };
            match is_whole {
                true => {
                    if offset == request.offset {
                        self.push_whole_head(request);
                    }
                    self.outbox.push([ReplyPart::Data(data)]);
                }
                false if leading_zeroes(&data) == data.len() => self.push_hole(request, offset, data.len(), flags),
                false => self.push_data(request, offset, data, flags),
            }
            self.send_alone().await;
        }
        Ok(())
    }

    async fn read_piece(&self, offset: u64, len: usize) -> Result<IoBuf> {
        let (result, data) = self.disk.read(offset, IoBuf::try_scratch(len)?).await;
        result.map(|()| data)
    }

    /// The header of a reply of one part.
    fn push_whole_head(&self, request: &Request) {
        match self.terms.replies {
            ReplyStyle::Simple => self.outbox.push([ReplyPart::Head(reply::simple(request.cookie, 0))]),
            ReplyStyle::Structured | ReplyStyle::Extended => {
                let is_extended = self.terms.replies == ReplyStyle::Extended;
                let (flags, Request { offset, length, .. }) = (ReplyFlags::DONE, *request);
                let head = reply::offset_data(is_extended, answered(request), flags, offset, length);
                self.outbox.push([ReplyPart::Head(head)]);
            }
        }
    }

    /// Sends the queued parts. No other request runs, so nothing is left when this returns.
    async fn send_alone(&self) {
        self.outbox.send(&self.stream, &self.life, &self.budget.account, false).await;
        rt::yield_now().await;
    }
}

impl Intake {
    /// Receives the data of a write and carries it out, piece by piece. Where the client's end comes meanwhile the rest is a
    /// request of its own: it must not begin without a goodbye behind it.
    pub(crate) async fn write_in_pieces<D: Disk>(
        &mut self,
        session: &Session<D>,
        request: Request,
        permit: Permit,
    ) -> Result<Option<IntakeRequest>> {
        let Session { stream, disk, life, stay, .. } = session;
        let is_durable = session.is_durable(&request);
        let mut done = 0;
        let mut outcome = Ok(());
        while done < request.length && outcome.is_ok() {
            if !session.wait_until_alone().await {
                return Ok(None);
            }
            let left = request.length - done;
            let buf = match IoBuf::try_scratch(piece_bytes(left)) {
                Ok(buf) => self.payload(session, buf, false).await?,
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            };
            let offset = if slip!("pieces_of_a_write_in_one_place") { request.offset } else { request.offset + done };
            if life.is_ending() && !stay.client.is_closing() {
                let rest = Request { offset, length: left, ..request };
                return self.receive_rest(session, rest, &buf).await;
            }
            done += buf.len() as u64;
            outcome = disk.write(offset, buf, is_durable).await.0;
            rt::yield_now().await;
        }
        self.receiver.skip(stream, request.length - done).await?;
        Ok(Some(IntakeRequest { request, work: IntakeWork::Done(outcome), permit: Some(permit) }))
    }

    /// The rest of a write that has begun, of which `begin` has been received.
    async fn receive_rest<D: Disk>(
        &mut self,
        session: &Session<D>,
        rest: Request,
        begin: &[u8],
    ) -> Result<Option<IntakeRequest>> {
        // Long enough for peers that keep the pool to be cut off.
        let limit = session.stall_limit.saturating_mul(2).saturating_add(END_PATIENCE);
        let Some(permit) = session.budget.take_aside(rest.length, limit).await else { return Ok(None) };
        let mut whole = IoBuf::try_scratch(rest.length as usize)?;
        let tail = whole.split_off(begin.len());
        whole.copy_from_slice(begin);
        let tail = self.payload(session, tail, permit.is_shared()).await?;
        match whole.unsplit(tail) {
            Ok(()) => Ok(Some(IntakeRequest { request: rest, work: IntakeWork::Write(whole), permit: Some(permit) })),
            Err(_) => Err(Error::internal("the parts of a split buffer did not join")),
        }
    }
}
