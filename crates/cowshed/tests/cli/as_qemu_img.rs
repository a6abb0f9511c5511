// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Under the name qemu-img our output is qemu-img's: byte for byte, on the same images.

use crate::oracle::{self, Oracle};

/// We see the holes of its data file as zeroes, where qemu-img reports data (COMPAT.md).
const HOLES_SEEN: &str = "data.qcow2";

/// Images with every feature that `info`, `map`, `check` and `measure` report.
fn gallery(oracle: &Oracle) -> Vec<&'static str> {
    oracle.make("create -q -f raw base.raw 4M");
    oracle.io(&["write -P 9 512k 64k"], "base.raw");
    oracle.make("create -q -f qcow2 -b base.raw -F raw middle.qcow2");
    oracle.io(&["write -P 1 0 128k", "write -P 2 1M 64k", "write -c -P 3 2M 64k", "write -z 3M 64k"], "middle.qcow2");
    oracle.make("bitmap --add middle.qcow2 first");
    oracle.make("bitmap --add -g 1M middle.qcow2 second");
    oracle.make("bitmap --disable middle.qcow2 second");
    oracle.make("create -q -f qcow2 -b middle.qcow2 -F qcow2 top.qcow2 8M");
    oracle.make("create -q -f qcow2 snapshots.qcow2 8M");
    oracle.io(&["write -P 5 0 1M"], "snapshots.qcow2");
    oracle.make("snapshot -c one snapshots.qcow2");
    oracle.make("snapshot -c 'a name that is longer than its column' snapshots.qcow2");
    oracle.io(&["write -P 6 512k 1M"], "snapshots.qcow2");
    oracle.make(
        "create -q -f qcow2 -o extended_l2=on,cluster_size=128k,lazy_refcounts=on,compression_type=zstd ext.qcow2 1.5G",
    );
    oracle.io(&["write -P 7 1G 12k", "write -z 16k 8k", "write -P 8 200k 300k"], "ext.qcow2");
    oracle.make("create -q -f qcow2 -o compat=0.10 old.qcow2 1000000");
    oracle.io(&["write -P 1 64k 128k"], "old.qcow2");
    oracle.make("create -q -f qcow2 -o data_file=data.raw,data_file_raw=on data.qcow2 3M");
    oracle.make("create -q -f qcow2 -o data_file=data2.raw data2.qcow2 3M");
    oracle.io(&["write -P 3 1M 256k", "write -z 2M 64k"], "data2.qcow2");
    oracle.make("create -q -f qcow2 -o refcount_bits=1,cluster_size=4k narrow.qcow2 16M");
    oracle.io(&["write -P 3 1M 256k", "write -P 4 9M 1M", "write -P 4 3M 64k"], "narrow.qcow2");
    oracle.make("create -q -f qcow2 -o preallocation=metadata preallocated.qcow2 2M");
    oracle.make("create -q -f qcow2 empty.qcow2 0");
    std::fs::create_dir(oracle.work().join("sub")).expect("a folder");
    oracle.make("create -q -f qcow2 -b ../base.raw -F raw sub/overlay.qcow2");
    oracle.make("create -q -f qcow2 -u -b gone.raw -F raw orphan.qcow2 1M");
    vec![
        "base.raw",
        "middle.qcow2",
        "top.qcow2",
        "snapshots.qcow2",
        "ext.qcow2",
        "old.qcow2",
        "data.qcow2",
        "data2.qcow2",
        "narrow.qcow2",
        "preallocated.qcow2",
        "empty.qcow2",
        "sub/overlay.qcow2",
    ]
}

#[test]
fn info() {
    let oracle = Oracle::new();
    let images = gallery(&oracle);
    for image in images.into_iter().chain(["orphan.qcow2"]) {
        oracle.compare(&format!("info {image}"));
        oracle.compare(&format!("info --output=json {image}"));
    }
    oracle.compare("info --backing-chain top.qcow2");
    oracle.compare("info --backing-chain --output json top.qcow2");
    oracle.compare("info --backing-chain --output json base.raw");
    oracle.compare("info -U -f qcow2 top.qcow2");
    oracle.compare("info -f raw top.qcow2");
    oracle.compare("info --image-opts driver=qcow2,file.filename=top.qcow2");
    oracle.compare("info 'json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"top.qcow2\"}}'");
    oracle.verdict();
}

#[test]
fn info_of_encrypted_images() {
    let oracle = Oracle::new();
    oracle.make_patiently("create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 luks.qcow2 10M");
    oracle.make_patiently(
        "create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=aes,encrypt.key-secret=s aes.qcow2 10M",
    );
    oracle.make_patiently("create -q --object secret,id=s,data=abc -f qcow2 -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256,encrypt.cipher-alg=serpent-128 essiv.qcow2 10M");
    for image in ["luks.qcow2", "essiv.qcow2", "aes.qcow2"] {
        oracle.compare(&format!("info {image}"));
        oracle.compare(&format!("info --output=json {image}"));
    }
    oracle.verdict();
}

#[test]
fn map() {
    let oracle = Oracle::new();
    for image in gallery(&oracle).into_iter().filter(|image| *image != HOLES_SEEN) {
        oracle.compare(&format!("map {image}"));
        // QEMU also prints the place of subclusters that are not allocated in a cluster that is.
        if image != "ext.qcow2" {
            oracle.compare(&format!("map --output=json {image}"));
        }
    }
    oracle.compare("map --output=json --start-offset 1M --max-length 100 middle.qcow2");
    oracle.compare("map --output=json --start-offset=600k --max-length=3M top.qcow2");
    oracle.compare("map --start-offset=99M middle.qcow2");
    oracle.compare("map --output=json --start-offset=99M middle.qcow2");
    oracle.verdict();
}

#[test]
fn check() {
    let oracle = Oracle::new();
    for image in gallery(&oracle) {
        oracle.compare(&format!("check {image}"));
        oracle.compare(&format!("check --output=json {image}"));
    }
    oracle.compare("check -q narrow.qcow2");
    oracle.compare_refusal("check -r foo narrow.qcow2");
    oracle.compare_refusal("check -U -r all narrow.qcow2");
    oracle.verdict();
}

#[test]
fn measure() {
    let oracle = Oracle::new();
    for image in gallery(&oracle).into_iter().filter(|image| *image != HOLES_SEEN) {
        oracle.compare(&format!("measure {image}"));
        oracle.compare(&format!("measure -O qcow2 {image}"));
        oracle.compare(&format!("measure -O qcow2 -o cluster_size=4k --output=json {image}"));
    }
    oracle.compare("measure --size 1G -O qcow2");
    oracle.compare("measure --size 1.5T -O qcow2 -o extended_l2=on,cluster_size=2M --output=json");
    oracle.compare("measure --size 1G -O raw");
    oracle.compare("measure");
    oracle.compare("measure --size 1G base.raw");
    oracle.compare("measure -O foo --size 1G");
    oracle.verdict();
}

#[test]
fn compare() {
    let oracle = Oracle::new();
    gallery(&oracle);
    oracle.make("create -q -f raw short.raw 1M");
    oracle.make("create -q -f raw long.raw 2M");
    for images in [
        "middle.qcow2 middle.qcow2",
        "middle.qcow2 top.qcow2",
        "base.raw old.qcow2",
        "-s middle.qcow2 top.qcow2",
        "-s middle.qcow2 base.raw",
        "short.raw long.raw",
        "-s short.raw long.raw",
        "-q short.raw long.raw",
        "-q -s short.raw long.raw",
        "-f raw middle.qcow2 middle.qcow2",
        "middle.qcow2",
        "middle.qcow2 nofile",
    ] {
        oracle.compare(&format!("compare {images}"));
    }
    oracle.verdict();
}

#[test]
fn create() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 4M");
    oracle.make("create -q -f qcow2 base.qcow2 5M");
    for line in [
        "-f qcow2 a.qcow2 1M",
        "-f qcow2 -q a.qcow2 1M",
        "a.raw 1.3k",
        "-f raw -o preallocation=falloc,nocow=off a.raw 1M",
        "-f qcow2 -o preallocation=metadata,compat=v3,data_file=d.raw,data_file_raw=off,nocow=off a.qcow2 1M",
        "-f qcow2 -o backing_file=base.raw,backing_fmt=raw,size=2M,refcount_bits=8,compat=1.1 a.qcow2",
        "-f qcow2 -b base.qcow2 -F qcow2 a.qcow2",
        "-f qcow2 -u -b 'we,ird b' -F raw 'x 3,.qcow2' 1M",
        "-f qcow2 -o cluster_size=512 -o refcount_bits=64 a.qcow2 100M",
        "-f qcow2 -o extended_l2=on,cluster_size=64k,compression_type=zstd,lazy_refcounts=on a.qcow2 10G",
    ] {
        oracle.compare_writing(&format!("create {line}"), |_, _| {});
    }
    oracle.verdict();
}

/// Refusals of `create`: exit code and the line with the reason.
#[test]
fn create_refusals() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 4M");
    oracle.make("create -q -f qcow2 base.qcow2 5M");
    for line in [
        "",
        "x.raw",
        "x.raw 1M extra",
        "-f foo x 1M",
        "-f qcow2 -o bad=1 x.qcow2 1M",
        "-f qcow2 -b nofile -F raw x.qcow2",
        "-f qcow2 -o cluster_size=3k x.qcow2 1M",
        "-f qcow2 -o extended_l2=on,cluster_size=4k x.qcow2 1M",
        "-f qcow2 x.qcow2 7E",
        "-f qcow2 x.qcow2 100E",
        "-f qcow2 x.qcow2 1M -o size=2M",
        "-f qcow2 no/such/folder/x 1M",
        "-b base.qcow2 -F raw x",
    ] {
        oracle.compare_refusal(&format!("create {line}"));
    }
    oracle.verdict();
}

/// The messages of `resize`, and the image afterwards.
#[test]
fn resize() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 4M");
    oracle.make("create -q -f raw a.raw 4M");
    oracle.io(&["write -P 1 0 4M"], "a.qcow2");
    for line in [
        "a.qcow2 5M",
        "a.qcow2 +1M",
        "-q a.qcow2 +1M",
        "a.qcow2 4M",
        "a.qcow2 1M",
        "--shrink a.qcow2 1M",
        "--shrink a.qcow2 -1M",
        "--shrink a.qcow2 -- -1M",
        "a.qcow2 -99M",
        "a.qcow2 +x",
        "a.qcow2 100E",
        "--preallocation=foo a.qcow2 5M",
        "-f raw a.raw 6M",
        "-f raw --shrink a.raw 1M",
        "a.raw 5M",
    ] {
        oracle.compare_writing(&format!("resize {line}"), |theirs, own| {
            for name in ["a.qcow2", "a.raw"] {
                let format = name.split_once('.').expect("has a suffix").1;
                let (theirs, own) = (theirs.join(name), own.join(name));
                assert!(oracle.qemu.is_equal((&theirs, format), (&own, format)), "resize {line}: {name}");
            }
        });
    }
    for line in ["resize", "resize a.qcow2", "resize nofile 5M", "resize -f raw --preallocation=metadata a.raw 5M"] {
        oracle.compare_refusal(line);
    }
    oracle.verdict();
}

/// The targets of `convert` and `dd` read the same.
#[test]
fn convert_and_dd() {
    let oracle = Oracle::new();
    gallery(&oracle);
    for (line, target, format) in [
        ("convert middle.qcow2 out.raw", "out.raw", "raw"),
        ("convert -O qcow2 top.qcow2 out.qcow2", "out.qcow2", "qcow2"),
        ("convert -p -O qcow2 -c base.raw out.qcow2", "out.qcow2", "qcow2"),
        (
            "convert -O qcow2 -o cluster_size=4k,compression_type=zstd -c -W -m 4 ext.qcow2 out.qcow2",
            "out.qcow2",
            "qcow2",
        ),
        ("convert -S 0 old.qcow2 out.raw", "out.raw", "raw"),
        ("convert -O qcow2 base.raw old.qcow2 out.qcow2", "out.qcow2", "qcow2"),
        ("convert -O qcow2 -B middle.qcow2 -F qcow2 top.qcow2 out.qcow2", "out.qcow2", "qcow2"),
        ("dd if=middle.qcow2 of=out.raw", "out.raw", "raw"),
        ("dd -O qcow2 if=top.qcow2 of=out.qcow2 bs=64k skip=3 count=40", "out.qcow2", "qcow2"),
        ("dd if=middle.qcow2 of=out.raw bs=1M count=1 skip=99", "out.raw", "raw"),
    ] {
        let progress = line.contains(" -p ");
        let check = |theirs: &std::path::Path, own: &std::path::Path| {
            let (theirs, own) = (theirs.join(target), own.join(target));
            assert!(oracle.qemu.is_equal((&theirs, format), (&own, format)), "{line}");
            if format == "qcow2" {
                oracle.qemu.expect_clean(&own);
            }
        };
        match progress {
            // The number of steps is up to the tool; the end with 100 % is not.
            true => {
                let said = oracle.ours(&oracle.work(), &oracle::words(line));
                assert!(said.out.starts_with("    (0.00/100%)\r"), "{:?}", said.out);
                assert!(said.out.ends_with("    (100.00/100%)\r\n"), "{:?}", said.out);
            }
            false => oracle.compare_writing(line, check),
        }
    }
    oracle.verdict();
}

#[test]
fn convert_and_dd_refusals() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw base.raw 4M");
    oracle.make("create -q -f qcow2 a.qcow2 5M");
    for line in [
        "convert",
        "convert a.qcow2",
        "convert nofile out",
        "convert -O foo a.qcow2 out",
        "convert -n a.qcow2 out",
        "convert --target-is-zero a.qcow2 out",
        "convert -B a.qcow2 -O raw a.qcow2 out",
        "convert -c -O raw a.qcow2 out",
        "convert -t foo a.qcow2 out",
        "convert -T foo a.qcow2 out",
        "convert -C -S 4k a.qcow2 out",
        "convert -S 1 a.qcow2 out",
        "convert -n -o cluster_size=4k -O qcow2 base.raw a.qcow2",
        "convert -O qcow2 -B a.qcow2 base.raw out",
        "convert -O qcow2 -B a.qcow2 -F qcow2 a.qcow2 base.raw out",
        "convert --target-image-opts a.qcow2 out",
        "convert -F qcow2 a.qcow2 out",
        "convert -O qcow2 a.qcow2 no/such/out",
        "dd",
        "dd if=a.qcow2",
        "dd if=nofile of=out",
        "dd foo=1 if=a of=b",
        "dd if=a.qcow2 of=out bs=0",
    ] {
        oracle.compare_refusal(line);
    }
    oracle.verdict();
}

#[test]
fn snapshot() {
    let oracle = Oracle::new();
    gallery(&oracle);
    oracle.compare("snapshot -l -U snapshots.qcow2");
    oracle.compare("snapshot -l base.raw");
    oracle.compare("snapshot -l middle.qcow2");
    for line in ["snapshot -d one", "snapshot -a one", "snapshot -a 2", "snapshot -c three"] {
        oracle.compare_writing(&format!("{line} snapshots.qcow2"), |theirs, ours| {
            // The dates of new ones differ.
            for folder in [theirs, ours] {
                let listed = oracle.real(folder, &crate::oracle::words("check snapshots.qcow2"));
                assert_eq!(listed.code, Some(0), "{}", listed.out);
            }
            let compared = oracle.real(
                theirs,
                &["compare".into(), "snapshots.qcow2".into(), ours.join("snapshots.qcow2").to_str().unwrap().into()],
            );
            assert_eq!(compared.code, Some(0), "{line}: {}", compared.out);
        });
    }
    oracle.compare_refusal("snapshot -d none snapshots.qcow2");
    oracle.compare_refusal("snapshot -a none snapshots.qcow2");
    oracle.compare_refusal("snapshot -a 1 middle.qcow2");
    oracle.compare_refusal("snapshot -c one data.qcow2");
    oracle.compare_refusal("snapshot -c one -d two snapshots.qcow2");
    oracle.compare_refusal("snapshot");
    oracle.verdict();
}

#[test]
fn convert_of_a_snapshot() {
    let oracle = Oracle::new();
    gallery(&oracle);
    for name in ["one", "1", "snapshot.id=2", "snapshot.name=one"] {
        oracle.compare_writing(&format!("convert -l {name} -O raw snapshots.qcow2 out.raw"), |theirs, ours| {
            let read = |folder: &std::path::Path| std::fs::read(folder.join("out.raw")).expect("the output");
            assert!(read(theirs) == read(ours), "-l {name}");
        });
        oracle.compare(&format!("measure -l {name} -O qcow2 snapshots.qcow2"));
    }
    oracle.compare_refusal("convert -l snapshot.id=one -O raw snapshots.qcow2 out.raw");
    oracle.compare_refusal("convert -l one -O raw snapshots.qcow2 snapshots.qcow2 out.raw");
    oracle.verdict();
}

#[test]
fn commit_and_rebase() {
    let oracle = Oracle::new();
    gallery(&oracle);
    let same = |theirs: &std::path::Path, ours: &std::path::Path, names: &[&str]| {
        for name in names {
            let other = ours.join(name).to_str().expect("text path").to_owned();
            let compared = oracle.real(theirs, &["compare".into(), (*name).into(), other]);
            assert_eq!(compared.code, Some(0), "{name}: {}", compared.out);
        }
    };
    let overlay = ["sub/overlay.qcow2", "base.raw"];
    oracle.compare_writing("commit sub/overlay.qcow2", |theirs, ours| same(theirs, ours, &overlay));
    oracle.compare_writing("commit -q -d sub/overlay.qcow2", |theirs, ours| same(theirs, ours, &overlay));
    oracle.compare_writing("commit -b base.raw top.qcow2", |theirs, ours| same(theirs, ours, &["top.qcow2"]));
    oracle.compare_writing("rebase -b base.raw -F raw top.qcow2", |theirs, ours| same(theirs, ours, &["top.qcow2"]));
    oracle.compare_writing("rebase -b '' top.qcow2", |theirs, ours| same(theirs, ours, &["top.qcow2"]));
    oracle.compare_writing("rebase -u -b old.qcow2 -F qcow2 top.qcow2", |theirs, ours| {
        same(theirs, ours, &["top.qcow2"]);
    });
    for line in [
        "commit base.raw",
        "commit snapshots.qcow2",
        "commit -b none top.qcow2",
        "commit -b top.qcow2 top.qcow2",
        "rebase top.qcow2",
        "rebase -b base.raw top.qcow2",
        "rebase -b none.raw -F raw top.qcow2",
        "rebase -b base.raw -F nonsense top.qcow2",
        "rebase -b top.qcow2 -F qcow2 top.qcow2",
        "rebase -b old.qcow2 -F qcow2 -f raw base.raw",
    ] {
        oracle.compare_refusal(line);
    }
    oracle.verdict();
}

#[test]
fn a_guessed_raw_image_is_worth_a_warning() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw guessed.raw 4M");
    oracle.compare_writing("resize guessed.raw 8M", |_, _| {});
    oracle.compare_writing("resize -f raw guessed.raw 8M", |_, _| {});
    oracle.verdict();
}
