// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Load from clients, while the disk under them is changed, while they vanish, and while the daemon is told to end.

use super::process::{COWSHED, Killed, Monitor, Serving, text};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::waiting::{await_listening, await_that};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const CONNECTIONS: u32 = 4;
const MIB_OF_EACH: u32 = 16;

/// A daemon with an empty image of 64 MiB as the export `disk`, and a monitor.
fn serving(folder: &Path) -> (Serving, Monitor) {
    Qemu::system().create(&folder.join("disk.qcow2"), "qcow2", "", 64 << 20);
    let arguments = [
        "serve",
        "-x",
        "disk",
        "--queues",
        "2",
        "-k",
        "n.sock",
        "--monitor",
        "m.sock",
        "--drive",
        "file=disk.qcow2,id=disk",
    ];
    let mut serving = Serving::start(folder, &arguments);
    assert_eq!([serving.line(), serving.line()], ["nbd+unix:///disk?socket=n.sock", "QMP: unix:m.sock"]);
    (serving, Monitor::connect(&folder.join("m.sock")))
}

fn uri(folder: &Path) -> String {
    format!("nbd+unix:///disk?socket={}", text(&folder.join("n.sock")))
}

fn limits(iops: u64) -> Value {
    json!({"id": "disk", "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": iops, "iops_rd": 0, "iops_wr": 0})
}

/// fio on an export: each connection writes a part of its own, all blocks in random order, each with a checksum in it.
fn fio(folder: &Path, arguments: &[&str]) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=job", "--ioengine=nbd", "--thread", "--group_reporting", "--output-format=json"])
        .args(["--rw=randwrite", "--bs=4k", "--iodepth=8", "--verify=crc32c", "--verify_fatal=1", "--randseed=7"])
        .args([format!("--uri={}", uri(folder)), format!("--numjobs={CONNECTIONS}")])
        .args([format!("--size={MIB_OF_EACH}m"), format!("--offset_increment={MIB_OF_EACH}m")])
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    fio
}

/// Waits for fio, which must have found everything as it wrote it; operations read and written.
#[track_caller]
fn finish(fio: Killed) -> (u64, u64) {
    let mut fio = fio;
    let stdout = std::io::read_to_string(fio.0.stdout.take().expect("a pipe")).expect("text");
    let stderr = std::io::read_to_string(fio.0.stderr.take().expect("a pipe")).expect("text");
    assert!(fio.0.wait().expect("it ends").success(), "{stdout}{stderr}");
    // Something about connections comes first.
    let report: Value = stdout.find('{').and_then(|at| serde_json::from_str(&stdout[at..]).ok()).expect("a report");
    let job = &report["jobs"][0];
    assert_eq!(job["error"], 0, "{job}");
    let operations = |kind: &str| job[kind]["total_ios"].as_u64().expect("a number");
    (operations("read"), operations("write"))
}

fn start(mut command: Command) -> Killed {
    Killed(command.spawn().unwrap_or_else(|error| panic!("fio can't be run ({error}): scripts/setup test installs it")))
}

#[test]
fn fio_finds_what_it_wrote_through_snapshots_and_changing_limits() {
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let (serving, mut monitor) = serving(folder.path());
    // Slow at first, so that the changes come while it runs.
    monitor.command("block_set_io_throttle", limits(1000));
    let load = start(fio(folder.path(), &["--do_verify=1"]));
    let mut seen = 0;
    for (n, iops) in [2000, 500, 3000, 1500].into_iter().enumerate() {
        await_that("bytes are written", || monitor.bytes_written() >= seen + (1 << 20));
        seen = monitor.bytes_written();
        monitor.snapshot(&folder.path().join(format!("overlay{n}.qcow2")));
        monitor.command("block_set_io_throttle", limits(iops));
    }
    let blocks = u64::from(CONNECTIONS * MIB_OF_EACH) * 256;
    assert!(seen < blocks * 4096, "fio was ready before the changes were");
    monitor.command("block_set_io_throttle", limits(0));
    assert_eq!(finish(load), (blocks, blocks), "each block is written once and read once");
    serving.stop();
    // All layers are sound, and QEMU finds the same in them: served by its own server.
    for layer in ["disk", "overlay0", "overlay1", "overlay2", "overlay3"] {
        qemu.expect_clean(&folder.path().join(format!("{layer}.qcow2")));
    }
    let mut theirs = Killed(
        Command::new("qemu-nbd")
            .args(["-t", "-e", "8", "-r", "-f", "qcow2", "-x", "disk", "-k", text(&folder.path().join("n.sock"))])
            .arg(folder.path().join("overlay3.qcow2"))
            .spawn()
            .expect("qemu-nbd runs"),
    );
    await_listening(&folder.path().join("n.sock"), &mut theirs.0);
    // The export is read-only: fio only counts its intended writes.
    assert_eq!(finish(start(fio(folder.path(), &["--verify_only"]))).0, blocks);
    drop(theirs);
}

#[test]
fn killed_clients_cost_others_nothing() {
    let folder = temp_dir();
    let (mut serving, mut monitor) = serving(folder.path());
    for _ in 0..3 {
        let before = monitor.bytes_written();
        let lost = start(fio(folder.path(), &["--time_based", "--runtime=600", "--verify=0"]));
        await_that("bytes are written", || monitor.bytes_written() >= before + (1 << 20));
        drop(lost);
    }
    serving.await_log("client left");
    serving.await_log("export=\"disk\"");
    assert_eq!(finish(start(fio(folder.path(), &["--do_verify=1"]))).0, u64::from(CONNECTIONS * MIB_OF_EACH) * 256);
    serving.stop();
    Qemu::system().expect_clean(&folder.path().join("disk.qcow2"));
}

#[test]
fn a_daemon_told_to_end_under_load_ends_in_order() {
    let folder = temp_dir();
    let (serving, mut monitor) = serving(folder.path());
    // This client's writes were answered and not flushed; it is still there when the daemon ends.
    let mut writer = Killed(
        Command::new(Qemu::system().io_path())
            .args(["-f", "raw", &uri(folder.path())])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-io runs"),
    );
    writer.0.stdin.as_mut().expect("a pipe").write_all(b"write -P 5 63M 1M\n").expect("it reads");
    await_that("bytes are written", || monitor.bytes_written() >= 1 << 20);
    let load = start(fio(folder.path(), &["--time_based", "--runtime=600", "--verify=0", "--size=8m"]));
    await_that("bytes are written", || monitor.bytes_written() >= 3 << 20);
    serving.stop();
    drop((load, writer));
    let qemu = Qemu::system();
    qemu.expect_clean(&folder.path().join("disk.qcow2"));
    qemu.io_commands(&folder.path().join("disk.qcow2"), "qcow2", &["read -P 5 63M 1M".into()]);
    assert!(!folder.path().join("n.sock").exists() && !folder.path().join("m.sock").exists());
}

#[test]
fn several_connections_copy_through_other_servers_and_clients() {
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let (serving, _) = serving(folder.path());
    let content: Vec<u8> = (0..64u32 << 20).map(|at| (at / 4096 % 251) as u8).collect();
    let source = folder.path().join("source.raw");
    fs::write(&source, &content).expect("a file");
    tool("nbdcopy", &["--connections=4", "--flush", text(&source), &uri(folder.path())]);
    // nbdkit's plugin is a client; another client reads the data that it hands on.
    let copy = folder.path().join("copy.raw");
    let command = format!("nbdcopy \"$uri\" {}", text(&copy));
    tool("nbdkit", &["-U", "-", "nbd", &format!("uri={}", uri(folder.path())), "--run", &command]);
    assert!(fs::read(&copy).expect("a file") == content);
    let command = format!("nbdcopy {} \"$uri\"", uri(folder.path()));
    tool("nbdkit", &["-U", "-", "memory", "64M", "--run", &format!("{command} && nbdcopy \"$uri\" {}", text(&copy))]);
    assert!(fs::read(&copy).expect("a file") == content);
    serving.stop();
    qemu.expect_clean(&folder.path().join("disk.qcow2"));
    assert!(qemu.is_equal((&folder.path().join("disk.qcow2"), "qcow2"), (&source, "raw")));
}

#[test]
fn full_disk_reaches_the_client_and_the_daemon_survives() {
    let (folder, qemu) = (temp_dir(), Qemu::system());
    let image = folder.path().join("disk.qcow2");
    qemu.create(&image, "qcow2", "", 64 << 20);
    // The file may grow to 2 MiB: the kernel refuses further bytes as it does on a full file system.
    let mut command = Command::new("bash");
    let script = "trap '' XFSZ; ulimit -f 2048; exec \"$0\" serve -x disk -k n.sock disk.qcow2";
    command.args(["-c", script, COWSHED]);
    let mut serving = Serving::start_command(folder.path(), command);
    assert_eq!(serving.line(), "nbd+unix:///disk?socket=n.sock");
    let uri = uri(folder.path());
    let commands = ["write -P 1 0 512k", "write -P 2 1M 4M", "read -P 1 0 512k", "write -P 3 0 512k", "flush"];
    let arguments = ["-f", "raw"].into_iter().chain(commands.iter().flat_map(|command| ["-c", command]));
    let output = qemu.io(arguments.chain([uri.as_str()]));
    let said = format!("{}{}", output.stdout, output.stderr);
    assert_eq!(said.matches("failed").count(), 1, "{said}");
    assert!(said.contains("write failed: No space left on device"), "{said}");
    serving.await_log("writing failed");
    assert!(serving.log().contains("disk.qcow2: could not write: File too large"), "{}", serving.log());
    // Another client finds it as before.
    assert!(tool("nbdinfo", &["--size", &uri]).contains("67108864"));
    serving.stop();
    let verdict = qemu.check(&image, "qcow2");
    assert_eq!(verdict.corruptions, 0, "{verdict:?}");
    qemu.io_commands(&image, "qcow2", &["read -P 3 0 512k".into()]);
}

/// The most memory that the server of a compressed image took, in KiB, without the pages of its program: those depend on the build.
/// It serves `count` reads of 4 KiB, each `step` behind the one before, `depth` at a time.
fn peak_kib(folder: &Path, qemu: &Qemu, (count, step, depth): (&str, &str, &str)) -> u64 {
    let arguments = ["serve", "-x", "disk", "-k", "n.sock", "--read-only", "disk.qcow2"];
    let mut serving = Serving::start(folder, &arguments);
    assert_eq!(serving.line(), "nbd+unix:///disk?socket=n.sock");
    let uri = uri(folder);
    qemu.img(["bench", "-q", "-f", "raw", "-c", count, "-d", depth, "-s", "4k", "-S", step, &uri]).expect_ok();
    let status = fs::read_to_string(format!("/proc/{}/status", serving.child().id())).expect("a status");
    serving.stop();
    let kib = |name: &str| -> u64 {
        let size = status.lines().find_map(|line| line.strip_prefix(name)).expect("a size");
        size.trim().trim_end_matches(" kB").parse().expect("a number")
    };
    kib("VmHWM:") - kib("RssFile:")
}

/// The decompressed clusters that are kept, and those that are being decompressed.
#[test]
fn random_reads_of_a_compressed_image_take_little_memory() {
    const KEPT_AND_REST_KIB: u64 = 28 << 10;
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let [raw, image] = ["disk.raw", "disk.qcow2"].map(|name| folder.path().join(name));
    let words = (0..5 << 20).flat_map(|number: u64| format!("{:08x}", number * number).into_bytes());
    let words: Vec<u8> = words.take(40 << 20).collect();
    fs::write(&raw, words.repeat(4)).expect("a disk");
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    for (kind, cluster_kib, reads) in [
        // Each cluster once, and the last part of them again.
        ("zlib", 64, ("4000", "68k", "8")),
        ("zstd", 64, ("4000", "68k", "8")),
        // As many clusters are to be decompressed at a time as the store keeps several times over.
        ("zstd", 2048, ("160", "2052k", "64")),
    ] {
        let options = format!("compression_type={kind},cluster_size={cluster_kib}k");
        qemu.convert((&raw, "raw"), (&image, "qcow2"), &["-c", "-o", &options]);
        let kib = peak_kib(folder.path(), &qemu, reads);
        let decompressing_kib = (8 << 10).max(cores * 2 * cluster_kib);
        assert!(kib < KEPT_AND_REST_KIB + decompressing_kib, "{kind}, clusters of {cluster_kib} KiB: {kib} KiB");
    }
}
