// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A matrix of peers. Our server runs with the clients of QEMU and libnbd, the system's and the newest
//! (`scripts/peers`), and nbdkit. Our client runs with the servers of both QEMUs and nbdkit. Each pair reads, writes,
//! zeroes, trims, flushes, asks for the status and sends 32 MiB at once. It does so under TLS too, and goes on with a
//! server that was started again.

use crate::served::foreign::Foreign;
use crate::served::{Served, text};
use cowshed_image::{OpenRequest, ZeroFlags, open};
use cowshed_nbd::ServerTls;
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::{Command as NbdCommand, HeaderStyle, Request};
use cowshed_nbd_server::ServerConfig;
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_testkit::credentials::make_credentials;
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, peers_dir, temp_dir};
use cowshed_testkit::waiting::await_that;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 40 * MIB;
const LIBNBD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/nbd_server/served/libnbd.py");

/// The first contents of the disk: every 64 KiB another byte.
fn initial() -> Vec<u8> {
    let mut content = vec![0; SIZE as usize];
    for (index, chunk) in content.chunks_mut(65536).enumerate() {
        chunk.fill(0x80 | index as u8);
    }
    content
}

/// The contents after the work of a client.
fn worked() -> Vec<u8> {
    let mut content = initial();
    let mut fill = |byte, from: u64, length: u64| content[from as usize..(from + length) as usize].fill(byte);
    fill(5, 65536, 65536);
    fill(6, 4 * MIB, 32 * MIB);
    fill(0, 5 * MIB, MIB);
    fill(0, 8 * MIB, MIB);
    fill(9, 12345, 777);
    content
}

/// A folder with a disk in its first state, and a copy of it that stays.
struct Fixture {
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Fixture {
        let fixture = Fixture { dir: temp_dir() };
        std::fs::write(fixture.path("initial.raw"), initial()).expect("a file");
        fixture.reset();
        fixture
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn reset(&self) {
        std::fs::copy(self.path("initial.raw"), self.path("disk.raw")).expect("a copy");
    }

    /// The disk holds this; `whose`: the program that wrote it.
    fn expect(&self, content: &[u8], whose: &str) {
        let found = std::fs::read(self.path("disk.raw")).expect("the disk");
        let wrong = || found.iter().zip(content).position(|(found, expected)| found != expected);
        assert!(found == content, "{whose}: {} bytes, different at {:?}", found.len(), wrong());
    }

    /// Waits until the disk holds sevens at 1024: the output of qemu-io comes late where it is no terminal.
    fn await_sevens(&self) {
        await_that("something is written", || {
            let mut found = [0; 512];
            File::open(self.path("disk.raw")).and_then(|disk| disk.read_exact_at(&mut found, 1024)).expect("the disk");
            found == [7; 512]
        });
    }

    /// Our server on the disk, at `nbd.sock`, with TLS also on a port.
    fn serve(&self, credentials: Option<&Path>) -> (Served, u16) {
        let tls = credentials.map(|folder| ServerTls::from_dir(folder, true).expect("credentials"));
        let served = Served::start(ServerConfig { queues: 2, tls, ..ServerConfig::default() });
        let _ = std::fs::remove_file(self.path("nbd.sock"));
        let listen = |address| served.server.listen(&address).expect("listen").remove(0);
        listen(SocketAddress::Unix(text(&self.path("nbd.sock")).to_owned()));
        let bound = listen(SocketAddress::Tcp { host: "127.0.0.1".to_owned(), port: 0 });
        let SocketAddress::Tcp { port, .. } = bound else { panic!("{bound}") };
        let request = OpenRequest::file(text(&self.path("disk.raw"))).format("raw").writable(true).discard(true);
        served.export(request, |_| ());
        (served, port)
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.path("nbd.sock").display())
    }

    fn options(&self) -> String {
        format!("driver=nbd,server.type=unix,server.path={}", self.path("nbd.sock").display())
    }
}

/// A version of libnbd: its Python, and the folder of its programs.
struct Libnbd {
    python: PathBuf,
    copy: PathBuf,
    info: PathBuf,
    has_extended_headers: bool,
}

fn libnbds() -> [Libnbd; 2] {
    let peers = peers_dir();
    let system = Libnbd {
        python: "/usr/bin/python3".into(),
        copy: "nbdcopy".into(),
        info: "nbdinfo".into(),
        has_extended_headers: false,
    };
    let newest = Libnbd {
        python: peers.join("nbdpython"),
        copy: peers.join("nbdcopy"),
        info: peers.join("nbdinfo"),
        has_extended_headers: true,
    };
    [system, newest]
}

/// The work with QEMU's programs, which reach the disk by these options.
fn work_by_qemu(qemu: &Qemu, fixture: &Fixture, options: &str, objects: &[&str]) {
    let copy = fixture.path("copy.raw");
    let img = |arguments: &[&str]| {
        let (verb, rest) = arguments.split_first().expect("a verb");
        qemu.img([verb].into_iter().chain(objects).chain(rest)).expect_ok()
    };
    img(&["convert", "--image-opts", "-O", "raw", options, text(&copy)]);
    assert!(std::fs::read(&copy).expect("the copy") == initial(), "{options}");
    let commands = [
        "write -P 5 64k 64k",
        "write -f -P 6 4M 32M",
        "write -z -u 5M 1M",
        "discard 8M 1M",
        "write -P 9 12345 777",
        "flush",
        "read -P 6 9M 27M",
        "read -P 0 5M 1M",
        "read -P 6 4M 1M",
    ];
    let mut arguments = objects.to_vec();
    arguments.extend(["-d", "unmap", "--image-opts"]);
    arguments.extend(commands.iter().flat_map(|command| ["-c", *command]));
    arguments.push(options);
    let output = qemu.io(arguments).expect_ok();
    assert!(!output.stdout.contains("failed") && !output.stderr.contains("rror"), "{output:?}");
    let map = img(&["map", "--output=json", "--image-opts", options]).json();
    let reads_zero = |offset: u64| {
        let number = |run: &serde_json::Value, key: &str| run[key].as_u64().expect("a number");
        let runs = map.as_array().expect("runs");
        let holds = |run: &&serde_json::Value| {
            (number(run, "start")..number(run, "start") + number(run, "length")).contains(&offset)
        };
        runs.iter().find(holds).expect("a run")["zero"].as_bool().expect("a flag")
    };
    assert!(reads_zero(5 * MIB + 512) && !reads_zero(65536), "{map}");
}

fn work_by_libnbd(libnbd: &Libnbd, fixture: &Fixture, uri: &str, wanted: &str) {
    tool(text(&libnbd.python), &[LIBNBD, "work", uri, text(&fixture.path("initial.raw")), wanted]);
}

#[test]
fn our_server_works_with_the_clients_of_qemu() {
    let fixture = Fixture::new();
    make_credentials(fixture.dir.path());
    for qemu in Qemu::all() {
        let whose = format!("qemu-io {:?}", qemu.version());
        let (served, _) = fixture.serve(None);
        work_by_qemu(&qemu, &fixture, &fixture.options(), &[]);
        served.stop();
        fixture.expect(&worked(), &whose);
        fixture.reset();
        let (served, port) = fixture.serve(Some(fixture.dir.path()));
        let options = format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port},tls-creds=tls0");
        let credentials = format!("tls-creds-x509,id=tls0,dir={},endpoint=client", fixture.dir.path().display());
        work_by_qemu(&qemu, &fixture, &options, &["--object", &credentials]);
        served.stop();
        fixture.expect(&worked(), &format!("{whose} with TLS"));
        fixture.reset();
    }
}

#[test]
fn our_server_works_with_the_clients_of_libnbd() {
    let fixture = Fixture::new();
    make_credentials(fixture.dir.path());
    for libnbd in libnbds() {
        let whose = text(&libnbd.info).to_owned();
        let (served, _) = fixture.serve(None);
        work_by_libnbd(&libnbd, &fixture, &fixture.uri(), if libnbd.has_extended_headers { "extended" } else { "any" });
        served.stop();
        fixture.expect(&worked(), &whose);
        // Out by nbdcopy and in again.
        let (served, port) = fixture.serve(Some(fixture.dir.path()));
        let uri = format!("nbds://localhost:{port}/?tls-certificates={}", fixture.dir.path().display());
        let copy = fixture.path("copy.raw");
        tool(text(&libnbd.copy), &["--connections=2", &uri, text(&copy)]);
        assert!(std::fs::read(&copy).expect("the copy") == worked(), "{whose}");
        tool(text(&libnbd.copy), &["--connections=2", "--flush", text(&fixture.path("initial.raw")), &uri]);
        let info: serde_json::Value = serde_json::from_str(&tool(text(&libnbd.info), &["--json", &uri])).expect("JSON");
        assert_eq!((&info["TLS"], &info["exports"][0]["export-size"]), (&true.into(), &SIZE.into()), "{info}");
        let map = tool(text(&libnbd.info), &["--json", "--map", &uri]);
        assert!(map.contains("\"data\""), "{map}");
        work_by_libnbd(&libnbd, &fixture, &uri, "tls");
        served.stop();
        fixture.expect(&worked(), &format!("{whose} with TLS"));
        fixture.reset();
    }
}

#[test]
fn our_server_works_with_nbdkit_as_client() {
    let fixture = Fixture::new();
    make_credentials(fixture.dir.path());
    let [system, _] = libnbds();
    let ours = format!("socket={}", fixture.path("nbd.sock").display());
    for is_encrypted in [false, true] {
        let (served, port) = fixture.serve(is_encrypted.then_some(fixture.dir.path()));
        let uri = format!("uri=nbds://localhost:{port}/");
        let folder = format!("tls-certificates={}", fixture.dir.path().display());
        let arguments = if is_encrypted { vec!["nbd", &uri, "tls=require", &folder] } else { vec!["nbd", &ours] };
        let between = Foreign::nbdkit(&fixture.path("between.sock"), &arguments);
        work_by_libnbd(&system, &fixture, &between.uri(), "any");
        drop(between);
        served.stop();
        fixture.expect(&worked(), &format!("nbdkit {arguments:?}"));
        fixture.reset();
    }
}

/// A client that stays while its server is started again; it reports its place, and is told to go on.
struct Staying {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Staying {
    fn start(command: &mut Command) -> Staying {
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (input, output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        Staying { child, input, output: BufReader::new(output) }
    }

    fn say(&mut self, line: &str) {
        self.input.write_all(line.as_bytes()).and_then(|()| self.input.flush()).expect("the client reads");
    }

    fn await_words(&mut self, words: &str) {
        let mut said = String::new();
        while !said.contains(words) {
            let count = self.output.read_line(&mut said).expect("text");
            assert!(count > 0, "the client has ended; it said {said:?}");
        }
    }

    fn expect_success(mut self) {
        drop(self.input);
        let mut said = String::new();
        self.output.read_to_string(&mut said).expect("text");
        assert!(self.child.wait().expect("a child").success() && !said.contains("failed"), "{said}");
    }
}

#[test]
fn clients_go_on_with_our_server_started_again() {
    let fixture = Fixture::new();
    let mut content = initial();
    content[..512].fill(7);
    content[1024..1536].fill(7);
    let restart = |served: Served| {
        served.stop();
        fixture.serve(None).0
    };
    for qemu in Qemu::all() {
        let served = fixture.serve(None).0;
        let options = format!("{},reconnect-delay=60", fixture.options());
        let mut client = Staying::start(Command::new(qemu.io_path()).args(["--image-opts", &options]));
        client.say("write -P 7 1k 512\n");
        fixture.await_sevens();
        let served = restart(served);
        client.say("write -P 7 0 512\nflush\nread -P 7 0 512\nquit\n");
        client.expect_success();
        served.stop();
        fixture.expect(&content, &format!("qemu-io {:?}", qemu.version()));
        fixture.reset();
    }
    let libnbds = libnbds();
    for libnbd in &libnbds {
        let served = fixture.serve(None).0;
        let (uri, start) = (fixture.uri(), fixture.path("initial.raw"));
        let arguments = [LIBNBD, "stay", &uri, text(&start), "any"];
        let mut client = Staying::start(Command::new(&libnbd.python).args(arguments));
        client.await_words("up");
        let served = restart(served);
        client.say("on\n");
        client.await_words("back");
        client.expect_success();
        served.stop();
        fixture.expect(&content, text(&libnbd.info));
        fixture.reset();
    }
    // nbdkit connects anew for its own client, which sees nothing of it.
    let served = fixture.serve(None).0;
    let ours = format!("socket={}", fixture.path("nbd.sock").display());
    let arguments = ["--filter=retry", "nbd", &ours, "retry-delay=1", "retry-exponential=no", "retries=60"];
    let between = Foreign::nbdkit(&fixture.path("between.sock"), &arguments);
    let options = format!("driver=nbd,server.type=unix,server.path={}", between.socket.display());
    let qemu = Qemu::system();
    let mut client = Staying::start(Command::new(qemu.io_path()).args(["--image-opts", &options]));
    client.say("write -P 7 1k 512\n");
    fixture.await_sevens();
    let served = restart(served);
    client.say("write -P 7 0 512\nflush\nquit\n");
    client.expect_success();
    drop(between);
    served.stop();
    fixture.expect(&content, "nbdkit");
}

/// A guest whose disk is a window of the export writes requests as its data: they are data.
#[test]
fn a_window_above_the_export_stays_a_window() {
    let fixture = Fixture::new();
    let smuggled = |style| {
        let flags = CommandFlags::default();
        let request = Request { command: NbdCommand::WriteZeroes, flags, cookie: 1, offset: 0, length: 65536 };
        let (bytes, len) = request.encode(style);
        bytes[..len].to_vec()
    };
    let cases = Qemu::all()
        .into_iter()
        .flat_map(|qemu| [HeaderStyle::Compact, HeaderStyle::Extended].map(|style| (qemu.clone(), style)));
    for (qemu, style) in cases {
        let data: Vec<u8> = smuggled(style).repeat(65536 / 28 + 1)[..65536].to_vec();
        let file = fixture.path("requests");
        std::fs::write(&file, &data).expect("a file");
        let served = fixture.serve(None).0;
        let socket = fixture.path("nbd.sock");
        let options = format!(
            "driver=raw,offset=1M,size=1M,file.driver=nbd,file.server.type=unix,file.server.path={}",
            socket.display()
        );
        qemu.io(["--image-opts", "-c", &format!("write -s {} 0 64k", file.display()), &options]).expect_ok();
        served.stop();
        let mut content = initial();
        content[MIB as usize..][..65536].copy_from_slice(&data);
        fixture.expect(&content, &format!("{:?} {style:?}", qemu.version()));
        fixture.reset();
    }
}

/// The work with our client.
fn work_by_us(fixture: &Fixture, uri: &str) {
    rt::block_on(async {
        let request = OpenRequest::file(uri).format("raw").writable(true).discard(true);
        let node = open(request).await.unwrap_or_else(|error| panic!("{uri}: {error}"));
        let read = async |offset, length: u64| {
            let (result, buf) = node.read(offset, IoBuf::scratch(length as usize)).await;
            result.unwrap_or_else(|error| panic!("{uri}: {error}"));
            buf.to_vec()
        };
        let write = async |offset, byte, length: u64| {
            let buf = IoBuf::copy_from(&vec![byte; length as usize]);
            node.write(offset, buf).await.0.unwrap_or_else(|error| panic!("{uri}: {error}"));
        };
        assert_eq!(node.size(), SIZE);
        assert!(read(0, SIZE).await == initial(), "{uri}");
        write(65536, 5, 65536).await;
        write(4 * MIB, 6, 32 * MIB).await;
        node.write_zeroes(5 * MIB, MIB, ZeroFlags { may_unmap: true, no_fallback: false }).await.expect("zeroes");
        node.discard(8 * MIB, MIB).await.expect("discard");
        write(12345, 9, 777).await;
        node.flush().await.expect("flush");
        assert!(read(4 * MIB, 32 * MIB).await == worked()[4 << 20..36 << 20], "{uri}");
        let runs = node.block_status_chain(0, SIZE, 1000).await.expect("status");
        let zero = |offset: u64| runs.iter().any(|run| run.zero && (run.start..run.start + run.len).contains(&offset));
        assert!(zero(5 * MIB + 512) && !zero(65536), "{uri}: {runs:?}");
        node.close().await.expect("close");
    });
    fixture.expect(&worked(), uri);
    fixture.reset();
}

#[test]
fn our_client_works_with_the_servers_of_others() {
    let fixture = Fixture::new();
    make_credentials(fixture.dir.path());
    let (socket, disk, folder) = (fixture.path("theirs.sock"), fixture.path("disk.raw"), fixture.dir.path().display());
    let encrypted = format!("nbds+unix:///?socket={}&tls-certificates={folder}", socket.display());
    let credentials = format!("tls-creds-x509,id=tls0,dir={folder},endpoint=server,verify-peer=yes");
    for qemu in Qemu::all() {
        let server = Foreign::qemu_nbd(&qemu, &socket, &disk, &[]);
        work_by_us(&fixture, &server.uri());
        drop(server);
        let server = Foreign::qemu_nbd(&qemu, &socket, &disk, &["--object", &credentials, "--tls-creds", "tls0"]);
        work_by_us(&fixture, &encrypted);
        drop(server);
    }
    let server = Foreign::nbdkit(&socket, &["file", text(&disk)]);
    work_by_us(&fixture, &server.uri());
    drop(server);
    let certificates = format!("--tls-certificates={folder}");
    let server = Foreign::nbdkit(&socket, &["--tls=require", "--tls-verify-peer", &certificates, "file", text(&disk)]);
    work_by_us(&fixture, &encrypted);
    drop(server);
}

#[test]
fn our_client_goes_on_with_a_server_started_again() {
    let fixture = Fixture::new();
    let (socket, disk) = (fixture.path("theirs.sock"), fixture.path("disk.raw"));
    let [old, new] = Qemu::all();
    let starts: [Box<dyn Fn() -> Foreign + '_>; 3] = [
        Box::new(|| Foreign::qemu_nbd(&old, &socket, &disk, &[])),
        Box::new(|| Foreign::qemu_nbd(&new, &socket, &disk, &[])),
        Box::new(|| Foreign::nbdkit(&socket, &["file", text(&disk)])),
    ];
    let options = format!("driver=nbd,server.type=unix,server.path={},reconnect-delay=60", socket.display());
    let mut content = initial();
    content[..512].fill(7);
    for (index, start) in starts.iter().enumerate() {
        let server = start();
        rt::block_on(async {
            let request = OpenRequest::image_opts(&options).expect("options").writable(true);
            let node = open(request).await.expect("open");
            node.read(0, IoBuf::scratch(512)).await.0.expect("read");
            drop(server);
            let server = start();
            node.write(0, IoBuf::copy_from(&[7; 512])).await.0.expect("a write to the second server");
            node.flush().await.expect("flush");
            node.close().await.expect("close");
            drop(server);
        });
        fixture.expect(&content, &format!("server {index}"));
        fixture.reset();
    }
}
