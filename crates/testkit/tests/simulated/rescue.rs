// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rescues: reachable data is read, lost ranges are named, and the damaged image stays as it is.

use cowshed_create::{CreateRequest, prepare};
use cowshed_image::secret::Secret;
use cowshed_image::{OpenRequest, open};
use cowshed_jobs::rescue::{self, Overrides, RescueMap, RescueOptions};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_layout::qcow2::SnapshotName;
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::damage::{COPIED, Victim};
use cowshed_testkit::random::{Random, for_each_seed};
use cowshed_testkit::specimens::{SIZE, SPECIMENS, Workbench};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

fn options(image: &Path, target: &Path) -> RescueOptions {
    RescueOptions {
        image: ImageSpec::file(image.to_str().expect("text path")),
        target: Some(ImageSpec::file(target.to_str().expect("text path")).format("qcow2")),
        ..RescueOptions::default()
    }
}

fn try_rescue(options: &RescueOptions) -> cowshed_types::Result<RescueMap> {
    let image = (!options.image.image_opts).then(|| std::fs::read(&options.image.name).expect("image"));
    let result = rt::block_on(rescue::run(options, &JobHandle::new()));
    if let Some(image) = image {
        assert!(std::fs::read(&options.image.name).expect("image") == image, "the damaged image changed");
    }
    result
}

/// Rescues into a fresh image, which must be a good one, and returns the map and the bytes of its disk.
fn run(bench: &Workbench, options: &RescueOptions) -> (RescueMap, Vec<u8>) {
    let map = try_rescue(options).expect("a rescue");
    let target = PathBuf::from(&options.target.as_ref().expect("a target").name);
    bench.qemu.expect_clean(&target);
    let bytes = bench.content(&target).expect("a readable target");
    let counted = map.data_bytes + map.zero_bytes + map.lost_bytes;
    assert_eq!(counted, map.virtual_size, "{map:?}");
    (map, bytes)
}

fn reasons(map: &RescueMap) -> Vec<(u64, u64, &'static str)> {
    map.lost.iter().map(|lost| (lost.start, lost.length, lost.reason)).collect()
}

/// Ranges that aren't listed as lost are as they were; those that are, are zero.
fn assert_rest_is_whole(map: &RescueMap, before: &[u8], after: &[u8]) {
    let mut expected = before.to_vec();
    for lost in &map.lost {
        expected[lost.start as usize..(lost.start + lost.length) as usize].fill(0);
    }
    assert!(expected == after, "{map:?}");
}

#[test]
fn whole_images_are_read_whole() {
    let bench = Workbench::new();
    for specimen in SPECIMENS {
        let image = bench.base(specimen.name);
        let (map, bytes) = run(&bench, &options(&image, &bench.path("new")));
        assert!(map.is_whole() && map.notes.is_empty() && map.doubtful.is_empty(), "{}: {map:?}", specimen.name);
        assert!(Some(bytes) == bench.content(&image), "{}", specimen.name);
        let mut only_map = options(&image, &bench.path("none"));
        only_map.target = None;
        only_map.scan = true;
        let told = try_rescue(&only_map).expect("a map");
        assert_eq!((told.data_bytes, told.zero_bytes), (map.data_bytes, map.zero_bytes));
        assert_eq!(told.orphans, [], "{}", specimen.name);
        assert!(!bench.path("none").exists());
    }
}

type Damage = fn(&Victim);

/// Damage to an image, and the ranges lost by it: (start, length, reason).
type Case = (&'static str, Damage, &'static [(u64, u64, &'static str)]);

const K: u64 = 1 << 10;

const LOSSES: &[Case] = &[
    ("plain", |v| v.set_word(v.l2_entry(3), COPIED | 100 << 20), &[(192 * K, 64 * K, "past-end")]),
    ("plain", |v| v.flip(v.l2_entry(3), 0x200), &[(192 * K, 64 * K, "unaligned")]),
    ("plain", |v| v.set_word(v.l1_entry(0), COPIED | 100 << 20), &[(0, SIZE, "table-lost")]),
    ("v2", |v| v.set_word(v.l1_entry(0), COPIED), &[(0, SIZE, "table-lost")]),
    ("tiny", |v| v.set_word(v.l1_entry(2), 1 << 40), &[(64 * K, 32 * K, "table-lost")]),
    ("compressed", |v| v.flip(v.l2_entry(2), 1 << 30), &[(128 * K, 64 * K, "past-end")]),
    (
        "compressed",
        |v| v.file.write_all_at(&[0xff; 64], v.word(v.l2_entry(2)) & 0x3f_ffff_ffff_ffff).expect("write"),
        &[(128 * K, 64 * K, "bad-compressed-data")],
    ),
    ("subclusters", |v| v.set_word(v.l2_entry(90) + 8, 0xff), &[(90 * 64 * K, 16 * K, "no-cluster")]),
    ("data-file", |v| v.set_word(v.l2_entry(2), 1 << 62 | 0x5_0000), &[(128 * K, 64 * K, "compressed-in-data-file")]),
    ("overlay", |v| v.set_word(v.l2_entry(3), COPIED | 100 << 20), &[(48 * K, 16 * K, "past-end")]),
];

#[test]
fn what_is_lost_is_named_and_the_rest_is_whole() {
    let bench = Workbench::new();
    for (base, damage, expected) in LOSSES {
        let image = bench.base(base);
        let before = bench.content(&image).expect("a readable image");
        damage(&Victim::open(&image));
        let (map, after) = run(&bench, &options(&image, &bench.path("new")));
        assert_eq!(reasons(&map), *expected, "{base}: {map:?}");
        assert_eq!(map.exit_code(), 2);
        assert_rest_is_whole(&map, &before, &after);
    }
}

#[test]
fn doubtful_data_are_taken_and_listed() {
    let bench = Workbench::new();
    let image = bench.base("subclusters");
    let before = bench.content(&image).expect("a readable image");
    let victim = Victim::open(&image);
    victim.flip(victim.l2_entry(2) + 8, 1 << 40);
    victim.flip(victim.l2_entry(1), 1 << 57);
    let (map, after) = run(&bench, &options(&image, &bench.path("new")));
    assert!(map.is_whole() && before == after);
    let doubtful: Vec<_> = map.doubtful.iter().map(|range| (range.start, range.length, range.reason)).collect();
    assert_eq!(doubtful, [(64 * K, 64 * K, "reserved-bits"), (128 * K, 64 * K, "subcluster-bitmap")]);
}

#[test]
fn a_failing_disk_loses_its_sectors_only() {
    let bench = Workbench::new();
    let image = bench.base("plain");
    let before = bench.content(&image).expect("a readable image");
    let host = Victim::open(&image).host_cluster(5) << 16;
    let sector = (host + 8192) / 512;
    let name = format!(
        "driver=raw,file.driver=blkdebug,file.image.driver=file,file.image.filename={},\
         file.inject-error.0.event=none,file.inject-error.0.sector={sector},file.inject-error.0.once=off",
        image.display()
    );
    let mut options = options(&image, &bench.path("new"));
    options.image = ImageSpec { name, image_opts: true, ..ImageSpec::default() };
    let (map, after) = run(&bench, &options);
    assert_eq!(reasons(&map), [(5 * 64 * K + 8192, 4096, "io-error")], "{map:?}");
    assert_rest_is_whole(&map, &before, &after);
}

/// Damage to the header, and the user's values instead.
type HeaderCase = (&'static str, Damage, Overrides);

const NOTHING: Overrides = Overrides {
    cluster_size_bytes: None,
    size_bytes: None,
    l1_offset_bytes: None,
    extended_l2: None,
    backing_is_given: false,
};

const HEADERS: &[HeaderCase] = &[
    ("magic", |v| v.set_word(0, 0x1234 << 32 | 3), NOTHING),
    ("version", |v| v.flip(0, 0x80), NOTHING),
    (
        "cluster bits",
        |v| v.file.write_all_at(&[0xff], 23).expect("write"),
        Overrides { cluster_size_bytes: Some(64 * K), ..NOTHING },
    ),
    ("size", |v| v.set_word(24, u64::MAX), Overrides { size_bytes: Some(SIZE), ..NOTHING }),
    ("L1 size", |v| v.file.write_all_at(&[0; 4], 36).expect("write"), NOTHING),
    ("L1 offset", |v| v.flip(40, 1 << 9), Overrides { l1_offset_bytes: Some(0x3_0000), ..NOTHING }),
    ("refcount table", |v| v.set_word(48, 3), NOTHING),
    ("unknown features", |v| v.set_word(72, 1 << 60), NOTHING),
    ("extended L2 entries", |v| v.set_word(72, 1 << 4), Overrides { extended_l2: Some(false), ..NOTHING }),
    (
        "everything",
        |v| v.file.write_all_at(&[0; 512], 0).expect("write"),
        Overrides {
            cluster_size_bytes: Some(64 * K),
            size_bytes: Some(SIZE),
            l1_offset_bytes: Some(0x3_0000),
            ..NOTHING
        },
    ),
];

#[test]
fn damaged_headers_are_helped_out() {
    let bench = Workbench::new();
    for (name, damage, overrides) in HEADERS {
        let image = bench.base("plain");
        let before = bench.content(&image).expect("a readable image");
        damage(&Victim::open(&image));
        let helped = RescueOptions { overrides: *overrides, ..options(&image, &bench.path("new")) };
        let (map, after) = run(&bench, &helped);
        assert!(map.is_whole() && before == after, "{name}: {map:?}");
        assert_eq!(map.notes.is_empty(), *name == "extended L2 entries", "{name}: {map:?}");
        if *overrides != NOTHING {
            let alone = try_rescue(&options(&image, &bench.path("alone")));
            assert!(alone.is_err() || !alone.expect("a map").is_whole(), "{name} needs no help");
        }
    }
}

/// Ranges of an unknown backing file aren't called zeroes, until the user names the file, or declares that there is
/// none.
#[test]
fn what_a_damaged_header_leaves_to_a_backing_file_is_lost() {
    let bench = Workbench::new();
    let backing = bench.folder().join("backing.raw").to_str().map(str::to_owned).expect("text path");
    let damages: [(&str, &str, Damage); 3] = [
        ("snapshot table", "backing.raw', which isn't opened", |v| v.set_word(64, 1 << 56)),
        ("name's length", "may have named", |v| v.file.write_all_at(&[0xff; 4], 16).expect("write")),
        ("name's place", "may have named", |v| v.set_word(8, 1 << 62)),
    ];
    for (name, note, damage) in damages {
        let image = bench.base("overlay");
        let before = bench.content(&image).expect("a readable image");
        damage(&Victim::open(&image));
        let (map, after) = run(&bench, &options(&image, &bench.path("new")));
        assert!(map.lost_bytes > 0 && map.lost.iter().all(|lost| lost.reason == "backing-file"), "{name}: {map:?}");
        assert!(map.notes.iter().any(|found| found.contains(note)), "{name}: {map:?}");
        assert_rest_is_whole(&map, &before, &after);
        let given = Some((backing.clone(), Some("raw".to_owned())));
        let overrides = Overrides { backing_is_given: true, ..NOTHING };
        let told = RescueOptions { backing: given, overrides, ..options(&image, &bench.path("new")) };
        let (map, after) = run(&bench, &told);
        assert!(map.is_whole() && before == after, "{name}: {map:?}");
        let none = RescueOptions { backing: Some((String::new(), None)), ..options(&image, &bench.path("new")) };
        assert!(run(&bench, &none).0.is_whole(), "{name}");
    }
}

/// 4,000,000,000 unallocated clusters aren't looked at one by one.
#[test]
fn a_huge_disk_with_little_in_it_is_done_soon() {
    const HUGE: u64 = 1 << 46;
    let bench = Workbench::new();
    let backing = bench.folder().join("backing.raw").to_str().map(str::to_owned).expect("text path");
    let image = bench.base("overlay");
    let victim = Victim::open(&image);
    victim.set_word(64, 1 << 56);
    victim.set_word(24, HUGE);
    // The table reaches so far.
    victim.file.set_len(64 << 20).expect("a longer file");
    let only_map = RescueOptions { target: None, ..options(&image, &bench.path("new")) };
    let map = try_rescue(&only_map).expect("a map");
    assert_eq!((map.virtual_size, map.data_bytes + map.zero_bytes + map.lost_bytes), (HUGE, HUGE));
    assert!(map.lost.iter().any(|lost| lost.reason == "backing-file" && lost.length > HUGE / 2), "{map:?}");
    let told = RescueOptions { backing: Some((backing, Some("raw".to_owned()))), ..only_map };
    let map = try_rescue(&told).expect("a map");
    assert!(map.zero_bytes > HUGE / 2 && map.lost.iter().all(|lost| lost.reason != "backing-file"), "{map:?}");
}

#[test]
fn lost_tables_are_found_and_taken_by_the_users_word() {
    let bench = Workbench::new();
    let image = bench.base("tiny");
    let before = bench.content(&image).expect("a readable image");
    let victim = Victim::open(&image);
    let table = victim.l2_entry(64 * 2);
    // The table's own offset is damaged: one table is lost, and one is found.
    victim.set_word(victim.l1_entry(2), 1 << 40);
    let scan = RescueOptions { scan: true, ..options(&image, &bench.path("new")) };
    let (map, _) = run(&bench, &scan);
    assert_eq!(map.orphans.len(), 1, "{:?}", map.orphans);
    let orphan = &map.orphans[0];
    assert_eq!((orphan.offset, orphan.looks_like, orphan.suggested), (table, "l2", Some(64 * K)));
    assert!(map.without_table.contains(&(64 * K, 32 * K)), "{:?}", map.without_table);
    let assigned = RescueOptions { assign: vec![(table, 64 * K)], ..scan.clone() };
    let (map, after) = run(&bench, &assigned);
    assert!(map.is_whole() && before == after);
    assert_eq!(map.orphans[0].assigned, Some(64 * K));
    assert_eq!(map.doubtful[0].reason, "assigned-table");
    for wrong in [(table, 0), (table, 64 * K + 512), (table, SIZE), (table + 512, 64 * K), (1 << 50, 64 * K)] {
        let error = try_rescue(&RescueOptions { assign: vec![wrong], ..scan.clone() }).expect_err("a refusal");
        assert_eq!(error.field_name(), Some("assign"), "{error}");
    }
}

#[test]
fn a_lost_l1_table_is_found() {
    let bench = Workbench::new();
    let image = bench.base("tiny");
    let before = bench.content(&image).expect("a readable image");
    let victim = Victim::open(&image);
    let l1 = victim.header.l1_table_offset;
    victim.set_word(40, 0);
    let scan = RescueOptions { scan: true, ..options(&image, &bench.path("new")) };
    let (map, _) = run(&bench, &scan);
    assert_eq!(reasons(&map), [(0, SIZE, "table-lost")]);
    let found: Vec<u64> =
        map.orphans.iter().filter(|orphan| orphan.looks_like == "l1").map(|orphan| orphan.offset).collect();
    // It takes several clusters.
    assert_eq!(found.first(), Some(&l1), "{:?}", map.orphans);
    let overrides = Overrides { l1_offset_bytes: Some(l1), ..Overrides::default() };
    let (map, after) = run(&bench, &RescueOptions { overrides, ..scan });
    assert!(map.is_whole() && before == after);
}

fn reading(snapshot: &str, options: RescueOptions) -> RescueOptions {
    RescueOptions { snapshot: Some(SnapshotName::parse(snapshot).unwrap()), ..options }
}

#[test]
fn internal_snapshots_are_read_on_demand() {
    let bench = Workbench::new();
    let (mut read, mut differ) = (0, 0);
    for specimen in SPECIMENS {
        let image = bench.base(specimen.name);
        let names = specimen.steps.iter().filter_map(|step| step.strip_prefix("snapshot "));
        for (name, number) in names.zip(1..) {
            let before = bench.snapshot_content(&image, name).expect("a readable snapshot");
            differ += usize::from(bench.content(&image) != Some(before.clone()));
            for wanted in [name.to_owned(), format!("snapshot.name={name}"), format!("snapshot.id={number}")] {
                let options = reading(&wanted, options(&image, &bench.path("new")));
                let (map, bytes) = run(&bench, &options);
                assert!(map.is_whole() && map.notes.is_empty() && bytes == before, "{} {wanted}", specimen.name);
                assert_eq!(map.snapshot, options.snapshot.map(|snapshot| snapshot.name));
                assert!(map.snapshots.iter().any(|listed| listed.name == name && listed.id == number.to_string()));
            }
            // A table that only the disk uses is no orphan while a snapshot is read.
            let scan = RescueOptions { scan: true, target: None, ..options(&image, &bench.path("none")) };
            let told = try_rescue(&reading(name, scan)).expect("a map");
            assert_eq!(told.orphans, [], "{} {name}", specimen.name);
            read += 1;
        }
        let error = try_rescue(&reading("none", options(&image, &bench.path("none")))).expect_err("a refusal");
        assert!(error.to_string().contains("no such snapshot"), "{error}");
        assert!(!bench.path("none").exists());
    }
    assert!(read >= 8 && differ >= 4, "{read} snapshots, {differ} of them unlike the disk");
}

#[test]
fn a_snapshot_outlives_the_disk_and_the_other_way_round() {
    let bench = Workbench::new();
    let fresh = || {
        let image = bench.base("snapshots");
        let contents = ["a", "b"].map(|name| bench.snapshot_content(&image, name).expect("a readable snapshot"));
        let disk = bench.content(&image).expect("a readable image");
        (Victim::open(&image), image, contents, disk)
    };
    // The disk's L1 table and every refcount are gone; the snapshots are not.
    let (victim, image, [a, b], disk) = fresh();
    victim.set_word(victim.l1_entry(0), 1 << 40);
    victim.set_word(48, 3);
    for (name, before) in [("a", &a), ("b", &b)] {
        let (map, after) = run(&bench, &reading(name, options(&image, &bench.path("new"))));
        assert!(map.is_whole() && after == *before, "{name}: {map:?}");
    }
    assert!(!run(&bench, &options(&image, &bench.path("new"))).0.is_whole());

    // The first snapshot's table is lost: the map lists exactly its ranges.
    let (victim, image, [a, b], _) = fresh();
    victim.set_word(victim.snapshot_l1_entry(0), COPIED | 1 << 40);
    let (map, after) = run(&bench, &reading("a", options(&image, &bench.path("new"))));
    assert_eq!(map.lost.first().map(|lost| lost.reason), Some("table-lost"), "{map:?}");
    assert_rest_is_whole(&map, &a, &after);
    assert!(run(&bench, &reading("b", options(&image, &bench.path("new")))).1 == b);
    assert!(run(&bench, &options(&image, &bench.path("new"))).1 == disk);

    // Its place is lost altogether.
    let (victim, image, [a, _], _) = fresh();
    let table = victim.header.snapshots_offset;
    victim.flip(table, 1 << 9);
    let (map, _) = run(&bench, &reading("a", options(&image, &bench.path("new"))));
    assert!(map.notes.iter().any(|note| note.contains("can't be an L1 table")), "{map:?}");
    assert_eq!(reasons(&map), [(0, SIZE, "table-lost")]);
    victim.flip(table, 1 << 9);
    // A disk size that no image has.
    victim.set_word(table + 40 + 8, u64::MAX);
    let (map, after) = run(&bench, &reading("a", options(&image, &bench.path("new"))));
    assert!(map.is_whole() && map.notes.len() == 1 && after == a, "{map:?}");
    let size_bytes = Some(128 * K);
    let overrides = Overrides { size_bytes, ..Overrides::default() };
    let (map, after) = run(&bench, &reading("a", RescueOptions { overrides, ..options(&image, &bench.path("new")) }));
    assert!(map.is_whole() && after == a[..128 << 10], "{map:?}");

    // The second entry is broken: the first snapshot and the disk are read, and a note names the missing part.
    let (victim, image, [a, _], disk) = fresh();
    // Fixed part, extra data, one byte of ID and one of name.
    let extra_bytes = victim.word(table + 32) & 0xffff_ffff;
    victim.set_word(table + (40 + extra_bytes + 2).next_multiple_of(8) + 32, u64::MAX);
    let (map, after) = run(&bench, &reading("a", options(&image, &bench.path("new"))));
    assert!(after == a && map.snapshots.len() == 1, "{map:?}");
    assert!(map.notes.iter().any(|note| note.contains("entry 1 of 2")), "{map:?}");
    assert!(run(&bench, &options(&image, &bench.path("new"))).1 == disk);
    let error = try_rescue(&reading("b", options(&image, &bench.path("new")))).expect_err("a refusal").to_string();
    assert!(error.contains("no such snapshot; entry 1 of 2"), "{error}");
}

#[test]
fn missing_files_are_losses() {
    let bench = Workbench::new();
    let image = bench.base("overlay");
    let before = bench.content(&image).expect("a readable image");
    std::fs::rename(bench.folder().join("backing.raw"), bench.folder().join("elsewhere.raw")).expect("rename");
    let (map, after) = run(&bench, &options(&image, &bench.path("new")));
    assert!(map.lost.iter().all(|lost| lost.reason == "backing-file") && map.notes.len() == 1, "{map:?}");
    assert_rest_is_whole(&map, &before, &after);
    let elsewhere = bench.folder().join("elsewhere.raw").to_str().map(str::to_owned).expect("text path");
    let backing = Some((elsewhere.clone(), Some("raw".to_owned())));
    let (map, after) = run(&bench, &RescueOptions { backing, ..options(&image, &bench.path("new")) });
    assert!(map.is_whole() && before == after);
    let none = RescueOptions { backing: Some((String::new(), None)), ..options(&image, &bench.path("new")) };
    assert!(run(&bench, &none).0.is_whole());

    let image = bench.base("data-file");
    let before = bench.content(&image).expect("a readable image");
    let moved = bench.folder().join("moved.raw");
    std::fs::rename(bench.folder().join("data.raw"), &moved).expect("rename");
    let (map, after) = run(&bench, &options(&image, &bench.path("new")));
    assert!(map.lost.iter().all(|lost| lost.reason == "data-file-missing"), "{map:?}");
    assert_rest_is_whole(&map, &before, &after);
    let data_file = moved.to_str().map(str::to_owned);
    let (map, after) = run(&bench, &RescueOptions { data_file, ..options(&image, &bench.path("new")) });
    assert!(map.is_whole() && before == after);
}

#[test]
fn the_damaged_image_is_never_the_target() {
    let bench = Workbench::new();
    let image = bench.base("overlay");
    let bytes = std::fs::read(&image).expect("image");
    for target in [image.clone(), bench.folder().join("backing.raw")] {
        let kept = std::fs::read(&target).expect("file");
        let error = try_rescue(&options(&image, &target)).expect_err("a refusal").to_string();
        assert!(error.contains("one of the files that are read"), "{error}");
        assert!(std::fs::read(&target).expect("file") == kept);
    }
    assert!(std::fs::read(&image).expect("image") == bytes);
}

/// Whatever is broken: no panic, and the image stays as it is. Ranges listed as neither lost nor doubtful read as in
/// qemu-img, where it reads anything.
#[test]
fn random_damage() {
    let bench = Workbench::new();
    for_each_seed(3, |seed| {
        for specimen in SPECIMENS {
            let image = bench.base(specimen.name);
            let mut random = Random::new(seed);
            let victim = Victim::open(&image);
            let sites = victim.sites();
            let done: Vec<String> = (0..2).map(|_| victim.harm(&sites, &mut random)).collect();
            drop(victim);
            let Ok(map) = try_rescue(&options(&image, &bench.path("new"))) else { continue };
            let after = bench.content(&bench.path("new")).expect("a readable target");
            let Some(mut theirs) = bench.content(&image).filter(|bytes| bytes.len() == after.len()) else { continue };
            let mut ours = after;
            let doubtful = map.doubtful.iter().map(|range| (range.start, range.length));
            for (start, length) in map.lost.iter().map(|lost| (lost.start, lost.length)).chain(doubtful) {
                let range = start as usize..((start + length) as usize).min(ours.len());
                ours[range.clone()].fill(0);
                theirs[range].fill(0);
            }
            assert!(ours == theirs, "{} seed {seed}: {done:?}\n{map:?}", specimen.name);
        }
    });
}

const KEY: &str = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=1";

/// An encrypted image of ours with data, and its disk.
fn encrypted(bench: &Workbench) -> (PathBuf, Vec<u8>) {
    let image = bench.path("encrypted");
    let secrets = vec![("s".to_owned(), Secret::new(b"geheim".to_vec()))];
    let request = CreateRequest {
        filename: image.display().to_string(),
        format: "qcow2".to_owned(),
        size: Some(4 << 20),
        options: vec![KEY.to_owned()],
        secrets: secrets.clone(),
        ..CreateRequest::default()
    };
    let mut disk = vec![0; 4 << 20];
    rt::block_on(async {
        prepare(&request).await.expect("options").run().await.expect("an image");
        let options = format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", image.display());
        let request = OpenRequest::image_opts(&options).expect("options").secrets(secrets).writable(true);
        let node = open(request).await.expect("it opens");
        for (at, len, byte) in [(1000, 70_000, 7), (1 << 20, 200_000, 8), ((4 << 20) - 5000, 5000, 9)] {
            node.write(at as u64, IoBuf::copy_from(&vec![byte; len])).await.0.expect("a write");
            disk[at..at + len].fill(byte);
        }
        node.close().await.expect("closed");
    });
    (image, disk)
}

#[test]
fn encrypted_images_are_read_with_their_passphrase() {
    let bench = Workbench::new();
    let (image, disk) = encrypted(&bench);
    let with = |id: Option<&str>, passphrase: &str| {
        let mut options = options(&image, &bench.path("new"));
        options.image.secrets = vec![("s".to_owned(), Secret::new(passphrase.into()))];
        RescueOptions { key_secret: id.map(str::to_owned), ..options }
    };
    let (map, bytes) = run(&bench, &with(Some("s"), "geheim"));
    assert!(bytes == disk && map.lost.is_empty(), "{map:?}");
    for (options, word) in [
        (with(None, "geheim"), "--key-secret"),
        (with(Some("t"), "geheim"), "No secret with id 't'"),
        (with(Some("s"), "falsch"), "Invalid password"),
    ] {
        let error = try_rescue(&options).expect_err("no key").to_string();
        assert!(error.contains(word) && !error.contains("falsch"), "{error}");
    }
    // A cut file: the range behind its end is lost, and a sector that it ends in.
    let len = std::fs::metadata(&image).expect("the image").len();
    std::fs::OpenOptions::new().write(true).open(&image).expect("the image").set_len(len - 10_100).expect("a cut");
    let (_, bytes) = run(&bench, &with(Some("s"), "geheim"));
    let differs: Vec<usize> = (0..disk.len()).filter(|at| bytes[*at] != disk[*at]).collect();
    assert!(differs.iter().all(|at| bytes[*at] == 0) && differs.len() < 70_000, "{} bytes differ", differs.len());
    // Without the extensions of its header the key slots are found.
    let file = std::fs::OpenOptions::new().write(true).open(&image).expect("the image");
    file.write_all_at(&[0xff; 40], 104).expect("damage");
    let (map, again) = run(&bench, &with(Some("s"), "geheim"));
    assert!(again == bytes && map.notes.iter().any(|note| note.contains("found one at")), "{:?}", map.notes);
}
