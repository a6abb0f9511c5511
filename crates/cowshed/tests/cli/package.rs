// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The packages: `scripts/package` twice over this program, and `scripts/try-package` on the result.

use cowshed_testkit::programs::tool;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository is there")
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("the folder is there").map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| (entry.file_name().into_string().expect("a name"), std::fs::read(entry.path()).expect("a file")))
        .collect()
}

#[test]
fn packages_are_reproducible_and_work_installed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    // The first one without --out, in the script's own folder for drafts.
    let made = [root().join("target/package-draft"), folder.path().join("two")];
    let _ = std::fs::remove_dir_all(&made[0]);
    let package = root().join("scripts/package");
    let draft = ["--draft", "--program", env!("CARGO_BIN_EXE_cowshed")];
    tool(&package, &draft);
    tool(&package, &[&draft[..], &["--out", made[1].to_str().expect("a name")]].concat());
    let [one, two] = [&made[0], &made[1]].map(|folder| files(folder));
    assert!(one.len() == 4 && one.keys().eq(two.keys()), "{:?}, {:?}", one.keys(), two.keys());
    for (name, bytes) in &one {
        assert!(*bytes == two[name], "{name} differs between two runs");
    }
    let said = tool(root().join("scripts/try-package"), &[made[0].to_str().expect("a name")]);
    assert!(said.contains("installed, used and removed"), "{said}");
}

/// Not every machine has systemd's tool.
#[test]
fn systemd_takes_the_units_of_the_package() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
    for kind in ["service", "socket"] {
        let unit = root().join(format!("packaging/cowshed@.{kind}"));
        let text = std::fs::read_to_string(unit).expect("the unit is there");
        let here = text.replace("/usr/local/bin/cowshed", env!("CARGO_BIN_EXE_cowshed"));
        std::fs::write(folder.path().join(format!("cowshed@web.{kind}")), here).expect("a unit is written");
    }
    let verify = Command::new("systemd-analyze").arg("verify").arg(folder.path().join("cowshed@web.service")).output();
    let Ok(output) = verify else { return };
    // Units of the machine may have faults of their own.
    let said = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("cowshed@web")).collect();
    assert!(ours.is_empty(), "{ours:#?}");
}

#[test]
fn the_page_about_systemd_shows_the_units_of_the_package() {
    let page = std::fs::read_to_string(root().join("docs/systemd.md")).expect("the page is there");
    for unit in ["cowshed@.service", "cowshed@.socket"] {
        let text = std::fs::read_to_string(root().join("packaging").join(unit)).expect("the unit is there");
        assert!(page.contains(&format!("```ini\n{text}```")), "docs/systemd.md doesn't show packaging/{unit}");
    }
}
