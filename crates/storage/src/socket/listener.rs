// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening sockets.

use super::name::SocketFile;
use super::readiness::{self, Interest};
use super::stale::clear_stale;
use super::{Socket, SocketAddress, describe};
use crate::attempts::ring_gave_up;
use crate::{rt, sys};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, sockopt};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// First descriptor that a service manager passes (systemd's `sd_listen_fds`).
const LISTEN_FDS_START: i32 = 3;

/// Clients that wait to be accepted, as the standard library has it.
const BACKLOG: i32 = 128;

/// A listening socket. When it made a file in the file system, that goes with it.
#[derive(Debug)]
pub struct Listener {
    /// Goes first: once the socket is closed, another process may have the number of its inode.
    file: Option<SocketFile>,
    fd: Arc<OwnedFd>,
    address: SocketAddress,
}

/// The options of listening on a TCP address, beside the address; none of them is for Unix sockets. Names and meaning
/// as in QEMU's `InetSocketAddress`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenOptions {
    /// Clients of IPv4 may come, or not; without this and the next one, as the host has addresses.
    pub ipv4: Option<bool>,
    /// Clients of IPv6 may come, or not.
    pub ipv6: Option<bool>,
    /// The host is an address: no name server is asked.
    pub numeric: bool,
    /// The last port that is tried where earlier ones are taken.
    pub last_port: Option<u16>,
    /// The system asks silent clients whether they are still there.
    pub keep_alive: Option<KeepAlive>,
    /// Multipath TCP, for clients that have it.
    pub mptcp: bool,
}

/// The questions of the system to silent clients; `None` and 0 are the system's own values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepAlive {
    /// Questions without an answer after which a client is gone.
    pub count: Option<u32>,
    /// Seconds of silence before the first question.
    pub idle_seconds: Option<u32>,
    /// Seconds between two questions.
    pub interval_seconds: Option<u32>,
}

impl ListenOptions {
    fn takes(&self, address: &SocketAddr) -> bool {
        match (self.ipv4, self.ipv6) {
            (Some(true), Some(true)) => true,
            (Some(true), None | Some(false)) => address.is_ipv4(),
            (None | Some(false), Some(true)) => address.is_ipv6(),
            (ipv4, ipv6) => {
                if address.is_ipv4() {
                    ipv4 != Some(false)
                } else {
                    ipv6 != Some(false)
                }
            }
        }
    }

    fn check(&self, address: &SocketAddress) -> Result<()> {
        let SocketAddress::Tcp { host, port } = address else { return Ok(()) };
        if (self.ipv4, self.ipv6) == (Some(false), Some(false)) {
            return Err(Error::invalid_argument("Cannot disable IPv4 and IPv6 at same time"));
        }
        if self.numeric && !host.is_empty() && host.parse::<std::net::IpAddr>().is_err() {
            let message = format!("address resolution failed for {host}:{port}: Name or service not known");
            return Err(Error::invalid_argument(message));
        }
        if self.last_port.is_some_and(|last| last < *port) {
            return Err(Error::invalid_argument("the last port is lower than the first one").file(address.to_string()));
        }
        Ok(())
    }
}

impl Listener {
    /// As [`Listener::bind`], in a way of one's own.
    pub fn bind_with(address: &SocketAddress, options: &ListenOptions) -> Result<Vec<Listener>> {
        options.check(address)?;
        let SocketAddress::Tcp { host, port } = address else { return Self::bind(address) };
        // One socket for both families; a machine without IPv6 gets the other.
        let any = [SocketAddr::from(([0u16; 8], *port)), SocketAddr::from(([0u8; 4], *port))];
        let found = if host.is_empty() { any.to_vec() } else { SocketAddress::resolve(host, *port)? };
        let mut found: Vec<SocketAddr> = found.into_iter().filter(|one| options.takes(one)).collect();
        if found.is_empty() {
            let message = "the host has no address of the kind that is wanted";
            return Err(Error::new(ErrorKind::NotFound, message).file(address.to_string()));
        }
        if host.is_empty() && found.len() == any.len() {
            let has_ipv6 = TcpListener::bind((std::net::Ipv6Addr::UNSPECIFIED, 0)).is_ok();
            found = any.into_iter().filter(|one| one.is_ipv6() == has_ipv6).collect();
        }
        let last = options.last_port.unwrap_or(*port).max(*port);
        for port in *port..=last {
            found.iter_mut().for_each(|one| one.set_port(port));
            match Self::bind_all(&found, options) {
                Err(error) if error.errno().0 == libc::EADDRINUSE && port < last => {}
                result => return result,
            }
        }
        Err(Error::internal("no port was tried"))
    }

    /// All of them, with one port.
    fn bind_all(addresses: &[SocketAddr], options: &ListenOptions) -> Result<Vec<Listener>> {
        let mut listeners: Vec<Listener> = Vec::new();
        for address in addresses {
            let mut address = *address;
            if let Some(SocketAddress::Tcp { port, .. }) = listeners.first().map(|first| &first.address) {
                address.set_port(*port);
            }
            let failed = |errno, what: &str| Error::os(sys::errno(errno), what).file(address.to_string());
            let fd = if options.mptcp {
                multipath(&address).map_err(|errno| failed(errno, "could not listen with MPTCP"))?
            } else {
                let bound = TcpListener::bind(address);
                bound.map_err(|error| unbound(&error, &address.to_string()))?.into()
            };
            if let Some(keep_alive) = &options.keep_alive {
                // Accepted connections inherit it.
                keep_alive.set(&fd).map_err(|(errno, what)| failed(errno, what))?;
            }
            listeners.push(Self::from_descriptor(fd)?);
        }
        Ok(listeners)
    }

    /// Listens on an address. A host name may have several addresses, hence several listeners; an empty host is every
    /// address, IPv4 and IPv6. A Unix socket without a listener is replaced. May wait for a name server.
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
        let listener = TcpListener::bind(addresses).map_err(|error| unbound(&error, &name))?;
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
        let listener = bound.map_err(|error| {
            let error = Error::io(&error, "could not listen").file(path.replace('\0', "@"));
            error.qemu(format!("Failed to bind socket to {path}"))
        })?;
        let mut listener = Self::from_descriptor(listener.into())?;
        listener.address = SocketAddress::Unix(path.to_owned());
        if !path.starts_with('\0') {
            // Without its name the socket has none that could be removed.
            listener.file = SocketFile::bound(path.as_ref()).ok();
        }
        Ok(listener)
    }

    /// A socket that listens already.
    pub fn from_descriptor(fd: OwnedFd) -> Result<Listener> {
        let listens = rustix::net::sockopt::socket_acceptconn(&fd);
        if listens == Err(rustix::io::Errno::NOTSOCK) {
            let error = Error::os(Errno(libc::ENOTSOCK), "the descriptor is not a listening socket");
            return Err(error.qemu("Failed to use socket activation: Unable to query remote socket address"));
        }
        if !listens.unwrap_or(false) {
            return Err(Error::invalid_argument("the descriptor is not a listening socket"));
        }
        // Accepting is tried when a client seems to be there, and that may have gone again.
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
        Ok(Listener { fd: Arc::new(fd), address, file: None })
    }

    /// True when a service manager passed sockets to this process (`LISTEN_PID`, `LISTEN_FDS`). Variables that are for another
    /// process, as a service hands them on to its children, count for nothing.
    pub fn are_passed() -> bool {
        passed_count().is_some()
    }

    /// Takes the descriptors that a service manager passed, for [`Listener::passed`]. Where none was passed under its number, a
    /// file that this process opens gets that number; so this comes before it opens any.
    pub fn claim_passed() {
        drop(claimed());
    }

    /// Refuses descriptors that a service manager named, and that aren't open.
    pub fn check_passed() -> Result<()> {
        claimed().as_ref().map(drop).map_err(Clone::clone)
    }

    /// The listening sockets that a service manager passed to this process, none when it didn't. They can be taken once.
    pub fn passed() -> Result<Vec<Listener>> {
        let taken = std::mem::replace(&mut *claimed(), Ok(Vec::new()));
        taken?.into_iter().map(Listener::from_descriptor).collect()
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
            let mut ready = match rt::current_ring() {
                Some(ring) => sys::ring_result(ring.readable(&self.fd).await.0).map(drop),
                None => Err(Errno(libc::EAGAIN)),
            };
            if ready.is_err_and(ring_gave_up) {
                ready = readiness::ready(&self.fd, Interest::Read).await;
            }
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

fn unbound(error: &std::io::Error, address: &str) -> Error {
    let sentence = match error.kind() {
        std::io::ErrorKind::AddrInUse => "Failed to find an available port",
        _ => "Failed to bind socket",
    };
    Error::io(error, "could not listen").file(address).qemu(sentence)
}

/// The number of descriptors that `sd_listen_fds` describes, where they are for this process.
fn passed_count() -> Option<i32> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<i32>().ok());
    let process = number("LISTEN_PID").and_then(|pid| u32::try_from(pid).ok())?;
    number("LISTEN_FDS").filter(|count| process == std::process::id() && (1..=MOST_PASSED).contains(count))
}

/// More are a mistake.
const MOST_PASSED: i32 = 1 << 20;

/// The descriptors that were passed and not taken yet.
fn claimed() -> MutexGuard<'static, Result<Vec<OwnedFd>>> {
    static CLAIMED: OnceLock<Mutex<Result<Vec<OwnedFd>>>> = OnceLock::new();
    let claimed = CLAIMED.get_or_init(|| Mutex::new(passed_descriptors()));
    claimed.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs once.
fn passed_descriptors() -> Result<Vec<OwnedFd>> {
    let Some(count) = passed_count() else { return Ok(Vec::new()) };
    for number in LISTEN_FDS_START..LISTEN_FDS_START + count {
        sys::close_on_exec(number).map_err(|errno| {
            let error = Error::os(errno, format!("LISTEN_FDS names descriptor {number}, which can't be used"));
            error.qemu(format!("Socket activation failed: invalid file descriptor fd = {number}"))
        })?;
    }
    let numbers = LISTEN_FDS_START..LISTEN_FDS_START + count;
    // SAFETY: the descriptors are open (the calls above succeeded). The service manager made them for this process, by
    // its variables, and this runs once, so each gets its only owner.
    Ok(numbers.map(|number| unsafe { OwnedFd::from_raw_fd(number) }).collect())
}

impl KeepAlive {
    fn set(&self, fd: &OwnedFd) -> std::result::Result<(), (rustix::io::Errno, &'static str)> {
        let seconds =
            |value: Option<u32>| value.filter(|&value| value > 0).map(|value| Duration::from_secs(value.into()));
        sockopt::set_socket_keepalive(fd, true)
            .map_err(|errno| (errno, "Unable to set keep-alive option on socket"))?;
        if let Some(count) = self.count.filter(|&count| count > 0) {
            let what = "Unable to set TCP keep-alive count option on socket";
            sockopt::set_tcp_keepcnt(fd, count).map_err(|errno| (errno, what))?;
        }
        if let Some(idle) = seconds(self.idle_seconds) {
            let what = "Unable to set TCP keep-alive idle option on socket";
            sockopt::set_tcp_keepidle(fd, idle).map_err(|errno| (errno, what))?;
        }
        if let Some(interval) = seconds(self.interval_seconds) {
            let what = "Unable to set TCP keep-alive interval option on socket";
            sockopt::set_tcp_keepintvl(fd, interval).map_err(|errno| (errno, what))?;
        }
        Ok(())
    }
}

/// A socket that listens for clients of Multipath TCP, and of TCP.
fn multipath(address: &SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, Some(ipproto::MPTCP))?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    rustix::net::bind(&fd, address)?;
    rustix::net::listen(&fd, BACKLOG)?;
    Ok(fd)
}
