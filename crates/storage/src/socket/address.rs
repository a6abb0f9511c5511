// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where to connect or listen.

use cowshed_types::{Error, ErrorKind, LINE_END, Result};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::{Duration, Instant};

/// The address of a stream socket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SocketAddress {
    /// A path; one that starts with NUL is a name of the abstract namespace.
    Unix(String),
    /// A host name or address, and a port. To listen, "" is every address of the machine, port 0 any free port.
    Tcp {
        /// Host name, IPv4 address, or IPv6 address (without brackets).
        host: String,
        /// Port.
        port: u16,
    },
}

/// Length of the path in an address of a Unix socket, with the byte that ends it.
const PATH_BYTES: usize = 108;

impl SocketAddress {
    /// The address of a Unix socket by QEMU's members. An abstract name that isn't `tight` fills its place with NUL.
    pub fn of_unix(path: &str, is_abstract: bool, tight: bool) -> SocketAddress {
        SocketAddress::Unix(match (is_abstract, tight) {
            (false, _) => path.to_owned(),
            (true, true) => format!("\0{path}"),
            (true, false) => format!("\0{path}{}", "\0".repeat((PATH_BYTES - 1).saturating_sub(path.len()))),
        })
    }

    /// The address of a Unix socket as the system has it.
    pub(super) fn unix(path: &str) -> Result<UnixAddr> {
        // The system would choose an abstract name, which any user of this machine can connect to, and which no caller learns.
        if path.is_empty() {
            return Err(Error::invalid_argument("the path of a Unix socket is empty"));
        }
        let made = match path.strip_prefix('\0') {
            Some(name) => UnixAddr::from_abstract_name(name),
            None => UnixAddr::from_pathname(path),
        };
        made.map_err(|error| {
            let named = |error: Error| error.file(path.replace('\0', "@"));
            if path.len() < PATH_BYTES {
                return named(Error::io(&error, "can't be the address of a socket"));
            }
            let (shown, most) = match path.strip_prefix('\0') {
                Some(name) => (name, PATH_BYTES - 1),
                None => (path, PATH_BYTES),
            };
            let sentence =
                format!("UNIX socket path '{shown}' is too long{LINE_END}Path must be less than {most} bytes");
            let message = format!("the path of a socket is too long: it has {} bytes, of at most 107", shown.len());
            named(Error::invalid_argument(message)).qemu(sentence)
        })
    }

    /// The addresses that a host has. May wait for a name server.
    pub(super) fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
        let name = SocketAddress::Tcp { host: host.to_owned(), port }.to_string();
        let addresses: Vec<SocketAddr> = (host, port)
            .to_socket_addrs()
            .map_err(|error| {
                let words = error.to_string();
                let words = words.strip_prefix("failed to lookup address information: ").unwrap_or(&words);
                let sentence = format!("address resolution failed for {name}: {words}");
                Error::new(ErrorKind::NotFound, format!("could not find the host: {words}")).file(&*name).qemu(sentence)
            })?
            .collect();
        match addresses.is_empty() {
            true => Err(Error::new(ErrorKind::NotFound, "the host has no address").file(name)),
            false => Ok(addresses),
        }
    }

    /// Connects and waits for it.
    pub(super) fn connect(&self, timeout: Duration) -> Result<OwnedFd> {
        // The caller names the peer.
        let failed = |error: &std::io::Error| {
            let address = self.to_string();
            // An IPv6 address has no brackets in QEMU's words, and an abstract name no mark.
            let bare = match self {
                SocketAddress::Unix(path) => Some(path.trim_matches('\0').to_owned()),
                SocketAddress::Tcp { .. } => address.strip_prefix('[').map(|rest| rest.replacen("]:", ":", 1)),
            };
            let sentence = format!("Failed to connect to '{}'", bare.as_deref().unwrap_or(&address));
            Error::io(error, format!("could not connect to '{address}'")).qemu(sentence)
        };
        match self {
            SocketAddress::Unix(path) => {
                let address = SocketAddress::unix(path)?;
                connect_unix(&address, timeout).map(OwnedFd::from).map_err(|error| failed(&error))
            }
            SocketAddress::Tcp { host, port } => {
                let mut last = None;
                for address in SocketAddress::resolve(host, *port)? {
                    match TcpStream::connect_timeout(&address, timeout) {
                        Ok(stream) => return Ok(stream.into()),
                        Err(error) => last = Some(failed(&error)),
                    }
                }
                Err(last.unwrap_or_else(|| Error::internal("no address to connect to")))
            }
        }
    }
}

/// Connects to a Unix socket, for at most `timeout` where the listener's queue is full: a blocking call would wait without end.
pub fn connect_unix(address: &UnixAddr, timeout: Duration) -> io::Result<UnixStream> {
    const PAUSE: Duration = Duration::from_millis(5);
    let peer = match (address.as_pathname(), address.as_abstract_name()) {
        (Some(path), _) => SocketAddrUnix::new(path)?,
        (None, Some(name)) => SocketAddrUnix::new_abstract_name(name)?,
        (None, None) => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let end = Instant::now().checked_add(timeout);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match connect(&socket, &peer) {
            Ok(()) => break,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if end.is_none_or(|end| Instant::now() < end) => std::thread::sleep(PAUSE),
            Err(Errno::AGAIN) => return Err(io::Error::from(Errno::TIMEDOUT)),
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Unix(path) => f.write_str(&path.trim_end_matches('\0').replace('\0', "@")),
            SocketAddress::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            SocketAddress::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PATH_BYTES, SocketAddress};

    #[test]
    fn abstract_names_fill_their_place_by_bytes() {
        for (name, is_tight, bytes) in [("é", false, PATH_BYTES), ("disk", false, PATH_BYTES), ("é", true, 3)] {
            let SocketAddress::Unix(path) = SocketAddress::of_unix(name, true, is_tight) else { panic!("{name}") };
            assert_eq!(path.len(), bytes, "{name}");
            SocketAddress::unix(&path).expect("an address");
        }
    }
}
