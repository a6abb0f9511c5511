// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Clients that have bytes of another version than the present one.

use super::{Pattern, bytes, serve, small};
use std::sync::Arc;
use std::sync::atomic::Ordering;

#[test]
fn the_rest_of_another_version_is_no_rest() {
    let served = serve(Pattern { len: 5000, ..Pattern::default() }, small());
    let mut client = served.client();
    assert_eq!(client.get("/disk", "Range: bytes=0-999\r\n").status(), 206);
    for range in ["1000-", "1000-1999", "1000-4999"] {
        assert_eq!(client.get("/disk", &format!("Range: bytes={range}\r\n")).status(), 206, "{range}");
    }
    served.content.version.store(7, Ordering::SeqCst);
    // Some programs would take their rest out of the whole content, so that isn't the answer.
    for range in ["1000-", "1000-1999", "1000-4999", "5000-", "0-9,1000-1999"] {
        let refused = client.get("/disk", &format!("Range: bytes={range}\r\n"));
        assert_eq!(refused.status(), 412, "{range}: the client has bytes of the version before");
    }
    client.send("HEAD /disk HTTP/1.1\r\nHost: h\r\nRange: bytes=1000-\r\n\r\n");
    let head = client.response(false);
    // A loop of `curl -C -` keeps its file after such an answer, and asks again.
    assert_eq!(client.get("/disk", "Range: bytes=1000-\r\n").status(), 412, "its file is of the version before still");
    let tag = head.field("ETag").expect("a tag").to_owned();
    let named = format!("Range: bytes=2000-\r\nIf-Range: {tag}\r\n");
    assert_eq!(client.get("/disk", &named).status(), 206, "it names this version");
    assert_eq!(client.get("/disk", "").status(), 200);
    assert_eq!(client.get("/disk", "Range: bytes=1000-\r\n").status(), 412, "another file of this host may be older");
    assert_eq!(client.get("/disk", "Range: bytes=0-9\r\n").status(), 206, "the beginning is no rest");
    served.stop();
}

/// A program that reads by pieces can't say what bytes it has. Its address can.
#[test]
fn an_address_names_the_version_of_its_pieces() {
    let served = serve(Pattern { len: 5000, ..Pattern::default() }, small());
    let mut client = served.client();
    assert_eq!(client.get("/disk", "").status(), 200);
    served.content.version.store(7, Ordering::SeqCst);
    let refused = client.get("/disk", "Range: bytes=1000-1999\r\n");
    assert_eq!(refused.status(), 412);
    let said = String::from_utf8_lossy(&refused.body).into_owned();
    assert!(said.contains("begins anew with ?version=0000000000000007 behind the address"), "{said}");
    let named = "/disk?version=0000000000000007";
    for range in ["1000-1999", "1000-", "4999-4999"] {
        assert_eq!(client.get(named, &format!("Range: bytes={range}\r\n")).status(), 206, "{range}");
    }
    assert_eq!(client.get(named, "").body.len(), 5000);
    // Any other version is refused: a program never reads two of them by one address.
    served.content.version.store(8, Ordering::SeqCst);
    for fields in ["Range: bytes=1000-1999\r\n", "Range: bytes=0-9\r\n", ""] {
        assert_eq!(client.get(named, fields).status(), 412, "{fields}");
    }
    client.send(&format!("HEAD {named} HTTP/1.1\r\nHost: h\r\n\r\n"));
    assert_eq!(client.response(false).status(), 412);
    assert_eq!(client.get("/disk?other=1", "").status(), 200);
    served.stop();
    // The version of a disk that may change at any time tells nothing.
    let served = serve(Pattern { len: 5000, is_unsure: true, ..Pattern::default() }, small());
    let refused = served.client().get("/disk?version=0000000000000000", "Range: bytes=100-\r\n");
    assert_eq!(refused.status(), 412);
    assert!(!String::from_utf8_lossy(&refused.body).contains("?version"));
    served.stop();
}

#[test]
fn pieces_of_a_disk_in_use_are_no_rest() {
    let served = serve(Pattern { len: 5000, is_in_use: true, ..Pattern::default() }, small());
    let mut client = served.client();
    assert!(client.get("/disk", "").field("ETag").is_some_and(|tag| tag.starts_with("W/")));
    served.content.version.store(8, Ordering::SeqCst);
    for (range, status) in [("5-9", 206), ("1000-1999", 206), ("1000-", 412), ("1000-4999", 412), ("-9", 206)] {
        assert_eq!(client.get("/disk", &format!("Range: bytes={range}\r\n")).status(), status, "{range}");
    }
    served.stop();
}

#[test]
fn rest_of_what_changes_unseen_is_refused() {
    let served = serve(Pattern { len: 9000, is_unsure: true, ..Pattern::default() }, small());
    let mut client = served.client();
    assert_eq!(client.get("/disk", "Range: bytes=0-99\r\n").status(), 206, "a piece is no rest");
    assert_eq!(client.get("/disk", "Range: bytes=100-8999\r\n").status(), 206, "programs read so at any place");
    assert_eq!(client.get("/disk", "Range: bytes=100-\r\n").status(), 412);
    assert_eq!(client.get("/disk", "").body.len(), 9000);
    served.stop();
}

/// A download that broke off before a change doesn't keep a longer one of the new disk from going on.
#[test]
fn rest_behind_the_bytes_of_the_old_version_comes() {
    let served = serve(Pattern { len: 9000, ..Pattern::default() }, small());
    let mut client = served.client();
    assert_eq!(client.get("/disk", "Range: bytes=0-2999\r\n").status(), 206);
    served.content.version.store(7, Ordering::SeqCst);
    // A file of this host is begun anew. It is of this version once it is longer than the other one.
    assert_eq!(client.get("/disk", "").status(), 200);
    assert_eq!(client.get("/disk", "Range: bytes=3000-\r\n").status(), 412);
    let rest = client.get("/disk", "Range: bytes=3001-\r\n");
    assert_eq!((rest.status(), &rest.body), (206, &bytes(3001..9000)));
    served.stop();
}

/// A page has its own versions, and no rest.
#[test]
fn a_page_of_a_content_is_no_version_of_it() {
    let served = serve(Pattern { len: 500, ..Pattern::default() }, small());
    let page = Arc::new(Arc::new(Pattern { len: 400, version: 5.into(), ..Pattern::default() }));
    served.server.add_with_page("/both", Arc::new(Arc::clone(&served.content)), Some(page)).expect("a free path");
    let mut client = served.client();
    assert_eq!(client.get("/both", "Accept: text/html\r\n").body.len(), 400);
    assert_eq!(client.get("/both", "Range: bytes=100-\r\n").status(), 206);
    served.stop();
}

/// Another change could leave the same times.
#[test]
fn a_content_that_changed_just_now_is_waited_for() {
    let served = serve(Pattern { len: 5000, fresh_looks: 3.into(), ..Pattern::default() }, small());
    let mut client = served.client();
    let settled = client.get("/disk", "");
    assert_eq!((settled.status(), settled.field("ETag")), (200, Some("\"0000000000000000\"")));
    // One that changes all the time has a weak tag, which no later version has.
    served.content.fresh_looks.store(u64::MAX, Ordering::SeqCst);
    let fresh = client.get("/disk", "");
    assert_eq!((fresh.status(), fresh.body.len()), (200, 5000));
    assert!(fresh.field("ETag").is_some_and(|tag| tag.starts_with("W/\"ffffffff")), "{:?}", fresh.field("ETag"));
    served.content.fresh_looks.store(0, Ordering::SeqCst);
    assert_eq!(client.get("/disk", "Range: bytes=1000-\r\n").status(), 412, "its bytes may be of another version");
    served.stop();
}

/// The write has moved the times of the file, and its last bytes come later.
#[test]
fn content_amid_a_write_has_a_tag_of_its_own() {
    let served = serve(Pattern { len: 5000, is_amid_write: true.into(), ..Pattern::default() }, small());
    let mut client = served.client();
    let tag = |client: &mut super::Client| client.get("/disk", "").field("ETag").expect("a tag").to_owned();
    let amid = tag(&mut client);
    assert_eq!(amid, "W/\"ffffffffffffffff\"");
    let statuses = |client: &mut super::Client, tag: &str| {
        let [known, joined] = [format!("If-None-Match: {tag}"), format!("Range: bytes=5-9\r\nIf-Range: {tag}")];
        [known, joined].map(|fields| client.get("/disk", &format!("{fields}\r\n")).status())
    };
    assert_eq!(statuses(&mut client, &amid), [200, 200], "it says of nothing that it is the same");
    // Most such bytes are whole: a download goes on, then and later.
    assert_eq!(client.get("/disk", "Range: bytes=1000-\r\n").status(), 206);
    served.content.is_amid_write.store(false, Ordering::SeqCst);
    let later = tag(&mut client);
    assert_eq!(later, "\"0000000000000000\"");
    assert_eq!((statuses(&mut client, &amid), statuses(&mut client, &later)), ([200, 200], [304, 206]));
    assert_eq!(client.get("/disk", "Range: bytes=1000-\r\n").status(), 206);
    served.stop();
}

#[test]
fn unknown_methods_are_refused_before_old_versions() {
    let served = serve(Pattern { len: 500, ..Pattern::default() }, small());
    for path in ["/disk", "/disk?version=0123456789abcdef"] {
        let refused = served.client().get_by("DELETE", path);
        assert_eq!((refused.status(), refused.field("Allow")), (405, Some("GET, HEAD")), "{path}");
    }
    assert_eq!(served.client().get("/disk?version=0123456789abcdef", "").status(), 412);
    served.stop();
}
