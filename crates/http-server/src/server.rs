// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The server as its owner sees it.

use crate::connection::{Site, serve};
use crate::content::Content;
use cowshed_nbd::ServerTls;
use cowshed_storage::rt::{self, JoinHandle, within};
use cowshed_storage::signal::{Mailbox, Watched, lock};
use cowshed_storage::{Listener, Socket, SocketAddress};
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Between two attempts to accept a client when the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The settings of a [`Server`].
#[derive(Clone, Debug, Default)]
pub struct ServerConfig {
    /// Credentials; none: no encryption.
    pub tls: Option<ServerTls>,
    /// The resources that clients may take from this process.
    pub limits: Limits,
    /// Called for sent bytes, on the thread that serves: it must be quick and must not wait for the server.
    pub events: Option<EventHandler>,
    /// The name of the export in log lines.
    pub export: Option<String>,
    /// Requests of HTTP/1.1 are answered only where their field `Host` is an address, `localhost`, a name below it or one of these. A
    /// page of the web whose name leads to this machine can't read anything then. `None`: under any name.
    pub local_names: Option<Vec<String>>,
    /// [`Event::Ended`] comes once the client has ended its connection, which shows whether the bytes have arrived. A response up to
    /// the end of a content is the last one of its connection.
    pub confirms: bool,
}

impl ServerConfig {
    pub(crate) fn notify(&self, event: &Event<'_>) {
        if let Some(EventHandler(handler)) = &self.events {
            handler(event);
        }
    }
}

/// An event of the server.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A piece of a content was handed to the system, which sends it to the client.
    Sent {
        /// The client's name in messages.
        peer: &'a str,
        /// The path of the content.
        path: &'a str,
        /// The range of bytes.
        range: Range<u64>,
        /// Length of the content in bytes.
        len: u64,
        /// The version that was sent.
        version: u64,
    },
    /// A client asks for all bytes from `start` on, which says that it has those before. With [`ServerConfig::confirms`] alone.
    Resumed {
        /// The client's name in messages.
        peer: &'a str,
        /// The path of the content.
        path: &'a str,
        /// The version that is sent.
        version: u64,
        /// The first byte; not 0.
        start: u64,
    },
    /// A response with bytes of a content has ended; with [`ServerConfig::confirms`] a connection with such responses.
    Ended {
        /// The client's name in messages.
        peer: &'a str,
        /// The path of the content.
        path: &'a str,
        /// Length of the content in bytes.
        len: u64,
        /// All that it promised was sent; with [`ServerConfig::confirms`] it has arrived.
        is_complete: bool,
    },
    /// A content could not be read. The response ends there; where nothing of it was sent it is one of the status 500.
    Failed {
        /// The client's name in messages.
        peer: &'a str,
        /// The path of the content.
        path: &'a str,
        /// The reason of the failure.
        error: &'a Error,
    },
}

/// The function that is called for each [`Event`].
#[derive(Clone)]
pub struct EventHandler(pub Arc<dyn Fn(&Event<'_>) + Send + Sync>);

impl std::fmt::Debug for EventHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("EventHandler")
    }
}

/// The resources that clients may take from this process.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time. For the next one, the connection that has waited longest for a request is closed. Else it is one that
    /// stays after its last response; if all have responses to take, the next one waits. At least 1.
    pub max_connections: usize,
    /// From the first byte of a request to the end of its head, and from the acceptance of a client to its encryption.
    pub head_timeout: Duration,
    /// The time from one response to the next request.
    pub idle_timeout: Duration,
    /// A client that takes fewer bytes than one piece in this time is cut off.
    pub stall_limit: Duration,
    /// Bytes of a content that are read and sent at once; a connection has twice as many in memory.
    pub piece_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_connections: 256,
            head_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            stall_limit: Duration::from_secs(60),
            piece_bytes: 256 << 10,
        }
    }
}

/// A task of the thread.
enum Message {
    Listen(Listener),
    Serve(Socket),
    Stop(Duration),
}

/// The content at a path.
#[derive(Clone)]
pub(crate) struct Offered {
    pub content: Arc<dyn Content>,
    /// The page that a browser gets without asking for the download.
    pub page: Option<Arc<dyn Content>>,
}

/// The content at each path.
pub(crate) type Contents = Mutex<BTreeMap<String, Offered>>;

/// Serves contents over HTTP until [`Server::stop`], on a thread of its own. Usable from any thread.
///
/// Dropping it without that cuts the connections.
pub struct Server {
    contents: Arc<Contents>,
    mailbox: Arc<Mailbox<Message>>,
    ended: Arc<Watched<bool>>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Server")
    }
}

/// Notes that the thread has ended, also by a panic.
struct Ending(Arc<Watched<bool>>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.change(|ended| *ended = true);
    }
}

impl Server {
    /// Starts the thread. No client is served before [`Server::listen`] or [`Server::serve`].
    ///
    /// # Errors
    /// When the system has no thread or no descriptor left, or the limits leave no room for a client.
    pub fn start(config: ServerConfig) -> Result<Server> {
        if config.limits.max_connections == 0 || config.limits.piece_bytes == 0 {
            return Err(Error::invalid_argument(
                "a server of HTTP takes at least one connection and pieces of one byte",
            ));
        }
        let contents: Arc<Contents> = Arc::default();
        let mailbox: Arc<Mailbox<Message>> = Arc::default();
        let ended = Arc::new(Watched::new(false));
        let ending = Ending(Arc::clone(&ended));
        let (known, inbox) = (Arc::clone(&contents), Arc::clone(&mailbox));
        let (prepared, is_prepared) = std::sync::mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name("http".into())
            .spawn(move || {
                let _ending = ending;
                let outcome = rt::prepare();
                let can_serve = outcome.is_ok();
                let is_awaited = prepared.send(outcome).is_ok();
                if can_serve && is_awaited {
                    rt::block_on(run(Site { contents: known, config }, inbox));
                }
            })
            .map_err(|error| Error::io(&error, "could not start a thread"))?;
        match is_prepared.recv() {
            Ok(outcome) => outcome.map(|()| Server { contents, mailbox, ended }),
            Err(_) => Err(Error::internal("the thread of the HTTP server ended at once")),
        }
    }

    /// Listens; returns where, with the ports that the system chose. May wait for a name server.
    ///
    /// # Errors
    /// When an address can't be bound; then none of them is.
    pub fn listen(&self, address: &SocketAddress) -> Result<Vec<SocketAddress>> {
        Ok(Listener::bind(address)?.into_iter().map(|listener| self.listen_on(listener)).collect())
    }

    /// Takes clients from a socket that listens already; returns its address.
    pub fn listen_on(&self, listener: Listener) -> SocketAddress {
        let address = listener.address().clone();
        self.mailbox.send(Message::Listen(listener));
        address
    }

    /// Serves one client that is connected already.
    pub fn serve(&self, socket: Socket) {
        self.mailbox.send(Message::Serve(socket));
    }

    /// From now on clients find a content at a path, which begins with `/` and is as it is after decoding `%XX`.
    ///
    /// # Errors
    /// When the path is taken, or is none.
    pub fn add(&self, path: &str, content: Arc<dyn Content>) -> Result<()> {
        self.add_with_page(path, content, None)
    }

    /// As [`Server::add`]. A browser gets `page` first, and the content where the target ends with `?download`.
    ///
    /// # Errors
    /// As for [`Server::add`].
    pub fn add_with_page(&self, path: &str, content: Arc<dyn Content>, page: Option<Arc<dyn Content>>) -> Result<()> {
        if !path.starts_with('/') {
            return Err(Error::invalid_argument(format!("the path '{path}' doesn't begin with '/'")));
        }
        let mut contents = lock(&self.contents);
        if contents.contains_key(path) {
            return Err(Error::new(ErrorKind::Busy, format!("the path '{path}' is taken")));
        }
        contents.insert(path.to_owned(), Offered { content, page });
        Ok(())
    }

    /// Requests that come from now on don't find it. Responses that have begun go on.
    pub fn remove(&self, path: &str) {
        lock(&self.contents).remove(path);
    }

    /// Stops listening, lets responses end for at most `grace`, cuts the others, and ends the thread. Call it inside of
    /// [`rt::block_on`].
    pub async fn stop(&self, grace: Duration) {
        self.mailbox.send(Message::Stop(grace));
        self.ended.wait(|ended| ended.then_some(())).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.mailbox.send(Message::Stop(Duration::ZERO));
    }
}

async fn run(site: Site, inbox: Arc<Mailbox<Message>>) {
    rt::sleep_exactly();
    let clients = Rc::new(crate::connection::Clients::new(site));
    let mut listening: Vec<JoinHandle<()>> = Vec::new();
    let grace = loop {
        match inbox.receive().await {
            Message::Listen(listener) => listening.push(rt::spawn(accept_all(Rc::clone(&clients), listener))),
            Message::Serve(socket) => start(&clients, socket).await,
            Message::Stop(grace) => break grace,
        }
    };
    for task in listening {
        task.cancel().await;
    }
    clients.close_idle();
    if within(grace, clients.all_gone()).await.is_none() {
        clients.cut_all();
        clients.all_gone().await;
    }
}

async fn accept_all(clients: Rc<crate::connection::Clients>, listener: Listener) {
    loop {
        match listener.accept().await {
            Ok(socket) => start(&clients, socket).await,
            Err(error) if Listener::is_transient(&error) => {
                tracing::warn!(export = clients.export(), %error, "can't take HTTP clients at the moment");
                rt::sleep(ACCEPT_PAUSE).await;
            }
            Err(error) => {
                tracing::error!(export = clients.export(), %error, "can't take HTTP clients any more");
                return;
            }
        }
    }
}

/// Serves a client in a task of its own, once there is room.
async fn start(clients: &Rc<crate::connection::Clients>, socket: Socket) {
    let permit = clients.permit(socket.clone()).await;
    // The task ends with its connection, which the permit can cut.
    drop(rt::spawn(async move { serve(permit, socket).await }));
}
