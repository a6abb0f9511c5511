// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The NBD client: an export as a file.
//!
//! Usable from any thread, without a thread or a task of its own. One of the requests that wait for replies receives
//! for all, on its own thread. It hands that on when it has its own reply.
//!
//! - here: the callers' view, and connecting again when the server went away
//! - `handshake`: choosing the export
//! - `list`: a server's exports
//! - `connection`: requests and replies of one connection
//! - `pending`: requests that have no reply yet

mod connection;
mod handshake;
mod list;
mod pending;
mod remote;

pub use list::{ListedExport, list_exports};

use crate::tls::ClientTls;
use connection::{Answer, Connection, Failure};
use cowshed_nbd_proto::flags::{CommandFlags, TransmissionFlags};
use cowshed_nbd_proto::option::BlockSizes;
use cowshed_nbd_proto::reply::StatusRun;
use cowshed_nbd_proto::uri::ServerAddress;
use cowshed_nbd_proto::{Command, NbdUri};
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_types::{Errno, Error, Result, slip};
use futures_util::lock::Mutex as AsyncMutex;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// For one attempt to connect and choose the export.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// Between two attempts to connect again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// The time after a failed attempt in which requests fail without another one.
const GIVE_UP_PAUSE: Duration = Duration::from_secs(1);
/// A request under which so many connections were lost, over at least `reconnect_delay`, fails: the server may die of
/// it.
const MAX_LOSSES: u32 = 16;

/// The export of a server, and the options of the connection.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The server.
    pub address: SocketAddress,
    /// The export, "" for the default one.
    pub export: String,
    /// Encrypt, with these credentials.
    pub tls: Option<ClientTls>,
    /// The name in the server's certificate, where it isn't that of the host.
    pub tls_hostname: Option<String>,
    /// The time that requests wait for a new connection when the old one is lost, anew in each outage. After that they
    /// fail, until a later attempt succeeds.
    pub reconnect_delay: Duration,
    /// The time of trying to connect at first; zero: once.
    pub open_timeout: Duration,
    /// The metadata context that is asked for in place of `base:allocation`, for [`Client::context_status`]. A server that
    /// doesn't have it is refused.
    pub context: Option<String>,
}

impl ClientOptions {
    /// One attempt, no encryption, no waiting.
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

    /// The same as a URI, for messages.
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

/// The server's description of the export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportFacts {
    /// Size in bytes.
    pub size: u64,
    /// Its abilities.
    pub flags: TransmissionFlags,
    /// Its block sizes, those of the protocol where the server has none.
    pub block_sizes: BlockSizes,
    /// Where data is can be asked for (`base:allocation`).
    pub has_status: bool,
    /// For people; may be empty.
    pub description: String,
}

impl ExportFacts {
    /// The facts before the server has sent any.
    fn unsaid() -> ExportFacts {
        ExportFacts {
            size: 0,
            flags: TransmissionFlags::default(),
            block_sizes: BlockSizes::UNSAID,
            has_status: false,
            description: String::new(),
        }
    }
}

/// A connection to an export, made again when it is lost.
#[derive(Debug)]
pub struct Client {
    options: ClientOptions,
    name: String,
    facts: ExportFacts,
    state: Mutex<ClientState>,
    /// Held by the task that connects again.
    connecting: AsyncMutex<()>,
}

#[derive(Debug)]
struct ClientState {
    connection: Arc<Connection>,
    /// When the loss was noticed.
    lost_at: Option<Duration>,
    /// When connecting failed last.
    failed_at: Option<Duration>,
}

/// The result of a request.
pub type Reply<T> = std::result::Result<T, Errno>;

impl Client {
    /// Connects and chooses the export.
    pub async fn connect(options: ClientOptions) -> Result<Client> {
        let name = options.uri().to_string();
        let until = rt::now() + options.open_timeout;
        let connection = loop {
            match Connection::open(&options).await {
                Ok(connection) => break connection,
                Err(error) if rt::now() < until && error.errno() != Errno::EINVAL => {
                    tracing::debug!(%error, "no connection yet");
                    rt::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error.file(name)),
            }
        };
        let facts = connection.facts().clone();
        let state = ClientState { connection: Arc::new(connection), lost_at: None, failed_at: None };
        Ok(Client { options, name, facts, state: Mutex::new(state), connecting: AsyncMutex::new(()) })
    }

    /// The export as a URI.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The server's description of the export.
    pub fn facts(&self) -> &ExportFacts {
        &self.facts
    }

    /// Fills `buf` from byte `offset` of the export.
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Reply<()>, IoBuf) {
        self.transfer(offset, buf, None).await
    }

    /// Writes `buf` at byte `offset` of the export; `durable`: it is when this returns.
    pub async fn write(&self, offset: u64, buf: IoBuf, durable: bool) -> (Reply<()>, IoBuf) {
        let has_fua = self.facts.flags.contains(TransmissionFlags::SEND_FUA);
        let is_told = durable && has_fua && !slip!("fua_left_out_by_the_nbd_client");
        let flags = CommandFlags::default().with(CommandFlags::FUA, is_told);
        let (result, buf) = self.transfer(offset, buf, Some(flags)).await;
        match result {
            Ok(()) if durable && !has_fua => (self.flush().await, buf),
            result => (result, buf),
        }
    }

    /// Reads, or writes with these flags. A transfer that is longer than the server takes goes in pieces, one after the
    /// other. A server that comes back may take less than before.
    async fn transfer(&self, offset: u64, mut rest: IoBuf, write: Option<CommandFlags>) -> (Reply<()>, IoBuf) {
        let (mut at, mut done) = (offset, None);
        let mut attempt = Attempt::default();
        loop {
            let connection = match self.connection(&mut attempt).await {
                Ok(connection) => connection,
                Err(errno) => return join_with(Err(errno), done, rest),
            };
            let len = rest.len().min(connection.facts().block_sizes.maximum as usize);
            if !self.is_allowed(&connection, at, len as u64) {
                return join_with(Err(Errno::EINVAL), done, rest);
            }
            let tail = (len < rest.len()).then(|| rest.split_off(len));
            let Answer { result, buf, .. } = match write {
                None => connection.read(at, len as u64, rest).await,
                Some(flags) => connection.write(at, flags, rest).await,
            };
            match (result, tail) {
                (Ok(()), None) => return join_with(Ok(()), done, buf),
                (Ok(()), Some(tail)) => {
                    let (joined, whole) = join_with(Ok(()), done, buf);
                    if joined.is_err() {
                        return join_with(joined, Some(whole), tail);
                    }
                    (done, rest, attempt) = (Some(whole), tail, Attempt::default());
                    at += len as u64;
                }
                (Err(Failure::Lost), None) => rest = buf,
                (Err(Failure::Lost), Some(tail)) => {
                    let (joined, whole) = join_with(Ok(()), Some(buf), tail);
                    if joined.is_err() {
                        return join_with(joined, done, whole);
                    }
                    rest = whole;
                }
                (Err(Failure::Refused(errno)), tail) => {
                    let buf = match tail {
                        Some(tail) => join_with(Ok(()), Some(buf), tail).1,
                        None => buf,
                    };
                    return join_with(Err(errno), done, buf);
                }
            }
        }
    }

    /// A server that comes back may have larger blocks. Requests that don't fit them are not sent.
    fn is_allowed(&self, connection: &Connection, offset: u64, length: u64) -> bool {
        let minimum = connection.facts().block_sizes.minimum;
        minimum <= self.facts.block_sizes.minimum || (offset | length).is_multiple_of(minimum.into())
    }

    /// Makes everything durable that was written before. Without an effect where the server has no such command.
    pub async fn flush(&self) -> Reply<()> {
        if !self.facts.flags.contains(TransmissionFlags::SEND_FLUSH) {
            return Ok(());
        }
        self.simple(Command::Flush, CommandFlags::default(), 0, 0).await.map(drop)
    }

    /// Makes a range in bytes read as zeroes. `ENOTSUP` where the server has no such command, or, with `fast`, would be
    /// slow.
    pub async fn write_zeroes(&self, offset: u64, length: u64, may_unmap: bool, fast: bool) -> Reply<()> {
        let has = |flag| self.facts.flags.contains(flag);
        if !has(TransmissionFlags::SEND_WRITE_ZEROES) || (fast && !has(TransmissionFlags::SEND_FAST_ZERO)) {
            return Err(Errno::ENOTSUP);
        }
        let flags = CommandFlags::default().with(CommandFlags::NO_HOLE, !may_unmap).with(CommandFlags::FAST_ZERO, fast);
        self.in_pieces(Command::WriteZeroes, flags, offset, length).await
    }

    /// Gives a range in bytes back; its content is undefined afterwards. Without an effect where the server has no such
    /// command.
    pub async fn trim(&self, offset: u64, length: u64) -> Reply<()> {
        if !self.facts.flags.contains(TransmissionFlags::SEND_TRIM) {
            return Ok(());
        }
        self.in_pieces(Command::Trim, CommandFlags::default(), offset, length).await
    }

    /// The status of a range by `base:allocation`: at least one run, from `offset`, which may end before the range
    /// does. None where the server doesn't know.
    pub async fn block_status(&self, offset: u64, length: u64) -> Reply<Vec<StatusRun>> {
        if !self.facts.has_status {
            return Ok(Vec::new());
        }
        self.status(offset, length).await
    }

    /// The status of a range by the context of [`ClientOptions::context`]: at least one run, from `offset`, which may
    /// end before the range does. `ENOTSUP` where no context was asked for.
    pub async fn context_status(&self, offset: u64, length: u64) -> Reply<Vec<StatusRun>> {
        if self.options.context.is_none() {
            return Err(Errno::ENOTSUP);
        }
        self.status(offset, length).await
    }

    async fn status(&self, offset: u64, length: u64) -> Reply<Vec<StatusRun>> {
        Ok(self.simple(Command::BlockStatus, CommandFlags::default(), offset, length).await?.1)
    }

    async fn in_pieces(&self, command: Command, flags: CommandFlags, offset: u64, length: u64) -> Reply<()> {
        let mut at = offset;
        let end = offset.saturating_add(length);
        while at < end {
            let done = self.simple(command, flags, at, end - at).await?.0;
            at += if slip!("rest_of_a_shortened_trim_left_out") { end - at } else { done };
        }
        Ok(())
    }

    /// A request without data. Returns its length, which may be shorter than `length`, and the runs of a block status.
    /// There are none where the server doesn't know, or its blocks are too large for the range.
    async fn simple(
        &self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> Reply<(u64, Vec<StatusRun>)> {
        let mut attempt = Attempt::default();
        loop {
            let connection = self.connection(&mut attempt).await?;
            let length = length.min(connection.longest_effect(command));
            let is_status = command == Command::BlockStatus;
            match self.is_allowed(&connection, offset, length) {
                true if is_status && !connection.has_context() => return Ok((length, Vec::new())),
                true => {}
                false if is_status && self.options.context.is_none() => return Ok((length, Vec::new())),
                false => return Err(Errno::EINVAL),
            }
            let Answer { result, runs, .. } = connection.simple(command, flags, offset, length).await;
            match result {
                Ok(()) => return Ok((length, runs)),
                Err(Failure::Refused(errno)) => return Err(errno),
                Err(Failure::Lost) => {}
            }
        }
    }

    /// A connection for the next attempt at a request, or the error that the request ends with. Each outage has
    /// `reconnect_delay` of its own.
    async fn connection(&self, attempt: &mut Attempt) -> Reply<Arc<Connection>> {
        attempt.number += 1;
        if attempt.number > 1 {
            // The connection was lost under this request.
            let (now, delay) = (rt::now(), self.options.reconnect_delay);
            let lost_at = *attempt.lost_at.get_or_insert(now);
            let has_lost_many =
                (attempt.number > MAX_LOSSES || slip!("outages_share_a_reconnect_delay")) && now >= lost_at + delay;
            if delay.is_zero() || has_lost_many {
                return Err(Errno::EIO);
            }
            if attempt.number > 2 {
                // A server that takes connections only to drop them.
                rt::sleep(RETRY_PAUSE).await;
            }
        }
        if let Some(connection) = self.living() {
            return Ok(connection);
        }
        let _connecting = self.connecting.lock().await;
        loop {
            if let Some(connection) = self.living() {
                return Ok(connection);
            }
            let now = rt::now();
            let (lost_at, failed_at) = {
                let mut state = lock(&self.state);
                (*state.lost_at.get_or_insert(now), state.failed_at)
            };
            let may_wait = now < lost_at + self.options.reconnect_delay;
            if !may_wait && failed_at.is_some_and(|failed_at| now < failed_at + GIVE_UP_PAUSE) {
                return Err(Errno::EIO);
            }
            match Connection::open(&self.options).await.and_then(|connection| self.check_same(connection)) {
                Ok(connection) => {
                    tracing::info!(server = self.name, "connected again");
                    let mut state = lock(&self.state);
                    *state = ClientState { connection: Arc::new(connection), lost_at: None, failed_at: None };
                }
                Err(error) => {
                    tracing::warn!(server = self.name, %error, "could not connect again");
                    lock(&self.state).failed_at = Some(rt::now());
                    if !may_wait {
                        return Err(Errno::EIO);
                    }
                    rt::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    fn living(&self) -> Option<Arc<Connection>> {
        let state = lock(&self.state);
        (!state.connection.is_lost()).then(|| Arc::clone(&state.connection))
    }

    /// After a new start the server may offer something else under the same name.
    fn check_same(&self, connection: Connection) -> Result<Connection> {
        let facts = connection.facts();
        let lost = self.facts.flags.without(facts.flags);
        if (facts.size != self.facts.size && !slip!("another_size_after_a_reconnect"))
            || lost != TransmissionFlags::default()
        {
            let message = "the export is not what it was before the connection was lost";
            return Err(Error::invalid_argument(message).file(self.name.clone()));
        }
        Ok(connection)
    }

    /// Sends a goodbye; requests that come later connect again.
    pub async fn close(&self) {
        let connection = Arc::clone(&lock(&self.state).connection);
        connection.close().await;
    }
}

/// One request's attempts to be carried out.
#[derive(Default)]
struct Attempt {
    number: u32,
    /// When the first of them failed.
    lost_at: Option<Duration>,
}

/// The end of a buffer joins its beginning again. Parts that don't are an error.
fn join_with(result: Reply<()>, beginning: Option<IoBuf>, end: IoBuf) -> (Reply<()>, IoBuf) {
    let Some(mut whole) = beginning else { return (result, end) };
    match whole.unsplit(end) {
        Ok(()) => (result, whole),
        Err(_) => (result.and(Err(Errno::EIO)), whole),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
