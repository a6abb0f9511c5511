// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Applies each mutant of `cowshed_testkit::mutants` to a copy of the sources and runs the test that must fail then.
//!
//! `scripts/mutants [--only NAME]... [--table FILE]`. The copy is in `target/mutants`; it is built in `target` too, so
//! that nothing from outside is built again. Exits with 1 when a mutant lives.

use cowshed_testkit::mutants::{MUTANTS, Mutant};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// A test that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(400);

/// What became of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Killed,
    Hangs,
    Lives,
    DoesNotBuild,
}

impl Fate {
    fn text(self) -> &'static str {
        match self {
            Fate::Killed => "killed",
            Fate::Hangs => "killed: hangs",
            Fate::Lives => "LIVES",
            Fate::DoesNotBuild => "DOES NOT BUILD",
        }
    }
}

struct Copy {
    root: PathBuf,
    tree: PathBuf,
    /// Files that the last mutant has changed, as they were.
    changed: BTreeMap<PathBuf, String>,
}

impl Copy {
    /// Copies every file that git knows; unchanged ones keep their times, so that they are not built again.
    fn new(root: &Path) -> Self {
        let tree = root.join("target/mutants");
        let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root).output().expect("git runs");
        assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
        for name in listed.stdout.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let name = String::from_utf8_lossy(name).into_owned();
            let (from, to) = (root.join(&name), tree.join(&name));
            let Ok(bytes) = std::fs::read(&from) else { continue };
            if std::fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            std::fs::create_dir_all(to.parent().expect("a file is in a folder")).expect("a folder of the copy");
            std::fs::write(&to, bytes).unwrap_or_else(|error| panic!("{}: {error}", to.display()));
        }
        Copy { root: root.to_owned(), tree, changed: BTreeMap::new() }
    }

    /// Takes the last mutant back and puts the next one in, with one write for each file.
    fn change(&mut self, edits: &[(&str, &str, &str)]) {
        let before = std::mem::take(&mut self.changed);
        let mut texts: BTreeMap<PathBuf, String> = before.clone();
        for (file, old, new) in edits {
            let path = self.tree.join(file);
            let present = || std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{file}: {error}"));
            let text = texts.entry(path.clone()).or_insert_with(present);
            self.changed
                .entry(path.clone())
                .or_insert_with(|| before.get(&path).cloned().unwrap_or_else(|| text.clone()));
            assert_eq!(text.matches(old).count(), 1, "{file} has no single place for\n{old}");
            *text = text.replacen(old, new, 1);
        }
        for (path, text) in texts {
            std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
    }

    fn cargo(&self, mutant: &Mutant) -> Command {
        let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
        command.args(["test", "-q", "--locked", "-p", "cowshed-testkit", "--test", mutant.test.0]);
        command.current_dir(&self.tree).env("CARGO_TARGET_DIR", self.root.join("target"));
        command.env("COWSHED_SHRINK_TRIES", "0");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    fn fate(&mut self, mutant: &Mutant) -> Fate {
        self.change(mutant.edits);
        let built = self.cargo(mutant).arg("--no-run").status().expect("cargo runs");
        if !built.success() {
            return Fate::DoesNotBuild;
        }
        let mut test = self.cargo(mutant).args(["--", "--exact", mutant.test.1]).spawn().expect("cargo runs");
        let started = Instant::now();
        loop {
            match test.try_wait().expect("a child can be waited for") {
                Some(status) if status.success() => return Fate::Lives,
                Some(_) => return Fate::Killed,
                None if started.elapsed() > PATIENCE => {
                    // The test itself is a child of cargo and ends when it is done, or never: it is told to end too.
                    let children = Command::new("pkill").args(["-P", &test.id().to_string()]).status();
                    drop((children, test.kill(), test.wait()));
                    return Fate::Hangs;
                }
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
}

fn main() -> ExitCode {
    let (mut only, mut table) = (Vec::new(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--only" => only.extend(words.next()),
            "--table" => table = words.next(),
            _ => {
                eprintln!("unknown option {word}; see the head of examples/mutants.rs");
                return ExitCode::from(2);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace");
    let mut copy = Copy::new(&root);
    let mut text = String::from("| mutant | what goes wrong | killed by |\n|---|---|---|\n");
    let (mut count, mut alive) = (0, 0);
    for mutant in MUTANTS.iter().filter(|mutant| only.is_empty() || only.iter().any(|name| name == mutant.name)) {
        let started = Instant::now();
        let fate = copy.fate(mutant);
        count += 1;
        alive += usize::from(matches!(fate, Fate::Lives | Fate::DoesNotBuild));
        println!("{:45} {:15} {:4.0} s", mutant.name, fate.text(), started.elapsed().as_secs_f64());
        let by = match fate {
            Fate::Killed => format!("`{}::{}`", mutant.test.0, mutant.test.1),
            other => other.text().to_owned(),
        };
        text += &format!("| {} | {} | {by} |\n", mutant.name.replace('_', " "), mutant.about);
    }
    copy.change(&[]);
    if let Some(path) = table
        && let Err(error) = std::fs::write(&path, text)
    {
        eprintln!("could not write {path}: {error}");
    }
    println!("{} of {count} mutants killed", count - alive);
    if alive == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
