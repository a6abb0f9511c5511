// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Short runs of commands beside the real qemu-img, each tool on its own copy: where names, sizes and keys come from another
//! place than the plain case has them.

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
    // What was kept is seen over no base at all.
    oracle.compare_session(&[&there, "rebase -u -b '' t.qcow2"], &[("t.qcow2", "qcow2")]);
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
