// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Peers that do wrong thousands of times: the log keeps few lines of it, and the number of all.

use super::process::{Serving, text};
use cowshed_testkit::qemu::temp_dir;
use cowshed_testkit::vhost::FrontEnd;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

const REQUESTS: usize = 10_000;
const CONNECTIONS: usize = 500;
/// A few at once, and one in ten seconds of a slow machine.
const MOST_LINES: usize = 60;
/// A message of vhost-user.
const SET_VRING_NUM: u32 = 8;

/// Asks for a path that isn't there, in one connection.
fn flood_http(address: &str) {
    let stream = TcpStream::connect(address).expect("it listens");
    let mut asking = stream.try_clone().expect("a socket");
    let asker = std::thread::spawn(move || {
        let requests = "GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(100);
        (0..REQUESTS / 100).for_each(|_| asking.write_all(requests.as_bytes()).expect("it reads"));
    });
    let answers = BufReader::new(stream).lines().map(|line| line.expect("an answer"));
    assert_eq!(answers.filter(|line| line.starts_with("HTTP/1.1 404 ")).take(REQUESTS).count(), REQUESTS);
    asker.join().expect("it asks");
}

/// Sends flags that no NBD client has, in a connection each.
fn flood_nbd(socket: &Path) {
    for _ in 0..CONNECTIONS {
        let mut stream = UnixStream::connect(socket).expect("it listens");
        stream.read_exact(&mut [0; 18]).expect("a greeting");
        stream.write_all(&[0xff; 4]).expect("it reads");
        // It says nothing more.
        let _ = stream.read(&mut [0; 1]);
    }
}

/// Sends messages about a ring that isn't there, and comes again and again.
fn flood_vhost(socket: &Path) {
    let mut driver = FrontEnd::connect(socket);
    driver.negotiate(u64::MAX);
    assert!((0..REQUESTS).all(|_| !driver.tell_ring(SET_VRING_NUM, 60, 8)), "refused");
    // Another test that starts a program has a copy for a moment. The end of this front end doesn't wait for it.
    let _copy = driver.socket.as_fd().try_clone_to_owned().expect("a copy");
    drop(driver);
    for _ in 0..CONNECTIONS {
        let mut stream = UnixStream::connect(socket).expect("it listens");
        stream.write_all(&[0xff; 12]).expect("it reads");
        let _ = stream.read(&mut [0; 1]);
    }
}

#[test]
fn ten_thousand_wrong_requests_leave_few_lines_in_the_log() {
    let folder = temp_dir();
    let folder = folder.path();
    std::fs::File::create(folder.join("d.raw")).and_then(|file| file.set_len(1 << 20)).expect("an image");
    let http = "http,id=h,node-name=d,addr.type=inet,addr.host=127.0.0.1,addr.port=0,path=/disk";
    let vhost = "vhost-user-blk,id=v,node-name=d,addr.type=unix,addr.path=v.sock";
    let arguments = ["serve", "-k", "n.sock", "--log-format", "json", "--drive", "file=d.raw,id=d,format=raw"];
    let mut daemon = Serving::start(folder, &[&arguments[..], &["--export", http, "--export", vhost]].concat());
    let address = loop {
        let line = daemon.line();
        if let Some(rest) = line.strip_prefix("http://") {
            break rest.trim_end_matches("/disk").to_owned();
        }
    };
    flood_http(&address);
    flood_nbd(&folder.join("n.sock"));
    flood_vhost(&folder.join("v.sock"));
    daemon.stop();
    let log = std::fs::read_to_string(folder.join("log")).expect("a log");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    for (message, sent) in [
        ("HTTP request for a path that isn't there", REQUESTS),
        ("client refused", CONNECTIONS),
        ("a message is refused", REQUESTS),
        ("front end lost", CONNECTIONS),
    ] {
        let shown = lines.iter().filter(|line| line["message"] == message).count();
        assert!((1..=MOST_LINES).contains(&shown), "{message}: {shown} lines");
        let told = format!("left out of the log: '{message}'");
        let left_out = lines.iter().filter(|line| line["message"] == *told);
        let count: u64 = left_out.map(|line| line["count"].as_u64().expect("a number")).sum();
        assert_eq!(shown + count as usize, sent, "{message}");
    }
    let http = lines.iter().filter(|line| line["message"] == "HTTP request for a path that isn't there");
    assert!(http.into_iter().all(|line| line["export"] == "h"), "a bound for each export");
    assert!(lines.len() < 10 * MOST_LINES, "{}: {} lines", text(folder), lines.len());
}
