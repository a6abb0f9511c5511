// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Each step of a start fails in turn. Nodes, rights and bitmaps are as they were before, and the backup can be started afterwards.

use super::*;
use cowshed_image::node::BitmapChange;
use cowshed_storage::IoBuf;
use cowshed_testbase::steps::let_pass;
use std::path::Path;

const SIZE: u64 = 1 << 20;

/// A disk `n` that an export writes to, with a bitmap, and a target `t`.
struct Fixture {
    graph: Arc<Graph>,
    export: Arc<Attachment>,
}

impl Fixture {
    async fn new(folder: &Path) -> Fixture {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        for name in ["n", "t"] {
            let path = folder.join(name);
            std::fs::File::create(&path).expect("a file").set_len(SIZE).expect("a length");
            let options = format!("driver=raw,node-name={name},discard=unmap,file.filename={}", path.display());
            graph.add(BlockdevOptions::from_keyval(&options).expect("options")).await.expect("it opens");
        }
        let node = graph.find("n").expect("the disk");
        let export = graph.attach(&node, AttachRequest::export("e", true)).await.expect("an export");
        let bitmap = BitmapChange::Add { name: "b".to_owned(), granularity_bytes: None, enabled: true };
        node.change_bitmap(&bitmap, false).await.expect("a bitmap");
        Fixture { graph, export }
    }

    fn request(&self) -> BackupRequest {
        let node = |name: &str| self.graph.find(name).expect("a node");
        BackupRequest {
            source: node("n"),
            target: node("t"),
            sync: Sync::Full,
            compress: false,
            discard_source: true,
            breaks_writes: false,
            filter_name: "f".to_owned(),
            bitmap: Some(BackupBitmap { name: "b".to_owned(), mode: BitmapMode::OnSuccess, selects: true }),
        }
    }

    /// All that a start may change.
    async fn state(&self) -> Vec<String> {
        let mut state = Vec::new();
        for user in self.graph.attachments() {
            state.push(format!("{} at {}", user.name(), user.node().name()));
        }
        for node in self.graph.snapshot().nodes() {
            let mut users = node.user_names();
            users.sort();
            let children: Vec<String> = node.children().iter().map(|child| child.node.name().to_owned()).collect();
            let locks = node.file().map(|file| file.permissions());
            let bitmaps = node.bitmaps().await.expect("its bitmaps");
            let rights = (node.has_writer(), node.is_read_only());
            state.push(format!("{}: {users:?} {children:?} {locks:?} {rights:?} {bitmaps:?}", node.name()));
        }
        state.sort();
        state
    }

    async fn write(&self, byte: u8) {
        let data = IoBuf::copy_from(&[byte; 4096]);
        self.export.queue().write(0, data).await.0.expect("a write");
    }

    async fn close(self) {
        self.export.detach().await.expect("a good end");
        self.graph.close_all().await.expect("a good close");
    }
}

#[test]
fn a_start_that_fails_leaves_the_graph_as_it_was() {
    let folder = cowshed_testbase::temp_dir();
    let mut fails = 0;
    let start = |fixture: &Fixture| {
        let (graph, request) = (Arc::clone(&fixture.graph), fixture.request());
        async move { Backup::start(&graph, "j", request).await }
    };
    let succeeds = |fails: usize| {
        rt::block_on(async {
            let fixture = Fixture::new(folder.path()).await;
            fixture.write(7).await;
            let before = fixture.state().await;
            let_pass(Some(fails));
            let started = start(&fixture).await;
            let_pass(None);
            let is_done = started.is_ok();
            let backup = match started {
                Ok(backup) => backup,
                Err(error) => {
                    assert!(error.to_string().contains("this step fails"), "step {fails}: {error}");
                    assert_eq!(fixture.state().await, before, "step {fails}");
                    // Requests and a second start find nothing of the first.
                    fixture.write(7).await;
                    let again = start(&fixture).await;
                    again.unwrap_or_else(|error| panic!("after a failure of step {fails}: {error}"))
                }
            };
            assert_ne!(fixture.state().await, before, "a start does nothing");
            backup.undo().await.expect("it is taken back");
            drop(backup);
            assert_eq!(fixture.state().await, before, "taken back");
            fixture.write(7).await;
            fixture.close().await;
            is_done
        })
    };
    while !succeeds(fails) {
        fails += 1;
        assert!(fails < 100, "a start has too many steps");
    }
    assert_eq!(fails, 6, "a start has other steps: each can fail");
}
