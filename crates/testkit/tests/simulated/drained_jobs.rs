// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Drains beside jobs that run, and users that come while a drain holds a disk.

use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::Node;
use cowshed_image::graph::{AttachRequest, Graph, below_filters};
use cowshed_image::options::BlockdevOptions;
use cowshed_jobs::JobHandle;
use cowshed_jobs::backup::{Backup, BackupRequest};
use cowshed_jobs::faults::Strict;
use cowshed_jobs::mirror::{Mirror, MirrorOptions, Sync};
use cowshed_jobs::stream::{StreamJob, StreamRequest};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Result;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 16 << 20;
const PIECE: Duration = Duration::from_millis(100);

/// A machine with a disk full of ones, and an empty target that takes its time.
fn world() -> World {
    let disks = [("disk.raw", 1u8), ("target.raw", 0)];
    let files: Snapshot = disks
        .map(|(name, byte)| (name.to_owned(), PageMap::from_bytes(&vec![byte; SIZE as usize])))
        .into_iter()
        .collect();
    World::with_files(Config::new(1), &files)
}

fn slow(kind: OpKind, file: &str) -> Fault {
    Fault::new(Effect::Delay(PIECE)).kind(kind).file(file).times(u64::MAX)
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options)?).await
}

/// Drains `node` while a job copies: the drain ends before the job, and nothing is copied under it.
async fn drain_beside(graph: &Arc<Graph>, node: &Arc<Node>, job: &JobHandle) -> (u64, u64) {
    // The job is in the midst of a piece.
    rt::sleep(PIECE / 2).await;
    let drained = graph.drain(&[node]).await;
    let at = job.progress().offset;
    // Nothing is copied, however long this takes.
    rt::sleep(PIECE * 10).await;
    let later = job.progress().offset;
    drop(drained);
    (at, later)
}

#[test]
fn a_drain_waits_for_a_piece_of_a_backup_alone() {
    let world = world();
    world.add_fault(slow(OpKind::Write, "target.raw"));
    let seen = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        let target = add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
        let request = BackupRequest {
            source: Arc::clone(&source),
            target,
            sync: Sync::Full,
            compress: false,
            discard_source: false,
            breaks_writes: true,
            filter_name: "filter".to_owned(),
            bitmap: None,
        };
        let backup = Rc::new(Backup::start(&graph, "b", request).await?);
        let (job, copying) = (JobHandle::new(), Rc::clone(&backup));
        let handle = job.clone();
        let copy = rt::spawn(async move { copying.copy(&handle, &Strict).await });
        let seen = drain_beside(&graph, &source, &job).await;
        copy.await?;
        backup.finish().await?;
        graph.close_all().await?;
        Ok(seen)
    });
    let (at, later) = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(at < SIZE, "the drain waited for the job");
    assert_eq!(at, later, "the job copied under the drain");
}

#[test]
fn a_drain_waits_for_a_piece_of_a_stream_alone() {
    let world = world();
    let seen = world.clone().run(async move {
        let create = CreateRequest {
            filename: "top.qcow2".to_owned(),
            format: "qcow2".to_owned(),
            backing_file: Some("disk.raw".to_owned()),
            backing_format: Some("raw".to_owned()),
            ..CreateRequest::default()
        };
        prepare_sized(&create, SIZE).await?.run().await?;
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let top = add(&graph, "driver=qcow2,node-name=top,file.filename=top.qcow2").await?;
        let request = StreamRequest {
            node: below_filters(&top),
            base: None,
            backing_file: None,
            mask_protocol: false,
            filter_name: "filter".to_owned(),
        };
        let stream = Rc::new(StreamJob::start(&graph, "s", request).await?);
        world.add_fault(slow(OpKind::Write, "top.qcow2"));
        let (job, copying) = (JobHandle::new(), Rc::clone(&stream));
        let handle = job.clone();
        let copy = rt::spawn(async move { copying.copy(&handle, &Strict).await });
        let seen = drain_beside(&graph, &top, &job).await;
        copy.await?;
        stream.finish().await?;
        graph.close_all().await?;
        Ok(seen)
    });
    let (at, later) = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(at < SIZE, "the drain waited for the job");
    assert_eq!(at, later, "the job copied under the drain");
}

/// A client that comes while a mirror ends writes to the target, not to the disk that is left.
#[test]
fn a_client_that_comes_during_a_pivot_loses_no_write() {
    let world = world();
    let seen = world.clone().run(async move {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        let target = add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
        let mirror = Mirror::start(&graph, "m", (&source, &target), MirrorOptions::default()).await?;
        mirror.catch_up(&JobHandle::new(), &Strict).await?;
        // The first flush comes before the drain.
        world.add_fault(slow(OpKind::Sync, "target.raw").skip(1));
        let finish = rt::spawn(async move { Rc::new(mirror).finish(true, &JobHandle::new()).await });
        rt::sleep(PIECE / 2).await;
        let guest = graph.attach(&source, AttachRequest::export("guest", true)).await?;
        guest.queue().write(0, IoBuf::copy_from(&[7; 4096])).await.0?;
        finish.await?;
        let (result, seen) = guest.queue().read(0, IoBuf::zeroed(4096)).await;
        result?;
        guest.detach().await?;
        graph.close_all().await?;
        Ok(seen.to_vec())
    });
    let seen = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(seen.iter().all(|byte| *byte == 7), "the write is lost");
}
