// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The exports of a server.

use super::handshake::{Handshake, OptionEnd, Style, begin, insists_on_tls};
use super::{CONNECT_TIMEOUT, ClientOptions, ExportFacts};
use crate::{Receiver, Stream};
use cowshed_nbd_proto::option::{InfoRequest, MetaContextRequest, code, rep};
use cowshed_nbd_proto::{HeaderStyle, ReplyStyle};
use cowshed_storage::{Socket, rt};
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::{Either, select};
use std::pin::pin;

/// An export that a server has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// Its name.
    pub name: String,
    /// The server's description of it; `None` if the server has names only.
    pub facts: Option<ExportFacts>,
    /// The block sizes in `facts` are the server's own, not those of the protocol.
    pub has_block_sizes: bool,
    /// Requests may have lengths of 64 bits (extended headers).
    pub is_extended: bool,
    /// Metadata contexts that can be chosen.
    pub contexts: Vec<String>,
}

/// Asks a server for its exports; the export that `options` name means nothing.
pub async fn list_exports(options: &ClientOptions) -> Result<Vec<ListedExport>> {
    let asking = pin!(async {
        let stream = Stream::new(Socket::connect(&options.address, CONNECT_TIMEOUT).await?);
        let mut receiver = Receiver::default();
        let (mut handshake, style) = begin(&stream, &mut receiver, options).await?;
        let listed = match style {
            Style::Fixed => {
                let listed = handshake.list().await;
                handshake.abort().await;
                listed
            }
            Style::Newstyle => Err(Error::unsupported("the server can't list its exports: it takes no options")),
            Style::Oldstyle => Ok(vec![handshake.only_export()]),
        };
        drop(handshake);
        stream.close().await;
        listed
    });
    let listed = match select(asking, pin!(rt::sleep(CONNECT_TIMEOUT))).await {
        Either::Left((listed, _)) => listed,
        Either::Right(_) => Err(Error::new(ErrorKind::Io, "the server took too long to answer")),
    };
    listed.map_err(|error| error.file(options.uri().to_string()))
}

impl Handshake<'_> {
    async fn list(&mut self) -> Result<Vec<ListedExport>> {
        self.choose_replies().await?;
        if let OptionEnd::Refused(kind, message) = self.ask(code::LIST, &[]).await? {
            return Err(match kind {
                rep::ERR_TLS_REQD => insists_on_tls("3 (list)", &message),
                _ => Error::new(ErrorKind::PermissionDenied, format!("the server doesn't list its exports: {message}")),
            });
        }
        let exports = std::mem::take(&mut self.said.exports);
        let mut listed = Vec::with_capacity(exports.len());
        for (name, description) in exports {
            listed.push(self.describe(name, description).await?);
        }
        Ok(listed)
    }

    /// The one export of an oldstyle server.
    fn only_export(&self) -> ListedExport {
        ListedExport {
            name: String::new(),
            facts: Some(self.agreed.facts.clone()),
            has_block_sizes: false,
            is_extended: false,
            contexts: Vec::new(),
        }
    }

    async fn describe(&mut self, name: String, description: String) -> Result<ListedExport> {
        self.agreed.facts = ExportFacts::unsaid();
        self.said.block_sizes = false;
        let request = InfoRequest { name: &name, block_size: true, canonical_name: false, description: true };
        let facts = match self.ask(code::INFO, &request.encode()).await? {
            // As in QEMU the list's description counts: a server may give another one to those that choose the export.
            OptionEnd::Ack => Some(ExportFacts { description, ..self.agreed.facts.clone() }),
            OptionEnd::Refused(..) => None,
        };
        self.said.contexts.clear();
        if facts.is_some() && self.agreed.replies != ReplyStyle::Simple {
            let request = MetaContextRequest { name: &name, queries: Vec::new(), too_many: false };
            // A refusal means that there are none.
            self.ask(code::LIST_META_CONTEXT, &request.encode()).await?;
        }
        Ok(ListedExport {
            name,
            facts,
            has_block_sizes: self.said.block_sizes,
            is_extended: self.agreed.headers == HeaderStyle::Extended,
            contexts: std::mem::take(&mut self.said.contexts),
        })
    }
}
