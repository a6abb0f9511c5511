// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cases, and the text form in which tables hold them.
//!
//! A line `== NAME` begins a case. Lines that begin with `$ ` prepare the folder by QEMU's tools and aren't compared; they
//! come first. Every other line is a shell command that both sets of tools run in equal folders, or begins a session of QMP
//! (`session.rs`). `#` begins a comment.

use crate::session;

/// Command lines that run one after the other in one folder.
#[derive(Clone, Debug)]
pub struct Case {
    /// Table and name.
    pub name: String,
    /// Shell lines that make the files, run once.
    pub setup: Vec<String>,
    /// Shell lines that both run.
    pub lines: Vec<String>,
}

impl Case {
    /// An empty one.
    pub fn new(name: String) -> Self {
        Case { name, setup: Vec::new(), lines: Vec::new() }
    }

    /// The number of command lines that are compared.
    pub fn compared(&self) -> usize {
        self.lines.len()
    }

    /// True where a line may listen on NBD's own port, or asks for it. Two of them side by side would meet.
    pub fn takes_default_port(&self) -> bool {
        let listens = |line: &str| {
            line.contains("qemu-nbd") && !["-k", "--socket", "-p", "--port"].iter().any(|option| line.contains(option))
        };
        let asks = |line: &str| line.contains("localhost:0") || line.ends_with("server.host=localhost");
        self.lines.iter().any(|line| listens(line) || asks(line))
    }

    /// True when the name or a line contains the text.
    pub fn contains(&self, text: &str) -> bool {
        self.name.contains(text) || self.lines.iter().any(|line| line.contains(text))
    }
}

/// The cases of a table.
pub fn parse(table: &str, text: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("== ") {
            cases.push(Case::new(format!("{table}: {name}")));
            continue;
        }
        let case = cases.last_mut().unwrap_or_else(|| panic!("{table}: '{line}' stands before the first case"));
        match line.strip_prefix("$ ") {
            Some(setup) => {
                assert!(case.lines.is_empty(), "{}: '{line}' stands behind a compared line", case.name);
                case.setup.push(setup.to_owned());
            }
            None => match case.lines.last_mut() {
                Some(last) if session::is_session(last) && session::MARKS.iter().any(|mark| line.starts_with(mark)) => {
                    last.push('\n');
                    last.push_str(line);
                }
                _ => case.lines.push(line.to_owned()),
            },
        }
    }
    cases
}
