// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs the real qemu-img and ours, called by the same name, on the same files, and compares their output.
//!
//! Ours speaks as QEMU 11 does, and the newest QEMU, of `scripts/peers`, decides. The system's is compared too: lines
//! that only read run with both, the others with each of the two in turn. Where the system's is older, our text is
//! turned into that version's by the rules of [`as_older`], one a known change of QEMU.

use cowshed_testkit::programs::{self, Said};
use cowshed_testkit::qemu::Qemu;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A folder with images, the real tool and ours.
pub struct Oracle {
    folder: TempDir,
    /// The real tools: the newest.
    pub qemu: Qemu,
    /// Those and the system's, with their versions.
    judges: [(Qemu, (u32, u32)); 2],
    /// The number of lines that one of the two has judged.
    turns: std::cell::Cell<usize>,
    ours: PathBuf,
    differences: std::cell::RefCell<String>,
}

impl Oracle {
    /// An empty folder.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder for the test");
        let bin = folder.path().join("bin");
        std::fs::create_dir(&bin).expect("a folder for the link");
        let ours = bin.join("qemu-img");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_cowshed"), &ours).expect("a link named qemu-img");
        let qemu = Qemu::newest();
        let judges = [qemu.clone(), Qemu::system()].map(|qemu| {
            let version = qemu.version();
            (qemu, version)
        });
        let work = folder.path().join("work");
        std::fs::create_dir(&work).expect("a folder for the images");
        Self { folder, qemu, judges, turns: Default::default(), ours, differences: Default::default() }
    }

    /// The folder of the images: the working folder of every run.
    pub fn work(&self) -> PathBuf {
        self.folder.path().join("work")
    }

    /// Runs the real qemu-img in the working folder, to make images; it must succeed.
    #[track_caller]
    pub fn make(&self, line: &str) {
        let said = self.real(&self.work(), &words(line));
        assert_eq!(said.code, Some(0), "qemu-img {line}: {}", said.err);
    }

    /// As [`Oracle::make`] for commands that fail on a busy machine: they measure the time of a key derivation.
    #[track_caller]
    pub fn make_patiently(&self, line: &str) {
        let run = || self.real(&self.work(), &words(line));
        let said = (0..20).map(|_| run()).find(|said| said.code == Some(0));
        assert!(said.is_some(), "qemu-img {line}: {}", run().err);
    }

    /// Runs qemu-io commands on an image, to fill it.
    #[track_caller]
    pub fn io(&self, commands: &[&str], image: &str) {
        let mut command = Command::new(self.qemu.io_path());
        command.current_dir(self.work());
        for text in commands {
            command.args(["-c", text]);
        }
        let said = finish(command.arg(image));
        assert_eq!(said.code, Some(0), "qemu-io {commands:?} {image}: {}{}", said.out, said.err);
    }

    /// The judge whose turn it is.
    fn judge(&self) -> &(Qemu, (u32, u32)) {
        let turn = self.turns.get();
        self.turns.set(turn + 1);
        &self.judges[turn % self.judges.len()]
    }

    /// The real tool's answer, in a folder.
    pub fn real(&self, folder: &Path, arguments: &[String]) -> Said {
        self.real_of(&self.qemu, folder, arguments)
    }

    /// The answer of the system's tool, in a folder.
    pub fn real_of_system(&self, folder: &Path, arguments: &[String]) -> Said {
        self.real_of(&self.judges[1].0, folder, arguments)
    }

    fn real_of(&self, qemu: &Qemu, folder: &Path, arguments: &[String]) -> Said {
        finish(Command::new(qemu.img_path()).args(arguments).current_dir(folder))
    }

    /// Our answer by the name qemu-img, in a folder.
    pub fn ours(&self, folder: &Path, arguments: &[String]) -> Said {
        finish(Command::new(&self.ours).args(arguments).current_dir(folder))
    }

    /// Our message when `line` is refused; it must be, with code 1 and in one go.
    #[track_caller]
    pub fn refused(&self, line: &str) -> String {
        let said = self.ours(&self.work(), &words(line));
        assert_eq!(said.code, Some(1), "{line}: {}{}", said.out, said.err);
        assert!(!said.err.contains("panicked"), "{line}: {}", said.err);
        said.err
    }

    /// Both read the same images; every difference is noted for [`Oracle::verdict`].
    pub fn compare(&self, line: &str) {
        let arguments = words(line);
        let ours = self.ours(&self.work(), &arguments);
        for (qemu, version) in &self.judges {
            let real = tidy(self.real_of(qemu, &self.work(), &arguments));
            self.note(&named(line, *version), &real, &tidy(as_installed(ours.clone(), *version)));
        }
    }

    /// As [`Oracle::compare`] for runs that write: each tool works on its own copy of the folder. `check` sees both.
    pub fn compare_writing(&self, line: &str, check: impl FnOnce(&Path, &Path)) {
        let arguments = words(line);
        let (theirs, own) = self.copies();
        let (qemu, version) = self.judge();
        let real = tidy(self.real_of(qemu, &theirs, &arguments));
        let ours = tidy(as_installed(self.ours(&own, &arguments), *version));
        self.note(&named(line, *version), &real, &ours);
        if real.code == Some(0) && ours.code == Some(0) {
            check(&theirs, &own);
        }
    }

    /// Several runs of each tool, one after the other, on its own copy of the folder. Compared are their messages, and
    /// afterwards the content of each of `images` (name and format).
    pub fn compare_session(&self, lines: &[&str], images: &[(&str, &str)]) {
        let (theirs, own) = self.copies();
        let (qemu, version) = self.judge();
        for line in lines {
            let arguments = words(line);
            let real = masked(tidy(self.real_of(qemu, &theirs, &arguments)));
            let ours = masked(tidy(as_installed(self.ours(&own, &arguments), *version)));
            self.note(&named(&format!("{line}   (of {lines:?})"), *version), &real, &ours);
        }
        for (image, format) in images {
            let place = |folder: &Path| folder.join(image).display().to_string();
            let said = self.qemu.img(["compare", "-f", format, "-F", format, &place(&theirs), &place(&own)]);
            if said.code != 0 {
                let _ = writeln!(self.differences.borrow_mut(), "== {lines:?}: {image} differs: {}", said.stdout);
            }
            let described = |folder: &Path| described(&self.qemu, &folder.join(image), format);
            let (real, ours) = (described(&theirs), described(&own));
            if real != ours {
                let _ =
                    writeln!(self.differences.borrow_mut(), "== {lines:?}: {image}\n-- real: {real}\n-- ours: {ours}");
            }
            if *format == "qcow2" {
                let check = self.qemu.check(&own.join(image), format);
                if check.code != 0 && check.code != self.qemu.check(&theirs.join(image), format).code {
                    let _ = writeln!(self.differences.borrow_mut(), "== {lines:?}: {image}: {}", check.json);
                }
            }
        }
    }

    /// An empty folder for each of the two.
    pub fn folders(&self) -> (PathBuf, PathBuf) {
        self.copies()
    }

    /// The folder with our program by the name qemu-img.
    pub fn bin(&self) -> &Path {
        self.ours.parent().unwrap_or(&self.ours)
    }

    /// A copy of the folder for each of the two.
    fn copies(&self) -> (PathBuf, PathBuf) {
        let (theirs, own) = (self.folder.path().join("theirs"), self.folder.path().join("own"));
        for copy in [&theirs, &own] {
            let _ = std::fs::remove_dir_all(copy);
            let copied = Command::new("cp").arg("-a").arg("--sparse=always").arg(self.work()).arg(copy).status();
            assert!(copied.is_ok_and(|status| status.success()), "cp -a");
        }
        (theirs, own)
    }

    /// Both refuse: same exit code, and our first line begins with the whole first line of the real tool, as QEMU 11
    /// words it ([`Oracle::as_newer`]).
    pub fn compare_refusal(&self, line: &str) {
        let arguments = words(line);
        let (qemu, version) = self.judge();
        let real = self.as_newer(self.real_of(qemu, &self.work(), &arguments));
        let ours = self.ours(&self.work(), &arguments);
        assert_ne!(real.code, Some(0), "qemu-img {line} was to fail");
        let sentence = first_line(&real);
        let same = !sentence.is_empty() && first_line(&ours).starts_with(&sentence);
        if real.code != ours.code || !same || ours.err.contains("panicked") {
            let line = named(line, *version);
            self.note(&line, &Said { out: String::new(), ..real }, &Said { out: String::new(), ..ours });
        }
    }

    /// The installed tool's message in QEMU 11's words, where those have changed, and without the part that only ours
    /// has.
    fn as_newer(&self, said: Said) -> Said {
        let mut err = said.err;
        for (older, newer) in NEWER_WORDS {
            if err.starts_with(older) {
                err = format!("{newer}\n");
            }
        }
        Said { err, ..said }
    }

    fn note(&self, line: &str, real: &Said, ours: &Said) {
        if real != ours {
            let mut differences = self.differences.borrow_mut();
            let _ = writeln!(differences, "== qemu-img {line}");
            for (what, real, ours) in [
                ("exit code", &format!("{:?}\n", real.code), &format!("{:?}\n", ours.code)),
                ("output", &real.out, &ours.out),
                ("errors", &real.err, &ours.err),
            ] {
                if real != ours {
                    let _ = write!(differences, "-- {what}, real:\n{real}-- {what}, ours:\n{ours}");
                }
            }
        }
    }

    /// Fails the test when something differed.
    #[track_caller]
    pub fn verdict(&self) {
        let differences = self.differences.borrow();
        assert!(differences.is_empty(), "our qemu-img differs\n{differences}");
    }

    /// The differences so far.
    pub fn differences(&self) -> String {
        self.differences.borrow().clone()
    }
}

/// Ours, in the words of a version of QEMU.
fn as_installed(said: Said, version: (u32, u32)) -> Said {
    let err = match version < (11, 0) {
        true => said.err.replace("--remove, --remove-all, --clear", "--remove, --clear"),
        false => said.err,
    };
    Said { out: as_older(&said.out, version), err, ..said }
}

/// A line with the version that judged it.
fn named(line: &str, (major, minor): (u32, u32)) -> String {
    format!("{line}   [QEMU {major}.{minor}]")
}

/// First lines of the installed tool, with the words of QEMU 11 (or ours, by the comment there).
const NEWER_WORDS: &[(&str, &str)] = &[
    ("qemu-img: Unknown option value for -r (", "qemu-img: --repair (-r) expects 'leaks' or 'all', not "),
    ("qemu-img: Not enough arguments", "qemu-img: Expecting image file name and size"),
    ("qemu-img: Invalid granularity specified. You may use", "qemu-img: Invalid granularity specified: "),
    (
        "qemu-img: Could not create snapshot 'one': -95 (Operation not supported)",
        "qemu-img: Could not create snapshot 'one': Operation not supported",
    ),
];

/// The first line, with the name of a node of the real tool taken for the file that ours names there.
pub fn first_line(said: &Said) -> String {
    let mut line = said.err.lines().next().unwrap_or_default().trim_end().to_owned();
    for marker in ["bitmaps to ", "persistent in '"] {
        if let Some((start, rest)) = line.split_once(marker) {
            let after = rest.find([':', '\'']).unwrap_or(rest.len());
            line = format!("{start}{marker}IMAGE{}", &rest[after..]);
        }
    }
    line
}

/// Our own command in the folder of the work, which must succeed; its output.
#[track_caller]
pub fn ours(oracle: &Oracle, line: &str) -> String {
    let said = oracle.ours(&oracle.work(), &words(line));
    assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
    said.out
}

/// Splits at spaces; `'…'` keeps them.
pub fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut quoted, mut kept) = (false, false);
    for character in line.chars() {
        match character {
            '\'' => {
                quoted = !quoted;
                kept = true;
            }
            ' ' if !quoted => {
                if kept || words.last().is_some_and(|word| !word.is_empty()) {
                    words.push(String::new());
                }
                kept = false;
            }
            other => words.last_mut().expect("never empty").push(other),
        }
    }
    words
}

fn finish(command: &mut Command) -> Said {
    let said = programs::finish(command.env("TZ", "UTC").env("LC_ALL", "C.UTF-8"));
    let is_text = |text: &str| !text.contains(char::REPLACEMENT_CHARACTER);
    assert!(is_text(&said.out) && is_text(&said.err), "the output is no text: {said:?}");
    said
}

/// The program to ask for help depends on the path of the call.
fn tidy(said: Said) -> Said {
    let err =
        said.err.lines().filter(|line| !line.starts_with("Try '")).fold(String::new(), |text, line| text + line + "\n");
    Said { err, ..said }
}

/// Without times and the places that files take on the disk.
fn masked(said: Said) -> Said {
    let line = |line: &str| {
        for before in ["Run completed in ", "disk size: ", "\"actual-size\": "] {
            if let Some((start, _)) = line.split_once(before) {
                return format!("{start}{before}…\n");
            }
        }
        format!("{line}\n")
    };
    Said { out: said.out.lines().map(line).collect(), ..said }
}

/// The real tool's description of an image, without the parts that depend on place and time.
fn described(qemu: &Qemu, path: &Path, format: &str) -> String {
    let said = qemu.img(["info", "--output=json", "-f", format, &path.display().to_string()]);
    if said.code != 0 {
        return format!("exit code {}", said.code);
    }
    let mut info = said.json();
    if let Some(info) = info.as_object_mut() {
        for key in ["filename", "actual-size", "full-backing-filename", "children"] {
            info.remove(key);
        }
        if let Some(snapshots) = info.get_mut("snapshots").and_then(|list| list.as_array_mut()) {
            for snapshot in snapshots.iter_mut().filter_map(|snapshot| snapshot.as_object_mut()) {
                snapshot.retain(|key, _| !key.starts_with("date"));
            }
        }
    }
    // The length of a raw image in `info` is rounded up to sectors.
    let file_bytes = (format == "raw").then(|| path.metadata().map(|metadata| metadata.len()).ok());
    format!("{info}, {file_bytes:?}")
}

/// Our text as an older qemu-img prints it.
fn as_older(text: &str, version: (u32, u32)) -> String {
    let mut text = text.to_owned();
    if version < (8, 0) {
        text = without_block(&text, |line| line.starts_with("Child node '"), |line| !line.starts_with(' '), false);
        text = without_json_children(&text);
    }
    if version < (8, 2) {
        text = text.replace(", \"compressed\": false", "").replace(", \"compressed\": true", "");
    }
    if version < (9, 0) {
        // A detached header of LUKS is news of QEMU 9.
        text = without_block(&text, |line| line.trim_start().starts_with("detached header: "), |_| true, false);
        text = without_block(&text, |line| line.trim_start().starts_with("\"detached-header\": "), |_| true, false);
    }
    if version < (10, 0) {
        text = text.lines().fold(String::new(), |all, line| all + &older_snapshot_line(line) + "\n");
    }
    text
}

/// Leaves out the lines from one that `begins` to the next that `ends`, that one included when `whole`.
fn without_block(text: &str, begins: impl Fn(&str) -> bool, ends: impl Fn(&str) -> bool, whole: bool) -> String {
    let mut kept = String::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if !begins(line) {
            kept += line;
            kept.push('\n');
            continue;
        }
        while lines.next_if(|line| !ends(line)).is_some() {}
        if whole {
            lines.next();
        }
    }
    kept
}

/// QEMU 8 added `children` to each image's JSON.
fn without_json_children(text: &str) -> String {
    let mut text = text.to_owned();
    for depth in [1, 2] {
        let indent = "    ".repeat(depth);
        let (opening, closing) = (format!("{indent}\"children\": ["), format!("{indent}],"));
        text = without_block(&text, |line| line == opening, |line| line == closing, true);
    }
    text
}

/// QEMU 10 changed the columns of the snapshot list.
fn older_snapshot_line(line: &str) -> String {
    if line.starts_with("ID      TAG ") {
        return "ID        TAG               VM SIZE                DATE     VM CLOCK     ICOUNT".to_owned();
    }
    let is_row = line.starts_with(|first: char| first.is_ascii_digit()) && line.contains(" 0000:");
    match line.split_at_checked(8) {
        Some((id, rest)) if is_row => {
            format!("{id}  {}", rest.replace("  0000:", " 00:"))
        }
        _ => line.to_owned(),
    }
}
