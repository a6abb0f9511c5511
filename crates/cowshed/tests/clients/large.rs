// SPDX-License-Identifier: Apache-2.0 OR MIT
//! libnbd's longest requests, beside QEMU's server. They are block status of 2^32 - 1 bytes and of unaligned tails, and
//! zero requests of several GiB. The announced block sizes are compared too.

use super::tools::{make_tools, path_with, text};
use cowshed_testkit::programs::finish_well;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::path::Path;
use std::process::Command;

/// Block status of many ranges, by both contexts.
const STATUS: &str = r#"
import nbd, sys
h = nbd.NBD()
for context in ("base:allocation", "qemu:allocation-depth"):
    h.add_meta_context(context)
h.connect_uri(sys.argv[1])
size, most = h.get_size(), 2**32 - 1
print("size", size, [h.get_block_size(which) for which in (nbd.SIZE_MINIMUM, nbd.SIZE_PREFERRED, nbd.SIZE_MAXIMUM)])
asked = [(most, 0), (most - 511, 0), (most, 1), (most, size - most), (size - 2**32, 2**32), (1, 0), (1, size - 1), (513, size - 513),
         (700, size - 700), (most, 512), (65537, most)]
for count, offset in asked:
    for flags in (0, nbd.CMD_FLAG_REQ_ONE):
        seen = []
        h.block_status(count, offset, lambda context, at, entries, error: seen.append((context, at, entries)), flags)
        print(count, offset, flags, sorted(seen))
"#;

/// Zero requests that the disk below can't do by itself.
const ZERO: &str = r#"
import nbd, sys
h = nbd.NBD()
h.connect_uri(sys.argv[1])
h.zero(3 << 30, 0)
h.zero(2**32 - 512, 512, nbd.CMD_FLAG_NO_HOLE)
try:
    h.zero(3 << 30, 0, nbd.CMD_FLAG_FAST_ZERO)
    print("fast")
except nbd.Error as error:
    print(error.errnum)
h.trim(2**32 - 512, 512)
assert h.pread(1 << 20, 2 << 30) == bytes(1 << 20)
"#;

/// The output of a script of libnbd's Python at a `qemu-nbd` with these arguments, and the most memory of the server,
/// in KiB.
fn at_server(tools: &Path, folder: &Path, arguments: &str, script: &str) -> (String, u64) {
    let command = format!(
        "rm -f $PWD/s; qemu-nbd -t -A -k $PWD/s --fork --pid-file $PWD/pid {arguments}
         trap 'kill $(cat pid); while kill -0 $(cat pid) 2>/dev/null; do sleep 0.01; done' EXIT
         /usr/bin/python3 -c \"$0\" 'nbd+unix:///?socket=s'
         sed -n 's/^VmHWM:[^0-9]*\\([0-9]*\\) kB/peak \\1/p' /proc/$(cat pid)/status"
    );
    let mut bash = Command::new("bash");
    bash.args(["-euc", &command, script]).current_dir(folder).env("PATH", path_with(Some(tools)));
    let said = finish_well(&mut bash);
    let (said, peak) = said.rsplit_once("peak ").expect("the memory");
    (said.to_owned(), peak.trim().parse().expect("a number"))
}

#[test]
fn the_status_of_long_ranges_and_tails_is_qemus() {
    let (folder, qemu) = (temp_dir(), Qemu::newest());
    let (here, ours, theirs) = (folder.path(), make_tools(folder.path()), qemu.img_path().parent().expect("a folder"));
    for (name, format, size) in [("disk.raw", "raw", "5368709820"), ("disk.qcow2", "qcow2", "5368709632")] {
        let path = here.join(name);
        qemu.img(["create", "-q", "-f", format, text(&path), size]).expect_ok();
        let writes = ["write -q -P 3 4G 64k", "write -q -P 3 1M 128k", "write -q -P 4 5367660544 64k"];
        qemu.io_commands(&path, format, &writes.map(str::to_owned)).expect_ok();
        let arguments = format!("-f {format} {name}");
        let (found, _) = at_server(&ours, here, &arguments, STATUS);
        let (expected, _) = at_server(theirs, here, &arguments, STATUS);
        assert_eq!(found.lines().collect::<Vec<_>>(), expected.lines().collect::<Vec<_>>(), "{name}");
    }
}

/// The protocol allows no more than 64 KiB, even if a disk needs more.
#[test]
fn the_smallest_block_announced_has_at_most_64_kib() {
    let folder = temp_dir();
    let ours = make_tools(folder.path());
    let script = "import nbd, sys; h = nbd.NBD(); h.connect_uri(sys.argv[1]); n = h.get_block_size(nbd.SIZE_MINIMUM); \
                  print(n); n = max(n, 512); h.pwrite(b'x' * n, n); print(h.pread(2 * n, 0) == bytes(n) + b'x' * n)";
    for align in [512, 4096, 65536, 131_072, 1 << 20] {
        let arguments =
            format!("--image-opts driver=blkdebug,align={align},image.driver=raw,image.file.filename=disk.raw");
        std::fs::File::create(folder.path().join("disk.raw")).and_then(|file| file.set_len(8 << 20)).expect("a disk");
        let (said, _) = at_server(&ours, folder.path(), &arguments, script);
        let lines: Vec<&str> = said.lines().collect();
        let minimum: u32 = lines[0].parse().expect("a number");
        assert_eq!(minimum, align.min(65536), "align {align}");
        // It is enough for a client, also where the disk needs more.
        assert_eq!(lines[1], "True", "align {align}");
    }
}

#[test]
fn zeroes_of_several_gib_are_written_where_nothing_helps() {
    let folder = temp_dir();
    let (here, ours) = (folder.path(), make_tools(folder.path()));
    // The server below takes no zero requests, as a file system without fallocate doesn't.
    let below = "$(nbdkit -U $PWD/below --pidfile below.pid --filter=nozero null size=8G; echo --discard=unmap) \
                 --image-opts driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=$PWD/below";
    let (said, peak_kib) = at_server(&ours, here, below, ZERO);
    let pid = std::fs::read_to_string(here.join("below.pid")).expect("a file");
    finish_well(Command::new("kill").arg(pid.trim()));
    assert_eq!(said.trim(), "95", "a fast zero is refused");
    assert!(peak_kib < 200 << 10, "{peak_kib} KiB for a request without data");
}
