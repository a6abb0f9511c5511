// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From a request, and the known facts of the content, to the response.

use super::range::{Wanted, wanted};
use super::request::Request;
use std::fmt::Write;
use std::ops::Range;

/// The validator of a content (RFC 9110, 8.8.3): the text between the quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Letters, digits and `-`.
    pub text: String,
    /// The content may change while a client reads it: ranges of two responses with this tag don't belong together.
    pub is_weak: bool,
    /// Another content may have it, so it says of no content that it is the same.
    pub is_unsure: bool,
}

impl Tag {
    /// As the field `ETag` has it.
    pub fn field(&self) -> String {
        let weak = if self.is_weak { "W/" } else { "" };
        format!("{weak}\"{}\"", self.text)
    }

    /// True if a list of `If-None-Match` names it (weak comparison).
    fn is_in(&self, list: &str, strongly: bool) -> bool {
        list.trim() == "*"
            || list.split(',').map(str::trim).any(|tag| match tag.strip_prefix("W/") {
                Some(weak) => !strongly && weak == format!("\"{}\"", self.text),
                None => (!strongly || !self.is_weak) && tag == format!("\"{}\"", self.text),
            })
    }
}

/// The description of a content in a response.
#[derive(Clone, Debug)]
pub struct About<'a> {
    /// Length in bytes.
    pub len: u64,
    /// Its validator.
    pub tag: Tag,
    /// Its media type.
    pub media_type: &'a str,
    /// The name under which a browser stores it; it is offered as a file then.
    pub file_name: Option<&'a str>,
    /// The body is packed on the way: `len` is not its length.
    pub is_packed: bool,
    /// A random number for the separator between several ranges. A stranger may have written the content, and must not know it.
    pub boundary: u128,
}

/// A response: its head, and the parts behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The fields, each with its end of line; without `Date` and `Connection`.
    pub fields: String,
    /// The parts behind the head, in order. Empty for `HEAD`.
    pub body: Vec<AnswerPart>,
}

/// A piece of a response's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// These bytes.
    Text(String),
    /// A range of the content.
    Part(Range<u64>),
}

/// The reason phrase of a status code.
pub fn phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        206 => "Partial Content",
        304 => "Not Modified",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        412 => "Precondition Failed",
        413 => "Content Too Large",
        416 => "Range Not Satisfiable",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Unknown",
    }
}

/// A response without the content: a line of text for a reader.
pub fn message(status: u16, text: &str) -> Answer {
    let text = format!("{text}\n");
    let mut fields = String::new();
    field(&mut fields, "Content-Type", "text/plain; charset=utf-8");
    field(&mut fields, "Content-Length", text.len());
    if status == 405 {
        field(&mut fields, "Allow", "GET, HEAD");
    }
    Answer { status, fields, body: vec![AnswerPart::Text(text)] }
}

/// The response to a request of a path that is known.
pub fn answer(request: &Request, about: &About<'_>) -> Answer {
    let is_head = match request.method.as_str() {
        "GET" => false,
        "HEAD" => true,
        _ => return message(405, "only GET and HEAD"),
    };
    let mut answer = content(request, about, is_head);
    if is_head {
        answer.body.clear();
    }
    answer
}

fn content(request: &Request, about: &About<'_>, is_head: bool) -> Answer {
    let tag = about.tag.field();
    // RFC 9110, 13.2.2: If-Match, then If-None-Match, then Range with If-Range.
    if request.if_match.as_deref().is_some_and(|list| !about.tag.is_in(list, true)) {
        return message(412, "the content is another one now");
    }
    let names_tag = |list: &str| list.trim() == "*" || (!about.tag.is_unsure && about.tag.is_in(list, false));
    if request.if_none_match.as_deref().is_some_and(names_tag) {
        let mut fields = String::new();
        field(&mut fields, "ETag", &tag);
        return Answer { status: 304, fields, body: Vec::new() };
    }
    // A date can't show that nothing has changed within its second, so it never matches.
    let is_same = request.if_range.as_deref().is_none_or(|given| !about.tag.is_weak && given.trim() == tag);
    let wanted = match &request.range {
        // RFC 9110, 14.2: a range has a meaning for GET only.
        Some(range) if is_same && !is_head && !about.is_packed => wanted(range, about.len),
        _ => Wanted::All,
    };
    let mut fields = String::new();
    field(&mut fields, "ETag", &tag);
    field(&mut fields, "Accept-Ranges", if about.is_packed { "none" } else { "bytes" });
    field(&mut fields, "X-Content-Type-Options", "nosniff");
    if let Some(name) = about.file_name {
        field(&mut fields, "Content-Disposition", disposition(name));
    }
    match wanted {
        Wanted::All => {
            field(&mut fields, "Content-Type", about.media_type);
            match about.is_packed {
                false => field(&mut fields, "Content-Length", about.len),
                true => field(&mut fields, "Transfer-Encoding", "chunked"),
            }
            Answer { status: 200, fields, body: vec![AnswerPart::Part(0..about.len)] }
        }
        Wanted::Nothing => {
            let mut answer = message(416, "none of these bytes is there, or the ranges are too many");
            field(&mut answer.fields, "Content-Range", format_args!("bytes */{}", about.len));
            answer
        }
        Wanted::Parts(parts) => match &parts[..] {
            [part] => {
                field(&mut fields, "Content-Type", about.media_type);
                field(&mut fields, "Content-Length", part.end - part.start);
                field(&mut fields, "Content-Range", content_range(part, about.len));
                Answer { status: 206, fields, body: vec![AnswerPart::Part(part.clone())] }
            }
            parts => several(fields, parts, about),
        },
    }
}

/// The response with several ranges (RFC 9110, 14.6).
fn several(mut fields: String, parts: &[Range<u64>], about: &About<'_>) -> Answer {
    // The content isn't searched for it (RFC 2046, 5.1.1): one of 2^128 numbers is not there by chance.
    let boundary = format!("cowshed-{:032x}", about.boundary);
    let mut body = Vec::new();
    let mut len = 0;
    for part in parts {
        let range = content_range(part, about.len);
        let head = format!("\r\n--{boundary}\r\nContent-Type: {}\r\nContent-Range: {range}\r\n\r\n", about.media_type);
        len += head.len() as u64 + (part.end - part.start);
        body.extend([AnswerPart::Text(head), AnswerPart::Part(part.clone())]);
    }
    let end = format!("\r\n--{boundary}--\r\n");
    len += end.len() as u64;
    body.push(AnswerPart::Text(end));
    field(&mut fields, "Content-Type", format_args!("multipart/byteranges; boundary={boundary}"));
    field(&mut fields, "Content-Length", len);
    Answer { status: 206, fields, body }
}

fn content_range(part: &Range<u64>, len: u64) -> String {
    format!("bytes {}-{}/{len}", part.start, part.end - 1)
}

/// A text in an address or a field (RFC 3986, section 2.1): each byte but ASCII letters, digits and `plain` as `%XX`.
pub fn percent_encoded(text: &str, plain: &[u8]) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || plain.contains(&byte) {
            true => encoded.push(char::from(byte)),
            // Writing to a string can't fail.
            false => drop(write!(encoded, "%{byte:02X}")),
        }
    }
    encoded
}

/// The field `Content-Disposition` (RFC 6266) for a file of this name.
fn disposition(name: &str) -> String {
    let plain: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || "._- ".contains(c) { c } else { '_' }).collect();
    let encoded = percent_encoded(name, b"._-");
    format!("attachment; filename=\"{plain}\"; filename*=UTF-8''{encoded}")
}

/// Adds a field. Values are ours, or were checked: none has an end of line.
fn field(fields: &mut String, name: &str, value: impl std::fmt::Display) {
    // Writing to a string can't fail.
    let _ = write!(fields, "{name}: {value}\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn about(len: u64) -> About<'static> {
        let tag = Tag { text: "v1".into(), is_weak: false, is_unsure: false };
        About { len, tag, media_type: "application/octet-stream", file_name: None, is_packed: false, boundary: 7 }
    }

    fn get() -> Request {
        Request { method: "GET".into(), path: "/d".into(), keeps_alive: true, ..Request::default() }
    }

    fn value<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
        let of = |line: &'a str| line.split_once(": ").filter(|(field, _)| *field == name).map(|(_, value)| value);
        answer.fields.lines().find_map(of)
    }

    #[test]
    fn the_whole_content_is_the_answer_to_a_plain_get() {
        let all = answer(&get(), &about(1000));
        assert_eq!((all.status, &all.body[..]), (200, &[AnswerPart::Part(0..1000)][..]));
        assert_eq!(value(&all, "Content-Length"), Some("1000"));
        assert_eq!(value(&all, "ETag"), Some("\"v1\""));
        assert_eq!(value(&all, "Accept-Ranges"), Some("bytes"));
        let head = answer(&Request { method: "HEAD".into(), range: Some("bytes=0-9".into()), ..get() }, &about(1000));
        assert_eq!((head.status, head.body.len(), value(&head, "Content-Length")), (200, 0, Some("1000")));
        assert_eq!(answer(&Request { method: "PUT".into(), ..get() }, &about(1000)).status, 405);
    }

    #[test]
    fn a_range_is_answered_with_its_place() {
        let one = answer(&Request { range: Some("bytes=10-19".into()), ..get() }, &about(1000));
        assert_eq!((one.status, &one.body[..]), (206, &[AnswerPart::Part(10..20)][..]));
        assert_eq!(value(&one, "Content-Range"), Some("bytes 10-19/1000"));
        assert_eq!(value(&one, "Content-Length"), Some("10"));
        let none = answer(&Request { range: Some("bytes=1000-".into()), ..get() }, &about(1000));
        assert_eq!((none.status, value(&none, "Content-Range")), (416, Some("bytes */1000")));
    }

    #[test]
    fn streamed_answer_has_no_length_and_no_ranges() {
        let request = Request { range: Some("bytes=10-19".into()), ..get() };
        let packed = answer(&request, &About { is_packed: true, ..about(1000) });
        assert_eq!((packed.status, &packed.body[..]), (200, &[AnswerPart::Part(0..1000)][..]));
        assert_eq!((value(&packed, "Content-Length"), value(&packed, "Accept-Ranges")), (None, Some("none")));
        assert_eq!(value(&packed, "Transfer-Encoding"), Some("chunked"));
    }

    #[test]
    fn several_ranges_have_their_length_counted() {
        let several = answer(&Request { range: Some("bytes=0-9,20-29".into()), ..get() }, &about(1000));
        assert_eq!(several.status, 206);
        let len: u64 = several
            .body
            .iter()
            .map(|piece| match piece {
                AnswerPart::Text(text) => text.len() as u64,
                AnswerPart::Part(part) => part.end - part.start,
            })
            .sum();
        assert_eq!(value(&several, "Content-Length"), Some(len.to_string().as_str()));
        assert_eq!(several.body.iter().filter(|piece| matches!(piece, AnswerPart::Part(_))).count(), 2);
    }

    #[test]
    fn conditions_decide_as_the_rfc_says() {
        let status = |change: fn(&mut Request)| {
            let mut request = Request { range: Some("bytes=0-9".into()), ..get() };
            change(&mut request);
            answer(&request, &about(1000)).status
        };
        assert_eq!(status(|request| request.if_range = Some("\"v1\"".into())), 206);
        assert_eq!(status(|request| request.if_range = Some("\"v0\"".into())), 200);
        assert_eq!(status(|request| request.if_range = Some("W/\"v1\"".into())), 200);
        assert_eq!(status(|request| request.if_range = Some("Thu, 26 Nov 2026 10:00:00 GMT".into())), 200);
        assert_eq!(status(|request| request.if_none_match = Some("\"v0\", W/\"v1\"".into())), 304);
        assert_eq!(status(|request| request.if_none_match = Some("*".into())), 304);
        assert_eq!(status(|request| request.if_none_match = Some("\"v0\"".into())), 206);
        assert_eq!(status(|request| request.if_match = Some("\"v0\"".into())), 412);
        assert_eq!(status(|request| request.if_match = Some("\"v0\",\"v1\"".into())), 206);
        assert_eq!(status(|request| request.if_match = Some("W/\"v1\"".into())), 412);
    }

    #[test]
    fn a_content_that_changes_has_no_range_to_go_on_with() {
        let tag = Tag { text: "v1".into(), is_weak: true, is_unsure: false };
        let weak = About { tag: tag.clone(), ..about(1000) };
        let request = Request { range: Some("bytes=0-9".into()), if_range: Some("W/\"v1\"".into()), ..get() };
        let whole = answer(&request, &weak);
        assert_eq!((whole.status, value(&whole, "ETag")), (200, Some("W/\"v1\"")));
        assert_eq!(answer(&Request { if_match: Some("\"v1\"".into()), ..get() }, &weak).status, 412);
        let known = |list: &str| Request { if_none_match: Some(list.into()), ..get() };
        assert_eq!(answer(&known("W/\"v1\""), &weak).status, 304);
        // A cache would go on with another content for ever.
        let unsure = About { tag: Tag { is_unsure: true, ..tag }, ..about(1000) };
        assert_eq!(["W/\"v1\"", "\"v1\"", "*"].map(|list| answer(&known(list), &unsure).status), [200, 200, 304]);
    }

    #[test]
    fn names_of_files_can_not_end_a_field() {
        let name = "a\"\r\nSet-Cookie: x; é.raw";
        let offered = answer(&get(), &About { file_name: Some(name), ..about(1) });
        assert_eq!(
            value(&offered, "Content-Disposition"),
            Some(
                "attachment; filename=\"a___Set-Cookie_ x_ _.raw\"; filename*=UTF-8''a%22%0D%0ASet-Cookie%3A%20x%3B%20%C3%A9.raw"
            )
        );
        assert_eq!(offered.fields.lines().count(), 6);
    }
}
