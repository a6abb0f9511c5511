// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block devices as source and target, and file systems with ways of their own. Needs root and loop devices, so these
//! tests are ignored in an ordinary run; `scripts/test` runs them where it can and prints a line where it can't.

mod sectors;

use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::waiting::await_listening;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

const MIB: usize = 1 << 20;

#[track_caller]
fn cowshed(arguments: &[&str]) -> String {
    let mut arguments = arguments.to_vec();
    // Targets of earlier cases are overwritten.
    if matches!(arguments[0], "convert" | "create") && !arguments.contains(&"-n") {
        arguments.insert(1, "--force");
    }
    tool(env!("CARGO_BIN_EXE_cowshed"), &arguments)
}

/// A loop device, detached when dropped.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Loop {
        Loop(tool("losetup", &["--find", "--show", file.to_str().unwrap()]).trim().to_owned())
    }

    /// With sectors of this many bytes.
    fn with_sectors(bytes: usize, file: &Path) -> Loop {
        let bytes = bytes.to_string();
        Loop(tool("losetup", &["--sector-size", &bytes, "--find", "--show", file.to_str().unwrap()]).trim().to_owned())
    }

    fn read_only(file: &Path) -> Loop {
        Loop(tool("losetup", &["--read-only", "--find", "--show", file.to_str().unwrap()]).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

/// A file system in a file, unmounted when dropped.
struct Mount {
    place: PathBuf,
    _folder: TempDir,
}

impl Mount {
    fn new(make: &str, size: &str) -> Mount {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (disk, place) = (folder.path().join("disk"), folder.path().join("place"));
        tool("truncate", &["-s", size, disk.to_str().unwrap()]);
        tool(make, &["-q", disk.to_str().unwrap()]);
        std::fs::create_dir(&place).unwrap();
        tool("mount", &["-o", "loop", disk.to_str().unwrap(), place.to_str().unwrap()]);
        Mount { place, _folder: folder }
    }

    fn path(&self, name: &str) -> String {
        self.place.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.place).status();
    }
}

#[test]
#[ignore = "needs root and loop devices"]
fn images_are_converted_onto_devices_and_from_them() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (source, below) = (path("source.raw"), path("below"));
    let mut bytes = vec![0; 4 * MIB];
    bytes[MIB..2 * MIB + 777].fill(7);
    std::fs::write(&source, &bytes).unwrap();
    // Old data of the device must not show through: it isn't zero before.
    std::fs::write(&below, vec![0xee; 8 * MIB]).unwrap();
    let device = Loop::new(Path::new(&below));
    let qemu = Qemu::system();
    let equal = |one: (&str, &str), other: (&str, &str)| {
        qemu.is_equal((Path::new(one.0), one.1), (Path::new(other.0), other.1))
    };

    for cache in ["unsafe", "none"] {
        cowshed(&["convert", "-q", "-n", "-t", cache, "-f", "raw", "-O", "raw", &source, &device.0]);
        let (onto, rest) = (std::fs::read(&device.0).unwrap(), 4 * MIB);
        assert!(onto[..rest] == bytes[..] && onto[rest..].iter().all(|byte| *byte == 0xee), "{cache}");
        std::fs::write(&below, vec![0xee; 8 * MIB]).unwrap();
    }
    cowshed(&["convert", "-q", "-f", "raw", "-O", "qcow2", &source, &device.0]);
    cowshed(&["check", "-q", &device.0]);
    assert!(equal((&source, "raw"), (&device.0, "qcow2")));
    let info = cowshed(&["info", "--output=json", &device.0]);
    assert!(info.contains("\"format\": \"host_device\"") && info.contains("\"format\": \"qcow2\""), "{info}");
    let specific: String = info.chars().filter(|c| !c.is_whitespace()).collect();
    assert!(specific.contains(r#""format-specific":{"type":"file","data":{}}"#), "{info}");
    let back = path("back.qcow2");
    cowshed(&["convert", "-q", "-c", "-T", "none", "-f", "qcow2", "-O", "qcow2", &device.0, &back]);
    assert!(equal((&source, "raw"), (&back, "qcow2")));
    cowshed(&["compare", "-q", &device.0, &back]);
    cowshed(&["convert", "-q", "--untrusted", &device.0, &path("raw")]);
    assert!(std::fs::read(path("raw")).unwrap() == bytes);
    let limits = cowshed(&["info", "--limits", "-f", "raw", &device.0]);
    assert!(limits.contains("max hw transfer: ") && limits.contains("max hw iov: "), "{limits}");

    // A disk that doesn't fit is refused before anything is written.
    std::fs::write(&source, vec![1; 16 * MIB]).unwrap();
    let before = std::fs::read(&below).unwrap();
    let refused = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["convert", "-n", "-f", "raw", "-O", "raw", &source, &device.0])
        .output()
        .unwrap();
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(std::fs::read(&below).unwrap() == before);
}

#[test]
#[ignore = "needs root and loop devices"]
fn new_images_lie_on_xfs_as_asked() {
    let xfs = Mount::new("mkfs.xfs", "400M");
    let extent_size = |name: &str| {
        let said = tool("xfs_io", &["-r", "-c", "extsize", &xfs.path(name)]);
        said.split_whitespace().next().unwrap_or_default().trim_matches(['[', ']']).to_owned()
    };
    cowshed(&["create", "-q", "-f", "raw", "-o", "extent_size_hint=2M", &xfs.path("raw"), "8M"]);
    cowshed(&["create", "-q", "-f", "qcow2", &xfs.path("qcow2"), "8M"]);
    cowshed(&["create", "-q", "-f", "qcow2", "-o", "extent_size_hint=0", &xfs.path("none"), "8M"]);
    assert_eq!(["raw", "qcow2", "none"].map(extent_size), ["2097152", "1048576", "0"]);
}

#[test]
#[ignore = "needs root and loop devices"]
fn new_images_lie_on_btrfs_as_asked() {
    let btrfs = Mount::new("mkfs.btrfs", "400M");
    for (name, options) in [("on", "nocow=on"), ("off", "nocow=off")] {
        cowshed(&["create", "-q", "-f", "qcow2", "-o", options, &btrfs.path(name), "8M"]);
        let flags = tool("lsattr", &[&btrfs.path(name)]);
        let flags = flags.split_whitespace().next().unwrap_or_default();
        assert_eq!(flags.contains('C'), name == "on", "{flags}");
    }
}

/// Bytes of a file that it shares with others.
fn shared_bytes(path: &str) -> u64 {
    let extents = tool("filefrag", &["-v", "-b4096", path]);
    let shared =
        extents.lines().filter(|line| line.split(':').next_back().is_some_and(|flags| flags.contains("shared")));
    let blocks = |line: &str| line.split(':').nth(3).and_then(|length| length.trim().parse::<u64>().ok());
    shared.map(|line| blocks(line).unwrap_or_else(|| panic!("{line}")) * 4096).sum()
}

/// File systems that share blocks keep equal content once. Its zeroes are holes all the same, and neither side sees
/// writes to the other.
#[test]
#[ignore = "needs root and loop devices"]
fn data_are_shared_where_the_file_system_can() {
    let qemu = Qemu::system();
    for make in ["mkfs.xfs", "mkfs.btrfs"] {
        let mount = Mount::new(make, "600M");
        let path = |name: &str| mount.path(name);
        // 16 MiB: data, zeroes that are stored, a hole, data to an odd end.
        let mut bytes: Vec<u8> = (0..16 * MIB as u32 + 1536).map(|at| (at / 512) as u8 | 1).collect();
        bytes[4 * MIB..6 * MIB].fill(0);
        std::fs::write(path("a.raw"), &bytes).unwrap();
        tool("fallocate", &["--punch-hole", "-o", "8M", "-l", "1M", &path("a.raw")]);
        qemu.img(["convert", "-f", "raw", "-O", "qcow2", &path("a.raw"), &path("a.qcow2")]).expect_ok();
        let small =
            ["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4k", &path("a.raw"), &path("small.qcow2")];
        qemu.img(small).expect_ok();
        qemu.img(["create", "-q", "-f", "qcow2", "-b", "a.qcow2", "-F", "qcow2", &path("top.qcow2")]).expect_ok();
        qemu.io_commands(Path::new(&path("top.qcow2")), "qcow2", &["write -P 9 2M 1M".to_owned()]).expect_ok();
        tool("sync", &["-f", &path("a.raw")]);
        for source in ["a.raw", "a.qcow2", "small.qcow2", "top.qcow2"] {
            let format = if source == "a.raw" { "raw" } else { "qcow2" };
            let targets = [
                ("raw", vec![], 12),
                ("qcow2", vec![], 12),
                ("qcow2", vec!["-o", "extended_l2=on,cluster_size=128k"], 12),
                ("qcow2", vec!["-W", "-m", "16", "-o", "cluster_size=512"], 0),
                ("raw", vec!["-C"], 12),
                ("qcow2", vec!["-C"], 12),
                ("qcow2", vec!["-S", "0"], 0),
                ("raw", vec!["-o", "preallocation=falloc"], 0),
                ("qcow2", vec!["-c"], 0),
                ("qcow2", vec!["--reflink=never"], 0),
                ("raw", vec!["--reflink", "never"], 0),
            ];
            for (to, options, shared_mib) in targets {
                let (from, target) = (path(source), path("target"));
                let case = format!("{make}: {source} to {to} {options:?}");
                let mut arguments = vec!["convert", "-q", "-f", format, "-O", to];
                arguments.extend(&options);
                arguments.extend([from.as_str(), target.as_str()]);
                cowshed(&arguments);
                assert!(qemu.is_equal((Path::new(&from), format), (Path::new(&target), to)), "{case}");
                if to == "qcow2" {
                    assert_eq!(qemu.check(Path::new(&target), "qcow2").code, 0, "{case}");
                }
                tool("sync", &["-f", &target]);
                let shared = shared_bytes(&target);
                let wanted = shared_mib * MIB as u64;
                assert!(if wanted == 0 { shared == 0 } else { shared >= wanted }, "{case}: {shared} bytes are shared");
                let has_holes = !options.contains(&"-C") && !options.contains(&"-S") && !options.contains(&"-o");
                let found = std::fs::metadata(&target).unwrap();
                // XFS allocates a qcow2 file in pieces of 1 MiB, so there the length tells.
                let space =
                    if to == "raw" { std::os::unix::fs::MetadataExt::blocks(&found) * 512 } else { found.len() };
                assert!(!has_holes || space < 14 * MIB as u64, "{case}: {space} bytes");
                // Each is its own: writes to the copy stay there.
                let before = std::fs::read(&from).unwrap();
                qemu.io_commands(Path::new(&target), to, &["write -P 0xdd 1M 9M".to_owned()]).expect_ok();
                assert!(std::fs::read(&from).unwrap() == before, "{case}: the source changed");
                std::fs::remove_file(&target).unwrap();
            }
        }
        // An image within an image has its container's name, and other places in it.
        qemu.img(["convert", "-f", "raw", "-O", "qcow2", &path("a.qcow2"), &path("outer.qcow2")]).expect_ok();
        let outer = format!(
            "{{\"driver\":\"qcow2\",\"file\":{{\"driver\":\"file\",\"filename\":\"{}\"}}}}",
            path("outer.qcow2")
        );
        let [outer, inner] =
            [outer.clone(), format!("{{\"driver\":\"qcow2\",\"file\":{outer}}}")].map(|text| format!("json:{text}"));
        cowshed(&["convert", "-q", "-O", "raw", &outer, &inner, &path("both")]);
        cowshed(&["convert", "-q", "--reflink=never", "-O", "raw", &outer, &inner, &path("written")]);
        assert!(std::fs::read(path("both")).unwrap() == std::fs::read(path("written")).unwrap(), "{make}");
    }
}

/// An image's life in a container of fixed length that holds 48 MiB which aren't zero. It has all operations that take
/// more than one neighbouring cluster, and a refcount table that grows. The same in a file by QEMU is the measure.
#[track_caller]
fn live_in_a_container(container: &str, cluster_size: &str) {
    let qemu = Qemu::system();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let twin = folder.path().join("twin.qcow2").to_str().unwrap().to_owned();
    let options = format!("cluster_size={cluster_size}");
    // QEMU needs minutes to take 580 MiB away by clusters of 512 bytes.
    let shrunk = if cluster_size == "512" { "595M" } else { "20M" };
    let steps: &[&[&str]] = &[
        &["create", "-q", "-f", "qcow2", "-o", &options, "IMAGE", "24M"],
        &["bitmap", "--add", "-g", "512", "IMAGE", "fine"],
        &["bitmap", "--add", "IMAGE", "b"],
        &["io", "write -P 1 0 12M", "IMAGE"],
        &["snapshot", "-c", "one", "IMAGE"],
        &["io", "write -P 2 1M 2M", "IMAGE"],
        &["resize", "-q", "IMAGE", "600M"],
        &["io", "write -P 3 599M 1M", "IMAGE"],
        &["snapshot", "-c", "two", "IMAGE"],
        &["bitmap", "--clear", "IMAGE", "fine"],
        &["bitmap", "--remove", "IMAGE", "fine"],
        &["bitmap", "--remove", "IMAGE", "b"],
        &["snapshot", "-d", "one", "IMAGE"],
        &["snapshot", "-a", "two", "IMAGE"],
        &["amend", "-f", "qcow2", "-o", "refcount_bits=64", "IMAGE"],
        &["io", "write -P 4 100M 3M", "IMAGE"],
        &["snapshot", "-d", "two", "IMAGE"],
        &["resize", "-q", "--shrink", "IMAGE", shrunk],
    ];
    let image_end = |image: &str| {
        let verdict = qemu.img(["check", "-f", "qcow2", "--output=json", image]);
        assert_eq!(verdict.code, 0, "{cluster_size}: {}{}", verdict.stdout, verdict.stderr);
        let report: serde_json::Value = serde_json::from_str(&verdict.stdout).expect("JSON");
        report["image-end-offset"].as_u64().expect("a number")
    };
    for step in steps {
        let named = |image: &str| step.iter().map(|word| word.replace("IMAGE", image)).collect::<Vec<_>>();
        let (ours, theirs) = (named(container), named(&twin));
        if step[0] == "io" {
            cowshed(&["io", "-f", "qcow2", "-c", &ours[1], &ours[2]]);
            qemu.io(["-f", "qcow2", "-c", &theirs[1], &theirs[2]]).expect_ok();
        } else {
            cowshed(&ours.iter().map(String::as_str).collect::<Vec<_>>());
            qemu.img(theirs.iter().map(String::as_str)).expect_ok();
        }
        let (end, twins_end) = (image_end(container), image_end(&twin));
        assert!(end <= twins_end + (4 << 20), "{cluster_size}: {step:?}: it ends at {end}, QEMU's at {twins_end}");
        qemu.img(["compare", "-q", "-f", "qcow2", "-F", "qcow2", container, &twin]).expect_ok();
    }
}

#[test]
#[ignore = "needs root and loop devices"]
fn an_image_lives_on_a_device_as_in_a_file() {
    for cluster_size in ["512", "4k", "64k"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let below = folder.path().join("below");
        std::fs::write(&below, vec![0xee; 48 * MIB]).unwrap();
        let device = Loop::new(&below);
        live_in_a_container(&device.0, cluster_size);
    }
}

/// A new image takes a bitmap, and guest writes past the range that its first refcount blocks count, within its new
/// device.
#[test]
#[ignore = "needs root and loop devices"]
fn a_new_image_on_a_device_takes_bitmaps_and_writes() {
    for cluster_size in ["64k", "512"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (below, twin) = (folder.path().join("below"), folder.path().join("twin"));
        std::fs::File::create(&below).unwrap().set_len(200 << 20).unwrap();
        let device = Loop::new(&below);
        let options = format!("cluster_size={cluster_size}");
        let twin = twin.to_str().unwrap();
        let writes = ["-c", "write -P 1 0 12M", "-c", "write -P 2 50M 9M"];
        cowshed(&["create", "-q", "-f", "qcow2", "-o", &options, &device.0, "100M"]);
        cowshed(&["bitmap", "--add", &device.0, "b"]);
        let mut arguments = vec!["io", "-f", "qcow2"];
        arguments.extend(writes.into_iter().chain([device.0.as_str()]));
        cowshed(&arguments);
        cowshed(&["check", "-q", &device.0]);
        for mode in ["full", "falloc"] {
            let refused = Command::new(env!("CARGO_BIN_EXE_cowshed"))
                .args(["resize", "-f", "qcow2", "--preallocation", mode, &device.0, "120M"])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&refused.stderr);
            let expected = format!("Preallocation mode '{mode}' unsupported for this non-regular file");
            assert!(refused.status.code() == Some(1) && said.contains(&expected), "{said}");
            let raw = Command::new(env!("CARGO_BIN_EXE_cowshed"))
                .args(["io", "-f", "raw", "-c", &format!("truncate -m {mode} 200M"), &device.0])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&raw.stderr);
            assert!(raw.status.code() == Some(1) && said.contains(&expected), "{said}");
        }
        let qemu = Qemu::system();
        qemu.img(["create", "-q", "-f", "qcow2", "-o", &options, twin, "100M"]).expect_ok();
        qemu.io(["-f", "qcow2"].into_iter().chain(writes).chain([twin])).expect_ok();
        for qemu in Qemu::all() {
            qemu.expect_clean(Path::new(&device.0));
            qemu.img(["compare", "-q", "-f", "qcow2", "-F", "qcow2", &device.0, twin]).expect_ok();
            let info = qemu.img(["info", "-f", "qcow2", "--output=json", &device.0]).expect_ok();
            assert!(info.stdout.contains("\"name\": \"b\""), "{cluster_size}: {}", info.stdout);
        }
    }
}

/// A volume that gets longer while the image is in use, as thin provisioning has it.
#[test]
#[ignore = "needs root and loop devices"]
fn an_image_uses_what_its_device_has_grown_by() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (below, socket) = (folder.path().join("below"), folder.path().join("s"));
    std::fs::write(&below, vec![0xee; 4 * MIB]).unwrap();
    let device = Loop::new(&below);
    cowshed(&["create", "-q", "-f", "qcow2", &device.0, "64M"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    command.args(["serve", "-k", socket.to_str().unwrap(), &device.0]).stdout(std::process::Stdio::null());
    let mut daemon = Daemon(command.spawn().expect("our own binary runs"));
    await_listening(&socket, &mut daemon.0);
    let (qemu, uri) = (Qemu::system(), format!("nbd+unix:///?socket={}", socket.display()));
    let io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        qemu.io(["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()])).stdout
    };
    let said = io(&["write -P 1 0 1M", "write -P 2 1M 8M", "flush", "read -P 1 0 1M"]);
    assert!(said.contains("No space left on device") && said.matches("failed").count() == 1, "{said}");
    // A discard makes room at once.
    let said = io(&["discard 0 1M", "write -P 3 32M 512k", "read -P 3 32M 512k"]);
    assert!(!said.contains("failed"), "{said}");
    std::fs::File::options().append(true).open(&below).unwrap().set_len(32 * MIB as u64).unwrap();
    tool("losetup", &["--set-capacity", &device.0]);
    let said = io(&["write -P 4 1M 8M", "flush", "read -P 4 1M 8M", "read -P 3 32M 512k"]);
    assert!(!said.contains("failed"), "{said}");
    tool("kill", &["-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().expect("it ends").success());
    qemu.expect_clean(Path::new(&device.0));
}

/// An export whose length doesn't change is a container as a device is.
#[test]
fn an_image_lives_in_an_export_as_in_a_file() {
    for cluster_size in ["512", "64k"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (below, socket) = (folder.path().join("below"), folder.path().join("s"));
        std::fs::write(&below, vec![0xee; 48 * MIB]).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.args(["serve", "-f", "raw", "-k", socket.to_str().unwrap(), below.to_str().unwrap()]);
        let mut daemon = Daemon(command.stdout(std::process::Stdio::null()).spawn().expect("our own binary runs"));
        await_listening(&socket, &mut daemon.0);
        live_in_a_container(&format!("nbd+unix:///?socket={}", socket.display()), cluster_size);
        tool("kill", &["-TERM", &daemon.0.id().to_string()]);
        assert!(daemon.0.wait().expect("it ends").success());
    }
}

/// The bytes by which a LUKS volume grows decrypt to noise, which no part of a new cluster may show.
#[test]
fn an_image_in_a_growing_luks_volume_has_no_noise() {
    let qemu = Qemu::system();
    for cluster_size in ["64k", "512"] {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let (twin, volume) = (path("twin"), path("volume"));
        let secret = ["--object", "secret,id=s,data=x"];
        let options = format!("cluster_size={cluster_size}");
        qemu.img(["create", "-q", "-f", "qcow2", "-o", &options, &twin, "32M"]).expect_ok();
        let luks = ["-f", "raw", "-O", "luks", "-o", "key-secret=s,iter-time=10", &twin, &volume];
        qemu.img(["convert"].into_iter().chain(secret).chain(luks)).expect_ok();
        let len_before = std::fs::metadata(&volume).unwrap().len();
        let below = format!(r#"{{"driver":"luks","key-secret":"s","file":{{"driver":"file","filename":"{volume}"}}}}"#);
        let image = format!(r#"json:{{"driver":"qcow2","file":{below}}}"#);
        for write in ["write -P 1 1M 512", "write -P 2 5000k 1024", "write -P 3 17M 100k", "write -P 4 20M 500"] {
            cowshed(&["io", secret[0], secret[1], "-c", write, &image]);
            qemu.io(["-f", "qcow2", "-c", write, &twin]).expect_ok();
        }
        assert!(std::fs::metadata(&volume).unwrap().len() > len_before, "{cluster_size}: the volume hasn't grown");
        let driver = "driver=qcow2,file.driver=luks,file.key-secret=s,file.file.driver=file,file.file.filename=";
        let options = ["--image-opts".to_owned(), format!("{driver}{volume}")];
        let arguments =
            |verb: &'static str| [verb, "-q"].into_iter().chain(secret).map(str::to_owned).chain(options.clone());
        qemu.img(arguments("check")).expect_ok();
        let twin = format!("driver=qcow2,file.driver=file,file.filename={twin}");
        qemu.img(arguments("compare").chain([twin])).expect_ok();
    }
}

/// A daemon, killed when the test ends early.
struct Daemon(std::process::Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A client's write gets ENOSPC and an event reports it, while reads and writes in place go on. With room again all
/// writes succeed; the image is sound and holds the acknowledged data.
#[test]
#[ignore = "mounts a file system: root only; scripts/test runs it where it can"]
fn a_daemon_lives_through_a_full_disk() {
    let small = Mount::new("mkfs.ext4", "24M");
    let (image, filler, socket) = (small.path("a.qcow2"), small.path("filler"), small.path("n.sock"));
    let qemu = Qemu::system();
    qemu.create(Path::new(&image), "qcow2", "", 64 << 20);
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    let monitor = small.path("m.sock");
    command.args(["serve", "-k", &socket, "--monitor", &monitor, &image]).stdout(std::process::Stdio::null());
    let mut daemon = Daemon(command.spawn().expect("our own binary runs"));
    for path in [&monitor, &socket] {
        await_listening(Path::new(path), &mut daemon.0);
    }
    let stream = std::os::unix::net::UnixStream::connect(&monitor).expect("the monitor listens");
    let mut events = std::io::BufReader::new(stream);
    std::io::Write::write_all(events.get_mut(), br#"{"execute":"qmp_capabilities"}"#).expect("it reads");
    let uri = format!("nbd+unix:///?socket={socket}");
    let io = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        qemu.io(["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()])).stdout
    };
    assert!(!io(&["write -P 1 0 2M", "flush"]).contains("failed"));
    // Another file takes the rest of the disk.
    let fill = format!("! dd if=/dev/zero of={filler} bs=64k 2>/dev/null && sync");
    tool("sh", &["-c", &fill]);
    let said = io(&["write -P 2 8M 4M"]);
    assert!(said.contains("No space left on device"), "{said}");
    let event = loop {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut events, &mut line).expect("text");
        assert!(!line.is_empty(), "the daemon has hung up");
        if line.contains("BLOCK_IO_ERROR") {
            break line;
        }
    };
    assert!(event.contains("\"nospace\": true") && event.contains("\"operation\": \"write\""), "{event}");
    // Requests that need no room go on.
    let said = io(&["read -P 1 0 2M", "write -P 3 0 1M", "flush", "read -P 3 0 1M", "read -P 1 1M 1M"]);
    assert!(!said.contains("failed") && !said.contains("error"), "{said}");
    std::fs::remove_file(&filler).expect("room again");
    let said = io(&["write -P 4 8M 4M", "flush", "read -P 4 8M 4M"]);
    assert!(!said.contains("failed") && !said.contains("No space"), "{said}");
    tool("kill", &["-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().expect("it ends").success());
    drop(events);
    qemu.expect_clean(Path::new(&image));
    let reads = ["read -P 3 0 1M", "read -P 1 1M 1M", "read -P 4 8M 4M"].map(str::to_owned);
    qemu.io_commands(Path::new(&image), "qcow2", &reads).expect_ok();
}

/// Space is reserved in file systems; the device's own space is all there is.
#[test]
#[ignore = "needs root and loop devices"]
fn no_space_is_reserved_on_devices() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let below = folder.path().join("below");
    std::fs::write(&below, vec![0xee; 8 * MIB]).unwrap();
    let device = Loop::new(&below);
    let qemu = Qemu::system();
    for mode in ["falloc", "full"] {
        for format in ["raw", "qcow2"] {
            let options = format!("preallocation={mode}");
            let arguments = ["create", "-q", "-f", format, "-o", &options, &device.0, "4M"];
            assert_eq!(qemu.img(arguments).code, 1, "qemu-img {arguments:?}");
            std::fs::write(&device.0, vec![0xee; 8 * MIB]).unwrap();
            let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("img").args(arguments).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{arguments:?}: {said}");
            assert!(said.contains(&format!("Unsupported preallocation mode '{mode}'")), "{arguments:?}: {said}");
            assert!(std::fs::read(&device.0).unwrap() == vec![0xee; 8 * MIB], "{arguments:?}: written to");
        }
    }
}

#[test]
#[ignore = "needs root and loop devices"]
fn new_image_on_a_device_named_with_its_protocol() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("below"), vec![0xee; 8 * MIB]).unwrap();
    std::fs::write(path("source"), vec![7; MIB]).unwrap();
    let device = Loop::new(Path::new(&path("below")));
    let named = format!("host_device:{}", device.0);
    for arguments in [
        &["create", "-q", "-f", "qcow2", &named, "1M"][..],
        &["convert", "-f", "raw", "-O", "qcow2", &path("source"), &named],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("img").args(arguments).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        Qemu::system().expect_clean(Path::new(&device.0));
    }
    let copy = ["compare", "-q", "-f", "qcow2", "-F", "raw", &device.0, &path("source")];
    Qemu::system().img(copy).expect_ok();
}

/// Locks are those of the node in the file system, and a device may have several.
#[test]
#[ignore = "needs root and loop devices"]
fn a_device_is_not_copied_onto_itself_by_another_node() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let below = folder.path().join("below");
    std::fs::write(&below, vec![0xee; 8 * MIB]).unwrap();
    let device = Loop::new(&below);
    let node = folder.path().join("node").to_str().unwrap().to_owned();
    let number = std::fs::metadata(&device.0).unwrap().rdev();
    let (major, minor) = ((number >> 8 & 0xfff).to_string(), (number & 0xff | number >> 12 & 0xfff00).to_string());
    tool("mknod", &[&node, "b", &major, &minor]);
    for arguments in [
        &["convert", "-f", "raw", "-O", "qcow2", &device.0, &node][..],
        &["convert", "-U", "-f", "raw", "-O", "raw", &device.0, &node],
        &["convert", "-n", "-U", "-f", "raw", "-O", "raw", &device.0, &node],
        &["dd", "-f", "raw", "-O", "raw", &format!("if={}", device.0), &format!("of={node}")],
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).arg("img").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(std::fs::read(&below).unwrap() == vec![0xee; 8 * MIB], "{arguments:?}: written to");
    }
}

/// A device that takes no writes is refused where it is opened for writing, and a device of fixed size isn't resized.
/// Both come in the words of qemu-img, and the device keeps its bytes.
#[test]
#[ignore = "needs root and loop devices"]
fn a_read_only_device_is_read_and_never_opened_for_writing() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("below"), vec![0xee; MIB]).unwrap();
    std::fs::write(path("source"), vec![0x11; MIB]).unwrap();
    let (qemu, ours) = (Qemu::newest().program("qemu-img"), folder.path().join("qemu-img"));
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &ours).unwrap();
    let both = |arguments: &[&str]| {
        let said = [&qemu, &ours].map(|program| {
            let output = Command::new(program).args(arguments).output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        });
        assert_eq!(said[0], said[1], "{arguments:?}");
        said[1].clone()
    };
    let source = path("source");
    {
        let device = Loop::read_only(Path::new(&path("below")));
        let device = device.0.as_str();
        for written in [
            &["convert", "-n", "-f", "raw", "-O", "raw", &source, device][..],
            &["convert", "-f", "raw", "-O", "raw", &source, device],
            &["resize", "-f", "raw", device, "512k", "--shrink"],
            &["create", "-q", "-f", "qcow2", device, "512k"],
            &["create", "-q", "-f", "raw", device, "512k"],
            &["bench", "-w", "-f", "raw", "-c", "1", device],
        ] {
            let (code, words) = both(written);
            assert!(code == Some(1) && words.contains("The device is not writable: Permission denied"), "{words}");
        }
        for read in [
            &["info", "-f", "raw", device][..],
            &["map", "-f", "raw", device],
            &["convert", "-f", "raw", "-O", "raw", device, &path("copy")],
            &["compare", "-f", "raw", "-F", "raw", device, &path("copy")],
        ] {
            assert_eq!(both(read), (Some(0), String::new()), "{read:?}");
        }
    }
    let device = Loop::new(Path::new(&path("below")));
    for size in ["2M", "512k"] {
        let (code, words) = both(&["resize", "--shrink", "-f", "raw", &device.0, size]);
        assert_eq!((code, words.as_str()), (Some(1), "qemu-img: Cannot resize device files\n"));
    }
    assert!(std::fs::read(path("below")).unwrap() == vec![0xee; MIB]);
}

/// As in QEMU, a device is a target like a file: the new image takes the place of its contents.
#[test]
#[ignore = "needs root and loop devices"]
fn drives_are_copied_to_a_device() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("below"), vec![0xee; 8 * MIB]).unwrap();
    let device = Loop::new(Path::new(&path("below")));
    std::os::unix::fs::symlink(&device.0, path("link")).unwrap();
    let (qemu, image) = (Qemu::system(), path("a.qcow2"));
    qemu.create(Path::new(&image), "qcow2", "", 4 << 20);
    qemu.io_commands(Path::new(&image), "qcow2", &["write -P 3 1M 1M".to_owned()]).expect_ok();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    let export = "nbd,id=e,node-name=a,name=e,writable=on";
    let node = format!("qcow2,node-name=a,file.driver=file,file.filename={image}");
    command.args(["qemu-storage-daemon", "--chardev", &format!("socket,id=m,path={},server=on,wait=off", path("m"))]);
    command.args(["--monitor", "m", "--blockdev", &node]);
    command.args(["--nbd-server", &format!("addr.type=unix,addr.path={}", path("s")), "--export", export]);
    let mut daemon = Daemon(command.stdout(std::process::Stdio::null()).spawn().expect("our own binary runs"));
    let stream = loop {
        match std::os::unix::net::UnixStream::connect(path("m")) {
            Ok(stream) => break stream,
            Err(_) => assert!(daemon.0.try_wait().expect("a child").is_none(), "the daemon has ended"),
        }
    };
    let mut monitor = std::io::BufReader::new(stream);
    let mut say = |command: &str, until: &str| {
        std::io::Write::write_all(monitor.get_mut(), command.as_bytes()).expect("it reads");
        loop {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut monitor, &mut line).expect("text");
            assert!(!line.is_empty(), "the daemon has hung up");
            if ["\"error\"", until].iter().any(|wanted| line.contains(wanted)) {
                break line;
            }
        }
    };
    say(r#"{"execute":"qmp_capabilities"}"#, "return");
    for (command, target, format) in [
        ("drive-backup", device.0.clone(), "qcow2"),
        ("drive-backup", format!("file:{}", device.0), "raw"),
        ("drive-mirror", path("link"), "qcow2"),
        ("drive-mirror", format!("host_device:{}", device.0), "qcow2"),
    ] {
        std::fs::write(&device.0, vec![0xee; 8 * MIB]).unwrap();
        let arguments = format!(
            r#"{{"job-id":"k","device":"e","target":"{target}","format":"{format}","sync":"full","mode":"absolute-paths"}}"#
        );
        let command = format!(r#"{{"execute":"{command}","arguments":{arguments}}}"#);
        let end = if command.contains("mirror") { "BLOCK_JOB_READY" } else { "BLOCK_JOB_COMPLETED" };
        if format == "raw" {
            // As in QEMU a target must be as large as the disk.
            assert!(say(&command, "return").contains("different sizes"), "{target}");
            continue;
        }
        let said = say(&command, end);
        assert!(!said.contains("error"), "{target}: {said}");
        if end == "BLOCK_JOB_READY" {
            say(r#"{"execute":"block-job-cancel","arguments":{"device":"k"}}"#, "BLOCK_JOB_COMPLETED");
        }
        qemu.expect_clean(Path::new(&device.0));
        let copy = ["compare", "-q", "-U", "-f", "qcow2", "-F", "qcow2", &device.0, &image];
        qemu.img(copy).expect_ok();
    }
    tool("kill", &["-TERM", &daemon.0.id().to_string()]);
    assert!(daemon.0.wait().expect("it ends").success());
    assert!(std::fs::symlink_metadata(path("link")).expect("a link").is_symlink());
}
