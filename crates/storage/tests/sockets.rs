// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets on the ring and without one.

use cowshed_storage::{Dispatch, IoBuf, Listener, Socket, SocketAddress, Want, rt};
use std::rc::Rc;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs a check with the ring of this thread, and on one that may not have a ring.
fn on_both_engines(check: fn()) {
    check();
    std::thread::spawn(move || {
        forbid_rings();
        check();
    })
    .join()
    .expect("without a ring");
}

/// Makes the kernel refuse rings to this thread.
fn forbid_rings() {
    use seccompiler::{SeccompAction, SeccompFilter};
    const IO_URING_SETUP: i64 = 425;
    let rules = [(IO_URING_SETUP, vec![])].into();
    let arch = std::env::consts::ARCH.try_into().expect("architecture");
    let refuse = SeccompAction::Errno(1);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).expect("filter");
    let program: seccompiler::BpfProgram = filter.try_into().expect("program");
    seccompiler::apply_filter(&program).expect("seccomp");
}

fn temp_path(name: &str) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().expect("folder");
    let path = dir.path().join(name).to_str().expect("UTF-8").to_owned();
    (dir, path)
}

async fn talk(address: SocketAddress) {
    for dispatch in [Dispatch::Together, Dispatch::Alone] {
        talk_by(&address, dispatch).await;
    }
}

async fn talk_by(address: &SocketAddress, dispatch: Dispatch) {
    let listener = Listener::bind(address).expect("bind").remove(0);
    let address = listener.address().clone();
    let accepting = rt::spawn(async move {
        let socket = listener.accept().await.expect("accept");
        let (result, buf) = socket.receive(IoBuf::zeroed(1 << 20), Want::All).await;
        assert_eq!(result.expect("receive"), 1 << 20);
        let mut tail = buf;
        let head = tail.split_to(1000);
        let (result, bufs) = socket.send(vec![tail, head], dispatch).await;
        result.expect("send");
        assert_eq!(bufs.len(), 2);
        let (result, _) = socket.receive(IoBuf::zeroed(10), Want::Some).await;
        assert_eq!(result.expect("the end"), 0);
    });
    let socket = Rc::new(Socket::connect(&address, TIMEOUT).await.expect("connect"));
    let content: Vec<u8> = (0..1u32 << 20).map(|i| (i / 7) as u8).collect();
    let sent = content.clone();
    let sender = Rc::clone(&socket);
    let sending = rt::spawn(async move {
        let bufs = sent.chunks(100_000).map(IoBuf::copy_from).collect();
        sender.send(bufs, dispatch).await.0.expect("send");
    });
    let (result, buf) = socket.receive(IoBuf::zeroed(1 << 20), Want::All).await;
    assert_eq!(result.expect("receive"), 1 << 20);
    sending.await;
    assert!(buf[..(1 << 20) - 1000] == content[1000..] && buf[(1 << 20) - 1000..] == content[..1000]);
    socket.shutdown();
    accepting.await;
}

#[test]
fn bytes_go_both_ways_over_unix_and_tcp() {
    on_both_engines(|| {
        rt::block_on(async {
            let (_dir, path) = temp_path("socket");
            talk(SocketAddress::Unix(path)).await;
            talk(SocketAddress::Unix(format!("\0cowshed-test-{:?}", std::thread::current().id()))).await;
            for host in ["127.0.0.1", "::1", ""] {
                talk(SocketAddress::Tcp { host: host.to_owned(), port: 0 }).await;
            }
        });
    });
}

#[test]
fn waiting_for_a_peer_can_be_given_up() {
    on_both_engines(|| {
        let (_dir, path) = temp_path("socket");
        let address = SocketAddress::Unix(path);
        // `block_on` returns only when nothing is in flight any more.
        rt::block_on(async {
            let listener = Listener::bind(&address).expect("bind").remove(0);
            let (a, _b) = Socket::pair().expect("pair");
            let waiting = rt::spawn(async move { listener.accept().await.map(drop) });
            let receiving = rt::spawn(async move { a.receive(IoBuf::zeroed(1), Want::Some).await.0 });
            rt::sleep(Duration::from_millis(1)).await;
            assert!(waiting.cancel().await.is_none());
            assert!(receiving.cancel().await.is_none());
        });
    });
}

#[test]
fn shutting_down_ends_what_waits() {
    on_both_engines(|| {
        rt::block_on(async {
            let (a, _b) = Socket::pair().expect("pair");
            let receiving = a.clone();
            let receiving = rt::spawn(async move { receiving.receive(IoBuf::zeroed(1), Want::Some).await.0 });
            rt::yield_now().await;
            a.shutdown();
            assert_eq!(receiving.await.expect("an end"), 0);
            let (result, _) = a.send(vec![IoBuf::zeroed(1)], Dispatch::Together).await;
            assert!(result.expect_err("closed").to_string().contains("could not send"));
        });
    });
}

#[test]
fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
    let (_dir, path) = temp_path("socket");
    drop(std::os::unix::net::UnixListener::bind(&path).expect("bind"));
    assert!(std::path::Path::new(&path).exists(), "the standard library leaves the file");
    let address = SocketAddress::Unix(path.clone());
    let listener = Listener::bind(&address).expect("a stale socket is replaced");
    let error = Listener::bind(&address).expect_err("in use").to_string();
    assert!(error.contains("another process listens") && error.contains(&path), "{error}");
    drop(listener);
    assert!(!std::path::Path::new(&path).exists(), "the file goes with the listener");
    std::fs::write(&path, "precious").expect("write");
    let error = Listener::bind(&address).expect_err("a file").to_string();
    assert!(error.contains("no socket"), "{error}");
    assert_eq!(std::fs::read_to_string(&path).expect("read"), "precious");
}

#[test]
fn errors_name_the_address() {
    rt::block_on(async {
        let missing = SocketAddress::Unix("/nonexistent/socket".to_owned());
        let error = Socket::connect(&missing, TIMEOUT).await.expect_err("nobody there").to_string();
        assert!(error.contains("/nonexistent/socket") && error.contains("No such file"), "{error}");
        let host = SocketAddress::Tcp { host: "no-such-host.invalid".to_owned(), port: 1 };
        let error = Socket::connect(&host, TIMEOUT).await.expect_err("no host").to_string();
        assert!(error.contains("no-such-host.invalid"), "{error}");
    });
}
