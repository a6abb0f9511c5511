// SPDX-License-Identifier: Apache-2.0 OR MIT
//! TLS credentials for tests: an authority, a server and a client.

use crate::programs::finish_well;
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = r#"
set -e
cd "$1"
key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }
key ca-key.pem
openssl req -x509 -new -key ca-key.pem -subj '/CN=Authority' -days 3650 -out ca-cert.pem \
  -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign,cRLSign'
sign() {
  key "$1-key.pem"
  openssl req -new -key "$1-key.pem" -subj "/CN=$1" -out "$1.csr"
  printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature,keyEncipherment' \
    "extendedKeyUsage=$2" 'subjectAltName=DNS:localhost,IP:127.0.0.1' >"$1.ext"
  openssl x509 -req -in "$1.csr" -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 3650 -extfile "$1.ext" \
    -out "$1-cert.pem"
}
sign server serverAuth
sign client clientAuth
mkdir client
cp ca-cert.pem client
"#;

/// Makes an authority, a server for "localhost" and a client, in the files that QEMU looks for. The folder `client` below
/// has the authority alone, for clients without a certificate.
#[track_caller]
pub fn make_credentials(folder: &Path) {
    finish_well(Command::new("bash").args(["-c", SCRIPT, "bash"]).arg(folder));
}
