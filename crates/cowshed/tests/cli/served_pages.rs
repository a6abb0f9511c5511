// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands of pages that serve a disk, run as they stand there, with the clients that the page shows.
//!
//! `documents.rs` runs docs/tutorial.md, and `crates/cowshed/tests/daemon/guest*.rs` boots the guests of docs/guest.md.

use super::pages::{commands, line_of};
use cowshed_testkit::qemu::peers_dir;
use std::path::Path;
use std::process::Command;

/// A command that serves until it is stopped.
struct Served {
    page: &'static str,
    /// How the command begins; `sudo` in front of it is left out.
    command: &'static str,
    /// The script in front of it.
    prepare: &'static str,
    /// A command that succeeds once it serves.
    is_ready: &'static str,
    /// The clients. `@WORDS@` is the page's line that begins with these words.
    client: &'static str,
}

const READ_WEB: &str = "qemu-io -f raw -c 'read -P 0 0 1M' 'nbd+unix:///disk?socket=run/cowshed/web.sock'";
const DISK: &str = "cowshed create -q -f qcow2 disk.qcow2 1M; cowshed io -c 'write -P 7 0 64k' disk.qcow2 >&2";

const OVERLAY: &str =
    "cowshed create -q -f qcow2 disk.qcow2 1M; cowshed create -q -f qcow2 -b disk.qcow2 -F qcow2 overlay.qcow2";
const READ_DISK: &str = "qemu-io -f raw -c 'read 0 512' 'nbd+unix:///disk?socket=nbd.sock'";

const SERVED: &[Served] = &[
    Served {
        page: "../README.md",
        command: "serve --monitor qmp.sock overlay.qcow2",
        prepare: OVERLAY,
        is_ready: "grep -q nbd+unix out && test -S qmp.sock",
        client: "qemu-io -f raw -c 'write 0 64k' \"$(grep nbd+unix out)\"",
    },
    Served {
        page: "../README.md",
        command: "share overlay.qcow2",
        prepare: OVERLAY,
        is_ready: "grep -q http out",
        client: "curl -sS -OJ \"$(cat out)\"; cowshed compare -F raw overlay.qcow2 overlay.raw",
    },
    Served {
        page: "daemon.md",
        command: "serve disk.qcow2",
        prepare: DISK,
        is_ready: "grep -q nbd+unix out",
        client: "qemu-io -f raw -c 'read -P 7 0 64k' \"$(cat out)\"",
    },
    Served {
        page: "daemon.md",
        command: "serve --monitor qmp.sock --drive",
        prepare: DISK,
        is_ready: "test -S qmp.sock",
        client: "cowshed top --count 1 qmp.sock | grep -q '^disk'",
    },
    // 100 requests at 500 a second: a tenth of a second's may go at once.
    Served {
        page: "limits.md",
        command: "serve -k nbd.sock --drive file=disk.qcow2,id=disk,throttling.iops-total=500,throttling.bps",
        prepare: DISK,
        is_ready: READ_DISK,
        client: "begun=$(date +%s%N); cowshed bench -q -f raw -c 100 'nbd+unix:///disk?socket=nbd.sock'
            test $(($(date +%s%N) - begun)) -gt 50000000",
    },
    Served {
        page: "limits.md",
        command: "serve -k nbd.sock --drive file=disk.qcow2,id=disk,throttling.iops-total=500,throttling.group",
        prepare: "for n in disk data; do cowshed create -q -f qcow2 $n.qcow2 1M; done",
        is_ready: READ_DISK,
        client: "begun=$(date +%s%N); cowshed bench -q -f raw -c 100 'nbd+unix:///data?socket=nbd.sock'
            test $(($(date +%s%N) - begun)) -gt 50000000",
    },
    Served {
        page: "caches.md",
        command: "serve -k nbd.sock --metadata-budget",
        prepare: DISK,
        is_ready: READ_DISK,
        client: "qemu-io -f raw -c 'read -P 7 0 64k' 'nbd+unix:///disk?socket=nbd.sock'",
    },
    Served {
        page: "formats/vvfat.md",
        command: "serve --read-only -k nbd.sock",
        prepare: "mkdir folder; yes | head -c 100k >folder/a.txt",
        is_ready: "qemu-io -r -f raw -c 'read 0 512' 'nbd+unix:///?socket=nbd.sock'",
        client: "cowshed convert -q -f raw 'nbd+unix:///?socket=nbd.sock' disk.raw; grep -q DRIVERS disk.raw",
    },
    Served {
        page: "statistics.md",
        command: "serve -k nbd.sock",
        prepare: DISK,
        is_ready: READ_DISK,
        client: "@cowshed top@ | grep -q '^disk'; @curl -sS@ | grep -q 'export=\"disk\",kind=\"read\"'",
    },
    Served {
        page: "guest.md",
        command: "serve -k /run/cowshed/web.sock",
        prepare: "mkdir -p run/cowshed; cowshed create -q -f qcow2 web.qcow2 1M",
        is_ready: READ_WEB,
        client: "echo quit | @qemu-system-x86_64@ -S -nodefaults -display none -monitor stdio",
    },
    Served {
        page: "guest.md",
        command: "serve -k nbd.sock --drive file=web.qcow2,id=web",
        prepare: "cowshed create -q -f raw base.raw 1M; cowshed convert -O qcow2 base.raw base.qcow2
            @cowshed create -f qcow2 -b base.qcow2 -F qcow2 web.qcow2@; @cowshed create -f qcow2 -b base.qcow2 -F qcow2 mail.qcow2@",
        is_ready: "qemu-io -f raw -c 'write 0 64k' 'nbd+unix:///web?socket=nbd.sock'",
        client: "qemu-io -f raw -c 'write 0 64k' 'nbd+unix:///mail?socket=nbd.sock'",
    },
    Served {
        page: "guest.md",
        command: "serve -x disk -k n.sock --monitor m.sock",
        prepare: "cowshed create -q -f qcow2 disk.qcow2 1M; @touch disk.img@",
        is_ready: "test -S v.sock",
        client: "qemu-io -f raw -c 'write -P 5 0 64k' 'nbd+unix:///disk?socket=n.sock'
            head -c 65536 disk.img | tr -d '\\005' | cmp - /dev/null
            qemu-io-vhost --image-opts driver=virtio-blk-vhost-user,path=v.sock,cache.direct=on -c 'read -P 5 0 64k'",
    },
    // The recovery: a new overlay is the base again.
    Served {
        page: "guest.md",
        command: "serve -x disk -k n.sock --drive file=disk.qcow2,id=disk",
        prepare: "yes base | head -c 1M >base.raw; cp base.raw before.raw
            @cowshed create -f qcow2 -b base.raw -F raw disk.qcow2@
            cowshed io -c 'write -P 9 0 64k' disk.qcow2; if cowshed compare -q -F raw disk.qcow2 base.raw; then exit 97; fi
            rm disk.qcow2; @cowshed create -f qcow2 -b base.raw -F raw disk.qcow2@",
        is_ready: "qemu-io -f raw -c 'read 0 512' 'nbd+unix:///disk?socket=n.sock'",
        client: "qemu-img compare -f raw -F raw 'nbd+unix:///disk?socket=n.sock' before.raw
            qemu-io -f raw -c 'write -P 9 0 64k' 'nbd+unix:///disk?socket=n.sock'; cmp base.raw before.raw",
    },
    Served {
        page: "vhost-user-blk.md",
        command: "qemu-storage-daemon",
        prepare: DISK,
        is_ready: "test -S run/disk0.sock",
        client: "ln -s $(command -v qemu-io-vhost) qemu-io; PATH=.:$PATH; @qemu-io --image-opts@ -c 'read -P 7 0 64k'",
    },
    Served {
        page: "fuse.md",
        command: "qemu-storage-daemon",
        prepare: "cowshed create -q -f qcow2 disk.qcow2 1M; cowshed io -c 'write -P 7 0 64k' disk.qcow2 >&2; touch disk.raw",
        is_ready: "test -s disk.raw",
        client: "head -c 65536 disk.raw | tr -d '\\007' | cmp - /dev/null",
    },
    Served {
        page: "share.md",
        command: "share disk.qcow2",
        prepare: DISK,
        is_ready: "grep -q http out",
        client: "curl -sS -OJ \"$(cat out)\"; cowshed compare -F raw disk.qcow2 disk.raw
            truncate -s 4k disk.raw; curl -sS -C - -O \"$(cat out)\"; cowshed compare -F raw disk.qcow2 disk.raw
            nbdkit -U - curl \"$(cat out)\" --run 'qemu-img compare -f qcow2 -F raw disk.qcow2 \"$uri\"'",
    },
    Served {
        page: "share.md",
        command: "serve disk.qcow2 --export http",
        prepare: DISK,
        is_ready: "curl -sSf -I http://localhost:8080/disk",
        client: "@curl -r 0-511@ | grep -q '0707 0707 0707'",
    },
];

/// A script of a page with its sockets in the folder, and a port that is free.
fn placed(script: &str, port: u16) -> String {
    script.replace("/run/", "run/").replace("8080", &port.to_string())
}

/// `@WORDS@` replaced by the page's line that begins with the words.
fn with_lines(page: &str, script: &str) -> String {
    let parts: Vec<&str> = script.split('@').collect();
    assert!(parts.len() % 2 == 1, "{script}");
    let part = |(number, part): (usize, &&str)| match number % 2 {
        0 => (*part).to_owned(),
        _ => line_of(page, part),
    };
    parts.iter().enumerate().map(part).collect()
}

#[test]
fn commands_that_serve_work_as_written() {
    let program = Path::new(env!("CARGO_BIN_EXE_cowshed")).parent().expect("its folder");
    let path = format!("{}:{}:{}", program.display(), std::env::var("PATH").expect("PATH"), peers_dir().display());
    let mut wrong = Vec::new();
    for Served { page, command, prepare, is_ready, client } in SERVED {
        let shown = commands(page).into_iter().find(|shown| shown.starts_with(command));
        let Some(shown) = shown else {
            wrong.push(format!("{page}: no command begins with {command}"));
            continue;
        };
        // Short, for its sockets.
        let folder = tempfile::tempdir().expect("a folder");
        let port =
            std::net::TcpListener::bind("localhost:0").and_then(|free| free.local_addr()).expect("a port").port();
        let script = format!(
            "set -eu; mkdir -p run\n{}\ncowshed {shown} >out 2>err </dev/null & daemon=$!
            trap 'kill $daemon 2>/dev/null || true' EXIT
            until ({is_ready}) >ready 2>&1; do
                kill -0 $daemon 2>/dev/null || {{ cat err ready >&2; exit 98; }}
                sleep 0.05
            done
            {}\nkill -TERM $daemon; trap - EXIT; wait $daemon",
            with_lines(page, prepare),
            with_lines(page, client),
        );
        let output = Command::new("timeout")
            .args(["120", "sh", "-c", &placed(&script, port)])
            .current_dir(&folder)
            .env("PATH", &path)
            .output()
            .expect("a shell");
        if !output.status.success() {
            let said = [output.stdout, output.stderr].concat();
            wrong.push(format!("{page}: {shown}: {}: {}", output.status, String::from_utf8_lossy(&said)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The output of a script, which must end well in a folder of its own.
#[track_caller]
fn run(script: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_cowshed")).parent().expect("its folder");
    let path = format!("{}:{}:/usr/sbin:/sbin", program.display(), std::env::var("PATH").expect("PATH"));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    let ran =
        Command::new("timeout").args(["120", "sh", "-euc", script]).current_dir(&folder).env("PATH", path).output();
    let ran = ran.expect("a shell");
    let said = String::from_utf8_lossy(&[ran.stdout, ran.stderr].concat()).into_owned();
    assert!(ran.status.success(), "{script}: {}: {said}", ran.status);
    said
}

/// A disk of two partitions and a snapshot, and an upload.
const PARTED: &str = "truncate -s 8M raw
    printf '\\0\\0\\0\\0\\203\\0\\0\\0\\0\\10\\0\\0\\0\\20\\0\\0\\0\\0\\0\\0\\203\\0\\0\\0\\0\\30\\0\\0\\0\\20\\0\\0' |
        dd of=raw bs=1 seek=446 conv=notrunc status=none
    printf '\\125\\252' | dd of=raw bs=1 seek=510 conv=notrunc status=none
    cowshed convert -O qcow2 raw disk.qcow2; cowshed snapshot -c before-upgrade disk.qcow2; cp raw upload.img
    touch disk.raw part.raw\n";

/// The cells of a page's tables that begin with a command of ours, without what follows it.
fn cells(page: &str, start: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let rows = text.lines().filter(|line| line.starts_with('|'));
    rows.flat_map(|row| row.split('`').skip(1).step_by(2))
        .filter(|cell| cell.starts_with(start))
        .map(str::to_owned)
        .collect()
}

#[test]
fn mounts_of_the_page_work_as_written() {
    // Not every machine has fdisk.
    let line = |start: &str| line_of("fuse.md", start).replace("fdisk -l disk.raw", "cmp raw disk.raw");
    let [mount, fdisk, umount] = ["cowshed mount", "fdisk", "cowshed umount"].map(line);
    run(&format!("{PARTED}{mount}\n{fdisk}\n{umount}\ntest ! -s disk.raw"));
    run(&format!("{PARTED}{}", line("unshare -rm")));
    let mounts = cells("fuse.md", "cowshed mount ");
    assert!(mounts.len() >= 7, "{mounts:?}");
    for mount in mounts {
        let file = mount.split(' ').next_back().expect("a file");
        run(&format!("{PARTED}{mount}\ntest -s {file}\ncowshed umount {file}\ntest ! -s {file}"));
    }
}

#[test]
fn devices_of_the_page_are_refused_without_the_driver() {
    if Path::new("/dev/ublk-control").exists() {
        return;
    }
    let shown: Vec<String> = commands("ublk.md");
    assert_eq!(shown.len(), 3, "{shown:?}");
    for command in shown {
        let said =
            run(&format!("cowshed create -q -f qcow2 disk.qcow2 1M; truncate -s 1M disk.raw; ! cowshed {command}"));
        assert!(said.contains("modprobe ublk_drv"), "{command}: {said}");
    }
}

/// The block of code of a page that begins with a line.
fn block_of(page: &str, first: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let blocks = text.split("```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    let found = blocks.map(|(_, code)| code).find(|code| code.starts_with(first));
    found.unwrap_or_else(|| panic!("{page} has no block that begins with {first}")).to_owned()
}

#[test]
fn the_page_about_installing_works_as_written() {
    let line = |start: &str| line_of("install.md", start);
    let built = r#"target/"$(rustc -vV | sed -n 's/^host: //p')"/release/cowshed"#;
    let install = line("sudo install -m 755");
    assert!(install.contains(built), "{install}");
    let script = [
        "HOME=$PWD; mkdir -p usr/local/bin usr/local/share/man/man1 usr/share/bash-completion/completions".to_owned(),
        install.replace(built, "\"$(command -v cowshed)\""),
        line("sudo cowshed man"),
        line("cowshed completions bash |"),
        block_of("install.md", "mkdir -p ~/cowshed-bin"),
        "touch .cowshed-1-0.part".to_owned(),
        // Not every machine has fuser.
        format!("{} || touch without-fuser", line("command -v fuser")),
        "test -e without-fuser || test ! -e .cowshed-1-0.part".to_owned(),
        "test -s usr/local/share/man/man1/cowshed-convert.1".to_owned(),
        "grep -q convert usr/share/bash-completion/completions/cowshed".to_owned(),
    ];
    let said = run(&script.join("\n").replace("sudo ", "").replace(" /usr/", " \"$PWD\"/usr/"));
    assert!(said.contains("qemu-img version 11.1"), "{said}");
}

#[test]
fn the_nightly_backup_of_the_page_restores_the_disk() {
    let line = |start: &str| line_of("backup.md", start);
    let nightly = block_of("backup.md", "#!/usr/bin/env python3");
    let serve = line("cowshed serve -k nbd.sock --monitor qmp.sock --drive file=disk.qcow2");
    let [info, compare] = ["cowshed info", "cowshed compare"].map(line);
    let [copy, overlay] = ["cowshed convert -t writeback", "cowshed create -f qcow2 -b"].map(line);
    let shorten = ["cowshed commit", "cowshed rebase", "rm FIRST"].map(line).join("\n");
    let shorten =
        ["FULL", "FIRST", "SECOND"].iter().fold(shorten, |text, name| text.replace(name, &format!("${name}")));
    // A backup has the second of its start in its name, hence the pause.
    run(&format!(
        r#"{DISK}
        cat >nightly <<'END'
{nightly}END
        chmod +x nightly; mkdir backups
        {serve} >out 2>err </dev/null & daemon=$!
        trap 'kill $daemon 2>/dev/null || true' EXIT
        until test -S qmp.sock -a -S nbd.sock; do kill -0 $daemon; sleep 0.05; done
        for n in 1 2 3; do
            qemu-io -f raw -c "write -P $n ${{n}}00k 64k" 'nbd+unix:///disk?socket=nbd.sock'
            (cd backups; ../nightly ../qmp.sock disk); sleep 1
        done
        kill -TERM $daemon; trap - EXIT; wait $daemon
        cp disk.qcow2 backups; cd backups
        {info}; {compare}
        {copy}; cowshed compare disk.qcow2 restored.qcow2; rm restored.qcow2
        {overlay}; cowshed compare disk.qcow2 restored.qcow2
        set -- 2*.qcow2; test $# = 3; FULL=$1 FIRST=$2 SECOND=$3
        {shorten}
        {compare}"#
    ));
}

/// Commands beside a machine that has `disk.qcow2` for writing: those that work, and those that are refused.
const WORK: &[&str] = &[
    "cowshed info -U disk.qcow2",
    "cowshed check -U disk.qcow2",
    "cowshed map -U disk.qcow2",
    "cowshed measure -U -O qcow2 disk.qcow2",
    "cowshed compare -U disk.qcow2 disk.qcow2",
    "cowshed dd -U if=disk.qcow2 of=copy.raw",
    "cowshed bench -U -c 1 disk.qcow2",
    "cowshed convert -U -O raw disk.qcow2 converted.raw",
    "cowshed snapshot -U -l disk.qcow2",
    "cowshed convert -O raw base.qcow2 base.raw",
];
const REFUSED: &[&str] = &[
    "cowshed info disk.qcow2",
    "cowshed resize base.qcow2 128M",
    "cowshed resize disk.qcow2 2M",
    "cowshed snapshot -c now disk.qcow2",
    "cowshed commit disk.qcow2",
    "cowshed rebase -u -b '' disk.qcow2",
    "cowshed bitmap --add disk.qcow2 new",
    "cowshed serve disk.qcow2",
    "cowshed serve --read-only disk.qcow2",
];

#[test]
fn commands_beside_a_machine_answer_as_the_page_says() {
    let shown: Vec<String> =
        cells("sharing.md", "cowshed ").into_iter().filter(|cell| cell.contains(".qcow2")).collect();
    assert!(shown.len() >= 5, "{shown:?}");
    let unknown: Vec<&String> =
        shown.iter().filter(|cell| !WORK.contains(&cell.as_str()) && !REFUSED.contains(&cell.as_str())).collect();
    assert!(unknown.is_empty(), "commands without a case: {unknown:?}");
    let works: Vec<String> = WORK.iter().map(|command| format!("{command} >work 2>&1")).collect();
    let refused: Vec<String> =
        REFUSED.iter().map(|command| format!("timeout 20 {command} </dev/null >refused 2>&1 || cat refused")).collect();
    let said = run(&format!(
        "cowshed create -q -f qcow2 base.qcow2 1M; cowshed create -q -f qcow2 -b base.qcow2 -F qcow2 disk.qcow2
        qemu-system-x86_64 -S -nodefaults -display none -drive if=none,id=d,format=qcow2,file=disk.qcow2 \\
            -device virtio-blk-pci,drive=d -daemonize -pidfile pid </dev/null >out 2>err || cat err
        machine=$(cat pid); trap 'kill $machine' EXIT
        {}\n{}",
        works.join("\n"),
        refused.join("\n"),
    ));
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/sharing.md");
    let page = std::fs::read_to_string(page).expect("the page is there");
    let sentences: Vec<&str> =
        said.lines().filter_map(|line| line.split_once(".qcow2: ")).map(|(_, rest)| rest).collect();
    assert!(sentences.len() >= REFUSED.len(), "{said}");
    let unsaid: Vec<&&str> = sentences.iter().filter(|sentence| !page.contains(**sentence)).collect();
    assert!(unsaid.is_empty(), "sentences that the page lacks: {unsaid:?}");
}
