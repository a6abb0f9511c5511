// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sessions of QMP with the storage daemon on its standard streams.
//!
//! A session is a line `qmp` with arguments of the daemon (`qmp,pretty=on` with options of the monitor) and lines of
//! its own: `> TEXT` sends and waits for the answer, `>> TEXT` sends and goes on, and `! SIGNAL` sends a signal.
//! `< WORDS` waits for a message with these words, behind the last one waited for. `~ WORDS | COMMAND` repeats a
//! command while its answer has the words; these answers are left out. The end of the session is the end of the input.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bounds each wait.
const PATIENCE: Duration = Duration::from_secs(20);

/// Marks of the lines that belong to a session.
pub const MARKS: [&str; 5] = ["> ", ">> ", "< ", "! ", "~ "];

/// The last line of a session that waited too long. Each such session is wrong, whatever the other tool did.
pub const IN_VAIN: &str = "[waited in vain for ";

/// The id of commands that are repeated.
const REPEATED: &str = "repeated";

/// The result of a session.
pub struct Outcome {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// True for a command line that is a session.
pub fn is_session(line: &str) -> bool {
    line.starts_with("qmp")
}

/// Output as it comes.
#[derive(Default)]
struct Output {
    state: Mutex<(Vec<u8>, bool)>,
    changed: Condvar,
}

impl Output {
    fn follow(self: &Arc<Self>, mut source: impl Read + Send + 'static) -> thread::JoinHandle<()> {
        let output = Arc::clone(self);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            loop {
                let len = source.read(&mut bytes).unwrap_or(0);
                let mut state = output.state.lock().unwrap_or_else(PoisonError::into_inner);
                state.0.extend_from_slice(&bytes[..len]);
                state.1 = len == 0;
                output.changed.notify_all();
                if len == 0 {
                    return;
                }
            }
        })
    }

    /// Waits until the text from `from` on is enough; where it is enough, or nothing.
    fn wait(&self, from: usize, enough: impl Fn(&str) -> Option<usize>) -> Option<usize> {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let text = String::from_utf8_lossy(&state.0[from.min(state.0.len())..]).into_owned();
            if let Some(at) = enough(&text) {
                return Some(from + at);
            }
            let left = until.saturating_duration_since(Instant::now());
            if state.1 || left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.state.lock().unwrap_or_else(PoisonError::into_inner).0).into_owned()
    }
}

/// The end of the first message that `fits`, of a text that begins with one.
fn end_of_message(text: &str, fits: impl Fn(&str) -> bool) -> Option<usize> {
    let mut at = 0;
    // A message ends with the line that closes it, which begins in the first column.
    let mut end = 0;
    for line in text.split_inclusive('\n') {
        end += line.len();
        let closes = line.starts_with('}') || (line.starts_with('{') && line.trim_end().ends_with('}'));
        if closes && line.ends_with('\n') {
            if fits(&text[at..end]) {
                return Some(end);
            }
            at = end;
        }
    }
    None
}

/// Without the answers to commands that were repeated.
fn without_repeated(text: &str) -> String {
    let id = format!("\"id\": \"{REPEATED}\"");
    let (mut kept, mut rest) = (String::new(), text);
    while let Some(end) = end_of_message(rest, |_| true) {
        if !rest[..end].contains(&id) {
            kept += &rest[..end];
        }
        rest = &rest[end..];
    }
    kept + rest
}

fn is_answer(message: &str) -> bool {
    !message.contains("\"event\": ") && !message.contains("\"QMP\": ")
}

/// Runs a session by the tools in `path`.
pub fn run(session: &str, path: &str, folder: &Path) -> Outcome {
    let mut lines = session.lines();
    let first = lines.next().unwrap_or_default();
    let (options, arguments) = first.trim_start_matches("qmp").split_once(' ').unwrap_or((&first[3..], ""));
    let line = format!("exec qemu-storage-daemon --chardev stdio,id=m --monitor chardev=m{options} {arguments}");
    let mut command = Command::new("sh");
    command.args(["-c", &line]).current_dir(folder).env("PATH", path).env("TZ", "UTC").env("LC_ALL", "C.UTF-8");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{line}: {error}"));
    let (out, err) = (Arc::new(Output::default()), Arc::new(Output::default()));
    let followers = [out.follow(child.stdout.take().expect("piped")), err.follow(child.stderr.take().expect("piped"))];
    let missed = converse(&mut child, &out, lines);
    let code = ended(&mut child);
    let missed = missed.map(|what| format!("{IN_VAIN}{what}]\n"));
    let missed = missed.or_else(|| code.is_none().then(|| format!("{IN_VAIN}the end]\n"))).unwrap_or_default();
    followers.into_iter().for_each(|follower| follower.join().expect("no panic"));
    Outcome { code, out: without_repeated(&out.text()) + &missed, err: err.text() }
}

/// Carries the lines out; returns the words that never came.
fn converse<'a>(child: &mut Child, out: &Output, lines: impl Iterator<Item = &'a str>) -> Option<String> {
    let mut input = child.stdin.take().expect("piped");
    // The first answers and messages that were not waited for yet.
    let (mut answers, mut messages) = (0, 0);
    for line in lines {
        let (mark, text) = line.split_once(' ').unwrap_or((line, ""));
        match mark {
            ">" | ">>" => {
                // A daemon that has ended takes nothing.
                let _ = writeln!(input, "{text}").and_then(|()| input.flush());
                if mark == ">" {
                    match out.wait(answers, |text| end_of_message(text, is_answer)) {
                        Some(end) => answers = end,
                        None => return Some(line.to_owned()),
                    }
                }
            }
            "<" => {
                let fits = |message: &str| text.split(' ').all(|word| message.contains(&format!("\"{word}\"")));
                match out.wait(messages, |text| end_of_message(text, fits)) {
                    Some(end) => messages = end,
                    None => return Some(line.to_owned()),
                }
            }
            "~" => {
                let (words, command) = text.split_once(" | ").unwrap_or_else(|| panic!("'{line}' has no command"));
                let mut message: serde_json::Value = serde_json::from_str(command).expect("a command is JSON");
                message["id"] = REPEATED.into();
                let until = Instant::now() + PATIENCE;
                loop {
                    let _ = writeln!(input, "{message}").and_then(|()| input.flush());
                    let Some(end) = out.wait(answers, |text| end_of_message(text, is_answer)) else {
                        return Some(line.to_owned());
                    };
                    let is_over = !out.text()[answers..end].contains(words);
                    answers = end;
                    if is_over {
                        break;
                    }
                    if Instant::now() > until {
                        return Some(line.to_owned());
                    }
                    // Between two queries. The end of patience is an answer here.
                    thread::sleep(Duration::from_millis(5));
                }
            }
            "!" => {
                let sent = Command::new("kill").args(["-s", text, &child.id().to_string()]).status();
                assert!(sent.is_ok_and(|status| status.success()), "kill -s {text}");
            }
            _ => panic!("'{line}' is no line of a session"),
        }
    }
    None
}

/// Waits for the end of the daemon, or brings it about.
fn ended(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status.code();
        }
        if Instant::now() > until {
            child.kill().expect("a child");
            let _ = child.wait();
            return None;
        }
        // Between two looks. A process in vain is killed, and that is an answer.
        thread::sleep(Duration::from_millis(2));
    }
}

/// The text without the parts that differ from run to run: times, versions, and numbers of generated names. QEMU's
/// lines about new images among the answers are left out.
pub fn masked(text: &str) -> String {
    let mut masked = String::new();
    for line in text.lines().filter(|line| !line.starts_with("Formatting '")) {
        let mut line = line.trim_end_matches('\r').to_owned();
        for (key, ends) in [
            ("\"micro\": ", ",}"),
            ("\"package\": \"", "\""),
            ("\"vm-clock-sec\": ", ",}"),
            ("\"vm-clock-nsec\": ", ",}"),
        ] {
            line = without_value(&line, key, ends);
        }
        masked += &line;
        masked.push('\n');
    }
    masked
}

/// The text without the lengths of files below images: a generated session doesn't choose the places of clusters.
pub fn without_file_lengths(text: &str) -> String {
    const KEY: &str = "\"virtual-size\": ";
    let mut parts = text.split(KEY);
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept += KEY;
        let format = part.split_once("\"format\": \"").map_or("", |(_, format)| format);
        let digits = part.find(|character: char| !character.is_ascii_digit()).unwrap_or(part.len());
        kept += if format.starts_with("file\"") { "…" } else { &part[..digits] };
        kept += &part[digits..];
    }
    kept
}

fn without_value(line: &str, key: &str, ends: &str) -> String {
    let mut parts = line.split(key);
    let mut kept = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        kept += key;
        kept.push('…');
        kept += &part[part.find(|character| ends.contains(character)).unwrap_or(part.len())..];
    }
    kept
}
