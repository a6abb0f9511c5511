// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From the greeting to the transmission phase: option haggling in fixed newstyle.

use crate::admission::{ConnectionSlot, Haggling};
use crate::config::Authorizer;
use crate::refusal::{self, broken, refused};
use crate::registry::{ClientGuard, Registry, Served};
use crate::{Disk, Export};
use cowshed_nbd::{Receiver, Stream};
use cowshed_nbd_proto::context::{self, Purpose};
use cowshed_nbd_proto::flags::{ClientFlags, HandshakeFlags, TransmissionFlags};
use cowshed_nbd_proto::greeting;
use cowshed_nbd_proto::option::{
    BlockSizes, InfoRequest, MetaContextRequest, OPTION_HEADER_BYTES, OptionHeader, OptionReply, code,
    parse_export_name, rep,
};
use cowshed_nbd_proto::{HeaderStyle, MAX_STRING_BYTES, Malformed, ReplyStyle};
use cowshed_storage::{Dispatch, IoBuf, rt};
use cowshed_types::{Error, ErrorKind, Result, slip};
use futures_util::future::{Either, select};
use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// Options with more data than that are refused.
const MAX_OPTION_BYTES: u32 = 32 << 10;
/// Options with more data than that cost the connection, as with QEMU.
const MAX_SKIPPED_BYTES: u32 = 32 << 20;
/// More options than a client needs: a flood.
const MAX_OPTIONS: u32 = 4096;
/// Names of exports in a line of the log.
const NAMES_SHOWN: usize = 16;
/// The length from which on gathered replies are sent.
const REPLY_BYTES: usize = 32 << 10;
/// The largest block of a disk that clients are told as the smallest one: some can't work with more.
const MOST_UNIT_BYTES: u32 = 64 << 10;

/// A metadata context that the client has chosen. Its number is its place in the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:…`, with the name of the bitmap.
    Bitmap(String),
}

impl Context {
    fn name(&self) -> String {
        match self {
            Context::Allocation => context::BASE_ALLOCATION.to_owned(),
            Context::Depth => context::QEMU_ALLOCATION_DEPTH.to_owned(),
            Context::Bitmap(bitmap) => format!("{}{bitmap}", context::QEMU_DIRTY_BITMAP),
        }
    }

    fn of<D>(export: &Export<D>) -> Vec<Context> {
        let depth = export.allocation_depth.then_some(Context::Depth);
        let bitmaps = export.bitmaps.iter().cloned().map(Context::Bitmap);
        [Context::Allocation].into_iter().chain(depth).chain(bitmaps).collect()
    }
}

/// The options on which client and server have agreed.
#[derive(Clone, Debug)]
pub(crate) struct NegotiatedOptions {
    pub replies: ReplyStyle,
    pub headers: HeaderStyle,
    pub contexts: Vec<Context>,
    pub flags: TransmissionFlags,
    /// As clients are told them.
    pub block_sizes: BlockSizes,
    /// Requests of parts of it are refused, in bytes.
    pub smallest_block: u32,
    /// Each change is durable before it is answered.
    pub writethrough: bool,
}

/// Haggles until the client has chosen an export; `None` when it sent a goodbye or nothing before, or when the server stops. With
/// its first option a connection that is counted takes a place; the wait for that doesn't count as the client's time.
pub(crate) async fn negotiate<D: Disk>(
    registry: &Arc<Registry<D>>,
    stream: &Stream,
    receiver: &mut Receiver,
    counted: Option<&(&ConnectionSlot<D>, Haggling<'_>)>,
) -> Result<Option<(ClientGuard<D>, NegotiatedOptions)>> {
    let limit = Some(registry.config.limits.handshake_timeout).filter(|limit| !limit.is_zero());
    let mut negotiation = Negotiation {
        registry,
        stream,
        receiver,
        haggling: counted.map(|(_, haggling)| haggling),
        fixed: false,
        no_zeroes: false,
        replies: ReplyStyle::Simple,
        chosen: None,
        has_missed: false,
        out: Vec::new(),
    };
    let begun = rt::now();
    if within(registry, limit, negotiation.greet()).await?.is_none() {
        return Ok(None);
    }
    let left = limit.map(|limit| limit.saturating_sub(rt::now().saturating_sub(begun)));
    if let Some((slot, haggling)) = counted {
        let place = async { Ok(slot.rise(haggling).await.then_some(())) };
        if within(registry, None, place).await?.is_none() {
            return Ok(None);
        }
    }
    within(registry, left, negotiation.run()).await
}

/// As `doing`, but `None` when the server stops, and an error after `limit`.
async fn within<D: Disk, T>(
    registry: &Registry<D>,
    limit: Option<Duration>,
    doing: impl Future<Output = Result<Option<T>>>,
) -> Result<Option<T>> {
    let given_up = pin!(async {
        let stopping = pin!(registry.wait_for_stop());
        let Some(limit) = limit else {
            stopping.await;
            return None;
        };
        match select(stopping, pin!(rt::sleep(limit))).await {
            Either::Left(_) => None,
            Either::Right(_) => Some(Error::new(ErrorKind::Limit, "the client took too long to choose an export")),
        }
    });
    match select(pin!(doing), given_up).await {
        Either::Left((result, _)) => result,
        Either::Right((None, _)) => Ok(None),
        Either::Right((Some(error), _)) => Err(error),
    }
}

struct Negotiation<'a, D: Disk> {
    registry: &'a Arc<Registry<D>>,
    stream: &'a Stream,
    receiver: &'a mut Receiver,
    /// The counter of its connection.
    haggling: Option<&'a Haggling<'a>>,
    fixed: bool,
    no_zeroes: bool,
    replies: ReplyStyle,
    /// The contexts of the last `NBD_OPT_SET_META_CONTEXT` and the export that it was about.
    chosen: Option<(Arc<Served<D>>, Vec<Context>)>,
    /// The log has a name that wasn't found.
    has_missed: bool,
    /// Replies that haven't been sent.
    out: Vec<u8>,
}

/// The step after an option.
enum Next<D: Disk> {
    Option,
    Transmission(Box<(ClientGuard<D>, NegotiatedOptions)>),
    Goodbye,
}

impl<D: Disk> Negotiation<'_, D> {
    /// Greets the client and waits for its first option with its data; `None` when it goes.
    async fn greet(&mut self) -> Result<Option<()>> {
        self.out.extend_from_slice(&greeting::encode(HandshakeFlags::FIXED_NEWSTYLE | HandshakeFlags::NO_ZEROES));
        self.send().await?;
        // As in QEMU, one that sends no flags is no client.
        if !matches!(self.receiver.peek(self.stream, 4).await, Ok(Some(_))) {
            return Ok(None);
        }
        let bytes = self.receiver.array(self.stream).await?;
        let unknown = u32::from_be_bytes(bytes) & !ClientFlags::ALL.0;
        let flags = greeting::parse_client_flags(bytes)
            .map_err(|why| broken(why).qemu(format!("Unknown client flags {unknown:#x} received")))?;
        self.fixed = flags.contains(ClientFlags::FIXED_NEWSTYLE);
        self.no_zeroes = flags.contains(ClientFlags::NO_ZEROES);
        let header = self.await_header().await?;
        // Its fault is reported when it has its turn.
        let longest = if header.option == code::EXPORT_NAME { MAX_STRING_BYTES } else { MAX_OPTION_BYTES as usize };
        let len = if header.len as usize <= longest { header.len as usize } else { 0 };
        let len = if slip!("half_options_take_places") { 0 } else { len };
        match self.receiver.peek(self.stream, OPTION_HEADER_BYTES + len).await {
            Ok(data) => Ok(data.map(drop)),
            Err(error) => Err(error.qemu(refusal::ENDED)),
        }
    }

    /// The header of the next option, which stays where it is.
    async fn await_header(&mut self) -> Result<OptionHeader> {
        match self.receiver.peek(self.stream, 8).await {
            Ok(None) => return Err(refusal::left()),
            Ok(Some(magic)) if magic != greeting::OPTION_MAGIC.to_be_bytes() => {
                let why = Malformed("an option doesn't start with its magic number");
                return Err(broken(why).qemu("Bad magic received"));
            }
            Ok(Some(_)) => {}
            Err(error) => return Err(error.qemu(format!("Failed to read opts magic: {}", refusal::ENDED))),
        }
        let incomplete = |error: Error| error.qemu(format!("Failed to read option: {}", refusal::ENDED));
        let header = self.receiver.peek(self.stream, OPTION_HEADER_BYTES).await.map_err(incomplete)?;
        let header = header.and_then(|bytes| bytes.try_into().ok()).ok_or_else(refusal::left)?;
        OptionHeader::parse(header).map_err(broken)
    }

    /// Answers options until one ends the negotiation.
    async fn run(&mut self) -> Result<Option<(ClientGuard<D>, NegotiatedOptions)>> {
        for _ in 0..MAX_OPTIONS {
            let header = self.await_header().await?;
            self.receiver.consume(OPTION_HEADER_BYTES);
            self.note_progress();
            let next = self.option(header).await?;
            self.send().await?;
            self.note_progress();
            match next {
                Next::Option => {}
                Next::Goodbye => return Ok(None),
                Next::Transmission(agreed) => return Ok(Some(*agreed)),
            }
        }
        Err(refused(format!("the client sent more than {MAX_OPTIONS} options")))
    }

    fn note_progress(&self) {
        if let Some(haggling) = self.haggling {
            haggling.note_progress();
        }
    }

    async fn send(&mut self) -> Result<()> {
        if self.out.is_empty() {
            return Ok(());
        }
        let buf = IoBuf::copy_from(&self.out);
        self.out.clear();
        self.stream.send(vec![buf], Dispatch::Together).await.0
    }

    async fn reply(&mut self, option: u32, reply: OptionReply<'_>) -> Result<()> {
        reply.append(option, &mut self.out);
        if self.out.len() >= REPLY_BYTES { self.send().await } else { Ok(()) }
    }

    async fn refuse(&mut self, option: u32, kind: u32, message: &str) -> Result<Next<D>> {
        self.reply(option, OptionReply::Refused(kind, message)).await?;
        Ok(Next::Option)
    }

    async fn option(&mut self, header: OptionHeader) -> Result<Next<D>> {
        let OptionHeader { option, len } = header;
        let config = &self.registry.config;
        let must_encrypt = config.tls.is_some() && config.tls_required && !self.stream.is_encrypted();
        self.check_header(header, must_encrypt)?;
        let data = match len > MAX_OPTION_BYTES {
            true => {
                self.receiver.skip(self.stream, len.into()).await.map_err(|error| error.qemu(refusal::ENDED))?;
                None
            }
            false => Some(self.option_data(len as usize).await?),
        };
        if must_encrypt && !matches!(option, code::STARTTLS | code::ABORT) {
            return self.refuse(option, rep::ERR_TLS_REQD, &refusal::too_early(option)).await;
        }
        let Some(data) = data else {
            return match refusal::name(option) {
                Some(_) => self.refuse(option, rep::ERR_TOO_BIG, "the option is too long").await,
                None => self.refuse(option, rep::ERR_UNSUP, &refusal::unsupported(option)).await,
            };
        };
        match option {
            code::EXPORT_NAME => self.export_name(&data).await,
            code::ABORT => {
                // The client may be gone already, and that is fine.
                let _ = self.reply(option, OptionReply::Ack).await;
                let _ = self.send().await;
                Ok(Next::Goodbye)
            }
            code::LIST if data.is_empty() => self.list().await,
            code::STARTTLS if data.is_empty() => self.start_tls().await,
            code::STRUCTURED_REPLY if data.is_empty() => self.structured_reply().await,
            code::EXTENDED_HEADERS if data.is_empty() => {
                if self.replies == ReplyStyle::Extended {
                    return self.refuse(option, rep::ERR_INVALID, refusal::EXTENDED_ALREADY).await;
                }
                self.replies = ReplyStyle::Extended;
                self.reply(option, OptionReply::Ack).await?;
                Ok(Next::Option)
            }
            code::LIST | code::STARTTLS | code::STRUCTURED_REPLY | code::EXTENDED_HEADERS => {
                self.refuse(option, rep::ERR_INVALID, &refusal::too_long(option)).await
            }
            code::INFO | code::GO => self.info(option, &data).await,
            code::LIST_META_CONTEXT | code::SET_META_CONTEXT => self.meta_context(option, &data).await,
            _ => self.refuse(option, rep::ERR_UNSUP, &refusal::unsupported(option)).await,
        }
    }

    /// Refuses options that cost the connection before their data has come.
    fn check_header(&self, header: OptionHeader, must_encrypt: bool) -> Result<()> {
        let OptionHeader { option, len } = header;
        let is_name = option == code::EXPORT_NAME;
        if !self.fixed && !is_name {
            let why = "the client sends an option without the fixed newstyle protocol";
            return Err(refused(why).qemu(match must_encrypt {
                true => format!("Unsupported option {option:#x}"),
                false => refusal::unsupported(option),
            }));
        }
        if must_encrypt && is_name {
            let why = "the client didn't start TLS, which is required";
            return Err(refused(why).qemu(refusal::too_early(option)));
        }
        if len > MAX_SKIPPED_BYTES || (is_name && len as usize > MAX_STRING_BYTES) {
            let why = refused(format!("the client sent an option of {len} bytes"));
            return Err(why.qemu(match len > MAX_SKIPPED_BYTES {
                true => format!("len ({len}) is larger than max len ({MAX_SKIPPED_BYTES})"),
                false => "Bad length received".to_owned(),
            }));
        }
        Ok(())
    }

    async fn option_data(&mut self, len: usize) -> Result<Vec<u8>> {
        let data = match self.receiver.peek(self.stream, len).await {
            Ok(Some(data)) => data.to_vec(),
            Ok(None) if len == 0 => Vec::new(),
            Ok(None) => return Err(refused("the client left in the middle of an option").qemu(refusal::ENDED)),
            Err(error) => return Err(error.qemu(refusal::ENDED)),
        };
        self.receiver.consume(data.len());
        Ok(data)
    }

    async fn export_name(&mut self, data: &[u8]) -> Result<Next<D>> {
        let missing = |why: Error| why.qemu("export not found");
        let name = parse_export_name(data).map_err(|why| missing(broken(why)))?;
        if self.replies == ReplyStyle::Extended {
            let why = "the client asks for an export in the old way after extended headers";
            return Err(refused(why).qemu("Extended headers already negotiated"));
        }
        let served = self.find(name).ok_or_else(|| missing(refused(format!("there is no export '{name}'"))))?;
        let Some((stay, terms)) = self.enter(&served) else {
            return Err(missing(refused(format!("export '{name}' is being removed"))));
        };
        self.out.extend_from_slice(&greeting::encode_export(served.export.disk.size(), terms.flags));
        if !self.no_zeroes {
            self.out.extend_from_slice(&[0; greeting::EXPORT_NAME_ZEROES]);
        }
        Ok(Next::Transmission(Box::new((stay, terms))))
    }

    async fn list(&mut self) -> Result<Next<D>> {
        for served in self.registry.all() {
            let Export { name, description, .. } = &served.export;
            self.reply(code::LIST, OptionReply::Server { name, description }).await?;
        }
        self.reply(code::LIST, OptionReply::Ack).await?;
        Ok(Next::Option)
    }

    async fn start_tls(&mut self) -> Result<Next<D>> {
        let option = code::STARTTLS;
        let Some(credentials) = self.registry.config.tls.clone().filter(|_| self.fixed) else {
            return self.refuse(option, rep::ERR_POLICY, "TLS not configured").await;
        };
        if self.stream.is_encrypted() {
            return self.refuse(option, rep::ERR_INVALID, "TLS already enabled").await;
        }
        if !self.receiver.is_empty() {
            // An attacker in between could have put it there; it must not count as sent under TLS.
            let why = "the client went on without waiting for TLS";
            return Err(refused(why).qemu(format!("TLS handshake failed: {why}")));
        }
        self.reply(option, OptionReply::Ack).await?;
        self.send().await?;
        self.stream.start_server_tls(&credentials).await.map_err(refusal::of_tls)?;
        if let Some(Authorizer(check)) = &self.registry.config.authorizer {
            let identity = self.stream.peer_identity();
            let identity = identity.ok_or_else(|| refused("the client has no certificate with a name"))?;
            check(&identity).map_err(refused)?;
        }
        self.replies = ReplyStyle::Simple;
        self.chosen = None;
        Ok(Next::Option)
    }

    async fn structured_reply(&mut self) -> Result<Next<D>> {
        let option = code::STRUCTURED_REPLY;
        if self.replies == ReplyStyle::Extended {
            return self.refuse(option, rep::ERR_EXT_HEADER_REQD, refusal::EXTENDED_ALREADY).await;
        }
        if self.replies == ReplyStyle::Structured {
            return self.refuse(option, rep::ERR_INVALID, "structured reply already negotiated").await;
        }
        self.replies = ReplyStyle::Structured;
        self.reply(option, OptionReply::Ack).await?;
        Ok(Next::Option)
    }

    async fn info(&mut self, option: u32, data: &[u8]) -> Result<Next<D>> {
        let request = match InfoRequest::parse(data) {
            Ok(request) => request,
            Err(why) => return self.refuse(option, rep::ERR_INVALID, &refusal::malformed(option, data, why)).await,
        };
        if self.registry.is_stopping() {
            return self.refuse(option, rep::ERR_SHUTDOWN, "the server is stopping").await;
        }
        let Some(served) = self.find(request.name) else {
            let message = format!("export '{}' not present", request.name);
            return self.refuse(option, rep::ERR_UNKNOWN, &message).await;
        };
        let export = &served.export;
        let entered = if option == code::GO { self.enter(&served) } else { None };
        if option == code::GO && entered.is_none() {
            return self.refuse(option, rep::ERR_UNKNOWN, "the export is being removed").await;
        }
        let flags = match &entered {
            Some((_, terms)) => terms.flags,
            // The client may choose contexts yet.
            None => {
                let is_extended = self.replies == ReplyStyle::Extended;
                self.terms(&served).flags.with(TransmissionFlags::BLOCK_STATUS_PAYLOAD, is_extended)
            }
        };
        self.reply(option, OptionReply::Export(export.disk.size(), flags)).await?;
        if request.canonical_name {
            self.reply(option, OptionReply::Name(&export.name)).await?;
        }
        if request.description && !export.description.is_empty() {
            self.reply(option, OptionReply::Description(&export.description)).await?;
        }
        if request.block_size {
            self.reply(option, OptionReply::BlockSize(self.block_sizes(export))).await?;
        }
        self.reply(option, OptionReply::Ack).await?;
        Ok(match entered {
            Some(agreed) => Next::Transmission(Box::new(agreed)),
            None => Next::Option,
        })
    }

    async fn meta_context(&mut self, option: u32, data: &[u8]) -> Result<Next<D>> {
        let purpose = if option == code::SET_META_CONTEXT { Purpose::Set } else { Purpose::List };
        if purpose == Purpose::Set {
            self.chosen = None;
        }
        if purpose == Purpose::Set && self.replies == ReplyStyle::Simple {
            return self.refuse(option, rep::ERR_INVALID, &refusal::unstructured(option)).await;
        }
        let request = match MetaContextRequest::parse(data) {
            Ok(request) => request,
            Err(why) => return self.refuse(option, rep::ERR_INVALID, &refusal::malformed(option, data, why)).await,
        };
        if request.too_many {
            return self.refuse(option, rep::ERR_TOO_BIG, "too many queries").await;
        }
        let Some(served) = self.find(request.name) else {
            let message = format!("export '{}' not present", request.name);
            return self.refuse(option, rep::ERR_UNKNOWN, &message).await;
        };
        let mut contexts = Context::of(&served.export);
        contexts.retain(|context| context::is_wanted(&context.name(), &request.queries, purpose));
        if purpose == Purpose::Set {
            // A list has a bitmap as often as it is offered.
            let mut names = BTreeSet::new();
            contexts.retain(|context| names.insert(context.name()));
        }
        for (number, context) in contexts.iter().enumerate() {
            // The number means nothing in a list.
            let number = if purpose == Purpose::Set { number as u32 } else { 0 };
            self.reply(option, OptionReply::MetaContext(number, &context.name())).await?;
        }
        self.reply(option, OptionReply::Ack).await?;
        if purpose == Purpose::Set {
            self.chosen = Some((served, contexts));
        }
        Ok(Next::Option)
    }

    /// The export that the client means. The log has the unknown name, and the known ones.
    fn find(&mut self, name: &str) -> Option<Arc<Served<D>>> {
        let found = self.registry.find(name);
        if found.is_none() && !std::mem::replace(&mut self.has_missed, true) {
            let peer = self.stream.socket().peer();
            let exports = self.registry.all();
            let names = exports.iter().flat_map(|served| [Some(&served.export.name), served.export.alias.as_ref()]);
            let names: BTreeSet<&String> = names.flatten().take(NAMES_SHOWN).collect();
            let message = "there is no export of the name that a client asks for";
            tracing::info!(peer, name, ?names, "{message}");
        }
        found
    }

    /// The client's stay at an export; none when the export is on its way out.
    fn enter(&self, served: &Arc<Served<D>>) -> Option<(ClientGuard<D>, NegotiatedOptions)> {
        let stay = served.enter(self.stream.socket())?;
        Some((stay, self.terms(served)))
    }

    /// The export's terms for a client that has negotiated as this one has.
    fn terms(&self, served: &Arc<Served<D>>) -> NegotiatedOptions {
        type Flags = TransmissionFlags;
        let export = &served.export;
        let contexts = match &self.chosen {
            Some((other, contexts)) if Arc::ptr_eq(other, served) => contexts.clone(),
            _ => Vec::new(),
        };
        let extended = self.replies == ReplyStyle::Extended;
        let writing = Flags::SEND_TRIM | Flags::SEND_WRITE_ZEROES | Flags::SEND_FAST_ZERO;
        let flags = (Flags::HAS_FLAGS | Flags::SEND_FLUSH | Flags::SEND_FUA | Flags::SEND_CACHE)
            .with(Flags::READ_ONLY, export.is_read_only())
            .with(writing, !export.is_read_only())
            .with(Flags::SEND_DF, self.replies != ReplyStyle::Simple)
            .with(Flags::CAN_MULTI_CONN, export.multi_conn)
            .with(Flags::BLOCK_STATUS_PAYLOAD, extended && !contexts.is_empty());
        let headers = if extended { HeaderStyle::Extended } else { HeaderStyle::Compact };
        let (block_sizes, writethrough) = (self.block_sizes(export), export.writethrough);
        let smallest_block = export.block_sizes.minimum;
        NegotiatedOptions { replies: self.replies, headers, contexts, flags, block_sizes, smallest_block, writethrough }
    }

    /// The export's block sizes within the limits of the server. The smallest one is the disk's own, where that is larger.
    fn block_sizes(&self, export: &Export<D>) -> BlockSizes {
        let BlockSizes { minimum, preferred, maximum } = export.block_sizes;
        let unit = export.unit_bytes.clamp(minimum, MOST_UNIT_BYTES.max(minimum));
        let is_made_of_units = unit.is_power_of_two() && export.disk.size().is_multiple_of(unit.into());
        let minimum = if is_made_of_units { unit } else { minimum };
        let preferred = preferred.max(minimum);
        let maximum = maximum.min(self.registry.config.limits.max_payload_bytes);
        BlockSizes { minimum, preferred, maximum: (maximum - maximum % minimum).max(minimum) }
    }
}
