// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `share`, downloaded by curl, and read by nbdkit where it is.

use crate::oracle::Oracle;
use cowshed_testkit::credentials;
use cowshed_testkit::waiting::await_that;
use std::io::{BufRead, BufReader, Read, Seek};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// A share that runs, and its standard error; killed if the test ends early.
pub(super) struct Share {
    child: Child,
    errors: std::fs::File,
    pub url: String,
}

impl Share {
    pub fn start(oracle: &Oracle, arguments: &[&str]) -> Share {
        let errors = tempfile::tempfile().expect("a file");
        let mut child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .arg("share")
            .args(arguments)
            .current_dir(oracle.work())
            .stdout(Stdio::piped())
            .stderr(errors.try_clone().expect("a descriptor"))
            .spawn()
            .expect("our own binary runs");
        let mut url = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut url).expect("text");
        let share = Share { child, errors, url: url.trim_end().to_owned() };
        assert!(share.url.starts_with("http"), "{}", share.said());
        share
    }

    fn said(&self) -> String {
        let mut errors = self.errors.try_clone().expect("a descriptor");
        let mut text = String::new();
        errors.rewind().and_then(|()| errors.read_to_string(&mut text)).expect("text");
        text
    }

    pub fn exit_code(mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }

    fn interrupt(&self) {
        let status = Command::new("kill").args(["-INT", &self.child.id().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn curl(oracle: &Oracle, arguments: &[&str]) -> Output {
    let curl =
        Command::new("curl").args(["-sS", "--max-time", "60"]).args(arguments).current_dir(oracle.work()).output();
    curl.expect("curl runs")
}

#[track_caller]
pub(super) fn download(oracle: &Oracle, arguments: &[&str]) -> Vec<u8> {
    let output = curl(oracle, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// A disk with data here and there, behind a base, whose size is no multiple of a cluster; and its bytes in `truth.raw`.
fn disk() -> Oracle {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 base.qcow2 700M");
    oracle.io(&["write -P 1 0 64k", "write -P 2 600M 3M", "write -P 3 699M 1M"], "base.qcow2");
    oracle.make("create -q -f qcow2 -b base.qcow2 -F qcow2 disk.qcow2 734004224");
    oracle.io(&["write -P 4 1000k 100k", "write -z 600M 1M", "write -P 5 734003712 512"], "disk.qcow2");
    oracle.make("convert -O raw disk.qcow2 truth.raw");
    oracle
}

fn sha256(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().expect("sha256sum runs");
    String::from_utf8_lossy(&output.stdout).split(' ').next().expect("a digest").to_owned()
}

/// The page, once the digest is on it.
fn page_with_digest(oracle: &Oracle, url: &str) -> String {
    let mut page = String::new();
    // It is computed beside.
    await_that("the digest is on the page", || {
        page = String::from_utf8(download(oracle, &["-H", "Accept: text/html,*/*", url])).expect("text");
        page.contains("</code>")
    });
    page
}

#[test]
fn curl_downloads_the_disk_and_goes_on_where_it_stopped() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--once", "disk.qcow2"]);
    assert!(share.url.starts_with("http://localhost:") && share.url.ends_with("/disk.raw"), "{}", share.url);
    download(&oracle, &["-r", "0-100000", "-o", "disk.raw", &share.url]);
    let resumed = download(&oracle, &["-C", "-", "-o", "disk.raw", "-w", "%{http_code}", &share.url]);
    assert_eq!(resumed, b"206");
    assert_eq!(share.exit_code(), Some(0), "once is enough");
    oracle.make("compare -f raw -F raw disk.raw truth.raw");
    assert_eq!(sha256(&oracle.work().join("disk.raw")), sha256(&oracle.work().join("truth.raw")));
}

/// A client that breaks off has no whole disk. The disk is longer than what curl takes at once, whatever its limit says.
#[test]
fn download_is_complete_only_with_its_last_byte() {
    let oracle = Oracle::new();
    credentials::make_credentials(&oracle.work());
    let disk: Vec<u8> = (0..1_u32 << 24).flat_map(u32::to_le_bytes).collect();
    std::fs::write(oracle.work().join("d.raw"), &disk).expect("a file");
    for more in [&[][..], &["--tls-dir", "."]] {
        let arguments = [&["--once", "--no-digest", "-f", "raw"], more, &["d.raw"]].concat();
        let mut share = Share::start(&oracle, &arguments);
        let url = share.url.clone();
        let get = |more: &[&str]| curl(&oracle, &[&["--cacert", "ca-cert.pem", "-o", "got.raw", &url], more].concat());
        assert_eq!(get(&["--limit-rate", "100k", "--max-time", "1"]).status.code(), Some(28), "its time is up");
        let has_part = std::fs::metadata(oracle.work().join("got.raw")).is_ok_and(|file| file.len() > 0);
        assert!(has_part && share.child.try_wait().expect("a child").is_none(), "{more:?}: {}", share.said());
        let resumed = get(&["-C", "-", "-w", "%{http_code}"]);
        assert_eq!(String::from_utf8_lossy(&resumed.stdout), "206", "{more:?}");
        assert_eq!(share.exit_code(), Some(0), "{more:?}");
        assert!(std::fs::read(oracle.work().join("got.raw")).expect("a file") == disk);
    }
}

#[test]
fn a_qcow2_file_is_made_while_it_is_sent() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--as", "qcow2", "disk.qcow2"]);
    let head = String::from_utf8(download(&oracle, &["-I", &share.url])).expect("text");
    download(&oracle, &["-O", "-J", "--output-dir", "got", "--create-dirs", &share.url]);
    let got = oracle.work().join("got/disk.qcow2");
    assert!(head.contains(&format!("Content-Length: {}\r\n", got.metadata().expect("a file").len())), "{head}");
    // The data are 5 MiB and a few clusters.
    assert!(got.metadata().expect("a file").len() < 8 << 20);
    oracle.qemu.expect_clean(&got);
    oracle.make("compare -f qcow2 -F raw got/disk.qcow2 truth.raw");
    // Any part of it is the same alone.
    let whole = std::fs::read(&got).expect("the file");
    for range in [0..1, 65_530..65_600, 196_000..459_000, whole.len() - 70_000..whole.len()] {
        let part = download(&oracle, &["-r", &format!("{}-{}", range.start, range.end - 1), &share.url]);
        assert_eq!(part, whole[range.clone()], "{range:?}");
    }
    share.interrupt();
    assert_eq!(share.exit_code(), Some(0));
}

#[test]
fn a_qcow2_file_of_no_bytes_is_whole() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 none.qcow2 0");
    let share = Share::start(&oracle, &["--as", "qcow2", "--once", "none.qcow2"]);
    download(&oracle, &["-o", "got.qcow2", &share.url]);
    assert_eq!(share.exit_code(), Some(0));
    oracle.qemu.expect_clean(&oracle.work().join("got.qcow2"));
}

#[test]
fn a_zstd_file_is_made_while_it_is_sent() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--as", "zstd", "--once", "disk.qcow2"]);
    assert!(share.url.ends_with("/disk.raw.zst"), "{}", share.url);
    // It has no length before its end, and no part of it can be asked for.
    let head = String::from_utf8(download(&oracle, &["-I", &share.url])).expect("text");
    assert!(head.contains("Transfer-Encoding: chunked\r\n") && head.contains("application/zstd"), "{head}");
    assert!(!head.contains("Content-Length") && head.contains("Accept-Ranges: none\r\n"), "{head}");
    let file = download(&oracle, &["-r", "5-10", &share.url]);
    assert_eq!(share.exit_code(), Some(0), "once is enough");
    assert!(file.len() < 8 << 20, "{}", file.len());
    std::fs::write(oracle.work().join("file.zst"), &file).expect("a file");
    let share = Share::start(&oracle, &["--as", "zstd", "disk.qcow2"]);
    assert!(download(&oracle, &[&share.url]) == file);
    // To HTTP/1.0 a file that breaks off between two frames would look whole.
    let refused = curl(&oracle, &["--http1.0", "-o", "old", "-w", "%{http_code}", &share.url]);
    assert_eq!(refused.stdout, b"505");
    let unpacked =
        Command::new("zstd").args(["-q", "-d", "file.zst", "-o", "got.raw"]).current_dir(oracle.work()).status();
    assert!(unpacked.expect("zstd runs").success());
    oracle.make("compare -f raw -F raw got.raw truth.raw");
    let digest = sha256(&oracle.work().join("file.zst"));
    let page = page_with_digest(&oracle, &share.url);
    assert!(page.contains(&digest) && page.contains(&format!("({} bytes)", file.len())), "{page}");
}

/// `scripts/test` runs it where there is a browser.
#[test]
#[ignore = "needs the package chromium"]
fn chromium_shows_the_page_and_stores_the_download() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--once", "disk.qcow2"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cli/browser.py");
    let shown = Command::new("python3")
        .args([script, "chromium", oracle.work().to_str().expect("text"), &share.url])
        .stdin(Stdio::null())
        .output()
        .expect("python3 runs");
    let said = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.status.success(), "{said}{}", String::from_utf8_lossy(&shown.stderr));
    let digest = sha256(&oracle.work().join("truth.raw"));
    let expected = format!(
        "disk 700 MiB (734004224 bytes)\nfile 700 MiB (734004224 bytes)\ndigest {digest}\ntitle disk.raw\nname disk.raw\n\
         completed 734004224 734004224\n"
    );
    assert_eq!(said, expected);
    oracle.make("compare -f raw -F raw disk.raw truth.raw");
    assert_eq!(share.exit_code(), Some(0), "it was downloaded");
}

#[test]
fn nbdkit_reads_it_where_it_is() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--no-digest", "disk.qcow2"]);
    let nbdkit = Command::new("nbdkit")
        .args(["-U", "-", "-r", "curl", &share.url, "--run", "qemu-img compare -f raw -F raw \"$uri\" truth.raw"])
        .current_dir(oracle.work())
        .output()
        .expect("nbdkit runs");
    assert!(nbdkit.status.success(), "{}", String::from_utf8_lossy(&nbdkit.stderr));
}

/// One request at a time: with several QEMU's driver goes to sleep for ever, though it has got all that it has asked for.
#[test]
fn qemu_img_converts_it_where_it_is() {
    let oracle = disk();
    credentials::make_credentials(&oracle.work());
    let convert = |source: &[&str], copy: &str| {
        let arguments = [&["convert", "-m", "1", "-O", "qcow2"], source, &[copy]].concat();
        let output =
            Command::new("qemu-img").args(&arguments).current_dir(oracle.work()).output().expect("qemu-img runs");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        oracle.make(&format!("compare -f qcow2 -F raw {copy} truth.raw"));
    };
    let plain = Share::start(&oracle, &["--no-digest", "disk.qcow2"]);
    convert(&["-f", "raw", &plain.url], "plain.qcow2");
    let packed = Share::start(&oracle, &["--as", "qcow2", "--no-digest", "disk.qcow2"]);
    convert(&["-f", "qcow2", &packed.url], "packed.qcow2");
    let encrypted = Share::start(&oracle, &["--tls-dir", ".", "--no-digest", "disk.qcow2"]);
    let options = format!("driver=raw,file.driver=https,file.url={},file.sslverify=off", encrypted.url);
    convert(&["--image-opts", &options], "encrypted.qcow2");
}

#[test]
fn a_browser_sees_a_page_with_the_digest() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--name", "a <b>.raw", "disk.qcow2"]);
    assert!(share.url.ends_with("/a%20%3Cb%3E.raw"), "{}", share.url);
    let digest = sha256(&oracle.work().join("truth.raw"));
    let page = page_with_digest(&oracle, &share.url);
    assert!(page.contains(&digest), "{page}");
    assert!(page.contains("a &lt;b&gt;.raw") && page.contains("734004224 bytes"), "{page}");
    let link = format!("{}?download", share.url);
    download(&oracle, &["-H", "Accept: text/html,*/*", "-o", "got.raw", &link]);
    oracle.make("compare -f raw -F raw got.raw truth.raw");
}

#[test]
fn nothing_is_found_without_the_url() {
    let oracle = disk();
    let share = Share::start(&oracle, &["disk.qcow2"]);
    let origin = share.url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    for path in ["/", "/disk.raw", "/00000000000000000000000000000000/disk.raw"] {
        let status = download(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &format!("{origin}{path}")]);
        assert_eq!(status, b"404", "{path}");
    }
    let status = download(&oracle, &["-X", "PUT", "-d", "x", "-o", "/dev/null", "-w", "%{http_code}", &share.url]);
    assert_eq!(status, b"405");
    let another = Share::start(&oracle, &["disk.qcow2"]);
    assert_ne!(share.url.split('/').nth(3), another.url.split('/').nth(3));
}

/// The client gets a status, the server reports the reason, and the page names it.
#[test]
fn unreadable_disk_is_reported_on_both_sides() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 64M");
    oracle.io(&["write -P 1 0 1M"], "disk.qcow2");
    // The tables are there, the data is not.
    let path = oracle.work().join("disk.qcow2");
    let damaged = std::fs::OpenOptions::new().write(true).open(&path).expect("the image");
    damaged.set_len(200_000).expect("a shorter file");
    let share = Share::start(&oracle, &["disk.qcow2"]);
    let status = download(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]);
    assert_eq!(status, b"500");
    let page = || String::from_utf8(download(&oracle, &["-H", "Accept: text/html,*/*", &share.url])).expect("text");
    while page().contains("being computed") {}
    assert!(page().contains("none: the disk can't be read"), "{}", page());
    assert_eq!(share.said().matches("the disk can't be sent").count(), 1, "{}", share.said());
    share.interrupt();
    assert_eq!(share.exit_code(), Some(0));
}

/// A client chooses the places that it reads, and each may be another error.
#[test]
fn a_client_of_a_failing_disk_fills_no_terminal() {
    let oracle = disk();
    let rule = "op=read,errno=5,offset=64k,len=600M";
    let share = Share::start(&oracle, &["--fault", rule, "--no-digest", "--quiet", "disk.qcow2"]);
    for place in 0..30 {
        let range = format!("{}-", (1 << 20) + place * 4096);
        assert!(!curl(&oracle, &["-f", "-r", &range, "-o", "/dev/null", &share.url]).status.success());
    }
    let said = share.said();
    let told = said.lines().filter(|line| line.contains("the disk can't be sent")).count();
    assert!(told == 10 && said.lines().count() == 11, "{said}");
}

/// Behind the end of a file that another program has cut off would be zeroes.
#[test]
fn a_file_that_has_become_shorter_is_not_sent() {
    for shape in ["raw", "zstd", "qcow2"] {
        let oracle = Oracle::new();
        let path = oracle.work().join("disk.raw");
        std::fs::write(&path, vec![7; 4 << 20]).expect("a file");
        let share = Share::start(&oracle, &["--as", shape, "--no-digest", "-f", "raw", "disk.raw"]);
        download(&oracle, &["-o", "/dev/null", &share.url]);
        let shorter = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        shorter.set_len(1 << 20).expect("a shorter file");
        let output = curl(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]);
        assert!(!output.status.success() || output.stdout == b"500", "{shape}: {output:?}");
        assert!(share.said().contains("another program has made the file shorter"), "{shape}: {}", share.said());
        shorter.set_len(5 << 20).expect("a longer file");
        assert_eq!(download(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]), b"200", "{shape}");
    }
}

/// Another image takes its place in the same file: the tables in memory are those of the first one.
#[test]
fn image_that_was_replaced_is_not_sent() {
    for (format, shape) in [("qcow2", "raw"), ("qcow2", "qcow2"), ("vdi", "zstd"), ("vmdk", "raw")] {
        let oracle = Oracle::new();
        for (name, places) in [("one", [1, 3, 5]), ("two", [2, 3, 9])] {
            oracle.make(&format!("create -q -f {format} {name} 16M"));
            for place in places {
                oracle.io(&[&format!("write -P {place} {place}M 1M")], name);
            }
        }
        let share = Share::start(&oracle, &["--as", shape, "--no-digest", "-f", format, "one"]);
        download(&oracle, &["-o", "/dev/null", &share.url]);
        // As `cp` does it.
        let two = std::fs::read(oracle.work().join("two")).expect("the image");
        std::fs::write(oracle.work().join("one"), two).expect("another image");
        let output = curl(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]);
        assert!(!output.status.success() || output.stdout == b"500", "{format} as {shape}: {output:?}");
        await_that("the reason", || share.said().contains("another program has changed the image"));
    }
}

/// As `cp -p` and `rsync -t --inplace` do it, with images of one length, and of one time of modification.
#[test]
fn image_replaced_with_its_times_is_not_sent() {
    for (format, shape) in [("qcow2", "raw"), ("vdi", "qcow2"), ("vmdk", "zstd")] {
        let oracle = Oracle::new();
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000);
        let set_time = |name: &str| {
            let file = std::fs::File::options().write(true).open(oracle.work().join(name)).expect("the image");
            file.set_modified(time).expect("a time");
        };
        for (name, places) in [("one", [1, 3, 5]), ("two", [2, 3, 9])] {
            oracle.make(&format!("create -q -f {format} {name} 16M"));
            for place in places {
                oracle.io(&[&format!("write -P {place} {place}M 1M")], name);
            }
        }
        set_time("one");
        let share = Share::start(&oracle, &["--as", shape, "--no-digest", "-f", format, "one"]);
        download(&oracle, &["-o", "/dev/null", &share.url]);
        let [one, two] = ["one", "two"].map(|name| std::fs::read(oracle.work().join(name)).expect("the image"));
        assert_eq!(one.len(), two.len());
        std::fs::write(oracle.work().join("one"), two).expect("another image");
        set_time("one");
        let output = curl(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]);
        assert!(!output.status.success() || output.stdout == b"500", "{format} as {shape}: {output:?}");
        await_that("the reason", || share.said().contains("another program has changed the image"));
    }
}

/// Nothing of its disk is read for a qcow2 file without data.
#[test]
fn replaced_image_without_data_is_not_sent() {
    for format in ["qcow2", "vdi"] {
        let oracle = Oracle::new();
        for name in ["one", "two"] {
            oracle.make(&format!("create -q -f {format} {name} 16M"));
        }
        oracle.io(&["write -P 1 3M 1M"], "two");
        let share = Share::start(&oracle, &["--as", "qcow2", "--no-digest", "-f", format, "one"]);
        assert!(download(&oracle, &["-f", &share.url]).starts_with(b"QFI\xfb"));
        let two = std::fs::read(oracle.work().join("two")).expect("the image");
        std::fs::write(oracle.work().join("one"), two).expect("another image");
        let output = curl(&oracle, &["-o", "/dev/null", "-w", "%{http_code}", &share.url]);
        assert!(!output.status.success() || output.stdout == b"500", "{format}: {output:?}");
        await_that("the reason", || share.said().contains("another program has changed the image"));
    }
}

/// A client that has read nothing has gone, and the last bytes that another one reads complete nothing.
#[test]
fn end_of_the_disk_completes_no_lost_download() {
    let oracle = Oracle::new();
    std::fs::write(oracle.work().join("d.raw"), vec![7; 1 << 20]).expect("a file");
    let mut share = Share::start(&oracle, &["--once", "--no-digest", "--quiet", "-f", "raw", "d.raw"]);
    let (_, rest) = share.url.split_once("://").expect("a URL");
    let (host, path) = rest.split_once('/').expect("a path");
    let mut client = std::net::TcpStream::connect(host).expect("a connection");
    let request = format!("GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    std::io::Write::write_all(&mut client, request.as_bytes()).expect("a request");
    let mut some = vec![0; 60_000];
    await_that("bytes", || client.peek(&mut some).expect("bytes") > 50_000);
    drop(client);
    assert_eq!(download(&oracle, &["-f", "-r", "-512", &share.url]).len(), 512);
    // Proof that nothing happens.
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert!(share.child.try_wait().expect("a child").is_none());
    assert_eq!(download(&oracle, &["-f", &share.url]).len(), 1 << 20);
    assert_eq!(share.exit_code(), Some(0));
}

/// Resuming programs differ in the spelling: `N-`, or `N-M` to the end (aria2).
#[test]
fn rest_of_another_version_is_refused() {
    let oracle = Oracle::new();
    let path = oracle.work().join("d.raw");
    std::fs::write(&path, vec![7; 1 << 20]).expect("a file");
    let share = Share::start(&oracle, &["--no-digest", "-f", "raw", "d.raw"]);
    download(&oracle, &["-r", "0-99999", "-o", "part", &share.url]);
    std::fs::write(&path, vec![8; 1 << 20]).expect("another disk");
    for range in ["50000-", "50000-1048575", "50000-59999"] {
        let status = download(&oracle, &["-r", range, "-o", "/dev/null", "-w", "%{http_code}", &share.url]);
        assert_eq!(String::from_utf8_lossy(&status), "412", "{range}");
    }
    let resumed = curl(&oracle, &["-C", "-", "-o", "part", &share.url]);
    assert!(!resumed.status.success());
    assert!(std::fs::read(oracle.work().join("part")).expect("the part") == vec![7; 100_000]);
}

/// A read that never returns keeps no share, nor its exit code.
#[test]
fn hung_reads_end_with_the_share() {
    let oracle = disk();
    let arguments = ["--expires", "2s", "--no-digest", "--quiet", "--fault", "op=read,action=hang", "disk.qcow2"];
    let share = Share::start(&oracle, &arguments);
    assert_eq!(curl(&oracle, &["--max-time", "1", "-o", "/dev/null", &share.url]).status.code(), Some(28));
    let errors = share.errors.try_clone().expect("a descriptor");
    assert_eq!(share.exit_code(), Some(0));
    let (mut errors, mut text) = (errors, String::new());
    errors.rewind().and_then(|()| errors.read_to_string(&mut text)).expect("text");
    assert!(text.contains("a read of the disk does not end"), "{text}");
}

/// The download is complete, and one read of another client isn't.
#[test]
fn hung_read_ends_with_a_share_of_one_download() {
    let oracle = disk();
    let rule = "op=read,action=hang,times=1,offset=600M,len=64k";
    let share = Share::start(&oracle, &["--once", "--no-digest", "--quiet", "--fault", rule, "base.qcow2"]);
    let hung = curl(&oracle, &["--max-time", "1", "-r", "629145600-629149695", "-o", "/dev/null", &share.url]);
    assert_eq!(hung.status.code(), Some(28));
    download(&oracle, &["-o", "/dev/null", &share.url]);
    let errors = share.errors.try_clone().expect("a descriptor");
    assert_eq!(share.exit_code(), Some(0));
    let (mut errors, mut text) = (errors, String::new());
    errors.rewind().and_then(|()| errors.read_to_string(&mut text)).expect("text");
    assert!(text.contains("a read of the disk does not end"), "{text}");
}

/// The places of the data are those of the version that is sent, and the page has no digest of an older one.
#[test]
fn qcow2_download_follows_a_disk_that_changes() {
    let oracle = Oracle::new();
    let path = oracle.work().join("disk.raw");
    std::fs::write(&path, vec![7; 1 << 20]).expect("a file");
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(16 << 20)).expect("a hole");
    let share = Share::start(&oracle, &["--as", "qcow2", "-f", "raw", "disk.raw"]);
    page_with_digest(&oracle, &share.url);
    let head = || String::from_utf8(download(&oracle, &["-I", &share.url])).expect("text");
    let before = head();
    let change = |place: u64, value: u8| {
        let file = std::fs::OpenOptions::new().write(true).open(&path).expect("the file");
        file.write_all_at(&[value; 4096], place).expect("a write");
    };
    change(0, 1);
    change(8 << 20, 2);
    download(&oracle, &["-o", "got.qcow2", &share.url]);
    oracle.make("compare -f qcow2 -F raw got.qcow2 disk.raw");
    let after = head();
    let line = |head: &str, name: &str| head.lines().find(|line| line.starts_with(name)).map(str::to_owned);
    for name in ["ETag", "Content-Length"] {
        assert!(line(&before, name).is_some() && line(&before, name) != line(&after, name), "{before}{after}");
    }
    await_that("the old digest goes", || {
        let page = download(&oracle, &["-H", "Accept: text/html,*/*", &share.url]);
        !String::from_utf8(page).expect("text").contains("</code>")
    });
    share.interrupt();
    assert_eq!(share.exit_code(), Some(0));
}

#[test]
fn a_disk_that_fails_on_purpose_breaks_the_download() {
    let oracle = disk();
    let rule = "op=read,errno=5,offset=600M,len=512";
    let share = Share::start(&oracle, &["--fault", rule, "--fault", "op=flush", "--no-digest", "disk.qcow2"]);
    let output = curl(&oracle, &["-o", "disk.raw", &share.url]);
    assert_eq!(output.status.code(), Some(18), "a part of the file: {output:?}");
    assert!(share.said().contains("injected error"), "{}", share.said());
    download(&oracle, &["-r", "630200000-630201000", "-o", "/dev/null", &share.url]);
    for (text, words) in
        [("op=seek", "Parameter 'rules.0.op'"), ("missing.json", "missing.json"), ("op=read,len=0", "no effect")]
    {
        let refused = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .args(["share", "--fault", text, "disk.qcow2"])
            .current_dir(oracle.work())
            .output()
            .expect("our own binary runs");
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(words) && said.lines().count() == 1, "{text}: {said}");
    }
}

#[test]
fn a_disk_of_no_bytes_is_downloaded_once() {
    let oracle = Oracle::new();
    std::fs::write(oracle.work().join("empty.raw"), []).expect("a file");
    let share = Share::start(&oracle, &["--once", "-f", "raw", "empty.raw"]);
    assert_eq!(download(&oracle, &[&share.url]), b"");
    assert_eq!(share.exit_code(), Some(0));
}

#[test]
fn a_name_outside_of_utf8_has_a_substitute() {
    use std::os::unix::ffi::OsStrExt;
    let oracle = disk();
    let name = std::ffi::OsStr::from_bytes(b"bad\xff.qcow2");
    std::fs::copy(oracle.work().join("disk.qcow2"), oracle.work().join(name)).expect("a copy");
    let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    let share = command.args(["share", "--expires", "1"]).arg(name).current_dir(oracle.work()).output();
    let url = String::from_utf8(share.expect("our own binary runs").stdout).expect("text");
    assert!(url.trim_end().ends_with("/bad%EF%BF%BD.raw"), "{url}");
}

/// Clients without the URL may begin requests, and keep no other client out.
#[test]
fn slow_requests_make_room_for_others() {
    use std::io::Write;
    let oracle = disk();
    let share = Share::start(&oracle, &["disk.qcow2"]);
    let port = share.url.split([':', '/']).nth(4).expect("a port").to_owned();
    let slow: Vec<_> = (0..300)
        .map(|_| {
            let mut stream = std::net::TcpStream::connect(format!("localhost:{port}")).expect("a connection");
            stream.write_all(b"GET ").expect("a beginning");
            stream
        })
        .collect();
    // Less than the time that a request has when no other waits.
    download(&oracle, &["-I", "--max-time", "8", &share.url]);
    drop(slow);
}

#[test]
fn a_share_ends_when_its_time_is_over() {
    let oracle = disk();
    let share = Share::start(&oracle, &["--expires", "1", "disk.qcow2"]);
    assert_eq!(share.exit_code(), Some(0));
    let unfinished = Share::start(&oracle, &["--expires", "1s", "--once", "disk.qcow2"]);
    let errors = unfinished.errors.try_clone().expect("a descriptor");
    assert_eq!(unfinished.exit_code(), Some(1));
    let mut errors = errors;
    let mut text = String::new();
    errors.rewind().and_then(|()| errors.read_to_string(&mut text)).expect("text");
    assert!(text.contains("the disk was not downloaded completely"), "{text}");
}

#[test]
fn a_share_is_encrypted_with_given_certificates() {
    let oracle = disk();
    credentials::make_credentials(&oracle.work());
    let share = Share::start(&oracle, &["--tls-dir", ".", "--once", "disk.qcow2"]);
    assert!(share.url.starts_with("https://localhost:"), "{}", share.url);
    let plain = share.url.replace("https:", "http:");
    assert!(!curl(&oracle, &[&plain]).status.success(), "there is no way around TLS");
    assert!(!curl(&oracle, &[&share.url]).status.success(), "an unknown authority");
    download(&oracle, &["--cacert", "ca-cert.pem", "-o", "got.raw", &share.url]);
    assert_eq!(share.exit_code(), Some(0));
    oracle.make("compare -f raw -F raw got.raw truth.raw");
}

#[test]
fn what_can_not_be_shared_is_refused_with_one_line() {
    let oracle = disk();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    for (arguments, words) in [
        (vec!["missing.qcow2"], "missing.qcow2"),
        (vec!["--expires", "soon", "disk.qcow2"], "--expires expects"),
        (vec!["--name", "a/b", "disk.qcow2"], "'a/b' is no name of a file"),
        (vec!["--name", ".", "disk.qcow2"], "'.' is no name of a file"),
        (vec!["--name", "..", "disk.qcow2"], "'..' is no name of a file"),
        (vec!["--tls-dir", "nowhere", "disk.qcow2"], "nowhere"),
        (vec!["--bind", "127.0.0.1", "--port", &port, "disk.qcow2"], "ddress"),
        (vec!["--bind", "no.such.host.invalid", "disk.qcow2"], "no.such.host.invalid"),
        (vec!["--bind", "", "disk.qcow2"], "--bind is empty"),
    ] {
        let run = Command::new(env!("CARGO_BIN_EXE_cowshed"))
            .arg("share")
            .args(&arguments)
            .current_dir(oracle.work())
            .output();
        let run = run.expect("our own binary runs");
        let errors = String::from_utf8_lossy(&run.stderr);
        let lines = errors.lines().filter(|line| !line.contains("warning")).count();
        assert_eq!((run.status.code(), lines), (Some(1), 1), "{arguments:?}: {errors}");
        assert!(errors.contains(words) && run.stdout.is_empty(), "{arguments:?}: {errors}");
    }
}

#[test]
fn other_machines_are_a_reason_to_warn() {
    let oracle = disk();
    let open = Share::start(&oracle, &["--bind", "0.0.0.0", "disk.qcow2"]);
    assert!(open.said().contains("any host that reaches 0.0.0.0 can read"), "{}", open.said());
    let closed = Share::start(&oracle, &["--quiet", "disk.qcow2"]);
    assert_eq!(closed.said(), "");
    credentials::make_credentials(&oracle.work());
    let encrypted = Share::start(&oracle, &["--quiet", "--bind", "0.0.0.0", "--tls-dir", ".", "disk.qcow2"]);
    assert!(encrypted.url.starts_with("https://"), "{}", encrypted.url);
    assert_eq!(encrypted.said(), "");
}

/// The sender's terminal shows a bar that goes to the end with the download.
#[test]
fn the_sender_sees_the_progress_of_a_download() {
    let oracle = disk();
    let command = format!("stty cols 100; exec {} share --once --no-digest disk.qcow2", env!("CARGO_BIN_EXE_cowshed"));
    let typescript = oracle.work().join("typescript");
    let mut terminal = Command::new("script");
    terminal.args(["-q", "-e", "-f", "-c", &command, "typescript"]).current_dir(oracle.work());
    let terminal = terminal.env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
    let mut terminal = terminal.expect("script runs: scripts/setup test installs it");
    let said = || String::from_utf8_lossy(&std::fs::read(&typescript).unwrap_or_default()).into_owned();
    let mut url = None;
    await_that("the URL", || {
        let found = said().lines().find(|line| line.contains("http://") && line.contains(".raw")).map(str::to_owned);
        url = found.map(|line| line[line.find("http://").unwrap_or(0)..].trim_end().to_owned());
        url.is_some()
    });
    download(&oracle, &["--limit-rate", "500M", "-o", "got.raw", &url.expect("a line")]);
    assert!(terminal.wait().expect("it ends").success(), "{}", said());
    let shown = said();
    let steps = |percent: &str| shown.contains(&format!("{percent}% "));
    let between = (1..100).filter(|percent| steps(&format!(" {percent}"))).count();
    assert!(shown.contains("sending [") && between > 0 && shown.contains("700 MiB"), "{shown}");
}
