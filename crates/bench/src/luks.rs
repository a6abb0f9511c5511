// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Encrypted images: read into raw ones, and written from them. Opening costs next to nothing here: the passphrase is one
//! of few rounds.

use crate::Settings;
use crate::fixture;
use crate::measure::{Pairs, alternate};
use crate::memory;
use crate::reads::{self, Case, Load};
use crate::table::{Outcome, Row};
use std::path::{Path, PathBuf};
use std::process::Command;

const OBJECT: [&str; 2] = ["--object", "secret,id=s,data=passphrase"];
const CIPHERS: [(&str, &str); 2] = [
    ("aes-256-xts", "encrypt.cipher-alg=aes-256"),
    ("aes-256-cbc-essiv", "encrypt.cipher-alg=aes-256,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv"),
];

/// The option string of an encrypted image.
fn image_opts(path: &Path) -> String {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", path.display())
}

fn failed<E: std::fmt::Display>(path: &Path) -> impl Fn(E) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// Reads and writes in each cipher.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::full(settings)?;
    let mut rows = Vec::new();
    for (name, options) in CIPHERS {
        let empty = empty_image(settings, name, options)?;
        let full = full_image(settings, name, options, &source)?;
        let (ours, theirs) = (settings.folder.join("ours.out"), settings.folder.join("theirs.out"));
        let clear = || {
            for output in [&ours, &theirs] {
                if output.exists() {
                    std::fs::remove_file(output).map_err(failed(output))?;
                }
            }
            Ok::<(), String>(())
        };
        let reading = |program: &Path, output: &Path| {
            clear()?;
            memory::back(settings.size_mib)?;
            Ok(read(program, &full, output))
        };
        let writing = |program: &Path, output: &Path| {
            clear()?;
            std::fs::copy(&empty, output).map_err(failed(output))?;
            memory::back(settings.size_mib)?;
            Ok(write(program, &source, output))
        };
        let pairs =
            alternate(settings.rounds, &|| reading(&settings.cowshed, &ours), &|| reading(&settings.qemu, &theirs))?;
        rows.push(row(format!("LUKS {name} → raw"), pairs));
        let pairs =
            alternate(settings.rounds, &|| writing(&settings.cowshed, &ours), &|| writing(&settings.qemu, &theirs))?;
        rows.push(row(format!("raw → LUKS {name}"), pairs));
        clear()?;
    }
    Ok(rows)
}

/// The same images under an NBD server.
pub fn served(settings: &Settings) -> Result<Vec<Row>, String> {
    let source = fixture::full(settings)?;
    let bytes = std::fs::metadata(&source).map_err(failed(&source))?.len();
    let (name, options) = CIPHERS[0];
    let image = full_image(settings, name, options, &source)?;
    let loads = [
        ("random 4k reads", Load { pattern: "randread", block: "4k", depth: 8, bytes }),
        ("sequential 64k reads", Load { pattern: "read", block: "64k", depth: 8, bytes }),
        ("random 4k writes", Load { pattern: "randwrite", block: "4k", depth: 8, bytes }),
        ("sequential 64k writes", Load { pattern: "write", block: "64k", depth: 8, bytes }),
    ];
    let mut rows = Vec::new();
    for (what, load) in loads {
        let name = format!("LUKS {name} served: {what}");
        let case = Case {
            name,
            image: &image,
            options: "encrypt.format=luks,encrypt.key-secret=s",
            their_options: None,
            direct: false,
            limit: Some(&source),
            load,
            target: "≥ 2×",
        };
        rows.extend(reads::run(settings, &case)?);
    }
    Ok(rows)
}

/// An encrypted image with the content of `source`, written by QEMU.
fn full_image(settings: &Settings, name: &str, options: &str, source: &Path) -> Result<PathBuf, String> {
    let empty = empty_image(settings, name, options)?;
    let full = settings.folder.join(format!("luks-{name}-{}.qcow2", settings.size_mib));
    if !full.exists() {
        std::fs::copy(&empty, &full).map_err(failed(&full))?;
        run_once(write(&settings.qemu, source, &full))?;
    }
    Ok(full)
}

fn row(name: String, pairs: Pairs) -> Row {
    Row::new(name, "≥ 2×", Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 })
}

/// An empty encrypted image of QEMU's, as large as the source.
fn empty_image(settings: &Settings, name: &str, options: &str) -> Result<PathBuf, String> {
    let path = settings.folder.join(format!("luks-{name}-{}.empty", settings.size_mib));
    let size = format!("{}M", settings.size_mib / 8);
    let options = format!("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10,{options}");
    // Its measurement of its own speed fails now and then.
    for _ in 0..20 {
        if path.exists() {
            return Ok(path);
        }
        let partial = path.with_extension("partial");
        let mut command = Command::new(&settings.qemu);
        command.args(["create", "-q", "-f", "qcow2"]).args(OBJECT).args(["-o", &options]).arg(&partial).arg(&size);
        if run_once(command).is_ok() {
            std::fs::rename(&partial, &path).map_err(failed(&path))?;
        }
    }
    Err(format!("{}: could not be created", path.display()))
}

fn run_once(mut command: Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("could not run {command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

fn read(program: &Path, source: &Path, output: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("convert").args(OBJECT).args(["--image-opts", &image_opts(source), "-O", "raw"]).arg(output);
    command
}

fn write(program: &Path, source: &Path, output: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(["convert", "-n", "-f", "raw"]).args(OBJECT).arg("--target-image-opts").arg(source);
    command.arg(image_opts(output));
    command
}
