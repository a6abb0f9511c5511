// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The operations that the ring knows, as submission entries.

use super::{Ring, RingOp};
use crate::payload::{MAX_TRANSFER, Payload};
use io_uring::{opcode, squeue, types};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Ring {
    /// Reads into, or writes from, the payload's memory behind its first `skip` bytes: at most `most` bytes.
    pub(crate) fn transfer<'a>(
        self: Rc<Self>,
        file: &'a Arc<OwnedFd>,
        direction: Direction,
        payload: Payload,
        (skip, most): (usize, usize),
        offset: u64,
    ) -> RingOp<'a> {
        let fd = types::Fd(file.as_raw_fd());
        let (vectors, entry) = match payload.bufs.single(skip, most) {
            Some((start, len)) => {
                let len = len as u32;
                let entry = match direction {
                    Direction::Read => opcode::Read::new(fd, start, len).offset(offset).build(),
                    Direction::Write => opcode::Write::new(fd, start, len).offset(offset).build(),
                };
                (Vec::new(), entry)
            }
            None => {
                let vectors = payload.bufs.vectors(skip, most);
                // The vector's heap memory stays where it is when the vector moves into the slot.
                let (start, len) = (vectors.as_ptr(), vectors.len() as u32);
                let entry = match direction {
                    Direction::Read => opcode::Readv::new(fd, start, len).offset(offset).build(),
                    Direction::Write => opcode::Writev::new(fd, start, len).offset(offset).build(),
                };
                (vectors, entry)
            }
        };
        RingOp::start(self, file, payload, vectors, entry)
    }

    /// `fdatasync`.
    pub(crate) fn sync<'a>(self: &Rc<Self>, file: &'a Arc<OwnedFd>) -> RingOp<'a> {
        let entry = opcode::Fsync::new(types::Fd(file.as_raw_fd())).flags(types::FsyncFlags::DATASYNC).build();
        RingOp::start(Rc::clone(self), file, Payload::empty(None), Vec::new(), entry)
    }

    /// `sync_file_range` of the whole file: starts on dirty pages and waits for nothing on the disk.
    pub(crate) fn start_writeback<'a>(self: &Rc<Self>, file: &'a Arc<OwnedFd>) -> RingOp<'a> {
        // A length of 0 reaches to the end of the file.
        let entry =
            opcode::SyncFileRange::new(types::Fd(file.as_raw_fd()), 0).flags(libc::SYNC_FILE_RANGE_WRITE).build();
        RingOp::start(Rc::clone(self), file, Payload::empty(None), Vec::new(), entry)
    }

    /// Receives into the payload's one buffer behind its first `skip` bytes; `all`: until it is full.
    pub(crate) fn receive<'a>(
        self: Rc<Self>,
        socket: &'a Arc<OwnedFd>,
        payload: Payload,
        skip: usize,
        all: bool,
    ) -> RingOp<'a> {
        let (start, len) = match payload.bufs.slice().first() {
            Some(buf) => (buf.as_raw().wrapping_add(skip), (buf.len() - skip).min(MAX_TRANSFER) as u32),
            None => (std::ptr::null_mut(), 0),
        };
        let flags = if all { libc::MSG_WAITALL } else { 0 };
        let entry = opcode::Recv::new(types::Fd(socket.as_raw_fd()), start, len).flags(flags).build();
        RingOp::start_for_peer(self, socket, payload, entry)
    }

    /// Sends the payload behind its first `skip` bytes, all of it unless the peer goes away.
    pub(crate) fn send<'a>(self: Rc<Self>, socket: &'a Arc<OwnedFd>, payload: Payload, skip: usize) -> RingOp<'a> {
        let mut message = self.messages.borrow_mut().pop().unwrap_or_default();
        message.point_to(&payload.bufs, skip);
        let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let entry = opcode::SendMsg::new(types::Fd(socket.as_raw_fd()), message.header()).flags(flags as u32).build();
        RingOp::start_message(self, socket, payload, message, entry)
    }

    /// Waits until the socket can be received from, or accepted on.
    pub(crate) fn readable<'a>(self: Rc<Self>, socket: &'a Arc<OwnedFd>) -> RingOp<'a> {
        let events = (libc::POLLIN | libc::POLLHUP | libc::POLLERR) as u32;
        let entry = opcode::PollAdd::new(types::Fd(socket.as_raw_fd()), events).build();
        RingOp::start_for_peer(self, socket, Payload::empty(None), entry)
    }

    /// As [`Ring::readable`]; of several that wait so for one file, one is woken.
    pub(crate) fn readable_alone<'a>(self: Rc<Self>, file: &'a Arc<OwnedFd>) -> RingOp<'a> {
        let events = (libc::POLLIN | libc::POLLHUP | libc::POLLERR) as u32 | libc::EPOLLEXCLUSIVE as u32;
        let entry = opcode::PollAdd::new(types::Fd(file.as_raw_fd()), events).build();
        RingOp::start_for_peer(self, file, Payload::empty(None), entry)
    }

    /// Waits until the peer sends nothing more, or the connection is broken.
    pub(crate) fn hung_up<'a>(self: Rc<Self>, socket: &'a Arc<OwnedFd>) -> RingOp<'a> {
        let events = (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR) as u32;
        let entry = opcode::PollAdd::new(types::Fd(socket.as_raw_fd()), events).build();
        RingOp::start_for_peer(self, socket, Payload::empty(None), entry)
    }

    /// A command of the driver behind `file`, which ends it when it likes to. Memory whose address is in it must last
    /// until its end.
    pub(crate) fn command<'a>(self: Rc<Self>, file: &'a Arc<OwnedFd>, code: u32, command: [u8; 16]) -> RingOp<'a> {
        let entry = opcode::UringCmd16::new(types::Fd(file.as_raw_fd()), code).cmd(command).build();
        RingOp::start_for_peer(self, file, Payload::empty(None), entry)
    }

    /// `fallocate` with the mode bits of the system call.
    pub(crate) fn fallocate<'a>(
        self: &Rc<Self>,
        file: &'a Arc<OwnedFd>,
        payload: Payload,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> RingOp<'a> {
        let entry = opcode::Fallocate::new(types::Fd(file.as_raw_fd()), len).offset(offset).mode(mode).build();
        RingOp::start(Rc::clone(self), file, payload, Vec::new(), entry)
    }
}

/// Reads an eventfd's counter to `count` (8 bytes).
pub(super) fn read_counter(fd: RawFd, count: *mut u8) -> squeue::Entry {
    opcode::Read::new(types::Fd(fd), count, 8).build()
}

/// Cancels the operation with that user data.
pub(super) fn cancel(user_data: u64) -> squeue::Entry {
    opcode::AsyncCancel::new(user_data).build()
}
