// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Differences that are known, each with its reason, in `known.txt`.
//!
//! A row is `SUITE || PART || COMMAND || TEXT || REASON`. It covers a difference of that part (`out`, `err`, `code` or `file`)
//! whose command line is COMMAND and of whose two texts one contains TEXT. `*` stands for anything, `*WORDS*` for a command
//! line that contains the words. The command of a difference of files is the case's name; that of a session, and of a format, is
//! its name or its lines. A row of the suite `seeds` is for the command lines of `generated` alone. A reason that begins with
//! `varies:` is of a difference that QEMU doesn't show in each run.
//! Each reason names its place in COMPAT.md: `COMPAT:` with words of a row, or `COMPAT N:` with a number of a section there. A
//! remark may stand behind `; `.

use crate::runner::Difference;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

/// All rows.
pub struct Known {
    rows: Vec<Row>,
}

struct Row {
    suite: String,
    part: String,
    command: String,
    text: String,
    varies: bool,
    used: AtomicBool,
}

impl Known {
    /// Reads the file.
    pub fn load() -> Self {
        let rows = include_str!("known.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let rows = rows.map(|line| {
            let fields: Vec<&str> = line.splitn(5, " || ").collect();
            let [suite, part, command, text, reason] = fields[..] else { panic!("known.txt: five fields: '{line}'") };
            assert!(!reason.trim().is_empty(), "known.txt: a reason: '{line}'");
            let field = |text: &str| text.trim().to_owned();
            Row {
                suite: field(suite),
                part: field(part),
                command: field(command),
                text: field(text),
                varies: reason.trim().starts_with("varies:"),
                used: AtomicBool::new(false),
            }
        });
        Known { rows: rows.collect() }
    }

    /// True when a row covers the difference.
    pub fn covers(&self, suite: &str, difference: &Difference) -> bool {
        let of_suite = |row: &&Row| row.suite != "seeds" || suite == "generated";
        let row = self.rows.iter().filter(of_suite).find(|row| row.covers(difference));
        row.inspect(|row| row.used.store(true, Ordering::Relaxed)).is_some()
    }

    /// Rows that cover nothing any more: a row that has become equal stays equal.
    pub fn stale(&self, suite: &str) -> Vec<String> {
        let of_suite = self.rows.iter().filter(|row| row.suite == suite && !row.varies);
        let stale = of_suite.filter(|row| !row.used.load(Ordering::Relaxed));
        stale.map(|row| format!("{} | {} | {}", row.part, row.command, row.text)).collect()
    }
}

impl Row {
    fn covers(&self, difference: &Difference) -> bool {
        let words = self.command.strip_prefix('*').and_then(|rest| rest.strip_suffix('*'));
        let has_cases = ["formats", "sessions"].contains(&self.suite.as_str());
        let command = match words {
            Some(words) => difference.command.contains(words) || (has_cases && difference.case.contains(words)),
            None => self.command == "*" || self.command == difference.command,
        };
        let text = |text: &str| self.text == "*" || text.contains(&self.text);
        self.part == difference.part && command && (text(&difference.theirs) || text(&difference.ours))
    }
}

/// Every difference that this suite allows stands in COMPAT.md together with its reason.
#[test]
fn reasons_and_numbers_of_compat_agree() {
    let page = include_str!("../../../../COMPAT.md");
    let (_, section) = page.split_once("\n## Differences that the suite lists\n").expect("the section");
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let mut listed = BTreeSet::new();
    for line in section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")) {
        let cells: Vec<&str> = line.split(" | ").collect();
        let Some(number) = cells.first().and_then(|cell| cell.parse::<u32>().ok()) else { continue };
        assert!(cells.len() == 4 && cells.iter().all(|cell| !cell.is_empty()), "no reason: '{line}'");
        listed.insert(number);
    }
    let rows = compat_rows(page);
    let mut named = BTreeSet::new();
    for line in include_str!("known.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let reason = line.rsplit_once(" || ").map_or("", |(_, reason)| reason);
        let reason = reason.strip_prefix("varies: ").unwrap_or(reason);
        let place = reason.strip_prefix("COMPAT").unwrap_or_else(|| panic!("no place in COMPAT.md: '{line}'"));
        if let Some((number, _)) = place.strip_prefix(' ').and_then(|rest| rest.split_once(':')) {
            named.insert(number.parse().unwrap_or_else(|_| panic!("no number: '{line}'")));
            continue;
        }
        let words = place.strip_prefix(": ").unwrap_or_else(|| panic!("no words: '{line}'"));
        let words = words.split("; ").next().unwrap_or_default().to_lowercase();
        let found: Vec<_> = rows.iter().filter(|row| row.contains(&words)).collect();
        assert!(!found.is_empty(), "COMPAT.md has no row with '{words}'");
        let has_reason = |row: &String| row.contains("why: ") || row.contains("docs/");
        assert!(found.iter().any(|row| has_reason(row)), "COMPAT.md gives no reason for '{words}'");
    }
    assert_eq!(listed, named);
    assert!(listed.len() > 10, "{listed:?}");
}

/// The rows of tables and of lists, in lower case and without marks of code.
fn compat_rows(page: &str) -> Vec<String> {
    let mut rows: Vec<String> = Vec::new();
    for line in page.replace('`', "").to_lowercase().lines() {
        match (line.strip_prefix("  "), rows.last_mut()) {
            (Some(more), Some(row)) => *row += &format!(" {more}"),
            _ => rows.push(line.to_owned()),
        }
    }
    rows
}
