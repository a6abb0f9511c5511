// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Descriptors that come and go with the bytes of a Unix socket.

use super::Socket;
use super::asked::PassedFiles;
use super::readiness::{self, Interest};
use crate::attempts::ring_gave_up;
use crate::sys::{self, SysResult};
use crate::{IoBuf, rt};
use cowshed_types::{Errno, Error, Result};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The most descriptors that one message may bring.
pub const MAX_DESCRIPTORS: usize = 16;

/// Waits until reading from the descriptor would not block, or has an error to report.
pub(crate) async fn readable(fd: &Arc<OwnedFd>) -> SysResult<()> {
    if let Some(ring) = rt::current_ring() {
        match sys::ring_result(ring.readable(fd).await.0) {
            Err(errno) if ring_gave_up(errno) => {}
            result => return result.map(drop),
        }
    }
    readiness::ready(fd, Interest::Read).await
}

/// As [`readable`]; of several that wait so for one descriptor, one is woken.
pub(crate) async fn readable_alone(fd: &Arc<OwnedFd>) -> SysResult<()> {
    if let Some(ring) = rt::current_ring() {
        match sys::ring_result(ring.readable_alone(fd).await.0) {
            Err(errno) if ring_gave_up(errno) => {}
            result => return result.map(drop),
        }
    }
    readiness::ready(fd, Interest::Read).await
}

impl Socket {
    /// Receives until `bytes` is full; the number of bytes is smaller only when the peer has closed. Descriptors that come along are
    /// appended. A connection fails that brings more than [`MAX_DESCRIPTORS`], or a file of a file system that may never answer. It also
    /// fails with any descriptor while another look of `passed` has no answer.
    pub async fn receive_with_descriptors(
        &self,
        bytes: &mut [u8],
        descriptors: &mut Vec<OwnedFd>,
        passed: &PassedFiles,
    ) -> Result<usize> {
        let failed = |errno| Error::os(errno, "could not receive");
        let mut done = 0;
        while done < bytes.len() {
            match self.receive_now(&mut bytes[done..], descriptors, passed) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(Errno(libc::EINTR)) => {}
                Err(Errno(libc::EAGAIN)) => readable(&self.fd).await.map_err(failed)?,
                Err(Errno(libc::ECONNRESET | libc::EPIPE)) => break,
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(done)
    }

    fn receive_now(&self, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>, passed: &PassedFiles) -> SysResult<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        // Without room the kernel drops the descriptors, and waits for no file system in that. A close would.
        let is_waiting = passed.is_waiting();
        let room = if is_waiting { &mut [][..] } else { &mut space[..] };
        let mut ancillary = RecvAncillaryBuffer::new(room);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(bytes)], &mut ancillary, flags);
        let received = received.map_err(sys::errno)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(found) = message {
                descriptors.extend(passed.answered_here(found.collect())?);
            }
        }
        if is_waiting && received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno(libc::EBUSY));
        }
        // Some were lost on the way: the meaning of the message is unknown.
        if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > MAX_DESCRIPTORS {
            return Err(Errno(libc::EMSGSIZE));
        }
        Ok(received.bytes)
    }

    /// Sends bytes, and a descriptor with the first of them.
    pub async fn send_with_descriptor(&self, bytes: &[u8], descriptor: Option<&OwnedFd>) -> Result<()> {
        let Some(descriptor) = descriptor else {
            return self.send(vec![IoBuf::copy_from(bytes)], super::Dispatch::Alone).await.0;
        };
        let descriptors = [descriptor.as_fd()];
        let sent = loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(bytes)], &mut ancillary, flags).map_err(sys::errno) {
                Ok(sent) => break sent,
                Err(Errno(libc::EINTR)) => {}
                Err(Errno(libc::EAGAIN)) => {
                    readiness::ready(&self.fd, Interest::Write)
                        .await
                        .map_err(|errno| Error::os(errno, "could not send"))?;
                }
                Err(errno) => return Err(Error::os(errno, "could not send")),
            }
        };
        match sent < bytes.len() {
            true => self.send(vec![IoBuf::copy_from(&bytes[sent..])], super::Dispatch::Alone).await.0,
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn descriptors_arrive_with_their_bytes() {
        let (a, b) = Socket::pair().unwrap();
        let passed = PassedFiles::default();
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        rt::block_on(async {
            a.send_with_descriptor(b"take this", Some(&theirs.into())).await.unwrap();
            let (mut bytes, mut found) = ([0; 4], Vec::new());
            assert_eq!(b.receive_with_descriptors(&mut bytes, &mut found, &passed).await.unwrap(), 4);
            assert_eq!((&bytes, found.len()), (b"take", 1));
            let mut theirs = std::os::unix::net::UnixStream::from(found.pop().unwrap());
            theirs.write_all(b"x").unwrap();
            let mut one = [0];
            ours.read_exact(&mut one).unwrap();
            assert_eq!(&one, b"x");
            let mut rest = [0; 9];
            let receiving = b.receive_with_descriptors(&mut rest, &mut found, &passed);
            let sending = async {
                a.send_with_descriptor(b"more", None).await.unwrap();
                a.shutdown();
            };
            let (received, ()) = futures_util::join!(receiving, sending);
            assert_eq!((received.unwrap(), &rest, found.len()), (9, b" thismore", 0));
        });
    }

    /// Each would hold a thread and its descriptors for as long.
    #[test]
    fn no_descriptor_is_taken_while_a_file_system_hangs() {
        let (a, b) = Socket::pair().unwrap();
        let passed = PassedFiles::waiting();
        let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        rt::block_on(async {
            let (mut bytes, mut found) = ([0; 4], Vec::new());
            a.send_with_descriptor(b"none", None).await.unwrap();
            assert_eq!(b.receive_with_descriptors(&mut bytes, &mut found, &passed).await.unwrap(), 4);
            a.send_with_descriptor(b"take", Some(&theirs.into())).await.unwrap();
            let refused = b.receive_with_descriptors(&mut bytes, &mut found, &passed).await.unwrap_err();
            assert_eq!((refused.errno(), found.len()), (Errno(libc::EBUSY), 0), "{refused}");
            // Nothing holds it any more.
            assert_eq!(ours.read(&mut [0]).unwrap(), 0);
        });
    }
}
