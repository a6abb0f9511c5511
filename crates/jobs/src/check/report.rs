// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A check's result as text and JSON, word for word as scripts know it from qemu-img.

use super::{CheckOutcome, Repair};
use cowshed_offline::check::{CheckReport, Finding, FindingKind, REBUILT};
use cowshed_types::{CheckCounters, LINE_END};
use serde_json::{Map, Value, json};

/// The lines about single findings, for the error output: first repaired ones, then those that stay. One is made when
/// it is asked for: a damaged image may have a hundred thousand.
pub fn finding_lines(outcome: &CheckOutcome) -> impl Iterator<Item = String> {
    lines(&outcome.report, outcome.repair, outcome.is_dry_run)
}

fn lines(report: &CheckReport, repair: Repair, is_dry_run: bool) -> impl Iterator<Item = String> {
    // As in qemu-img the lines of the findings come first.
    let before = report.repaired.iter().filter(move |_| !is_dry_run).filter_map(as_found);
    let found = report.repaired.iter().chain(&report.findings).map(move |finding| match is_dry_run {
        false => finding.to_string(),
        true => format!("{finding}{LINE_END}  repair: {}", forecast(report, repair, finding)),
    });
    let omitted = (report.omitted != 0).then(|| format!("{} more findings are not listed", report.omitted));
    let obstacles = report.outlook.obstacles.iter().filter(move |_| is_dry_run);
    let obstacles = obstacles.map(|why| format!("nothing would be repaired: {why}"));
    let (rebuilt, notes): (Vec<&String>, Vec<&String>) = report.notes.iter().partition(|note| *note == REBUILT);
    let rebuilt = rebuilt.into_iter().cloned();
    before.chain(rebuilt).chain(found).chain(omitted).chain(notes.into_iter().cloned()).chain(obstacles)
}

/// The lines about a repair that an opening of the image made.
pub fn lines_of(report: &CheckReport) -> Vec<String> {
    lines(report, Repair::All, false).collect()
}

/// The line that a repaired count had before its repair.
fn as_found(finding: &Finding) -> Option<String> {
    let is_count = matches!(finding.kind, FindingKind::RefcountLow { .. } | FindingKind::Leak { .. });
    is_count.then(|| Finding { repaired: false, ..finding.clone() }.to_string())
}

fn forecast(report: &CheckReport, repair: Repair, finding: &Finding) -> String {
    let remedy = report.outlook.remedy(finding, repair != Repair::Leaks);
    remedy.map_or_else(|| "none, it would stay as it is".to_owned(), |remedy| remedy.describe())
}

/// Every finding as an object. `offset`: host offset in bytes of the damaged structure; `guest`: first byte of the
/// virtual disk that it concerns; `repair`: the effect of the wanted repair (without one: `-r all`) does or did about
/// it, null where it stays. One is made when it is asked for.
pub fn findings(outcome: &CheckOutcome) -> impl Iterator<Item = Value> {
    let report = &outcome.report;
    report.repaired.iter().chain(&report.findings).map(move |finding| {
        let remedy = report.outlook.remedy(finding, outcome.repair != Repair::Leaks);
        json!({
            "kind": finding.kind_name(),
            "offset": finding.place(report.outlook.cluster_bits),
            "guest": finding.guest,
            "detail": finding.to_string(),
            "repair": remedy.map(|remedy| remedy.describe()),
            "repaired": finding.repaired,
        })
    })
}

/// The text for the standard output, with its line ends.
pub fn human(outcome: &CheckOutcome) -> String {
    let counters = &outcome.report.counters;
    let mut text = String::new();
    if counters.corruptions_fixed + counters.leaks_fixed != 0 {
        text += &format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} corruptions\n\n\
             Double checking the fixed image now...\n",
            counters.leaks_fixed, counters.corruptions_fixed
        );
    }
    text += &verdict(counters);
    text + &statistics(counters)
}

fn verdict(counters: &CheckCounters) -> String {
    if counters.corruptions + counters.leaks + counters.check_errors == 0 {
        return "No errors were found on the image.\n".to_owned();
    }
    let mut text = String::new();
    if counters.corruptions != 0 {
        text += &format!(
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the image may corrupt \
             it.\n",
            counters.corruptions
        );
    }
    if counters.leaks != 0 {
        text += &format!(
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no harm to data.\n",
            counters.leaks
        );
    }
    if counters.check_errors != 0 {
        text += &format!("\n{} internal errors have occurred during the check.\n", counters.check_errors);
    }
    text
}

fn statistics(counters: &CheckCounters) -> String {
    let mut text = String::new();
    let (total, allocated) = (counters.total_clusters, counters.allocated_clusters);
    if total != 0 && allocated != 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        text += &format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            percent(allocated, total),
            percent(counters.fragmented_clusters, allocated),
            percent(counters.compressed_clusters, allocated)
        );
    }
    if counters.image_end_offset != 0 {
        text += &format!("Image end offset: {}\n", counters.image_end_offset);
    }
    text
}

/// The JSON object, with the keys that qemu-img prints in its order; counters that are 0 are left out as there.
pub fn json(outcome: &CheckOutcome) -> Value {
    let counters = &outcome.report.counters;
    let mut map = Map::new();
    let number = |map: &mut Map<String, Value>, key: &str, value: u64| {
        if value != 0 || matches!(key, "total-clusters" | "check-errors") {
            map.insert(key.to_owned(), value.into());
        }
    };
    number(&mut map, "image-end-offset", counters.image_end_offset);
    number(&mut map, "compressed-clusters", counters.compressed_clusters);
    if counters.total_clusters != 0 {
        number(&mut map, "total-clusters", counters.total_clusters);
    }
    number(&mut map, "corruptions", counters.corruptions);
    number(&mut map, "corruptions-fixed", counters.corruptions_fixed);
    number(&mut map, "check-errors", counters.check_errors);
    number(&mut map, "leaks-fixed", counters.leaks_fixed);
    number(&mut map, "leaks", counters.leaks);
    number(&mut map, "allocated-clusters", counters.allocated_clusters);
    map.insert("filename".to_owned(), outcome.filename.clone().into());
    map.insert("format".to_owned(), outcome.format.clone().into());
    number(&mut map, "fragmented-clusters", counters.fragmented_clusters);
    Value::Object(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(counters: CheckCounters) -> CheckOutcome {
        let report = CheckReport { counters, ..CheckReport::default() };
        let (filename, format) = ("a.qcow2".into(), "qcow2".into());
        CheckOutcome { filename, format, report, repair: Repair::None, is_dry_run: false }
    }

    #[test]
    fn a_clean_image() {
        let outcome = outcome(CheckCounters {
            image_end_offset: 2621440,
            total_clusters: 1024,
            allocated_clusters: 35,
            fragmented_clusters: 2,
            ..CheckCounters::default()
        });
        assert_eq!(
            human(&outcome),
            "No errors were found on the image.\n35/1024 = 3.42% allocated, 5.71% fragmented, 0.00% compressed \
             clusters\nImage end offset: 2621440\n"
        );
        let keys: Vec<String> = json(&outcome).as_object().unwrap().keys().cloned().collect();
        let expected = [
            "image-end-offset",
            "total-clusters",
            "check-errors",
            "allocated-clusters",
            "filename",
            "format",
            "fragmented-clusters",
        ];
        assert_eq!(keys, expected);
        assert_eq!(outcome.exit_code(), 0);
    }

    #[test]
    fn damage_and_repair() {
        let counters =
            CheckCounters { corruptions: 1, leaks: 2, leaks_fixed: 3, total_clusters: 4, ..CheckCounters::default() };
        let outcome = outcome(counters);
        assert_eq!(
            human(&outcome),
            "The following inconsistencies were found and repaired:\n\n    3 leaked clusters\n    0 corruptions\n\n\
             Double checking the fixed image now...\n\n1 errors were found on the image.\nData may be corrupted, or \
             further writes to the image may corrupt it.\n\n2 leaked clusters were found on the image.\nThis means \
             waste of disk space, but no harm to data.\n"
        );
        assert_eq!(outcome.exit_code(), 2);
    }
}
