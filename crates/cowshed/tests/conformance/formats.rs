// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every format with every verb: one case each.

use crate::case::Case;

const SAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../testkit/images");

/// Name, format, and the options of its creation.
const KINDS: &[(&str, &str, &str)] = &[
    ("vmdk monolithicSparse", "vmdk", ""),
    ("vmdk monolithicFlat", "vmdk", "-o subformat=monolithicFlat"),
    ("vmdk twoGbMaxExtentSparse", "vmdk", "-o subformat=twoGbMaxExtentSparse,zeroed_grain=on"),
    ("vmdk twoGbMaxExtentFlat", "vmdk", "-o subformat=twoGbMaxExtentFlat"),
    ("vmdk streamOptimized", "vmdk", "-o subformat=streamOptimized"),
    ("vpc dynamic", "vpc", ""),
    ("vpc fixed", "vpc", "-o subformat=fixed,force_size=on"),
    ("vhdx dynamic", "vhdx", "-o block_size=1M,log_size=1M"),
    ("vhdx fixed", "vhdx", "-o subformat=fixed,block_size=1M,log_size=1M"),
    ("vdi dynamic", "vdi", ""),
    ("vdi static", "vdi", "-o static=on"),
    ("qed", "qed", ""),
    ("qcow", "qcow", ""),
    ("parallels", "parallels", "-o cluster_size=64k"),
];

/// Formats that are only read: name, format, and the lines that make a sample.
const READ_ONLY: &[(&str, &str, &[&str])] = &[
    ("dmg", "dmg", &["cp $SAMPLES/apple-hfsplus_zlib.dmg a"]),
    (
        "bochs",
        "bochs",
        // A catalog of two extents of 64 KiB, of which the second one has a place, with its first sectors.
        &[
            "printf 'Bochs Virtual HD Image' >a; truncate -s 32 a; printf 'Redolog' >>a; truncate -s 48 a; printf 'Growing' >>a; truncate -s 64 a",
            r"printf '\000\000\002\000\000\002\000\000\002\000\000\000\000\002\000\000\000\000\001\000\000\000\000\000\000\000\002\000\000\000\000\000' >>a; truncate -s 512 a",
            r"printf '\377\377\377\377\000\000\000\000' >>a; truncate -s 1024 a; printf '\003' >>a; truncate -s 1536 a",
            "head -c 1024 /dev/zero | tr '\\0' x >>a; truncate -s 67072 a",
        ],
    ),
    (
        "cloop",
        "cloop",
        &[
            "printf '#!/bin/sh\\n#V2.0 Format\\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\\n' >a; truncate -s 128 a",
            "python3 -c \"import zlib,struct,sys; b=[zlib.compress(c*65536) for c in (b'a',b'b',b'c')]; o=[136+32]; [o.append(o[-1]+len(x)) for x in b]; sys.stdout.buffer.write(struct.pack('>II',65536,3)+b''.join(struct.pack('>Q',x) for x in o)+b''.join(b))\" >>a",
        ],
    ),
];

/// A verb, and its lines. `{f}` is the format, `{o}` the options of its creation.
const VERBS: &[(&str, &[&str])] = &[
    (
        "create",
        &[
            "qemu-img create -f {f} {o} n 3M",
            "qemu-img create -q -f {f} {o} n2 2M",
            "qemu-img create -f {f} {o} n3 0",
            "qemu-img create -f {f} {o} n4 1000001",
            "qemu-img create -f {f} {o} n5",
            "qemu-img create -f {f} {o} -o nosuch=1 n6 3M",
            "qemu-img create -f {f} {o} -o size=2M n7",
            "qemu-img create -f {f} {o} -o preallocation=metadata n8 2M",
            "qemu-img create -f {f} {o} -o preallocation=nosuch n9 2M",
            "qemu-img create -f {f} {o} nosuch/n 3M",
            "qemu-img create -f {f} {o} a 2M",
            "qemu-img create -f {f} {o} -b nosuch -F {f} n10 3M",
            "qemu-img create -f {f} {o} -u -b nosuch -F {f} n11 3M",
            "qemu-img create -f {f} {o} n12 9E",
            "qemu-img create -f {f} {o} n13 -1",
            "qemu-img create -f {f} -o cluster_size=3000 n14 3M",
            "qemu-img create -f {f} -o compat=1.1 n15 3M",
            "qemu-img create -f {f} -o encryption=on n16 3M",
            "qemu-img create -f {f} -o backing_file=a,backing_fmt={f} n17",
            "qemu-img create -f {f} -o subformat=nosuch n18 1M",
            "qemu-img info -f {f} n",
            "qemu-img info -f {f} n4",
        ],
    ),
    // The format is guessed.
    (
        "guess",
        &[
            "qemu-img snapshot -c one a",
            "qemu-img bitmap --clear a one",
            "qemu-img rebase -u -b r -F raw a",
            "qemu-img commit a",
            "qemu-img amend -o compat=1.1 a",
            "qemu-img compare a b",
            "qemu-img resize a +1M",
        ],
    ),
    (
        "info",
        &[
            "qemu-img info a",
            "qemu-img info -f {f} a",
            "qemu-img info --output=json -f {f} a",
            "qemu-img info -U --backing-chain -f {f} a",
            "qemu-img info -f {f} r",
            "qemu-img info -f qcow2 a",
            "qemu-img info -f {f} nosuch",
            "qemu-img info --image-opts driver={f},file.filename=a",
            "qemu-img info --image-opts driver={f},file.driver=file,file.filename=a,nosuch=1",
            "qemu-img info --limits -f {f} a",
        ],
    ),
    (
        "check",
        &[
            "qemu-img check -f {f} a",
            "qemu-img check a",
            "qemu-img check -q -f {f} a",
            "qemu-img check --output=json -f {f} a",
            "qemu-img check -r leaks -f {f} a",
            "qemu-img check -r all -f {f} a",
            "qemu-img check -r all --output=json -f {f} a",
            "qemu-img check -U -f {f} a",
            "qemu-img check -f {f} r",
            "qemu-img check -f {f} nosuch",
        ],
    ),
    (
        "resize",
        &[
            "qemu-img resize -f {f} a 5M",
            "qemu-img info -f {f} a | grep 'virtual size'",
            "qemu-img resize -q -f {f} a +1000",
            "qemu-img resize -f {f} a 4M",
            "qemu-img resize -f {f} --shrink a 2M",
            "qemu-img resize -f {f} --shrink a 512k",
            "qemu-img resize -f {f} --shrink a -- -1M",
            "qemu-img resize -f {f} --preallocation=off a 8M",
            "qemu-img resize -f {f} --preallocation=metadata a 9M",
            "qemu-img resize -f {f} --preallocation=falloc a 10M",
            "qemu-img resize -f {f} --preallocation=full a 11M",
            "qemu-img resize -f {f} --preallocation=nosuch a 12M",
            "qemu-img resize -f {f} --shrink --preallocation=full a 1M",
            "qemu-img resize -f {f} a 9E",
            "qemu-img resize -f {f} a 0",
            "qemu-img resize -f {f} nosuch 5M",
            "qemu-io -r -f {f} -c 'read -P 1 0 64k' -c 'read -P 2 1M 64k' -c length a",
        ],
    ),
    (
        "snapshot",
        &[
            "qemu-img snapshot -f {f} -c one a",
            "qemu-img snapshot -l a",
            "qemu-img snapshot -f {f} -l a",
            "qemu-img snapshot a",
            "qemu-img snapshot -f {f} -a one a",
            "qemu-img snapshot -f {f} -d one a",
            "qemu-img snapshot -q -f {f} -d one a",
            "qemu-img snapshot -U -f {f} -l a",
            "qemu-img convert -f {f} -O raw -l one a n",
            "qemu-img info -f {f} --output=json a | grep snap",
        ],
    ),
    (
        "rebase",
        &[
            "qemu-img rebase -f {f} -u -b r -F raw a",
            "qemu-img rebase -f {f} -b r -F raw a",
            "qemu-img rebase -f {f} -u -b '' a",
            "qemu-img rebase -f {f} -b '' a",
            "qemu-img rebase -f {f} -b b -F {f} a",
            "qemu-img rebase -f {f} -u -b b -F {f} a",
            "qemu-img rebase -f {f} -u -b b a",
            "qemu-img rebase -f {f} -b nosuch -F {f} a",
            "qemu-img info -f {f} a | grep -i backing",
        ],
    ),
    ("commit", &["qemu-img commit -f {f} a", "qemu-img commit -q -d -f {f} a", "qemu-img commit -f {f} -b b a"]),
    (
        "backing",
        &[
            "qemu-img create -f {f} {o} -b a -F {f} o",
            "qemu-img create -f {f} {o} -b a -F {f} o2 4M",
            "qemu-img create -f {f} {o} -b a o3",
            "qemu-img create -f {f} {o} -b r -F raw o4",
            "qemu-img info -f {f} o",
            "qemu-img info --output=json -f {f} --backing-chain o",
            "qemu-io -f {f} -c 'write -P 3 32k 64k' -c 'read -P 1 0 32k' -c 'read -P 3 32k 64k' -c 'read -P 2 1M 64k' o",
            "qemu-img map -f {f} o",
            "qemu-img rebase -f {f} -b b -F {f} o",
            "qemu-img rebase -f {f} -b a -F {f} o",
            "qemu-img convert -O qcow2 -B a -F {f} a n",
            "qemu-img convert -f {f} -O {f} {o} -B a -F {f} o n2",
            "qemu-img compare -f {f} -F {f} a o",
            "qemu-img check -f {f} o",
            "qemu-img measure -O qcow2 -f {f} o",
            "qemu-img commit -f {f} o",
            "qemu-io -r -f {f} -c 'read -P 3 32k 64k' a",
        ],
    ),
    (
        "amend",
        &[
            "qemu-img amend -f {f} -o help",
            "qemu-img amend -f {f} -o help a",
            "qemu-img amend -f {f} -o '?' a",
            "qemu-img amend -f {f} -o size=5M a",
            "qemu-img amend -f {f} -o nosuch=1 a",
            "qemu-img amend -q -p -f {f} -o compat=1.1 a",
            "qemu-img amend -f {f} a",
            "qemu-img amend -f {f} -o compat=1.1 nosuch",
            "qemu-img amend -f {f} -o x",
        ],
    ),
    (
        "measure",
        &[
            "qemu-img measure -f {f} a",
            "qemu-img measure -f {f} -O qcow2 a",
            "qemu-img measure -f {f} -O {f} {o} a",
            "qemu-img measure -f raw -O {f} {o} r",
            "qemu-img measure --size 3M -O {f} {o}",
            "qemu-img measure --output=json -f {f} -O raw a",
            "qemu-img measure -f {f} -O qcow2 -o cluster_size=4k a",
            "qemu-img measure -f {f} -l one -O raw a",
            "qemu-img measure -O {f} -o nosuch=1 --size 1M",
            "qemu-img measure -f {f} -O {f} nosuch",
        ],
    ),
    (
        "map",
        &[
            "qemu-img map a",
            "qemu-img map -f {f} a",
            "qemu-img map --output=json -f {f} a",
            "qemu-img map --output=json -f {f} --start-offset=1M --max-length=64k a",
            "qemu-img map -U -f {f} a",
            "qemu-img map -f {f} nosuch",
        ],
    ),
    (
        "compare",
        &[
            "qemu-img compare a a",
            "qemu-img compare -f {f} -F {f} a b",
            "qemu-img compare -f {f} -F raw a r",
            "qemu-img compare -f raw -F {f} r a",
            "qemu-img compare -s -f {f} -F {f} a b",
            "qemu-img compare -s -f {f} -F {f} a a",
            "qemu-img compare -p -f {f} -F {f} a a",
            "qemu-img compare -f {f} -F {f} a nosuch",
            "qemu-img compare -f {f} -F {f} a r",
        ],
    ),
    (
        "dd",
        &[
            "qemu-img dd -f {f} -O raw if=a of=n1",
            "qemu-img dd -f {f} -O raw bs=64k count=2 if=a of=n2",
            "qemu-img dd -f {f} -O qcow2 bs=64k skip=16 if=a of=n3",
            "qemu-img dd -f raw -O {f} bs=64k if=r of=n4",
            "qemu-img dd -f raw -O {f} bs=1000 count=3 if=r of=n5",
            "qemu-img dd -f {f} -O {f} bs=1M if=a of=n6",
            "qemu-img dd -U -f {f} -O raw if=nosuch of=n7",
            "qemu-img compare -f {f} -F raw n4 r",
        ],
    ),
    (
        "convert",
        &[
            "qemu-img convert -f {f} -O raw a n1",
            "qemu-img convert -f {f} -O qcow2 a n2",
            "qemu-img convert -O raw a n3",
            "qemu-img convert -f {f} -O {f} {o} a n4",
            "qemu-img convert -f raw -O {f} {o} r n5",
            "qemu-img convert -f raw -O {f} {o} -S 0 r n6",
            "qemu-img convert -f {f} -O raw -p -m 4 -W a n7",
            "qemu-img convert -f {f} -O qcow2 -c a n8",
            "qemu-img convert -f {f} -n -O {f} b a",
            "qemu-img convert -f raw -n -O {f} r a",
            "qemu-img convert -f {f} -n --target-is-zero -O {f} b a",
            "qemu-img convert -f {f} -O raw -C a n9",
            "qemu-img convert -f {f} -O qcow2 --bitmaps a n10",
            "qemu-img convert -f {f} -O qcow2 -r 100M a b n11",
            "qemu-img convert -f raw -O {f} {o} odd n12",
            "qemu-img info -f {f} n4",
            "qemu-img info -f {f} n12",
            "qemu-img compare -f {f} -F raw n5 r",
        ],
    ),
    (
        "convert wrongly",
        &[
            "qemu-img convert -f raw -O {f} {o} -c r n1",
            "qemu-img convert -f raw -O {f} -c r n2",
            "qemu-img convert -f raw -O {f} -o nosuch=1 r n3",
            "qemu-img convert -f raw -O {f} -o preallocation=full r n4",
            "qemu-img convert -f raw -O {f} -o encryption=on r n5",
            "qemu-img convert -f raw -O {f} -o backing_file=b,backing_fmt={f} r n6",
            "qemu-img convert -f raw -O {f} -B r -F raw r n7",
            "qemu-img convert -f {f} -O raw -o nosuch=1 a n8",
            "qemu-img convert -f {f} -O raw nosuch n9",
            "qemu-img convert -f {f} -O nosuch a n10",
            "qemu-img convert -f {f} -O raw r n11",
            "qemu-img convert -f raw -O {f} --bitmaps r n12",
            "qemu-img convert -f raw -n -O {f} r nosuch",
            "qemu-img convert -f raw -n -O {f} long a",
            "qemu-img convert -f raw -O {f} r nosuch/n",
            "qemu-img convert -f {f} -n -c -O {f} b a",
        ],
    ),
    (
        "bench",
        &[
            "qemu-img bench -c 8 -d 2 -f {f} a",
            "qemu-img bench -c 8 -d 1 -s 64k -S 64k -f {f} a",
            "qemu-img bench -c 8 -d 1 -w --pattern 5 -o 1M -s 64k -f {f} a",
            "qemu-img bench -c 8 -d 1 -w --flush-interval 2 -s 4k -f {f} a",
            "qemu-img bench -c 2 -f {f} nosuch",
            "qemu-io -r -f {f} -c 'read -P 5 1M 512k' a",
        ],
    ),
    (
        "bitmap",
        &[
            "qemu-img bitmap --add -f {f} a one",
            "qemu-img bitmap --remove -f {f} a one",
            "qemu-img bitmap --enable -f {f} a one",
            "qemu-img bitmap --disable -f {f} a one",
            "qemu-img bitmap --merge two -f {f} a one",
        ],
    ),
    (
        "io read",
        &[
            "qemu-io -r -f {f} -c 'read -P 1 0 64k' -c 'read -P 2 1M 64k' -c 'read -P 0 2M 64k' a",
            "qemu-io -r -f {f} -c 'read -v 1M 16' -c 'readv -P 1 0 512 1024 4096' a",
            "qemu-io -r -f {f} -c 'read -P 9 0 512' -c 'read 2900k 400k' a",
            "qemu-io -r -f {f} -c 'read 513 100' -c 'read -P 1 1 511' a",
            "qemu-io -r -f {f} -c length -c 'alloc 0 1M' -c 'alloc 1M 2M' a",
            "qemu-io -r -f {f} -c map a",
            "qemu-io -r -f {f} -c info a",
            "qemu-io -r -f {f} -c 'write 0 512' -c 'discard 0 64k' -c 'truncate 5M' -c flush a",
            "qemu-io -r -f {f} -c 'aio_read 0 64k' -c aio_flush a",
            "qemu-io -r -U -f {f} -c 'read -b 0 512' a",
            "qemu-io -r -f {f} -c 'open -o driver={f},file.filename=a' -c length a",
        ],
    ),
    (
        "io write",
        &[
            "qemu-io -f {f} -c 'write -P 7 64k 64k' -c 'write -P 8 2M 1000' -c 'read -P 7 64k 64k' -c 'read -P 8 2M 1000' a",
            "qemu-io -f {f} -c 'write -P 9 3M 512' -c 'write -P 9 3144k 1M' a",
            "qemu-io -f {f} -c 'writev -P 10 128k 512 1024 4096' -c 'read -P 10 128k 5632' a",
            "qemu-io -f {f} -c 'write -f -P 11 4096 512' -c 'read -P 11 4096 512' a",
            "qemu-io -f {f} -c 'aio_write -P 12 192k 64k' -c aio_flush -c 'read -P 12 192k 64k' a",
            "qemu-io -f {f} -c 'write -b 0 512' a",
            "qemu-io -s -f {f} -c 'write -P 13 0 512' -c 'read -P 13 0 512' a",
            "qemu-io -r -f {f} -c 'read -P 1 0 512' a",
            "qemu-io -f {f} -c 'reopen -r' -c 'write 0 512' -c 'reopen -w' -c 'write -P 14 0 512' a",
        ],
    ),
    (
        "io zero",
        &[
            "qemu-io -f {f} -c 'write -z 0 64k' -c 'read -P 0 0 64k' a",
            "qemu-io -f {f} -c 'write -z -u 1M 64k' -c 'read -P 0 1M 64k' a",
            "qemu-io -f {f} -c 'write -z 2M 100k' -c 'read -P 0 2M 100k' a",
            "qemu-io -f {f} -c 'write -z -n 2M 64k' a",
            "qemu-io -f {f} -c 'aio_write -z 128k 64k' -c aio_flush a",
            "qemu-io -f {f} -c 'discard 1M 1M' a",
            "qemu-io -f {f} -d unmap -c 'discard 0 64k' -c 'discard 100 600' a",
        ],
    ),
    (
        "io compress",
        &[
            "qemu-io -f {f} -c 'write -c -P 3 0 64k' -c 'read -P 3 0 64k' a",
            "qemu-io -f {f} -c 'write -c -P 3 2M 64k' -c 'read -P 3 2M 64k' a",
        ],
    ),
    (
        "io truncate",
        &[
            "qemu-io -f {f} -c 'truncate 5M' -c length -c 'read -P 0 4M 64k' a",
            "qemu-io -f {f} -c 'truncate 2M' -c length a",
            "qemu-io -f {f} -c 'truncate -m full 6M' -c length a",
            "qemu-io -f {f} -c 'write -P 7 0 64k' -c 'truncate 4M' -c 'read -P 7 0 64k' a",
        ],
    ),
];

/// Verbs for the formats that are only read.
const READING: &[&str] = &[
    "guess", "info", "check", "resize", "snapshot", "rebase", "commit", "amend", "measure", "map", "bench", "bitmap",
    "io read", "io write", "io zero",
];

/// A volume that asks for a key.
const LUKS: &[&str] = &[
    "qemu-img info a | grep -v uuid | grep -v 'iters\\|offset\\|salt'",
    "qemu-img info -f luks a | head -4",
    "qemu-img check {key}",
    "qemu-img check -r all {key}",
    "qemu-img map {key}",
    "qemu-img map --output=json {key}",
    "qemu-img snapshot {secret} -c one {image}",
    "qemu-img snapshot {secret} -l {image}",
    "qemu-img rebase {secret} -u -b r -F raw {image}",
    "qemu-img commit {key}",
    "qemu-img amend {secret} -o help -f luks",
    "qemu-img amend {secret} -o nosuch=1 {image}",
    "qemu-img measure -O qcow2 {key}",
    "qemu-img bitmap {secret} --add {image} one",
    "qemu-img compare {secret} {image} driver=raw,file.filename=r",
    "qemu-img convert -O raw {key} n1",
    "qemu-img convert -O qcow2 -c {key} n2",
    "qemu-img bench -c 8 -d 1 {key}",
    "qemu-img resize {secret} {image} 4M",
    "qemu-img resize {secret} --shrink {image} 2M",
    "qemu-img resize {secret} --preallocation=full {image} 5M",
    "qemu-io {key} -c 'read -P 1 0 64k' -c 'write -P 3 64k 1000' -c 'read -P 3 64k 1000' -c 'write -z 0 64k' -c length",
    "qemu-io {key} -c 'write -c 0 64k' -c 'truncate 6M' -c 'discard 0 64k' -c info",
    "qemu-img convert -f luks -O raw a n3",
    "qemu-img create -f luks n4 1M",
];

/// Of these kinds a guessed format is as of the first one of the format: the start of the file is the same.
const FURTHER: &[&str] = &["vmdk twoGbMaxExtentSparse", "vmdk twoGbMaxExtentFlat", "vhdx fixed", "vdi static"];

/// All cases.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, format, options) in KINDS {
        let setup = setup(format, options);
        let verbs = VERBS.iter().filter(|(verb, _)| *verb != "guess" || !FURTHER.contains(name));
        let of_verbs = verbs.map(|verb| case(name, format, options, verb, &setup));
        cases.extend(of_verbs);
    }
    // A log to replay: the check replays it.
    let log = [format!("gunzip -c {SAMPLES}/windows-log-replay.vhdx.gz >a"), "truncate -s 3M r".to_owned()];
    let verbs = VERBS.iter().filter(|(verb, _)| ["check", "io read", "map"].contains(verb));
    cases.extend(verbs.map(|verb| case("vhdx log", "vhdx", "", verb, &log)));
    cases.push(luks());
    for (name, format, sample) in READ_ONLY {
        let mut setup: Vec<String> = sample.iter().map(|line| line.replace("$SAMPLES", SAMPLES)).collect();
        setup.extend(plain());
        setup.push("cp a b".to_owned());
        let verbs = VERBS.iter().filter(|(verb, _)| READING.contains(verb));
        cases.extend(verbs.map(|verb| case(name, format, "", verb, &setup)));
    }
    cases
}

/// An image `a` with data, an empty one `b`, and raw ones.
fn setup(format: &str, options: &str) -> Vec<String> {
    let mut setup = vec![format!("qemu-img create -q -f {format} {options} a 3M")];
    for data in ["write -P 1 0 64k", "write -P 2 1M 64k"] {
        setup.push(format!("qemu-io -f {format} -c '{data}' a"));
    }
    setup.push(format!("qemu-img create -q -f {format} {options} b 3M"));
    setup.extend(plain());
    setup
}

fn plain() -> Vec<String> {
    let lines = [
        "qemu-img create -q -f raw r 3M",
        "qemu-io -f raw -c 'write -P 4 64k 64k' -c 'write -P 5 2M 512' r",
        "qemu-img create -q -f raw odd 1000001",
        "qemu-io -f raw -c 'write -P 6 0 1000001' odd",
        "qemu-img create -q -f raw long 16M",
    ];
    lines.map(str::to_owned).to_vec()
}

fn case(name: &str, format: &str, options: &str, (verb, lines): &(&str, &[&str]), setup: &[String]) -> Case {
    let mut case = Case::new(format!("{name}: {verb}"));
    case.setup = setup.to_vec();
    case.lines =
        lines.iter().map(|line| line.replace("{f}", format).replace("{o}", options).replace("  ", " ")).collect();
    case
}

fn luks() -> Case {
    let (secret, image) = ("--object secret,id=s,data=x", "--image-opts driver=luks,key-secret=s,file.filename=a");
    let mut case = Case::new("luks".to_owned());
    case.setup.push(format!("qemu-img create -q -f luks {secret} -o key-secret=s,iter-time=10 a 3M"));
    case.setup.push(format!("qemu-io {secret} -c 'write -P 1 0 64k' {image}"));
    case.setup.extend(plain());
    let filled = |line: &&str| {
        line.replace("{key}", &format!("{secret} {image}")).replace("{secret}", secret).replace("{image}", image)
    };
    case.lines = LUKS.iter().map(filled).collect();
    case
}
