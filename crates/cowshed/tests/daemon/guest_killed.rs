// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A Debian kernel writes over vhost-user-blk while its daemon is killed, and goes on with the next one.

use super::process::{COWSHED, Serving, text};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::programs::tool;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fs;
use std::path::Path;

/// Pieces that the guest writes, one after the other, each durable before it says so.
const ROUNDS: usize = 40;
const PIECE_BYTES: usize = 256 << 10;

/// Writes the number of each piece all over it, then reads all of them back.
const INIT: &str = "#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t devtmpfs none /dev
for pass in 1 2 3 4 5; do
  for module in /modules/*.ko; do insmod $module 2>/dev/null; done
done
while [ ! -b /dev/vda ]; do sleep 0.1; done
piece() { yes piece $1 | head -c 262144; }
round=0
while [ $round -lt 40 ]; do
  piece $round | dd of=/dev/vda bs=64k seek=$((round * 4)) conv=notrunc,fsync 2>/dev/null || echo GUEST: piece $round failed
  echo GUEST: wrote piece $round
  round=$((round + 1))
done
echo 3 > /proc/sys/vm/drop_caches
round=0
while [ $round -lt 40 ]; do
  piece $round > /wanted
  dd if=/dev/vda bs=64k skip=$((round * 4)) count=4 2>/dev/null | cmp -s - /wanted || echo GUEST: piece $round differs
  round=$((round + 1))
done
echo GUEST: finished
echo o > /proc/sysrq-trigger
sleep 600
";

fn start(folder: &Path) -> Serving {
    let drive = format!("file={},id=disk,bps_wr={}", text(&folder.join("disk.qcow2")), 4 << 20);
    let export = "vhost-user-blk,id=v,node-name=disk,addr.type=unix,addr.path=v.sock,writable=on,writethrough=on";
    // That of a killed daemon.
    let _ = fs::remove_file(folder.join("n.sock"));
    let mut daemon = Serving::start(folder, &["serve", "-k", "n.sock", "--drive", &drive, "--export", export]);
    let line = daemon.line();
    assert!(line.starts_with("nbd+unix://"), "{line}");
    daemon
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_guest_goes_on_when_its_daemon_is_killed_twice() {
    let (files, folder, qemu) = (guest_files(), temp_dir(), Qemu::system());
    let at = |name: &str| text(&folder.path().join(name)).to_owned();
    tool(COWSHED, &["create", "-q", "-f", "qcow2", &at("disk.qcow2"), "16M"]);
    let initrd = folder.path().join("initrd");
    fs::write(&initrd, initial_file_system(&files, INIT, &[])).expect("a file");
    let mut daemon = start(folder.path());
    let socket = format!("socket,id=c,path={},reconnect=1", at("v.sock"));
    let memory = ["-object", "memory-backend-memfd,id=mem,size=256M,share=on", "-machine", "memory-backend=mem"];
    let devices = [&memory[..], &["-chardev", &socket, "-device", "vhost-user-blk-pci,chardev=c"]].concat();
    let mut guest = Guest::boot(&files, &initrd, &devices);
    for piece in [8, 20] {
        guest.await_words(&format!("GUEST: wrote piece {piece}"));
        daemon.signal("KILL");
        daemon.wait();
        daemon = start(folder.path());
    }
    guest.await_words("GUEST: finished");
    assert!(guest.wait().success(), "{}", guest.said);
    let up = guest.said_while_up();
    assert!(!up.contains("I/O error") && !up.contains("failed") && !up.contains("differs"), "{}", guest.said);
    daemon.stop();

    let image = folder.path().join("disk.qcow2");
    qemu.expect_no_corruption(&image);
    // A killed daemon may have allocated for a write that it didn't carry out.
    tool(COWSHED, &["check", "-q", "-r", "leaks", text(&image)]);
    qemu.expect_clean(&image);
    let disk = qemu.content(&image, "qcow2");
    for piece in 0..ROUNDS {
        let line = format!("piece {piece}\n").into_bytes();
        let expected: Vec<u8> = line.iter().copied().cycle().take(PIECE_BYTES).collect();
        assert!(disk[piece * PIECE_BYTES..][..PIECE_BYTES] == expected, "piece {piece} is another one");
    }
    assert!(disk[ROUNDS * PIECE_BYTES..].iter().all(|byte| *byte == 0), "nothing is written elsewhere");
}
