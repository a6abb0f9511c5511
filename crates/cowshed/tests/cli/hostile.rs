// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images made to do harm, one for each class of the known holes of disk-image tools, and their treatment by
//! `--untrusted` and `inspect`. Each attack is first shown to work where the image is trusted: else the test would
//! prove nothing.

use cowshed::{Disk, ErrorKind, OpenRequest, Policy};
use cowshed_layout::qcow2::Extension;
use cowshed_testkit::damage::Victim;
use cowshed_testkit::qemu::Qemu;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use tempfile::TempDir;

const SECRET: &[u8] = b"root:x:0:0:the secret of this machine";

struct Bench {
    folder: TempDir,
    qemu: Qemu,
}

impl Bench {
    fn new() -> Bench {
        let bench = Bench { folder: tempfile::tempdir().unwrap(), qemu: Qemu::system() };
        let mut secret = SECRET.to_vec();
        secret.resize(65536, b'.');
        std::fs::write(bench.path("secret"), secret).unwrap();
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// Runs the real qemu-img in the folder, to make images.
    fn make(&self, line: &str) {
        let output = Command::new("qemu-img").args(line.split(' ')).current_dir(self.folder.path()).output();
        let output = output.expect("qemu-img must be installed");
        assert!(output.status.success(), "qemu-img {line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn cowshed(&self, line: &str) -> Output {
        let program = env!("CARGO_BIN_EXE_cowshed");
        // Targets of the lines before are overwritten.
        let line = match line.strip_prefix("convert ") {
            Some(rest) if !rest.starts_with("-n ") => format!("convert --force {rest}"),
            _ => line.to_owned(),
        };
        Command::new(program).args(line.split(' ')).current_dir(self.folder.path()).output().unwrap()
    }

    fn expect_ok(&self, line: &str) {
        let output = self.cowshed(line);
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The command fails with an ordinary error that has this part, and nothing of the secret has come out.
    fn expect_refused(&self, line: &str, part: &str) {
        let output = self.cowshed(line);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(matches!(output.status.code(), Some(1 | 2)), "{line}: {:?} {error}", output.status);
        assert!(error.contains(part), "{line}: {error}");
        assert!(!contains_secret(&output.stdout) && !contains_secret(&output.stderr), "{line}");
        assert!(!self.leaked(), "{line}");
    }

    /// `out` holds the secret; it is taken away.
    fn leaked(&self) -> bool {
        let bytes = std::fs::read(self.path("out")).unwrap_or_default();
        let _ = std::fs::remove_file(self.path("out"));
        contains_secret(&bytes)
    }

    /// The verdict of `inspect` about `name`: exit code and JSON.
    fn inspect(&self, name: &str) -> (Option<i32>, serde_json::Value) {
        let output = self.cowshed(&format!("inspect --output=json {name}"));
        (output.status.code(), serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    fn victim(&self, name: &str) -> Victim {
        Victim::open(&self.path(name))
    }
}

fn contains_secret(bytes: &[u8]) -> bool {
    const PIECE: usize = 1 << 16;
    let is_secret = |bytes: &[u8]| bytes.windows(SECRET.len()).any(|window| window == SECRET);
    // Disks are zeroes for the most part, which one comparison passes over. A secret may lie across the end of a piece.
    bytes.chunks(PIECE).enumerate().any(|(index, piece)| {
        let start = (index * PIECE).saturating_sub(SECRET.len());
        piece != &[0; PIECE][..piece.len()] && is_secret(&bytes[start..index * PIECE + piece.len()])
    })
}

/// Verbs that read data, with the words before the image's name and after it.
const READERS: [(&str, &str); 5] = [
    ("convert -O raw --untrusted", " out"),
    ("compare --untrusted", " secret"),
    ("map --untrusted", ""),
    ("measure -O qcow2 --untrusted", ""),
    ("dd --untrusted", " of=out"),
];

fn line(verb: (&str, &str), allow: &str, name: &str) -> String {
    let name = if verb.0.starts_with("dd") { format!("if={name}") } else { name.to_owned() };
    format!("{}{allow} {name}{}", verb.0, verb.1)
}

/// An upload whose backing file is a file of the host: CVE-2015-5163; and, without a format, CVE-2008-2004.
#[test]
fn backing_file_disclosure() {
    let bench = Bench::new();
    let secret = bench.text("secret");
    bench.make(&format!("create -q -u -f qcow2 -F raw -b {secret} evil 64k"));
    bench.expect_ok("convert -O raw evil out");
    assert!(bench.leaked(), "the attack works on who trusts the image");
    for verb in READERS {
        bench.expect_refused(&line(verb, "", "evil"), &secret);
        bench.expect_refused(&line(verb, " --allow data-file,json", "evil"), &secret);
    }
    bench.expect_refused("info --untrusted --backing-chain evil", &secret);
    // These look at the image alone.
    bench.expect_ok("info --untrusted evil");
    bench.expect_ok("check --untrusted evil");
    bench.expect_ok("convert -O raw --untrusted --allow backing evil out");
    assert!(bench.leaked(), "what is allowed is opened");

    // Without a format the content of the backing file would choose it.
    bench.victim("evil").file.write_all_at(&0xffff_fff0u32.to_be_bytes(), 112).unwrap();
    bench.expect_refused("convert -O raw --untrusted --allow backing evil out", "forbids to guess");
    bench.expect_refused("info --allow backing evil", "needs --untrusted");
}

/// An upload whose data file is a file of the host, by name or by description: CVE-2024-4467, CVE-2024-32498.
#[test]
fn data_file_disclosure() {
    let bench = Bench::new();
    bench.make("create -q -f qcow2 -o data_file=data,data_file_raw=on evil 64k");
    std::fs::copy(bench.path("secret"), bench.path("data")).unwrap();
    bench.make("convert -n -O raw evil secret");
    bench.expect_ok("convert -O raw evil out");
    assert!(bench.leaked(), "the attack works on who trusts the image");
    for verb in READERS {
        bench.expect_refused(&line(verb, "", "evil"), "'data'");
    }
    bench.expect_refused("check --untrusted evil", "'data'");
    // This looks at the image alone.
    bench.expect_ok("info --untrusted evil");
    bench.expect_ok("convert -O raw --untrusted --allow data-file evil out");
    assert!(bench.leaked(), "what is allowed is opened");

    let victim = bench.victim("evil");
    let mut header = victim.header.clone();
    let name = format!(r#"json:{{"driver":"file","filename":"{}"}}"#, bench.text("data"));
    header.set_extension(Extension::DataFile(name.into_bytes()));
    victim.file.write_all_at(&header.encode().unwrap(), 0).unwrap();
    for allow in ["", " --allow backing,data-file"] {
        bench.expect_refused(&format!("map --untrusted{allow} evil"), "json:");
        bench.expect_refused(&format!("convert --untrusted{allow} -O raw evil out"), "json:");
    }
    // The name is that of a file, as in QEMU, with trust in the image or without.
    for options in ["", " --untrusted --allow data-file,json"] {
        bench.expect_refused(&format!("convert -O raw{options} evil out"), "No such file or directory");
    }
}

/// A VMDK descriptor that names files of the host, given as an image whose format is guessed: CVE-2022-47951.
#[test]
fn descriptor_of_another_format() {
    let bench = Bench::new();
    std::fs::create_dir(bench.path("sub")).unwrap();
    std::fs::write(bench.path("sub/extent"), vec![7; 65536]).unwrap();
    let describe = |name: &str| {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\n\
             RW 128 FLAT \"{name}\" 0\n"
        );
        std::fs::write(bench.path("sub/evil"), text).unwrap();
    };
    describe("extent");
    bench.expect_ok("convert -O raw sub/evil out");
    bench.expect_ok("convert --untrusted --allow extents -O raw sub/evil out");
    for name in [bench.text("secret").as_str(), "../secret"] {
        describe(name);
        for verb in ["convert -O raw sub/evil out", "convert --untrusted --allow extents -O raw sub/evil out"] {
            bench.expect_refused(verb, "not in its own folder");
        }
        let (code, json) = bench.inspect("sub/evil");
        assert_eq!((code, json["format"].as_str()), (Some(2), Some("vmdk")), "{json}");
    }
    std::os::unix::fs::symlink(bench.path("secret"), bench.path("sub/link")).unwrap();
    describe("link");
    bench.expect_refused("convert --untrusted --allow extents -O raw sub/evil out", "symbolic link");
}

/// In a folder of uploads the neighbour's file is in the descriptor's own folder.
#[test]
fn a_neighbours_upload() {
    let bench = Bench::new();
    std::fs::copy(bench.path("secret"), bench.path("neighbour.raw")).unwrap();
    for kind in ["monolithicFlat", "twoGbMaxExtentFlat", "custom"] {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"{kind}\"\n\
             RW 128 FLAT \"neighbour.raw\" 0\n"
        );
        std::fs::write(bench.path("evil"), text).unwrap();
        bench.expect_ok("convert -O raw evil out");
        assert!(bench.leaked(), "the attack works on who trusts the image");
        for verb in READERS {
            bench.expect_refused(&line(verb, "", "evil"), "'--allow extents' does");
            bench.expect_refused(&line(verb, " --allow backing,data-file,json,probe", "evil"), "neighbour.raw");
        }
        for verb in ["info --untrusted evil", "check --untrusted evil", "convert -f vmdk --untrusted -O raw evil out"] {
            bench.expect_refused(verb, "neighbour.raw");
        }
        let options = "driver=vmdk,extents=anywhere,file.filename=evil";
        bench.expect_refused(&format!("convert --untrusted -O raw --image-opts {options} out"), "neighbour.raw");
        let (code, json) = bench.inspect("evil");
        assert_eq!((code, json["verdict"].as_str()), (Some(2), Some("asks-for-files")), "{json}");
        assert_eq!(json["asks-for"][0]["role"], "extent", "{json}");
        bench.expect_ok("convert --untrusted --allow extents -O raw evil out");
        assert!(bench.leaked(), "what is allowed is opened");
    }
}

/// A disk that is nothing, whose reads show the reader's memory in other programs, is never opened on an image's word.
#[test]
fn null_disks_in_images() {
    let bench = Bench::new();
    // The format in the header counts more than the driver in the name.
    let wrong = r#"json:{"driver":"null-co","read-zeroes":false}"#;
    bench.make(&format!("create -q -u -f qcow2 -F raw -b {wrong} evil 64k"));
    bench.expect_refused("convert -O raw evil out", "driver 'raw' needs the option 'backing.file'");
    for (name, format) in [
        ("null-co://", "raw"),
        ("null-aio://", "raw"),
        (wrong, "null-co"),
        (r#"json:{"driver":"raw","file":{"driver":"null-aio"}}"#, "raw"),
        (r#"json:{"file.driver":"null-co"}"#, "raw"),
    ] {
        bench.make(&format!("create -q -u -f qcow2 -F {format} -b {name} evil 64k"));
        for verb in ["convert -O raw evil out", "map evil", "compare evil secret", "info --backing-chain evil"] {
            bench.expect_refused(verb, "a disk that is nothing");
        }
        bench.expect_refused("convert -O raw --untrusted --allow backing,json evil out", "a disk that is nothing");
        bench.expect_ok("info evil");
        bench.expect_refused(&format!("create -f qcow2 -F {format} -b {name} new 64k"), "a disk that is nothing");
    }
    // A disk that the user names is opened, and reads as zeroes.
    bench.expect_ok("convert -O raw --image-opts driver=null-co,size=64k,read-zeroes=off out");
    assert!(std::fs::read(bench.path("out")).unwrap().iter().all(|byte| *byte == 0));
}

/// A log of writes would be written to a file that the image names beside its backing file, with a commit.
#[test]
fn logs_of_writes_in_images() {
    let bench = Bench::new();
    let (base, victim) = (bench.path("base"), bench.path("victim"));
    std::fs::write(&base, [1; 65536]).unwrap();
    std::fs::write(&victim, [2; 65536]).unwrap();
    let file = |path: &std::path::Path| serde_json::json!({"driver": "file", "filename": path});
    let name = serde_json::json!({"driver": "blklogwrites", "file": file(&base), "log": file(&victim)});
    bench.make(&format!("create -q -u -f qcow2 -F blklogwrites -b json:{name} evil 64k"));
    for verb in ["convert -O raw evil out", "commit evil", "compare evil base", "info --backing-chain evil"] {
        bench.expect_refused(verb, "a log of writes");
    }
    bench.expect_refused("convert -O raw --untrusted --allow backing,json evil out", "a log of writes");
    bench.expect_ok("info evil");
    assert!(std::fs::read(&victim).unwrap() == [2; 65536], "the file that the image names as log");
}

/// An image whose backing file's name holds a driver that writes to a second file has nothing written there, and nothing
/// committed through it.
#[test]
fn drivers_with_a_second_file_in_images() {
    let bench = Bench::new();
    let (base, victim) = (bench.path("base"), bench.path("victim"));
    let file = |path: &std::path::Path| serde_json::json!({"driver": "file", "filename": path});
    let raw = |path: &std::path::Path| serde_json::json!({"driver": "raw", "file": file(path)});
    let cases = [
        (
            serde_json::json!({"driver": "copy-before-write", "file": raw(&base), "target": raw(&victim)}),
            "Block node is read-only",
            false,
        ),
        (
            serde_json::json!({"driver": "quorum", "vote-threshold": 1, "children": [raw(&base), raw(&victim)]}),
            "does not support reopening files",
            true,
        ),
        (
            serde_json::json!({"driver": "blkverify", "raw": file(&base), "test": raw(&victim)}),
            "does not support reopening files",
            true,
        ),
    ];
    for (name, words, reads) in cases {
        std::fs::write(&base, [1; 65536]).unwrap();
        std::fs::write(&victim, [1; 65536]).unwrap();
        bench.make(&format!(
            "create -q -u -f qcow2 -F raw -b json:{} evil 64k",
            serde_json::json!({"driver": "raw", "file": name})
        ));
        let before = std::fs::metadata(&victim).unwrap().modified().unwrap();
        for verb in ["convert -O raw --force evil out", "compare evil base", "info --backing-chain evil"] {
            match reads {
                true => bench.expect_ok(verb),
                false => bench.expect_refused(verb, words),
            }
        }
        let mut io = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let io = io.args(["io", "-f", "qcow2", "-c", "write -P 7 0 64k", "evil"]).current_dir(bench.folder.path());
        assert_eq!(io.output().unwrap().status.success(), reads, "{name}");
        bench.expect_refused("commit evil", words);
        let after = std::fs::metadata(&victim).unwrap().modified().unwrap();
        assert!(std::fs::read(&victim).unwrap() == [1; 65536] && before == after, "the second file of {name}");
        assert!(std::fs::read(&base).unwrap() == [1; 65536], "the base of {name}");
    }
}

/// The name of a data file is that of a file, never options or an address: QEMU takes it so.
#[test]
fn data_files_by_options() {
    let bench = Bench::new();
    let (data, victim) = (bench.path("data"), bench.path("victim"));
    std::fs::write(&victim, [1; 65536]).unwrap();
    let raw =
        |path: &std::path::Path| serde_json::json!({"driver": "raw", "file": {"driver": "file", "filename": path}});
    let options = serde_json::json!({"driver": "quorum", "vote-threshold": 1, "children": [raw(&data), raw(&victim)]});
    for name in [format!("json:{options}"), "file:victim".to_owned(), "nbd://127.0.0.1:1/x".to_owned()] {
        // Names are as long as the one that the image is made with.
        let placeholder = "d".repeat(name.len().min(255));
        bench.make(&format!("create -q -f qcow2 -o data_file={placeholder} evil 64k"));
        let image = bench.path("evil");
        let mut bytes = std::fs::read(&image).unwrap();
        let at = bytes.windows(placeholder.len()).position(|part| part == placeholder.as_bytes()).unwrap();
        let name = name.get(..placeholder.len()).unwrap_or(&name);
        bytes[at..at + name.len()].copy_from_slice(name.as_bytes());
        std::fs::write(&image, bytes).unwrap();
        bench.expect_refused("convert -O raw evil out", "No such file or directory");
        assert!(std::fs::read(&victim).unwrap() == [1; 65536], "{name}");
    }
}

/// Useless tables that the format allows, as in CVE-2014-0144, and larger ones.
#[test]
fn oversize_tables() {
    for (field, offset, value) in
        [("l1_size", 36, 4u32 << 20), ("refcount_table_clusters", 56, 128), ("nb_snapshots", 60, 65536)]
    {
        let bench = Bench::new();
        bench.make("create -q -f qcow2 evil 64M");
        let victim = bench.victim("evil");
        // At the end of the file there is room for any table: a hole.
        let end = 64 << 20;
        victim.file.set_len(2 * end).unwrap();
        victim.file.write_all_at(&value.to_be_bytes(), offset).unwrap();
        match field {
            "l1_size" => victim.set_word(40, end),
            "refcount_table_clusters" => victim.set_word(48, end),
            _ => victim.set_word(64, end),
        }
        for verb in ["map --untrusted evil", "info --untrusted evil", "convert --untrusted -O raw evil out"] {
            bench.expect_refused(verb, field);
        }
        let (code, json) = bench.inspect("evil");
        assert_eq!((code, json["verdict"].as_str()), (Some(2), Some("suspicious")), "{json}");
        assert!(json["suspicions"].to_string().contains(field), "{json}");
    }
    let bench = Bench::new();
    bench.make("create -q -f qcow2 -o cluster_size=2M evil 100T");
    bench.expect_ok("info evil");
    bench.expect_refused("info --untrusted evil", "size");
    // Past the limits of the format it is never opened, trusted or not.
    bench.victim("evil").file.write_all_at(&[0xff; 4], 36).unwrap();
    bench.expect_refused("info evil", "l1_size");
    assert_eq!(bench.inspect("evil").0, Some(2));
}

/// Numbers of the header at and past the edge, the class of CVE-2014-0143 to -0147: one clear line from each verb.
#[test]
fn impossible_headers() {
    const HEADER: [(&str, u64, usize); 12] = [
        ("cluster_bits", 20, 4),
        ("size", 24, 8),
        ("crypt_method", 32, 4),
        ("l1_size", 36, 4),
        ("l1_table_offset", 40, 8),
        ("refcount_table_offset", 48, 8),
        ("refcount_table_clusters", 56, 4),
        ("nb_snapshots", 60, 4),
        ("snapshots_offset", 64, 8),
        ("refcount_order", 96, 4),
        ("header_length", 100, 4),
        ("backing_file_size", 16, 4),
    ];
    let bench = Bench::new();
    bench.make("create -q -f qcow2 good 64M");
    bench.make("snapshot -c one good");
    let good = std::fs::read(bench.path("good")).unwrap();
    for (field, offset, width) in HEADER {
        for value in [u64::MAX, 1 << (width * 8 - 1), (1 << (width * 8 - 1)) - 1] {
            let mut image = good.clone();
            let at = offset as usize;
            image[at..at + width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
            if field == "backing_file_size" {
                image[8..16].copy_from_slice(&300u64.to_be_bytes());
            }
            std::fs::write(bench.path("evil"), image).unwrap();
            for verb in ["info evil", "check --untrusted evil", "convert --untrusted -O raw evil out"] {
                bench.expect_refused(verb, "evil");
            }
            let (code, json) = bench.inspect("evil");
            assert_eq!((code, json["verdict"].as_str()), (Some(2), Some("suspicious")), "{field} {value:#x}: {json}");
        }
    }
}

/// One compressed cluster that every entry of the table names.
#[test]
fn decompression_bomb() {
    const CLUSTER_BYTES: u64 = 65536;
    let bench = Bench::new();
    std::fs::write(bench.path("source"), vec![7; 64 << 20]).unwrap();
    bench.make("convert -c -f raw -O qcow2 source evil");
    let victim = bench.victim("evil");
    let entry = victim.word(victim.l2_entry(0));
    (0..1024).for_each(|cluster| victim.set_word(victim.l2_entry(cluster), entry));
    let policy = Policy { max_decompressed_bytes: 16 * CLUSTER_BYTES, ..Policy::untrusted() };
    let disk = Disk::open(OpenRequest::file(bench.text("evil")).policy(policy)).unwrap();
    let mut cluster = vec![0; CLUSTER_BYTES as usize];
    for index in 0..16 {
        disk.blocking().read(index * CLUSTER_BYTES, &mut cluster).unwrap();
        assert!(cluster.iter().all(|byte| *byte == 7));
    }
    let error = disk.blocking().read(16 * CLUSTER_BYTES, &mut cluster).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
    assert!(error.to_string().contains("decompressed") && error.to_string().contains("evil"), "{error}");
    disk.close().unwrap();
    bench.expect_ok("convert -O raw --untrusted evil out");
}

/// Chains that never end, or not soon.
#[test]
fn cyclic_and_long_chains() {
    let bench = Bench::new();
    bench.make("create -q -u -f qcow2 -F qcow2 -b b a 64k");
    bench.make("create -q -u -f qcow2 -F qcow2 -b a b 64k");
    bench.make("create -q -u -f qcow2 -F qcow2 -b ./self self 64k");
    for (allow, name) in [("", "a"), ("", "self"), (" --untrusted --allow backing", "a")] {
        bench.expect_refused(&format!("convert{allow} -O raw {name} out"), "loops");
        bench.expect_refused(&format!("info{allow} --backing-chain {name}"), "loops");
    }
    bench.make("create -q -f qcow2 layer0 64k");
    for layer in 1..20 {
        bench.make(&format!("create -q -u -f qcow2 -F qcow2 -b layer{} layer{layer} 64k", layer - 1));
    }
    bench.expect_ok("map layer19");
    bench.expect_ok("map --untrusted --allow backing layer15");
    bench.expect_refused("map --untrusted --allow backing layer16", "longer than 16");
}

#[test]
fn parents_of_other_formats_that_loop_or_never_end() {
    let bench = Bench::new();
    bench.make("create -q -f vmdk layer00 1M");
    for layer in 1..=16 {
        bench.make(&format!("create -q -f vmdk -F vmdk -b layer{:02} layer{layer:02}", layer - 1));
    }
    bench.expect_ok("map layer16");
    bench.expect_ok("map --untrusted --allow backing layer15");
    bench.expect_refused("map --untrusted --allow backing layer16", "longer than 16");
    for (name, parent) in [("one.vmdk", "two.vmdk"), ("two.vmdk", "one.vmdk"), ("own.vmdk", "own.vmdk")] {
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=1\ncreateType=\"custom\"\n\
             parentFileNameHint=\"{parent}\"\nRW 2048 ZERO\n"
        );
        std::fs::write(bench.path(name), text).unwrap();
    }
    for (allow, name) in [("", "one.vmdk"), ("", "own.vmdk"), (" --untrusted --allow backing", "one.vmdk")] {
        bench.expect_refused(&format!("convert{allow} -f vmdk -O raw {name} out"), "loops");
        bench.expect_refused(&format!("info{allow} --backing-chain {name}"), "loops");
    }
    // A VHD that is its own parent, by its UUID as well.
    let sample = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../testkit/images/windows-fat-differential.vhd.gz");
    let output = Command::new("gzip").arg("-dc").arg(sample).output().unwrap();
    let mut child = output.stdout;
    let header = u64::from_be_bytes(child[16..24].try_into().unwrap()) as usize;
    let end = child.len() - 512;
    let uuid = child[end + 68..end + 84].to_vec();
    child[header + 40..header + 56].copy_from_slice(&uuid);
    child[header + 36..header + 40].fill(0);
    let sum: u32 = child[header..header + 1024].iter().map(|byte| u32::from(*byte)).sum();
    child[header + 36..header + 40].copy_from_slice(&(!sum).to_be_bytes());
    std::fs::write(bench.path("fat-parent.vhd"), child).unwrap();
    for allow in ["", " --untrusted --allow backing"] {
        bench.expect_refused(&format!("convert{allow} -f vpc -O raw fat-parent.vhd out"), "loops");
        bench.expect_refused(&format!("info{allow} -f vpc --backing-chain fat-parent.vhd"), "loops");
    }
}

/// The verdict of `inspect`, which opens nothing but the file.
#[test]
fn inspection() {
    let bench = Bench::new();
    bench.make("create -q -f qcow2 good 64M");
    bench.make("create -q -f raw plain 1M");
    bench.make("create -q -u -f qcow2 -F raw -b /does/not/exist asks 64k");
    bench.make("create -q -f qcow2 -o data_file=data parted 64k");
    for (name, code, verdict) in [
        ("good", 0, "harmless"),
        ("plain", 0, "harmless"),
        ("asks", 2, "asks-for-files"),
        ("parted", 2, "asks-for-files"),
    ] {
        let (status, json) = bench.inspect(name);
        assert_eq!((status, json["verdict"].as_str()), (Some(code), Some(verdict)), "{name}: {json}");
        assert_eq!(bench.cowshed(&format!("inspect {name}")).status.code(), Some(code));
    }
    let (_, json) = bench.inspect("asks");
    assert_eq!(json["asks-for"][0]["name"].as_str(), Some("/does/not/exist"));
    assert_eq!(json["asks-for"][0]["format"].as_str(), Some("raw"));
    assert_eq!(bench.cowshed("inspect absent").status.code(), Some(1));

    // A name that would command the terminal is shown, not sent to it.
    let victim = bench.victim("asks");
    let mut header = victim.header.clone();
    header.backing_file = Some(b"json:\x1b]0;owned\x07".to_vec());
    header.compatible_features |= 1 << 60;
    victim.file.write_all_at(&header.encode().unwrap(), 0).unwrap();
    let (code, json) = bench.inspect("asks");
    assert_eq!((code, json["verdict"].as_str()), (Some(2), Some("suspicious")), "{json}");
    assert!(json["unknown-features"].to_string().contains("compatible bit 60"), "{json}");
    let output = bench.cowshed("inspect asks");
    assert!(!output.stdout.contains(&0x1b), "{output:?}");

    // Wherever a file ends, there is a verdict; with less than magic and version it is no qcow2.
    let whole = std::fs::read(bench.path("good")).unwrap();
    for len in [0usize, 4, 8, 71, 72, 103, 104, 111, 200, 65535] {
        std::fs::write(bench.path("cut"), &whole[..len]).unwrap();
        let code = bench.cowshed("inspect cut").status.code();
        assert_eq!(code, Some(if len < 8 { 0 } else { 2 }), "{len} bytes");
    }
    bench.qemu.expect_clean(&bench.path("good"));
}

/// Every limit is an option, in both directions.
#[test]
fn limits_by_option() {
    let bench = Bench::new();
    bench.make("create -q -f qcow2 disk 64M");
    bench.make("create -q -u -f qcow2 -F qcow2 -b disk top 64M");
    for name in ["one", "two"] {
        bench.make(&format!("snapshot -c {name} disk"));
    }
    std::fs::write(bench.path("source"), vec![7; 1 << 20]).unwrap();
    bench.make("convert -c -f raw -O qcow2 source packed");
    bench.make("create -q -f qcow2 -o cluster_size=512 wide 1G");
    for (limit, least, image, part) in [
        ("chain-depth", 2, "top", "longer than 1 images"),
        ("virtual-size", 64 << 20, "disk", "size"),
        ("table-bytes", 256 << 10, "wide", "l1_size"),
        ("snapshots", 2, "disk", "nb_snapshots"),
        ("decompressed-bytes", 1 << 20, "packed", "decompressed"),
    ] {
        let verb =
            |value: u64| format!("convert --untrusted --allow backing --limit {limit}={value} -O raw {image} out");
        bench.expect_ok(&verb(least));
        bench.expect_refused(&verb(least - 1), part);
    }
    // Also beyond the limits of --untrusted.
    bench.make("create -q -f qcow2 -o cluster_size=2M huge 100T");
    bench.expect_refused("info --untrusted huge", "size");
    bench.expect_ok("info --untrusted --limit virtual-size=100T,table-bytes=32M huge");
    bench.expect_refused("info --untrusted --limit depth=1 huge", "no limit 'depth'");
    bench.expect_refused("info --limit chain-depth=1 huge", "needs --untrusted");
    bench.expect_refused("info --time-limit 1 huge", "needs --untrusted");
}

/// Work that would never end is ended.
#[test]
fn time_limits() {
    let bench = Bench::new();
    bench.make("create -q -f qcow2 disk 64M");
    for verb in READERS.map(|verb| (verb.0.replace("--untrusted", "--untrusted --time-limit 0"), verb.1)) {
        bench.expect_refused(&line((&verb.0, verb.1), "", "disk"), "time limit of 0 s");
    }
    for verb in ["info", "check", "check -r all"] {
        bench.expect_refused(&format!("{verb} --untrusted --time-limit 0 disk"), "time limit of 0 s");
    }
    bench.expect_refused("resize --untrusted --time-limit 0 disk 65M", "time limit of 0 s");
    bench.expect_refused("info --untrusted --time-limit soon disk", "Invalid time limit");
    // At this rate it would take a minute.
    std::fs::write(bench.path("source"), vec![7; 64 << 20]).unwrap();
    let slow = "convert --untrusted --time-limit 0.5 -r 1M -f raw -O raw source out";
    bench.expect_refused(slow, "time limit of 0.5 s");
    bench.expect_ok("compare --untrusted --time-limit 600 disk disk");
}

/// A target that is there already is a stranger's as much as the source is. The files below a backing file are named by
/// that file, not by the user.
#[test]
fn targets_are_not_trusted_either() {
    let bench = Bench::new();
    let secret = bench.text("secret");
    bench.make("create -q -f raw source 64k");
    bench.make(&format!("create -q -u -f qcow2 -F raw -b {secret} evil 64k"));
    bench.expect_refused("convert -n --untrusted -O qcow2 source evil", &secret);
    bench.expect_refused("convert --untrusted -O qcow2 -B evil -F qcow2 source out", &secret);
    bench.expect_ok("convert --untrusted --allow backing -O qcow2 -B evil -F qcow2 source out");
    bench.make("create -q -f qcow2 base 64k");
    bench.expect_ok("convert --untrusted -O qcow2 -B base -F qcow2 source out");
}

/// Whatever the command line names can be used by a confined process.
#[test]
fn confined_work() {
    let bench = Bench::new();
    bench.make("create -q -f qcow2 disk 1M");
    std::fs::create_dir(bench.path("sub")).unwrap();
    bench.expect_ok("convert --untrusted -O qcow2 -o data_file=sub/data,data_file_raw=on disk sub/image");
    bench.expect_ok("convert --untrusted -O qcow2 disk sub/image");
    bench.expect_ok("convert --untrusted -c -O qcow2 disk sub/packed");
    bench.expect_ok("resize --untrusted sub/image 2M");
    bench.expect_ok("dd --untrusted if=sub/image of=sub/blocks bs=64k count=1");
    bench.expect_ok("check --untrusted -r all --undo-log sub/log sub/image");
    bench.expect_ok("check --untrusted --undo sub/log sub/image");
    bench.expect_ok("compare --untrusted disk sub/packed");
    bench.expect_ok("map --untrusted --image-opts driver=qcow2,file.filename=disk");
    // Every codec, cipher, cache and format.
    std::fs::write(bench.path("source"), vec![7; (1 << 20) + 700]).unwrap();
    std::fs::write(bench.path("key"), b"secret").unwrap();
    let secret = "--object secret,id=k,file=key";
    for made in [
        "-O qcow2 -c -o compression_type=zstd",
        "-O qcow2 -o extended_l2=on",
        "-O qcow2 -t none -T none",
        "-O raw -t none -T none -S 0",
        "-O qcow2 -o encrypt.format=luks,encrypt.key-secret=k,encrypt.iter-time=10",
        "-O luks -o key-secret=k,iter-time=10",
    ] {
        bench.expect_ok(&format!("convert --untrusted {secret} -f raw {made} source sub/made"));
    }
    for format in ["vmdk", "vdi", "vpc", "vhdx"] {
        bench.make(&format!("convert -f raw -O {format} source sub/foreign"));
        bench.expect_ok("convert --untrusted -O qcow2 sub/foreign sub/made");
        bench.expect_ok("info --untrusted sub/foreign");
    }
    bench.expect_ok("measure --untrusted -O qcow2 disk");
    bench.expect_ok("snapshot --untrusted -c one disk");
    bench.expect_ok("snapshot --untrusted -l disk");
    bench.expect_ok("bitmap --untrusted --add disk b");
    bench.expect_ok("amend --untrusted -o lazy_refcounts=on disk");
    bench.expect_ok("rescue --untrusted disk sub/rescued");
    bench.expect_ok("bench --untrusted -c 100 disk");
    let mut io = Command::new(env!("CARGO_BIN_EXE_cowshed"));
    io.args(["io", "--untrusted", "-c", "write 0 64k", "disk"]).current_dir(bench.folder.path());
    assert!(io.status().unwrap().success());
    // With progress, on a terminal.
    let line =
        format!("{} convert --force --untrusted -p -f raw -O qcow2 source sub/made", env!("CARGO_BIN_EXE_cowshed"));
    let terminal = Command::new("script").args(["-qec", &line, "/dev/null"]).current_dir(bench.folder.path()).output();
    let terminal = terminal.expect("util-linux has it");
    assert!(terminal.status.success() && !terminal.stdout.is_empty(), "{terminal:?}");
    bench.make("create -q -f qcow2 -b disk -F qcow2 top");
    bench.expect_ok("info --untrusted --allow backing --backing-chain top");
    let (_, json) = bench.inspect("disk");
    let confined = &json["confinement"];
    assert_ne!(confined["files"], "none", "this test needs Linux 5.13 with Landlock enabled: {json}");
    assert_eq!(confined["system-calls"], "full", "{json}");
}

/// The kernel reports of the running process that it is confined.
#[test]
fn the_process_is_confined() {
    let bench = Bench::new();
    std::fs::write(bench.path("source"), vec![7; 64 << 20]).unwrap();
    // At this rate it would take a minute.
    let mut child = Command::new(env!("CARGO_BIN_EXE_cowshed"))
        .args("convert --force --untrusted -r 1M -f raw -O qcow2 source out".split(' '))
        .current_dir(bench.folder.path())
        .spawn()
        .unwrap();
    cowshed_testkit::waiting::await_that("the target is there", || {
        assert!(child.try_wait().unwrap().is_none(), "it runs");
        bench.path("out").exists()
    });
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let value = |key: &str| {
        let line = status.lines().find(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{key} in {status}"));
        line[key.len()..].trim().to_owned()
    };
    assert_eq!((value("NoNewPrivs:").as_str(), value("Seccomp:").as_str()), ("1", "2"));
    child.kill().unwrap();
    child.wait().unwrap();
}
