// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that another process has open for writing: some verbs read them, the others are refused.

use crate::oracle::Oracle;
use cowshed_testkit::held;
use cowshed_testkit::waiting::await_that;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// `info` reads no data, so a raw image may be in use; the metadata of qcow2 changes under a writer.
#[test]
fn info_of_an_image_in_use_as_qemu_img() {
    for (name, format) in [("a.raw", "raw"), ("a.qcow2", "qcow2")] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f {format} {name} 4M"));
        let mut writer = Command::new(oracle.qemu.io_path())
            .args(["-f", format, name])
            .current_dir(oracle.work())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("qemu-io runs");
        let (mut input, output) = (writer.stdin.take().expect("a pipe"), writer.stdout.take().expect("a pipe"));
        writeln!(input, "write 0 4k").expect("qemu-io listens");
        // It answers once the image is open and locked.
        assert!(BufReader::new(output).lines().any(|line| line.expect("text").contains("wrote 4096/4096")));
        for line in [format!("info {name}"), format!("info -f {format} {name}"), format!("info -U {name}")] {
            oracle.compare(&line);
        }
        // The next overlay of a running machine's disk.
        let image = oracle.work().join(name);
        oracle.compare_writing(&format!("create -q -f qcow2 -b {} -F {format} next.qcow2", image.display()), |_, _| {});
        drop(input);
        assert!(writer.wait().expect("it ends").success());
        oracle.verdict();
    }
}

/// A server of an image, killed when dropped.
pub struct Server(Child);

impl Server {
    /// Starts it and waits until it serves.
    pub fn start(mut command: Command, socket: &Path) -> Server {
        let server = Server(command.stdout(Stdio::null()).spawn().expect("a server"));
        await_that("the image is served", || is_serving(socket));
        server
    }
}

/// True when a server greets: then its image is open.
fn is_serving(socket: &Path) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    stream.read_exact(&mut [0; 8]).is_ok()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An image by its name, its format, options of its making, and all its files.
const LOCKED: &[(&str, &str, &str, &[&str])] = &[
    ("a", "raw", "", &["a"]),
    ("a", "qcow2", "", &["a"]),
    ("a.vmdk", "vmdk", "", &["a.vmdk"]),
    ("a.vmdk", "vmdk", "-o subformat=monolithicFlat", &["a.vmdk", "a-flat.vmdk"]),
    ("a.vmdk", "vmdk", "-o subformat=twoGbMaxExtentSparse", &["a.vmdk", "a-s001.vmdk"]),
    ("a", "vdi", "", &["a"]),
    ("a", "vpc", "", &["a"]),
    ("a", "vhdx", "", &["a"]),
    ("a", "qcow", "", &["a"]),
    ("a", "qed", "", &["a"]),
    ("a", "parallels", "", &["a"]),
];

/// A raw image is locked as far as its clients need it, and images of other formats against all others.
#[test]
fn a_served_image_is_locked_as_by_qemu_nbd() {
    let mut wrong = Vec::new();
    for (name, format, options, files) in LOCKED {
        for flags in [&[][..], &["-r"], &["-e", "3"]] {
            let oracle = Oracle::new();
            oracle.make(&format!("create -q -f {format} {options} {name} 4M"));
            let (image, socket) = (oracle.work().join(name), oracle.work().join("socket"));
            let locked = |mut command: Command| {
                command.args(["-t", "-f", format, "-k"]).arg(&socket).args(flags).arg(&image);
                let server = Server::start(command, &socket);
                let locked: Vec<_> =
                    files.iter().map(|file| held::locked_bytes(server.0.id(), oracle.work().join(file))).collect();
                drop(server);
                let _ = std::fs::remove_file(&socket);
                locked
            };
            let mut theirs = locked(Command::new("qemu-nbd"));
            let mut ours = Command::new(env!("CARGO_BIN_EXE_cowshed"));
            ours.arg("qemu-nbd");
            let ours = locked(ours);
            if options.ends_with("Flat") {
                // COMPAT.md: flat extents bear no other writers, where QEMU bears them.
                let extent = theirs.last_mut().expect("an extent");
                extent.push(201);
                extent.sort_unstable();
            }
            if ours != theirs {
                wrong.push(format!("{format} {options} {flags:?}: {ours:?}, and QEMU's {theirs:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Readers and servers of the same raw image get in beside us, as beside qemu-nbd.
#[test]
fn a_served_raw_image_has_readers_and_servers_beside_it() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw a.raw 4M");
    let (image, sockets) = (oracle.work().join("a.raw"), ["one", "two"].map(|name| oracle.work().join(name)));
    let serve = |socket: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.args(["qemu-nbd", "-t", "-f", "raw", "-k"]).arg(socket).arg(&image);
        Server::start(command, socket)
    };
    let _servers = sockets.each_ref().map(|socket| serve(socket));
    let path = image.to_str().expect("text");
    oracle.qemu.io(["-f", "raw", "-c", "read 0 512", path]).expect_ok();
    oracle.qemu.io(["-r", "-f", "raw", "-c", "read 0 512", path]).expect_ok();
    let resized = oracle.qemu.img(["resize", "-q", "-f", "raw", path, "8M"]);
    assert_eq!(resized.code, 1, "its size is what clients were told");
}

/// A commit writes to a raw base beside its readers. Only a base that must grow has to be alone, for they rely on its
/// length.
#[test]
fn a_commit_writes_to_a_raw_base_beside_its_readers() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw a 4M");
    let (image, socket) = (oracle.work().join("a"), oracle.work().join("socket"));
    let theirs = Tools(oracle.qemu.img_path().parent().expect("a folder").to_owned());
    let own = env!("CARGO_BIN_EXE_cowshed");
    for ours in [false, true] {
        let mut command = if ours { Command::new(own) } else { theirs.command("qemu-nbd") };
        command.args(if ours { &["qemu-nbd"][..] } else { &[] });
        command.args(["-r", "-t", "-f", "raw", "-k"]).arg(&socket).arg(&image);
        let _ = std::fs::remove_file(&socket);
        let _server = Server::start(command, &socket);
        for (size, fits) in [("4M", true), ("8M", false)] {
            for tool in [theirs.command("qemu-img"), Command::new(own)] {
                oracle.make(&format!("create -q -f qcow2 -u -b a -F raw o {size}"));
                let path = oracle.work().join("o");
                oracle.qemu.io(["-f", "qcow2", "-c", "write -P 7 64k 64k", path.to_str().expect("text")]).expect_ok();
                let mut tool = tool;
                let output = tool.args(["commit", "-q", "o"]).current_dir(oracle.work()).output().expect("it runs");
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                assert_eq!(
                    (output.status.success(), said.contains("\"resize\" lock")),
                    (fits, !fits),
                    "{size}: {said}"
                );
            }
        }
    }
}

/// The tools of one side: the newest QEMU's, or ours by the same names.
struct Tools(PathBuf);

impl Tools {
    fn command(&self, name: &str) -> Command {
        Command::new(self.0.join(name))
    }
}

/// A process that has the image open: a shell that waits for commands, or a server. Ended when dropped.
struct Holder {
    process: Server,
    _streams: Option<(ChildStdin, BufReader<ChildStdout>)>,
}

/// The ways to hold an image in format `F`, and the process of each.
const HOLDERS: &[&str] = &[
    "qemu-io -f F a",
    "qemu-io -r -f F a",
    "qemu-io -r -U -f F a",
    "qemu-nbd -t -e 0 -k SOCKET -f F a",
    "qemu-nbd -t -e 0 -k SOCKET -r -f F a",
    "qemu-storage-daemon --blockdev file,filename=a,node-name=f --blockdev F,file=f,node-name=n \
     --blockdev null-co,read-zeroes=on,node-name=z --nbd-server addr.type=unix,addr.path=SOCKET --export nbd,id=z,node-name=z",
    "qemu-storage-daemon --blockdev file,filename=a,node-name=f --blockdev F,file=f,node-name=n \
     --nbd-server addr.type=unix,addr.path=SOCKET --export nbd,id=n,node-name=n",
    "qemu-storage-daemon --blockdev file,filename=a,node-name=f --blockdev F,file=f,node-name=n \
     --nbd-server addr.type=unix,addr.path=SOCKET --export nbd,id=n,node-name=n,writable=on",
];

/// The programs beside them.
const COMERS: &[&str] = &[
    "qemu-io -f F -c read_0_512 a",
    "qemu-io -f F -c write_0_512 a",
    "qemu-io -r -f F -c read_0_512 a",
    "qemu-io -r -U -f F -c read_0_512 a",
    "qemu-io -f F -c truncate_5M a",
    "qemu-img info -f F a",
    "qemu-img info -U -f F a",
    "qemu-img check -f F a",
    "qemu-img check -U -f F a",
    "qemu-img check -r all -f F a",
    "qemu-img map -f F a",
    "qemu-img map -U -f F a",
    "qemu-img measure -O qcow2 -f F a",
    "qemu-img measure -U -O qcow2 -f F a",
    "qemu-img convert -f F -O raw a t",
    "qemu-img convert -U -f F -O raw a t",
    "qemu-img convert -n -f raw -O F b a",
    "qemu-img convert -f raw -O F b a",
    "qemu-img compare -f F -F raw a b",
    "qemu-img compare -U -f F -F raw a b",
    "qemu-img dd -f F -O raw bs=64k if=a of=t",
    "qemu-img dd -U -f F -O raw bs=64k if=a of=t",
    "qemu-img dd -f raw -O F bs=64k if=b of=a",
    "qemu-img bench -c 2 -f F a",
    "qemu-img bench -w -c 2 -f F a",
    "qemu-img bench -U -c 2 -f F a",
    "qemu-img create -f qcow2 -b a -F F t",
    "qemu-img create -f F a 4M",
    "qemu-img resize -f F a 8M",
    "qemu-img resize --shrink -f F a 2M",
    "qemu-img snapshot -l a",
    "qemu-img snapshot -c x a",
    "qemu-img amend -f F -o lazy_refcounts=on a",
    "qemu-img bitmap -f F --add a bb",
    "qemu-img rebase -u -f F -b NOTHING a",
    "qemu-img commit -f F a",
    "qemu-nbd -t -k BESIDE -f F a",
    "qemu-nbd -t -k BESIDE -r -f F a",
];

/// The command line; `_` within a word is a blank.
fn words(line: &str, format: &str, folder: &Path) -> Vec<String> {
    let socket = |name: &str| folder.join(name).display().to_string();
    line.split_whitespace()
        .map(|word| match word {
            "F" => format.to_owned(),
            "NOTHING" => String::new(),
            word if word.starts_with("F,") => word.replacen('F', format, 1),
            word if word.starts_with("lazy_") => word.to_owned(),
            word => word.replace("SOCKET", &socket("socket")).replace("BESIDE", &socket("beside")).replace('_', " "),
        })
        .collect()
}

fn hold(tools: &Tools, line: &str, format: &str, folder: &Path) -> Holder {
    let words = words(line, format, folder);
    let mut command = tools.command(&words[0]);
    command.args(&words[1..]).current_dir(folder);
    if words[0] != "qemu-io" {
        let _ = std::fs::remove_file(folder.join("socket"));
        return Holder { process: Server::start(command, &folder.join("socket")), _streams: None };
    }
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a shell");
        let (mut input, output) = (shell.stdin.take().expect("a pipe"), shell.stdout.take().expect("a pipe"));
        let (process, mut output) = (Server(shell), BufReader::new(output));
        // A holder that has ended already doesn't listen.
        let _ = writeln!(input, "length");
        // It answers once the image is open and locked.
        let mut said = String::new();
        output.read_line(&mut said).expect("text");
        if !said.is_empty() {
            assert!(said.contains("4 MiB"), "{line}: {said}");
            // A shell that can't print its prompt ends.
            return Holder { process, _streams: Some((input, output)) };
        }
        // The kernel releases locks of a killed holder a moment after its end.
        assert!(Instant::now() < deadline, "{line}: no answer");
    }
}

/// A program's message where a lock is in its way; `None` where it succeeds.
fn refusal(tools: &Tools, line: &str, format: &str, folder: &Path) -> Option<String> {
    let (words, socket) = (words(line, format, folder), folder.join("beside"));
    let (_, _) = (std::fs::remove_file(folder.join("t")), std::fs::remove_file(&socket));
    let mut command = tools.command(&words[0]);
    command.args(&words[1..]).current_dir(folder).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Server(command.spawn().expect("it runs"));
    let mut serves = false;
    await_that(line, || {
        serves = is_serving(&socket);
        serves || process.0.try_wait().expect("a process").is_some()
    });
    if serves {
        return None;
    }
    let mut said = String::new();
    process.0.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
    said.to_lowercase().contains("failed to get").then_some(said)
}

/// The same pairs run side by side with QEMU's tools and with ours: the locks of each holder, and the programs beside
/// it.
#[test]
fn the_same_runs_beside_the_same_as_with_qemus_tools() {
    let oracle = Oracle::new();
    let folder = oracle.work();
    let theirs = Tools(oracle.qemu.img_path().parent().expect("a folder").to_owned());
    let ours = Tools(folder.join("ours"));
    std::fs::create_dir(&ours.0).expect("a folder");
    for name in ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), ours.0.join(name)).expect("a link");
    }
    oracle.make("create -q -f raw b 4M");
    let mut differences = Vec::new();
    let mut known: BTreeSet<Vec<u64>> = BTreeSet::new();
    for format in ["raw", "qcow2"] {
        known.clear();
        for line in HOLDERS {
            oracle.make(&format!("create -q -f {format} a 4M"));
            let bytes = |tools| {
                let holder = hold(tools, line, format, &folder);
                held::locked_bytes(holder.process.0.id(), folder.join("a"))
            };
            let (real, own) = (bytes(&theirs), bytes(&ours));
            if real != own {
                differences.push(format!("{format}: {line}: {own:?} instead of {real:?}"));
            }
            // The locks alone decide which comers get in.
            if !known.insert(real) {
                continue;
            }
            let _holder = hold(&theirs, line, format, &folder);
            for comer in COMERS {
                let [real, own] = [&theirs, &ours].map(|tools| refusal(tools, comer, format, &folder));
                if real.is_some() != own.is_some() {
                    differences.push(format!("{format}: {comer} beside {line}: {own:?} instead of {real:?}"));
                }
            }
        }
        assert!(known.len() >= 3, "{format}: {known:?}");
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// A process that is killed under load has I/O in the kernel's hands, and with it the locks, for a moment longer than it
/// lives. The next one waits for that.
#[test]
fn the_image_of_a_killed_process_is_opened_at_once() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw source.raw 96M");
    oracle.io(&["write -q -P 7 0 96M"], "source.raw");
    let (image, socket) = (oracle.work().join("a.qcow2"), oracle.work().join("socket"));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    for round in 0..12 {
        oracle.make("create -q -f qcow2 a.qcow2 96M");
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.args(["serve", "--cache", "none", "-k"]).arg(&socket).arg(&image).stderr(Stdio::null());
        let mut server = Server::start(command, &socket);
        let mut client = Command::new("qemu-img")
            .args(["convert", "-n", "-W", "-f", "raw", "-O", "raw", "source.raw", &uri])
            .current_dir(oracle.work())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-img runs");
        let deadline = Instant::now() + Duration::from_secs(60);
        while std::fs::metadata(&image).expect("the image").len() < (4 + round) << 20 {
            assert!(Instant::now() < deadline, "nothing is written");
            std::thread::yield_now();
        }
        server.0.kill().expect("it is killed");
        // Its end isn't waited for.
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["io", "-c", "write -P 8 0 512"])
            .arg(&image)
            .output()
            .expect("our own binary runs");
        assert!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
        client.wait().expect("it ends");
        drop(server);
        std::fs::remove_file(&socket).expect("its socket");
    }
}
