// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Power cuts while an encrypted image is written to, and while its key slots change.

use cowshed_create::{CreateRequest, prepare};
use cowshed_image::encryption::{LuksArea, SlotChange, change_slots};
use cowshed_image::secret::Secret;
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::rt;
use cowshed_storage::{File, OpenOptions};
use cowshed_testkit::crash::{CrashPlan, CrashReport, explore};
use cowshed_testkit::images::{DataFile, Qcow2Spec};
use cowshed_testkit::operations::OpGen;
use cowshed_testkit::scenario::{Prepared, Trial};
use std::path::Path;

const CBC: &str = "encrypt.format=luks,encrypt.iter-time=1,encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv";
const AES: &str = "encrypt.format=aes";
const XTS: &str = "encrypt.format=luks,encrypt.iter-time=1,encrypt.cipher-alg=aes-128";

#[test]
fn encrypted_images_survive_power_cuts() {
    let mut total = CrashReport::default();
    let spec = |cluster_size| Qcow2Spec { cluster_size, ..Qcow2Spec::default() };
    let cases = [
        (spec(4096), CBC, 512, 1),
        (spec(65536), XTS, 512, 1),
        (Qcow2Spec { extended_l2: true, ..spec(16384) }, XTS, 512, 3),
        (Qcow2Spec { lazy_refcounts: true, ..spec(4096) }, CBC, 4096, 2),
        (Qcow2Spec { data_file: Some(DataFile::Mapped), ..spec(4096) }, CBC, 512, 1),
        (Qcow2Spec { preallocation: "metadata", ..spec(4096) }, XTS, 512, 1),
        (Qcow2Spec { is_v2: true, ..spec(4096) }, CBC, 512, 1),
        (Qcow2Spec { refcount_bits: 64, ..spec(512) }, CBC, 512, 2),
        (spec(4096), AES, 512, 2),
        (Qcow2Spec { extended_l2: true, ..spec(16384) }, AES, 4096, 1),
        (Qcow2Spec { data_file: Some(DataFile::Raw), ..spec(4096) }, AES, 512, 1),
        (Qcow2Spec { data_file: Some(DataFile::Raw), ..spec(4096) }, XTS, 512, 1),
    ];
    for (index, (spec, options, sector_bytes, queues)) in cases.into_iter().enumerate() {
        let seed = index as u64 + 1;
        let size = 24 * spec.cluster_size.max(4096);
        let prepared = Prepared::encrypted(&spec, options, size, &[(1000, 5000), (size / 2, 9000)], false, &[]);
        // Odd bytes in most cases: part of a sector is read and written again.
        let align_bytes = if index % 3 == 1 { 512 } else { 1 };
        let steps = OpGen { align_bytes, ..prepared.requests() }.steps(seed, 30);
        let trial = Trial {
            config: Config { sector_bytes, ..Config::new(seed) },
            faults: Vec::new(),
            options: "",
            steps,
            queues,
            plan: CrashPlan { max_distinct: 60, ..CrashPlan::new(seed) },
            sample_qemu: 25,
            amend: "",
            shared: None,
        };
        let report = prepared.crash_or_shrink(&trial);
        total.add(&report.unwrap_or_else(|complaint| panic!("case {index} ({spec:?}, {options}): {complaint}")));
    }
    println!("encrypted: {total}");
    assert!(total.distinct() > 200, "{total}");
}

const IMAGE: &str = "disk";

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

/// The file of a small LUKS volume that "one" opens.
fn volume() -> Vec<u8> {
    volume_of(4096)
}

/// The same with a disk of this size in bytes.
pub fn volume_of(size: u64) -> Vec<u8> {
    let folder = cowshed_testkit::qemu::temp_dir();
    let path = folder.path().join("volume");
    let request = CreateRequest {
        filename: path.to_string_lossy().into_owned(),
        format: "luks".to_owned(),
        size: Some(size),
        options: vec!["key-secret=s,cipher-alg=aes-128,cipher-mode=cbc,iter-time=1".to_owned()],
        secrets: vec![("s".to_owned(), secret("one"))],
        ..CreateRequest::default()
    };
    rt::block_on(async { prepare(&request).await?.run().await }).expect("a volume");
    std::fs::read(path).expect("the volume")
}

async fn area(write: bool) -> LuksArea {
    let file = File::open(Path::new(IMAGE), &OpenOptions { write, ..OpenOptions::default() }).expect("the volume");
    LuksArea { offset: 0, len: file.len(), file }
}

fn opens(world: &World, passphrase: &str) -> bool {
    world.run(async {
        let area = area(false).await;
        let volume = area.volume().await.expect("a header");
        area.master_key(&volume, &secret(passphrase)).await.expect("it can be tried").is_some()
    })
}

#[test]
fn a_cut_while_key_slots_change_leaves_a_way_in() {
    let bytes = volume();
    let activate = |slot, text: &str| SlotChange::Activate { slot, new_secret: secret(text), iteration_ms: 1 };
    let erase = |text: &str| SlotChange::Deactivate { slot: None, old_secret: Some(secret(text)) };
    // The change, whether it is forced, the key that permits it, and the keys that may open the volume at the end.
    type Change = (SlotChange, bool, &'static str, &'static [&'static str]);
    let both: &[&str] = &["one", "two"];
    let changes: Vec<Vec<Change>> = vec![
        vec![(activate(None, "two"), false, "one", both), (erase("one"), false, "two", &["two"])],
        // The only slot is overwritten.
        vec![(activate(Some(0), "two"), true, "one", &["two"])],
        vec![
            (activate(Some(7), "two"), false, "one", both),
            (activate(Some(0), "three"), true, "two", &["two", "three"]),
        ],
    ];
    let mut distinct = 0;
    for (case, changes) in changes.into_iter().enumerate() {
        let world = World::new(Config::new(case as u64));
        world.add_file(IMAGE, PageMap::from_bytes(&bytes));
        let mut marks = Vec::new();
        for (change, force, key, then) in &changes {
            world.run(async {
                let done = change_slots(&area(true).await, Some(&secret(key)), change, *force).await;
                done.expect("the slots change");
            });
            marks.push((world.position(), *then));
        }
        let plan = CrashPlan { max_distinct: 150, ..CrashPlan::new(case as u64) };
        let report = explore(&world.trace(), &plan, |cut| {
            let left = World::with_files(Config::new(0), &cut.state.files);
            let ways: Vec<&str> = ["one", "two", "three"].into_iter().filter(|text| opens(&left, text)).collect();
            if ways.is_empty() {
                return Err("nothing opens the volume any more".to_owned());
            }
            match marks.iter().rfind(|(position, _)| *position <= cut.position) {
                Some((_, then)) if !then.iter().any(|way| ways.contains(way)) => {
                    Err(format!("one of {then:?} should open the volume, and {ways:?} does"))
                }
                _ => Ok(()),
            }
        });
        let report = report.unwrap_or_else(|failure| panic!("case {case}: {failure}"));
        let end: Vec<&str> = ["one", "two", "three"].into_iter().filter(|text| opens(&world, text)).collect();
        assert_eq!(end, marks.last().expect("a change").1, "case {case}");
        distinct += report.distinct();
    }
    println!("key slots: {distinct} distinct states");
    assert!(distinct > 40, "{distinct}");
}
