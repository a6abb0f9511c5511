// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The objects that options refer to by an id: TLS credentials (`tls-creds`) and secrets (`encrypt.key-secret`).

use super::Graph;
use crate::nbd_client::ClientTls;
use crate::secret::Secret;
use std::sync::PoisonError;

impl Graph {
    /// From now on options can name these credentials; those that had the id before are forgotten. `None` forgets only.
    /// Open nodes keep theirs.
    pub fn set_tls_credentials(&self, id: &str, credentials: Option<ClientTls>) {
        let mut known = self.credentials.lock().unwrap_or_else(PoisonError::into_inner);
        match credentials {
            Some(credentials) => known.insert(id.to_owned(), credentials),
            None => known.remove(id),
        };
    }

    pub(crate) fn tls_credentials(&self, id: &str) -> Option<ClientTls> {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }

    /// From now on options can name this secret; `None` forgets the one of this id. Nodes that are open stay open.
    pub fn set_secret(&self, id: &str, secret: Option<Secret>) {
        let mut known = self.secrets.lock().unwrap_or_else(PoisonError::into_inner);
        match secret {
            Some(secret) => known.insert(id.to_owned(), secret),
            None => known.remove(id),
        };
    }

    pub(crate) fn secret(&self, id: &str) -> Option<Secret> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner).get(id).cloned()
    }
}
