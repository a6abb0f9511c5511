// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shell scripts as users of qemu-img write them: management tools' work on volumes, installers' on disks, and
//! builders' on cloud images. Each runs with the real tool first on the PATH and with ours, and must print and leave
//! the same.

use crate::oracle::Oracle;
use cowshed_testkit::programs::{Said, finish};
use std::path::Path;
use std::process::Command;

struct Script {
    name: &'static str,
    text: &'static str,
    /// The files that are compared afterwards: name and format.
    images: &'static [(&'static str, &'static str)],
}

/// In front of each: a key of the JSON of `info`, and the last percentage of a progress.
const PRELUDE: &str = r#"
set -eu
key() { qemu-img info -U --output=json "$2" | sed -n 's/^    "'"$1"'": "\{0,1\}\([^",]*\)"\{0,1\},\{0,1\}$/\1/p'; }
last_percent() { tr '\r' '\n' | sed -n 's/.*(\([0-9.]*\)\/100%).*/\1/p' | tail -n 1; }
fails() { if "$@" >out.txt 2>err.txt; then echo "succeeded: $*"; else echo "exit code $?: $(head -n 1 err.txt)"; fi; }
"#;

const SCRIPTS: &[Script] = &[
    Script {
        name: "volumes of a pool",
        text: r#"
qemu-img create -f qcow2 -o compat=1.1,preallocation=metadata,lazy_refcounts vol.qcow2 10240K >/dev/null
qemu-img create -f qcow2 -o compat=0.10,backing_file=vol.qcow2,backing_fmt=qcow2 child.qcow2 20480K >/dev/null
qemu-img create -f raw -o preallocation=full plain.raw 4096K >/dev/null
for volume in vol.qcow2 child.qcow2 plain.raw; do
    echo "$volume $(key format $volume) $(key virtual-size $volume) $(key backing-filename $volume) $(key cluster-size $volume)"
done
printf 'some content' | dd of=plain.raw conv=notrunc bs=1 seek=70000 2>/dev/null
qemu-img convert -f raw -O qcow2 -o compat=1.1,preallocation=metadata plain.raw clone.qcow2
qemu-img convert -f qcow2 -O raw clone.qcow2 back.raw
cmp plain.raw back.raw && echo 'the clone is the same'
qemu-img resize clone.qcow2 8192K
qemu-img resize -f raw plain.raw 5242880
fails qemu-img resize -f raw plain.raw 1048576
qemu-img resize -f raw --shrink plain.raw 1048576
qemu-img snapshot -c before clone.qcow2
qemu-img snapshot -l clone.qcow2 | sed -n 's/^\([0-9][0-9]*\)  *\([a-z]*\) .*/\1 \2/p'
qemu-img snapshot -a before clone.qcow2
qemu-img snapshot -d before clone.qcow2
fails qemu-img snapshot -d before clone.qcow2
qemu-img check -q clone.qcow2 && echo clean
fails qemu-img info --output=json missing.qcow2
fails qemu-img create -f qcow2 -b missing.qcow2 -F qcow2 orphan.qcow2
"#,
        images: &[("vol.qcow2", "qcow2"), ("child.qcow2", "qcow2"), ("clone.qcow2", "qcow2"), ("plain.raw", "raw")],
    },
    Script {
        name: "encrypted volumes of a pool",
        text: r#"
printf 'c2VjcmV0' > secret.b64
vol="--object secret,id=vol_encrypt0,file=secret.b64,format=base64"
# On a busy machine the real tool may fail to measure how fast it derives keys.
made() { until qemu-img "$@" 2>err.txt; do grep -q 'accurate CPU' err.txt || { cat err.txt >&2; return 1; }; done; }
made create -q -f qcow2 $vol -o compat=1.1,encrypt.format=luks,encrypt.key-secret=vol_encrypt0,encrypt.iter-time=10 vol.qcow2 10240K
made create -q -f luks $vol -o key-secret=vol_encrypt0,iter-time=10 vol.luks 4096K
for volume in vol.qcow2 vol.luks; do
    echo "$volume $(key virtual-size $volume) $(qemu-img info --output=json $volume | grep -c '"encrypted": true')"
done
printf 'what was there' | dd of=plain.raw bs=1 seek=70000 2>/dev/null
truncate -s 4096K plain.raw
qemu-img convert --image-opts -n --target-image-opts $vol driver=raw,file.filename=plain.raw \
    driver=luks,key-secret=vol_encrypt0,file.filename=vol.luks
made convert -f raw -O qcow2 $vol -o encrypt.format=luks,encrypt.key-secret=vol_encrypt0,encrypt.iter-time=10 plain.raw clone.qcow2
qemu-img resize -q --image-opts $vol driver=qcow2,encrypt.key-secret=vol_encrypt0,file.filename=clone.qcow2 8192K
qemu-img convert --image-opts -O raw $vol driver=qcow2,encrypt.key-secret=vol_encrypt0,file.filename=clone.qcow2 clone.raw
qemu-img convert --image-opts -O raw $vol driver=luks,key-secret=vol_encrypt0,file.filename=vol.luks luks.raw
cmp plain.raw luks.raw && echo 'the volume holds what was written'
cmp plain.raw clone.raw 2>&1 | head -n 1
made create -q -f qcow2 $vol -F qcow2 -b vol.qcow2 \
    -o encrypt.format=luks,encrypt.key-secret=vol_encrypt0,encrypt.iter-time=10 child.qcow2
key backing-filename child.qcow2
cp plain.raw kept.raw
fails qemu-img convert -f qcow2 -O raw clone.qcow2 kept.raw
cmp plain.raw kept.raw && echo 'the target is as it was'
fails qemu-img create -f qcow2 -o encrypt.format=luks keyless.qcow2 1M
printf 'wrong' > wrong.txt
fails qemu-img convert --image-opts -O raw --object secret,id=w,file=wrong.txt \
    driver=qcow2,encrypt.key-secret=w,file.filename=clone.qcow2 kept.raw
cmp plain.raw kept.raw && echo 'the target is as it was'
qemu-img check -q --image-opts $vol driver=qcow2,encrypt.key-secret=vol_encrypt0,file.filename=clone.qcow2 && echo clean
qemu-img measure --output=json --image-opts $vol -O raw driver=luks,key-secret=vol_encrypt0,file.filename=vol.luks | grep required
"#,
        images: &[("clone.raw", "raw"), ("luks.raw", "raw"), ("kept.raw", "raw")],
    },
    Script {
        name: "disks of an installer",
        text: r#"
qemu-img create -q -f qcow2 -o preallocation=falloc disk.qcow2 16M
qemu-img create -q -f qcow2 -o cluster_size=2M,extended_l2=on,lazy_refcounts=on fast.qcow2 64M
qemu-img create -q -f qcow2 template.qcow2 12M
qemu-img create -q -f qcow2 -F qcow2 -b template.qcow2 guest1.qcow2
qemu-img create -q -f qcow2 -F qcow2 -b template.qcow2 guest2.qcow2 24M
qemu-img info --backing-chain --output=json guest2.qcow2 | grep -c '^        "virtual-size"'
for disk in disk fast guest1 guest2; do
    echo "$disk $(key format $disk.qcow2) $(key virtual-size $disk.qcow2)"
    qemu-img info --output=json $disk.qcow2 | grep -E '^            "(compat|extended-l2|lazy-refcounts|refcount-bits)"'
    qemu-img check $disk.qcow2 >/dev/null && echo "$disk is clean"
done
qemu-img amend -f qcow2 -o compat=v3,lazy_refcounts=off fast.qcow2
key cluster-size fast.qcow2
qemu-img measure --output=json -O qcow2 --size 100M | sed -n 's/.*"required": \([0-9]*\).*/\1/p'
qemu-img map --output=json guest1.qcow2 | grep -c start
qemu-img compare guest1.qcow2 template.qcow2
fails qemu-img create -f qcow2 disk.qcow2
fails qemu-img create -f nosuch x 1M
"#,
        images: &[
            ("disk.qcow2", "qcow2"),
            ("fast.qcow2", "qcow2"),
            ("guest1.qcow2", "qcow2"),
            ("guest2.qcow2", "qcow2"),
        ],
    },
    Script {
        name: "a cloud image",
        text: r#"
for block in 1 2 3 4 5 6 7 8; do printf "block $block" | dd of=download.raw conv=notrunc bs=1 seek=$((block * 1000000)) 2>/dev/null; done
truncate -s 16M download.raw
echo "convert: $(qemu-img convert -p -c -f raw -O qcow2 download.raw cloud.qcow2 | last_percent)"
qemu-img check cloud.qcow2 | head -n 1
qemu-img resize -q cloud.qcow2 +16M
qemu-img create -q -f qcow2 -F qcow2 -b cloud.qcow2 instance.qcow2
printf 'instance data' > seed.txt
qemu-img dd -f raw -O raw bs=512 count=1 if=seed.txt of=seed.raw 2>/dev/null || true
qemu-img snapshot -c fresh instance.qcow2
mkdir -p pool && mv cloud.qcow2 pool/base.qcow2
fails qemu-img convert -O raw instance.qcow2 nothing.raw
qemu-img rebase -u -F qcow2 -b pool/base.qcow2 instance.qcow2
echo "chain: $(key backing-filename instance.qcow2)"
echo "flatten: $(qemu-img convert -p -O qcow2 -o compression_type=zstd -c instance.qcow2 flat.qcow2 | last_percent)"
echo "rebase: $(qemu-img rebase -p -b '' instance.qcow2 | last_percent)"
qemu-img compare instance.qcow2 flat.qcow2
qemu-img snapshot -d fresh instance.qcow2
qemu-img commit -q -d instance.qcow2 2>&1 || echo 'nothing to commit to'
qemu-img convert -n -O raw flat.qcow2 none.raw 2>/dev/null || echo 'no target'
qemu-img measure -O raw flat.qcow2 | head -n 1
"#,
        images: &[("flat.qcow2", "qcow2"), ("instance.qcow2", "qcow2"), ("pool/base.qcow2", "qcow2")],
    },
];

fn run(script: &str, folder: &Path, path: &str) -> Said {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{PRELUDE}{script}")]).current_dir(folder);
    finish(command.env("PATH", path).env("LC_ALL", "C.UTF-8"))
}

#[test]
fn scripts_of_users_do_the_same_with_ours() {
    let path = std::env::var("PATH").expect("PATH");
    for script in SCRIPTS {
        let oracle = Oracle::new();
        let (theirs, own) = oracle.folders();
        // The tool that is to be found first lies in a folder of its own.
        let real = oracle.qemu.img_path().parent().expect("a folder").display().to_string();
        let ours = oracle.bin().display().to_string();
        let said_by_theirs = run(script.text, &theirs, &format!("{real}:{path}"));
        let said_by_ours = run(script.text, &own, &format!("{ours}:{path}"));
        assert_eq!(said_by_ours, said_by_theirs, "{}", script.name);
        assert_eq!(said_by_ours.code, Some(0), "{}: {said_by_ours:?}", script.name);
        for (image, format) in script.images {
            let (left, right) = (theirs.join(image), own.join(image));
            assert!(oracle.qemu.is_equal((&left, format), (&right, format)), "{}: {image}", script.name);
            if *format == "qcow2" {
                oracle.qemu.expect_clean(&right);
            }
        }
    }
}
