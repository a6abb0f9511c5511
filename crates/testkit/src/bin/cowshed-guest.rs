// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs in an emulated guest (`tests/processes/linux_client.rs`). It has the kernel attach `/dev/nbd0` to a server,
//! uses it, and passes the kernel a new connection when the first one is dead. It reports its progress on its standard
//! output, and reads from its input when to go on.
//!
//! `cowshed-guest HOST:PORT`

use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::net::netlink::{GENERIC, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with};
use std::fs::{File, OpenOptions};
use std::io::{self, Error, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const DEVICE: &str = "/dev/nbd0";
/// Where one block after another is written while the connection is cut, and how large a block is.
const RUNNING: (u64, u64, usize) = (48 * MIB, 52 * MIB, 64 << 10);

fn failed(message: impl Into<String>) -> Error {
    Error::other(message.into())
}

/// The kernel's interface to its NBD client: the family `nbd` of generic netlink.
struct Kernel {
    socket: OwnedFd,
    family: u16,
}

const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
const RECONFIGURE: u8 = 3;

/// An attribute; its length counts its head, and the next one begins at a multiple of four.
fn attribute(kind: u16, content: &[u8]) -> Vec<u8> {
    let mut bytes = (content.len() as u16 + 4).to_ne_bytes().to_vec();
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

impl Kernel {
    fn new() -> io::Result<Kernel> {
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, Some(GENERIC))?;
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let mut kernel = Kernel { socket, family: 0x10 };
        // The controller names the family's number in its first attributes.
        let reply = kernel.ask(3, &attribute(2, b"nbd\0"), false)?;
        let mut at = 20;
        while let Some(head) = reply.get(at..at + 4) {
            let (len, kind) = (u16::from_ne_bytes([head[0], head[1]]), u16::from_ne_bytes([head[2], head[3]]));
            if kind == 1 {
                kernel.family = u16::from_ne_bytes([reply[at + 4], reply[at + 5]]);
                return Ok(kernel);
            }
            at += usize::from(len.max(4)).next_multiple_of(4);
        }
        Err(failed("the kernel has no family nbd"))
    }

    /// Sends a command. The answer is a message, or an acknowledgement if `acknowledged`.
    fn ask(&self, command: u8, attributes: &[u8], acknowledged: bool) -> io::Result<Vec<u8>> {
        let flags: u16 = if acknowledged { 1 | 4 } else { 1 };
        let mut message = (20 + attributes.len() as u32).to_ne_bytes().to_vec();
        message.extend_from_slice(&self.family.to_ne_bytes());
        message.extend_from_slice(&flags.to_ne_bytes());
        message.extend_from_slice(&[0; 8]);
        message.extend_from_slice(&[command, 1, 0, 0]);
        message.extend_from_slice(attributes);
        send(&self.socket, &message, SendFlags::empty())?;
        loop {
            let mut reply = vec![0; 8192];
            let (_, len) = recv(&self.socket, reply.as_mut_slice(), RecvFlags::empty())?;
            reply.truncate(len);
            if reply.get(4..6) != Some(&2u16.to_ne_bytes()) {
                if acknowledged {
                    continue;
                }
                return Ok(reply);
            }
            let code = reply.get(16..20).map(|code| i32::from_ne_bytes([code[0], code[1], code[2], code[3]]));
            return match code {
                Some(0) => Ok(reply),
                Some(code) => Err(Error::from_raw_os_error(-code)),
                None => Err(failed("a short answer of the kernel")),
            };
        }
    }

    fn of_device(&self, command: u8, attributes: &[u8]) -> io::Result<()> {
        self.ask(command, &[&attribute(1, &0u32.to_ne_bytes()), attributes].concat(), true).map(drop)
    }

    /// Gives the kernel a connection, for requests to begin with or to go on with.
    fn hand_over(&self, command: u8, connection: &Connection) -> io::Result<()> {
        let descriptor = attribute(1, &(connection.stream.as_raw_fd() as u32).to_ne_bytes());
        const NESTED: u16 = 0x8000;
        let number = |kind: u16, value: u64| attribute(kind, &value.to_ne_bytes());
        let attributes = [
            number(2, connection.size),
            number(3, 512),
            // Seconds that a request may take. A request that was on its way when its connection died is only sent again
            // when they are over.
            number(4, 40),
            number(5, connection.flags.into()),
            attribute(7 | NESTED, &attribute(1 | NESTED, &descriptor)),
            // Seconds that requests wait for another connection.
            number(8, 600),
        ];
        self.of_device(command, &attributes.concat())
    }
}

/// A connection after the handshake.
struct Connection {
    stream: TcpStream,
    size: u64,
    flags: u16,
}

impl Connection {
    fn new(address: &str) -> io::Result<Connection> {
        let mut stream = TcpStream::connect(address)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        // Fixed newstyle without the padding; the export with the empty name.
        stream.write_all(&3u32.to_be_bytes())?;
        stream.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0")?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        let mut size = [0; 8];
        size.copy_from_slice(&export[..8]);
        Ok(Connection { stream, size: u64::from_be_bytes(size), flags: u16::from_be_bytes([export[8], export[9]]) })
    }

    /// A server that is started again takes a moment.
    fn anew(address: &str) -> io::Result<Connection> {
        for _ in 0..600 {
            if let Ok(connection) = Self::new(address) {
                return Ok(connection);
            }
            // Between two attempts.
            std::thread::sleep(Duration::from_millis(100));
        }
        Err(failed("the server does not come back"))
    }
}

/// Memory with the alignment of direct I/O.
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Aligned {
        let bytes = vec![0; len + 4096];
        let start = bytes.as_ptr().align_offset(4096);
        Aligned { bytes, start, len }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// The bytes of a MiB of the disk, by its number.
fn fill(bytes: &mut [u8], first_mib: u64) {
    for (index, piece) in bytes.chunks_mut(8).enumerate() {
        let word = (first_mib << 40) + index as u64;
        piece.copy_from_slice(&word.to_le_bytes()[..piece.len()]);
    }
}

fn open(direct: bool) -> io::Result<File> {
    let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(DEVICE)
}

/// Writes, zeroes, trims, flushes; reads all of it back from the server.
fn use_disk() -> io::Result<()> {
    let device = open(true)?;
    let mut bytes = Aligned::new(32 << 20);
    fill(bytes.get(), 8);
    device.write_all_at(bytes.get(), 8 * MIB)?;
    let mut small = Aligned::new(4096);
    fill(small.get(), 1);
    device.write_all_at(small.get(), MIB)?;
    fallocate(&device, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 10 * MIB, MIB)?;
    // `fallocate` has no way to discard.
    let (offset, len) = ((12 * MIB).to_string(), MIB.to_string());
    let trimmed = Command::new("/bin/busybox").args(["blkdiscard", "-o", &offset, "-l", &len, DEVICE]).status()?;
    if !trimmed.success() {
        return Err(failed("blkdiscard failed"));
    }
    device.sync_all()?;
    let mut found = Aligned::new(32 << 20);
    device.read_exact_at(found.get(), 8 * MIB)?;
    bytes.get()[2 << 20..3 << 20].fill(0);
    bytes.get()[4 << 20..5 << 20].fill(0);
    if found.get() != bytes.get() {
        return Err(failed("32 MiB read back otherwise"));
    }
    // Through the page cache.
    let cached = open(false)?;
    let mut text = vec![0; 300_001];
    fill(&mut text, 40);
    cached.write_all_at(&text, 40 * MIB + 77)?;
    cached.sync_all()
}

/// Writes one block after another, again and again, until the order to stop; returns the sum of the last round.
fn write_on(rounds: &AtomicU64, stop: &AtomicU64) -> io::Result<u64> {
    let device = open(true)?;
    let mut block = Aligned::new(RUNNING.2);
    loop {
        let round = rounds.load(Ordering::SeqCst) + 1;
        let mut at = RUNNING.0;
        while at < RUNNING.1 {
            block.get().fill(round as u8);
            device.write_all_at(block.get(), at)?;
            at += RUNNING.2 as u64;
        }
        device.sync_all()?;
        rounds.store(round, Ordering::SeqCst);
        if round >= stop.load(Ordering::SeqCst) {
            return Ok(round);
        }
    }
}

fn say(words: &str) {
    println!("GUEST: {words}");
}

fn await_word() -> io::Result<()> {
    let mut line = String::new();
    io::stdin().read_line(&mut line).map(drop)
}

fn run(address: &str) -> io::Result<()> {
    let kernel = Kernel::new()?;
    let first = Connection::anew(address)?;
    kernel.hand_over(CONNECT, &first)?;
    drop(first);
    use_disk()?;
    say("has used the disk");

    let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
    let writer = {
        let (rounds, stop) = (Arc::clone(&rounds), Arc::clone(&stop));
        std::thread::spawn(move || write_on(&rounds, &stop))
    };
    while rounds.load(Ordering::SeqCst) < 1 && !writer.is_finished() {
        // Between two looks.
        std::thread::sleep(Duration::from_millis(10));
    }
    say("writes on");
    await_word()?;
    // The connection is dead by now, and the kernel holds the requests. A kernel that hasn't noticed yet drops the new
    // connection and reports success, so another one follows where no write goes on.
    let before = rounds.load(Ordering::SeqCst);
    let mut connections = 0;
    while rounds.load(Ordering::SeqCst) == before && !writer.is_finished() {
        kernel.hand_over(RECONFIGURE, &Connection::anew(address)?)?;
        connections += 1;
        let until = Instant::now() + Duration::from_secs(20);
        while rounds.load(Ordering::SeqCst) == before && !writer.is_finished() && Instant::now() < until {
            // Between two looks.
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    say(&format!("has another connection, number {connections}"));
    stop.store(rounds.load(Ordering::SeqCst) + 2, Ordering::SeqCst);
    let last = writer.join().map_err(|_| failed("the writer panicked"))??;
    let mut found = Aligned::new((RUNNING.1 - RUNNING.0) as usize);
    open(true)?.read_exact_at(found.get(), RUNNING.0)?;
    if found.get().iter().any(|&byte| byte != last as u8) {
        return Err(failed("what was written beside the cut reads otherwise"));
    }
    say(&format!("ends after round {last}"));
    kernel.of_device(DISCONNECT, &[])
}

fn main() {
    let address = std::env::args().nth(1).expect("usage: cowshed-guest HOST:PORT");
    match run(&address) {
        Ok(()) => say("finished"),
        Err(error) => say(&format!("FAILED: {error}")),
    }
    // The console has time to send the last line.
    std::thread::sleep(Duration::from_millis(200));
    let _ = std::fs::write("/proc/sysrq-trigger", "o");
    // The kernel ends this.
    std::thread::sleep(Duration::from_secs(600));
}
