// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Under a limit of threads each verb does its work, or says that it could not start a thread.

use cowshed_testkit::qemu::{Qemu, temp_dir};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A user without any other process, so that a limit counts the threads of one program.
const USER: &str = "61234";

#[test]
fn a_message_names_threads_where_few_are_allowed() {
    let folder = temp_dir();
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("the folder is ours");
    let image = folder.path().join("a");
    Qemu::system().create(&image, "qcow2", "", 4 << 20);
    std::fs::set_permissions(&image, Permissions::from_mode(0o666)).expect("the image is ours");
    // The limit does not hold for root.
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|of| std::os::unix::fs::MetadataExt::uid(&of) == 0);
    let mut refused = 0;
    for threads in 1..=4 {
        for line in [
            "qemu-img info a",
            "qemu-img check a",
            "qemu-img resize a 8M",
            "qemu-img convert -m 8 -c -O qcow2 a b",
            "qemu-img bench -c 10 a",
            "qemu-io -c length a",
            "qemu-nbd -k nosuch/s a",
            "serve -k nosuch/s a",
            "qemu-storage-daemon --chardev socket,id=m,path=q,server=on,wait=off --monitor m --blockdev nosuch",
        ] {
            let (program, user) = match is_root {
                true => ("setpriv", ["--reuid", USER, "--regid", USER, "--clear-groups", "prlimit"].as_slice()),
                false => ("prlimit", [].as_slice()),
            };
            let mut command = Command::new(program);
            command.args(user).arg(format!("--nproc={threads}")).arg(env!("CARGO_BIN_EXE_cowshed"));
            let output = command.args(line.split(' ')).current_dir(folder.path()).output();
            let output = output.expect("setpriv and prlimit must be installed (util-linux)");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.code().is_some_and(|code| code <= 1), "{threads}: {line}: {output:?}");
            let is_about_threads = said.contains("could not start a thread");
            assert!(
                output.status.success() || is_about_threads || said.contains("nosuch"),
                "{threads}: {line}: {said}"
            );
            refused += usize::from(is_about_threads && !output.status.success());
        }
    }
    assert!(refused > 0, "no limit was met");
}
