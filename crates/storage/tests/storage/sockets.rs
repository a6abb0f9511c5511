// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets on the ring and without one.

use cowshed_storage::{Dispatch, IoBuf, KeepAlive, ListenOptions, Listener, Socket, SocketAddress, Want, rt};
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
            // Both wait by then.
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
fn an_empty_path_is_no_address() {
    rt::block_on(async {
        let empty = SocketAddress::Unix(String::new());
        for error in [
            Listener::bind(&empty).expect_err("no path to listen on"),
            Socket::connect(&empty, TIMEOUT).await.expect_err("no path to connect to"),
        ] {
            assert!(error.to_string().contains("the path of a Unix socket is empty"), "{error}");
        }
    });
}

#[test]
fn a_path_that_is_too_long_is_refused_in_plain_words() {
    for path in ["x".repeat(108), format!("\0{}", "x".repeat(108))] {
        let error = Listener::bind(&SocketAddress::Unix(path.clone())).expect_err("a long path").to_string();
        let words = "the path of a socket is too long: it has 108 bytes, of at most 107";
        assert!(error.contains(words), "{error}");
    }
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

fn local(port: u16) -> SocketAddress {
    SocketAddress::Tcp { host: "127.0.0.1".to_owned(), port }
}

fn port_of(listener: &Listener) -> u16 {
    match listener.address() {
        SocketAddress::Tcp { port, .. } => *port,
        other => panic!("{other}"),
    }
}

#[test]
fn a_listening_socket_has_the_options_that_are_given() {
    use rustix::net::{ipproto, sockopt};
    let bind = |options: &ListenOptions| Listener::bind_with(&local(0), options);
    let plain = bind(&ListenOptions::default()).expect("listens").remove(0);
    assert!(!sockopt::socket_keepalive(&plain).expect("asked"));
    assert_eq!(sockopt::socket_protocol(&plain).expect("asked"), Some(ipproto::TCP));
    let keep_alive = KeepAlive { count: Some(5), idle_seconds: Some(7), interval_seconds: Some(3) };
    let options = ListenOptions { keep_alive: Some(keep_alive), ..ListenOptions::default() };
    let listener = bind(&options).expect("listens").remove(0);
    assert!(sockopt::socket_keepalive(&listener).expect("asked"));
    let found = (sockopt::tcp_keepcnt(&listener), sockopt::tcp_keepidle(&listener), sockopt::tcp_keepintvl(&listener));
    let seconds = Duration::from_secs;
    assert_eq!(
        (found.0.expect("asked"), found.1.expect("asked"), found.2.expect("asked")),
        (5, seconds(7), seconds(3))
    );
    // 0 and an absent value are the system's defaults.
    let none = KeepAlive { count: Some(0), ..KeepAlive::default() };
    let defaults =
        bind(&ListenOptions { keep_alive: Some(none), ..ListenOptions::default() }).expect("listens").remove(0);
    assert!(sockopt::socket_keepalive(&defaults).expect("asked"));
    let (found, system) = (sockopt::tcp_keepcnt(&defaults), sockopt::tcp_keepcnt(&plain));
    assert_eq!(found.expect("asked"), system.expect("asked"));
    for (wrong, words) in [
        (KeepAlive { count: Some(500_000), ..none }, "Unable to set TCP keep-alive count option on socket"),
        (KeepAlive { idle_seconds: Some(500_000), ..none }, "Unable to set TCP keep-alive idle option on socket"),
        (
            KeepAlive { interval_seconds: Some(500_000), ..none },
            "Unable to set TCP keep-alive interval option on socket",
        ),
    ] {
        let error = bind(&ListenOptions { keep_alive: Some(wrong), ..ListenOptions::default() }).expect_err("too much");
        assert!(error.to_string().contains(words), "{error}");
    }
    // A kernel without MPTCP refuses it.
    match (bind(&ListenOptions { mptcp: true, ..options }), std::path::Path::new("/proc/sys/net/mptcp").exists()) {
        (Ok(listeners), true) => {
            assert_eq!(sockopt::socket_protocol(&listeners[0]).expect("asked"), Some(ipproto::MPTCP));
            assert!(sockopt::socket_keepalive(&listeners[0]).expect("asked"));
            let address = listeners[0].address().clone();
            rt::block_on(async {
                let client = Socket::connect(&address, TIMEOUT).await.expect("clients of TCP may come");
                let accepted = listeners[0].accept().await.expect("accepted");
                accepted.send(vec![IoBuf::copy_from(b"hello")], Dispatch::Alone).await.0.expect("sent");
                let (count, buf) = client.receive(IoBuf::zeroed(5), Want::All).await;
                assert_eq!((count.expect("received"), &buf[..]), (5, &b"hello"[..]));
            });
        }
        (result, has_mptcp) => {
            let error = result.expect_err("the kernel has no MPTCP").to_string();
            assert!(!has_mptcp && error.contains("MPTCP"), "{error}");
        }
    }
}

#[test]
fn addresses_and_ports_are_chosen_as_asked() {
    let first = Listener::bind(&local(0)).expect("listens").remove(0);
    let port = port_of(&first);
    let up_to = |last| ListenOptions { last_port: Some(last), ..ListenOptions::default() };
    let error = Listener::bind_with(&local(port), &up_to(port)).expect_err("it is taken");
    assert_eq!(error.errno().0, 98, "{error}");
    if port < u16::MAX - 100 {
        let next = Listener::bind_with(&local(port), &up_to(port + 100)).expect("a later one is free").remove(0);
        assert!(port_of(&next) > port && port_of(&next) <= port + 100);
    }
    let any = SocketAddress::Tcp { host: String::new(), port: 0 };
    let families = |ipv4, ipv6| ListenOptions { ipv4, ipv6, ..ListenOptions::default() };
    let host = |options| match Listener::bind_with(&any, &options).expect("listens").remove(0).address() {
        SocketAddress::Tcp { host, .. } => host.clone(),
        other => panic!("{other}"),
    };
    assert_eq!(host(families(Some(true), None)), "0.0.0.0");
    assert_eq!(host(families(None, Some(false))), "0.0.0.0");
    for (address, options, words) in [
        (any.clone(), families(Some(false), Some(false)), "Cannot disable IPv4 and IPv6 at same time"),
        (local(0), families(None, Some(true)), "no address of the kind"),
        (local(port), up_to(1), "lower than the first"),
        (
            SocketAddress::Tcp { host: "localhost".to_owned(), port: 0 },
            ListenOptions { numeric: true, ..ListenOptions::default() },
            "address resolution failed for localhost:0: Name or service not known",
        ),
    ] {
        let error = Listener::bind_with(&address, &options).expect_err("wrong").to_string();
        assert!(error.contains(words), "{error}");
    }
    let numeric = ListenOptions { numeric: true, ipv4: Some(true), ipv6: Some(true), ..ListenOptions::default() };
    assert!(Listener::bind_with(&local(0), &numeric).is_ok());
}

#[test]
fn connecting_to_a_full_listener_has_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let address = std::os::unix::net::SocketAddr::from_pathname(&path).unwrap();
    let mut waiting = Vec::new();
    // The queue of a listener is finite.
    let error = loop {
        match cowshed_storage::connect_unix(&address, std::time::Duration::from_millis(20)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100_000, "no end of the queue");
    };
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{error}");
}
