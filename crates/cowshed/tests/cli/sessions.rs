// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short runs of commands beside the real qemu-img, each tool on its own copy. Names, sizes and keys come from other
//! places than in the plain case.

use crate::oracle::{Oracle, words};

#[test]
fn a_size_of_zero_is_no_size_to_amend() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 a.qcow2 1M");
    oracle.io(&["write -P 5 0 1M"], "a.qcow2");
    oracle.make("create -q -f qcow2 -o data_file=d.raw d.qcow2 1M");
    oracle.io(&["write -P 6 0 1M"], "d.qcow2");
    for line in ["amend -o size=0 a.qcow2", "amend -o size=0,lazy_refcounts=on a.qcow2", "amend -o size=2M a.qcow2"] {
        oracle.compare_session(&[line], &[("a.qcow2", "qcow2")]);
    }
    oracle.compare_session(&["amend -o size=0 d.qcow2"], &[("d.raw", "raw")]);
    oracle.verdict();
}

#[test]
fn raw_files_get_the_very_length() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw y 1M");
    let raw = [("y", "raw")];
    for size in ["2001", "777", "+3", "1048577", "+1000", "-5"] {
        oracle.compare_session(&[&format!("resize -f raw --shrink y -- {size}")], &raw);
    }
    let odd = "resize -q -f raw --shrink y 2001";
    for more in ["y +3", "--preallocation=full y 2777", "--preallocation=falloc y 3777", "--shrink y -- -776"] {
        oracle.compare_session(&[odd, &format!("resize -f raw {more}")], &raw);
    }
    oracle.compare_session(
        &[odd, "convert -f raw -O raw y z", "compare -f raw -F raw y z"],
        &[("y", "raw"), ("z", "raw")],
    );
    oracle.verdict();
}

#[test]
fn a_data_file_follows_its_disk() {
    let oracle = Oracle::new();
    for raw in ["off", "on"] {
        oracle.make(&format!("create -q -f qcow2 -o data_file={raw}.data,data_file_raw={raw} {raw}.qcow2 1M"));
        oracle.io(&["write -P 5 0 1M"], &format!("{raw}.qcow2"));
    }
    for raw in ["off", "on"] {
        let data = format!("{raw}.data");
        let show = format!("convert {raw}.qcow2 -O raw out");
        let images = [(data.as_str(), "raw"), ("out", "raw")];
        let grown = format!("resize {raw}.qcow2 5M");
        oracle.compare_session(&[&grown, &show], &images);
        oracle.compare_session(&[&grown, &format!("resize --shrink {raw}.qcow2 2M"), &show], &images);
        oracle.compare_session(&[&format!("resize --shrink {raw}.qcow2 512k"), &grown, &show], &images);
        oracle.compare_session(&[&format!("amend -o size=7M {raw}.qcow2"), &show], &images);
    }
    // Its name taken out of the header, and back again with the file at hand.
    let named = "--image-opts driver=qcow2,file.filename=off.qcow2,data-file.driver=file,data-file.filename=off.data";
    let lines =
        ["amend -o data_file= off.qcow2", "info off.qcow2", "info --output=json off.qcow2", &format!("check {named}")];
    oracle.compare_session(&lines, &[("off.data", "raw")]);
    oracle.verdict();
}

#[test]
fn amend_takes_no_backing_file_but_the_one_there_is() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 alone 1M");
    oracle.make("create -q -f qcow2 -b alone -F qcow2 above 1M");
    for image in ["alone", "above"] {
        for file in ["", "backing_file=,", "backing_file=alone,", "backing_file=other,"] {
            for format in ["", "backing_fmt=,", "backing_fmt=qcow2,", "backing_fmt=raw,"] {
                let line = format!("amend -o {file}{format}lazy_refcounts=on {image}");
                oracle.compare_session(&[&line], &[(image, "qcow2")]);
            }
        }
    }
    oracle.verdict();
}

#[test]
fn commas_in_the_names_of_snapshots() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 n 1M");
    for (number, name) in ["a,b", "a", "a,,b", "b,snapshot.id=1"].iter().enumerate() {
        oracle.io(&[&format!("write -P {} 0 1M", number + 1)], "n");
        oracle.make(&format!("snapshot -c {name} n"));
    }
    for text in [
        "a,b",
        "a,,b",
        "snapshot.name=a,,b",
        "snapshot.name=a,,,,b",
        "snapshot.name=a,snapshot.id=2",
        "snapshot.id=1,snapshot.name=a,,b",
        "snapshot.id=2,snapshot.name=a,,b",
        "snapshot.name=b,,snapshot.id=1",
        "snapshot.name=a,",
        "snapshot.name=",
        "b,snapshot.id=1",
    ] {
        // Refused, it leaves the old file.
        let lines = [
            "create -q -f raw o 1000",
            &format!("convert -l {text} -O raw n o"),
            &format!("measure -l {text} -O raw n"),
        ];
        oracle.compare_session(&lines, &[("o", "raw")]);
    }
    oracle.compare_refusal("convert -l snapshot.name=a,b=c -O raw n o");
    oracle.compare_refusal("measure -l snapshot.name=a,b=c -O raw n");
    oracle.verdict();
}

/// The name of the base is one of the chain's, as the headers have it, and not one of the working directory.
#[test]
fn commit_finds_its_base_from_the_images_folder() {
    let oracle = Oracle::new();
    std::fs::create_dir(oracle.work().join("s")).unwrap();
    oracle.make("create -q -f qcow2 base 1M");
    oracle.make("create -q -f qcow2 -b ../base -F qcow2 s/base 1M");
    oracle.make("create -q -f qcow2 -b base -F qcow2 s/t 1M");
    oracle.make("create -q -f qcow2 s/only 1M");
    oracle.make("create -q -f qcow2 -b only -F qcow2 s/u 1M");
    oracle.io(&["write -P 7 0 64k"], "s/t");
    oracle.io(&["write -P 8 64k 64k"], "s/base");
    oracle.io(&["write -P 9 0 64k"], "s/u");
    std::os::unix::fs::symlink("s/t", oracle.work().join("link")).unwrap();
    let images = [("base", "qcow2"), ("s/base", "qcow2"), ("s/only", "qcow2"), ("s/u", "qcow2")];
    for line in ["-b base s/t", "-b ../base s/t", "-b only s/u", "-d -b only s/u", "-b base link", "s/t"] {
        oracle.compare_session(&[&format!("commit {line}")], &images);
    }
    // Refused, with a sentence of ours behind theirs; nothing is written.
    for line in ["commit -b s/only s/u", "commit -b nothing s/t", "commit -b t s/t"] {
        oracle.compare_refusal(line);
    }
    oracle.verdict();
}

#[test]
fn rebase_gives_the_new_base_its_key() {
    const SECRET: &str = "--object secret,id=s,data=geheim";
    let oracle = Oracle::new();
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    oracle.make_patiently(&format!("create -q -f qcow2 {SECRET} -o {options} nb.qcow2 1M"));
    oracle.make("create -q -f qcow2 ob.qcow2 1M");
    oracle.io(&["write -P 3 0 512k"], "ob.qcow2");
    oracle.make("create -q -f qcow2 -b ob.qcow2 -F qcow2 t.qcow2 1M");
    oracle.io(&["write -P 4 128k 64k"], "t.qcow2");
    let base = r#"json:{"driver":"qcow2","encrypt.key-secret":"s","file.driver":"file","file.filename":"nb.qcow2"}"#;
    let there = format!("rebase {SECRET} -b {base} -F qcow2 t.qcow2");
    // The kept data shows without any base.
    oracle.compare_session(&[&there, "rebase -u -b '' t.qcow2"], &[("t.qcow2", "qcow2")]);
    oracle.verdict();
}

/// Stretches where both bases read as zeroes are passed over; a run that begins or ends beside one isn't.
#[test]
fn rebase_between_sparse_bases() {
    let oracle = Oracle::new();
    oracle.make("create -q -f raw short.raw 6292480");
    oracle.make("create -q -f qcow2 old 9M");
    oracle.make("create -q -f qcow2 -o cluster_size=4k new 24M");
    oracle.make("create -q -f qcow2 none 5M");
    let writes = |at: &[&str]| at.iter().map(|at| format!("write -P 5 {at}")).collect::<Vec<_>>();
    for (image, at) in [
        ("short.raw", &["2096640 1024", "6292000 480"][..]),
        ("old", &["0 512", "2M 4k", "4193792 1k", "8M 512"]),
        ("new", &["2M 4k", "3M 64k", "6M 64k", "8M 1k", "20M 64k"]),
    ] {
        let writes = writes(at);
        oracle.io(&writes.iter().map(String::as_str).collect::<Vec<_>>(), image);
    }
    for (base, format) in [("short.raw", "raw"), ("old", "qcow2"), ("none", "qcow2"), ("new", "qcow2")] {
        for (cluster_size, size) in [("64k", "9M"), ("512", "5M"), ("2M", "30M")] {
            oracle.make(&format!("create -q -f qcow2 -o cluster_size={cluster_size} -b {base} -F {format} t {size}"));
            oracle.io(&["write -P 7 3M 1k", "write -z 2M 64k"], "t");
            for to in ["-b new -F qcow2", "-b short.raw -F raw", "-b ''"] {
                // The kept data shows without any base.
                oracle.compare_session(&[&format!("rebase {to} t"), "rebase -u -b '' t"], &[("t", "qcow2")]);
            }
        }
    }
    oracle.verdict();
}

/// `rebase -c` is younger than the installed qemu-img.
#[test]
fn rebase_compresses_the_last_part_of_a_cluster_too() {
    for (size, options) in [(8_388_096, ""), (1_000_448, "-o compat=0.10"), (999_936, "-o compression_type=zstd")] {
        let oracle = Oracle::new();
        oracle.make(&format!("create -q -f raw b.raw {size}"));
        oracle.io(&[&format!("write -P 5 0 {size}")], "b.raw");
        oracle.make(&format!("create -q -f qcow2 {options} -b b.raw -F raw t.qcow2"));
        let said = oracle.ours(&oracle.work(), &words("rebase -c -f qcow2 -b '' t.qcow2"));
        assert_eq!(said.code, Some(0), "{}", said.err);
        let check = oracle.qemu.check(&oracle.work().join("t.qcow2"), "qcow2").json;
        let clusters = u64::div_ceil(size, 64 << 10);
        assert_eq!(check["compressed-clusters"], clusters, "{options}: {check}");
        oracle.make("convert -f qcow2 -O raw t.qcow2 back.raw");
        let read = |name: &str| std::fs::read(oracle.work().join(name)).unwrap();
        assert!(read("back.raw") == read("b.raw"), "{options}");
    }
}
