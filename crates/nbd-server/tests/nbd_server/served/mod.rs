// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A server on an image, for tests: on a thread of its own, with the way to it.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod foreign;
pub mod held;
pub mod wire;

use cowshed_image::{Node, OpenRequest, open};
use cowshed_nbd_server::{Event, EventHandler, Export, Server, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const GRACE: Duration = Duration::from_secs(20);

/// A running server.
pub struct Served {
    pub server: Arc<Server<Arc<Node>>>,
    pub dir: tempfile::TempDir,
    pub socket: PathBuf,
    pub events: Arc<Mutex<Vec<Event>>>,
    nodes: Mutex<Vec<Arc<Node>>>,
}

impl Served {
    /// A server without exports on a Unix socket.
    pub fn start(config: ServerConfig) -> Served {
        Self::start_prepared(config, |_| ())
    }

    /// As [`Served::start`]; `prepare` sees the server before it listens.
    pub fn start_prepared(mut config: ServerConfig, prepare: impl FnOnce(&Server<Arc<Node>>)) -> Served {
        let dir = cowshed_testkit::qemu::temp_dir();
        let socket = dir.path().join("nbd.sock");
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let seen = Arc::clone(&events);
        config.events = Some(EventHandler(Arc::new(move |event| seen.lock().unwrap().push(event))));
        let server = Arc::new(Server::new(config).expect("server"));
        prepare(&server);
        server.listen(&SocketAddress::Unix(socket.to_str().unwrap().to_owned())).expect("listen");
        Served { server, dir, socket, events, nodes: Mutex::default() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Opens an image and serves it; `adjust` changes the export.
    pub fn export(&self, request: OpenRequest, adjust: impl FnOnce(&mut Export<Arc<Node>>)) -> Arc<Node> {
        let node = rt::block_on(open(request)).expect("open");
        let mut export = Export::new("", Arc::clone(&node));
        export.writable = !node.is_read_only();
        adjust(&mut export);
        self.server.add_export(export).expect("export");
        self.nodes.lock().unwrap().push(Arc::clone(&node));
        node
    }

    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket.display())
    }

    /// Stops the server and closes the images.
    pub fn stop(self) -> tempfile::TempDir {
        rt::block_on(async {
            self.server.stop(GRACE).await.expect("stop");
            let nodes = std::mem::take(&mut *self.nodes.lock().unwrap());
            for node in nodes {
                node.close().await.expect("close");
            }
        });
        self.dir
    }
}

/// `len` bytes: data, zeroes and holes in turn.
pub fn write_pattern(path: &Path, len: u64, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0u8; len as usize];
    let mut random = seed | 1;
    for chunk in bytes.chunks_mut(128 << 10) {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if random >> 62 == 0 {
            continue;
        }
        for byte in chunk.iter_mut() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            *byte = random as u8;
        }
    }
    std::fs::write(path, &bytes).expect("write");
    bytes
}

pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
