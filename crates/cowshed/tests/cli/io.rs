// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The I/O shell by the name qemu-io. The same scripts run through the real tool and ours, with the same output (times
//! masked), exit codes and images afterwards.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// One command each, on a fresh image of 4 MiB whose first 8 KiB are 1.
const ONE_COMMAND: &str = "\
read 0 4k|read -C 0 4k|read -q 0 4k|read -Cq 0 4k|read -v 0 40|read -v 100 20|read -qv 0 4|read -p 0 4k|read -P 1 0 4k
read -P 0 0 4k|read -P 0 -s 512 -l 512 0 4k|read -P 1 -s 1k -l 1k 0 4k|read -P 0 -s 5000 0 4k|read -P 0 -l 5000 0 4k
read -s 1 0 4k|read -l 1 0 4k|read 0|read|read 0 4k 5|read 1 1|read 1 3|read 3M 1|read 4M 4k|read -1 4k|read 0 -1
read x 4k|read 0 x|read 0 3G|read 0 2147483648|read -P 256 0 4k|read -P x 0 4k|read -P -1 0 4k
read -Z 0 4k|read -P|read 0 4k -q|read -P1 0 4k|read -qP 1 0 4k|read -q -- 0 4k|read 0 4k -P|read -a 0 512|read 0 0
read 1k 1K|read 0x200 512|read 1.5k 512|read 0b 512b|read 1s 512|read 10 1T|read 20E 1|read 99999999999999999999 1
read 1e3 512|read 0.3k 1|r 0 4k|r 0|readv 0 4k 4k|readv -v 0 16 16|readv -P 0 0 512 512|readv -P 1 0 512 512|readv 0 0
readv 0 100|readv 0 x|readv 0|readv 0 3G|readv 0 1G 1G 1G|write 0 4k|write -C 0 4k|write -P 0xab 4k 4k|write -P 010 0 1
write -P 300 4k 4k|write -z 8k 4k|write -z -u 8k 4k|write -u 8k 4k|write -n 8k 4k|write -z -P 1 8k 4k|write -z 0 5M
write -c 64k 64k|write -c 64k 4k|write -c 0 100|write -c 100 512|write -b -z 0 4k|write -f 0 4k|write -f -c 0 64k
write -p 0 4k|write -s pattern 16k 4k|write -s nothing 16k 4k|write -s empty 16k 4k|write -s pattern -P 1 16k 4k
write -s . 16k 4k|write 0 4k 4k|write 4M 4k|write 100 5|write -q 0 1k|write -v 0 1|write -z 1 3|write 0 0|w 0 1k
write -P 1 -P 2 0 1|write -d 0 1|writev 0 4k 4k|writev -P 5 0 512 1k|writev -f 0 512|writev 0|writev 0 100
writev -P 0 0 x|writev 0 3G|aio_read 0 4k|aio_read -v 0 20|aio_read -P 9 0 4k|aio_read -P 1 0 4k|aio_read -q 0 4k
aio_read 4M 4k|aio_read -i 0 4k|aio_read 0|aio_write 0 4k|aio_write -P 7 0 4k 4k|aio_write -z 0 4k 4k|aio_write -z 0 4k
aio_write -u 0 4k|aio_write -f 0 4k|aio_write -i 0 4k|aio_write 4M 4k|aio_write -P 256 0 1|aio_write 0 512 x|aio_flush
aio_flush 1|flush|f|flush 1|discard 0 4k|discard -C 0 4k|discard -q 0 4k|discard 4M 4k|discard 0|discard 0 3G
discard x 1|discard 1 3|discard 0 0|discard -v 0 1|d 0 4k|truncate 2M|truncate -m off 3M|truncate -m falloc 4M
truncate -m full 5M|truncate -m foo 4M|truncate|truncate x|truncate -1|truncate 5|t 8M|length|l|length 1|info|i|info 1
map|map 1|alloc 0|alloc 0 64k|alloc 0 100|alloc 5|alloc 100 200|alloc 2M 64k|alloc 4M 4k|alloc 0 8M|alloc 0 1k 1k
alloc|alloc x|a 0|sleep|sleep 1|sleep x|sleep -1|sleep 1k|sigraise|sigraise x|sigraise 0|sigraise 0 1|sigraise 15
break pwritev A|break foo A|break|resume A|remove_break A|wait_break|foo|help foo|help read x|q|quit 1|open|o|close|c
close 1|open image.qcow2|reopen|reopen -r|reopen -w|reopen -rw|reopen -c none|reopen -c foo|reopen -o lazy-refcounts=on
reopen x|reopen -o driver=raw|abort 1|write 64k 64k|m|  length  |";

/// Several commands, separated by ';', with options before them.
const SCRIPTS: &[&str] = &[
    "-f qcow2 image.qcow2; write -P 1 64k 128k; write -P 2 100k 3; read -P 1 64k 36k; read -P 2 100k 3; read -v 102398 8",
    "-f qcow2 image.qcow2; write -z 0 64k; read -P 0 0 64k; map; write -P 3 1M 1M; map; alloc 1M 2M; discard 1M 64k",
    "-f qcow2 -d unmap image.qcow2; write -P 3 1M 1M; discard 1M 64k; map; read -P 0 1M 64k; write -zu 1M 1M; map",
    "-f qcow2 image.qcow2; write -c -P 7 64k 64k; read -P 7 64k 64k; write -P 8 70k 1k; read -P 8 70k 1k",
    "-f qcow2 image.qcow2; truncate 8M; length; write -P 4 7M 1M; read -P 4 7M 1M; truncate 6M; length",
    "-f qcow2 image.qcow2; aio_write -P 1 0 64k; aio_flush; aio_read -P 1 0 64k; aio_flush; aio_read -P 2 0 64k; aio_flush",
    "-f qcow2 image.qcow2; write -b -P 5 0 64k; read -b -P 5 0 64k; read -b -P 0 64k 64k; length; map; read -P 1 0 8k",
    "-f qcow2 image.qcow2; read -b 0 4k; write -b -P 6 1M 512; close; open image.qcow2; read -b -P 6 1M 512; read -b -v 0 16",
    "-f qcow2 image.qcow2; write -b -s pattern 512 4k; write -bC 0 512; read -bC 0 512; read -b -P 1 0 512; write -b 100 512",
    "-f qcow2 image.qcow2; write -b -P 5 0 64k; truncate 8M; length; read -P 0 4M 4M; map",
    "-f raw raw.img; read -b 0 4k; write -b 0 4k",
    "-f qcow2 image.qcow2; foo; length; read 0; read -P 9 0 4k; length",
    "-f qcow2 image.qcow2; quit; length",
    "-f qcow2 image.qcow2; close; length; open image.qcow2; length; open image.qcow2; close; close",
    "-f qcow2 -r image.qcow2; length; write 0 4k; write x y; write 0; discard 0 1; truncate 1M; aio_write 0 1; flush",
    "-f qcow2 -r image.qcow2; reopen -w; write -P 9 0 4k; reopen -r; write 0 4k; read -P 9 0 4k",
    "-f qcow2 -s image.qcow2; write -P 5 0 4k; read -P 5 0 4k; read -P 1 4k 4k; length",
    "-f qcow2 -s -r image.qcow2; write 0 4k",
    "-f qcow2 -s -U image.qcow2; write -P 5 0 4k; read -P 5 0 4k; read -P 1 4k 4k; length",
    "-f qcow2 -s -U above.qcow2; write -P 5 0 4k; read -P 5 0 4k; read -P 1 4k 4k",
    "-f qcow2 -s -U -r image.qcow2; write 0 4k; read -P 1 0 4k",
    "-f raw raw.img; truncate 1001; length; read -P 0 0 1024; write -P 7 1000 24; length",
    "-f raw raw.img; write -P 7 1M 0; truncate 1048777; length; write -P 7 1048576 512; truncate 777; length",
    "-f raw raw.img; truncate -m full 1048777; truncate -m falloc 1049001; length; truncate 1M; length",
    "-n -f raw raw.img; truncate 1001; write -P 7 0 512; length; read -P 7 0 512",
    "-f qcow2 -n image.qcow2; write -P 6 512 512; read -P 6 512 512; read -v 1020 8",
    "-f qcow2 -U image.qcow2; length",
    "-f qcow2 -U -r image.qcow2; length",
    "-f qcow2 -t foo image.qcow2; length",
    "-f qcow2 -d foo image.qcow2; length",
    "-f qcow2 -i foo image.qcow2; length",
    "-f qcow2 -k image.qcow2; length",
    "-f qcow2 -n -k image.qcow2; length",
    "-f qcow2 -i threads -t writeback image.qcow2; write 0 4k; length",
    "-f qcow2 -m -C image.qcow2; length",
    "-f nofmt image.qcow2; length",
    "-f raw raw.img; info; map; alloc 0 1M; length; write -P 3 0 1k; read -P 3 0 1k; truncate 2M; length",
    "-f raw image.qcow2; length",
    "raw.img; length; write 4k 512",
    "nothing; length",
    "; length; write 0 4k; help foo; read 0",
    "; open -r image.qcow2; write 0 4k; close; open -o driver=raw image.qcow2; length",
    "; open -o driver=qcow2,file.filename=image.qcow2; length; close; open nothing; length",
    "; open -x image.qcow2; open a b; open -t foo image.qcow2; open -d foo image.qcow2; open -n image.qcow2; length",
    "--image-opts driver=qcow2,file.filename=image.qcow2; length; read -P 1 0 8k",
    "--image-opts -f qcow2 driver=qcow2,file.filename=image.qcow2; length",
    "--image-opts BLKDEBUG; break write_aio A; aio_write -P 5 0 64k; wait_break A; resume A; aio_flush; read -P 5 0 64k",
    "--image-opts BLKDEBUG; break write_aio A; aio_write -P 5 0 4k; wait_break A; remove_break A; aio_flush",
    "--image-opts BLKDEBUG; break write_aio A; remove_break A; write 0 4k; resume A; remove_break A; break nosuch B",
    "-C -f qcow2 above.qcow2; map; read -P 1 0 4k; map; close; open above.qcow2; map; read -P 1 0 8k",
    "-C above.qcow2; map; read -P 1 4k 4k; map; write -P 5 1M 64k; read -P 5 1M 64k; map; alloc 0 64k",
    "; open -C above.qcow2; map; read -P 1 0 4k; map; close; open -r above.qcow2; map",
    "-C -s above.qcow2; read -P 1 0 8k; map; close; open above.qcow2; map",
    "-C -r above.qcow2; length",
    "; open -C -r above.qcow2; length; open above.qcow2; map",
    "-C raw.img; read 64k 4k; length",
    "-f qcow2 image.qcow2; alloc 99M; alloc 99M 64k; alloc 4M; alloc 4M 64k; alloc 3M 8M",
    "-f raw raw.img; alloc 99M 64k; alloc 1M",
    "blkdebug::image.qcow2; break write_aio A; aio_write -P 5 0 4k; wait_break A; resume A; aio_flush; read -P 5 0 4k",
    "blkdebug::image.qcow2; break l2_load A; aio_read -P 1 0 4k; wait_break A; resume A; aio_flush; break bogus A",
    "blkdebug::image.qcow2; break cluster_alloc A; aio_write -P 6 1M 64k; wait_break A; resume A; aio_flush; map",
    "blkdebug:rules.conf:image.qcow2; write -P 7 0 4k; write -P 8 0 4k; read -P 8 0 4k",
    "--image-opts BLKDEBUG,file.config=rules.conf; write -P 7 0 4k; write -P 8 0 4k; read -P 8 0 4k",
    "blkdebug:nothing.conf:image.qcow2; length",
    "-f qcow2 image.qcow2; write -z -n 0 3G; write -z 0 3G; read 0 3G; reopen -o bogus=1; length",
    "-f qcow2 image.qcow2; reopen -r -o read-only=on; length; write 0 4k",
    "blkdebug:image.qcow2; length",
    "--image-opts BLKDEBUG; break read_aio A; aio_read -P 1 0 8k; wait_break A; length; resume A; aio_flush",
];

const BLKDEBUG: &str = "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename=image.qcow2";

/// Both tools, and a folder of images for each.
struct Pair {
    folder: tempfile::TempDir,
    qemu: Qemu,
    ours: PathBuf,
    differences: String,
}

#[derive(Debug, PartialEq, Eq)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Pair {
    fn new() -> Pair {
        let (folder, qemu) = (temp_dir(), Qemu::newest());
        let ours = folder.path().join("qemu-io");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &ours).expect("a link named qemu-io");
        let fresh = folder.path().join("fresh");
        fs::create_dir(&fresh).unwrap();
        qemu.create(&fresh.join("image.qcow2"), "qcow2", "", 4 << 20);
        qemu.io_commands(&fresh.join("image.qcow2"), "qcow2", &["write -P 1 0 8k".to_owned()]);
        let above = format!("backing_file={},backing_fmt=qcow2", fresh.join("image.qcow2").display());
        qemu.create(&fresh.join("above.qcow2"), "qcow2", &above, 4 << 20);
        let renamed = Command::new(qemu.img_path())
            .args(["rebase", "-u", "-b", "image.qcow2", "-F", "qcow2", "above.qcow2"])
            .current_dir(&fresh)
            .status();
        assert!(renamed.is_ok_and(|status| status.success()), "the overlay's backing file");
        let rules = "[inject-error]\nevent = \"write_aio\"\nerrno = \"28\"\nonce = \"on\"\n";
        fs::write(fresh.join("rules.conf"), rules).unwrap();
        fs::write(fresh.join("raw.img"), vec![0; 1 << 20]).unwrap();
        fs::write(fresh.join("pattern"), "abc").unwrap();
        fs::write(fresh.join("empty"), "").unwrap();
        Pair { folder, qemu, ours, differences: String::new() }
    }

    /// A folder with fresh images for one tool.
    fn place(&self, name: &str) -> PathBuf {
        let place = self.folder.path().join(name);
        let _ = fs::remove_dir_all(&place);
        fs::create_dir(&place).unwrap();
        for entry in fs::read_dir(self.folder.path().join("fresh")).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, place.join(path.file_name().unwrap())).unwrap();
        }
        place
    }

    fn compare(&mut self, arguments: &[&str], input: &str) {
        let (theirs, own) = (self.place("theirs"), self.place("own"));
        let real = run(self.qemu.io_path(), &theirs, arguments, input);
        let ours = run(&self.ours, &own, arguments, input);
        if real != ours {
            let _ = writeln!(self.differences, "== {arguments:?} {input:?}\n-- real: {real:#?}\n-- ours: {ours:#?}");
        }
        for (image, format) in [("image.qcow2", "qcow2"), ("above.qcow2", "qcow2"), ("raw.img", "raw")] {
            let (left, right) = (theirs.join(image), own.join(image));
            if !self.qemu.is_equal((&left, format), (&right, format)) {
                let _ = writeln!(self.differences, "== {arguments:?} {input:?}: {image} differs");
            }
            let bytes = |path: &Path| fs::metadata(path).unwrap().len();
            if format == "raw" && bytes(&left) != bytes(&right) {
                let lengths = (bytes(&left), bytes(&right));
                let _ = writeln!(self.differences, "== {arguments:?} {input:?}: {image} has {lengths:?} bytes");
            }
        }
        self.qemu.expect_clean(&own.join("image.qcow2"));
        self.qemu.expect_clean(&own.join("above.qcow2"));
    }

    #[track_caller]
    fn verdict(&self) {
        assert!(self.differences.is_empty(), "our qemu-io differs:\n{}", self.differences);
    }
}

fn run(tool: &Path, folder: &Path, arguments: &[&str], input: &str) -> Said {
    let mut child = Command::new(tool)
        .args(arguments)
        .current_dir(folder)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", tool.display()));
    // A tool that doesn't read it is no failure.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let lines = |text: String| text.split_inclusive('\n').map(mask).collect::<String>();
    Said { code: output.status.code(), out: lines(text(output.stdout)), err: lines(text(output.stderr)) }
}

/// Takes out of a line the parts that depend on the time, the words of usages, and reasons that each tool words for
/// itself.
fn mask(line: &str) -> String {
    if let Some((start, end)) = line.split_once("; ")
        && end.ends_with(" ops/sec)\n")
    {
        return format!("{start}; TIME\n");
    }
    if line.matches(',').count() == 4 && line.split(',').nth(2).is_some_and(|time| time.matches(':').count() == 2) {
        return line.split(',').take(2).collect::<Vec<_>>().join(",") + ",TIME\n";
    }
    if let Some((usage, _)) = line
        .split_once(" -- ")
        .filter(|_| !["invalid option", "requires an argument", "Parsing"].iter().any(|word| line.contains(word)))
    {
        return format!("usage of {}\n", usage.split(' ').next().unwrap_or_default());
    }
    if let Some(rest) = line.strip_prefix("qemu-io: can't open device ") {
        return format!("qemu-io: can't open device {}\n", rest.split(": ").next().unwrap_or_default());
    }
    line.to_owned()
}

#[test]
fn single_commands_say_what_the_real_ones_say() {
    let mut pair = Pair::new();
    for command in ONE_COMMAND.split(['|', '\n']) {
        pair.compare(&["-f", "qcow2", "-c", command, "image.qcow2"], "");
    }
    pair.verdict();
}

#[test]
fn scripts_say_what_the_real_ones_say() {
    let mut pair = Pair::new();
    for script in SCRIPTS {
        let script = script.replace("BLKDEBUG", BLKDEBUG);
        let mut parts = script.split("; ");
        let mut arguments: Vec<&str> = parts.next().unwrap_or_default().split(' ').collect();
        arguments.retain(|word| !word.is_empty());
        for command in parts {
            arguments.extend(["-c", command]);
        }
        pair.compare(&arguments, "");
    }
    pair.verdict();
}

#[test]
fn commands_from_standard_input() {
    let mut pair = Pair::new();
    for input in [
        "read 0 4k\nlength\nq\nlength\n",
        "read 0 4k",
        "\nfoo\n# no comment\nlength\n",
        "read -P 3 0 4k\nlength\n",
        "close\nlength\nopen image.qcow2\nlength\n",
        "",
    ] {
        pair.compare(&["-f", "qcow2", "image.qcow2"], input);
    }
    pair.verdict();
}

#[test]
fn an_overlay_for_trying_things_out_leaves_nothing_behind() {
    let pair = Pair::new();
    let place = pair.place("own");
    let before = fs::read(place.join("image.qcow2")).unwrap();
    let temporary = pair.place("temporary");
    let output = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args(["io", "-s", "-c", "write -P 9 0 2M", "-c", "read -P 9 0 2M", "image.qcow2"])
        .current_dir(&place)
        .env("TMPDIR", &temporary)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::read(place.join("image.qcow2")).unwrap(), before);
    assert!(!temporary.join("overlay.qcow2").exists());
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), fs::read_dir(place).unwrap().count());
}

#[test]
fn our_own_name_says_more_of_an_error() {
    let pair = Pair::new();
    let place = pair.place("own");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_cowshed")).args(arguments).current_dir(&place).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, out, _) = run(&["io", "-c", "read 4M 1k", "image.qcow2"]);
    assert!(code == Some(1) && out.contains("past the end of the disk"), "{out}");
    for line in [&["io", "-C", "-r", "-c", "length", "above.qcow2"][..], &["io", "-c", "open -C -r above.qcow2"]] {
        let (code, _, err) = run(line);
        assert!(code == Some(1) && err.contains("Can't use copy-on-read on read-only device"), "{err}");
    }
    let (code, _, err) = run(&["io", "-c", "length", "nothing"]);
    assert!(code == Some(1) && err.contains("cowshed: nothing: ") && err.contains("No such file"), "{err}");
    let (code, _, err) = run(&["io", "--object", "secret,id=a", "-c", "length", "image.qcow2"]);
    assert!(code == Some(1) && err.contains("'file' or 'data'"), "{err}");
    let (code, out, err) = run(&["io", "-c", "wait_break A", "image.qcow2"]);
    assert!(code == Some(1) && out.contains("not supported"), "{out}{err}");
    let (code, out, _) = run(&["io", "-c", "help", "-c", "help write"]);
    assert!(code == Some(0) && out.contains("aio_flush -- ") && out.contains("-s FILE"), "{out}");
}

/// In the words of qemu-io 11.1; the installed one may not know these commands yet.
#[test]
fn zones_are_of_no_image() {
    let mut pair = Pair::new();
    let place = pair.place("own");
    let run = |command: &str, image: &str, format: &str| {
        let ours = run(&pair.ours, &place, &["-f", format, "-c", command, image], "");
        (ours.code, ours.out + &ours.err)
    };
    for (image, format) in [("image.qcow2", "qcow2"), ("above.qcow2", "qcow2"), ("raw.img", "raw")] {
        for (command, text) in [
            ("zone_report 0 1", "zone report failed: Operation not supported\n"),
            ("zrp 8M 1", "zone report failed: Operation not supported\n"),
            ("zone_open 0 64k", "zone open failed: Operation not supported\n"),
            ("zo 1 5", "zone open failed: Operation not supported\n"),
            ("zone_open 8M 64k", "zone open failed: Input/output error\n"),
            ("zone_close 0 64k", "zone close failed: Operation not supported\n"),
            ("zf 0 64k", "zone finish failed: Operation not supported\n"),
            ("zone_reset 0 64k", "zone reset failed: Operation not supported\n"),
            ("zone_append -p 0 4k", "zone append failed: Operation not supported\n"),
            ("zone_append 0 4k 4k", "zone append failed: Operation not supported\n"),
            ("zap 0 4k", "bad argument count 2 to zap, expected between 3 and 4 arguments\n"),
            ("zone_report 0", "bad argument count 1 to zone_report, expected 2 arguments\n"),
        ] {
            assert_eq!(run(command, image, format), (Some(1), text.to_owned()), "{command}");
        }
        let (code, text) = run("zone_open x 1", image, format);
        assert!(code == Some(1) && text.starts_with("Parsing error: non-numeric argument"), "{text}");
    }
    pair.compare(&["-c", "help zone_nothing"], "");
    pair.verdict();
}

const SECRET: &str = "secret,id=s,data=geheim";

/// Parts of sectors, zeroes and durable writes, on images whose bytes are encrypted: the real one reads it.
#[test]
fn encrypted_images_are_written_and_the_real_one_reads_them() {
    let pair = Pair::new();
    let place = pair.place("own");
    for (number, options) in ["encrypt.format=luks,encrypt.iter-time=10", "encrypt.format=aes"].iter().enumerate() {
        let name = format!("encrypted{number}.qcow2");
        let created = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["create", "-q", "-f", "qcow2", "--object", SECRET, "-o"])
            .args([&format!("{options},encrypt.key-secret=s"), &name, "4M"])
            .current_dir(&place)
            .status();
        assert!(created.unwrap().success(), "{options}");
        let image = format!("driver=qcow2,encrypt.key-secret=s,file.filename={name}");
        let with = |commands: &[&str]| -> Vec<String> {
            let mut arguments: Vec<String> = ["--object", SECRET, "--image-opts", &image].map(str::to_owned).to_vec();
            arguments.extend(commands.iter().flat_map(|command| ["-c".to_owned(), (*command).to_owned()]));
            arguments
        };
        let io = |tool: &Path, commands: &[&str]| {
            let arguments = with(commands);
            run(tool, &place, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), "")
        };
        for cache in ["writeback", "writethrough", "none"] {
            let mut arguments = vec!["-t".to_owned(), cache.to_owned()];
            arguments.extend(with(&[
                "write -f -P 5 100 3000",
                "write -f -P 6 64k 64k",
                "writev -f -P 7 200k 512 1024",
                "aio_write -f -P 8 300k 4k 3k",
                "aio_flush",
                "write -f -z 70k 4k",
                "write -fzu 80k 100",
            ]));
            let ours = run(&pair.ours, &place, &arguments.iter().map(String::as_str).collect::<Vec<_>>(), "");
            assert_eq!((ours.code, ours.err.as_str()), (Some(0), ""), "{options} {cache}: {}", ours.out);
        }
        let reads = [
            "read -P 0 0 100",
            "read -P 5 100 3000",
            "read -P 0 3100 1k",
            "read -P 6 64k 6k",
            "read -P 0 70k 4k",
            "read -P 6 74k 6k",
            "read -P 0 80k 100",
            "read -P 7 200k 1536",
            "read -P 8 300k 7k",
            "read -v 3090 20",
        ];
        let (real, ours) = (io(pair.qemu.io_path(), &reads), io(&pair.ours, &reads));
        assert_eq!(real.code, Some(0), "{options}: {}{}", real.out, real.err);
        assert_eq!(real, ours, "{options}");
    }
}

/// Two sittings at a terminal: the second one finds the first one's command by a step back.
#[test]
fn the_history_outlives_the_shell() {
    let pair = Pair::new();
    let place = pair.place("own");
    let state = pair.place("state");
    // Keys are struck when the shell asks for them: earlier ones are lost when it takes the terminal over.
    let sit = |lines: &[&[u8]]| {
        let command = format!("{} io -r image.qcow2", env!("CARGO_BIN_EXE_cowshed"));
        let mut child = Command::new("script")
            .args(["-q", "-e", "-c", &command, "/dev/null"])
            .current_dir(&place)
            .env("XDG_STATE_HOME", &state)
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script(1) gives a terminal");
        let (mut keys, mut screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut said = Vec::new();
        for line in lines {
            let from = said.len();
            // The last thing before keys are read: the prompt, then the end of its update.
            let asks = |said: &[u8]| {
                let text = String::from_utf8_lossy(&said[from..]).into_owned();
                text.rfind("cowshed> ").is_some_and(|at| text[at..].contains("\u{1b}[?2026l"))
            };
            while !asks(&said) {
                let mut some = [0; 4096];
                let count = screen.read(&mut some).unwrap();
                assert!(count > 0, "it ended: {}", String::from_utf8_lossy(&said));
                said.extend_from_slice(&some[..count]);
            }
            keys.write_all(line).unwrap();
        }
        screen.read_to_end(&mut said).unwrap();
        (child.wait().unwrap().code(), String::from_utf8_lossy(&said).into_owned())
    };
    let (code, said) = sit(&[b"read -P 1 0 8k\r", b"length\r", b"quit\r"]);
    assert!(code == Some(0) && said.contains("4 MiB"), "{said}");
    let history = fs::read_to_string(state.join("cowshed/io-history")).expect("a history");
    assert!(history.contains("read -P 1 0 8k") && history.contains("length"), "{history}");
    // Control-P, twice: past "quit" to "length".
    let (code, said) = sit(&[b"\x10\x10\r", b"quit\r"]);
    assert!(code == Some(0) && said.contains("4 MiB"), "{said}");
}
