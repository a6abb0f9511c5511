// SPDX-License-Identifier: Apache-2.0 OR MIT
//! NBD at both ends: lost writes, FUA, exports that are removed, and servers that come back with something else.

use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_nbd::{Client, ClientOptions};
use cowshed_nbd_server::{Export, Removal, Server, ServerConfig};
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_testkit::waiting::await_that;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const LEN: usize = 4096;

/// A server of a raw file.
struct Served {
    server: Arc<Server<Arc<Node>>>,
    node: Arc<Node>,
    address: SocketAddress,
}

impl Served {
    fn start(image: &Path, address: &SocketAddress) -> Served {
        let request = OpenRequest::file(image.to_str().expect("UTF-8")).format("raw").writable(true);
        let node = rt::block_on(open(request)).expect("open");
        let server = Arc::new(Server::new(ServerConfig::default()).expect("server"));
        let mut export = Export::new("", Arc::clone(&node));
        export.writable = true;
        server.add_export(export).expect("export");
        let address = server.listen(address).expect("listen").remove(0);
        Served { server, node, address }
    }

    fn reads(&self) -> u64 {
        self.node.statistics().kind(IoKind::Read).operations
    }

    /// Ends the server without a word to its clients.
    fn end(self) {
        rt::block_on(async {
            self.server.stop(Duration::ZERO).await.expect("stop");
            self.node.close().await.expect("close");
        });
    }
}

fn image(dir: &tempfile::TempDir, name: &str, len: u64) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::File::create(&path).expect("create").set_len(len).expect("set_len");
    path
}

fn unix(dir: &tempfile::TempDir) -> SocketAddress {
    SocketAddress::Unix(dir.path().join("nbd.sock").to_str().expect("UTF-8").to_owned())
}

/// A relay of TCP that hands on the server's bytes, and the client's up to a moment.
struct Relay {
    address: SocketAddress,
    cut: Arc<AtomicBool>,
    /// Bytes that the client has sent since the cut.
    swallowed: Arc<AtomicU64>,
}

impl Relay {
    fn start(to: &SocketAddress) -> Relay {
        let to = to.to_string();
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("address").port();
        let (cut, swallowed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let relay = Relay { address: SocketAddress::Tcp { host: "127.0.0.1".into(), port }, cut, swallowed };
        let (cut, swallowed) = (Arc::clone(&relay.cut), Arc::clone(&relay.swallowed));
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(&to) else { continue };
                let (mut client_in, mut server_out) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let (mut server_in, mut client_out) = (server, client);
                let (cut, swallowed) = (Arc::clone(&cut), Arc::clone(&swallowed));
                std::thread::spawn(move || drop(std::io::copy(&mut server_in, &mut client_out)));
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 65_536];
                    while let Ok(len @ 1..) = client_in.read(&mut bytes) {
                        if cut.load(Ordering::SeqCst) {
                            // The request is lost, and so is the connection.
                            swallowed.fetch_add(len as u64, Ordering::SeqCst);
                            let _ = client_in.shutdown(Shutdown::Both);
                            let _ = server_out.shutdown(Shutdown::Both);
                            return;
                        }
                        if server_out.write_all(&bytes[..len]).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        relay
    }
}

#[test]
fn lost_write_is_an_error_or_sent_again() {
    let dir = cowshed_testkit::qemu::temp_dir();
    let path = image(&dir, "disk.raw", 1 << 20);
    let served = Served::start(&path, &SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 });
    for reconnect_delay in [Duration::ZERO, Duration::from_secs(60)] {
        let relay = Relay::start(&served.address);
        let mut options = ClientOptions::new(relay.address.clone(), "");
        options.reconnect_delay = reconnect_delay;
        rt::block_on(async {
            let client = Client::connect(options).await.expect("connect");
            client.write(0, IoBuf::copy_from(&[1; LEN]), false).await.0.expect("the connection is whole");
            relay.cut.store(true, Ordering::SeqCst);
            let writing = rt::spawn(async move {
                let (result, _) = client.write(0, IoBuf::copy_from(&[2; LEN]), false).await;
                (result, client)
            });
            while relay.swallowed.load(Ordering::SeqCst) == 0 {
                // The writing task runs meanwhile.
                rt::sleep(Duration::from_millis(1)).await;
            }
            relay.cut.store(false, Ordering::SeqCst);
            let (result, _client) = writing.await;
            let content = std::fs::read(&path).expect("read");
            match reconnect_delay.is_zero() {
                true => {
                    result.expect_err("a write without a reply");
                    assert!(content[..LEN] == [1; LEN], "it did not arrive");
                }
                false => {
                    result.expect("sent again over the next connection");
                    assert!(content[..LEN] == [2; LEN], "a write that was lost counts as done");
                }
            }
        });
    }
    served.end();
}

#[test]
fn a_write_with_fua_is_flushed_before_its_reply() {
    let dir = cowshed_testkit::qemu::temp_dir();
    let served = Served::start(&image(&dir, "disk.raw", 1 << 20), &unix(&dir));
    let flushes = || served.node.statistics().kind(IoKind::Flush).operations;
    rt::block_on(async {
        let client = Client::connect(ClientOptions::new(served.address.clone(), "")).await.expect("connect");
        let before = flushes();
        client.write(0, IoBuf::copy_from(&[1; LEN]), false).await.0.expect("write");
        assert_eq!(flushes(), before, "a plain write flushes nothing");
        client.write(0, IoBuf::copy_from(&[2; LEN]), true).await.0.expect("write");
        assert_eq!(flushes(), before + 1, "the reply came before the flush");
        client.close().await;
    });
    served.end();
}

/// A client that chooses the default export in the oldest way and sends nothing more.
fn raw_client(address: &SocketAddress) -> TcpStream {
    let mut stream = TcpStream::connect(address.to_string()).expect("connect");
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).expect("greeting");
    let flags = 3u32.to_be_bytes();
    let export_name = [b"IHAVEOPT".as_slice(), &1u32.to_be_bytes(), &0u32.to_be_bytes()].concat();
    stream.write_all(&[&flags[..], &export_name].concat()).expect("send");
    stream.read_exact(&mut [0; 10]).expect("size and flags");
    stream
}

const REQUESTS: u64 = 400;
const EACH: u32 = 1 << 20;

/// A client that has left this many reads of 1 MiB behind, and the number of those that were begun: 64 MiB of replies
/// wait for it, and the budget lets no further request begin.
fn leave_reads(served: &Served) -> (TcpStream, u64) {
    let before = served.reads();
    let mut client = raw_client(&served.address);
    let mut read = Vec::new();
    read.extend(0x2560_9513u32.to_be_bytes());
    // Neither flags nor, for a read, a number of a command; the cookie and the offset are 0 as well.
    read.extend([0; 20]);
    read.extend(EACH.to_be_bytes());
    client.write_all(&read.repeat(REQUESTS as usize)).expect("send");
    let (mut last, until) = ((0, Instant::now()), Instant::now() + Duration::from_secs(60));
    while served.reads() < before + 60 || last.1.elapsed() < Duration::from_millis(500) {
        assert!(Instant::now() < until, "the server goes on");
        if served.reads() != last.0 {
            last = (served.reads(), Instant::now());
        }
        // Between two looks, with the bound above.
        std::thread::sleep(Duration::from_millis(5));
    }
    (client, last.0)
}

#[test]
fn requests_of_a_dead_connection_are_not_begun() {
    let dir = cowshed_testkit::qemu::temp_dir();
    let tcp = SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let served = Served::start(&image(&dir, "disk.raw", EACH.into()), &tcp);
    let (client, begun) = leave_reads(&served);
    drop(client);
    // Some may begin before the end is noticed.
    rt::block_on(served.server.wait_until_idle());
    assert!(served.reads() <= begun + 64, "{} requests were begun for nobody", served.reads() - begun);
    // The same without a reset: the client ends its direction without a goodbye, and takes the replies of begun
    // requests.
    let before = served.reads();
    let (mut client, begun) = leave_reads(&served);
    client.shutdown(Shutdown::Write).expect("shutdown");
    let mut replies = Vec::new();
    client.read_to_end(&mut replies).expect("receive");
    rt::block_on(served.server.wait_until_idle());
    assert!(served.reads() <= begun + 64, "{} requests were begun for nobody", served.reads() - begun);
    assert!(replies.len() as u64 >= (begun - before) * u64::from(EACH), "those that had begun are answered");
    served.end();
}

#[test]
fn buffered_requests_do_not_delay_removal_of_an_export() {
    let dir = cowshed_testkit::qemu::temp_dir();
    let tcp = SocketAddress::Tcp { host: "127.0.0.1".into(), port: 0 };
    let served = Served::start(&image(&dir, "disk.raw", EACH.into()), &tcp);
    let (mut client, begun) = leave_reads(&served);
    let server = Arc::clone(&served.server);
    let removing = std::thread::spawn(move || rt::block_on(server.remove_export("", Removal::Hard)).expect("removed"));
    await_that("the export goes", || served.server.exports().first().is_none_or(|export| export.shutting_down));
    let mut replies = Vec::new();
    let _ = client.read_to_end(&mut replies);
    removing.join().expect("the removal ends");
    assert!(served.reads() < REQUESTS / 2, "{} requests were carried out", served.reads());
    assert!(replies.len() as u64 >= begun * u64::from(EACH), "those that had begun are answered");
    served.end();
}

#[test]
fn a_server_that_comes_back_with_another_size_is_refused() {
    let dir = cowshed_testkit::qemu::temp_dir();
    let address = unix(&dir);
    let served = Served::start(&image(&dir, "small.raw", 1 << 20), &address);
    let mut options = ClientOptions::new(address.clone(), "");
    options.reconnect_delay = Duration::from_secs(1);
    let client = rt::block_on(Client::connect(options)).expect("connect");
    served.end();
    let other = image(&dir, "large.raw", 2 << 20);
    let served = Served::start(&other, &address);
    rt::block_on(async {
        client.write(0, IoBuf::copy_from(&[9; LEN]), false).await.0.expect_err("another disk");
        client.close().await;
    });
    served.end();
    assert!(std::fs::read(&other).expect("read")[..LEN] == [0; LEN], "the write went to another disk");
}
