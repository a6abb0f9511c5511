// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A copy of the sources with edits in it, each behind a switch that is read from the environment. It is built once,
//! and is as many programs as there are switches. The sources themselves know nothing of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// File, what stands there (once), and what stands there instead.
pub type Edit = (&'static str, &'static str, &'static str);

/// The file of the crate that all others use: what reads the environment is appended to it.
const SWITCHED: &str = "crates/block/src/lib.rs";

/// How the edits of a list are switched on.
#[derive(Clone, Copy, Debug)]
pub struct Switches {
    /// The word in an edit that stands for "this switch is on".
    pub word: &'static str,
    /// What that word becomes; `NAME` in it is the name of the switch.
    pub call: &'static str,
    /// The code that reads the environment.
    pub reader: &'static str,
}

fn read(root: &Path, file: &str) -> Result<String, String> {
    std::fs::read_to_string(root.join(file)).map_err(|error| format!("{file}: {error}"))
}

impl Switches {
    /// What is wrong with a list: edits that don't find their place exactly once, or that nothing switches.
    pub fn faults(&self, root: &Path, lists: &[(&str, &[Edit])]) -> Vec<String> {
        let mut faults = Vec::new();
        for (name, edits) in lists {
            for (file, old, new) in *edits {
                match read(root, file).map(|text| text.matches(old).count()) {
                    Ok(1) if new.contains(self.word) => {}
                    Ok(1) => faults.push(format!("{name}: nothing switches the edit of {file} at\n{old}")),
                    Ok(count) => faults.push(format!("{name}: {count} places in {file} for\n{old}")),
                    Err(error) => faults.push(format!("{name}: {error}")),
                }
            }
        }
        faults
    }

    /// The files that change, with all edits in them. Panics where an edit doesn't find its place.
    fn texts(&self, root: &Path, lists: &[(&'static str, &'static [Edit])]) -> BTreeMap<&'static str, String> {
        let read = |file: &str| read(root, file).unwrap_or_else(|error| panic!("{error}"));
        let mut texts = BTreeMap::from([(SWITCHED, read(SWITCHED) + self.reader)]);
        for (name, edits) in lists {
            for (file, old, new) in *edits {
                let text = texts.entry(file).or_insert_with(|| read(file));
                assert_eq!(text.matches(old).count(), 1, "{name}: no single place in {file} for\n{old}");
                *text = text.replacen(old, &new.replace(self.word, &self.call.replace("NAME", name)), 1);
            }
        }
        texts
    }

    /// Copies every file that git knows to `tree`, with the edits; what is the same already keeps its time and is not built
    /// again. Panics where that fails.
    pub fn copy(&self, root: &Path, tree: &Path, lists: &[(&'static str, &'static [Edit])]) {
        let texts = self.texts(root, lists);
        let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output().expect("git runs");
        assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
        let mut names = BTreeSet::new();
        for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = String::from_utf8_lossy(name).into_owned();
            names.insert(tree.join(&name));
            let bytes = match texts.get(name.as_str()) {
                Some(text) => text.clone().into_bytes(),
                None => match std::fs::read(root.join(&name)) {
                    Ok(bytes) => bytes,
                    // Deleted, and git has not been told.
                    Err(_) => continue,
                },
            };
            let to = tree.join(&name);
            if std::fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            std::fs::create_dir_all(to.parent().expect("a file is in a folder")).expect("a folder of the copy");
            std::fs::write(&to, bytes).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
        }
        remove_others(&tree.join("crates"), &names);
    }
}

/// Removes what an earlier copy has left and git no longer knows.
fn remove_others(folder: &Path, names: &BTreeSet<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the copy") {
        let path = entry.expect("a folder of the copy").path();
        if path.is_dir() {
            remove_others(&path, names);
        } else if !names.contains(&path) {
            std::fs::remove_file(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
    }
}
