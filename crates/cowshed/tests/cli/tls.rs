// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images on encrypted servers, with credentials from `--object`, in every verb beside the real tools.

use crate::in_use::Server;
use crate::oracle::Oracle;
use cowshed_testkit::credentials;
use std::path::Path;
use std::process::Command;

const OBJECT: &str = "--object tls-creds-x509,id=t,dir=client,endpoint=client";
const EXPORT: &str = "driver=nbd,server.type=unix,server.path=n.sock,tls-creds=t,tls-hostname=localhost";

/// A folder with a qcow2 image and with credentials: the server's in it, and the client's in `client`. The server of
/// the newest QEMU offers the image as it is in its file.
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
        // Our names show that the connection is encrypted.
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
    // There are none of these here, which the error tells by name.
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

/// Makes authorities and certificates below `$1`, each in a folder of its own with the files of a server and of a client.
const OWN_CERTIFICATES: &str = r#"
set -e
cd "$1"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
authority() { # NAME SUBJECT EXTENSION...
  name=$1 subject=$2; shift 2
  key "$name.key"
  openssl req -x509 -new -key "$name.key" -subj "/CN=$subject" -days 3650 -out "$name.pem" $(printf -- '-addext %s ' "$@")
}
printf '%s\n' '[ca]' 'default_ca=d' '[d]' 'database=index' 'rand_serial=yes' 'default_md=sha256' 'policy=p' \
  'new_certs_dir=.' 'unique_subject=no' '[p]' 'commonName=supplied' >ca.cnf
: >index
issue() { # NAME AUTHORITY YEARS EXTENSION...: from and to these years
  name=$1 by=$2 from=${3%-*} to=${3#*-}; shift 3
  key "$name.key"
  openssl req -new -key "$name.key" -subj "/CN=$name" -out request
  printf '%s\n' "$@" >extensions
  openssl ca -batch -config ca.cnf -cert "$by.pem" -keyfile "$by.key" -in request -startdate "${from}0101000000Z" \
    -enddate "${to}0101000000Z" -extfile extensions -out "$name.pem" -notext
}
folder() { # NAME CERTIFICATE KEY AUTHORITY
  mkdir "$1"
  cp "$4" "$1/ca-cert.pem"
  for end in server client; do
    cp "$2" "$1/$end-cert.pem"
    cp "$3" "$1/$end-key.pem"
  done
}
now=2020-2045 ca=basicConstraints=critical,CA:TRUE leaf=basicConstraints=CA:FALSE
authority a Authority $ca
authority b Other $ca
authority same Authority $ca
authority leaf-only Leaf basicConstraints=critical,CA:FALSE
authority no-sign NoSign $ca keyUsage=digitalSignature
authority never-sign NeverSign $ca keyUsage=critical,digitalSignature
issue old-authority a 2010-2015 $ca
certificate() { issue "$@"; folder "in-$1" "$1.pem" "$1.key" "$2.pem"; }
certificate good a $now $leaf
certificate bare a $now subjectKeyIdentifier=hash
certificate authority a $now $ca
certificate expired a 2010-2015 $leaf
certificate future a 2043-2045 $leaf
certificate server a $now extendedKeyUsage=critical,serverAuth
certificate client a $now extendedKeyUsage=critical,clientAuth
certificate advised a $now extendedKeyUsage=clientAuth keyUsage=cRLSign
certificate code a $now extendedKeyUsage=critical,codeSigning
certificate any a $now extendedKeyUsage=critical,anyExtendedKeyUsage
certificate encipher a $now keyUsage=critical,keyEncipherment
certificate sign a $now keyUsage=critical,digitalSignature
certificate of-leaf leaf-only $now $leaf
certificate of-no-sign no-sign $now $leaf
certificate of-never-sign never-sign $now $leaf
certificate of-old old-authority $now $leaf
issue stranger b $now $leaf
issue "no-identifier" a $now $leaf authorityKeyIdentifier=none
folder in-stranger stranger.pem stranger.key a.pem
folder in-same good.pem good.key same.pem
folder in-signed-by-another no-identifier.pem no-identifier.key same.pem
folder in-mismatch good.pem stranger.key a.pem
cat of-old.pem old-authority.pem >chain.pem
folder in-chain chain.pem of-old.key a.pem
echo none >none.pem
folder in-none none.pem good.key a.pem
folder in-no-key good.pem none.pem a.pem
folder in-no-authority good.pem good.key none.pem
folder in-missing-key good.pem good.key a.pem
rm in-missing-key/client-key.pem
folder in-missing-certificate good.pem good.key a.pem
rm in-missing-certificate/client-cert.pem
"#;

#[test]
fn a_certificate_of_ones_own_is_checked_as_by_qemu() {
    let oracle = Oracle::new();
    let made = Command::new("bash").args(["-c", OWN_CERTIFICATES, "bash"]).arg(oracle.work()).output().expect("bash");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let bin = oracle.work().join("bin");
    std::fs::create_dir(&bin).expect("a folder");
    let tools = ["qemu-img", "qemu-nbd"].map(|name| {
        let ours = bin.join(name);
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &ours).expect("a link");
        [oracle.qemu.img_path().with_file_name(name), ours]
    });
    let [img, nbd] = &tools;
    let said = |tool: &Path, line: &str| {
        let output = Command::new(tool).args(line.split(' ')).current_dir(oracle.work()).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    std::fs::write(oracle.work().join("disk.raw"), [0; 4096]).expect("a disk");
    let mut folders: Vec<String> = std::fs::read_dir(oracle.work())
        .expect("the folder")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("in-"))
        .collect();
    folders.sort();
    assert_eq!(folders.len(), 26, "{folders:?}");
    let (mut differences, mut refused) = (Vec::new(), 0);
    for dir in folders {
        let object = format!("--object tls-creds-x509,id=t,dir={dir}");
        let nowhere = "--image-opts driver=nbd,server.type=unix,server.path=nowhere,tls-creds=t";
        let serve = "--tls-creds t -f raw -k /nowhere/n.sock disk.raw";
        for ([theirs, ours], line) in [
            (img, format!("info {object} {nowhere}")),
            (img, format!("info {object},sanity-check=off {nowhere}")),
            (nbd, format!("{object},endpoint=server {serve}")),
            (nbd, format!("{object},endpoint=server,verify-peer=off {serve}")),
            (nbd, format!("{object},endpoint=server,sanity-check=off {serve}")),
        ] {
            let (theirs, ours) = (said(theirs, &line), said(ours, &line));
            refused += usize::from(!theirs.1.contains("nowhere"));
            if theirs != ours {
                differences.push(format!("{line}\n  {theirs:?}\n  {ours:?}"));
            }
        }
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    assert!(refused > 50, "{refused}");
}

/// Files of credentials that are missing, or are something else: QEMU 11's words, with every choice of the checks.
#[test]
fn credentials_that_cannot_be_read_are_refused_as_by_qemu() {
    let oracle = Oracle::new();
    let made = Command::new("bash").args(["-c", OWN_CERTIFICATES, "bash"]).arg(oracle.work()).output().expect("bash");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let good = oracle.work().join("in-good");
    for end in ["server", "client"] {
        for damage in [
            "rm ca-cert.pem",
            "rm ca-cert.pem; echo x >END-cert.pem",
            "echo garbage >ca-cert.pem",
            ": >ca-cert.pem",
            "rm ca-cert.pem; mkdir ca-cert.pem",
            "rm END-cert.pem",
            "rm END-key.pem",
            "rm END-cert.pem END-key.pem",
            "echo x >END-cert.pem",
            "echo x >END-key.pem",
            "rm END-cert.pem; mkdir END-cert.pem",
            "rm END-key.pem; mkdir END-key.pem",
            "echo x >ca-crl.pem; rm END-key.pem",
            "echo x >ca-crl.pem; echo x >END-cert.pem",
            "echo garbage >ca-crl.pem",
            ": >ca-crl.pem",
            "cp ca-cert.pem ca-crl.pem",
            "mkdir ca-crl.pem",
            "ln -s nowhere ca-crl.pem",
        ] {
            let script = format!("rm -rf d; cp -r in-good d; cd d; {}", damage.replace("END", end));
            let status = Command::new("bash").args(["-c", &script]).current_dir(oracle.work()).status().expect("bash");
            assert!(status.success() && good.is_dir(), "{script}");
            for checks in ["", ",sanity-check=off", ",verify-peer=off", ",verify-peer=off,sanity-check=off"] {
                let line = format!("info --object tls-creds-x509,id=t,dir=d,endpoint={end}{checks} nosuch");
                let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
                let (real, ours) = (oracle.real(&oracle.work(), &arguments), oracle.ours(&oracle.work(), &arguments));
                // A client of QEMU doesn't look at the list; ours does.
                if end == "client" && damage.ends_with("ca-crl.pem") && !damage.starts_with("ln") {
                    assert!(ours.err.contains("Cannot load CRL 'd/ca-crl.pem'"), "{damage}: {line}: {ours:?}");
                    continue;
                }
                assert_eq!((ours.code, ours.err), (real.code, real.err), "{damage}: {line}");
            }
        }
    }
}

/// Objects that images don't use have their obligatory properties nevertheless.
#[test]
fn unused_objects_are_checked_as_by_qemu() {
    let oracle = Oracle::new();
    for object in [
        "authz-simple,id=t",
        "authz-simple,id=t,identity=x",
        "authz-simple,id=t,identity=x,foo=1",
        "authz-list,id=t",
        "authz-listfile,id=t",
        "iothread,id=t",
        "iothread,id=1t",
    ] {
        let arguments: Vec<String> = format!("info --object {object} nosuch").split(' ').map(str::to_owned).collect();
        let (real, ours) = (oracle.real(&oracle.work(), &arguments), oracle.ours(&oracle.work(), &arguments));
        assert_eq!((ours.code, ours.err), (real.code, real.err), "{object}");
    }
}

/// A server without TLS, and one that insists on it: the messages of our client and our server are QEMU's.
#[test]
fn a_server_that_wants_the_other_kind_of_connection_says_so() {
    let oracle = Oracle::new();
    credentials::make_credentials(&oracle.work());
    std::fs::write(oracle.work().join("disk.raw"), [0; 4096]).expect("a disk");
    let bin = oracle.work().join("bin");
    std::fs::create_dir(&bin).expect("a folder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), bin.join("qemu-nbd")).expect("a link");
    let tls = "--tls-creds s --object tls-creds-x509,id=s,dir=.,endpoint=server,verify-peer=off,sanity-check=off ";
    for (server, object, credentials) in [("", OBJECT, ",tls-creds=t,tls-hostname=localhost"), (tls, "", "")] {
        let mut said = Vec::new();
        for tool in [oracle.qemu.img_path().with_file_name("qemu-nbd"), bin.join("qemu-nbd")] {
            let socket = oracle.work().join("s.sock");
            let mut command = Command::new(tool);
            command.args(format!("-t -e 0 {server}-f raw -k").split(' ')).arg(&socket).arg("disk.raw");
            command.current_dir(oracle.work()).env_remove("RUST_LOG");
            let running = Server::start(command, &socket);
            let line =
                format!("info {object} --image-opts driver=nbd,server.type=unix,server.path=s.sock{credentials}");
            let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            for client in [oracle.real(&oracle.work(), &arguments), oracle.ours(&oracle.work(), &arguments)] {
                assert_eq!(client.code, Some(1), "{line}: {client:?}");
                said.push(client.err);
            }
            drop(running);
            let _ = std::fs::remove_file(&socket);
        }
        assert!(said.iter().all(|words| words == &said[0]), "{said:#?}");
    }
}
