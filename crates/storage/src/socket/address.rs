// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Where to connect or listen.

use cowshed_block::{Error, ErrorKind, Result};
use std::fmt;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};
use std::time::Duration;

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

impl SocketAddress {
    /// The address of a Unix socket as the system has it.
    pub(super) fn unix(path: &str) -> Result<UnixAddr> {
        let made = match path.strip_prefix('\0') {
            Some(name) => UnixAddr::from_abstract_name(name),
            None => UnixAddr::from_pathname(path),
        };
        made.map_err(|error| Error::io(&error, "can't be the address of a socket").file(path.replace('\0', "@")))
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
        let failed = |error: &std::io::Error| Error::io(error, "could not connect").file(self.to_string());
        match self {
            SocketAddress::Unix(path) => {
                let address = SocketAddress::unix(path)?;
                UnixStream::connect_addr(&address).map(OwnedFd::from).map_err(|error| failed(&error))
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

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Unix(path) => f.write_str(&path.replace('\0', "@")),
            SocketAddress::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            SocketAddress::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}
