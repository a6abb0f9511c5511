// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A raw disk whose format was guessed stays raw, whatever its guest asks for.

use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, OpenRequest, Preallocation, ZeroFlags, open};
use cowshed_layout::probe::{PROBE_BYTES, PROBE_TAIL_BYTES, probe_with_tail};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{ErrorKind, Result};
use futures_util::future::join_all;
use std::path::Path;
use std::sync::Arc;

/// Bytes of the disk.
const SIZE: usize = 64 << 10;

/// A request of a guest, for one range.
#[derive(Clone, Debug)]
enum Request {
    Write(u64, Vec<u8>),
    Zero(u64, u64),
    Discard(u64, u64),
    Resize(u64),
}

impl Request {
    async fn of(&self, node: &Node) -> Result<()> {
        match self {
            Request::Write(offset, bytes) => node.write(*offset, IoBuf::copy_from(bytes)).await.0,
            Request::Zero(offset, len) => node.write_zeroes(*offset, *len, ZeroFlags::default()).await,
            Request::Discard(offset, len) => node.discard(*offset, *len).await,
            Request::Resize(size) => node.resize(*size, Preallocation::Off).await,
        }
    }
}

/// The disk at `path` with discards passed on, its format guessed.
fn guessed(path: &Path) -> Arc<Node> {
    let file = BlockdevOptions::new().with("driver", "file").with("filename", path.to_str().unwrap());
    let file = file.with("discard", "unmap");
    let request = OpenRequest::options(BlockdevOptions::new().with("discard", "unmap").with("file", file));
    let node = rt::block_on(open(request.writable(true))).unwrap();
    assert!(node.is_probed_raw() && node.discards());
    node
}

/// The format that the next guess of a file finds.
fn found(path: &Path) -> &'static str {
    let bytes = std::fs::read(path).unwrap();
    probe_with_tail(&bytes[..bytes.len().min(PROBE_BYTES)], &bytes[bytes.len().saturating_sub(PROBE_TAIL_BYTES)..])
        .as_str()
}

fn footer() -> Vec<u8> {
    let mut footer = vec![0; 512];
    footer[..8].copy_from_slice(b"conectix");
    footer[12..16].copy_from_slice(&[0, 1, 0, 0]);
    footer[63] = 2;
    footer
}

/// `bytes` with 1 at `at` in place of a zero.
fn spoilt(mut bytes: Vec<u8>, at: usize) -> Vec<u8> {
    assert_eq!(bytes[at], 0);
    bytes[at] = 1;
    bytes
}

#[test]
fn no_request_completes_a_mark_at_an_end() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk");
    let end = SIZE as u64;
    let qed = || spoilt(b"QED\0".to_vec(), 3);
    // The first byte of the footer's version, and that of its type of disk.
    let (version, kind) = (spoilt(footer(), 12), spoilt(footer(), 60));
    let cases: Vec<(u64, Vec<u8>, Request, &str)> = vec![
        (0, qed(), Request::Zero(3, 1), "qed"),
        (0, qed(), Request::Discard(3, 1), "qed"),
        (0, qed(), Request::Zero(3, 60_000), "qed"),
        (0, spoilt(b"\xbe\xba\xfe\xca\0\0\0\0".to_vec(), 6), Request::Zero(5, 2), "vmdk"),
        (end - 512, version.clone(), Request::Zero(end - 512 + 12, 1), "vpc"),
        (end - 512, version, Request::Discard(end - 512 + 12, 1), "vpc"),
        (end - 512, kind.clone(), Request::Zero(end - 452, 1), "vpc"),
        (end - 512, kind, Request::Zero(end - 452, 452), "raw"),
        (0, qed(), Request::Zero(0, 4), "raw"),
        (0, qed(), Request::Discard(0, end), "raw"),
        // In the middle of the disk a footer is data, until the disk ends there.
        (8192, footer(), Request::Resize(8192 + 512), "vpc"),
        (8192, footer(), Request::Resize(8192 + 511), "vpc"),
        (8192, footer(), Request::Resize(8192 + 1024), "vpc"),
        // The rest of the last sector reads as zeroes, as the rest of the footer does.
        (8192, footer(), Request::Resize(8192 + 256), "vpc"),
        (8192, footer(), Request::Resize(8192 + 40), "raw"),
        (8192, footer(), Request::Resize(8192 + 4096), "raw"),
        // The start of a footer that a larger disk would have all of.
        (end - 256, footer()[..256].to_vec(), Request::Resize(end + 512), "vpc"),
    ];
    for (offset, bytes, request, format) in cases {
        let case = format!("{request:?} over {:?}", bytes.escape_ascii().to_string());
        let mut disk = vec![0xaa; SIZE];
        disk[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
        std::fs::write(&path, &disk).unwrap();
        let node = guessed(&path);
        let result = rt::block_on(request.of(&node));
        rt::block_on(node.close()).unwrap();
        assert_eq!(found(&path), "raw", "{case}");
        if format == "raw" {
            result.unwrap_or_else(|error| panic!("{case}: {error}"));
            continue;
        }
        let error = result.expect_err(&case);
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{case}: {error}");
        assert!(error.to_string().contains(format), "{case}: {error}");
        assert!(std::fs::read(&path).unwrap() == disk, "{case}: the disk has changed");
    }
}

/// The marks in pieces, all at once. Some order of them is as if they had come one by one, so the last one is refused.
#[test]
fn racing_requests_complete_no_mark() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![0; SIZE]).unwrap();
    let node = guessed(&path);
    let tail = SIZE as u64 - 512;
    let write = |offset: u64, bytes: &[u8]| Request::Write(offset, bytes.to_vec());
    let marks: [(&str, Vec<Request>, Vec<Request>); 4] = [
        ("qcow2", vec![write(0, &[0; 16])], vec![write(0, b"QF"), write(2, b"I\xfb")]),
        ("qed", vec![write(0, &[1; 16])], vec![write(0, b"QE"), write(2, b"D"), Request::Zero(3, 1)]),
        ("qed", vec![write(0, &[1; 16])], vec![write(0, b"QED"), Request::Discard(3, 13)]),
        (
            "vpc",
            vec![write(tail, &[1; 512]), write(tail + 60, &[0, 0, 0, 2])],
            vec![
                write(tail, b"cone"),
                write(tail + 4, b"ctix"),
                write(tail + 12, &[0, 1]),
                Request::Zero(tail + 14, 2),
            ],
        ),
    ];
    let mut state = std::env::var("COWSHED_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u64);
    let mut below = |end: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % end
    };
    for round in 0..400 {
        let (format, before, pieces) = &marks[below(marks.len())];
        for request in before {
            rt::block_on(request.of(&node)).unwrap();
        }
        let mut requests = pieces.clone();
        // Others that complete nothing, at the ends and between them.
        for _ in 0..below(4) {
            requests.push(write([600, 1500, 30_000, tail - 100][below(4)], &[below(256) as u8; 8]));
        }
        for at in (1..requests.len()).rev() {
            requests.swap(at, below(at + 1));
        }
        let threads = 1 + below(2);
        let results: Vec<(Request, Result<()>)> = std::thread::scope(|scope| {
            let parts = requests.chunks(requests.len().div_ceil(threads));
            let running: Vec<_> = parts
                .map(|part| {
                    let node = Arc::clone(&node);
                    scope.spawn(move || {
                        rt::block_on(join_all(part.iter().map(|one| async { (one.clone(), one.of(&node).await) })))
                    })
                })
                .collect();
            running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(found(&path), "raw", "round {round}: {format} by {results:?}");
        let refused: Vec<_> = results.iter().filter(|(_, result)| result.is_err()).collect();
        let kinds =
            refused.iter().all(|(_, result)| result.as_ref().unwrap_err().kind() == ErrorKind::PermissionDenied);
        assert!(refused.len() == 1 && kinds, "round {round}: {format} by {results:?}");
        // Accepted writes are there.
        let disk = std::fs::read(&path).unwrap();
        for (request, _) in results.iter().filter(|(_, result)| result.is_ok()) {
            let (offset, bytes) = match request {
                Request::Write(offset, bytes) if *offset < 512 || *offset >= tail => (*offset, bytes.clone()),
                Request::Zero(offset, len) | Request::Discard(offset, len) => (*offset, vec![0; *len as usize]),
                _ => continue,
            };
            assert_eq!(disk[offset as usize..][..bytes.len()], bytes, "round {round}: {format} by {results:?}");
        }
    }
    rt::block_on(node.close()).unwrap();
}
