// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Servers whose replies never end, or announce parts that were not asked for: the client ends the connection.

use crate::fake::{CHUNK_MAGIC, Offer, negotiate, numbers};
use cowshed_nbd::{Client, ClientOptions};
use cowshed_storage::{IoBuf, SocketAddress, rt};
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

const SIZE: u64 = 1 << 20;
/// HAS_FLAGS and SEND_FLUSH.
const FLAGS: u16 = 5;
const REQUEST_BYTES: usize = 28;
const LEN: usize = 4096;

fn chunk(cookie: &[u8], flags: u16, kind: u16, length: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie);
    bytes.extend(length.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// Answers the first request with the bytes that `answer` makes of its cookie, for ever if `endless`, until the client
/// leaves.
fn read_from(answer: fn(&[u8]) -> Vec<u8>, endless: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("s");
    let listener = UnixListener::bind(&path).expect("a socket");
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let offer = Offer { flags: FLAGS, structured: true, ..Offer::new(SIZE) };
        negotiate(&mut stream, &offer).expect("a handshake");
        let request = numbers::<REQUEST_BYTES>(&mut stream).expect("a request");
        let answer = answer(&request[8..16]);
        while stream.write_all(&answer).is_ok() && endless {}
        // Until the client has left.
        while stream.read(&mut [0; 4096]).is_ok_and(|read| read > 0) {}
    });
    rt::block_on(async {
        let address = SocketAddress::Unix(path.to_str().expect("UTF-8").to_owned());
        let client = Client::connect(ClientOptions::new(address, "")).await.expect("connect");
        let (reply, _) = client.read(0, IoBuf::zeroed(LEN)).await;
        reply.expect_err("no reply of an honest server");
        client.close().await;
    });
    server.join().expect("the server saw its client leave");
}

#[test]
fn a_reply_without_an_end_ends_the_connection() {
    const NONE: u16 = 0;
    read_from(|cookie| chunk(cookie, 0, NONE, 0, &[]), true);
}

#[test]
fn errors_without_an_end_end_the_connection() {
    const ERROR: u16 = 0x8001;
    read_from(|cookie| chunk(cookie, 0, ERROR, 6, &[0, 0, 0, 5, 0, 0]), true);
}

/// Nothing follows the header: the client doesn't wait for data that the request has no room for.
#[test]
fn excess_reply_data_is_not_waited_for() {
    const OFFSET_DATA: u16 = 1;
    read_from(|cookie| chunk(cookie, 0, OFFSET_DATA, 0xffff_fff0, &[]), false);
}
