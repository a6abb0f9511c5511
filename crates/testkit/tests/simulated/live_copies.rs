// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The promises of mirrors, backups, limits and detaching, in one small case each, on the simulated disk.

use cowshed_image::Node;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::formats::qcow2::BitmapChange;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_jobs::JobHandle;
use cowshed_jobs::backup::{Backup, BackupBitmap, BackupRequest, BitmapMode};
use cowshed_jobs::faults::Strict;
use cowshed_jobs::mirror::{Mirror, MirrorOptions, Sync};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Errno, Result};
use serde_json::json;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 1 << 20;
const PART: u64 = 64 << 10;

/// A machine with a disk full of ones, and an empty target.
fn world() -> World {
    let disks = [("disk.raw", 1u8), ("target.raw", 0)];
    let files: Snapshot =
        disks.map(|(name, byte)| (name.to_owned(), PageMap::from_bytes(&[byte; SIZE as usize]))).into_iter().collect();
    World::with_files(Config::new(1), &files)
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options)?).await
}

/// The disk, the target, and a guest of the disk.
async fn start() -> Result<(Arc<Graph>, Arc<Node>, Arc<Node>, Arc<Attachment>)> {
    let graph = Graph::new(&cowshed_image::DRIVERS);
    let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
    let target = add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
    let guest = graph.attach(&source, AttachRequest::export("guest", true)).await?;
    Ok((graph, source, target, guest))
}

async fn content(node: &Arc<Node>) -> Result<Vec<u8>> {
    let (result, buf) = node.read(0, IoBuf::zeroed(SIZE as usize)).await;
    result.map(|()| buf.to_vec())
}

#[test]
fn mirror_copies_the_rest_of_a_part_written() {
    let same = world().run(async {
        let (graph, source, target, guest) = start().await?;
        let options = MirrorOptions { write_blocking: Some("filter".to_owned()), ..MirrorOptions::default() };
        let mirror = Mirror::start(&graph, "m", (&source, &target), options).await?;
        // Before anything is copied: neither the head of this part nor the tail of that one is on the target.
        guest.queue().write(PART / 2, IoBuf::copy_from(&[7; PART as usize / 2])).await.0?;
        guest.queue().write(4 * PART, IoBuf::copy_from(&[8; 512])).await.0?;
        mirror.catch_up(&JobHandle::new(), &Strict).await?;
        Rc::new(mirror).finish(false, &JobHandle::new()).await?;
        let same = content(&source).await? == content(&target).await?;
        guest.detach().await?;
        graph.close_all().await?;
        Ok(same)
    });
    assert!(same.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}")), "the target is no copy");
}

#[test]
fn dropped_copy_of_a_piece_is_repeated() {
    for write_blocking in [None, Some("filter".to_owned())] {
        let world = world();
        let slow = Effect::Delay(Duration::from_millis(100));
        world.add_fault(Fault::new(slow).kind(OpKind::Read).file("disk.raw"));
        let same = world.run(async {
            let (graph, source, target, guest) = start().await?;
            let options = MirrorOptions { write_blocking, ..MirrorOptions::default() };
            let mirror = Mirror::start(&graph, "m", (&source, &target), options).await?;
            let job = JobHandle::new();
            {
                let copying = Box::pin(mirror.catch_up(&job, &Strict));
                // Simulated time, in the midst of the slow copy.
                let later = Box::pin(rt::sleep(Duration::from_millis(10)));
                let first = futures_util::future::select(copying, later).await;
                assert!(matches!(first, futures_util::future::Either::Right(_)), "the copy was too fast");
            }
            mirror.catch_up(&job, &Strict).await?;
            Rc::new(mirror).finish(false, &JobHandle::new()).await?;
            let same = content(&source).await? == content(&target).await?;
            guest.detach().await?;
            graph.close_all().await?;
            Ok(same)
        });
        assert!(same.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}")), "the target is no copy");
    }
}

/// The job looks at the map of the disk before it knows which parts the target lacks.
#[test]
fn early_writes_leave_their_parts_to_the_mirror() {
    for (sync, target_is_zero) in [(Sync::Full, true), (Sync::Top, false), (Sync::Full, false)] {
        let world = world();
        let slow = |kind, file, millis| {
            world.add_fault(Fault::new(Effect::Delay(Duration::from_millis(millis))).kind(kind).file(file));
        };
        slow(OpKind::NextData, "disk.raw", 50);
        slow(OpKind::Write, "target.raw", 100);
        let same = world.run(async {
            let (graph, source, target, guest) = start().await?;
            let queue = guest.queue();
            let writer = rt::spawn(async move {
                // The write comes while the mirror asks for data.
                rt::sleep(Duration::from_millis(10)).await;
                queue.write(PART / 2, IoBuf::copy_from(&[7; 512])).await.0
            });
            let write_blocking = Some("filter".to_owned());
            let options = MirrorOptions { sync, target_is_zero, write_blocking, ..MirrorOptions::default() };
            let mirror = Mirror::start(&graph, "m", (&source, &target), options).await?;
            writer.await?;
            mirror.catch_up(&JobHandle::new(), &Strict).await?;
            Rc::new(mirror).finish(false, &JobHandle::new()).await?;
            let same = content(&source).await? == content(&target).await?;
            guest.detach().await?;
            graph.close_all().await?;
            Ok(same)
        });
        let same = same.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
        assert!(same, "{sync:?}, zero: {target_is_zero}: the target is no copy");
    }
}

#[test]
fn incremental_backup_has_whole_dirty_parts() {
    let copied = world().run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        let target = add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
        let change = BitmapChange::Add { name: "b".into(), granularity_bytes: Some(4096), enabled: true };
        source.change_bitmap(&change, false).await?;
        // In the middle of a part, and over a border of two.
        for at in [PART / 2, 4 * PART - 4096, 4 * PART] {
            source.write(at, IoBuf::copy_from(&[7; 4096])).await.0?;
        }
        let request = BackupRequest {
            source: Arc::clone(&source),
            target: Arc::clone(&target),
            sync: Sync::Full,
            compress: false,
            discard_source: false,
            breaks_writes: true,
            filter_name: "filter".to_owned(),
            bitmap: Some(BackupBitmap { name: "b".to_owned(), mode: BitmapMode::Never, selects: true }),
        };
        let backup = Backup::start(&graph, "b", request).await?;
        backup.copy(&JobHandle::new(), &Strict).await?;
        backup.finish().await?;
        let (ours, theirs) = (content(&source).await?, content(&target).await?);
        let parts = ours.chunks(PART as usize).zip(theirs.chunks(PART as usize)).map(|(ours, theirs)| ours == theirs);
        let copied: Vec<usize> = parts.enumerate().filter(|(_, same)| *same).map(|(part, _)| part).collect();
        graph.close_all().await?;
        Ok(copied)
    });
    let copied = copied.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert_eq!(copied, [0, 3, 4]);
}

#[test]
fn a_backup_discards_behind_the_readers_of_the_old_state() {
    let world = world();
    let slow = Fault::new(Effect::Delay(Duration::from_secs(5))).kind(OpKind::Read).file("disk.raw");
    let seen = world.clone().run(async move {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,discard=unmap,node-name=source,file.filename=disk.raw,file.discard=unmap");
        let (source, target) =
            (source.await?, add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?);
        let request = BackupRequest {
            source: Arc::clone(&source),
            target,
            sync: Sync::Full,
            compress: false,
            discard_source: true,
            breaks_writes: true,
            filter_name: "filter".to_owned(),
            bitmap: None,
        };
        let backup = Backup::start(&graph, "b", request).await?;
        let past = add(&graph, "driver=snapshot-access,node-name=past,file=filter").await?;
        let reader = graph.attach(&past, AttachRequest::export("reader", false)).await?;
        world.add_fault(slow);
        let queue = reader.queue();
        let read = rt::spawn(async move { queue.read(0, IoBuf::zeroed(PART as usize)).await });
        // The slow read has begun by then.
        rt::sleep(Duration::from_millis(100)).await;
        backup.copy(&JobHandle::new(), &Strict).await?;
        let (result, seen) = read.await;
        result?;
        let left = content(&source).await?;
        reader.detach().await?;
        graph.delete("past").await?;
        backup.finish().await?;
        graph.close_all().await?;
        Ok((seen.to_vec(), left))
    });
    let (seen, left) = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(seen.iter().all(|byte| *byte == 1), "the reader saw the discard");
    assert!(left.iter().all(|byte| *byte == 0), "nothing was discarded");
}

#[test]
fn a_detach_flushes_and_tells_of_a_flush_that_fails() {
    let world = world();
    world.add_fault(Fault::new(Effect::Fail(Errno::EIO)).kind(OpKind::Sync));
    let detached = world.run(async {
        let (graph, _source, _target, guest) = start().await?;
        guest.queue().write(0, IoBuf::copy_from(&[7; 512])).await.0?;
        let detached = guest.detach().await;
        // It has been reported.
        drop(graph.close_all().await);
        Ok(detached)
    });
    let detached = detached.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert_eq!(detached.map_err(|error| error.errno()), Err(Errno::EIO));
}

#[test]
fn a_drain_lets_throttled_requests_go_at_once() {
    let took = world().run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let limits = json!({"iops-total": 1});
        let limits = Limits::from_json(limits.as_object().expect("an object"))?;
        graph.throttle_groups().create("g", limits)?;
        add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        let top = add(&graph, "driver=throttle,node-name=top,throttle-group=g,file=source").await?;
        let guest = graph.attach(&top, AttachRequest::export("guest", true)).await?;
        let tasks: Vec<_> = (0..20)
            .map(|number| {
                let queue = guest.queue();
                rt::spawn(async move { queue.write(number * 512, IoBuf::copy_from(&[7; 512])).await.0 })
            })
            .collect();
        // The writes wait for the limit by then.
        rt::sleep(Duration::from_millis(10)).await;
        let before = rt::now();
        drop(graph.drain(&[&top]).await);
        let took = rt::now() - before;
        for task in tasks {
            task.await?;
        }
        guest.detach().await?;
        graph.close_all().await?;
        Ok(took)
    });
    let took = took.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(took < Duration::from_secs(1), "{took:?}");
}
