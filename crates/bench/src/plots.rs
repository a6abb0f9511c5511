// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rows of a case as a drawing: bars side by side, in SVG.

use crate::measure::{Sample, median};
use crate::nbd::Served;
use crate::table::{Outcome, Row, quotients};
use std::fmt::Write;
use std::path::Path;

const WIDTH: u32 = 860;
/// Where bars begin unless a name needs more, and how long the longest is.
const LEFT: u32 = 330;
const LONGEST: u32 = 400;
const BAR: u32 = 16;
const GAP: u32 = 14;
/// Letters that fit left of the bars; a longer name takes two lines.
const NAME_LETTERS: usize = 46;
const HEAD: u32 = 64;
const COLOURS: [&str; 3] = ["#1b7f5c", "#8a8f98", "#d9a400"];
/// The unit of a means: there is one bar, and no side to tell apart.
const WITHOUT: &str = "time without it, against with it";
const SIDES: [&str; 3] = ["cowshed", "QEMU", "raw file through cowshed"];
const RATE: &str = "requests a second";
/// Of commands, whose times may lie orders of magnitude apart in one case.
const SPEED: &str = "speed beside the other program's";

/// The drawn part of a row: up to three values, and their unit.
struct Group<'a> {
    name: &'a str,
    values: Vec<f64>,
    unit: &'static str,
}

/// Writes `FOLDER/CASE.svg`; nothing when the rows have nothing to draw.
pub fn write(folder: &Path, case: &str, rows: &[Row]) -> Result<(), String> {
    let groups: Vec<Group<'_>> = rows.iter().filter_map(group).collect();
    let Some(unit) = groups.first().map(|group| group.unit) else { return Ok(()) };
    let groups: Vec<Group<'_>> = groups.into_iter().filter(|group| group.unit == unit).collect();
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let path = folder.join(format!("{case}.svg"));
    std::fs::write(&path, draw(case, unit, &groups)).map_err(|e| format!("{}: {e}", path.display()))
}

fn group(row: &Row) -> Option<Group<'_>> {
    let rate = |runs: &[Served]| median(runs.iter().map(|run| run.per_second));
    let wall = |sample: &Sample| sample.wall.as_secs_f64();
    let (values, unit) = match &row.result {
        Outcome::Served { ours, theirs, .. } => (vec![rate(ours), rate(theirs)], RATE),
        Outcome::Beside { ours, theirs, limit } => {
            let limit = limit.as_ref().map(|limit| rate(limit));
            (vec![rate(ours), rate(theirs)].into_iter().chain(limit).collect(), RATE)
        }
        Outcome::Written { ours, theirs, limit } => {
            let rate = |runs: &[crate::table::Written]| median(runs.iter().map(|run| run.served.per_second));
            let limit = limit.as_ref().map(|limit| rate(limit));
            (vec![rate(ours), rate(theirs)].into_iter().chain(limit).collect(), RATE)
        }
        Outcome::Means { with, without, .. } => (vec![median(quotients(without, with, |cost| cost.seconds))], WITHOUT),
        Outcome::Pair { pairs, .. } | Outcome::Opened { pairs, .. } => {
            let rounds = pairs.ours.iter().zip(&pairs.theirs);
            (vec![median(rounds.map(|(ours, theirs)| wall(theirs) / wall(ours).max(1e-9))), 1.0], SPEED)
        }
        Outcome::Failed(_)
        | Outcome::Requests { .. }
        | Outcome::Bounds { .. }
        | Outcome::Scaling { .. }
        | Outcome::Memory { .. }
        | Outcome::Options { .. }
        | Outcome::Skipped(_) => return None,
    };
    Some(Group { name: &row.name, values, unit })
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// A name in one line or two, broken at the blank nearest to its middle.
fn lines(name: &str) -> Vec<&str> {
    if name.chars().count() <= NAME_LETTERS {
        return vec![name];
    }
    let blanks = name.match_indices(' ').map(|(at, _)| at);
    match blanks.min_by_key(|at| at.abs_diff(name.len() / 2)) {
        Some(at) => vec![&name[..at], &name[at + 1..]],
        None => vec![name],
    }
}

fn number(value: f64) -> String {
    match value {
        value if value >= 10_000.0 => format!("{:.1} k", value / 1000.0),
        value if value >= 100.0 => format!("{value:.0}"),
        value => format!("{value:.2}"),
    }
}

fn draw(case: &str, unit: &str, groups: &[Group<'_>]) -> String {
    let bars: usize = groups.iter().map(|group| group.values.len()).sum();
    let height = HEAD + bars as u32 * BAR + groups.len() as u32 * GAP + 10;
    let most = groups.iter().flat_map(|group| group.values.iter().copied()).fold(1e-9, f64::max);
    let better = if unit == WITHOUT { "above 1 it pays" } else { "longer is better" };
    let mut svg = String::new();
    // Writing to a string can't fail.
    let _ = write!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"22\" font-size=\"15\" fill=\"#222222\">{}: {unit}, {better}</text>\n",
        escaped(case)
    );
    let sides = groups.iter().filter(|_| unit != WITHOUT).map(|group| group.values.len()).max().unwrap_or_default();
    for (side, name) in SIDES.iter().enumerate().take(sides) {
        let x = 12 + 150 * side as u32;
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{}\"/>", COLOURS[side]);
        let _ = writeln!(svg, "<text x=\"{}\" y=\"46\" fill=\"#222222\">{name}</text>", x + 18);
    }
    let mut y = HEAD;
    for group in groups {
        let (lines, right) = (lines(group.name), LEFT - 10);
        let first = y + (group.values.len() as u32 * BAR) / 2 + 4 - 7 * (lines.len() as u32 - 1);
        for (index, text) in lines.into_iter().enumerate() {
            let (y, text) = (first + 14 * index as u32, escaped(text));
            let _ = writeln!(svg, "<text x=\"{right}\" y=\"{y}\" text-anchor=\"end\" fill=\"#222222\">{text}</text>");
        }
        for (side, value) in group.values.iter().enumerate() {
            let long = (value / most * f64::from(LONGEST)).max(1.0);
            let (bar, colour) = (BAR - 2, COLOURS[side]);
            let _ = writeln!(
                svg,
                "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{long:.1}\" height=\"{bar}\" fill=\"{colour}\"/>\n\
                 <text x=\"{:.1}\" y=\"{}\" fill=\"#222222\">{}</text>",
                f64::from(LEFT) + long + 6.0,
                y + BAR - 4,
                number(*value)
            );
            y += BAR;
        }
        y += GAP;
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_becomes_bars_as_long_as_its_values() {
        let served = |per_second| {
            vec![Served { per_second, cpu_microseconds: 1.0, peak_bytes: 0, written_bytes: None, operations: 1.0 }]
        };
        let rows = [Row {
            name: "a < b".to_owned(),
            target: "",
            result: Outcome::Beside { ours: served(200.0), theirs: served(50.0), limit: Some(served(100.0)) },
        }];
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), "case", &rows).expect("a drawing");
        let svg = std::fs::read_to_string(folder.path().join("case.svg")).expect("the drawing");
        for part in ["a &lt; b", "width=\"400.0\"", "width=\"100.0\"", "width=\"200.0\"", ">50.00<", "raw file"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
        assert_eq!(svg.matches("<rect").count(), 1 + 3 + 3);
    }

    #[test]
    fn command_is_drawn_as_its_speed() {
        let seconds = |wall| vec![Sample { wall: std::time::Duration::from_secs(wall), ..Sample::default() }];
        let pairs = crate::measure::Pairs { ours: seconds(2), theirs: seconds(8) };
        let rows = [Row {
            name: "hole-rich: qcow2 → qcow2, with a name that doesn't fit beside the bars".to_owned(),
            target: "",
            result: Outcome::Pair { pairs, our_bytes: 0, their_bytes: 0 },
        }];
        let folder = tempfile::tempdir().expect("a folder");
        write(folder.path(), "copies", &rows).expect("a drawing");
        let svg = std::fs::read_to_string(folder.path().join("copies.svg")).expect("the drawing");
        for part in ["speed", "width=\"400.0\"", "width=\"100.0\"", ">4.00<", ">hole-rich: qcow2 → qcow2, with a<"] {
            assert!(svg.contains(part), "{part} in {svg}");
        }
    }
}
