// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Overlap checks: a mapping that points into metadata is never written through; the image is marked as corrupt and stays
//! otherwise as it was.

use cowshed_block::Errno;
use cowshed_image::{OpenRequest, ZeroFlags, open};
use cowshed_storage::{IoBuf, rt};
use std::path::{Path, PathBuf};
use std::process::Command;

fn qemu(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().expect("the qemu tools must be installed");
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// An image with data in guest clusters 0 and 1; `patch` gets its bytes and the place of its L2 table.
fn image(folder: &Path, patch: impl FnOnce(&mut [u8], usize)) -> PathBuf {
    let path = folder.join("image.qcow2");
    let name = path.to_str().unwrap();
    qemu("qemu-img", &["create", "-q", "-f", "qcow2", name, "64M"]);
    qemu("qemu-io", &["-c", "write -P 1 0 128k", name]);
    let mut bytes = std::fs::read(&path).unwrap();
    let l2 = (word(&bytes, word(&bytes, 40) as usize) & OFFSET) as usize;
    patch(&mut bytes, l2);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Points guest cluster 1 to `host`.
fn redirect(bytes: &mut [u8], l2: usize, host: u64) {
    bytes[l2 + 8..l2 + 16].copy_from_slice(&(host | 1 << 63).to_be_bytes());
}

async fn attempt(name: &str, how: &str) -> (cowshed_block::Result<()>, String) {
    let node = open(OpenRequest::file(name).writable(true).discard(true)).await.unwrap();
    let result = match how {
        "write" => node.write(65536 + 4096, IoBuf::copy_from(&[9; 4096])).await.0,
        "zero" => node.write_zeroes(65536, 65536, ZeroFlags { may_unmap: true, no_fallback: false }).await,
        "discard" => node.discard(65536, 65536).await,
        _ => node.write_compressed(vec![(65536, IoBuf::zeroed(65536))]).await,
    };
    let next = node.write(0, IoBuf::copy_from(&[7; 65536 * 4])).await.0;
    let later = next.map_or_else(|error| error.to_string(), |()| String::new());
    let _ = node.close().await;
    (result, later)
}

/// From the file's bytes and the offset of the L2 table: the host offset that the test points an entry at.
type Place = fn(&[u8], usize) -> u64;

#[test]
fn writes_never_land_on_metadata() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let places: [(&str, Place); 5] = [
        ("refcount table", |bytes, _| word(bytes, 48)),
        ("refcount block", |bytes, _| word(bytes, word(bytes, 48) as usize)),
        ("active L1 table", |bytes, _| word(bytes, 40)),
        ("active L2 table", |_, l2| l2 as u64),
        ("refcount table", |bytes, _| word(bytes, 48)),
    ];
    for (structure, place) in places {
        for how in ["write", "zero", "discard", "compressed"] {
            let path = image(folder.path(), |bytes, l2| {
                let host = place(bytes, l2);
                redirect(bytes, l2, host);
            });
            let mut before = std::fs::read(&path).unwrap();
            let (result, later) = rt::block_on(attempt(path.to_str().unwrap(), how));
            let error = result.expect_err(&format!("{how} onto the {structure}"));
            assert!(error.to_string().contains(&format!("overlaps with {structure}")), "{how}: {error}");
            assert_eq!(error.errno(), Errno::EIO);
            assert!(later.contains("marked as corrupt"), "{later}");
            // Nothing but the corrupt bit has changed.
            before[79] |= 2;
            assert!(std::fs::read(&path).unwrap() == before, "{how} onto the {structure} changed the image");
            assert!(qemu("qemu-img", &["info", path.to_str().unwrap()]).contains("corrupt: true"));
        }
    }
}

#[test]
fn a_cluster_that_is_metadata_is_not_allocated_whatever_its_refcount_says() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // The refcount of the L1 table's cluster is lost.
    let path = image(folder.path(), |bytes, _| {
        let block = word(bytes, word(bytes, 48) as usize) as usize;
        let cluster = word(bytes, 40) as usize / 65536;
        bytes[block + cluster * 2..block + cluster * 2 + 2].fill(0);
    });
    rt::block_on(async {
        let node = open(OpenRequest::file(path.to_str().unwrap()).writable(true)).await.unwrap();
        let error = node.write(1 << 20, IoBuf::copy_from(&[1; 512])).await.0.unwrap_err();
        assert!(error.to_string().contains("overlaps with active L1 table"), "{error}");
        let _ = node.close().await;
    });
}

#[test]
fn the_checks_can_be_switched_off() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = image(folder.path(), |bytes, l2| {
        let host = word(bytes, 48);
        redirect(bytes, l2, host);
    });
    let name = path.to_str().unwrap();
    for (option, caught) in
        [("overlap-check=constant", true), ("overlap-check=none,overlap-check.refcount-table=on", true)]
    {
        let Ok(request) = OpenRequest::image_opts(&format!("driver=qcow2,file.filename={name},{option}")) else {
            continue;
        };
        rt::block_on(async {
            let node = open(request.writable(true)).await.unwrap();
            let result = node.write(65536, IoBuf::copy_from(&[9; 512])).await.0;
            assert_eq!(result.is_err(), caught, "{option}");
            let _ = node.close().await;
        });
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[79] = 0;
        std::fs::write(&path, bytes).unwrap();
    }
    let request = OpenRequest::image_opts(&format!("driver=qcow2,file.filename={name},overlap-check=none")).unwrap();
    rt::block_on(async {
        let node = open(request.writable(true)).await.unwrap();
        node.write(65536 * 3 / 2, IoBuf::copy_from(&[9; 512])).await.0.unwrap();
        let _ = node.close().await;
    });
}
