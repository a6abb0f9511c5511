// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Eventfds that are shared with another process: one side counts, the other one waits for it.

use crate::socket::readable;
use crate::sys;
use cowshed_types::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// An eventfd. Clones are the same one.
#[derive(Clone, Debug)]
pub struct EventCounter(Arc<OwnedFd>);

impl EventCounter {
    /// A new one.
    pub fn new() -> Result<EventCounter> {
        let made = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let fd = made.map_err(|error| Error::os(sys::errno(error), "could not make an eventfd"))?;
        Ok(EventCounter(Arc::new(fd)))
    }

    /// A counter that another process has passed. The other process can make it one that blocks at any time. Waiting
    /// never blocks, and [`EventCounter::signal`] does so where the counter is full, until it is emptied.
    pub fn from_descriptor(fd: OwnedFd) -> Result<EventCounter> {
        let failed = |error| Error::os(sys::errno(error), "could not use an eventfd");
        let status = rustix::fs::fstat(&fd).map_err(failed)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::Unknown {
            return Err(Error::invalid_argument("a descriptor that was passed is no eventfd"));
        }
        // Other descriptors without a type (of timers, of epoll) can't be recognised by the status.
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        if link.is_ok_and(|link| link.as_os_str() != "anon_inode:[eventfd]") {
            return Err(Error::invalid_argument("a descriptor that was passed is no eventfd"));
        }
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(failed)?;
        if !flags.contains(OFlags::NONBLOCK) {
            rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK).map_err(failed)?;
        }
        Ok(EventCounter(Arc::new(fd)))
    }

    /// Waits until the other side has counted, and takes the count.
    pub async fn wait(&self) -> Result<()> {
        loop {
            let mut count = [0; 8];
            match self.read_now(&mut count) {
                Ok(8) => return Ok(()),
                Ok(_) => return Err(Error::invalid_argument("a descriptor that was passed is no eventfd")),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    readable(&self.0).await.map_err(|errno| Error::os(errno, "could not wait for an eventfd"))?;
                }
                Err(error) => return Err(Error::os(sys::errno(error), "could not read an eventfd")),
            }
        }
    }

    /// Takes the count, where there is one.
    pub fn take(&self) {
        // An error is reported to the waiters.
        let _: std::result::Result<usize, Errno> = self.read_now(&mut [0; 8]);
    }

    /// Reads without waiting, whatever flags the other process has set.
    fn read_now(&self, count: &mut [u8; 8]) -> std::result::Result<usize, Errno> {
        let current = u64::MAX;
        match rustix::io::preadv2(&self.0, &mut [IoSliceMut::new(count)], current, ReadWriteFlags::NOWAIT) {
            // Kernels before 5.9 have no such reads of eventfds.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => rustix::io::read(&self.0, count),
            result => result,
        }
    }

    /// True where the count is so high that a signal may block.
    pub fn is_full(&self) -> bool {
        let mut look = [PollFd::new(&self.0, PollFlags::OUT)];
        matches!(poll(&mut look, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0))
    }

    /// Counts: wakes the other side. A counter that is full wakes it anyway. [`Interruption::send`] ends a wait for room.
    pub fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// A thread that may wait for room in a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interruption {
    thread: i32,
}

impl Interruption {
    /// Of the thread that calls.
    pub fn here() -> Interruption {
        thread_local!(static THREAD: i32 = rustix::thread::gettid().as_raw_nonzero().get());
        Interruption { thread: THREAD.with(|thread| *thread) }
    }

    /// Its number.
    pub fn number(self) -> i32 {
        self.thread
    }

    /// That of the thread with a number.
    pub fn of(number: i32) -> Interruption {
        Interruption { thread: number }
    }

    /// Ends the call that the thread waits in, with `EINTR`. It has no effect on a thread that is between two calls.
    pub fn send(self) {
        sys::interrupt(self.thread);
    }
}

impl AsFd for EventCounter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt;

    #[test]
    fn a_count_is_waited_for_and_taken() {
        let counter = EventCounter::new().unwrap();
        let theirs = EventCounter::from_descriptor(counter.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let waker = std::thread::spawn(move || {
            theirs.signal();
            theirs.signal();
        });
        rt::block_on(counter.wait()).unwrap();
        waker.join().unwrap();
        let again = counter.clone();
        let later = std::thread::spawn(move || again.signal());
        rt::block_on(counter.wait()).unwrap();
        later.join().unwrap();
    }

    #[test]
    fn a_counter_that_blocks_keeps_no_task_waiting() {
        let theirs = EventCounter::new().unwrap();
        let ours = EventCounter::from_descriptor(theirs.as_fd().try_clone_to_owned().unwrap()).unwrap();
        rustix::fs::fcntl_setfl(&theirs, OFlags::empty()).unwrap();
        let before = std::time::Instant::now();
        let waited = rt::block_on(rt::within(std::time::Duration::from_millis(50), ours.wait()));
        assert!(waited.is_none() && before.elapsed() < std::time::Duration::from_secs(20));
        assert!(!ours.is_full());
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert!(ours.is_full());
        let signalling = ours.clone();
        let full = std::thread::spawn(move || signalling.signal());
        while !full.is_finished() {
            ours.take();
            std::thread::yield_now();
        }
        full.join().unwrap();
    }

    #[test]
    fn a_wait_for_room_ends_by_an_interruption() {
        let theirs = EventCounter::new().unwrap();
        let ours = EventCounter::from_descriptor(theirs.as_fd().try_clone_to_owned().unwrap()).unwrap();
        rustix::fs::fcntl_setfl(&theirs, OFlags::empty()).unwrap();
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let (number, numbers) = std::sync::mpsc::channel();
        let signalling = ours.clone();
        let full = std::thread::spawn(move || {
            number.send(Interruption::here()).unwrap();
            signalling.signal();
        });
        let waiting = numbers.recv().unwrap();
        let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !full.is_finished() {
            assert!(std::time::Instant::now() < until, "it waits on");
            waiting.send();
            std::thread::yield_now();
        }
        full.join().unwrap();
        assert!(ours.is_full());
    }

    #[test]
    fn what_is_no_eventfd_is_refused() {
        let (pipe, _end) = rustix::pipe::pipe().unwrap();
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).unwrap();
        for fd in [pipe, file.into(), socket.into(), epoll] {
            assert!(EventCounter::from_descriptor(fd).is_err());
        }
    }
}
