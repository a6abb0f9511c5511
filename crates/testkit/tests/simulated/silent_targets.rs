// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Targets and bases that fall silent: requests that end, that go on, and that are refused meanwhile.

use cowshed_create::{CreateRequest, prepare_sized};
use cowshed_image::graph::{AttachRequest, Graph, below_filters};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{Node, Preallocation};
use cowshed_jobs::JobHandle;
use cowshed_jobs::commit::merge::{Merge, MergeRequest};
use cowshed_jobs::faults::Strict;
use cowshed_jobs::mirror::{Mirror, MirrorOptions};
use cowshed_jobs::stream::{StreamJob, StreamRequest};
use cowshed_simulator::{Config, Effect, Fault, OpKind, PageMap, Snapshot, World};
use cowshed_storage::{IoBuf, PermissionSet, Permissions, rt};
use cowshed_types::{ErrorKind, Result};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 1 << 20;
const SILENCE: Duration = Duration::from_secs(20);

fn world() -> World {
    let disks = [("disk.raw", 1u8), ("target.raw", 0)];
    let files: Snapshot =
        disks.map(|(name, byte)| (name.to_owned(), PageMap::from_bytes(&[byte; SIZE as usize]))).into_iter().collect();
    World::with_files(Config::new(1), &files)
}

fn silent(kind: OpKind, file: &str) -> Fault {
    Fault::new(Effect::Delay(SILENCE)).kind(kind).file(file)
}

async fn add(graph: &Arc<Graph>, options: &str) -> Result<Arc<Node>> {
    graph.add(BlockdevOptions::from_keyval(options)?).await
}

async fn create(filename: &str, backing_file: Option<&str>) -> Result<()> {
    let request = CreateRequest {
        filename: filename.to_owned(),
        format: "qcow2".to_owned(),
        backing_file: backing_file.map(str::to_owned),
        backing_format: backing_file.map(|_| "qcow2".to_owned()),
        ..CreateRequest::default()
    };
    prepare_sized(&request, SIZE).await?.run().await.map(drop)
}

/// A chain of three layers, the highest node first.
async fn chain(graph: &Arc<Graph>) -> Result<[Arc<Node>; 3]> {
    create("base.qcow2", None).await?;
    create("middle.qcow2", Some("base.qcow2")).await?;
    create("top.qcow2", Some("middle.qcow2")).await?;
    let base = add(graph, "driver=qcow2,node-name=base,file.filename=base.qcow2").await?;
    let middle = add(graph, "driver=qcow2,node-name=middle,file.filename=middle.qcow2,backing=base").await?;
    let top = add(graph, "driver=qcow2,node-name=top,file.filename=top.qcow2,backing=middle").await?;
    Ok([top, middle, base])
}

/// The request of a user that changes the size.
fn resizing() -> AttachRequest {
    let permissions = Permissions { used: PermissionSet::RESIZE, shared: PermissionSet::ALL };
    AttachRequest::job("resize", permissions)
}

async fn keeps_its_size(graph: &Arc<Graph>, node: &Arc<Node>) -> Result<()> {
    match graph.attach(node, resizing()).await {
        Ok(_) => panic!("the size of '{}' may change under a job", node.name()),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Busy, "{error}"),
    }
    Ok(())
}

async fn may_be_resized(graph: &Arc<Graph>, node: &Arc<Node>, size: u64) -> Result<()> {
    let right = graph.attach(node, resizing()).await?;
    right.queue().resize(size, Preallocation::Off).await?;
    right.detach().await
}

/// The flush before the drain is dropped when the job is cancelled: the end flushes the base too, once it answers.
#[test]
fn cancelled_commit_ends_with_its_silent_base() {
    let world = world();
    let ended = world.clone().run(async move {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let [top, _middle, base] = chain(&graph).await?;
        let guest = graph.attach(&top, AttachRequest::export("guest", true)).await?;
        guest.queue().write(0, IoBuf::copy_from(&[7; 4096])).await.0?;
        let mirror = Rc::new(Mirror::commit(&graph, "c", (&top, &base), MirrorOptions::default()).await?);
        let job = JobHandle::new();
        mirror.catch_up(&job, &Strict).await?;
        world.add_fault(silent(OpKind::Sync, "base.qcow2"));
        let (finishing, finished_job) = (Rc::clone(&mirror), job.clone());
        let finish = rt::spawn(async move { finishing.finish(true, &finished_job).await });
        // The job waits for the silent target by then.
        rt::sleep(SILENCE / 4).await;
        job.cancel();
        guest.queue().write(8192, IoBuf::copy_from(&[8; 4096])).await.0?;
        let ended = rt::within(SILENCE * 3, finish).await;
        guest.detach().await?;
        graph.close_all().await?;
        Ok(ended)
    });
    let ended = ended.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    let kind = ended.expect("the job ends once the base answers").map_err(|error| error.kind());
    assert_eq!(kind, Err(ErrorKind::Cancelled));
}

/// A copy that is under way keeps the filter's closing waiting. The disk takes other users meanwhile.
#[test]
fn filter_leaves_a_silent_target_without_holding_changes() {
    let world = world();
    let seen = world.clone().run(async move {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
        let filter = "driver=copy-before-write,node-name=filter,file=source,target=target,cbw-timeout=1";
        let filter = add(&graph, filter).await?;
        world.add_fault(silent(OpKind::Write, "target.raw"));
        let guest = graph.attach(&filter, AttachRequest::export("guest", true)).await?;
        let late = guest.queue().write(0, IoBuf::copy_from(&[7; 4096])).await.0;
        assert!(late.is_err(), "the target has not answered");
        guest.detach().await?;
        let (deleting, name) = (Arc::clone(&graph), filter.name().to_owned());
        drop(filter);
        let deleted = rt::spawn(async move { deleting.delete(&name).await });
        // The removal waits for the silent target by then.
        rt::sleep(Duration::from_secs(1)).await;
        let began = rt::now();
        let other = graph.attach(&source, AttachRequest::export("other", false)).await?;
        let waited = rt::now() - began;
        other.detach().await?;
        deleted.await?;
        graph.close_all().await?;
        Ok(waited)
    });
    let waited = seen.unwrap_or_else(|error: cowshed_types::Error| panic!("{error}"));
    assert!(waited < Duration::from_secs(1), "a new user waited {waited:?} for the filter's target");
}

/// A size that changes under a copy makes it another disk than the source: cut and grown again it reads zeroes that
/// were never written.
#[test]
fn a_disk_keeps_its_size_while_a_job_copies_it() {
    let world = world();
    let seen = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let source = add(&graph, "driver=raw,node-name=source,file.filename=disk.raw").await?;
        let target = add(&graph, "driver=raw,node-name=target,file.filename=target.raw").await?;
        let mirror = Mirror::start(&graph, "m", (&source, &target), MirrorOptions::default()).await?;
        keeps_its_size(&graph, &source).await?;
        mirror.end().await?;
        may_be_resized(&graph, &source, 2 * SIZE).await?;
        graph.close_all().await
    });
    seen.unwrap_or_else(|error| panic!("{error}"));
}

/// Ranges behind the end of a layer read as zeroes; a longer base below has data there.
#[test]
fn an_overlay_keeps_its_size_while_a_layer_below_it_goes() {
    let world = world();
    let seen = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let [top, middle, base] = chain(&graph).await?;
        let request = MergeRequest {
            overlay: Arc::clone(&top),
            top: middle,
            base: Arc::clone(&base),
            backing_file: None,
            mask_protocol: false,
        };
        let merge = Merge::start(&graph, "c", request).await?;
        keeps_its_size(&graph, &top).await?;
        merge.copy(&JobHandle::new(), &Strict).await?;
        merge.finish().await?;
        may_be_resized(&graph, &top, 2 * SIZE).await?;
        let request = StreamRequest {
            node: below_filters(&top),
            base: None,
            backing_file: None,
            mask_protocol: false,
            filter_name: "filter".to_owned(),
        };
        let stream = StreamJob::start(&graph, "s", request).await?;
        keeps_its_size(&graph, &top).await?;
        stream.copy(&JobHandle::new(), &Strict).await?;
        stream.finish().await?;
        may_be_resized(&graph, &top, 3 * SIZE).await?;
        graph.close_all().await
    });
    seen.unwrap_or_else(|error| panic!("{error}"));
}

/// The users of each node, and whether it takes writes.
fn rights(graph: &Graph) -> Vec<String> {
    let snapshot = graph.snapshot();
    let right = |node: Arc<Node>| {
        let mut users = node.user_names();
        users.sort();
        format!("{} {users:?} {}", node.name(), node.is_read_only())
    };
    let mut rights: Vec<String> = snapshot.nodes().map(right).collect();
    rights.sort();
    rights
}

/// Each step of its beginning is refused in turn: by a name that is taken.
#[test]
fn a_job_that_cannot_begin_gives_back_what_it_got() {
    let world = world();
    let seen = world.run(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let [top, middle, base] = chain(&graph).await?;
        for node in [&top, &middle, &base] {
            graph.set_read_only(node, true).await?;
        }
        let bystander = add(&graph, "driver=null-co,node-name=bystander,size=1M").await?;
        let taken = async |name: &str| graph.attach(&bystander, AttachRequest::export(name, false)).await;
        let merge = || MergeRequest {
            overlay: Arc::clone(&top),
            top: Arc::clone(&middle),
            base: Arc::clone(&base),
            backing_file: None,
            mask_protocol: false,
        };
        let stream = || StreamRequest {
            node: below_filters(&top),
            base: Some(Arc::clone(&base)),
            backing_file: None,
            mask_protocol: false,
            filter_name: "filter".to_owned(),
        };
        let before = rights(&graph);
        for name in ["c-source", "c-overlay", "c#middle", "c-target"] {
            let holder = taken(name).await?;
            assert!(Merge::start(&graph, "c", merge()).await.is_err(), "{name}");
            holder.detach().await?;
            assert_eq!(rights(&graph), before, "{name}");
        }
        for name in ["s#middle", "s-stream"] {
            let holder = taken(name).await?;
            assert!(StreamJob::start(&graph, "s", stream()).await.is_err(), "{name}");
            holder.detach().await?;
            assert_eq!(rights(&graph), before, "{name}");
        }
        let filter = add(&graph, "driver=null-co,node-name=filter,size=1M").await?;
        assert!(StreamJob::start(&graph, "s", stream()).await.is_err());
        graph.delete(filter.name()).await?;
        assert_eq!(rights(&graph), before);
        // And those that can begin give all back in the end.
        Merge::start(&graph, "c", merge()).await?.end().await?;
        assert_eq!(rights(&graph), before);
        StreamJob::start(&graph, "s", stream()).await?.end().await?;
        assert_eq!(rights(&graph), before);
        graph.close_all().await
    });
    seen.unwrap_or_else(|error| panic!("{error}"));
}
