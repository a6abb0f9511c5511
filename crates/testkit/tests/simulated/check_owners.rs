// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Repairs of images in which more than the guest's data owns clusters: internal snapshots, bitmaps, LUKS headers, data
//! files. All refcounts are wrong at first, so a forgotten owner loses its clusters.

use cowshed_jobs::check::CheckOutcome;
use cowshed_jobs::check::{self, CheckOptions, Repair, report};
use cowshed_jobs::commit::{self, CommitOptions};
use cowshed_jobs::{ImageSpec, JobHandle, info, snapshot as snapshots};
use cowshed_layout::qcow2::{BitmapTableEntry, Header, bitmap, refcount};
use cowshed_offline::check::{CheckedStructure, FindingKind};
use cowshed_storage::rt;
use cowshed_testkit::damage::{COPIED, Victim};
use cowshed_testkit::specimens::Workbench;
use std::os::unix::fs::FileExt;
use std::path::Path;

type Damage = fn(&Victim);

const DAMAGES: &[(&str, Damage)] = &[
    ("no refcount block", |v| v.set_word(v.refcount_table_entry(0), 0)),
    ("every refcount is 0", |v| each_refcount(v, |_| 0)),
    ("every refcount is the largest", |v| each_refcount(v, |v| v.geometry.max_refcount())),
    ("every second refcount is 0", |v| {
        (0..clusters(v)).step_by(2).for_each(|cluster| v.set_refcount(cluster, 0));
    }),
    ("the refcount table is behind the end", |v| v.set_word(48, 1 << 40)),
];

fn clusters(victim: &Victim) -> u64 {
    let len = victim.file.metadata().expect("a length").len();
    len.div_ceil(victim.geometry.cluster_size()).min(victim.geometry.refcount_block_entries())
}

fn each_refcount(victim: &Victim, count: fn(&Victim) -> u64) {
    // The block's own count lies in the block: all are set, whatever they were.
    (0..clusters(victim)).for_each(|cluster| victim.set_refcount(cluster, count(victim)));
}

fn repair(image: &Path) {
    let image = ImageSpec::file(image.to_str().expect("text path")).format("qcow2");
    let options = CheckOptions { image, repair: Repair::All, threads: Some(2), ..CheckOptions::default() };
    let outcome = rt::block_on(check::run(&options, &JobHandle::new())).expect("a check").expect("qcow2 is checked");
    assert_eq!(outcome.exit_code(), 0, "{}", report::finding_lines(&outcome).collect::<Vec<_>>().join("\n"));
}

/// The bytes of all clusters of all bitmaps, and their entries.
fn bitmaps(image: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let bytes = std::fs::read(image).expect("image");
    let header = Header::parse(&bytes[..bytes.len().min(1 << 16)]).expect("a header");
    let Some(extension) = header.bitmaps() else { return Vec::new() };
    let start = extension.directory_offset as usize;
    let directory = bitmap::parse_directory(&bytes[start..start + extension.directory_size as usize], extension);
    let data = |table: &[u8]| -> Vec<u8> {
        let entries = table.as_chunks::<8>().0.iter().map(|word| BitmapTableEntry(u64::from_be_bytes(*word)));
        let places = entries.map(|entry| entry.offset().0 as usize).filter(|offset| *offset != 0);
        places.flat_map(|place| bytes[place..][..header.cluster_size() as usize].to_vec()).collect()
    };
    let entries = directory.expect("a directory").into_iter().map(|entry| {
        let table = &bytes[entry.table_offset as usize..][..entry.table_size as usize * 8];
        (entry.encode().expect("an entry"), [table.to_vec(), data(table)].concat())
    });
    entries.collect()
}

fn snapshot(bench: &Workbench, image: &Path, name: &str) -> Option<Vec<u8>> {
    let raw = bench.folder().join("snapshot.raw");
    let (from, to) = (image.to_str()?, raw.to_str()?);
    let name = format!("snapshot.name={name}");
    let code = bench.qemu.img(["convert", "-l", &name, "-f", "qcow2", "-O", "raw", from, to]).code;
    (code == 0).then(|| std::fs::read(&raw).expect("a copy"))
}

#[test]
fn repairs_keep_what_snapshots_bitmaps_and_data_files_own() {
    let bench = Workbench::new();
    for base in
        ["snapshots", "tiny-snapshots", "bits2", "bits4", "bitmaps", "data-file", "raw-data-file", "overlay", "v2"]
    {
        let image = bench.base(base);
        let view = |image: &Path| {
            let snapshots = ["a", "b"].map(|name| snapshot(&bench, image, name));
            (bench.content(image), snapshots, bitmaps(image))
        };
        let before = view(&image);
        assert!(
            before.0.is_some()
                && before.1[0].is_some() == (base.contains("snap") || base == "overlay" || base.starts_with("bits"))
        );
        assert_eq!(before.2.len(), if base == "bitmaps" { 2 } else { 0 });
        for (name, damage) in DAMAGES {
            let copy = bench.copy(&image, "damaged");
            damage(&Victim::open(&copy));
            assert_ne!(bench.qemu.check(&copy, "qcow2").code, 0, "{base}: {name}");
            repair(&copy);
            bench.qemu.expect_clean(&copy);
            assert!(view(&copy) == before, "{base}: {name}");
        }
    }
}

#[test]
fn repairs_keep_encrypted_images_readable() {
    let bench = Workbench::new();
    let image = bench.path("luks");
    let secret = ["--object", "secret,id=s,data=abc"];
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let text = image.to_str().expect("text path");
    let create = ["create", "-q", secret[0], secret[1], "-f", "qcow2", "-o", luks, text, "8M"];
    // On a loaded machine qemu-img now and then can't measure its speed of deriving keys, and fails.
    assert!((0..20).any(|_| bench.qemu.img(create).code == 0), "{}", bench.qemu.img(create).stderr);
    let opts = |image: &Path| format!("driver=qcow2,file.filename={},encrypt.key-secret=s", image.display());
    let write = |commands: &str| {
        bench.qemu.io([secret[0], secret[1], "--image-opts", &opts(&image), "-c", commands]).expect_ok()
    };
    write("write -P 7 0 300k");
    let with_secret = [secret[0], secret[1], "--image-opts"];
    bench.qemu.img(["snapshot", with_secret[0], with_secret[1], with_secret[2], "-c", "a", &opts(&image)]).expect_ok();
    write("write -P 8 64k 100k");
    let content = |image: &Path| {
        let raw = bench.folder().join("plain.raw");
        let to = raw.to_str().expect("text path");
        bench.qemu.img(["convert", secret[0], secret[1], "--image-opts", &opts(image), "-O", "raw", to]).expect_ok();
        std::fs::read(&raw).expect("a copy")
    };
    let before = content(&image);
    for (name, damage) in DAMAGES {
        let copy = bench.copy(&image, "damaged");
        damage(&Victim::open(&copy));
        repair(&copy);
        let verdict = bench.qemu.img(["check", secret[0], secret[1], "--image-opts", &opts(&copy)]);
        assert_eq!(verdict.code, 0, "{name}: {}{}", verdict.stdout, verdict.stderr);
        assert!(content(&copy) == before, "{name}");
    }
}

/// Bitmaps record writes, and parts that a repair gives up were not written. So bitmaps go, and only then.
#[test]
fn bitmaps_go_when_a_repair_gives_parts_of_the_disk_up() {
    let bench = Workbench::new();
    let image = bench.base("bitmaps");
    let check = |copy: &Path, lossy: bool| {
        let image = ImageSpec::file(copy.to_str().expect("text path")).format("qcow2");
        let options = CheckOptions { image, repair: Repair::All, lossy, ..CheckOptions::default() };
        rt::block_on(check::run(&options, &JobHandle::new())).expect("a check").expect("qcow2 is checked")
    };
    let lost: Damage = |v| v.set_word(v.l2_entry(3), 1 << 63 | 100 << 20);
    let leak: Damage = |v| v.set_refcount(v.host_cluster(1), 2);
    for (damage, kept) in [(lost, 0), (leak, 2)] {
        let copy = bench.copy(&image, "damaged");
        damage(&Victim::open(&copy));
        let careful = bench.copy(&copy, "careful");
        check(&careful, false);
        assert_eq!(bitmaps(&careful).len(), 2, "an ordinary repair gives nothing up");
        let outcome = check(&copy, true);
        assert_eq!(outcome.exit_code(), 0, "{}", report::finding_lines(&outcome).collect::<Vec<_>>().join("\n"));
        assert_eq!(bitmaps(&copy).len(), kept);
        let said = outcome.report.notes.iter().any(|note| note.contains("dirty bitmaps were removed (2)"));
        assert_eq!(said, kept == 0, "{:?}", outcome.report.notes);
        bench.qemu.expect_clean(&copy);
        let content = bench.content(&copy).expect("it can be read");
        let expected = if kept == 0 { 0 } else { 1 };
        assert!(content[192 << 10..256 << 10].iter().all(|byte| *byte == expected));
    }
}

/// Owners that can't be read stand in the way of every repair, and of every writer. The readable part of them is saved,
/// and the rest is given up on demand only.
#[test]
fn owners_that_cannot_be_read_are_trimmed_or_given_up() {
    // Name, image, damage, whether it takes `lossy`, snapshots left.
    type Case = (&'static str, &'static str, fn(&Victim), bool, [bool; 2]);
    let cases: [Case; 6] = [
        ("too much extra data", "snapshots", |v| v.lengthen_snapshot(2000), false, [true, true]),
        ("an entry without an end", "snapshots", |v| v.add_endless_snapshot(), true, [true, true]),
        ("a table behind the end", "snapshots", |v| v.set_word(64, 1 << 40), true, [false, false]),
        (
            "more snapshots than there may be",
            "snapshots",
            |v| v.file.write_all_at(&65_537u32.to_be_bytes(), 60).expect("write"),
            true,
            [true, true],
        ),
        (
            "a bitmap directory behind the end",
            "bitmaps",
            |v| {
                // The extension's body: count, reserved, size and offset of the directory.
                let mut bytes = vec![0; 4096];
                v.file.read_at(&mut bytes, 0).expect("header");
                let kind = 0x2385_2875u32.to_be_bytes();
                let at = bytes.windows(4).position(|word| word == kind).expect("the bitmaps extension") as u64;
                v.set_word(at + 8 + 16, 1 << 40);
            },
            true,
            [false, false],
        ),
        (
            "a bitmap of an unknown type",
            "bitmaps",
            |v| {
                let start = v.header.bitmaps().expect("bitmaps").directory_offset;
                v.file.write_all_at(&[9], start + 16).expect("write");
            },
            true,
            [false, false],
        ),
    ];
    let bench = Workbench::new();
    for (name, base, damage, lossy, left) in cases {
        let image = bench.base(base);
        let before = bench.content(&image);
        let snapshots = ["a", "b"].map(|name| snapshot(&bench, &image, name));
        let copy = bench.copy(&image, "damaged");
        damage(&Victim::open(&copy));
        let check = |repair: Repair, lossy: bool| {
            let image = ImageSpec::file(copy.to_str().expect("text path")).format("qcow2");
            let options = CheckOptions { image, repair, lossy, ..CheckOptions::default() };
            rt::block_on(check::run(&options, &JobHandle::new())).expect("a check").expect("qcow2 is checked")
        };
        let damaged = std::fs::read(&copy).expect("the image");
        assert_eq!(check(Repair::None, false).exit_code(), 2, "{name}");
        if lossy {
            let refused = check(Repair::All, false);
            assert_eq!(
                refused.exit_code(),
                2,
                "{name}: {}",
                report::finding_lines(&refused).collect::<Vec<_>>().join("\n")
            );
            assert!(
                std::fs::read(&copy).expect("the image") == damaged,
                "{name}: changed, though nothing was repaired"
            );
        }
        let repaired = check(Repair::All, lossy);
        let lines = report::finding_lines(&repaired).collect::<Vec<_>>().join("\n");
        assert_eq!(repaired.exit_code(), 0, "{name}: {lines}");
        assert!(check(Repair::None, false).exit_code() == 0, "{name}: damage or leaks are left");
        bench.qemu.expect_clean(&copy);
        assert!(bench.content(&copy) == before, "{name}: the disk changed");
        let expected: Vec<_> = snapshots.into_iter().zip(left).map(|(was, stays)| was.filter(|_| stays)).collect();
        assert!(["a", "b"].map(|name| snapshot(&bench, &copy, name)).to_vec() == expected, "{name}: snapshots");
        assert_eq!(bitmaps(&copy).len(), 0, "{name}");
        // And it is an image to write to again, here and there.
        bench.qemu.img(["snapshot", "-c", "new", copy.to_str().expect("text path")]).expect_ok();
        bench.qemu.io_commands(&copy, "qcow2", &["write -P 5 0 64k".to_owned()]).expect_ok();
        bench.qemu.expect_clean(&copy);
    }
}

/// The offset of the `nth` entry of the snapshot table.
fn table_entry(victim: &Victim, nth: usize) -> u64 {
    let mut bytes = vec![0; 4096];
    let len = victim.file.read_at(&mut bytes, victim.header.snapshots_offset).expect("a snapshot table");
    let found = cowshed_layout::qcow2::snapshot::salvage_table(&bytes[..len], victim.header.nb_snapshots);
    victim.header.snapshots_offset + found.starts[nth] as u64
}

fn refcounts(image: &Path) -> Vec<u64> {
    let victim = Victim::open(image);
    let mut block = vec![0; victim.geometry.cluster_size() as usize];
    victim.file.read_exact_at(&mut block, victim.word(victim.refcount_table_entry(0))).expect("a refcount block");
    (0..clusters(&victim)).map(|n| refcount::get(&block, victim.geometry.refcount_order(), n as usize)).collect()
}

fn check_as(image: ImageSpec, repair: Repair, lossy: bool) -> CheckOutcome {
    let options = CheckOptions { image, repair, lossy, ..CheckOptions::default() };
    rt::block_on(check::run(&options, &JobHandle::new())).expect("a check").expect("qcow2 is checked")
}

/// True for a finding that only stays because a snapshot can't be read.
fn is_of_unread_snapshot(kind: &FindingKind) -> bool {
    matches!(
        kind,
        FindingKind::Leak { .. }
            | FindingKind::Unreadable { structure: CheckedStructure::SnapshotL1, .. }
            | FindingKind::PastEnd { structure: CheckedStructure::SnapshotL1, .. }
    )
}

/// A snapshot whose L1 table can't be read keeps all clusters that it may own. The rest of the image is repaired; on
/// demand the snapshot is given up.
#[test]
fn a_snapshot_that_cannot_be_read_bars_no_other_repair() {
    let just_behind = |v: &Victim| v.file.metadata().expect("a length").len().next_multiple_of(1 << 14) + (1 << 14);
    // Name, damage, snapshots that can be read.
    type Case<'a> = (&'static str, &'a dyn Fn(&Victim), [bool; 2]);
    let cases: [Case<'_>; 6] = [
        ("not aligned", &|v| v.flip(table_entry(v, 0), 512), [false, true]),
        ("behind the end", &|v| v.set_word(table_entry(v, 0), 1 << 40), [false, true]),
        ("just behind the end", &|v| v.set_word(table_entry(v, 0), just_behind(v)), [false, true]),
        (
            "too large",
            &|v| v.file.write_all_at(&[0x7f, 0xff, 0xff, 0xff], table_entry(v, 0) + 8).expect("write"),
            [false, true],
        ),
        ("the last one's", &|v| v.set_word(table_entry(v, 1), 1 << 40), [true, false]),
        ("both", &|v| (0..2).for_each(|nth| v.set_word(table_entry(v, nth), 1 << 40)), [false, false]),
    ];
    let bench = Workbench::new();
    for (name, damage, readable) in cases {
        let image = bench.base("snapshots");
        let before = bench.content(&image);
        let kept: Vec<_> =
            ["a", "b"].iter().zip(readable).map(|(name, is)| snapshot(&bench, &image, name).filter(|_| is)).collect();
        let copy = bench.copy(&image, "damaged");
        let spec = || ImageSpec::file(copy.to_str().expect("text path")).format("qcow2");
        let victim = Victim::open(&copy);
        damage(&victim);
        // A right too many, one too few, a count too low, and an unused cluster.
        victim.flip(victim.l2_entry(0), COPIED);
        victim.flip(victim.l2_entry(4), COPIED);
        victim.set_refcount(victim.host_cluster(4), 0);
        victim.set_refcount(clusters(&victim) - 1, 7);
        let (damaged, counts) = (std::fs::read(&copy).expect("the image"), refcounts(&copy));

        let leaks = check_as(spec(), Repair::Leaks, false);
        assert_eq!(leaks.exit_code(), 2, "{name}");
        assert!(std::fs::read(&copy).expect("the image") == damaged, "{name}: -r leaks wrote");
        let planned = CheckOptions { image: spec(), repair: Repair::All, dry_run: true, ..CheckOptions::default() };
        let planned = rt::block_on(check::run(&planned, &JobHandle::new())).expect("a check").expect("qcow2");
        let stays = |outcome: &CheckOutcome| outcome.report.findings.len();
        let all = check_as(spec(), Repair::All, false);
        let lines = report::finding_lines(&all).collect::<Vec<_>>().join("\n");
        assert!(all.report.changed && stays(&all) < stays(&planned), "{name}: {lines}");
        assert!(all.report.findings.iter().all(|finding| is_of_unread_snapshot(&finding.kind)), "{name}: {lines}");
        let notes = all.report.notes.join("\n");
        let lost = if readable[0] { "internal snapshot 2 (b)" } else { "internal snapshot 1 (a)" };
        assert!(notes.contains(lost) && notes.contains("nothing was freed"), "{name}: {notes}");
        let fell = counts.iter().zip(refcounts(&copy)).position(|(before, after)| after < *before);
        assert_eq!(fell, None, "{name}: a count fell");
        assert!(bench.content(&copy) == before, "{name}: the disk changed");
        let now = std::fs::read(&copy).expect("the image");
        assert!(!check_as(spec(), Repair::All, false).report.changed, "{name}: it repairs again and again");
        assert!(std::fs::read(&copy).expect("the image") == now, "{name}: it writes again and again");

        let lossy = check_as(spec(), Repair::All, true);
        assert_eq!(lossy.exit_code(), 0, "{name}: {}", report::finding_lines(&lossy).collect::<Vec<_>>().join("\n"));
        bench.qemu.expect_clean(&copy);
        assert!(bench.content(&copy) == before, "{name}: the disk changed");
        assert!(["a", "b"].map(|name| snapshot(&bench, &copy, name)).to_vec() == kept, "{name}: snapshots");
        bench.qemu.img(["snapshot", "-c", "new", copy.to_str().expect("text path")]).expect_ok();
        bench.qemu.expect_clean(&copy);
    }
}

/// The same where the disk doesn't give the table.
#[test]
fn a_snapshot_behind_a_bad_sector_bars_no_other_repair() {
    let bench = Workbench::new();
    let image = bench.base("snapshots");
    let before = bench.content(&image);
    let victim = Victim::open(&image);
    let sector = victim.word(table_entry(&victim, 0)) / 512;
    let options = format!(
        "driver=qcow2,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
         file.inject-error.0.event=none,file.inject-error.0.iotype=read,file.inject-error.0.sector={sector}",
        image.display()
    );
    let spec = || ImageSpec { name: options.clone(), image_opts: true, ..ImageSpec::default() };
    victim.flip(victim.l2_entry(4), COPIED);
    victim.set_refcount(victim.host_cluster(4), 0);
    let counts = refcounts(&image);
    let all = check_as(spec(), Repair::All, false);
    let lines = report::finding_lines(&all).collect::<Vec<_>>().join("\n");
    assert!(all.report.changed && all.exit_code() == 2, "{lines}");
    assert!(all.report.findings.iter().all(|finding| is_of_unread_snapshot(&finding.kind)), "{lines}");
    assert!(counts.iter().zip(refcounts(&image)).all(|(before, after)| after >= *before), "a count fell");
    // Nothing was lost: where the sector can be read, the image is as it should be.
    bench.qemu.expect_clean(&image);
    assert!(snapshot(&bench, &image, "a").is_some() && bench.content(&image) == before);
    let lossy = check_as(spec(), Repair::All, true);
    assert_eq!(lossy.exit_code(), 0, "{}", report::finding_lines(&lossy).collect::<Vec<_>>().join("\n"));
    bench.qemu.expect_clean(&image);
    assert!(snapshot(&bench, &image, "a").is_none() && snapshot(&bench, &image, "b").is_some());
    assert!(bench.content(&image) == before, "the disk changed");
}

/// Where the snapshot table is lost, a list of the snapshots fails, and other information is there.
#[test]
fn lost_snapshot_tables_hide_the_snapshots_alone() {
    let bench = Workbench::new();
    let image = bench.base("snapshots");
    Victim::open(&image).set_word(64, 1 << 40);
    let spec = ImageSpec::file(image.to_str().expect("text path")).format("qcow2");
    let options = info::InfoOptions { image: spec.clone(), backing_chain: false, limits: false };
    let layers = rt::block_on(info::run(&options, &JobHandle::new())).expect("what is known");
    assert!(layers[0].snapshots.is_empty() && layers[0].virtual_size == 8 << 20);
    let told = layers[0].warnings.join("\n");
    let error = rt::block_on(snapshots::list(&spec)).expect_err("a list").to_string();
    for text in [told, error] {
        for word in ["base-snapshots", "snapshots_offset", "0x10000000000"] {
            assert!(text.contains(word), "no {word} in {text}");
        }
    }
    // It is not written to, nor when it becomes writable while it is open.
    let before = std::fs::read(&image).expect("the image");
    let over = bench.path("over");
    let text = over.to_str().expect("text path");
    bench.qemu.img(["create", "-q", "-f", "qcow2", "-b", &spec.name, "-F", "qcow2", text]).expect_ok();
    bench.qemu.io_commands(&over, "qcow2", &["write -P 9 0 64k".to_owned()]).expect_ok();
    let options = CommitOptions { image: ImageSpec::file(text).format("qcow2"), ..CommitOptions::default() };
    let error = rt::block_on(commit::run(&options, &JobHandle::new())).expect_err("a commit").to_string();
    assert!(error.contains("snapshots_offset") && error.contains("check -r all"), "{error}");
    assert!(std::fs::read(&image).expect("the image") == before, "the image changed");
}
