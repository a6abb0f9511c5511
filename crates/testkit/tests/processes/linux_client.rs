// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Our server and the client in Linux, which an emulated guest brings along (`scripts/guest`).
#![cfg(target_arch = "x86_64")]

use cowshed_image::stats::IoKind;
use cowshed_image::{Node, OpenRequest, open};
use cowshed_nbd_server::{Event, EventHandler, Export, Server, ServerConfig};
use cowshed_storage::{SocketAddress, rt};
use cowshed_testkit::guest::{Guest, guest_files, initial_file_system};
use cowshed_testkit::qemu::temp_dir;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
const SIZE: usize = 64 * MIB;

/// Loads the modules (which need one another, hence several passes), brings the network up and hands over.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t devtmpfs none /dev
for pass in 1 2 3 4; do
  for module in /modules/*.ko; do /bin/busybox insmod $module 2>/dev/null; done
done
/bin/busybox ip link set eth0 up
/bin/busybox ip address add 10.0.2.15/24 dev eth0
exec /bin/client 10.0.2.2:PORT
";

/// A server of one raw image.
struct Served {
    server: Arc<Server<Arc<Node>>>,
    node: Arc<Node>,
    events: Arc<Mutex<Vec<Event>>>,
}

impl Served {
    /// On a port of the loopback interface; 0 is a free one. The port.
    fn start(image: &Path, port: u16) -> (Served, u16) {
        let request = OpenRequest::file(image.to_str().expect("UTF-8")).format("raw").writable(true).discard(true);
        let node = rt::block_on(open(request)).expect("open");
        let events: Arc<Mutex<Vec<Event>>> = Arc::default();
        let seen = Arc::clone(&events);
        let handler = EventHandler(Arc::new(move |event| seen.lock().unwrap().push(event)));
        let config = ServerConfig { events: Some(handler), ..ServerConfig::default() };
        let server = Arc::new(Server::new(config).expect("server"));
        let mut export = Export::new("", Arc::clone(&node));
        export.writable = true;
        server.add_export(export).expect("export");
        let address = SocketAddress::Tcp { host: "127.0.0.1".into(), port };
        let bound = server.listen(&address).expect("listen").remove(0);
        let SocketAddress::Tcp { port, .. } = bound else { panic!("{bound} is no port") };
        (Served { server, node, events }, port)
    }

    fn operations(&self, kind: IoKind) -> u64 {
        self.node.statistics().kind(kind).operations
    }

    fn end(self) {
        rt::block_on(async {
            self.server.stop(Duration::ZERO).await.expect("stop");
            self.node.close().await.expect("close");
        });
    }
}

/// As the guest's program fills the disk.
fn filled(first_mib: u64, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8) as u64).flat_map(|index| ((first_mib << 40) + index).to_le_bytes());
    words.take(len).collect()
}

#[test]
fn linux_uses_our_server_and_goes_on_over_another_connection() {
    let (files, folder) = (guest_files(), temp_dir());
    let (image, initrd) = (folder.path().join("disk.raw"), folder.path().join("initrd"));
    std::fs::write(&image, vec![0x33; SIZE]).expect("a file");
    let (served, port) = Served::start(&image, 0);
    let program = std::fs::read(env!("CARGO_BIN_EXE_cowshed-guest")).expect("our own program");
    let init = INIT.replace("PORT", &port.to_string());
    std::fs::write(&initrd, initial_file_system(&files, &init, &[("bin/client", program)])).expect("a file");
    let network = ["-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile="];
    let mut guest = Guest::boot(&files, &initrd, &network);

    guest.await_words("GUEST: ");
    assert!(guest.said.contains("has used the disk"), "{}", guest.said);
    for kind in [IoKind::Read, IoKind::Write, IoKind::Discard, IoKind::Flush] {
        assert!(served.operations(kind) > 0, "{kind:?}");
    }
    guest.await_words("GUEST: writes on");
    // The server goes, in the middle of writes, without a word; another one comes.
    served.end();
    let (served, _) = Served::start(&image, port);
    guest.keyboard.write_all(b"go\n").expect("the machine reads");
    assert!(guest.wait().success(), "{}", guest.said);
    assert!(guest.said.contains("GUEST: has another connection"), "{}", guest.said);
    assert!(guest.said.contains("GUEST: finished") && !guest.said.contains("FAILED"), "{}", guest.said);
    assert!(!guest.said_while_up().contains("I/O error"), "{}", guest.said);

    // It sent a goodbye on the connection that it used, which is the last one to end.
    let connections = guest.said.split("another connection, number ").nth(1).and_then(|rest| rest.lines().next());
    let connections: usize = connections.and_then(|number| number.trim().parse().ok()).expect("a number");
    let started = Instant::now();
    loop {
        let events = served.events.lock().unwrap();
        let ended = events.iter().filter_map(|event| match event {
            Event::ClientDisconnected { error, .. } => Some(error.clone()),
            _ => None,
        });
        let ended: Vec<_> = ended.collect();
        drop(events);
        if ended.len() == connections {
            break assert_eq!(ended.last(), Some(&None), "a client that leaves in order: {ended:?}");
        }
        assert!(started.elapsed() < Duration::from_secs(60), "the client's end is not noticed: {ended:?}");
        // Between two looks, with the bound above.
        std::thread::sleep(Duration::from_millis(10));
    }
    served.end();
    let found = std::fs::read(&image).expect("the disk");
    assert!(found[MIB..MIB + 4096] == filled(1, 4096));
    let mut large = filled(8, 32 * MIB);
    large[2 * MIB..3 * MIB].fill(0);
    large[4 * MIB..5 * MIB].fill(0);
    assert!(found[8 * MIB..40 * MIB] == large, "32 MiB with a zeroed and a trimmed part");
    assert!(found[40 * MIB + 77..][..300_001] == filled(40, 300_001), "what went through the page cache");
    assert!(found[48 * MIB..52 * MIB].iter().all(|&byte| byte == found[48 * MIB]) && found[48 * MIB] != 0x33);
    for untouched in [0..MIB, 2 * MIB..8 * MIB, 41 * MIB..48 * MIB, 52 * MIB..SIZE] {
        assert!(found[untouched.clone()].iter().all(|&byte| byte == 0x33), "{untouched:?}");
    }
}
