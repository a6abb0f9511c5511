// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while an image is created: the file is a whole image or none.

use cowshed_create::qcow2::Qcow2CreateOptions;
use cowshed_create::schema::{OptionValues, options_of};
use cowshed_create::{CreateRequest, prepare, write_fresh_qcow2};
use cowshed_create::{ImageEncryption, NewEncryption};
use cowshed_image::secret::Secret;
use cowshed_image::{OpenRequest, Preallocation, open};
use cowshed_simulator::{Config, Event, World};
use cowshed_storage::{File, IoBuf, OpenOptions};
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use std::path::Path;

fn encryption(method: &str) -> Option<ImageEncryption> {
    let options = [format!("encrypt.format={method},encrypt.key-secret=s")];
    let values = OptionValues::parse(options_of("qcow2").expect("a table"), &options).expect("options");
    let secrets = [("s".to_owned(), Secret::new(b"geheim".to_vec()))];
    let new = ImageEncryption::from_values(&values).expect("encryption").expect("it was asked for");
    let new = match new {
        ImageEncryption::Luks(new) => ImageEncryption::Luks(NewEncryption { iteration_ms: 1, ..new }),
        other => other,
    };
    Some(new.with_secrets(&secrets).expect("the secret"))
}

#[test]
fn a_cut_creation_leaves_a_whole_image_or_none() {
    let mut report = CrashReport::default();
    let mut distinct = 0;
    let plain = || Qcow2CreateOptions { size: 3 << 20, cluster_bits: 9, ..Qcow2CreateOptions::default() };
    for (case, options) in [
        plain(),
        Qcow2CreateOptions { cluster_bits: 16, ..plain() },
        Qcow2CreateOptions {
            cluster_bits: 16,
            backing_file: Some("a/name/that/leaves/the/first/sector".into()),
            ..plain()
        },
        Qcow2CreateOptions { cluster_bits: 12, preallocation: Preallocation::Metadata, ..plain() },
        Qcow2CreateOptions { cluster_bits: 12, preallocation: Preallocation::Full, ..plain() },
        Qcow2CreateOptions { cluster_bits: 16, encryption: encryption("luks"), ..plain() },
        Qcow2CreateOptions { cluster_bits: 12, encryption: encryption("aes"), ..plain() },
        Qcow2CreateOptions {
            version: 2,
            cluster_bits: 12,
            preallocation: Preallocation::Metadata,
            encryption: encryption("aes"),
            ..plain()
        },
    ]
    .into_iter()
    .enumerate()
    {
        let seed = case as u64;
        let world = World::new(Config::new(seed));
        world.run(async {
            let create = OpenOptions { write: true, create: true, ..OpenOptions::default() };
            let file = File::open(Path::new("disk"), &create).expect("a file");
            write_fresh_qcow2(&file, &options).await.expect("an image");
        });
        world.sync_folder();
        let whole = world.contents("disk").expect("the file").to_vec();
        assert_eq!(&whole[..4], b"QFI\xfb");
        let tried = explore(&world.trace(), &CrashPlan::new(seed), |cut| {
            let Some(left) = cut.state.files.get("disk").map(|contents| contents.to_vec()) else { return Ok(()) };
            match left.starts_with(b"QFI\xfb") && left != whole {
                true => Err("half an image that looks like one".to_owned()),
                false => Ok(()),
            }
        });
        let tried = tried.unwrap_or_else(|failure| panic!("case {case}: {failure}"));
        // Disks that two cases have in common (the empty file, say) count in each.
        distinct += tried.distinct();
        report.add(&tried);
    }
    println!("create: {report}");
    assert!(distinct > 30, "{report}");
}

#[test]
fn what_is_created_unsynced_is_the_same_image_without_a_flush() {
    for (format, options) in
        [("qcow2", "preallocation=metadata"), ("raw", "preallocation=off"), ("qcow2", "cluster_size=4k")]
    {
        let request = CreateRequest {
            filename: "disk".to_owned(),
            format: format.to_owned(),
            size: Some(3 << 20),
            options: vec![options.to_owned()],
            ..CreateRequest::default()
        };
        let made = |synced: bool| {
            let world = World::new(Config::new(1));
            world.run(async {
                let plan = prepare(&request).await.expect("a plan");
                if synced { plan.run().await } else { plan.run_unsynced().await }.expect("an image");
            });
            let is_flush = |event: &&Event| matches!(event, Event::SyncIssued { .. } | Event::FolderSynced);
            let flushes = world.trace().log.iter().filter(is_flush).count();
            (world.contents("disk").expect("the file").to_vec(), flushes)
        };
        let ((durable, flushes), (lazy, none)) = (made(true), made(false));
        assert!(durable == lazy, "{format} {options}");
        assert!(flushes >= 2, "{format} {options}: the file and its name");
        assert_eq!(none, 0, "{format} {options}");
    }
}

#[test]
fn power_cut_leaves_a_small_new_image_whole_or_absent() {
    let world = World::new(Config::new(7));
    world.run(async {
        let create = OpenOptions { write: true, create: true, ..OpenOptions::default() };
        let file = File::open(Path::new("disk"), &create).expect("a file");
        let options = Qcow2CreateOptions { size: 3 << 20, cluster_bits: 9, ..Qcow2CreateOptions::default() };
        write_fresh_qcow2(&file, &options).await.expect("an image");
    });
    world.sync_folder();
    let whole = world.contents("disk").expect("the file").to_vec();
    let tried = explore(&world.trace(), &CrashPlan::new(7), |cut| {
        let Some(left) = cut.state.files.get("disk").map(|contents| contents.to_vec()) else { return Ok(()) };
        match left.starts_with(b"QFI\xfb") && left != whole {
            true => Err("half an image that looks like one".to_owned()),
            false => Ok(()),
        }
    });
    let report = tried.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(report.distinct() > 2, "{report}");
}

/// New images of other formats, with the files beside them.
const OTHERS: &[(&str, &[&str])] = &[
    ("parallels", &[""]),
    ("qcow", &[""]),
    ("qed", &["", "cluster_size=4k,table_size=1"]),
    ("vdi", &["", "static=on"]),
    ("vhdx", &["", "subformat=fixed"]),
    (
        "vmdk",
        &[
            "",
            "zeroed_grain=on",
            "subformat=monolithicFlat",
            "subformat=twoGbMaxExtentSparse",
            "subformat=twoGbMaxExtentFlat",
            "subformat=streamOptimized",
        ],
    ),
    ("vpc", &["", "force_size=on", "subformat=fixed"]),
];

/// The size of the disk, and whether all of it is zeroes and the tables are sound.
async fn look(format: &str) -> cowshed_types::Result<(u64, bool)> {
    let node = open(OpenRequest::file("disk").format(format)).await?;
    let (result, bytes) = node.read(0, IoBuf::zeroed(node.size() as usize)).await;
    result?;
    let check = node.check_mapped(4).await.transpose()?.flatten();
    let is_sound = check.is_none_or(|check| check.findings.is_empty());
    let is_whole = is_sound && bytes.iter().all(|byte| *byte == 0);
    node.close().await.map(|()| (bytes.len() as u64, is_whole))
}

#[test]
fn a_cut_creation_of_any_format_is_whole_or_none() {
    let (mut total, mut distinct) = (CrashReport::default(), 0);
    for (format, option_lists) in OTHERS {
        for options in *option_lists {
            let request = CreateRequest {
                filename: "disk".to_owned(),
                format: (*format).to_owned(),
                size: Some(3 << 20),
                options: Some((*options).to_owned()).filter(|options| !options.is_empty()).into_iter().collect(),
                ..CreateRequest::default()
            };
            let world = World::new(Config::new(3));
            world.run(async { prepare(&request).await?.run().await.map(drop) }).expect("an image");
            let end = world.position();
            let (size, is_whole) = world.run(look(format)).expect("it opens");
            assert!(is_whole && size >= 3 << 20, "{format} {options}");
            let plan = CrashPlan { max_distinct: 120, ..CrashPlan::new(3) };
            let tried = explore(&world.trace(), &plan, |cut| {
                let left = World::with_files(Config::new(0), &cut.state.files);
                match left.run(look(format)) {
                    Ok(found) if found == (size, true) => Ok(()),
                    Ok(found) => Err(format!("half an image that looks like one: {found:?}")),
                    Err(error) if cut.position >= end => Err(error.to_string()),
                    Err(_) => Ok(()),
                }
            });
            let tried = tried.unwrap_or_else(|failure| panic!("{format} {options}: {failure}"));
            distinct += tried.distinct();
            total.add(&tried);
        }
    }
    println!("create: {total}");
    assert!(distinct > 60, "{total}");
}
