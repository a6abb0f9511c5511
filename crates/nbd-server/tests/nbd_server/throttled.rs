// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests that wait for their limits when their client goes: begun ones are carried out, others are left.

use crate::served;

use crate::served::wire::Wire;
use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{AttachRequest, Attachment, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_image::stats::IoKind;
use cowshed_nbd_proto::flags::CommandFlags;
use cowshed_nbd_proto::{Command, ReplyStyle};
use cowshed_nbd_server::{Export, Server, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use cowshed_testkit::waiting::await_that;
use std::path::PathBuf;
use std::sync::Arc;

const NONE: CommandFlags = CommandFlags(0);
const REQUESTS: u64 = 100;

struct Fixture {
    server: Server<Arc<Attachment>>,
    attachment: Arc<Attachment>,
    graph: Arc<Graph>,
    dir: tempfile::TempDir,
}

impl Fixture {
    /// Serves the node `disk` of these options, in which `FILE` is an empty file; the group `g` has these limits.
    fn start(options: &str, filter: Option<&str>, iops: u64) -> Fixture {
        let dir = cowshed_testkit::qemu::temp_dir();
        let file = dir.path().join("disk.raw");
        std::fs::write(&file, vec![0; 1 << 20]).expect("write");
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let mut limits = Limits::new();
        limits.set("iops-total", iops).expect("a limit");
        graph.throttle_groups().create("g", limits).expect("a group");
        let parse = |text: &str| BlockdevOptions::from_keyval(&text.replace("FILE", file.to_str().unwrap())).unwrap();
        let attachment = rt::block_on(async {
            let disk = graph.add(parse(options)).await.expect("a node");
            let attachment = graph.attach(&disk, AttachRequest::export("e", true)).await.expect("attach");
            if let Some(filter) = filter {
                graph.insert_filter(&disk, parse(filter)).await.expect("a filter");
            }
            attachment
        });
        let server = Server::new(ServerConfig::default()).expect("server");
        let mut export = Export::new("", Arc::clone(&attachment));
        export.writable = true;
        server.add_export(export).expect("export");
        let fixture = Fixture { server, attachment, graph, dir };
        fixture.server.listen(&SocketAddress::Unix(fixture.socket().to_str().unwrap().into())).expect("listen");
        fixture
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn waiting(&self, node: &str) -> u64 {
        let node = self.graph.find(node).expect("the filter");
        node.throttle().expect("a throttle filter").waits().waiting
    }

    /// A client leaves so many writes behind that all but the first wait.
    fn leave_writes(&self, node: &str) {
        let (mut wire, _) = Wire::enter(&self.socket(), ReplyStyle::Simple, "", &[]);
        for number in 0..REQUESTS {
            wire.request(Command::Write, NONE, number * 4096, 4096, &[7; 4096]);
        }
        await_that("the writes wait", || self.waiting(node) >= REQUESTS - 20);
    }

    fn stop(self) -> Vec<u8> {
        rt::block_on(async {
            self.server.stop(served::GRACE).await.expect("stop");
            self.attachment.detach().await.expect("detach");
        });
        std::fs::read(self.dir.path().join("disk.raw")).expect("read")
    }
}

fn written(content: &[u8]) -> u64 {
    content.chunks(4096).filter(|block| block[0] == 7).count() as u64
}

#[test]
fn throttled_request_of_a_gone_client_never_begins() {
    let filter = "driver=throttle,node-name=t,throttle-group=g";
    let fixture = Fixture::start("driver=file,node-name=disk,filename=FILE", Some(filter), 1);
    fixture.leave_writes("t");
    // At one a second, the requests would go on for more than a minute.
    rt::block_on(fixture.server.wait_until_idle());
    assert_eq!(fixture.waiting("t"), 0);
    let stats = fixture.attachment.statistics();
    assert_eq!(stats.kind(IoKind::Write).failed, 0, "a request that didn't begin hasn't failed");
    let done = stats.kind(IoKind::Write).operations;
    assert!(done < REQUESTS / 2, "{done} writes were begun");
    assert_eq!(written(&fixture.stop()), done);
}

#[test]
fn what_a_format_has_begun_is_not_cancelled_below_it() {
    let options = "driver=raw,node-name=disk,file.driver=throttle,file.node-name=t,file.throttle-group=g,\
                   file.file.driver=file,file.file.filename=FILE";
    let fixture = Fixture::start(options, None, 40);
    fixture.leave_writes("t");
    rt::block_on(fixture.server.wait_until_idle());
    let stats = fixture.attachment.statistics();
    assert_eq!(stats.kind(IoKind::Write).failed, 0);
    assert_eq!(stats.kind(IoKind::Write).operations, REQUESTS, "all were in flight");
    assert_eq!(written(&fixture.stop()), REQUESTS);
}
