// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS credentials that options refer to by their id (`tls-creds`).

use super::Graph;
use cowshed_nbd::ClientTls;
use std::sync::PoisonError;

impl Graph {
    /// From now on options can name these credentials; those that had the id before are forgotten. `None` forgets only.
    /// Nodes that are open keep what they have.
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
}
