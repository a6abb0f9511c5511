// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The clients that may come (`tls-authz`), beside qemu-nbd's messages about the same clients.

use super::running::{Running, temp_folder};
use cowshed_daemon::Step;
use cowshed_testkit::qemu::Qemu;
use cowshed_testkit::waiting::await_listening;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// An authority and a server in `$1`, and clients with several names in folders of their own.
const CREDENTIALS: &str = r#"
set -e
cd "$1"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key ca-key.pem
openssl req -x509 -new -key ca-key.pem -subj '/CN=Authority' -days 3650 -out ca-cert.pem \
  -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign,cRLSign' 2>/dev/null
sign() {
  key "$1-key.pem"
  openssl req -new -utf8 -multivalue-rdn -key "$1-key.pem" -subj "$3" -out "$1.csr" 2>/dev/null
  printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature' "extendedKeyUsage=$2" \
    'subjectAltName=DNS:localhost' >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 3650 -extfile "$1.ext" \
    -out "$1-cert.pem" 2>/dev/null
}
sign server serverAuth '/CN=localhost'
client() {
  mkdir "$1"
  sign "$1/client" clientAuth "$2"
  cp ca-cert.pem "$1"
}
client plain '/CN=laptop'
client full '/C=GB/ST=London/L=London/O=Example, Home/CN=laptop'
client odd '/emailAddress=a@b.c/serialNumber=5/title=x/GN=gg/SN=ss/UID=uu/DC=dd/street=s t/CN=we"ir#d;<>\+/CN=#h'
client wide '/O=Ünï+OU=multi/CN=back\\slash/description=dsc/postalCode=pc/initials=II/dnQualifier=dq/businessCategory=b'
client numbers '/telephoneNumber=123/CN=x'
"#;

const CLIENTS: [&str; 5] = ["plain", "full", "odd", "wide", "numbers"];

fn text(path: &Path) -> &str {
    path.to_str().expect("text")
}

/// True when qemu-img may look at the export.
fn may_come(folder: &Path, client: &str, socket: &Path) -> bool {
    let credentials = format!("tls-creds-x509,id=c,endpoint=client,dir={}", folder.join(client).display());
    let place = format!("driver=nbd,server.type=unix,server.path={},tls-creds=c", socket.display());
    let place = format!("{place},tls-hostname=localhost");
    Qemu::system().img(["info", "--object", &credentials, "--image-opts", &place]).code == 0
}

/// qemu-nbd with the same objects.
struct Theirs(Child, PathBuf);

impl Theirs {
    fn start(folder: &Path, credentials: &str, authorization: &str) -> Theirs {
        let socket = folder.join("theirs.sock");
        let mut child = Command::new("qemu-nbd")
            .args(["-t", "--tls-creds", "t", "--tls-authz", "a", "-f", "raw", "--object", credentials, "--object"])
            .args([authorization, "-k", text(&socket), text(&folder.join("disk.raw"))])
            .stderr(Stdio::null())
            .spawn()
            .expect("qemu-nbd runs: scripts/setup test installs it");
        await_listening(&socket, &mut child);
        Theirs(child, socket)
    }
}

impl Drop for Theirs {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder_with_credentials() -> tempfile::TempDir {
    let folder = temp_folder();
    let made = Command::new("bash").args(["-c", CREDENTIALS, "bash", text(folder.path())]).status();
    assert!(made.expect("bash runs").success(), "openssl makes certificates");
    std::fs::write(folder.path().join("disk.raw"), vec![0; 1 << 20]).expect("write");
    folder
}

/// A daemon with the same, its socket at `ours.sock`.
fn serve(folder: tempfile::TempDir, credentials: &str, authorization: &str) -> Running {
    let server =
        format!("addr.type=unix,addr.path={},tls-creds=t,tls-authz=a", folder.path().join("ours.sock").display());
    let steps = vec![
        Step::object(credentials).expect("right"),
        Step::object(authorization).expect("right"),
        Step::blockdev("null-co,node-name=d,size=1048576,read-zeroes=on").expect("right"),
        Step::nbd_server(&server).expect("right"),
        Step::export("nbd,id=e,node-name=d,name=").expect("right"),
    ];
    Running::start_in(folder, steps)
}

#[test]
fn the_same_clients_may_come_as_to_qemu_nbd() {
    let mut folder = folder_with_credentials();
    let credentials = format!("tls-creds-x509,id=t,endpoint=server,dir={},verify-peer=on", folder.path().display());
    let glob =
        |pattern: &str| format!("authz-list,id=a,rules.0.match={pattern},rules.0.policy=allow,rules.0.format=glob");
    let simple = |name: &str| format!("authz-simple,id=a,identity={}", name.replace(',', ",,"));
    for (authorization, expected) in [
        (simple("CN=laptop"), vec!["plain"]),
        (simple("C=GB,ST=London,L=London,O=Example\\, Home,CN=laptop"), vec!["full"]),
        (simple("CN=laptop,O=Example\\, Home,L=London,ST=London,C=GB"), vec![]),
        (
            simple(
                "EMAIL=a@b.c,serialNumber=5,title=x,givenName=gg,surName=ss,UID=uu,DC=dd,street=s t,\
                 CN=we\\\"ir#d\\;\\<\\>\\+,CN=\\#h",
            ),
            vec!["odd"],
        ),
        (
            simple(
                "O=Ünï+OU=multi,CN=back\\\\slash,description=dsc,postalCode=pc,initials=II,dnQualifier=dq,\
                 businessCategory=b",
            ),
            vec!["wide"],
        ),
        // The form of attributes without a name changed between versions of GnuTLS.
        (glob("*,,CN=x"), vec!["numbers"]),
        (glob("*CN=laptop"), vec!["plain", "full"]),
        (glob("CN=l?ptop"), vec!["plain"]),
        (glob("CN=[k-m]aptop"), vec![]),
        (glob("*"), CLIENTS.to_vec()),
        ("authz-list,id=a".to_owned(), vec![]),
        (
            "authz-list,id=a,policy=allow,rules.0.match=CN=laptop,rules.0.policy=deny,rules.1.match=*,\
             rules.1.policy=deny"
                .to_owned(),
            vec!["full", "odd", "wide", "numbers"],
        ),
        // Another object than the one that is asked.
        ("authz-list,id=b,policy=allow".to_owned(), vec![]),
    ] {
        let theirs = Theirs::start(folder.path(), &credentials, &authorization);
        let daemon = serve(folder, &credentials, &authorization);
        for client in CLIENTS {
            let found =
                [daemon.path("ours.sock"), theirs.1.clone()].map(|at| may_come(daemon.folder.path(), client, &at));
            assert_eq!(found, [expected.contains(&client); 2], "{client} by {authorization}: ours, qemu-nbd's");
        }
        let stopped;
        (folder, stopped) = daemon.keep_after_stop();
        stopped.expect("stopped in order");
        drop(theirs);
    }
}

#[test]
fn who_may_come_changes_while_the_server_runs() {
    let folder = folder_with_credentials();
    let list = folder.path().join("list");
    std::fs::write(&list, r#"{"policy": "deny"}"#).expect("write");
    let credentials = format!("tls-creds-x509,id=t,endpoint=server,dir={},verify-peer=on", folder.path().display());
    let daemon = serve(folder, &credentials, &format!("authz-listfile,id=a,filename={}", list.display()));
    let mut client = daemon.client();
    let socket = daemon.path("ours.sock");
    let comes = |name: &str| may_come(daemon.folder.path(), name, &socket);
    assert!(!comes("plain"));
    let rules = r#"{"rules": [{"match": "CN=*", "format": "glob", "policy": "allow"}]}"#;
    std::fs::write(&list, rules).expect("write");
    assert!(comes("plain") && !comes("full"));
    // Without its object every client is refused. Another object of that name decides anew.
    client.command("object-del", json!({"id": "a"}));
    assert!(!comes("plain"));
    let rule = json!({"match": "C=GB*", "policy": "allow", "format": "glob"});
    client.command("object-add", json!({"qom-type": "authz-list", "id": "a", "policy": "deny", "rules": [rule]}));
    assert!(!comes("plain") && comes("full"));
    let get = |property: &str| json!({"path": "a", "property": property});
    assert_eq!(client.command("qom-get", get("policy")), "deny");
    assert_eq!(client.command("qom-get", get("rules")), json!([rule]));
    client.command("nbd-server-stop", json!({}));
    // A check of names without certificates would let every client in.
    let start = |creds: &[(&str, &str)]| {
        let mut arguments = json!({"addr": {"type": "unix", "data": {"path": socket}}, "tls-authz": "a"});
        creds.iter().for_each(|(key, value)| arguments[*key] = json!(value));
        arguments
    };
    let refusal = client.refusal("nbd-server-start", start(&[]));
    assert_eq!(refusal, "'tls-authz' is not permitted without 'tls-creds'");
    let anybody = json!({"qom-type": "tls-creds-x509", "id": "any", "endpoint": "server", "dir": daemon.folder.path(),
                         "verify-peer": false});
    client.command("object-add", anybody);
    let refusal = client.refusal("nbd-server-start", start(&[("tls-creds", "any")]));
    assert!(refusal.contains("needs credentials with 'verify-peer=on', which 'any' hasn't"), "{refusal}");
    for (wrong, reason) in [
        (json!({"qom-type": "authz-simple", "id": "x"}), "'identity' is missing"),
        (json!({"qom-type": "authz-listfile", "id": "x", "filename": daemon.path("none")}), "Unable to read"),
        (json!({"qom-type": "authz-list", "id": "x", "policy": "maybe"}), "does not accept value 'maybe'"),
        (json!({"qom-type": "authz-list", "id": "x", "rules": [{"match": "y"}]}), "policy' is missing"),
    ] {
        let refusal = client.refusal("object-add", wrong.clone());
        assert!(refusal.contains(reason), "{wrong}: {refusal}");
    }
    client.refusal("qom-get", json!({"path": "x", "property": "type"}));
    daemon.stop().expect("stopped in order");
}

#[test]
fn an_iothread_tells_and_takes_its_properties() {
    let daemon = Running::start(vec![Step::object("iothread,id=io0,poll-max-ns=5,thread-pool-max=8").expect("right")]);
    let mut client = daemon.client();
    let all = client.command("qom-list-get", json!({"paths": ["/objects/io0"]}));
    let mut found: Vec<(String, i64)> = all[0]["properties"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|one| Some((one["name"].as_str()?.to_owned(), one["value"].as_i64()?)))
        .collect();
    found.sort();
    let expected = [
        ("aio-max-batch", 0),
        ("poll-grow", 2),
        ("poll-max-ns", 5),
        ("poll-shrink", 2),
        ("poll-weight", 3),
        ("thread-pool-max", 8),
        ("thread-pool-min", 0),
    ];
    assert_eq!(found, expected.map(|(name, value)| (name.to_owned(), value)));
    let set = |name: &str, value: i64| json!({"path": "io0", "property": name, "value": value});
    client.command("qom-set", set("thread-pool-min", 8));
    assert_eq!(client.command("qom-get", json!({"path": "io0", "property": "thread-pool-min"})), 8);
    for (name, value, words) in [
        ("poll-max-ns", -1, "poll-max-ns value must be in range [0, 9223372036854775807]"),
        ("poll-weight", 64, "poll-weight value must be in range [0, 63]"),
        ("thread-pool-max", 7, "bad thread-pool-min/thread-pool-max values"),
        ("thread-id", 1, "Property 'iothread.thread-id' not found"),
    ] {
        assert_eq!(client.refusal("qom-set", set(name, value)), words);
    }
    let wrong = json!({"qom-type": "iothread", "id": "io1", "poll-max-ns": -5});
    assert_eq!(client.refusal("object-add", wrong), "poll-max-ns value must be in range [0, 9223372036854775807]");
    daemon.stop().expect("stopped in order");
}
