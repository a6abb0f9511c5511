// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands that qemu-img's manual describes, as a table. Both tools run the same lines, and give the same words,
//! exit codes and images.

use crate::oracle::{Oracle, words};

/// An example of the manual.
struct Example {
    /// Run by the real tool alone, before.
    given: &'static [&'static str],
    /// qemu-io commands on an image, before.
    filled: &'static [(&'static str, &'static [&'static str])],
    /// Run by both.
    lines: &'static [&'static str],
    /// The files that are compared afterwards.
    images: &'static [(&'static str, &'static str)],
}

const DISK: &[&str] = &["create -q -f qcow2 disk.qcow2 4M"];
const DISK_FILLED: &[(&str, &[&str])] =
    &[("disk.qcow2", &["write -P 5 0 1M", "write -P 6 2M 300k", "write -z 3M 64k"])];
const CHAIN: &[&str] = &[
    "create -q -f qcow2 base.qcow2 4M",
    "create -q -f qcow2 -b base.qcow2 -F qcow2 snap1.qcow2",
    "create -q -f qcow2 -b snap1.qcow2 -F qcow2 snap2.qcow2 5M",
];
const CHAIN_FILLED: &[(&str, &[&str])] = &[
    ("base.qcow2", &["write -P 1 0 2M"]),
    ("snap1.qcow2", &["write -P 2 64k 128k"]),
    ("snap2.qcow2", &["write -P 3 1M 64k", "write -z 1536k 128k"]),
];

const EXAMPLES: &[Example] = &[
    // create
    Example {
        given: &[],
        filled: &[],
        lines: &[
            "create a.raw 1M",
            "create -f raw -o preallocation=falloc b.raw 1M",
            "create -f raw -o preallocation=full c.raw 100000",
            "create -f qcow2 d.qcow2 1.5G",
            "create -f qcow2 -o size=3M e.qcow2",
            "create -q -f qcow2 -o compat=0.10 f.qcow2 10M",
            "create -f qcow2 -o cluster_size=2M,preallocation=metadata,lazy_refcounts=on g.qcow2 64M",
            "create -f qcow2 -o refcount_bits=1,extended_l2=on,cluster_size=128k h.qcow2 64M",
            "create -f qcow2 -o compression_type=zstd,preallocation=falloc i.qcow2 2M",
            "create -f qcow2 -o data_file=j.data,data_file_raw=on j.qcow2 3M",
            "create -f qcow2 -b a.raw -F raw k.qcow2",
            "create -f qcow2 -b a.raw -F raw -o size=2M l.qcow2",
            "create -f qcow2 -u -b nothing.raw -F raw m.qcow2 1M",
            "create -f qcow2 -o nocow=on n.qcow2 1M",
        ],
        images: &[
            ("a.raw", "raw"),
            ("b.raw", "raw"),
            ("c.raw", "raw"),
            ("d.qcow2", "qcow2"),
            ("e.qcow2", "qcow2"),
            ("f.qcow2", "qcow2"),
            ("g.qcow2", "qcow2"),
            ("h.qcow2", "qcow2"),
            ("i.qcow2", "qcow2"),
            ("j.data", "raw"),
            ("k.qcow2", "qcow2"),
            ("l.qcow2", "qcow2"),
            ("n.qcow2", "qcow2"),
        ],
    },
    // convert
    Example {
        given: DISK,
        filled: DISK_FILLED,
        lines: &[
            "convert disk.qcow2 a.raw",
            "convert -f qcow2 -O raw -S 0 disk.qcow2 b.raw",
            "convert -O qcow2 -c disk.qcow2 c.qcow2",
            "convert -O qcow2 -c -o compression_type=zstd disk.qcow2 d.qcow2",
            "convert -O qcow2 -o cluster_size=4k,lazy_refcounts=on disk.qcow2 e.qcow2",
            "convert -O qcow2 -m 4 -W -t none -T none disk.qcow2 f.qcow2",
            "convert -O raw -r 100M --salvage disk.qcow2 g.raw",
            "convert -f raw -O qcow2 a.raw b.raw h.qcow2",
            "convert --image-opts -O raw driver=qcow2,file.filename=disk.qcow2 i.raw",
            "create -q -f raw j.raw 4M",
            "convert -n --target-is-zero -O raw disk.qcow2 j.raw",
            "convert -n --target-image-opts disk.qcow2 driver=raw,file.filename=j.raw",
            "convert -O qcow2 -o backing_file=c.qcow2,backing_fmt=qcow2 disk.qcow2 k.qcow2",
            "convert -C -O raw disk.qcow2 l.raw",
        ],
        images: &[
            ("a.raw", "raw"),
            ("b.raw", "raw"),
            ("c.qcow2", "qcow2"),
            ("d.qcow2", "qcow2"),
            ("e.qcow2", "qcow2"),
            ("f.qcow2", "qcow2"),
            ("g.raw", "raw"),
            ("h.qcow2", "qcow2"),
            ("i.raw", "raw"),
            ("j.raw", "raw"),
            ("k.qcow2", "qcow2"),
            ("l.raw", "raw"),
        ],
    },
    // info, map, measure and check of a chain
    Example {
        given: CHAIN,
        filled: CHAIN_FILLED,
        lines: &[
            "info --backing-chain snap2.qcow2",
            "info --backing-chain --output=json snap2.qcow2",
            "info -U snap1.qcow2",
            "map snap2.qcow2",
            "map --output=json snap2.qcow2",
            "map --start-offset=1M --max-length=512k --output=json snap2.qcow2",
            "measure --size 1G",
            "measure -O qcow2 --size 1G --output=json",
            "measure -O qcow2 snap2.qcow2",
            "measure -O raw snap2.qcow2",
            "measure -O qcow2 -o cluster_size=4k,refcount_bits=64 --size 5G",
            "check snap2.qcow2",
            "check --output=json base.qcow2",
            "check -q base.qcow2",
            "check -r leaks base.qcow2",
            "check -r all base.qcow2",
            "check -f raw base.qcow2",
        ],
        images: &[("snap2.qcow2", "qcow2")],
    },
    // compare
    Example {
        given: CHAIN,
        filled: CHAIN_FILLED,
        lines: &[
            "compare base.qcow2 base.qcow2",
            "compare base.qcow2 snap1.qcow2",
            "compare snap1.qcow2 snap2.qcow2",
            "compare -s base.qcow2 snap2.qcow2",
            "compare -q base.qcow2 snap1.qcow2",
            "compare -f raw -F qcow2 base.qcow2 base.qcow2",
            "convert -O raw base.qcow2 base.raw",
            "compare -f qcow2 -F raw base.qcow2 base.raw",
            "compare base.qcow2 nothing.qcow2",
        ],
        images: &[("base.raw", "raw")],
    },
    // commit
    Example {
        given: CHAIN,
        filled: CHAIN_FILLED,
        lines: &["commit snap2.qcow2", "commit -d snap1.qcow2"],
        images: &[("base.qcow2", "qcow2"), ("snap1.qcow2", "qcow2"), ("snap2.qcow2", "qcow2")],
    },
    Example {
        given: CHAIN,
        filled: CHAIN_FILLED,
        lines: &[
            "commit -b base.qcow2 -r 100M snap2.qcow2",
            "commit -q -b nothing.qcow2 snap2.qcow2",
            "commit base.qcow2",
        ],
        images: &[("base.qcow2", "qcow2"), ("snap2.qcow2", "qcow2")],
    },
    // rebase: safe, unsafe, to nothing, and the difference of a modified copy
    Example {
        given: CHAIN,
        filled: CHAIN_FILLED,
        lines: &[
            "rebase -b base.qcow2 -F qcow2 snap2.qcow2",
            "rebase -u -b gone.qcow2 -F qcow2 snap1.qcow2",
            "rebase -u -b base.qcow2 -F qcow2 snap1.qcow2",
            "rebase -b '' snap1.qcow2",
            "rebase snap2.qcow2",
            "rebase -b nothing.qcow2 -F qcow2 snap2.qcow2",
        ],
        images: &[("snap2.qcow2", "qcow2"), ("snap1.qcow2", "qcow2")],
    },
    Example {
        given: &["create -q -f raw base.img 2M", "create -q -f raw modified.img 2M"],
        filled: &[
            ("base.img", &["write -P 1 0 2M"]),
            ("modified.img", &["write -P 1 0 2M", "write -P 2 512k 64k", "write -P 3 1M 64k"]),
        ],
        lines: &[
            "create -f qcow2 -b modified.img -F raw diff.qcow2",
            "rebase -b base.img -F raw diff.qcow2",
            "map --output=json diff.qcow2",
        ],
        images: &[("diff.qcow2", "qcow2")],
    },
    // resize
    Example {
        given: &["create -q -f qcow2 disk.qcow2 4M", "create -q -f raw disk.raw 4M"],
        filled: &[("disk.qcow2", &["write -P 5 0 1M"]), ("disk.raw", &["write -P 5 0 1M"])],
        lines: &[
            "resize disk.qcow2 +1M",
            "resize disk.qcow2 8M",
            "resize disk.qcow2 -1M",
            "resize --shrink disk.qcow2 -1M",
            "resize --shrink -q disk.qcow2 512k",
            "resize --preallocation=metadata disk.qcow2 2M",
            "resize -f raw disk.raw 6M",
            "resize -f raw --shrink disk.raw 3M",
            "resize -f raw --preallocation=falloc disk.raw +1M",
            "resize --image-opts driver=qcow2,file.filename=disk.qcow2 3M",
        ],
        images: &[("disk.qcow2", "qcow2"), ("disk.raw", "raw")],
    },
    // snapshot
    Example {
        given: DISK,
        filled: DISK_FILLED,
        lines: &[
            "snapshot -c one disk.qcow2",
            "snapshot -q -c two disk.qcow2",
            "resize disk.qcow2 6M",
            "snapshot -c three disk.qcow2",
            "snapshot -a one disk.qcow2",
            "snapshot -d two disk.qcow2",
            "snapshot -d nothing disk.qcow2",
            "snapshot -a nothing disk.qcow2",
            "snapshot -a 3 disk.qcow2",
            "convert -l one -O raw disk.qcow2 one.raw",
            "convert -l snapshot.id=3 -O raw disk.qcow2 three.raw",
            "convert -l snapshot.name=three -O raw disk.qcow2 again.raw",
            "convert -l snapshot.id=3,snapshot.name=three -O raw disk.qcow2 both.raw",
            "convert -l snapshot.id=1,snapshot.name=three -O raw disk.qcow2 neither.raw",
            "convert -l nothing -O raw disk.qcow2 nothing.raw",
        ],
        images: &[("disk.qcow2", "qcow2"), ("three.raw", "raw"), ("again.raw", "raw"), ("both.raw", "raw")],
    },
    // amend
    Example {
        given: &[
            "create -q -f qcow2 disk.qcow2 4M",
            "create -q -f qcow2 -b disk.qcow2 -F qcow2 top.qcow2",
            "create -q -f qcow2 -o data_file=a.data data.qcow2 1M",
            "create -q -f raw b.data 1M",
            "create -q -f qcow2 -o extended_l2=on ext.qcow2 1M",
        ],
        filled: &[("top.qcow2", &["write -P 5 0 1M", "write -z 512k 128k", "write -z 2M 1M"])],
        lines: &[
            "amend -o compat=0.10 top.qcow2",
            "amend -o lazy_refcounts=on top.qcow2",
            "amend -o refcount_bits=8 top.qcow2",
            "amend -f qcow2 -o compat=1.1,lazy_refcounts=on top.qcow2",
            "amend -q -t none -o refcount_bits=64 top.qcow2",
            "amend -o compat=0.10 top.qcow2",
            "amend -o refcount_bits=16,lazy_refcounts=off top.qcow2",
            "amend -o compat=0.10 top.qcow2",
            "amend -o size=8M disk.qcow2",
            "amend -o backing_file=elsewhere.qcow2,backing_fmt=qcow2 top.qcow2",
            "amend -o backing_fmt=raw top.qcow2",
            "amend -o backing_file=disk.qcow2,backing_fmt=qcow2 top.qcow2",
            "amend -o data_file=b.data data.qcow2",
            "amend -o data_file=b.data disk.qcow2",
            "amend -o data_file_raw=on data.qcow2",
            "amend -o compat=0.10 data.qcow2",
            "amend -o compat=0.10 ext.qcow2",
            "amend -o cluster_size=4k disk.qcow2",
            "amend -o preallocation=full disk.qcow2",
            "amend -o extended_l2=on disk.qcow2",
            "amend -o compression_type=zstd disk.qcow2",
            "amend -o foo=bar disk.qcow2",
            "amend -o compat=0.42 disk.qcow2",
            "amend -o refcount_bits=7 disk.qcow2",
            "amend -o refcount_bits=128 disk.qcow2",
            "amend -f raw -o size=1M disk.qcow2",
            "amend disk.qcow2",
            "amend -o lazy_refcounts=on",
            "amend -o lazy_refcounts=on nothing.qcow2",
            "amend --image-opts -o lazy_refcounts=on driver=qcow2,file.filename=disk.qcow2",
            "amend --object secret,id=s,data=x -o lazy_refcounts=off disk.qcow2",
            "amend --force -o lazy_refcounts=on disk.qcow2",
        ],
        images: &[("disk.qcow2", "qcow2"), ("top.qcow2", "qcow2"), ("ext.qcow2", "qcow2")],
    },
    // bench
    Example {
        given: DISK,
        filled: DISK_FILLED,
        lines: &[
            "bench -c 100 disk.qcow2",
            "bench -c 100 -d 4 -s 64k -o 1M disk.qcow2",
            "bench -c 10 -S 8k -t writethrough -i threads -f qcow2 disk.qcow2",
            "bench -c 10 -t none -n disk.qcow2",
            "bench -c 10 -n disk.qcow2",
            "bench -c 10 -U disk.qcow2",
            "bench -q -c 10 disk.qcow2",
            "bench -w -c 50 -d 2 --pattern=7 --flush-interval=10 disk.qcow2",
            "bench -w -c 50 -d 2 --pattern 0x41 --flush-interval=10 --no-drain disk.qcow2",
            "bench -w -c 10 -d 64 --flush-interval=10 disk.qcow2",
            "bench -c 10 --flush-interval=100 disk.qcow2",
            "bench -c 10 --no-drain disk.qcow2",
            "bench -c 10 --pattern=7 disk.qcow2",
            "bench -i foo -c 10 disk.qcow2",
            "bench -t foo -c 10 disk.qcow2",
            "bench -c 10 -s 8M disk.qcow2",
            "bench -c 10 -o 10M disk.qcow2",
            "bench nothing.qcow2",
            "bench",
            "bench disk.qcow2 disk.qcow2",
            "bench --image-opts -c 10 driver=qcow2,file.filename=disk.qcow2",
        ],
        images: &[("disk.qcow2", "qcow2")],
    },
    // dd
    Example {
        given: DISK,
        filled: DISK_FILLED,
        lines: &[
            "dd if=disk.qcow2 of=a.raw",
            "dd -f qcow2 -O qcow2 bs=1M count=2 if=disk.qcow2 of=b.qcow2",
            "dd bs=64k skip=3 if=disk.qcow2 of=c.raw",
            "dd -U bs=1k skip=100000 if=disk.qcow2 of=d.raw",
            "dd bs=0 if=disk.qcow2 of=e.raw",
            "dd if=disk.qcow2",
        ],
        images: &[("a.raw", "raw"), ("b.qcow2", "qcow2"), ("c.raw", "raw"), ("d.raw", "raw")],
    },
];

/// Newer versions may word errors otherwise than the installed one: QEMU 11's words.
#[test]
fn wrong_numbers_of_bench_are_refused_as_qemu_11_does() {
    let oracle = Oracle::new();
    oracle.make("create -q -f qcow2 disk.qcow2 4M");
    for (options, expected) in [
        ("-w -c 10 --pattern=256", "Invalid pattern byte specified. Must be between 0 and 255."),
        ("-c x", "Invalid request count specified: 'x'"),
        ("-c 0", "Invalid request count specified. Must be between 1 and 2147483647."),
        ("-c -1", "Invalid request count specified. Must be between 1 and 2147483647."),
        ("-d 0", "Invalid queue depth specified. Must be between 1 and 2147483647."),
        ("-s 0", "Invalid buffer size specified. Must be between 1 and 2147483647."),
        ("-s 3G", "Invalid buffer size specified. Must be between 1 and 2147483647."),
        ("-o x", "Invalid offset specified: 'x'"),
        ("-S x", "Invalid step size specified: 'x'"),
        ("-w --flush-interval=x", "Invalid flush interval specified: 'x'"),
        ("-w --flush-interval=-1", "Invalid flush interval specified. Must be between 0 and 2147483647."),
    ] {
        let said = oracle.ours(&oracle.work(), &words(&format!("bench {options} disk.qcow2")));
        assert_eq!((said.code, said.err), (Some(1), format!("qemu-img: {expected}\n")), "{options}");
    }
}

#[test]
fn what_the_manual_describes_is_the_same_with_both() {
    let mut differences = String::new();
    for example in EXAMPLES {
        let oracle = Oracle::new();
        example.given.iter().for_each(|line| oracle.make(line));
        example.filled.iter().for_each(|(image, commands)| oracle.io(commands, image));
        oracle.compare_session(example.lines, example.images);
        differences += &oracle.differences();
    }
    assert!(differences.is_empty(), "our qemu-img differs:\n{differences}");
}
