// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Each step of a change fails in turn. The graph is as it was before, and the change can be made afterwards.

use crate::graph::{AttachRequest, Attachment, Graph};
use crate::node::{
    Backing, BackingLink, BackingName, ChildRole, Driver, HeaderName, Link, LocalFuture, Node, StatusExtent, Transfer,
    Work, done,
};
use crate::open::{BackingReference, Draft, DriverLine, Drivers, FILTERS, Opened, Opener, PROTOCOLS};
use crate::options::{BlockdevOptions, DriverKind, DriverSchema, Key, KeyType};
use cowshed_storage::{IoBuf, rt};
use cowshed_testbase::steps::let_pass;
use cowshed_types::Result;
use std::future::{Future, ready};
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

static DRIVERS: Drivers = Drivers::new(&[PROTOCOLS, FILTERS, &[LAYERED]], &[]);

const SCHEMA: DriverSchema = DriverSchema {
    name: "layered",
    kind: DriverKind::Format,
    about: "an image of zeroes that may have a backing file",
    keys: &[
        Key { name: "file", value: KeyType::Child, default: "", help: "the image file" },
        Key { name: "backing", value: KeyType::ChildOrNull, default: "", help: "the backing file" },
    ],
};

const LAYERED: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)));

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    opener.file_child(draft).await?;
    opener.backing_child(draft, "layered", &BackingReference::default()).await?;
    let backing = draft.children.link(ChildRole::Backing).unwrap_or_default();
    draft.children.share(ChildRole::Backing, Arc::clone(&backing));
    Ok((Box::new(Layered { backing, header: Mutex::default() }), "layered".to_owned()))
}

/// A format with nothing but a name in its header.
struct Layered {
    backing: Arc<Link>,
    header: Mutex<(Option<String>, Option<String>)>,
}

impl Driver for Layered {
    fn name(&self) -> &'static str {
        SCHEMA.name
    }

    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        1 << 20
    }

    fn read(&self, _offset: u64, mut buf: IoBuf) -> Transfer<'_> {
        buf.fill(0);
        Box::pin(ready((Ok(()), buf)))
    }

    fn block_status(&self, _offset: u64, _len: u64, _max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(ready(Ok(Vec::new())))
    }

    fn backing(&self) -> Option<&dyn Backing> {
        Some(self)
    }

    fn backing_link(&self) -> Option<&dyn BackingLink> {
        Some(self)
    }
}

impl BackingName for Layered {
    fn name(&self) -> Option<String> {
        self.header.lock().expect("no panic").0.clone()
    }

    fn format(&self) -> Option<String> {
        self.header.lock().expect("no panic").1.clone()
    }

    fn plan_for(&self, _bytes: Option<u64>) {}
}

impl Backing for Layered {
    fn rename<'a>(&'a self, name: Option<&'a str>, format: Option<&'a str>) -> Work<'a> {
        *self.header.lock().expect("no panic") = (name.map(str::to_owned), format.map(str::to_owned));
        done(Ok(()))
    }

    fn make_empty(&self) -> Work<'_> {
        done(Ok(()))
    }
}

impl BackingLink for Layered {
    fn is_left_out(&self) -> bool {
        false
    }

    fn link(&self, backing: Option<Arc<Node>>) {
        self.backing.set(backing);
    }
}

/// A filter `f` over `n`, a spare node `m`, and a filter `q` over a file. One export writes by `f`; others read `n` and `q`.
/// Besides, an image `r` that is read-only above `m`, an image `i` that an export writes to, and an overlay `o` without users.
struct Fixture {
    graph: Arc<Graph>,
    exports: Vec<Arc<Attachment>>,
}

type Change = for<'a> fn(&'a Fixture) -> Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

fn options(text: &str) -> BlockdevOptions {
    BlockdevOptions::from_keyval(text).expect("good options")
}

impl Fixture {
    async fn new(folder: &Path) -> Fixture {
        let path = folder.join("disk");
        std::fs::write(&path, [7; 4096]).expect("a file");
        let graph = Graph::new(&DRIVERS);
        for text in [
            "driver=null-co,node-name=n,size=1M",
            "driver=null-co,node-name=m,size=1M",
            "driver=fault,node-name=f,file=n",
            &format!("driver=file,node-name=p,filename={}", path.display()),
            "driver=fault,node-name=q,file=p,read-only=on",
            "driver=null-co,node-name=r0,size=1M",
            "driver=layered,node-name=r,file=r0,backing=m,read-only=on",
            "driver=null-co,node-name=i0,size=1M",
            "driver=layered,node-name=i,file=i0,backing=",
            "driver=null-co,node-name=o0,size=1M",
            "driver=layered,node-name=o,file=o0,backing=",
        ] {
            graph.add(options(text)).await.expect("it opens");
        }
        let mut exports = Vec::new();
        for (node, name, writes) in
            [("f", "a", true), ("n", "b", false), ("n", "c", false), ("q", "d", false), ("i", "e", true)]
        {
            let node = graph.find(node).expect("a node");
            exports.push(graph.attach(&node, AttachRequest::export(name, writes)).await.expect("an attachment"));
        }
        Fixture { graph, exports }
    }

    async fn close(self) {
        for export in self.exports {
            export.detach().await.expect("it ends");
        }
        self.graph.close_all().await.expect("a good close");
    }

    fn node(&self, name: &str) -> Arc<Node> {
        self.graph.find(name).expect("a node")
    }

    /// All that a change may change.
    fn state(&self) -> Vec<String> {
        let mut state: Vec<String> =
            self.exports.iter().map(|export| format!("{} at {}", export.name(), export.node().name())).collect();
        for node in self.graph.snapshot().nodes() {
            let mut users: Vec<String> =
                node.user_names().iter().map(|user| format!("{:?}", node.edge_of(user))).collect();
            users.sort();
            let children: Vec<String> = node.children().iter().map(|child| child.node.name().to_owned()).collect();
            let file = node.file().map(|file| (file.cache_mode(), file.permissions()));
            let options: Vec<String> = node.options().iter().map(|(key, value)| format!("{key}={value}")).collect();
            let writing = (node.is_read_only(), node.was_put_below_snapshot());
            let header = node.backing_name().map(|header| (header.name(), header.format()));
            state.push(format!("{}: {users:?} {children:?} {file:?} {options:?} {writing:?} {header:?}", node.name()));
        }
        state.sort();
        state
    }
}

const CHANGES: &[(&str, Change)] = &[
    ("replace", |fixture| Box::pin(async move { fixture.graph.replace(&fixture.node("n"), &fixture.node("m")).await })),
    ("insert", |fixture| {
        let filter = options("driver=copy-on-read,node-name=new");
        Box::pin(async move { fixture.graph.insert_filter(&fixture.node("n"), filter).await.map(drop) })
    }),
    ("insert for one", |fixture| {
        let filter = options("driver=copy-on-read,node-name=new");
        Box::pin(async move { fixture.graph.insert_filter_for(&fixture.exports[0], filter).await.map(drop) })
    }),
    ("take out", |fixture| Box::pin(async move { fixture.graph.take_filter_out(&fixture.node("f")).await.map(drop) })),
    ("writable", |fixture| Box::pin(async move { fixture.graph.set_read_only(&fixture.node("q"), false).await })),
    ("reopen", |fixture| {
        let list = vec![options("driver=fault,node-name=f,file=m"), options("driver=fault,node-name=q,read-only=off")];
        Box::pin(async move { fixture.graph.reopen(list).await })
    }),
    ("reopen a file", |fixture| {
        let name = fixture.node("p").options().text("filename").expect("a name").to_owned();
        let file = options(&format!("driver=file,node-name=p,filename={name},cache.no-flush=on"));
        Box::pin(async move { fixture.graph.reopen(vec![file]).await })
    }),
    ("reopen an image", |fixture| {
        let image = options("driver=layered,node-name=r,file=r0,backing=n,read-only=off");
        Box::pin(async move { fixture.graph.reopen(vec![image]).await })
    }),
    ("snapshot", |fixture| {
        Box::pin(async move { fixture.graph.take_snapshot(&fixture.node("i"), &fixture.node("o")).await.map(drop) })
    }),
    ("relink", |fixture| {
        let name = HeaderName { file: "below".to_owned(), format: "raw" };
        Box::pin(async move { fixture.graph.relink(&fixture.node("r"), Some(&fixture.node("n")), Some(name)).await })
    }),
    ("relink to nothing", |fixture| {
        Box::pin(async move { fixture.graph.relink(&fixture.node("r"), None, None).await })
    }),
    ("rename", |fixture| {
        Box::pin(async move { fixture.graph.rename_backing(&fixture.node("r"), "below", Some("raw")).await })
    }),
    ("set backing", |fixture| {
        Box::pin(async move { fixture.graph.set_backing(&fixture.node("i"), Some(&fixture.node("m"))).await })
    }),
];

#[test]
fn a_step_that_fails_leaves_the_graph_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, change) in CHANGES {
        let mut fails = 0;
        loop {
            let done = rt::block_on(async {
                let fixture = Fixture::new(folder.path()).await;
                let before = fixture.state();
                let_pass(Some(fails));
                let result = change(&fixture).await;
                let_pass(None);
                let Err(error) = result else {
                    assert_ne!(fixture.state(), before, "{name} does nothing");
                    fixture.close().await;
                    return true;
                };
                assert!(error.to_string().contains("this step fails"), "{name}: {error}");
                assert_eq!(fixture.state(), before, "{name}, step {fails}");
                change(&fixture)
                    .await
                    .unwrap_or_else(|error| panic!("{name} after a failure of step {fails}: {error}"));
                fixture.close().await;
                false
            });
            if done {
                break;
            }
            fails += 1;
            assert!(fails < 100, "{name} has too many steps");
        }
        assert!(fails > 1, "{name}: {fails} steps failed");
    }
}
