// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs a case by both sets of tools, in folders of the same name one after the other.

use crate::case::Case;
use crate::files;
use crate::session;
use cowshed_testkit::qemu::{Qemu, temp_dir};
use rustix::process::{Pid, Signal, kill_process_group};
use std::cell::RefCell;
use std::fmt;
use std::io;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// The names that both sets of tools have.
const TOOLS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];
/// Bounds every command line.
const LIMIT: Duration = Duration::from_secs(30);

/// The result of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Said {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Something that the two did differently.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The case's name.
    pub case: String,
    /// The index of the line; one past the last for files.
    pub line: usize,
    /// The command line; for files the case's name.
    pub command: String,
    /// `out`, `err`, `code`, `wait` or `file`.
    pub part: &'static str,
    /// QEMU's.
    pub theirs: String,
    /// Ours.
    pub ours: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = |text: &str| if text.ends_with('\n') { "" } else { "\n" };
        let Difference { case, line, command, part, theirs, ours } = self;
        writeln!(f, "=== {case} ({line}) {part}\n    {command}")?;
        write!(f, "--- QEMU\n{theirs}{}+++ ours\n{ours}{}", end(theirs), end(ours))
    }
}

/// A folder to work in and the two sets of tools.
pub struct Runner<'a> {
    folder: TempDir,
    qemu: &'a Qemu,
    theirs: PathBuf,
    ours: PathBuf,
    /// The lines that made the prepared folder.
    prepared: RefCell<Vec<String>>,
}

impl<'a> Runner<'a> {
    /// A runner with a folder of its own.
    pub fn new(qemu: &'a Qemu) -> Self {
        let folder = temp_dir();
        let (theirs, ours) = (folder.path().join("qemu"), folder.path().join("cowshed"));
        for (bin, is_ours) in [(&theirs, false), (&ours, true)] {
            std::fs::create_dir(bin).expect("a folder for the tools");
            for tool in TOOLS {
                let program = if is_ours { PathBuf::from(env!("CARGO_BIN_EXE_cowshed")) } else { qemu.program(tool) };
                symlink(program, bin.join(tool)).expect("a link to a tool");
            }
        }
        Runner { folder, qemu, theirs, ours, prepared: RefCell::default() }
    }

    /// Everything that differs.
    pub fn compare(&self, case: &Case) -> Vec<Difference> {
        let (prepared, theirs, ours) = (self.place("prepared"), self.place("theirs"), self.place("ours"));
        for folder in [&theirs, &ours] {
            let _ = std::fs::remove_dir_all(folder);
        }
        if *self.prepared.borrow() != case.setup || case.setup.is_empty() {
            let _ = std::fs::remove_dir_all(&prepared);
            self.prepare(case, &prepared);
            self.prepared.replace(case.setup.clone());
        }
        let said_by_theirs = self.run(case, &self.theirs, &prepared, &theirs);
        let said_by_ours = self.run(case, &self.ours, &prepared, &ours);
        let mut found = Vec::new();
        for (line, ((command, theirs), ours)) in case.lines.iter().zip(&said_by_theirs).zip(&said_by_ours).enumerate() {
            let mut add = |part, theirs: &str, ours: &str| {
                if theirs != ours {
                    let (theirs, ours) = (theirs.to_owned(), ours.to_owned());
                    found.push(Difference {
                        case: case.name.clone(),
                        line,
                        command: command.clone(),
                        part,
                        theirs,
                        ours,
                    });
                }
            };
            add("code", &format!("{:?}", theirs.code), &format!("{:?}", ours.code));
            let same_length = theirs.out.lines().count() == ours.out.lines().count();
            match same_length && session::is_session(command) {
                true => theirs.out.lines().zip(ours.out.lines()).for_each(|(theirs, ours)| add("out", theirs, ours)),
                false => add("out", &theirs.out, &ours.out),
            }
            add("err", &theirs.err, &ours.err);
            if theirs.out.contains(session::IN_VAIN) {
                add("wait", &theirs.out, "a session that comes to its end");
            }
        }
        for (theirs, ours) in files::differences(self.qemu, &theirs, &ours) {
            let (case_name, command) = (case.name.clone(), case.name.clone());
            let line = case.lines.len();
            found.push(Difference { case: case_name, line, command, part: "file", theirs, ours });
        }
        found
    }

    fn place(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn prepare(&self, case: &Case, folder: &Path) {
        std::fs::create_dir(folder).expect("a folder for the files");
        for line in &case.setup {
            let said = shell(line, &self.theirs, folder);
            assert_eq!(said.code, Some(0), "{}: $ {line}: {}{}", case.name, said.out, said.err);
        }
    }

    /// Runs the lines in a copy of the prepared folder, which afterwards is `kept`.
    fn run(&self, case: &Case, tools: &Path, prepared: &Path, kept: &Path) -> Vec<Said> {
        let work = self.place("work");
        let copied = Command::new("cp").arg("-a").arg("--sparse=always").arg(prepared).arg(&work).status();
        assert!(copied.is_ok_and(|status| status.success()), "cp -a");
        let said = case.lines.iter().map(|line| shell(line, tools, &work)).collect();
        std::fs::rename(&work, kept).expect("the folder can be renamed");
        said
    }
}

fn shell(line: &str, tools: &Path, folder: &Path) -> Said {
    let path = format!("{}:{}", tools.display(), std::env::var("PATH").unwrap_or_default());
    if session::is_session(line) {
        let session::Outcome { code, out, err } = session::run(line, &path, folder);
        let mut out = masked(&session::masked(&out));
        // Written without blanks.
        if line.contains("{\"execute\":\"blockdev-add\"") {
            out = session::without_file_lengths(&out);
        }
        return Said { code, out, err: masked(&err) };
    }
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(folder).stdin(Stdio::null());
    command.env("PATH", path).env("TZ", "UTC").env("LC_ALL", "C.UTF-8");
    let output = bounded(&mut command).unwrap_or_else(|error| panic!("{line}: {error}"));
    let text = |bytes: &[u8]| masked(&String::from_utf8_lossy(bytes));
    Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// The output of a command, whose group of processes is ended after [`LIMIT`].
fn bounded(command: &mut Command) -> io::Result<Output> {
    let child = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let group = Pid::from_child(&child);
    let (done, ended) = mpsc::channel::<()>();
    let watch = thread::spawn(move || {
        if ended.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    });
    let output = child.wait_with_output();
    drop(done);
    watch.join().expect("no panic");
    output
}

/// Without times, generated names, and the blocks that files take on the disk.
fn masked(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        let mut line = line.to_owned();
        for marker in ["Run completed in ", "disk size: ", " ops; "] {
            if let Some((start, _)) = line.split_once(marker) {
                line = format!("{start}{marker}…\n");
            }
        }
        for marker in
            ["\"actual-size\": ", "#block", "\"date-sec\": ", "\"date-nsec\": ", "\"seconds\": ", "\"microseconds\": "]
        {
            line = without_number_after(&line, marker);
        }
        // Content ids are random, but for that of no parent.
        if !line.contains("4294967295") {
            line = without_number_after(&without_number_after(&line, "cid: "), "cid\": ");
        }
        line = without_middle(&line);
        masked += &without_rates(&without_dates(&line));
    }
    masked
}

fn without_number_after(line: &str, marker: &str) -> String {
    let mut parts = line.split(marker);
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept += marker;
        kept.push('…');
        kept += part.trim_start_matches(|character: char| character.is_ascii_digit());
    }
    kept
}

/// Keeps only the first and the last of a growing percentage: the steps between are as large as each writer's requests.
fn without_middle(line: &str) -> String {
    const END: &str = "/100%)\r";
    let parts: Vec<&str> = line.split_inclusive(END).collect();
    match &parts[..] {
        [first, .., last, rest] if first.ends_with(END) && last.ends_with(END) => format!("{first}{last}{rest}"),
        _ => line.to_owned(),
    }
}

/// The report of qemu-io's `-C` without times and rates: bytes and requests stay.
fn without_rates(line: &str) -> String {
    let fields: Vec<&str> = line.trim_end().split(',').collect();
    match fields[..] {
        [bytes, requests, time, _, _] if bytes.parse::<u64>().is_ok() && time.contains(':') => {
            format!("{bytes},{requests},…\n")
        }
        _ => line.to_owned(),
    }
}

/// `2024-01-31 12:30:59` becomes `DATE`.
fn without_dates(line: &str) -> String {
    const FORM: &[u8] = b"0000-00-00 00:00:00";
    let is_date = |bytes: &[u8]| {
        bytes.len() == FORM.len()
            && bytes
                .iter()
                .zip(FORM)
                .all(|(byte, form)| if *form == b'0' { byte.is_ascii_digit() } else { byte == form })
    };
    let (mut kept, mut rest) = (String::new(), line);
    while let Some(character) = rest.chars().next() {
        match rest.as_bytes().get(..FORM.len()) {
            Some(bytes) if is_date(bytes) => {
                kept += "DATE";
                rest = &rest[FORM.len()..];
            }
            _ => {
                kept.push(character);
                rest = &rest[character.len_utf8()..];
            }
        }
    }
    kept
}
