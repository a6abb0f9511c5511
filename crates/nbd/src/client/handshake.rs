// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Choosing an export: the best that both sides can do.

use super::{ClientOptions, ExportFacts};
use crate::{Receiver, Stream};
use cowshed_nbd_proto::context::BASE_ALLOCATION;
use cowshed_nbd_proto::flags::{ClientFlags, HandshakeFlags, TransmissionFlags};
use cowshed_nbd_proto::option::{self, InfoRequest, MetaContextRequest, OptionReply, OptionReplyHeader, code, rep};
use cowshed_nbd_proto::{HeaderStyle, Malformed, PORTABLE_PAYLOAD_BYTES, ReplyStyle, greeting};
use cowshed_storage::{Dispatch, IoBuf, SocketAddress};
use cowshed_types::{Error, ErrorKind, LINE_END, Result};

/// Replies to one option: more is no honest answer to this client's options.
const MAX_REPLIES: usize = 1024;
/// The longest read or write that this client sends, in bytes, whatever the server allows.
const MAX_REQUEST_BYTES: u32 = PORTABLE_PAYLOAD_BYTES;

/// The options on which both sides have agreed.
#[derive(Clone, Debug)]
pub(crate) struct Agreed {
    pub facts: ExportFacts,
    pub headers: HeaderStyle,
    pub replies: ReplyStyle,
    /// The number of the metadata context that was asked for.
    pub context: Option<u32>,
}

pub(super) struct Handshake<'a> {
    stream: &'a Stream,
    receiver: &'a mut Receiver,
    no_zeroes: bool,
    pub agreed: Agreed,
    pub said: Said,
}

/// The parts of the server's answers that only a list needs.
#[derive(Debug, Default)]
pub(super) struct Said {
    /// Exports with their descriptions.
    pub exports: Vec<(String, String)>,
    /// Metadata contexts.
    pub contexts: Vec<String>,
    /// The block sizes are the server's own.
    pub block_sizes: bool,
}

/// The extent of haggling between a client and a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// About options of all kinds.
    Fixed,
    /// The client names an export.
    Newstyle,
    /// Not at all: there is one export without a name.
    Oldstyle,
}

/// The end of a server's answer to an option.
pub(super) enum OptionEnd {
    Ack,
    Refused(u32, String),
}

pub(super) fn broken(why: Malformed) -> Error {
    Error::new(ErrorKind::Io, format!("the server breaks the protocol: {why}"))
}

/// The greeting, and encryption by the options.
pub(super) async fn begin<'a>(
    stream: &'a Stream,
    receiver: &'a mut Receiver,
    options: &ClientOptions,
) -> Result<(Handshake<'a>, Style)> {
    let agreed = Agreed {
        facts: ExportFacts::unsaid(),
        headers: HeaderStyle::Compact,
        replies: ReplyStyle::Simple,
        context: None,
    };
    let mut handshake = Handshake { stream, receiver, no_zeroes: false, agreed, said: Said::default() };
    let style = handshake.greet().await?;
    if let Some(credentials) = &options.tls {
        if style != Style::Fixed {
            return Err(Error::unsupported("the server has no TLS").qemu("Server does not support STARTTLS"));
        }
        handshake.start_tls().await?;
        if !handshake.receiver.is_empty() {
            return Err(broken(Malformed("the server went on without waiting for TLS")));
        }
        let name = match (&options.tls_hostname, &options.address) {
            (Some(name), _) => name.as_str(),
            (None, SocketAddress::Tcp { host, .. }) => host.as_str(),
            (None, SocketAddress::Unix(_)) => "localhost",
        };
        stream.start_client_tls(credentials, name).await?;
    }
    Ok((handshake, style))
}

/// From the greeting to the transmission phase.
pub(crate) async fn choose_export(stream: &Stream, receiver: &mut Receiver, options: &ClientOptions) -> Result<Agreed> {
    let (mut handshake, style) = begin(stream, receiver, options).await?;
    match style {
        Style::Fixed => handshake.haggle(options).await?,
        Style::Newstyle => handshake.export_name(&options.export).await?,
        Style::Oldstyle if options.export.is_empty() => {}
        Style::Oldstyle => return Err(Error::invalid_argument("Server does not support non-empty export names")),
    }
    let mut agreed = handshake.agreed;
    if let (Some(name), None) = (&options.context, agreed.context) {
        return Err(Error::invalid_argument(format!("the server has no metadata context '{name}' of this export")));
    }
    let minimum = agreed.facts.block_sizes.minimum;
    let maximum = agreed.facts.block_sizes.maximum.min(MAX_REQUEST_BYTES);
    agreed.facts.block_sizes.maximum = (maximum - maximum % minimum).max(minimum);
    if i64::try_from(agreed.facts.size).is_err() {
        return Err(Error::invalid_argument("the export is too large").value(agreed.facts.size));
    }
    Ok(agreed)
}

impl Handshake<'_> {
    /// The first bytes in both directions. An oldstyle server's first words about its export are all that there is to
    /// know.
    async fn greet(&mut self) -> Result<Style> {
        if self.receiver.peek(self.stream, 16).await?.is_some_and(greeting::is_oldstyle) {
            self.receiver.consume(16);
            let described = self.receiver.array(self.stream).await?;
            let (size, flags) = greeting::parse_oldstyle(&described).map_err(broken)?;
            self.receiver.skip(self.stream, greeting::EXPORT_NAME_ZEROES as u64).await?;
            (self.agreed.facts.size, self.agreed.facts.flags) = (size, flags);
            return Ok(Style::Oldstyle);
        }
        let greeting = self.receiver.array(self.stream).await?;
        let offered = greeting::parse(&greeting).map_err(broken)?;
        let fixed = offered.contains(HandshakeFlags::FIXED_NEWSTYLE);
        self.no_zeroes = offered.contains(HandshakeFlags::NO_ZEROES);
        let flags = ClientFlags::default()
            .with(ClientFlags::FIXED_NEWSTYLE, fixed)
            .with(ClientFlags::NO_ZEROES, self.no_zeroes);
        self.send(&flags.0.to_be_bytes()).await?;
        Ok(if fixed { Style::Fixed } else { Style::Newstyle })
    }

    pub(super) async fn send(&self, bytes: &[u8]) -> Result<()> {
        self.stream.send(vec![IoBuf::copy_from(bytes)], Dispatch::Together).await.0
    }

    /// The best replies that both sides can do.
    pub(super) async fn choose_replies(&mut self) -> Result<()> {
        if self.is_acked(code::EXTENDED_HEADERS).await? {
            self.agreed.headers = HeaderStyle::Extended;
            self.agreed.replies = ReplyStyle::Extended;
        } else if self.is_acked(code::STRUCTURED_REPLY).await? {
            self.agreed.replies = ReplyStyle::Structured;
        }
        Ok(())
    }

    async fn haggle(&mut self, options: &ClientOptions) -> Result<()> {
        let export = options.export.as_str();
        self.choose_replies().await?;
        if self.agreed.replies != ReplyStyle::Simple {
            self.set_context(export, options.context.as_deref()).await?;
        }
        let request = InfoRequest { name: export, block_size: true, canonical_name: false, description: true };
        match self.ask(code::GO, &request.encode()).await? {
            OptionEnd::Ack if self.agreed.facts.flags.contains(TransmissionFlags::HAS_FLAGS) => Ok(()),
            OptionEnd::Ack => Err(broken(Malformed("the server doesn't describe the export"))),
            OptionEnd::Refused(rep::ERR_UNSUP, _) if self.agreed.headers == HeaderStyle::Compact => {
                self.export_name(export).await
            }
            OptionEnd::Refused(kind, message) => {
                self.abort().await;
                Err(refused(kind, &message, export))
            }
        }
    }

    /// Ends in order, so that the server doesn't take the end for a failure.
    pub(super) async fn abort(&self) {
        // The server may be gone, which is no concern of ours any more.
        let _ = self.send(&option::encode(code::ABORT, &[])).await;
    }

    /// Asks for the context `other`, or for that of the protocol itself.
    async fn set_context(&mut self, export: &str, other: Option<&str>) -> Result<()> {
        let wanted = other.unwrap_or(BASE_ALLOCATION);
        let request = MetaContextRequest { name: export, queries: vec![wanted], too_many: false };
        self.said.contexts.clear();
        // A refusal only means that the server doesn't know where data is.
        let end = self.ask(code::SET_META_CONTEXT, &request.encode()).await?;
        let is_chosen = matches!(end, OptionEnd::Ack) && self.said.contexts.iter().any(|name| name == wanted);
        self.agreed.context = self.agreed.context.filter(|_| is_chosen);
        self.agreed.facts.has_status = is_chosen && wanted == BASE_ALLOCATION;
        Ok(())
    }

    async fn is_acked(&mut self, option: u32) -> Result<bool> {
        match self.ask(option, &[]).await? {
            OptionEnd::Ack => Ok(true),
            OptionEnd::Refused(..) => Ok(false),
        }
    }

    async fn start_tls(&mut self) -> Result<()> {
        let (kind, message) = match self.ask(code::STARTTLS, &[]).await? {
            OptionEnd::Ack => return Ok(()),
            OptionEnd::Refused(kind, message) => (kind, message),
        };
        self.abort().await;
        let because = if message.is_empty() { String::new() } else { format!(": {message}") };
        let error = Error::unsupported(format!("the server refuses TLS{because}"));
        Err(match kind {
            rep::ERR_POLICY => error.qemu(format!("Denied by server for option 5 (starttls){}", reported(&message))),
            _ => error,
        })
    }

    /// Sends an option and takes the answers up to the last one.
    pub(super) async fn ask(&mut self, option: u32, data: &[u8]) -> Result<OptionEnd> {
        self.send(&option::encode(option, data)).await?;
        for _ in 0..MAX_REPLIES {
            let header = OptionReplyHeader::parse(&self.receiver.array(self.stream).await?).map_err(broken)?;
            if header.option != option {
                return Err(broken(Malformed("the server answers another option")));
            }
            let len = header.len as usize;
            let data = match self.receiver.peek(self.stream, len).await? {
                Some(data) => data.to_vec(),
                None if len == 0 => Vec::new(),
                None => return Err(Error::new(ErrorKind::Io, "the server closed the connection")),
            };
            self.receiver.consume(len);
            let facts = &mut self.agreed.facts;
            match OptionReply::parse(header.kind, &data).map_err(broken)? {
                OptionReply::Ack => return Ok(OptionEnd::Ack),
                OptionReply::Refused(kind, message) => return Ok(OptionEnd::Refused(kind, message.to_owned())),
                OptionReply::Export(size, flags) => (facts.size, facts.flags) = (size, flags),
                OptionReply::BlockSize(sizes) => {
                    facts.block_sizes = sizes;
                    self.said.block_sizes = true;
                }
                OptionReply::Description(description) => facts.description = description.to_owned(),
                OptionReply::MetaContext(number, name) => {
                    // One is asked for where it matters: `set_context` looks at its name.
                    self.agreed.context = Some(number);
                    self.said.contexts.push(name.to_owned());
                }
                OptionReply::Server { name, description } => {
                    self.said.exports.push((name.to_owned(), description.to_owned()));
                }
                OptionReply::Name(_) | OptionReply::Unknown => {}
            }
        }
        Err(broken(Malformed("the server answers an option without end")))
    }

    /// The old way, in which a refusal is a closed connection.
    async fn export_name(&mut self, export: &str) -> Result<()> {
        self.send(&option::encode(code::EXPORT_NAME, export.as_bytes())).await?;
        let answer = self.receiver.array(self.stream).await;
        let answer = answer.map_err(|error| error.context(format!("there may be no export '{export}'")))?;
        let (size, flags) = greeting::parse_export(&answer).map_err(broken)?;
        if !self.no_zeroes {
            self.receiver.skip(self.stream, greeting::EXPORT_NAME_ZEROES as u64).await?;
        }
        (self.agreed.facts.size, self.agreed.facts.flags) = (size, flags);
        Ok(())
    }
}

fn refused(kind: u32, message: &str, export: &str) -> Error {
    let because = if message.is_empty() { String::new() } else { format!(": {message}") };
    match kind {
        rep::ERR_UNKNOWN => Error::new(ErrorKind::NotFound, format!("the server has no export '{export}'{because}"))
            .qemu(format!("Requested export not available{}", reported(message))),
        rep::ERR_TLS_REQD => insists_on_tls("7 (go)", message),
        rep::ERR_SHUTDOWN => Error::new(ErrorKind::Busy, format!("the server is stopping{because}")),
        rep::ERR_POLICY => Error::new(ErrorKind::PermissionDenied, format!("the server refuses the export{because}")),
        _ => Error::new(ErrorKind::InvalidArgument, format!("the server refuses the export '{export}'{because}")),
    }
}

/// `option` is the one that the server refuses, in QEMU's words.
pub(super) fn insists_on_tls(option: &str, message: &str) -> Error {
    let because = if message.is_empty() { String::new() } else { format!(": {message}") };
    let sentence =
        format!("TLS negotiation required before option {option}{LINE_END}Did you forget a valid tls-creds?");
    Error::new(ErrorKind::PermissionDenied, format!("the server insists on TLS{because}"))
        .qemu(format!("{sentence}{}", reported(message)))
}

/// The server's message, in the form in which QEMU adds it to an error.
fn reported(message: &str) -> String {
    if message.is_empty() {
        return String::new();
    }
    // A server begins no line of ours.
    format!("{LINE_END}server reported: {}", message.replace(LINE_END, "\u{fffd}"))
}
