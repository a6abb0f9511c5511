// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The number of tried states, by the features of the images.

use crate::crash::CrashReport;
use crate::matrix::CrashScene;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// States tried, for each feature that an image or machine can have and for their combinations.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Over all cases.
    pub total: CrashReport,
    features: BTreeMap<String, (u64, u64)>,
    /// By combination of features, cluster size and refcount width.
    cells: BTreeMap<(String, u64, u64), u64>,
}

impl Tally {
    /// Counts a case: of its states only those not seen in an earlier case.
    pub fn add(&mut self, scene: &CrashScene, report: &CrashReport) {
        let before = self.total.distinct();
        self.total.add(report);
        let new = self.total.distinct() - before;
        for feature in scene.features() {
            let (cases, states) = self.features.entry(feature).or_default();
            *cases += 1;
            *states += new;
        }
        let (cluster_bytes, refcount_bits) = scene.sizes();
        *self.cells.entry((scene.combination(), cluster_bytes, refcount_bits)).or_default() += new;
    }

    /// Two tables in markdown: combination of features by cluster size, and cluster size by refcount width.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let by_size = self.cells.iter().map(|((row, size, _), states)| ((row.clone(), *size), *states));
        table(&mut text, "features \\ cluster size", by_size, |size| match size {
            1024.. => format!("{} KiB", size / 1024),
            _ => format!("{size} B"),
        });
        text.push('\n');
        let by_width = self.cells.iter().map(|((_, size, width), states)| ((format!("{size:>6}"), *width), *states));
        table(&mut text, "cluster size \\ refcount bits", by_width, |width| width.to_string());
        let _ = writeln!(text, "\n{} combinations of features, cluster size and refcount width.", self.cells.len());
        text
    }
}

fn table(
    text: &mut String,
    corner: &str,
    cells: impl Iterator<Item = ((String, u64), u64)>,
    name: impl Fn(u64) -> String,
) {
    let mut sums: BTreeMap<(String, u64), u64> = BTreeMap::new();
    cells.for_each(|(place, states)| *sums.entry(place).or_default() += states);
    let rows: BTreeSet<&String> = sums.keys().map(|(row, _)| row).collect();
    let columns: BTreeSet<u64> = sums.keys().map(|(_, column)| *column).collect();
    let head: Vec<String> = columns.iter().map(|column| name(*column)).collect();
    let _ = writeln!(text, "| {corner} | {} | all |", head.join(" | "));
    let _ = writeln!(text, "|---|{}", "--:|".repeat(columns.len() + 1));
    for row in rows {
        let cells: Vec<u64> =
            columns.iter().map(|column| sums.get(&(row.clone(), *column)).copied().unwrap_or(0)).collect();
        let texts: Vec<String> =
            cells.iter().map(|cell| if *cell == 0 { "–".to_owned() } else { cell.to_string() }).collect();
        let _ = writeln!(text, "| {} | {} | {} |", row.trim(), texts.join(" | "), cells.iter().sum::<u64>());
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (feature, (cases, states)) in &self.features {
            writeln!(f, "{feature:>20}: {states:>8} states in {cases} cases")?;
        }
        write!(f, "{:>20}: {}", "all", self.total)
    }
}
