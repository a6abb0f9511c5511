// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening sockets.

use super::readiness::{self, Interest};
use super::stale::clear_stale;
use super::{Socket, SocketAddress, describe};
use crate::{rt, sys};
use cowshed_block::{Errno, Error, Result};
use rustix::net::SocketFlags;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

/// First descriptor that a service manager passes (systemd's `sd_listen_fds`).
const LISTEN_FDS_START: i32 = 3;

/// A listening socket. When it made a file in the file system, that goes with it.
#[derive(Debug)]
pub struct Listener {
    fd: Arc<OwnedFd>,
    address: SocketAddress,
    path: Option<PathBuf>,
}

impl Listener {
    /// Listens on an address. A host name may have several addresses, hence several listeners; an empty host is every
    /// address, IPv4 and IPv6. A Unix socket that nobody listens on any more is replaced. May wait for a name server.
    pub fn bind(address: &SocketAddress) -> Result<Vec<Listener>> {
        match address {
            SocketAddress::Unix(path) => Ok(vec![Self::bind_unix(path)?]),
            SocketAddress::Tcp { host, port } if host.is_empty() => {
                // One socket for both families; a machine without IPv6 gets the other.
                let any = [SocketAddr::from(([0u16; 8], *port)), SocketAddr::from(([0u8; 4], *port))];
                Ok(vec![Self::bind_tcp(&any)?])
            }
            SocketAddress::Tcp { host, port } => {
                let mut port = *port;
                let mut listeners = Vec::new();
                for mut found in SocketAddress::resolve(host, port)? {
                    // Where any port is right, all get the same one.
                    found.set_port(port);
                    let listener = Self::bind_tcp(&[found])?;
                    if let SocketAddress::Tcp { port: bound, .. } = listener.address {
                        port = bound;
                    }
                    listeners.push(listener);
                }
                Ok(listeners)
            }
        }
    }

    fn bind_tcp(addresses: &[SocketAddr]) -> Result<Listener> {
        let name = addresses.first().map(ToString::to_string).unwrap_or_default();
        let listener =
            TcpListener::bind(addresses).map_err(|error| Error::io(&error, "could not listen").file(name))?;
        Self::from_descriptor(listener.into())
    }

    fn bind_unix(path: &str) -> Result<Listener> {
        let address = SocketAddress::unix(path)?;
        let bound = match UnixListener::bind_addr(&address) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && !path.starts_with('\0') => {
                clear_stale(path.as_ref())?;
                UnixListener::bind_addr(&address)
            }
            bound => bound,
        };
        let listener = bound.map_err(|error| Error::io(&error, "could not listen").file(path.replace('\0', "@")))?;
        let mut listener = Self::from_descriptor(listener.into())?;
        listener.address = SocketAddress::Unix(path.to_owned());
        listener.path = (!path.starts_with('\0')).then(|| PathBuf::from(path));
        Ok(listener)
    }

    /// A socket that listens already.
    pub fn from_descriptor(fd: OwnedFd) -> Result<Listener> {
        if !rustix::net::sockopt::socket_acceptconn(&fd).unwrap_or(false) {
            return Err(Error::invalid_argument("the descriptor is not a listening socket"));
        }
        // Accepting is tried when somebody seems to be there, who may have gone again.
        rustix::io::ioctl_fionbio(&fd, true)
            .map_err(|error| Error::os(sys::errno(error), "could not set up a listening socket"))?;
        let local = rustix::net::getsockname(&fd)
            .map_err(|error| Error::os(sys::errno(error), "could not ask for the address of a socket"))?;
        let address = match SocketAddr::try_from(local.clone()) {
            Ok(address) => SocketAddress::Tcp { host: address.ip().to_string(), port: address.port() },
            Err(_) => SocketAddress::Unix(match rustix::net::SocketAddrUnix::try_from(local.clone()) {
                Ok(unix) => match (unix.path_bytes(), unix.abstract_name()) {
                    (Some(path), _) => String::from_utf8_lossy(path).into_owned(),
                    (None, Some(name)) => format!("\0{}", String::from_utf8_lossy(name)),
                    (None, None) => String::new(),
                },
                Err(_) => describe(&local),
            }),
        };
        Ok(Listener { fd: Arc::new(fd), address, path: None })
    }

    /// The listening sockets that a service manager passed to this process (`LISTEN_PID`, `LISTEN_FDS`), none when it
    /// didn't. They can be taken once.
    pub fn passed() -> Result<Vec<Listener>> {
        passed_descriptors()?.into_iter().map(Listener::from_descriptor).collect()
    }

    /// Where it listens, with the port that the system chose.
    pub fn address(&self) -> &SocketAddress {
        &self.address
    }

    /// Waits for a client. An error is final, except for those that a moment helps against ([`Listener::is_transient`]).
    pub async fn accept(&self) -> Result<Socket> {
        loop {
            match rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC) {
                Ok(fd) => return Ok(Socket::new(fd)),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
                Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(self.failed(sys::errno(error))),
            }
            let ready = match rt::current_ring() {
                Some(ring) => sys::ring_result(ring.readable(&self.fd).await.0).map(drop),
                None => readiness::ready(&self.fd, Interest::Read).await,
            };
            match ready {
                Ok(()) | Err(Errno(libc::EINTR | libc::EAGAIN)) => {}
                Err(errno) => return Err(self.failed(errno)),
            }
        }
    }

    fn failed(&self, errno: Errno) -> Error {
        Error::os(errno, "could not accept a client").file(self.address.to_string())
    }

    /// True for errors of [`Listener::accept`] after which it can be tried again in a moment: no descriptor or no memory
    /// left.
    pub fn is_transient(error: &Error) -> bool {
        matches!(error.errno().0, libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM | libc::EPERM)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::debug!(%error, path = %path.display(), "could not remove the file of a listening socket");
        }
    }
}

/// The descriptors that `sd_listen_fds` describes.
fn passed_descriptors() -> Result<Vec<OwnedFd>> {
    static TAKEN: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<i32>().ok());
    if number("LISTEN_PID").and_then(|pid| u32::try_from(pid).ok()) != Some(std::process::id()) {
        return Ok(Vec::new());
    }
    let count = number("LISTEN_FDS").filter(|count| (1..=1024).contains(count));
    let count = count.ok_or_else(|| Error::invalid_argument("LISTEN_FDS is not a number of descriptors"))?;
    if TAKEN.swap(true, std::sync::atomic::Ordering::AcqRel) {
        return Ok(Vec::new());
    }
    let mut passed = Vec::new();
    for number in LISTEN_FDS_START..LISTEN_FDS_START + count {
        sys::close_on_exec(number)
            .map_err(|errno| Error::os(errno, format!("LISTEN_FDS names descriptor {number}, which can't be used")))?;
        // SAFETY: the descriptor is open (the call above succeeded), the service manager made it for this process and
        // says so, and `TAKEN` makes this its only owner.
        passed.push(unsafe { OwnedFd::from_raw_fd(number) });
    }
    Ok(passed)
}
