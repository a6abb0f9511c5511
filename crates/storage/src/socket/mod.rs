// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Stream sockets on the same ring as the files: Unix and TCP, connecting and listening.
//!
//! - here: a connected socket; receiving and sending
//! - `address`: where to connect or listen
//! - `listener`: listening, also on descriptors that a service manager passed
//! - `descriptors`: descriptors that come and go with the bytes
//! - `asked`: the file systems of passed descriptors, before the first call on them
//! - `readiness`: waiting for a socket where there is no ring
//! - `stale`: names that processes left behind
//!
//! As with files, an operation owns its memory until it completes, also when its future is dropped; it is cancelled
//! then. A dropped future may have taken bytes off the stream with it: the rest is only for closing.

mod address;
pub(crate) mod asked;
mod descriptors;
mod listener;
mod name;
mod readiness;
mod stale;

pub use address::{SocketAddress, connect_unix};
pub use asked::PassedFiles;
pub use descriptors::MAX_DESCRIPTORS;
pub(crate) use descriptors::{readable, readable_alone};
pub use listener::{KeepAlive, ListenOptions, Listener};
pub use name::SocketFile;
pub use stale::clear_stale;

use crate::IoBuf;
use crate::attempts::ring_gave_up;
use crate::payload::{Bufs, Payload};
use crate::rt::{self, ThreadPool};
use crate::sys::{self, SysResult};
use cowshed_types::{Errno, Error, Result};
use readiness::Interest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{Shutdown, SocketAddrAny};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// A connected stream socket. Clones are the same socket; it is closed with the last of them.
#[derive(Clone, Debug)]
pub struct Socket {
    fd: Arc<OwnedFd>,
}

/// When [`Socket::receive`] is content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// With whatever is there, at least one byte.
    Some,
    /// When the buffer is full.
    All,
}

/// The result of [`Socket::hung_up`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HangUp {
    /// The peer sends nothing more; it may still receive.
    End,
    /// The connection is broken: nothing that is sent arrives.
    Broken,
}

/// The way in which [`Socket::send`] hands its bytes to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dispatch {
    /// Together with whatever else this thread has for the kernel: one system call for all of it.
    Together,
    /// At once if there is room: cheaper where nothing else would go along.
    Alone,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Socket {
        // Requests and replies are small and are waited for: never hold one back. Only TCP knows the option.
        let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
        Socket { fd: Arc::new(fd) }
    }

    /// A socket that is connected already: one end of a pair, or one that a service manager passed.
    pub fn from_descriptor(fd: OwnedFd) -> Socket {
        Socket::new(fd)
    }

    /// Another descriptor of a socket that this process was started with, by the user's word. The first one stays open,
    /// so the peer learns of the end by a shutdown only.
    pub fn copy_of_descriptor(number: i32) -> Result<OwnedFd> {
        let copy = sys::copy_descriptor(number).ok();
        let copy = copy.filter(|fd| rustix::net::sockopt::socket_type(fd).is_ok());
        copy.ok_or_else(|| Error::invalid_argument(format!("File descriptor '{number}' is not a socket")))
    }

    /// As [`Self::copy_of_descriptor`], but the first one is taken, so that the socket is closed with the result. One that something else
    /// in this process uses is copied.
    pub fn inherited_descriptor(number: i32) -> Result<OwnedFd> {
        // Not one that is no socket: it stays what it is.
        let copy = Self::copy_of_descriptor(number)?;
        Ok(sys::take_inherited(number).unwrap_or(copy))
    }

    /// Connects. The addresses of a host name are tried one after the other, each for at most `timeout`.
    pub async fn connect(address: &SocketAddress, timeout: Duration) -> Result<Socket> {
        let address = address.clone();
        ThreadPool::io().run(move || address.connect(timeout)).await.map(Socket::new)
    }

    /// Receives into `buf`; the number of bytes is smaller than wanted only when the peer has closed (0: at once).
    pub async fn receive(&self, buf: IoBuf, want: Want) -> (Result<usize>, IoBuf) {
        let total = buf.len();
        let mut payload = Payload::one(buf);
        let mut done = 0;
        let result = loop {
            if done == total {
                break Ok(done);
            }
            let result;
            (result, payload) = self.receive_once(payload, done, want).await;
            match result {
                Ok(0) => break Ok(done),
                Ok(count) => done += count,
                Err(Errno(libc::EINTR | libc::EAGAIN)) => continue,
                // The peer went away with something of ours unread: for the reader that is an end too.
                Err(Errno(libc::ECONNRESET | libc::EPIPE)) => break Ok(done),
                Err(errno) => break Err(Error::os(errno, "could not receive")),
            }
            if want == Want::Some {
                break Ok(done);
            }
        };
        (result, payload.into_one())
    }

    async fn receive_once(&self, payload: Payload, skip: usize, want: Want) -> (SysResult<usize>, Payload) {
        let mut payload = payload;
        if let Some(ring) = rt::current_ring() {
            let (result, back) = ring.receive(&self.fd, payload, skip, want == Want::All).await;
            match sys::ring_result(result) {
                Err(errno) if ring_gave_up(errno) => payload = back,
                result => return (result, back),
            }
        }
        loop {
            match sys::receive(&self.fd, &payload, skip) {
                Err(Errno(libc::EAGAIN)) => {}
                result => return (result, payload),
            }
            if let Err(errno) = readiness::ready(&self.fd, Interest::Read).await {
                return (Err(errno), payload);
            }
        }
    }

    /// Sends all bytes of all buffers, at most 1,024 of them.
    pub async fn send(&self, bufs: Vec<IoBuf>, dispatch: Dispatch) -> (Result<()>, Vec<IoBuf>) {
        let mut payload = Payload { bufs: Bufs::Many(bufs), guard: None };
        let total = payload.len();
        let mut done = 0;
        let result = loop {
            if done == total {
                break Ok(());
            }
            let result;
            (result, payload) = self.send_once(payload, done, dispatch).await;
            match result {
                Ok(count) => done += count,
                Err(Errno(libc::EINTR | libc::EAGAIN)) => {}
                Err(errno) => break Err(Error::os(errno, "could not send")),
            }
        };
        (result, payload.into_many())
    }

    async fn send_once(&self, payload: Payload, skip: usize, dispatch: Dispatch) -> (SysResult<usize>, Payload) {
        if dispatch == Dispatch::Alone {
            match sys::send(&self.fd, &payload, skip) {
                Err(Errno(libc::EAGAIN)) => {}
                result => return (result, payload),
            }
        }
        let mut payload = payload;
        if let Some(ring) = rt::current_ring() {
            let (result, back) = ring.send(&self.fd, payload, skip).await;
            match sys::ring_result(result) {
                Err(errno) if ring_gave_up(errno) => payload = back,
                result => return (result, back),
            }
        }
        loop {
            match sys::send(&self.fd, &payload, skip) {
                Err(Errno(libc::EAGAIN)) => {}
                result => return (result, payload),
            }
            if let Err(errno) = readiness::ready(&self.fd, Interest::Write).await {
                return (Err(errno), payload);
            }
        }
    }

    /// Sends a few bytes if there is room for them at once; false otherwise, when a part of them may have been sent.
    pub fn send_now(&self, bytes: &[u8]) -> bool {
        let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
        rustix::net::send(&self.fd, bytes, flags).is_ok_and(|sent| sent == bytes.len())
    }

    /// Waits until the peer has ended its direction, or the connection is broken, also behind bytes that haven't been
    /// received yet.
    pub async fn hung_up(&self) -> HangUp {
        loop {
            let mut waited = match rt::current_ring() {
                Some(ring) => sys::ring_result(ring.hung_up(&self.fd).await.0).map(drop),
                None => Err(Errno(libc::EAGAIN)),
            };
            if waited.is_err_and(ring_gave_up) {
                waited = readiness::ready(&self.fd, Interest::HangUp).await;
            }
            let mut now = [PollFd::new(&self.fd, PollFlags::RDHUP)];
            let polled = poll(&mut now, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
            let found = now[0].revents();
            match (waited, polled) {
                // A connection that can't be watched counts as whole: sending and receiving show its state in the end.
                (Err(errno), _) if errno.0 != libc::EINTR && errno.0 != libc::EAGAIN => std::future::pending().await,
                _ if found.contains(PollFlags::ERR) => return HangUp::Broken,
                _ if found.intersects(PollFlags::RDHUP | PollFlags::HUP) => return HangUp::End,
                _ => rt::yield_now().await,
            }
        }
    }

    /// True where the peer has ended its direction, or the connection is broken. Waits for nothing.
    pub fn has_hung_up(&self) -> bool {
        let mut now = [PollFd::new(&self.fd, PollFlags::RDHUP)];
        let polled = poll(&mut now, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && now[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// True where the connection is broken: what was sent may not have arrived. Of no use once this side has ended it.
    pub fn is_broken(&self) -> bool {
        let mut now = [PollFd::new(&self.fd, PollFlags::empty())];
        let polled = poll(&mut now, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && now[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// The bytes sent that the peer's system has not acknowledged yet, with the end of this direction as one of them. `None`: the
    /// system doesn't say.
    pub fn unacknowledged_bytes(&self) -> Option<u64> {
        sys::unacknowledged_bytes(self.fd.as_fd()).ok()
    }

    /// Ends the connection in both directions: operations in flight end, and the peer sees it.
    pub fn shutdown(&self) {
        // Fails when the peer was faster.
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// Ends receiving; bytes received before can still be had. TCP goes on to take the peer's bytes.
    pub fn shutdown_receive(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Read);
    }

    /// Ends the sending direction; receiving goes on.
    pub fn shutdown_send(&self) {
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// The peer in messages: `ADDRESS:PORT`, or `unix` where it has no name, with the number of the process where
    /// known.
    pub fn peer(&self) -> String {
        let address = rustix::net::getpeername(&self.fd).ok().flatten();
        match address.as_ref().and_then(|address| std::net::SocketAddr::try_from(address.clone()).ok()) {
            Some(address) => address.to_string(),
            None => match rustix::net::sockopt::socket_peercred(&self.fd) {
                Ok(credentials) => format!("unix:pid={}", credentials.pid.as_raw_nonzero()),
                Err(_) => "unix".to_owned(),
            },
        }
    }

    /// Asks TCP to notice a peer that vanished without a word, after about two hours as the system has it.
    pub fn keep_alive(&self) {
        let _ = rustix::net::sockopt::set_socket_keepalive(&self.fd, true);
    }

    /// A pair of connected sockets: for tests, and for talking to a child process.
    pub fn pair() -> Result<(Socket, Socket)> {
        let (a, b) = std::os::unix::net::UnixStream::pair()
            .map_err(|error| Error::io(&error, "could not make a pair of sockets"))?;
        Ok((Socket::new(a.into()), Socket::new(b.into())))
    }

    /// True when both are the same socket.
    pub fn is(&self, other: &Socket) -> bool {
        self.fd.as_raw_fd() == other.fd.as_raw_fd()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// An address of the system in messages, and for [`SocketAddress`]'s `Display`.
fn describe(address: &SocketAddrAny) -> String {
    match std::net::SocketAddr::try_from(address.clone()) {
        Ok(address) => address.to_string(),
        Err(_) => "unix".to_owned(),
    }
}
