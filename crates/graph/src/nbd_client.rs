// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The client of NBD servers: that of `cowshed-nbd`, or where the feature `nbd` is off the same types without values.

#[cfg(feature = "nbd")]
pub use cowshed_nbd::{Client, ClientOptions, ClientTls};

#[cfg(not(feature = "nbd"))]
pub use absent::{Client, ClientOptions, ClientTls};

#[cfg(not(feature = "nbd"))]
mod absent {
    use cowshed_nbd_proto::NbdUri;
    use cowshed_nbd_proto::reply::StatusRun;
    use cowshed_nbd_proto::uri::ServerAddress;
    use cowshed_storage::{File, SocketAddress};
    use cowshed_types::{Errno, Error, Result};
    use std::convert::Infallible;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    fn absent() -> Error {
        Error::unsupported("NBD is not built in (feature `nbd`)")
    }

    /// Credentials of a client. There are none without the feature `nbd`.
    #[derive(Clone, Debug)]
    pub struct ClientTls(Infallible);

    impl ClientTls {
        pub fn from_dir(_: &Path, _: bool) -> Result<ClientTls> {
            Err(absent())
        }

        pub fn of_object(_: &Path, _: bool, _: bool) -> Result<ClientTls> {
            Err(absent())
        }

        pub fn unverified() -> Result<ClientTls> {
            Err(absent())
        }
    }

    /// The export of a server, with the options of the connection.
    #[derive(Clone, Debug)]
    pub struct ClientOptions {
        pub address: SocketAddress,
        pub export: String,
        pub tls: Option<ClientTls>,
        pub tls_hostname: Option<String>,
        pub reconnect_delay: Duration,
        pub open_timeout: Duration,
        pub context: Option<String>,
    }

    impl ClientOptions {
        pub fn new(address: SocketAddress, export: impl Into<String>) -> ClientOptions {
            ClientOptions {
                address,
                export: export.into(),
                tls: None,
                tls_hostname: None,
                reconnect_delay: Duration::ZERO,
                open_timeout: Duration::ZERO,
                context: None,
            }
        }

        pub fn uri(&self) -> NbdUri {
            let address = match &self.address {
                SocketAddress::Unix(path) => ServerAddress::Unix { path: path.clone() },
                SocketAddress::Tcp { host, port } => ServerAddress::Tcp { host: host.clone(), port: *port },
            };
            NbdUri {
                address,
                export: self.export.clone(),
                tls: self.tls.is_some(),
                tls_hostname: self.tls_hostname.clone(),
                tls_certificates: None,
                tls_verify_peer: None,
            }
        }
    }

    /// A connection. There is none without the feature `nbd`.
    #[derive(Debug)]
    pub enum Client {}

    impl Client {
        pub async fn connect(options: ClientOptions) -> Result<Client> {
            Err(absent().file(options.uri().image_name()))
        }

        pub fn is_read_only(&self) -> bool {
            match *self {}
        }

        pub fn file(self: &Arc<Self>, _: bool) -> Result<File> {
            match **self {}
        }

        pub fn into_file(self, _: bool) -> Result<File> {
            match self {}
        }

        pub async fn context_status(&self, _: u64, _: u64) -> std::result::Result<Vec<StatusRun>, Errno> {
            match *self {}
        }
    }
}
