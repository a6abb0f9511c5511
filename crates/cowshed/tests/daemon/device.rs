// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `qemu-nbd --connect` and `--disconnect`: beside QEMU's where no driver is needed, and with the driver of an emulated guest's kernel.

use super::process::{COWSHED, text};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::programs::finish;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// Exit code, standard output and standard error.
fn run(program: &Path, arguments: &[&str], folder: &Path) -> (Option<i32>, String, String) {
    let said = finish(Command::new(program).args(arguments).current_dir(folder));
    // QEMU's programs are called through a path of their own.
    let errors = said.err.lines().map(|line| match line.starts_with("Try `") {
        true => "Try …\n".to_owned(),
        false => format!("{line}\n"),
    });
    (said.code, said.out, errors.collect())
}

/// Without the kernel's driver the checks of both are the same, up to our addition about the driver.
#[test]
fn what_is_no_device_is_refused_as_by_qemu() {
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let ours = folder.path().join("qemu-nbd");
    symlink(COWSHED, &ours).expect("a link");
    qemu.create(&folder.path().join("a.qcow2"), "qcow2", "", 1 << 20);
    fs::write(folder.path().join("file"), b"plain").expect("a file");
    let socket = folder.path().join("s").display().to_string();
    // In the background QEMU's has another folder.
    let file = folder.path().join("file").display().to_string();
    let cases: &[&[&str]] = &[
        &["-d", "file"],
        &["-d", "/dev/null"],
        &["-d", "/dev/nbd4096"],
        &["-d", "/"],
        &["-d", "-r", "nowhere"],
        &["-d"],
        &["-d", "file", "a.qcow2"],
        &["-d", "-L", "file"],
        &["-d", "--fork", "nowhere"],
        &["--disconnect", "file"],
        &["-f", "raw", "--image-opts", "-d", "file"],
        &["-n", "--cache=none", "-d", "file"],
        &["-c", "/dev/nbd4096"],
        &["-k", &socket, "-c", "/dev/nbd4096", "a.qcow2"],
        &["-k", &socket, "-c", &file, "a.qcow2"],
        &["-k", &socket, "-t", "-r", "-c", &file, "a.qcow2"],
        &["-k", &socket, "-c", "/", "a.qcow2"],
        &["-k", &socket, "-c", "x", "-c", "y", "a.qcow2"],
        &["-c", "file", "-L"],
        &["-c", "file", "--tls-creds", "t", "a.qcow2"],
    ];
    for arguments in cases {
        let theirs = run(&qemu.program("qemu-nbd"), arguments, folder.path());
        let mut said = run(&ours, arguments, folder.path());
        if let Some(at) = said.2.find(" (the kernel's nbd driver is not loaded") {
            assert!(said.2.contains("FUSE") && said.2.contains("nbd-client"), "{}", said.2);
            said.2.replace_range(at.., "\n");
        }
        assert_eq!(said, theirs, "{arguments:?}");
    }
    assert_eq!(fs::read(folder.path().join("file")).expect("a file"), b"plain");
    assert!(!Path::new(&socket).exists(), "the socket goes with the server");
}

/// QEMU's parent ends with success here, without a message.
#[test]
fn a_device_that_fails_is_reported_with_fork() {
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let ours = folder.path().join("qemu-nbd");
    symlink(COWSHED, &ours).expect("a link");
    qemu.create(&folder.path().join("a.qcow2"), "qcow2", "", 1 << 20);
    let socket = folder.path().join("s").display().to_string();
    let (code, output, errors) = run(&ours, &["-k", &socket, "--fork", "-c", "/dev/null", "a.qcow2"], folder.path());
    assert_eq!((code, output.as_str()), (Some(1), ""));
    assert!(errors.starts_with("qemu-nbd: Failed to set NBD socket"), "{errors}");
}

/// The guest's first program. Each line that it prints begins with "GUEST", so that the kernel's own are told apart.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc none /proc
mount -t devtmpfs none /dev
mkdir -p /sys /var/lock /tmp /run
mount -t sysfs none /sys
mount -t tmpfs none /tmp
for pass in 1 2 3 4; do for module in /modules/*.ko; do insmod $module 2>/dev/null; done; done
for tool in qemu-nbd qemu-img qemu-io; do ln -s cowshed /bin/$tool; done
cd /tmp
say() { echo "GUEST: $*"; }
try() { "$@" >said 2>&1; say "$(echo "$*" | cut -c1-60): $? $(head -n 1 said)"; }
disk() { say "$1: size $(cat /sys/block/nbd0/size) read-only $(cat /sys/block/nbd0/ro) pid $([ -e /sys/block/nbd0/pid ] && echo yes || echo no)"; }
# The end of a server is the end of its process.
gone() { n=0; while pidof qemu-nbd >/dev/null && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done; say "servers: $(pidof qemu-nbd | wc -w)"; }
bytes() { tr '\0' "\\$1" </dev/zero | head -c 1048576 | dd of=/dev/nbd0 bs=64k seek=$2 conv=notrunc 2>/dev/null; }
reads() { qemu-io -r -f qcow2 -c "read -P $1 $2 1M" d.qcow2 >read.txt; if grep -q "read 1048576/1048576" read.txt && ! grep -q failed read.txt; then say "$1 at $2"; else say "not $1 at $2: $(head -n 1 read.txt)"; fi; }

try qemu-nbd -d /dev/nbd0
qemu-img create -q -f qcow2 d.qcow2 64M
try qemu-nbd -c /dev/nbd0 -f qcow2 d.qcow2
disk connected
try qemu-nbd -k /tmp/other -c /dev/nbd0 -r --image-opts driver=null-co,size=1M
bytes 7 16
try qemu-nbd -d /dev/nbd0
gone
disk disconnected
reads 7 1M
printf 'o\nn\np\n1\n\n\nw\n' >table
try qemu-nbd -t -c /dev/nbd0 --discard=unmap --detect-zeroes=unmap d.qcow2
fdisk /dev/nbd0 <table >/dev/null 2>&1
bytes 11 32
blkdiscard -o 16777216 -l 1048576 /dev/nbd0 && say "discarded"
try qemu-nbd -d /dev/nbd0
gone
reads 9 2M
try qemu-nbd --persistent --fork --read-only -k /tmp/socket --pid-file /tmp/pid --connect /dev/nbd0 d.qcow2
disk read-only
dd if=/dev/zero of=/dev/nbd0 bs=512 count=1 2>/dev/null || say "can't be written"
say "partitions: $(cd /sys/block/nbd0; echo nbd0p*)"
say "sockets: $(ls /var/lock) $(ls /tmp/socket)"
kill $(cat /tmp/pid)
gone
disk stopped
try qemu-nbd -x disk -c /dev/nbd0 d.qcow2
bytes 5 64
kill $(pidof qemu-nbd)
gone
reads 5 4M
qemu-nbd -v -c /dev/nbd0 d.qcow2 >said 2>&1 &
n=0; while ! grep -q "now connected" said && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done
kill -9 $(pidof qemu-nbd)
wait
say "$(grep "now connected" said)"
n=0; while [ -e /sys/block/nbd0/pid ] && [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done
disk killed
try qemu-nbd -d /dev/nbd0
try qemu-img check -q -f qcow2 d.qcow2
say finished
echo o >/proc/sysrq-trigger
sleep 600
"#;

const SAID: &[&str] = &[
    "qemu-nbd -d /dev/nbd0: 0 /dev/nbd0 disconnected",
    "qemu-nbd -c /dev/nbd0 -f qcow2 d.qcow2: 0",
    "connected: size 131072 read-only 0 pid yes",
    "qemu-nbd -k /tmp/other -c /dev/nbd0 -r --image-opts driver=n: 1 qemu-nbd: Failed to set NBD socket",
    "qemu-nbd -d /dev/nbd0: 0 /dev/nbd0 disconnected",
    "servers: 0",
    "disconnected: size 0 read-only 0 pid no",
    // Data that were never synced have reached the image.
    "7 at 1M",
    "qemu-nbd -t -c /dev/nbd0 --discard=unmap --detect-zeroes=unm: 0",
    "discarded",
    "qemu-nbd -d /dev/nbd0: 0 /dev/nbd0 disconnected",
    "servers: 0",
    "9 at 2M",
    "qemu-nbd --persistent --fork --read-only -k /tmp/socket --pi: 0",
    "read-only: size 131072 read-only 1 pid yes",
    "can't be written",
    "partitions: nbd0p1",
    "sockets:  /tmp/socket",
    "servers: 0",
    "stopped: size 0 read-only 1 pid no",
    "qemu-nbd -x disk -c /dev/nbd0 d.qcow2: 0",
    "servers: 0",
    "5 at 4M",
    "NBD device /dev/nbd0 is now connected to d.qcow2",
    "killed: size 0 read-only 0 pid no",
    "qemu-nbd -d /dev/nbd0: 0 /dev/nbd0 disconnected",
    "qemu-img check -q -f qcow2 d.qcow2: 0",
    "finished",
];

#[test]
#[cfg(target_arch = "x86_64")]
fn an_image_is_a_block_device_of_the_kernel() {
    let (files, folder) = (guest_files(), temp_dir());
    let (initrd, program) = (folder.path().join("initrd"), folder.path().join("cowshed"));
    // Without the parts for debuggers it fits the guest's memory.
    let stripped = Command::new("strip").args(["-o", text(&program), COWSHED]).status();
    assert!(stripped.expect("strip runs: it comes with gcc").success());
    let program = fs::read(&program).expect("our own program");
    fs::write(&initrd, initial_file_system(&files, INIT, &[("bin/cowshed", program)])).expect("a file");
    let mut guest = Guest::boot(&files, &initrd, &["-m", "512"]);
    assert!(guest.wait().success(), "{}", guest.said);
    let said: Vec<&str> = guest.said.lines().filter_map(|line| Some(line.split_once("GUEST: ")?.1)).collect();
    let kernel_errors = guest.said_while_up().lines().filter(|line| line.contains("I/O error")).count();
    // The only one is of the write to a device for reading.
    assert!(kernel_errors <= 1, "{}", guest.said);
    assert_eq!(said.iter().map(|line| line.trim_end()).collect::<Vec<_>>(), SAID, "{}", guest.said);
}
