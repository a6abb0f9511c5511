// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The limits of a policy for an image: its time, and the files that are opened on its word.

use cowshed_image::open::Policy;
use cowshed_image::{OpenRequest, ZeroFlags, open};
use cowshed_simulator::{Config, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::programs::run;
use cowshed_types::ErrorKind;
use std::time::Duration;

fn limited(name: &str, limit: Duration) -> OpenRequest {
    let policy = Policy { time_limit: Some(limit), ..Policy::untrusted() };
    OpenRequest::file(name).format("raw").writable(true).policy(policy)
}

/// On a simulated machine, whose clock only moves on demand.
#[test]
fn an_image_that_takes_too_long_is_let_go() {
    let world = World::new(Config::new(1));
    world.add_file("disk", Default::default());
    world.run(async {
        let limit = Duration::from_secs(60);
        let grown = open(limited("disk", limit)).await.unwrap();
        grown.resize(1 << 20, Default::default()).await.unwrap();
        grown.close().await.unwrap();

        let node = open(limited("disk", limit)).await.unwrap();
        node.write(0, IoBuf::copy_from(&[7; 512])).await.0.unwrap();
        // Simulated time, up to just before the limit and then beyond it.
        rt::sleep(limit - Duration::from_secs(1)).await;
        node.read(0, IoBuf::zeroed(512)).await.0.unwrap();
        rt::sleep(Duration::from_secs(1)).await;
        let late = [
            node.read(0, IoBuf::zeroed(512)).await.0.unwrap_err(),
            node.write(0, IoBuf::zeroed(512)).await.0.unwrap_err(),
            node.write_zeroes(0, 512, ZeroFlags::default()).await.unwrap_err(),
            node.block_status(0, 512, 1).await.unwrap_err(),
        ];
        for error in late {
            assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
            assert_eq!(error.to_string(), "disk: the time limit of 60 s for this image is used up");
        }
        // Data written before still reaches the disk.
        node.flush().await.unwrap();
        node.close().await.unwrap();

        let error = open(limited("disk", Duration::ZERO)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
    });
}

#[test]
fn who_only_asks_needs_no_data_file() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    run("qemu-img", folder.path(), &["create", "-q", "-f", "qcow2", "-o", "data_file=data", "disk.qcow2", "1M"]);
    std::fs::remove_file(folder.path().join("data")).unwrap();
    let name = folder.path().join("disk.qcow2").to_str().unwrap().to_owned();
    let request = || OpenRequest::file(&name).policy(Policy::untrusted());
    rt::block_on(async {
        let error = open(request()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        let node = open(request().no_io()).await.unwrap();
        assert_eq!((node.size(), node.children().len()), (1 << 20, 1));
        // Its data isn't made up, though.
        let error = node.read(0, IoBuf::zeroed(512)).await.0.unwrap_err();
        assert!(error.to_string().contains("without its data file"), "{error}");
        assert!(node.block_status(0, 512, 1).await.is_err());
        node.close().await.unwrap();
    });
}
