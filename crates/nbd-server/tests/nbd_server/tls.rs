// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted connections, with QEMU's and libnbd's programs at the other end, and with our own.

use crate::served::wire::Wire;
use crate::served::{Served, write_pattern};
use cowshed_image::{OpenRequest, open};
use cowshed_nbd::{ClientTls, ServerTls};
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::option::{self, code, rep};
use cowshed_nbd_proto::{Command, ReplyStyle};
use cowshed_nbd_server::ServerConfig;
use cowshed_storage::{IoBuf, SocketAddress, rt};
use cowshed_testkit::credentials::make_credentials;
use cowshed_testkit::programs::{failing_tool, tool};
use cowshed_testkit::qemu::temp_dir;
use std::path::Path;

const SIZE: u64 = 4 << 20;

/// A server that insists on TLS and on knowing its clients, on TCP too; the port and the content.
fn serve(dir: &Path, queues: usize) -> (Served, u16, Vec<u8>) {
    let tls = Some(ServerTls::from_dir(dir, true).expect("credentials"));
    let served = Served::start(ServerConfig { queues, tls, ..ServerConfig::default() });
    let address = SocketAddress::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
    let bound = served.server.listen(&address).expect("listen").remove(0);
    let SocketAddress::Tcp { port, .. } = bound else { panic!("{bound}") };
    let image = served.path("disk.raw");
    let content = write_pattern(&image, SIZE, 6);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true), |_| ());
    (served, port, content)
}

#[test]
fn real_clients_talk_tls() {
    let dir = temp_dir();
    make_credentials(dir.path());
    let (served, port, content) = serve(dir.path(), 2);
    let folder = dir.path().display();
    let uri = format!("nbds://localhost:{port}/?tls-certificates={folder}");
    let info = tool("nbdinfo", &[&uri]);
    assert!(info.contains("with TLS"), "{info}");
    let copy = served.path("copy.raw");
    tool("nbdcopy", &["--connections=4", &uri, copy.to_str().unwrap()]);
    assert!(std::fs::read(&copy).expect("read") == content);
    let creds = format!("tls-creds-x509,id=tls0,dir={folder},endpoint=client");
    let image = format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port},tls-creds=tls0");
    let map = tool("qemu-img", &["map", "--output=json", "--object", &creds, "--image-opts", &image]);
    assert!(map.contains("\"data\""), "{map}");
    tool(
        "qemu-io",
        &["--object", &creds, "--image-opts", &image, "-c", "write -P 3 100k 300k", "-c", "read -P 3 100k 300k"],
    );
    // Without encryption, and without a certificate.
    failing_tool("nbdinfo", &[&format!("nbd://localhost:{port}/")]);
    let bare = temp_dir();
    std::fs::copy(dir.path().join("ca-cert.pem"), bare.path().join("ca-cert.pem")).expect("copy");
    failing_tool("nbdinfo", &[&format!("nbds://localhost:{port}/?tls-certificates={}", bare.path().display())]);
    served.stop();
}

#[test]
fn revoked_certificates_are_refused() {
    let (dir, old) = (temp_dir(), temp_dir());
    make_credentials(dir.path());
    // The client's certificate is taken back, and it gets another one.
    let script = r#"
set -e
cd "$1"
printf '%s\n' '[ca]' 'default_ca=d' '[d]' 'database=index.txt' 'crlnumber=crlnumber' 'default_md=sha256' \
  'default_crl_days=3650' 'crl_extensions=e' '[e]' 'authorityKeyIdentifier=keyid:always' >ca.cnf
: >index.txt
echo 01 >crlnumber
ca() { openssl ca -config ca.cnf -cert ca-cert.pem -keyfile ca-key.pem "$@" 2>/dev/null; }
ca -revoke client-cert.pem
ca -gencrl -out ca-crl.pem
cp ca-cert.pem client-cert.pem client-key.pem "$2"
openssl x509 -req -in client.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 3650 -extfile client.ext \
  -out client-cert.pem 2>/dev/null
"#;
    tool("bash", &["-c", script, "bash", dir.path().to_str().unwrap(), old.path().to_str().unwrap()]);
    let (served, port, _) = serve(dir.path(), 1);
    let uri = |folder: &Path| format!("nbds://localhost:{port}/?tls-certificates={}", folder.display());
    let reads = |folder: &Path| {
        rt::block_on(async {
            let node = open(OpenRequest::file(uri(folder)).format("raw")).await?;
            let (result, _) = node.read(0, IoBuf::scratch(4096)).await;
            result.and(node.close().await)
        })
    };
    tool("nbdinfo", &[&uri(dir.path())]);
    reads(dir.path()).expect("the new certificate is good");
    failing_tool("nbdinfo", &[&uri(old.path())]);
    reads(old.path()).expect_err("the old one isn't");
    // Without the list it was.
    std::fs::remove_file(dir.path().join("ca-crl.pem")).expect("remove");
    served.stop();
    let (served, port, _) = serve(dir.path(), 1);
    tool("nbdinfo", &[&format!("nbds://localhost:{port}/?tls-certificates={}", old.path().display())]);
    served.stop();
    std::fs::write(dir.path().join("ca-crl.pem"), "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n")
        .expect("write");
    let error = ServerTls::from_dir(dir.path(), true).expect_err("no such list").to_string();
    assert!(error.contains("ca-cert.pem") || error.contains("ca-crl.pem"), "{error}");
}

#[test]
fn our_client_talks_tls_to_both_servers() {
    let dir = temp_dir();
    make_credentials(dir.path());
    let (served, port, content) = serve(dir.path(), 1);
    let check = |name: String| {
        rt::block_on(async {
            let node = open(OpenRequest::file(&name).format("raw").writable(true)).await.expect("open");
            let (result, buf) = node.read(0, IoBuf::scratch(SIZE as usize)).await;
            result.expect("read");
            assert!(buf[..] == content, "{name}");
            node.write(1000, IoBuf::copy_from(&content[1000..300_000])).await.0.expect("write");
            node.flush().await.expect("flush");
            node.close().await.expect("close");
        });
    };
    let folder = dir.path().display();
    check(format!("nbds://localhost:{port}/?tls-certificates={folder}"));
    check(format!("nbds+unix:///?socket={}&tls-certificates={folder}", served.socket.display()));
    // A server with another name is another server.
    let other = OpenRequest::file(format!("nbds://localhost:{port}/?tls-certificates={folder}&tls-hostname=elsewhere"));
    let error = rt::block_on(open(other.format("raw"))).expect_err("the wrong name").to_string();
    assert!(error.contains("TLS failed"), "{error}");
    let image = served.path("disk.raw");
    let socket = served.path("qemu.sock");
    let pid = served.path("qemu.pid");
    let (image, socket_path) = (image.to_str().unwrap(), socket.to_str().unwrap());
    let dir_of_image = {
        let image = image.to_owned();
        let left = served.stop();
        assert!(std::path::Path::new(&image).exists());
        left
    };
    let creds = format!("tls-creds-x509,id=tls0,dir={folder},endpoint=server,verify-peer=yes");
    tool(
        "qemu-nbd",
        &[
            "--fork",
            "--pid-file",
            pid.to_str().unwrap(),
            "-t",
            "-f",
            "raw",
            "-k",
            socket_path,
            "--object",
            &creds,
            "--tls-creds",
            "tls0",
            image,
        ],
    );
    check(format!("nbds+unix:///?socket={socket_path}&tls-certificates={folder}"));
    let pid = std::fs::read_to_string(&pid).expect("pid");
    tool("kill", &[pid.trim()]);
    drop(dir_of_image);
}

#[test]
fn credentials_can_be_named_by_an_id() {
    let dir = temp_dir();
    make_credentials(dir.path());
    let (served, port, content) = serve(dir.path(), 1);
    let graph = cowshed_image::graph::Graph::new(&cowshed_image::DRIVERS);
    graph.set_tls_credentials("tls0", Some(ClientTls::from_dir(dir.path(), true).expect("credentials")));
    let options = format!("driver=nbd,server.type=inet,server.host=localhost,server.port={port},tls-creds=tls0");
    rt::block_on(async {
        let request = OpenRequest::image_opts(&options).expect("options").graph(graph);
        let node = open(request).await.expect("open");
        let (result, buf) = node.read(4096, IoBuf::scratch(100_000)).await;
        result.expect("read");
        assert!(buf[..] == content[4096..104_096]);
        node.close().await.expect("close");
    });
    served.stop();
}

#[test]
fn nothing_said_before_tls_counts() {
    let dir = temp_dir();
    make_credentials(dir.path());
    let (served, _, _) = serve(dir.path(), 1);
    let mut wire = Wire::connect(&served.socket);
    for option in [code::LIST, code::GO, code::STRUCTURED_REPLY, code::SET_META_CONTEXT] {
        assert_eq!(wire.outcome(option, &[]), rep::ERR_TLS_REQD);
    }
    // An option that travels with the one that starts TLS may be an attacker's.
    let mut both = option::encode(code::STARTTLS, &[]);
    both.extend(option::encode(code::LIST, &[]));
    wire.send(&both);
    wire.expect_end();
    let mut wire = Wire::connect(&served.socket);
    wire.send(&option::encode(code::EXPORT_NAME, b""));
    wire.expect_end();
    let mut wire = Wire::connect(&served.socket);
    wire.expect_ack(code::STARTTLS);
    wire.send(b"this is no TLS, and the server notices");
    use std::io::Read;
    let _ = wire.stream.read_to_end(&mut Vec::new());
    served.stop();
}

#[test]
fn tls_may_be_offered_without_being_required() {
    let dir = temp_dir();
    make_credentials(dir.path());
    let tls = Some(ServerTls::from_dir(dir.path(), false).expect("credentials"));
    let served = Served::start(ServerConfig { tls, tls_required: false, ..ServerConfig::default() });
    let image = served.path("disk.raw");
    write_pattern(&image, SIZE, 6);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw"), |_| ());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    assert_eq!(wire.ask(Command::Read, CommandFlags::default(), 0, 512).errno, 0);
    let uri = format!("nbds+unix:///?socket={}&tls-verify-peer=0", served.socket.display());
    let node = rt::block_on(open(OpenRequest::file(uri).format("raw"))).expect("encrypted, to every client");
    assert_eq!(node.size(), SIZE);
    rt::block_on(node.close()).expect("close");
    served.stop();
}

#[test]
fn bad_credentials_are_named() {
    let dir = temp_dir();
    let error = ServerTls::from_dir(dir.path(), true).expect_err("nothing there").to_string();
    assert!(error.contains("ca-cert.pem"), "{error}");
    make_credentials(dir.path());
    std::fs::write(dir.path().join("server-key.pem"), "no key").expect("write");
    let error = ServerTls::from_dir(dir.path(), true).expect_err("no key").to_string();
    assert!(error.contains("server-key.pem"), "{error}");
    std::fs::write(dir.path().join("ca-cert.pem"), "").expect("write");
    let error = ClientTls::from_dir(dir.path(), true).expect_err("no authority").to_string();
    assert!(error.contains("ca-cert.pem") && error.contains("no certificate"), "{error}");
}
