// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry point of the protocol in `cowshed-http-server`: a client's requests, and the heads of the responses.

use super::replay::Entry;
use cowshed_http_server::proto::answer::{About, Answer, AnswerPart, Tag, answer, message, phrase};
use cowshed_http_server::proto::request::{MAX_HEAD_BYTES, Request, parse};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("http_request", request)];

/// A content. Eight bytes are its length, one has its kind (1: weak tag, 2: packed on the way, 4: it has a
/// file name). Behind it come the bytes of one connection: heads of requests.
pub fn request(data: &[u8]) {
    let Some((fixed, mut sent)) = data.split_first_chunk::<9>() else { return };
    let kind = fixed[8];
    // No disk is longer.
    let len = fixed.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)) & i64::MAX as u64;
    loop {
        match parse(sent) {
            Ok(Some((request, used))) => {
                assert!(used > 0 && used <= sent.len() && used <= MAX_HEAD_BYTES, "{used} of {}", sent.len());
                assert_eq!(parse(&sent[..used]), Ok(Some((request.clone(), used))), "what follows changes nothing");
                assert_eq!(parse(&sent[..used - 1]), Ok(None), "the last byte ends the head");
                let about = About {
                    len,
                    tag: Tag { text: "v1".to_owned(), is_weak: kind & 1 != 0, is_unsure: kind & 4 != 0 },
                    media_type: "application/octet-stream",
                    file_name: (kind & 4 != 0).then_some(request.path.as_str()),
                    is_packed: kind & 2 != 0,
                    boundary: u128::from(kind),
                };
                respond(&request, &about);
                sent = &sent[used..];
            }
            Ok(None) => {
                assert!(sent.len() < MAX_HEAD_BYTES, "the head has no end");
                return;
            }
            Err(refused) => {
                let answer = message(refused.status, refused.reason);
                assert!(matches!(answer.status, 400 | 431 | 505), "{refused:?}");
                is_sound(&answer, true);
                return;
            }
        }
    }
}

fn respond(request: &Request, about: &About<'_>) {
    let answer = answer(request, about);
    is_sound(&answer, request.method == "GET" && !about.is_packed);
    let parts: Vec<_> = answer.body.iter().filter_map(part).collect();
    assert!(parts.iter().all(|part| part.start <= part.end && part.end <= about.len), "{parts:?} of {}", about.len);
    match answer.status {
        206 => {
            assert!(request.range.is_some() && !about.is_packed);
            assert!(request.if_range.is_none() || !about.tag.is_weak, "two versions could be joined");
            assert!(!parts.is_empty() && parts.iter().all(|part| !part.is_empty()));
            let total: u64 = parts.iter().map(|part| part.end - part.start).sum();
            assert!(total <= about.len, "{parts:?} of {}", about.len);
        }
        200 if request.method == "GET" => assert_eq!(parts, [&(0..about.len)]),
        _ => assert!(parts.is_empty(), "{answer:?}"),
    }
}

fn part(piece: &AnswerPart) -> Option<&std::ops::Range<u64>> {
    match piece {
        AnswerPart::Part(part) => Some(part),
        AnswerPart::Text(_) => None,
    }
}

/// No field has a line of its own from the client, and the length is the one that follows.
fn is_sound(answer: &Answer, has_length: bool) {
    assert_ne!(phrase(answer.status), "Unknown", "{answer:?}");
    let mut length = None;
    for line in answer.fields.split_inclusive("\r\n") {
        let field = line.strip_suffix("\r\n").expect("each field ends");
        assert!(field.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{field:?}");
        let (name, value) = field.split_once(": ").expect("a name and a value");
        assert!(!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-'), "{field:?}");
        if name == "Content-Length" {
            assert!(length.replace(value.parse::<u64>().expect("a number")).is_none(), "{answer:?}");
        }
    }
    let pieces = answer.body.iter().map(|piece| match piece {
        AnswerPart::Text(text) => text.len() as u64,
        AnswerPart::Part(part) => part.end - part.start,
    });
    if has_length && answer.status != 304 {
        assert_eq!(length, Some(pieces.sum()), "{answer:?}");
    }
}
