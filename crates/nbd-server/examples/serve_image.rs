// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Serves an image on a Unix socket until standard input ends: `serve_image IMAGE SOCKET [QUEUES]`.

use cowshed_image::{OpenRequest, open};
use cowshed_nbd_server::{Export, Server, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use cowshed_types::Result;
use std::time::Duration;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, socket, queues @ ..] = &arguments[..] else {
        eprintln!("usage: serve_image IMAGE SOCKET [QUEUES]");
        std::process::exit(1);
    };
    let queues = queues.first().and_then(|queues| queues.parse().ok()).unwrap_or(1);
    let node = rt::block_on(open(OpenRequest::file(image).writable(true)))?;
    let server = Server::new(ServerConfig { queues, ..ServerConfig::default() })?;
    server.listen(&SocketAddress::Unix(socket.clone()))?;
    server.add_export(Export { writable: true, ..Export::new("", node.clone()) })?;
    println!("nbd+unix:///?socket={socket}");
    let _ = std::io::read_to_string(std::io::stdin());
    rt::block_on(async {
        server.stop(Duration::from_secs(10)).await?;
        node.close().await
    })
}
