// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS credentials for tests: an authority and a server.

use std::path::Path;
use std::process::Command;

/// Makes an authority and a server for "localhost", in the files that QEMU looks for.
pub fn make_credentials(folder: &Path) {
    let script = r#"
set -e
cd "$1"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key ca-key.pem
openssl req -x509 -new -key ca-key.pem -subj '/CN=Authority' -days 3650 -out ca-cert.pem \
  -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign,cRLSign'
key server-key.pem
openssl req -new -key server-key.pem -subj /CN=server -out server.csr
printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature,keyEncipherment' \
  extendedKeyUsage=serverAuth 'subjectAltName=DNS:localhost,IP:127.0.0.1' >server.ext
openssl x509 -req -in server.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 3650 -extfile server.ext \
  -out server-cert.pem
mkdir client
cp ca-cert.pem client
"#;
    let output = Command::new("bash").args(["-c", script, "bash"]).arg(folder).output().expect("bash runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
