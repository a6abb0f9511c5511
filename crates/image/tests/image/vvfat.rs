// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Folders as disks that change while they are open.

use cowshed_image::{Node, OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use std::fs;
use std::path::Path;
use std::sync::Arc;

fn opened(folder: &Path) -> Arc<Node> {
    rt::block_on(open(OpenRequest::file(format!("fat:{}", folder.display())))).unwrap()
}

/// Waits until the clock of the file system has moved on, so that a change has another time than before.
fn wait_for_another_time() {
    let folder = tempfile::tempdir().unwrap();
    let time = || {
        let path = folder.path().join("clock");
        fs::write(&path, "").unwrap();
        fs::metadata(&path).unwrap().modified().unwrap()
    };
    let before = time();
    while time() == before {
        std::thread::yield_now();
    }
}

/// The whole disk, cluster by cluster; `None` where a read fails.
fn clusters(node: &Arc<Node>) -> Vec<Option<Vec<u8>>> {
    let end = node.size().min(2 << 20);
    let read = |at| rt::block_on(async { node.read(at, IoBuf::zeroed(4096)).await });
    (0..end)
        .step_by(4096)
        .map(|at| Some(read(at)).filter(|(result, _)| result.is_ok()).map(|(_, bytes)| bytes.to_vec()))
        .collect()
}

/// A change to a file of the folder.
type FileChange = fn(&Path);

#[test]
fn a_file_that_changes_gives_its_old_bytes_or_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let changes: [(&str, FileChange); 6] = [
        ("rewritten", |path| fs::write(path, [9; 40_000]).unwrap()),
        ("cut", |path| fs::File::options().write(true).open(path).unwrap().set_len(100).unwrap()),
        ("grown", |path| fs::File::options().write(true).open(path).unwrap().set_len(90_000).unwrap()),
        ("removed", |path| fs::remove_file(path).unwrap()),
        ("replaced", |path| {
            fs::write(path.with_extension("new"), [9; 40_000]).unwrap();
            fs::rename(path.with_extension("new"), path).unwrap();
        }),
        ("linked", |path| {
            fs::remove_file(path).unwrap();
            std::os::unix::fs::symlink("/etc/passwd", path).unwrap();
        }),
    ];
    for (index, (name, _)) in changes.iter().enumerate() {
        fs::write(path(name), [index as u8 + 1; 40_000]).unwrap();
    }
    fs::write(path("same"), [77; 40_000]).unwrap();
    // Nothing was read of them before; and with all of them open.
    for is_read in [false, true] {
        let node = opened(folder.path());
        let before = match is_read {
            false => clusters(&opened(folder.path())),
            true => clusters(&node),
        };
        assert!(before.iter().all(Option::is_some));
        wait_for_another_time();
        for (name, change) in &changes {
            change(&path(name));
        }
        let after = clusters(&node);
        let mut failed = 0;
        for (old, new) in before.iter().zip(&after) {
            match new {
                Some(new) => assert!(Some(new) == old.as_ref()),
                None => failed += 1,
            }
        }
        // Bytes of a file that is gone may still be read where it is open.
        assert!((30..=66).contains(&failed), "{failed} reads failed");
        let is_same = |bytes: &Option<Vec<u8>>| bytes.as_ref().is_some_and(|bytes| bytes == &[77; 4096]);
        assert_eq!(after.iter().filter(|bytes| is_same(bytes)).count(), 9);
        rt::block_on(node.close()).unwrap();
        // As they were, for the second time.
        for (index, (name, _)) in changes.iter().enumerate() {
            let _ = fs::remove_file(path(name));
            fs::write(path(name), [index as u8 + 1; 40_000]).unwrap();
        }
    }
}

#[test]
fn a_folder_is_never_opened_for_writing() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a"), "a").unwrap();
    let name = format!("fat:{}", folder.path().display());
    let error = rt::block_on(open(OpenRequest::file(name).writable(true))).unwrap_err();
    assert_eq!(error.sentence(), "Image is read-only");
    let node = opened(folder.path());
    assert!(node.is_read_only());
    assert!(rt::block_on(async { node.write(0, IoBuf::zeroed(512)).await.0 }).is_err());
    rt::block_on(node.close()).unwrap();
}

#[test]
fn no_file_is_made_under_the_name_of_a_folder() {
    let error = cowshed_image::DRIVERS.check_file_name("fat:a").unwrap_err();
    assert_eq!(error.sentence(), "Protocol driver 'vvfat' does not support image creation");
    assert!(error.to_string().contains("'./fat:a'"), "{error}");
}
