// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `check` against the real qemu-img. Damaged images of every class get the same verdict. A repair by either leaves an
//! image that the other calls clean, with the guest's data as it was.

use cowshed_jobs::check::{self, CheckOptions, CheckOutcome, Repair, report};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_offline::check::Finding;
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::bigimage::{self, Placement};
use cowshed_testkit::damage::{COPIED, Victim};
use cowshed_testkit::random::Random;
use cowshed_testkit::specimens::{SPECIMENS, Workbench};
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::Path;

fn options(image: &Path, repair: Repair) -> CheckOptions {
    let image = ImageSpec::file(image.to_str().expect("text path")).format("qcow2");
    CheckOptions { image, repair, threads: Some(2), ..CheckOptions::default() }
}

fn run(image: &Path, repair: Repair) -> CheckOutcome {
    let outcome = rt::block_on(check::run(&options(image, repair), &JobHandle::new()));
    outcome.expect("a check").expect("qcow2 is checked")
}

/// The findings, and whether a dry run would repair them.
fn dry_run(image: &Path, repair: Repair, lossy: bool) -> Vec<(Finding, bool)> {
    let before = std::fs::read(image).expect("image");
    let dry = CheckOptions { dry_run: true, lossy, ..options(image, repair) };
    let outcome = rt::block_on(check::run(&dry, &JobHandle::new())).expect("a check").expect("qcow2 is checked");
    assert!(std::fs::read(image).expect("image") == before, "a dry run wrote");
    let promise = |finding: &Finding| outcome.report.outlook.remedy(finding, repair == Repair::All).is_some();
    let list: Vec<_> = report::findings(&outcome).collect();
    assert_eq!(list.len(), outcome.report.findings.len());
    for (object, finding) in list.iter().zip(&outcome.report.findings) {
        assert_eq!(object["repair"].is_string(), promise(finding), "{object}");
        assert!(object["kind"].is_string() && object["detail"].is_string(), "{object}");
    }
    outcome.report.findings.iter().map(|finding| (finding.clone(), promise(finding))).collect()
}

fn key(finding: &Finding) -> ((u8, u64), &'static str) {
    (finding.order(), finding.kind_name())
}

/// Repairs with an undo log, and returns also the result of an undo on a copy of the repaired image.
fn run_with_undo_log(bench: &Workbench, image: &Path, repair: Repair, lossy: bool) -> (CheckOutcome, Vec<u8>) {
    let log = bench.folder().join("undo.log");
    let _ = std::fs::remove_file(&log);
    let undo_log = log.to_str().map(str::to_owned);
    let logged = CheckOptions { undo_log, lossy, ..options(image, repair) };
    let outcome = rt::block_on(check::run(&logged, &JobHandle::new())).expect("a check").expect("qcow2 is checked");
    let copy = bench.copy(image, "undone");
    // Twice: an undo that was made can be made again.
    for _ in 0..2 {
        let image = ImageSpec::file(copy.to_str().expect("text path")).format("qcow2");
        let undone = rt::block_on(check::undo(&image, log.to_str().expect("text path"), &JobHandle::new()));
        assert!(undone.expect("an undo").was_complete);
    }
    (outcome, std::fs::read(&copy).expect("image"))
}

/// The disk as our own reader reads it, piece by piece; `None` where it can't read.
fn pieces(image: &Path) -> Vec<Option<Vec<u8>>> {
    const PIECE_BYTES: u64 = 4096;
    let spec = ImageSpec::file(image.to_str().expect("text path")).format("qcow2");
    rt::block_on(async {
        let Ok(node) = spec.open_for_reading().await else { return Vec::new() };
        let mut pieces = Vec::new();
        for start in (0..node.size()).step_by(PIECE_BYTES as usize) {
            let (result, buf) = node.read(start, IoBuf::zeroed(PIECE_BYTES as usize)).await;
            pieces.push(result.ok().map(|()| buf.to_vec()));
        }
        node.close().await.expect("closed");
        pieces
    })
}

/// The bytes of the snapshot "a", `None` where there is none or qemu-img can't read it.
fn snapshot(bench: &Workbench, image: &Path) -> Option<Vec<u8>> {
    let raw = image.with_extension("snapshot");
    let (from, to) = (image.to_str()?, raw.to_str()?);
    let output = bench.qemu.img(["convert", "-l", "snapshot.name=a", "-f", "qcow2", "-O", "raw", from, to]);
    let bytes = std::fs::read(&raw).ok();
    let _ = std::fs::remove_file(&raw);
    bytes.filter(|_| output.code == 0)
}

/// Counters without the parts that depend on the name.
fn counters(mut json: Value) -> Value {
    if let Some(object) = json.as_object_mut() {
        object.remove("filename");
        object.remove("format");
    }
    json
}

/// The relation of our verdict to qemu-img's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Agreement {
    /// Same counters and exit code.
    Exact,
    /// Same exit code.
    Code,
    /// We see more.
    Stricter,
}

struct Case {
    name: &'static str,
    base: &'static str,
    damage: fn(&Victim),
    agreement: Agreement,
    /// Exit code of ours after `-r leaks` and `-r all`.
    after: (u8, u8),
    /// …and after `-r all --lossy`.
    lossy: u8,
}

const fn case(name: &'static str, base: &'static str, damage: fn(&Victim), after: (u8, u8)) -> Case {
    Case { name, base, damage, agreement: Agreement::Exact, after, lossy: after.1 }
}

const fn other(agreement: Agreement, case: Case) -> Case {
    Case { agreement, ..case }
}

const fn lossy(code: u8, case: Case) -> Case {
    Case { lossy: code, ..case }
}

fn cases() -> Vec<Case> {
    use Agreement::{Code, Stricter};
    vec![
        case("leak", "plain", |v| v.set_refcount(v.host_cluster(32), 2), (0, 0)),
        case("leak on its own", "tiny", |v| v.set_word(v.l2_entry(3), 0), (0, 0)),
        case("refcount too low", "plain", |v| v.set_refcount(v.host_cluster(1), 0), (2, 0)),
        case("refcount too low, one bit", "bits1", |v| v.set_refcount(v.host_cluster(1), 0), (2, 0)),
        case("refcount too low, four bits", "bits4", |v| v.set_refcount(v.host_cluster(1), 1), (2, 0)),
        case("refcount too high, four bits", "bits4", |v| v.set_refcount(v.host_cluster(1), 15), (0, 0)),
        case("refcount too low, 32 bits", "bits32", |v| v.set_refcount(v.host_cluster(1), 0), (2, 0)),
        case(
            "refcount far too high, 32 bits",
            "bits32",
            |v| v.set_refcount(v.host_cluster(1), u32::MAX.into()),
            (0, 0),
        ),
        case("leak beside a data file", "data-file", |v| v.set_refcount(v.l2_entry(0) >> 16, 2), (0, 0)),
        case("no refcount block beside a data file", "data-file", |v| v.set_word(v.refcount_table_entry(0), 0), (2, 0)),
        case("L2 table refcount too low", "raw-data-file", |v| v.set_refcount(v.l2_entry(0) >> 16, 0), (2, 0)),
        other(
            Stricter,
            case("raw data elsewhere", "raw-data-file", |v| v.set_word(v.l2_entry(3), v.word(v.l2_entry(4))), (2, 0)),
        ),
        case("snapshot without extra data", "snapshots", |v| v.shorten_snapshot(0), (2, 0)),
        case("snapshot with half its extra data", "bits2", |v| v.shorten_snapshot(8), (2, 0)),
        case("snapshot without extra data, tiny counts", "bits4", |v| v.shorten_snapshot(5), (2, 0)),
        case("refcount too low, 64 bits", "bits64", |v| v.set_refcount(v.host_cluster(1), 0), (2, 0)),
        case("refcount far too high", "bits64", |v| v.set_refcount(v.host_cluster(1), 1 << 40), (0, 0)),
        case("refcount too high, eight bits", "bits8", |v| v.set_refcount(v.host_cluster(1), 255), (0, 0)),
        case("snapshot refcount too low", "snapshots", |v| v.set_refcount(v.host_cluster(8), 1), (2, 0)),
        case("snapshot refcount too high", "bits2", |v| v.set_refcount(v.host_cluster(9), 3), (0, 0)),
        case("copied missing", "plain", |v| v.flip(v.l2_entry(1), COPIED), (0, 0)),
        case("copied missing in L1", "v2", |v| v.flip(v.l1_entry(0), COPIED), (0, 0)),
        case("copied on a shared cluster", "snapshots", |v| v.flip(v.l2_entry(8), COPIED), (0, 0)),
        case("two users of a cluster", "plain", |v| v.set_word(v.l2_entry(3), v.word(v.l2_entry(4))), (2, 0)),
        case("two users, one bit", "bits1", |v| v.set_word(v.l2_entry(3), v.word(v.l2_entry(4))), (2, 0)),
        case("two users of an L2 table", "tiny", |v| v.set_word(v.l1_entry(2), v.word(v.l1_entry(3))), (2, 0)),
        lossy(0, case("data behind the end", "plain", |v| v.set_word(v.l2_entry(3), COPIED | 100 << 20), (2, 2))),
        lossy(3, case("L2 table behind the end", "v2", |v| v.set_word(v.l1_entry(0), COPIED | 100 << 20), (2, 2))),
        lossy(0, case("data not aligned", "plain", |v| v.flip(v.l2_entry(3), 0x200), (2, 2))),
        case("zero cluster not aligned", "plain", |v| v.flip(v.l2_entry(3), 0x201), (2, 0)),
        case("reserved bits in L2", "plain", |v| v.flip(v.l2_entry(3), 0x10), (2, 0)),
        case("high reserved bits in L2", "plain", |v| v.flip(v.l2_entry(3), 1 << 57), (2, 0)),
        other(Stricter, case("zero flag in version 2", "v2", |v| v.flip(v.l2_entry(3), 1), (2, 0))),
        case("reserved bits in L1", "plain", |v| v.flip(v.l1_entry(0), 1 << 58), (2, 0)),
        other(Code, case("flag without a table in L1", "tiny", |v| v.set_word(v.l1_entry(200), COPIED), (2, 0))),
        other(
            Code,
            case(
                "flag without a table in a snapshot's L1",
                "tiny-snapshots",
                |v| v.set_word(v.snapshot_l1_entry(200), COPIED),
                (2, 0),
            ),
        ),
        case("reserved bits in a snapshot's L1", "snapshots", |v| v.flip(v.snapshot_l1_entry(0), 1 << 58), (2, 0)),
        case("copied on compressed", "compressed", |v| v.flip(v.l2_entry(2), COPIED), (2, 0)),
        lossy(0, case("compressed behind the end", "compressed", |v| v.flip(v.l2_entry(2), 1 << 30), (2, 2))),
        case(
            "compressed refcount too low",
            "compressed",
            |v| v.set_refcount(v.word(v.l2_entry(2)) << 10 >> 26, 1),
            (2, 0),
        ),
        lossy(0, case("both subcluster bits", "subclusters", |v| v.flip(v.l2_entry(2) + 8, 1 << 40 | 1 << 39), (2, 2))),
        lossy(0, case("subclusters without a cluster", "subclusters", |v| v.set_word(v.l2_entry(90) + 8, 1), (2, 2))),
        case("no refcount block", "plain", |v| v.set_word(v.refcount_table_entry(0), 0), (2, 0)),
        case("refcount block behind the end", "plain", |v| v.set_word(v.refcount_table_entry(0), 100 << 20), (2, 0)),
        case("far refcount block behind the end", "v2", |v| v.set_word(v.refcount_table_entry(1), 100 << 20), (2, 0)),
        case(
            "refcount block twice",
            "plain",
            |v| v.set_word(v.refcount_table_entry(1), v.word(v.refcount_table_entry(0))),
            (2, 0),
        ),
        other(
            Code,
            case("reserved bit in the refcount table", "plain", |v| v.flip(v.refcount_table_entry(0), 1), (2, 0)),
        ),
        other(
            Stricter,
            case("refcount block not aligned", "plain", |v| v.flip(v.refcount_table_entry(0), 0x200), (2, 0)),
        ),
        other(
            Code,
            case(
                "data on the L1 table",
                "plain",
                |v| v.set_word(v.l2_entry(3), COPIED | v.header.l1_table_offset),
                (2, 0),
            ),
        ),
        other(
            Code,
            case(
                "data on the refcount block",
                "plain",
                |v| v.set_word(v.l2_entry(3), COPIED | v.word(v.refcount_table_entry(0))),
                (2, 0),
            ),
        ),
        other(
            Stricter,
            case(
                "data on the L2 table, refcount right",
                "plain",
                |v| {
                    let table = v.l2_entry(0);
                    v.set_word(v.l2_entry(3), table);
                    v.flip(v.l1_entry(0), COPIED);
                    v.set_refcount(table >> 16, 2);
                },
                (2, 0),
            ),
        ),
        lossy(0, case("truncated", "plain", |v| v.file.set_len(1 << 20).expect("truncate"), (2, 2))),
        lossy(
            0,
            case(
                "truncated inside of a cluster",
                "plain",
                |v| v.file.set_len((1 << 20) + 5000).expect("truncate"),
                (2, 2),
            ),
        ),
        case(
            "dirty, with a leak and a hole",
            "lazy",
            |v| {
                v.set_word(72, 1);
                v.set_refcount(v.host_cluster(5), 2);
                v.set_refcount(v.host_cluster(6), 0);
            },
            (2, 0),
        ),
        other(
            Code,
            case(
                "two users of many, two bits",
                "bits2",
                |v| {
                    (20..30).for_each(|cluster| v.set_word(v.l2_entry(cluster), v.word(v.l2_entry(40))));
                },
                (2, 0),
            ),
        ),
        lossy(
            0,
            case(
                "data behind the end of an overlay",
                "overlay",
                |v| v.set_word(v.l2_entry(3), COPIED | 100 << 20),
                (2, 2),
            ),
        ),
        lossy(
            2,
            case(
                "L2 table behind the end of an overlay",
                "overlay",
                |v| v.set_word(v.l1_entry(0), COPIED | 100 << 20),
                (2, 2),
            ),
        ),
        lossy(
            2,
            case(
                "data behind the end of an old overlay",
                "v2-overlay",
                |v| v.set_word(v.l2_entry(3), COPIED | 100 << 20),
                (2, 2),
            ),
        ),
        lossy(
            0,
            case("both subcluster bits in an overlay", "overlay", |v| v.set_word(v.l2_entry(0) + 8, u64::MAX), (2, 2)),
        ),
        lossy(3, other(Code, case("L2 table not aligned", "snapshots", |v| v.flip(v.l1_entry(0), 0x200), (2, 2)))),
        lossy(
            3,
            other(
                Code,
                case(
                    "L2 table of a snapshot behind the end",
                    "tiny-snapshots",
                    |v| v.flip(v.snapshot_l1_entry(0), 0x200 << 20),
                    (2, 2),
                ),
            ),
        ),
        lossy(0, case("compressed beside a data file", "data-file", |v| v.flip(v.l2_entry(3), 3 << 62), (2, 2))),
        lossy(
            0,
            case("compressed behind the end, zstd", "tiny-compressed", |v| v.flip(v.l2_entry(2), 1 << 30), (2, 2)),
        ),
        lossy(
            0,
            case("compressed behind the end, version 2", "v2-compressed", |v| v.flip(v.l2_entry(2), 1 << 30), (2, 2)),
        ),
        case("stale bitmaps", "bitmaps", |v| v.set_word(88, 0), (0, 0)),
        case("leak beside bitmaps", "bitmaps", |v| v.set_refcount(v.host_cluster(1), 2), (0, 0)),
        lossy(
            0,
            case("snapshot L1 behind the end", "snapshots", |v| v.set_word(v.header.snapshots_offset, 1 << 40), (2, 2)),
        ),
        lossy(0, case("snapshot L1 not aligned", "snapshots", |v| v.flip(v.header.snapshots_offset, 512), (2, 2))),
    ]
}

/// The other clusters of qemu-img's LUKS images are counted, also without the secret; repairs keep the data.
#[test]
fn encrypted_images() {
    let bench = Workbench::new();
    let image = bench.path("luks");
    let text = image.to_str().expect("text path");
    let secret = ["--object", "secret,id=s,data=abc"];
    let opts = format!("driver=qcow2,file.filename={text},encrypt.key-secret=s");
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let create = ["create", "-q", secret[0], secret[1], "-f", "qcow2", "-o", luks, text, "8M"];
    // On a loaded machine qemu-img now and then can't measure its speed of deriving keys, and fails.
    let created = (0..20).any(|_| bench.qemu.img(create).code == 0);
    assert!(created, "{}", bench.qemu.img(create).stderr);
    bench.qemu.io([secret[0], secret[1], "--image-opts", &opts, "-c", "write -P 7 0 300k"]).expect_ok();
    let verdict = || {
        let output = bench.qemu.img(["check", "--output=json", secret[0], secret[1], "--image-opts", &opts]);
        (output.code, counters(output.json()))
    };
    let holds = || bench.qemu.io([secret[0], secret[1], "--image-opts", &opts, "-c", "read -P 7 0 300k"]).expect_ok();
    let ours = run(&image, Repair::None);
    assert_eq!((ours.exit_code().into(), counters(report::json(&ours))), verdict(), "{}", ours_lines(&ours));
    let victim = Victim::open(&image);
    let encryption = victim.header.encryption_header().expect("an encryption header").offset >> 16;
    for (cluster, count) in [(encryption, 0), (victim.host_cluster(1), 0), (victim.host_cluster(2), 2)] {
        victim.set_refcount(cluster, count);
    }
    let ours = run(&image, Repair::None);
    assert_eq!((ours.exit_code().into(), counters(report::json(&ours))), verdict(), "{}", ours_lines(&ours));
    // Two counts, and the copied flags that contradict two of the three.
    assert_eq!((ours.report.counters.corruptions, ours.report.counters.leaks), (4, 1));
    let (repaired, _) = run_with_undo_log(&bench, &image, Repair::All, false);
    assert_eq!(repaired.exit_code(), 0, "{}", ours_lines(&repaired));
    assert_eq!(verdict().0, 0);
    let output = holds();
    assert!(!output.stdout.contains("failed"), "{}", output.stdout);
}

fn compare_verdicts(case: &Case, bench: &Workbench, image: &Path) -> Result<(), String> {
    let theirs = bench.qemu.check(image, "qcow2");
    let ours = run(image, Repair::None);
    let what = format!("{}\nours {:?}\n{}\nqemu {}", case.name, ours.report.counters, ours_lines(&ours), theirs.stderr);
    let same_code = i32::from(ours.exit_code()) == theirs.code;
    let agrees = match case.agreement {
        Agreement::Exact => same_code && counters(report::json(&ours)) == counters(theirs.json),
        Agreement::Code => same_code,
        Agreement::Stricter => ours.exit_code() == 2,
    };
    if agrees { Ok(()) } else { Err(what) }
}

fn ours_lines(outcome: &CheckOutcome) -> String {
    report::finding_lines(outcome).collect::<Vec<_>>().join("\n")
}

#[test]
fn damaged_images() {
    let bench = Workbench::new();
    let mut failures = Vec::new();
    for case in cases() {
        let image = bench.base(case.base);
        (case.damage)(&Victim::open(&image));
        failures.extend(compare_verdicts(&case, &bench, &image).err());
        let before = (bench.content(&image), pieces(&image), snapshot(&bench, &image));
        let runs =
            [(Repair::Leaks, false, case.after.0), (Repair::All, false, case.after.1), (Repair::All, true, case.lossy)];
        for (repair, lossy, code) in runs {
            let copy = bench.copy(&image, "repaired");
            let forecast = dry_run(&image, repair, lossy);
            let (outcome, undone) = run_with_undo_log(&bench, &copy, repair, lossy);
            let theirs = bench.qemu.check(&copy, "qcow2");
            let mut fail = |why: String| {
                failures.push(format!("{} {repair:?} lossy {lossy}: {why}\n{}", case.name, ours_lines(&outcome)))
            };
            if undone != std::fs::read(&image).expect("image") {
                fail("the undo did not restore the image".to_owned());
            }
            for (finding, promised) in &forecast {
                let stays = outcome.report.findings.iter().any(|left| key(left) == key(finding));
                if *promised == stays {
                    fail(format!("the dry run said of \"{finding}\" repaired: {promised}, it stays: {stays}"));
                }
            }
            if outcome.exit_code() != code {
                fail(format!("exit code {} instead of {code}", outcome.exit_code()));
            }
            if code == 0 && theirs.code != 0 {
                fail(format!("qemu-img finds {}{}", theirs.json, theirs.stderr));
            }
            if before.0.is_some() && bench.content(&copy) != before.0 {
                fail("the data changed".to_owned());
            }
            // qemu-img reads a snapshot whose L1 table is behind the end as zeroes.
            let gone = outcome.report.notes.iter().any(|note| note.contains("internal snapshots were given up"));
            if before.2.is_some() && !(lossy && gone) && snapshot(&bench, &copy) != before.2 {
                fail("the snapshot's data changed".to_owned());
            }
            let lost = before.1.iter().zip(pieces(&copy)).position(|(old, new)| old.is_some() && *old != new);
            if let Some(piece) = lost {
                fail(format!("piece {piece} could be read before, and isn't the same now"));
            }
            let again = run(&copy, Repair::None);
            if again.exit_code() != outcome.exit_code() {
                fail(format!("a second check says {:?}", again.report.counters));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

/// An image that QEMU has repaired is clean for us too.
#[test]
fn images_that_qemu_repaired() {
    let bench = Workbench::new();
    for case in cases().iter().filter(|case| case.agreement == Agreement::Exact) {
        let image = bench.base(case.base);
        (case.damage)(&Victim::open(&image));
        let theirs = bench.qemu.check_with(&image, "qcow2", &["-r", "all"]);
        if theirs.code == 0 {
            let ours = run(&image, Repair::None);
            assert_eq!(ours.exit_code(), 0, "{}: {}", case.name, ours_lines(&ours));
        }
    }
}

#[test]
fn whole_images_are_clean_and_stay_untouched() {
    let bench = Workbench::new();
    for base in SPECIMENS {
        let image = bench.base(base.name);
        let bytes = std::fs::read(&image).expect("image");
        for repair in [Repair::None, Repair::Leaks, Repair::All] {
            let ours = run(&image, repair);
            assert_eq!(ours.exit_code(), 0, "{}: {}", base.name, ours_lines(&ours));
            assert!(!ours.report.changed);
        }
        assert!(std::fs::read(&image).expect("image") == bytes, "{} changed", base.name);
        let theirs = bench.qemu.check(&image, "qcow2");
        assert_eq!(counters(report::json(&run(&image, Repair::None))), counters(theirs.json), "{}", base.name);
    }
}

/// Passes over windows of clusters, and more threads, have the result of one pass on one thread.
#[test]
fn passes_and_threads_agree() {
    let bench = Workbench::new();
    let image = bench.base("tiny");
    let victim = Victim::open(&image);
    victim.set_refcount(victim.host_cluster(1), 0);
    victim.set_refcount(victim.host_cluster(500), 7);
    victim.set_word(victim.l2_entry(9), victim.word(victim.l2_entry(10)));
    victim.set_word(victim.l2_entry(11), COPIED | 1 << 30);
    let single = CheckOptions { threads: Some(1), ..options(&image, Repair::None) };
    let check = |options: &CheckOptions| rt::block_on(check::run(options, &JobHandle::new())).unwrap().unwrap().report;
    let expected = check(&single);
    assert!(expected.counters.corruptions >= 5 && expected.counters.leaks >= 2, "{:?}", expected.counters);
    for (threads, memory_bytes) in [(1, 1), (4, 1), (4, 1 << 20)] {
        let other = CheckOptions { threads: Some(threads), memory_bytes: Some(memory_bytes), ..single.clone() };
        let report = check(&other);
        assert_eq!(report.counters, expected.counters);
        assert_eq!(report.findings, expected.findings);
    }
    let repair = CheckOptions { repair: Repair::All, memory_bytes: Some(1), ..single };
    let copy = bench.copy(&image, "repaired");
    let repaired = check(&CheckOptions { image: ImageSpec::file(copy.to_str().unwrap()).format("qcow2"), ..repair });
    assert_eq!(repaired.counters.leaks, 0);
    let theirs = bench.qemu.check(&copy, "qcow2");
    assert_eq!((theirs.corruptions, theirs.leaks), (repaired.counters.corruptions, 0), "{}", theirs.stderr);
}

/// A writer that finds an image dirty counts its refcounts anew before it trusts them.
#[test]
fn a_dirty_image_is_recovered_when_a_writer_opens_it() {
    let bench = Workbench::new();
    let image = bench.base("lazy");
    let before = bench.content(&image);
    let victim = Victim::open(&image);
    victim.set_word(72, 1);
    victim.set_refcount(victim.host_cluster(3), 0);
    victim.set_refcount(victim.host_cluster(4), 5);
    let node = rt::block_on(ImageSpec::file(image.to_str().unwrap()).format("qcow2").open_for_writing());
    rt::block_on(node.expect("an open image").close()).expect("closed");
    assert_eq!(victim.word(72), 0, "the dirty bit is still set");
    bench.qemu.expect_clean(&image);
    assert!(bench.content(&image) == before);
}

/// …and refuses when it can't make sense of the image; nothing is written then but counts that had to rise.
#[test]
fn a_dirty_image_beyond_recovery_is_refused() {
    let bench = Workbench::new();
    let image = bench.base("lazy");
    let victim = Victim::open(&image);
    victim.set_word(72, 1);
    victim.set_word(victim.l2_entry(3), COPIED | 1 << 40);
    let error = rt::block_on(ImageSpec::file(image.to_str().unwrap()).format("qcow2").open_for_writing());
    let error = error.expect_err("a refusal").to_string();
    assert!(error.contains("can't be recovered"), "{error}");
    assert_eq!(victim.word(72), 1);
}

#[test]
fn repair_refuses_what_it_can_not_count() {
    let bench = Workbench::new();
    let image = bench.base("plain");
    let victim = Victim::open(&image);
    victim.set_refcount(victim.host_cluster(1), 2);
    victim.set_word(88, 1 << 40);
    let bytes = std::fs::read(&image).expect("image");
    let outcome = run(&image, Repair::All);
    assert_eq!(outcome.exit_code(), 2);
    assert!(outcome.report.notes[0].contains("unknown autoclear"), "{:?}", outcome.report.notes);
    assert!(std::fs::read(&image).expect("image") == bytes);
}

/// Random bytes in the metadata: no panic, and a repair that reports success has kept the readable data.
#[test]
fn random_damage() {
    let bench = Workbench::new();
    let rounds: u64 = std::env::var("COWSHED_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(6);
    for base in ["plain", "tiny", "snapshots", "bitmaps", "subclusters", "compressed", "bits1"] {
        let image = bench.base(base);
        for seed in 0..rounds {
            let copy = bench.copy(&image, "damaged");
            let mut random = Random::new(seed);
            let victim = Victim::open(&copy);
            let tables =
                [victim.header.l1_table_offset, victim.l2_entry(0), victim.word(victim.refcount_table_entry(0))];
            for _ in 0..1 + random.below(3) {
                let table = tables[random.below(3) as usize];
                let at = table + random.below(64);
                victim.file.write_all_at(&[random.below(256) as u8], at).expect("write");
            }
            drop(victim);
            let before = bench.content(&copy);
            let verdict = bench.qemu.check(&copy, "qcow2");
            let ours = rt::block_on(check::run(&options(&copy, Repair::None), &JobHandle::new()));
            let what = format!("{base} seed {seed}: qemu {} {}\nours {ours:?}", verdict.json, verdict.stderr);
            let Ok(Some(ours)) = ours else {
                assert_ne!(verdict.code, 0, "{what}");
                continue;
            };
            assert!(ours.exit_code() == 2 || i32::from(ours.exit_code()) == verdict.code, "{what}");
            let repaired = run(&copy, Repair::All);
            let after = bench.content(&copy);
            assert!(before.is_none() || before == after, "the repair changed data: {what}\n{}", ours_lines(&repaired));
            if repaired.exit_code() == 0 {
                bench.qemu.expect_clean(&copy);
            }
        }
    }
}

#[test]
fn big_images() {
    let bench = Workbench::new();
    for (placement, fragmented) in [(Placement::Contiguous, false), (Placement::Scattered, true)] {
        let image = bench.path("big");
        bigimage::build(&image, 1 << 30, 16, placement).expect("image");
        let theirs = bench.qemu.check(&image, "qcow2");
        let ours = run(&image, Repair::None);
        assert_eq!(counters(report::json(&ours)), counters(theirs.json), "{placement:?}");
        assert_eq!(ours.exit_code(), 0);
        assert_eq!(ours.report.counters.allocated_clusters, 1 << 14);
        assert_eq!(ours.report.counters.fragmented_clusters > 0, fragmented);
    }
}

/// Where clusters in use count as free, a repair of leaks alone leaves every byte as it is, as QEMU does.
#[test]
fn leak_repair_keeps_used_clusters_counted_as_free() {
    let bench = Workbench::new();
    for with_leak in [false, true] {
        let image = bench.base(SPECIMENS[0].name);
        let victim = Victim::open(&image);
        victim.set_refcount(victim.host_cluster(0), 0);
        if with_leak {
            victim.set_refcount(victim.host_cluster(1), 2);
        }
        let before = std::fs::read(&image).expect("image");
        let theirs = bench.copy(&image, "theirs");
        let verdict = bench.qemu.check_with(&theirs, "qcow2", &["-r", "leaks"]);
        assert!(std::fs::read(&theirs).expect("image") == before, "qemu-img changes it: {}", verdict.stderr);
        let outcome = run(&image, Repair::Leaks);
        assert!(std::fs::read(&image).expect("image") == before, "with a leak: {with_leak}\n{}", ours_lines(&outcome));
        assert_eq!(outcome.exit_code(), 2, "{}", ours_lines(&outcome));
    }
}
