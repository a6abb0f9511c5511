// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Repairs that are only reported, logged, and taken back.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Bench {
    folder: tempfile::TempDir,
}

/// Offset of the refcount of the L1 table's cluster, in a fresh image with clusters of 64 KiB.
const L1_REFCOUNT_OFFSET: usize = 0x20006;

impl Bench {
    fn new() -> Bench {
        Bench { folder: tempfile::tempdir().expect("a folder") }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        command.current_dir(self.folder.path()).args(line.split(' '));
        command.output().expect("our own binary runs")
    }

    fn io(&self, command: &str, image: &str) -> Output {
        let mut program = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        program.current_dir(self.folder.path()).args(["io", "-c", command, image]);
        program.output().expect("our own binary runs")
    }

    /// An image with a leak and, with `corrupt`, one count too low.
    fn damaged(&self, name: &str, corrupt: bool) -> Vec<u8> {
        assert!(self.run(&format!("create -f qcow2 {name} 64M")).status.success());
        let mut bytes = std::fs::read(self.path(name)).expect("image");
        assert_eq!(bytes[L1_REFCOUNT_OFFSET..][..2], [0, 1]);
        bytes[L1_REFCOUNT_OFFSET + 1] = if corrupt { 0 } else { 2 };
        bytes[L1_REFCOUNT_OFFSET + 1 - 2] = 2;
        std::fs::write(self.path(name), &bytes).expect("image");
        bytes
    }
}

fn code(output: &Output) -> i32 {
    output.status.code().expect("an exit code")
}

fn complaint(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn bytes(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("file")
}

#[test]
fn a_dry_run_tells_and_writes_nothing() {
    let bench = Bench::new();
    let before = bench.damaged("a.qcow2", true);
    let output = bench.run("check -r all --dry-run --output=json a.qcow2");
    assert_eq!(code(&output), 2, "{}", complaint(&output));
    let json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let findings = json["findings"].as_array().expect("a list");
    let expected = serde_json::json!({
        "kind": "leak", "offset": 0x20000, "guest": null, "detail": "Leaked cluster 2 refcount=2 reference=1",
        "repair": "lower the refcount to 1", "repaired": false,
    });
    assert!(findings.contains(&expected), "{json}");
    let low = findings.iter().find(|finding| finding["kind"] == "refcount-low").expect("the low count");
    assert_eq!(low["repair"], "raise the refcount to 1");
    let leaks = bench.run("check -r leaks --dry-run a.qcow2");
    assert!(complaint(&leaks).contains("repair: none"), "{}", complaint(&leaks));
    assert!(bytes(&bench.path("a.qcow2")) == before);
    let plain: Value = serde_json::from_slice(&bench.run("img check --output=json a.qcow2").stdout).expect("JSON");
    assert!(plain.get("findings").is_none(), "{plain}");
}

#[test]
fn a_repair_is_taken_back() {
    let bench = Bench::new();
    let before = bench.damaged("a.qcow2", true);
    let repaired = bench.run("check -r all --undo-log a.undo a.qcow2");
    assert_eq!(code(&repaired), 0, "{}", complaint(&repaired));
    assert!(bytes(&bench.path("a.qcow2")) != before);
    let undone = bench.run("check --undo a.undo a.qcow2");
    assert_eq!(code(&undone), 0, "{}", complaint(&undone));
    assert!(bytes(&bench.path("a.qcow2")) == before);
    assert_eq!(code(&bench.run("check a.qcow2")), 2);
    // An existing log is never overwritten.
    let again = bench.run("check -r all --undo-log a.undo a.qcow2");
    assert!(code(&again) == 1 && complaint(&again).contains("could not create the undo log"), "{}", complaint(&again));
    assert!(bytes(&bench.path("a.qcow2")) == before);
}

#[test]
fn an_undo_that_does_not_fit_is_refused() {
    let bench = Bench::new();
    bench.damaged("a.qcow2", false);
    assert_eq!(code(&bench.run("check -r leaks --undo-log a.undo a.qcow2")), 0);
    let (repaired, log) = (bytes(&bench.path("a.qcow2")), bytes(&bench.path("a.undo")));
    let refused = |why: &str| {
        let image = bytes(&bench.path("a.qcow2"));
        let output = bench.run("check --undo a.undo a.qcow2");
        assert!(code(&output) == 1 && complaint(&output).contains(why), "{why}: {}", complaint(&output));
        assert!(bytes(&bench.path("a.qcow2")) == image, "{why}: the image was written");
    };
    // Another program wrote where the repair had written.
    let mut changed = repaired.clone();
    changed[L1_REFCOUNT_OFFSET + 3] = 1;
    std::fs::write(bench.path("a.qcow2"), &changed).expect("image");
    refused("the image isn't as the repair left it");
    changed = repaired.clone();
    changed.resize(repaired.len() + 512, 0);
    std::fs::write(bench.path("a.qcow2"), &changed).expect("image");
    refused("the image's length isn't the one after the repair");
    // Another image: here the version of the header.
    assert!(bench.run("create -f qcow2 -o compat=0.10 other.qcow2 64M").status.success());
    std::fs::copy(bench.path("other.qcow2"), bench.path("a.qcow2")).expect("copy");
    refused("the undo log belongs to another image");
    std::fs::write(bench.path("a.qcow2"), &repaired).expect("image");
    // A log with a wrong bit in the old bytes, and something that is no log.
    let mut damaged = log.clone();
    damaged[200] ^= 1;
    std::fs::write(bench.path("a.undo"), &damaged).expect("log");
    refused("the undo log is damaged");
    std::fs::write(bench.path("a.undo"), &repaired).expect("log");
    refused("not an undo log");
    std::fs::write(bench.path("a.undo"), &log).expect("log");
    assert_eq!(code(&bench.run("check --undo a.undo a.qcow2")), 0);
}

#[test]
fn contradictions_are_refused() {
    let bench = Bench::new();
    bench.damaged("a.qcow2", false);
    for line in [
        "check --dry-run a.qcow2",
        "check --undo-log a.undo a.qcow2",
        "check -r all --undo a.undo a.qcow2",
        "check -r all --dry-run --undo-log a.undo a.qcow2",
    ] {
        let output = bench.run(line);
        assert!(code(&output) == 1 && complaint(&output).contains("--help"), "{line}: {}", complaint(&output));
    }
    assert!(!bench.path("a.undo").exists());
}

/// 128 million clusters, whose counts alone take 256 MiB, in a process that may map no more than that in all.
#[test]
fn a_check_keeps_to_its_memory() {
    let bench = Bench::new();
    assert!(bench.run("create -f qcow2 -o cluster_size=512 a.qcow2 64M").status.success());
    let image = std::fs::File::options().write(true).open(bench.path("a.qcow2")).expect("image");
    image.set_len(64 << 30).expect("a sparse file");
    let binary = env!("CARGO_BIN_EXE_cowshed");
    let check = |memory: &str| {
        let script = format!("ulimit -v 262144; exec '{binary}' check --memory {memory} a.qcow2");
        let output = Command::new("sh").arg("-c").arg(script).current_dir(bench.folder.path()).output();
        output.expect("a shell")
    };
    let output = check("64M");
    assert_eq!(code(&output), 0, "{}", complaint(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("No errors were found"), "{text}");
    // The limit is one: with more memory granted than there is, the process doesn't get through.
    assert_ne!(code_or_signal(&check("1G")), 0);
    assert_eq!(code(&bench.run("check --memory 1k a.qcow2")), 1);
}

/// Whatever number of open files a process is allowed, there is an error or a result.
#[test]
fn few_file_descriptors_are_an_error_and_no_panic() {
    let bench = Bench::new();
    assert!(bench.run("create -f qcow2 base.qcow2 4M").status.success());
    assert!(bench.run("create -f qcow2 -b base.qcow2 -F qcow2 a.qcow2").status.success());
    let binary = env!("CARGO_BIN_EXE_cowshed");
    for words in
        ["info a.qcow2", "check a.qcow2", "convert --force -m 8 -O qcow2 a.qcow2 b.qcow2", "compare a.qcow2 base.qcow2"]
    {
        let mut results = [0; 2];
        for limit in 4..24 {
            let script = format!("ulimit -n {limit}; exec '{binary}' {words}");
            let output = Command::new("sh").arg("-c").arg(script).current_dir(bench.folder.path()).output();
            let output = output.expect("a shell");
            let said = complaint(&output);
            let code = output.status.code();
            assert!(matches!(code, Some(0..=3)) && !said.contains("panicked"), "{limit}: {words}: {code:?}: {said}");
            assert!(code == Some(0) || said.contains("open files"), "{limit}: {words}: {said}");
            results[usize::from(code == Some(0))] += 1;
        }
        assert!(results.iter().all(|count| *count > 0), "{words}: {results:?}");
    }
}

/// The exit code, or 128 for a signal.
fn code_or_signal(output: &Output) -> i32 {
    output.status.code().unwrap_or(128)
}

#[test]
fn a_dry_run_of_a_clean_image_says_so() {
    let bench = Bench::new();
    assert!(bench.run("create -f qcow2 a.qcow2 64M").status.success());
    let before = bytes(&bench.path("a.qcow2"));
    let output = bench.run("check -r all --dry-run a.qcow2");
    assert_eq!(code(&output), 0, "{}", complaint(&output));
    assert_eq!(bytes(&bench.path("a.qcow2")), before);
}

/// QEMU commits by the counts that such a base has, over its data.
#[test]
fn a_commit_repairs_a_base_that_was_not_closed_cleanly() {
    const DIRTY_OFFSET: usize = 79;
    const DATA_REFCOUNT_OFFSET: usize = 0x2000a;
    let bench = Bench::new();
    let said = |line: &str| {
        let output = bench.run(line);
        assert_eq!(code(&output), 0, "{line}: {}", complaint(&output));
        complaint(&output)
    };
    said("create -q -f qcow2 base 1M");
    assert!(bench.io("write -P 1 0 64k", "base").status.success());
    let mut image = bytes(&bench.path("base"));
    assert_eq!(image[DATA_REFCOUNT_OFFSET..][..2], [0, 1]);
    image[DATA_REFCOUNT_OFFSET + 1] = 0;
    image[DIRTY_OFFSET] |= 1;
    std::fs::write(bench.path("base"), image).expect("image");
    said("create -q -f qcow2 -b base -F qcow2 top");
    assert!(bench.io("write -P 4 256k 128k", "top").status.success());
    let repaired = said("commit -q top");
    assert!(
        repaired.contains("base: the image was not closed cleanly: 0 leaked clusters and 1 corruptions"),
        "{repaired}"
    );
    assert_eq!(said("check -q base"), "");
    for command in ["read -P 1 0 64k", "read -P 4 256k 128k"] {
        let output = bench.io(command, "base");
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && !out.contains("failed"), "{out}{}", complaint(&output));
    }
    assert_eq!(said("check -q top"), "");
}
