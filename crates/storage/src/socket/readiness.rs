// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for a socket without a ring: one thread with an epoll for the whole process.

use crate::sys::{self, SysResult};
use cowshed_types::Errno;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use slab::Slab;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The event to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interest {
    Read,
    Write,
    HangUp,
}

/// Waits until a call of that kind would not block, or has an error to report.
pub(super) async fn ready(socket: &OwnedFd, interest: Interest) -> SysResult<()> {
    let watcher = WATCHER.as_ref().map_err(|&errno| errno)?;
    // A copy, because one descriptor can be watched only once, and receiving and sending wait at the same time.
    let copy = rustix::io::fcntl_dupfd_cloexec(socket, 0).map_err(sys::errno)?;
    let key = watcher.lock().insert(Registration { waker: None, ready: false });
    let waiting = Waiting { watcher, key, copy };
    let flags = match interest {
        Interest::Read => EventFlags::IN | EventFlags::RDHUP,
        Interest::Write => EventFlags::OUT,
        Interest::HangUp => EventFlags::RDHUP,
    };
    epoll::add(&watcher.epoll, &waiting.copy, EventData::new_u64(key as u64), flags | EventFlags::ONESHOT)
        .map_err(sys::errno)?;
    waiting.await;
    Ok(())
}

static WATCHER: LazyLock<Result<Watcher, Errno>> = LazyLock::new(|| {
    let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(sys::errno)?;
    std::thread::Builder::new()
        .name("cowshed-sockets".to_owned())
        .spawn(|| {
            if let Ok(watcher) = &*WATCHER {
                watcher.watch();
            }
        })
        .map_err(|_| Errno::ENOMEM)?;
    Ok(Watcher { epoll, registrations: Mutex::default() })
});

struct Watcher {
    epoll: OwnedFd,
    registrations: Mutex<Slab<Registration>>,
}

struct Registration {
    waker: Option<Waker>,
    ready: bool,
}

impl Watcher {
    fn lock(&self) -> MutexGuard<'_, Slab<Registration>> {
        self.registrations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "could not wait for sockets");
                    std::thread::sleep(std::time::Duration::from_millis(100));
                }
            }
            let mut wakers = Vec::new();
            {
                let mut registrations = self.lock();
                for event in &events {
                    // The registration may be gone, even taken by another wait: that one is woken for nothing and tries again.
                    if let Some(registration) = registrations.get_mut(event.data.u64() as usize) {
                        registration.ready = true;
                        wakers.extend(registration.waker.take());
                    }
                }
            }
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

struct Waiting {
    watcher: &'static Watcher,
    key: usize,
    copy: OwnedFd,
}

impl Future for Waiting {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut registrations = self.watcher.lock();
        let registration = &mut registrations[self.key];
        if registration.ready {
            return Poll::Ready(());
        }
        registration.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // The socket itself stays open elsewhere, so closing the copy would leave the registration behind.
        let _ = epoll::delete(&self.watcher.epoll, &self.copy);
        let registration = self.watcher.lock().remove(self.key);
        drop(registration);
    }
}
