// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opening an export of an NBD server.

use super::build::{Draft, Opened, Opener};
use crate::nbd_client::{Client, ClientTls};
use crate::node::StorageKind;
use crate::options::{self, schemas};
use crate::protocols::{FileDriver, ForeignContext};
use cowshed_nbd_proto::NbdUri;
use cowshed_nbd_proto::context::QEMU_ALLOCATION_DEPTH;
use cowshed_storage::File;
use cowshed_types::{Error, Result};
use std::rc::Rc;
use std::sync::Arc;

impl Opener {
    pub(super) async fn nbd_driver(self: &Rc<Self>, draft: &mut Draft) -> Opened {
        let options = options::nbd_client(&draft.options, |id| self.client_tls(id))?;
        let filename = options.uri().image_name();
        let client = Client::connect(options).await?;
        if draft.place.auto_read_only && client.is_read_only() {
            draft.settings.read_only = true;
        }
        let client = Arc::new(client);
        let file = client.file(!draft.settings.read_only)?;
        // The context doesn't have the places of data, so only a request for a map shows it.
        let context = draft.options.text("x-dirty-bitmap").filter(|_| self.no_content);
        let context = context.map(|name| ForeignContext { client, has_depths: name == QEMU_ALLOCATION_DEPTH });
        let (name, kind) = (schemas::NBD.name, Some(StorageKind::Export));
        Ok((Box::new(FileDriver { name, file, kind, null_reads_zeroes: None, context }), filename))
    }
}

/// TLS credentials that options can name.
#[derive(Clone, Debug)]
pub enum TlsCredentials {
    /// Credentials of a client.
    Client(ClientTls),
    /// Credentials of a server, which are no good for an image.
    Server,
}

impl Opener {
    /// The credentials with this id.
    fn client_tls(&self, id: &str) -> Result<ClientTls> {
        let given = self.tls.iter().find(|(known, _)| known == id).map(|(_, credentials)| credentials);
        match (given, self.graph.tls_credentials(id)) {
            (Some(TlsCredentials::Client(credentials)), _) => Ok(credentials.clone()),
            (Some(TlsCredentials::Server), _) => {
                Err(Error::invalid_argument("Expected TLS credentials for a client endpoint"))
            }
            (None, Some(credentials)) => Ok(credentials),
            (None, None) if self.secret(id).is_ok() => {
                Err(Error::invalid_argument(format!("Object with id '{id}' is not TLS credentials")))
            }
            (None, None) => Err(options::no_credentials(id)),
        }
    }
}

/// True for names of exports on NBD servers. Like a device, such an image is there before it is created, and keeps its
/// old contents then.
pub fn is_nbd_name(name: &str) -> bool {
    NbdUri::is_one(name)
}

/// The export that a URI names, for writing, as storage for a new image.
pub async fn open_nbd_file(name: &str) -> Result<File> {
    let options =
        options::nbd_client(&options::nbd_of_uri(&NbdUri::parse(name)?), |id| Err(options::no_credentials(id)));
    let options = options.map_err(|error: Error| error.file(name))?;
    Client::connect(options).await?.into_file(true)
}
