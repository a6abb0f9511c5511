// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images on encrypted servers, with credentials from `--object`, in every verb beside the real tools.

use crate::in_use::Server;
use crate::oracle::Oracle;
use std::path::Path;
use std::process::Command;

#[path = "../daemon/credentials.rs"]
pub mod credentials;

const OBJECT: &str = "--object tls-creds-x509,id=t,dir=client,endpoint=client";
const EXPORT: &str = "driver=nbd,server.type=unix,server.path=n.sock,tls-creds=t,tls-hostname=localhost";

/// A folder with credentials, the server's in it and the client's in `client`, and a qcow2 image, which the server of the
/// newest QEMU offers as it is in its file.
fn served() -> (Oracle, Server) {
    let oracle = Oracle::new();
    credentials::make_credentials(&oracle.work());
    oracle.make("create -q -f qcow2 disk.qcow2 8M");
    oracle.io(&["write -P 5 1M 2M", "write -P 6 7M 64k"], "disk.qcow2");
    oracle.make("snapshot -c one disk.qcow2");
    oracle.make("convert -O raw disk.qcow2 plain.raw");
    // An export doesn't grow.
    let image = std::fs::File::options().write(true).open(oracle.work().join("disk.qcow2")).expect("the image");
    image.set_len(32 << 20).expect("room for more");
    let server = serve(&oracle, &oracle.work().join("n.sock"));
    (oracle, server)
}

fn serve(oracle: &Oracle, socket: &Path) -> Server {
    let mut command = Command::new(oracle.qemu.img_path().with_file_name("qemu-nbd"));
    command.args(["-t", "-e", "0", "-f", "raw", "--tls-creds", "s", "--object"]);
    command.arg("tls-creds-x509,id=s,dir=.,endpoint=server,verify-peer=off").arg("-k").arg(socket).arg("disk.qcow2");
    command.current_dir(oracle.work());
    Server::start(command, socket)
}

#[test]
fn every_verb_that_reads_takes_credentials() {
    let (oracle, _server) = served();
    let qcow2 = format!("driver=qcow2,file.{}", EXPORT.replace(',', ",file."));
    let in_full = |line: &str| line.replace("OBJECT", OBJECT).replace("EXPORT", EXPORT).replace("QCOW2", &qcow2);
    for line in [
        "check OBJECT --image-opts QCOW2",
        "map OBJECT --output=json --image-opts EXPORT",
        "map OBJECT --output=json --image-opts QCOW2",
        "measure OBJECT -O qcow2 --image-opts QCOW2",
        "snapshot OBJECT -l --image-opts QCOW2",
        "compare OBJECT --image-opts QCOW2 driver=raw,file.filename=plain.raw",
        "compare OBJECT --image-opts driver=raw,file.filename=plain.raw QCOW2",
    ] {
        oracle.compare(&in_full(line));
    }
    for line in [
        "info OBJECT --image-opts EXPORT",
        "info OBJECT --output=json --image-opts QCOW2",
        // A client's are the default.
        "info --object tls-creds-x509,id=t,dir=client --image-opts EXPORT",
        "info --object tls-creds-x509,id=t,dir=client,verify-peer=no --image-opts EXPORT",
        "info --object {\"qom-type\":\"tls-creds-x509\",\"id\":\"t\",\"dir\":\"client\"} --image-opts EXPORT",
    ] {
        let arguments: Vec<String> = in_full(line).split(' ').map(str::to_owned).collect();
        let (real, mut ours) = (oracle.real(&oracle.work(), &arguments), oracle.ours(&oracle.work(), &arguments));
        // Our names say that the connection is encrypted.
        ours.out = ours.out.replace("nbds+unix:///?socket=n.sock&tls-hostname=localhost", "nbd+unix://?socket=n.sock");
        assert_eq!((ours.code, &ours.out, &ours.err), (real.code, &real.out, &real.err), "{line}");
        assert!(real.code == Some(0) && real.out.contains("n.sock"), "{line}: {real:?}");
    }
    let same = |theirs: &Path, own: &Path, line: &str| {
        let read = |folder: &Path| std::fs::read(folder.join("copy.raw")).expect("the copy");
        let (theirs, own) = (read(theirs), read(own));
        assert!(theirs == own, "{line}: {} and {} bytes", theirs.len(), own.len());
    };
    let socket = oracle.work().join("n.sock").display().to_string();
    let lines = [
        ("convert OBJECT -O raw --image-opts QCOW2 copy.raw", "copy.raw"),
        ("dd OBJECT -O raw --image-opts bs=64k skip=14 if=QCOW2 of=copy.raw", "copy.raw"),
        (
            "create -q -f qcow2 OBJECT -F raw -b json:{\"driver\":\"raw\",\"file\":{\"driver\":\"nbd\",\"path\":\"n.sock\",\"tls-creds\":\"t\",\"tls-hostname\":\"localhost\"}} over.qcow2",
            "",
        ),
    ];
    for (line, name) in lines {
        let line = in_full(line).replace("n.sock", &socket);
        oracle.compare_writing(&line, |theirs, own| {
            if !name.is_empty() {
                same(theirs, own, &line);
            }
        });
    }
    oracle.verdict();
}

#[test]
fn verbs_that_write_and_measure_take_credentials() {
    let (oracle, server) = served();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let output = command.args(arguments).current_dir(oracle.work()).output().expect("our own binary runs");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}");
        assert!(!said.contains("verification failed"), "{arguments:?}: {said}");
    };
    let object = OBJECT.split(' ').collect::<Vec<_>>();
    let qcow2 = format!("driver=qcow2,file.{}", EXPORT.replace(',', ",file."));
    let with = |verb: &str, rest: &[&str]| run(&[&[verb], &object[..], rest].concat());
    with("io", &["--image-opts", "-c", "write -P 9 2M 64k", "-c", "read -P 9 2M 64k", &qcow2]);
    with("bench", &["-c", "20", "--image-opts", &qcow2]);
    with("snapshot", &["-c", "two", "--image-opts", &qcow2]);
    with("bitmap", &["--add", "--image-opts", &qcow2, "b"]);
    with("amend", &["-o", "lazy_refcounts=on", "--image-opts", &qcow2]);
    with("convert", &["-n", "-f", "raw", "--target-image-opts", "plain.raw", &qcow2]);
    with("resize", &["--shrink", "--image-opts", &qcow2, "7M"]);
    drop(server);
    oracle.qemu.expect_clean(&oracle.work().join("disk.qcow2"));
    let list =
        oracle.qemu.img(["snapshot", "-l", oracle.work().join("disk.qcow2").to_str().expect("text")]).expect_ok();
    assert!(list.stdout.contains("two"), "{}", list.stdout);
}

#[test]
fn wrong_credentials_are_refused_in_qemus_words() {
    let (oracle, _server) = served();
    for object in [
        "",
        "--object tls-creds-x509,id=other,dir=client",
        "--object tls-creds-x509,id=t,dir=.,endpoint=server",
        "--object tls-creds-x509,id=t,dir=nowhere",
        "--object tls-creds-x509,id=t",
        "--object tls-creds-x509,dir=client",
        "--object tls-creds-x509,id=t,dir=client,foo=bar",
        "--object tls-creds-x509,id=t,dir=client,verify-peer=maybe",
        "--object tls-creds-x509,id=t,dir=client,endpoint=middle",
        "--object tls-creds-x509,id=t,dir",
        "--object secret,id=t,data=x",
        "--object secret,id=t,data",
        "--object tls-creds-x509,id=t,dir=client --object tls-creds-x509,id=t,dir=client",
        "--object secret,id=t,data=x --object tls-creds-x509,id=t,dir=client",
    ] {
        oracle.compare_refusal(format!("info {object} --image-opts {EXPORT}").replace("  ", " ").as_str());
    }
    oracle.verdict();
    // There are none of these here, which is said by name.
    for kind in ["tls-creds-psk", "tls-creds-anon"] {
        let reason = format!("objects of type '{kind}' are not supported: the TLS library has no");
        for line in [
            "info OBJECT --image-opts EXPORT",
            "convert OBJECT --image-opts EXPORT copy.raw",
            "create OBJECT -f qcow2 new.qcow2 1M",
            "dd OBJECT --image-opts if=EXPORT of=copy.raw",
        ] {
            let object = format!("--object {kind},id=t,dir=client");
            let said = oracle.refused(&line.replace("OBJECT", &object).replace("EXPORT", EXPORT));
            assert!(said.contains(&reason), "{line}: {said}");
        }
    }
}
