// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The head of a request.

use std::net::{Ipv4Addr, Ipv6Addr};

/// Longest head that is read, in bytes.
pub const MAX_HEAD_BYTES: usize = 16 << 10;

/// Most fields of a head.
const MAX_FIELDS: usize = 64;

/// A client's request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// The method, as it was spelled.
    pub method: String,
    /// The path of the target, with `%XX` decoded and without the query.
    pub path: String,
    /// The text behind the `?` of the target, as it came.
    pub query: Option<String>,
    /// `Accept` names `text/html`: the client is a browser, and shows pages.
    pub shows_pages: bool,
    /// The client's version is HTTP/1.0: it knows neither chunks nor connections that stay.
    pub is_old: bool,
    /// The connection stays after the response, as far as the client is concerned.
    pub keeps_alive: bool,
    /// The head announces content (`Content-Length` above 0, or `Transfer-Encoding`), which no method here takes.
    pub has_content: bool,
    /// The value of `Host`.
    pub host: Option<String>,
    /// The value of `Range`.
    pub range: Option<String>,
    /// The value of `If-Range`.
    pub if_range: Option<String>,
    /// The values of `If-None-Match`, joined by commas.
    pub if_none_match: Option<String>,
    /// The values of `If-Match`, joined by commas.
    pub if_match: Option<String>,
}

impl Request {
    /// True where `Host` is a local name, as [`is_local_name`] has it, or is missing.
    pub fn has_local_name(&self, more: &[String]) -> bool {
        self.host.as_deref().is_none_or(|host| is_local_name(host, more))
    }

    /// The value of a parameter of the query; empty where it has none. `None`: the query lacks it.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let parts = self.query.as_deref()?.split('&');
        parts
            .map(|part| part.split_once('=').unwrap_or((part, "")))
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }
}

/// True for an address, `localhost`, a name below it (RFC 6761, 6.3) or one of `more`, with a port or without. No page of the web can
/// have made such a name lead here, where `more` are names that the owner has chosen.
pub fn is_local_name(host: &str, more: &[String]) -> bool {
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').is_some_and(|(address, port)| {
            address.parse::<Ipv6Addr>().is_ok() && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
        });
    }
    let name = host.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(host, |(name, _)| name);
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let is_known = |known: &String| !name.is_empty() && known.trim_end_matches('.').eq_ignore_ascii_case(&name);
    name == "localhost" || name.ends_with(".localhost") || name.parse::<Ipv4Addr>().is_ok() || more.iter().any(is_known)
}

/// The reason of refusing a head: the status, and a line for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The status code of the response.
    pub status: u16,
    /// A fixed text: nothing of the host.
    pub reason: &'static str,
}

const fn refused(status: u16, reason: &'static str) -> Refused {
    Refused { status, reason }
}

/// Reads a head from the start of `bytes`: the request, and the length of its head in bytes. `None`: more bytes are needed.
///
/// # Errors
/// The status that the client gets when the bytes are no head of HTTP/1.0 or HTTP/1.1, or are longer than
/// [`MAX_HEAD_BYTES`]. The connection can't go on then.
pub fn parse(bytes: &[u8]) -> Result<Option<(Request, usize)>, Refused> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut head = httparse::Request::new(&mut fields);
    let len = match head.parse(bytes) {
        Ok(httparse::Status::Complete(len)) if len <= MAX_HEAD_BYTES => len,
        Ok(httparse::Status::Partial) if bytes.len() < MAX_HEAD_BYTES => return Ok(None),
        Ok(_) | Err(httparse::Error::TooManyHeaders) => {
            return Err(refused(431, "the head of the request is too long"));
        }
        Err(httparse::Error::Version) => return Err(refused(505, "this server speaks HTTP/1.0 and HTTP/1.1")),
        Err(_) => return Err(refused(400, "this is no request of HTTP")),
    };
    let is_old = head.version == Some(0);
    let mut request = Request {
        method: head.method.unwrap_or_default().to_owned(),
        path: path(head.path.unwrap_or_default())?,
        query: head
            .path
            .and_then(|target| target.split('#').next()?.split_once('?'))
            .map(|(_, query)| query.to_owned()),
        is_old,
        keeps_alive: !is_old,
        ..Request::default()
    };
    let mut hosts = 0;
    for field in &*head.headers {
        let is = |name: &str| field.name.eq_ignore_ascii_case(name);
        let wanted =
            ["Range", "If-Range", "If-None-Match", "If-Match", "Connection", "Content-Length", "Host", "Accept"];
        if is("Transfer-Encoding") {
            request.has_content = true;
        }
        if !wanted.iter().any(|name| is(name)) {
            continue;
        }
        let text = std::str::from_utf8(field.value).map_err(|_| refused(400, "a field isn't text"))?.trim();
        if is("Host") {
            hosts += 1;
            request.host = Some(text.to_owned());
        } else if is("Accept") {
            let names_pages = |range: &str| range.split(';').next().is_some_and(|kind| kind.trim() == "text/html");
            request.shows_pages |= text.split(',').any(names_pages);
        } else if is("Content-Length") {
            request.has_content |= text != "0";
        } else if is("Connection") {
            for option in text.split(',').map(str::trim) {
                match option.to_ascii_lowercase().as_str() {
                    "close" => request.keeps_alive = false,
                    // HTTP/1.0 has no chunks, so a response of unknown length can't be distinguished from the next one.
                    "keep-alive" if is_old => request.keeps_alive = true,
                    _ => {}
                }
            }
        } else if is("Range") {
            once(&mut request.range, text)?;
        } else if is("If-Range") {
            once(&mut request.if_range, text)?;
        } else {
            let list = if is("If-Match") { &mut request.if_match } else { &mut request.if_none_match };
            *list = Some(list.take().map_or_else(|| text.to_owned(), |before| format!("{before}, {text}")));
        }
    }
    // RFC 9112, 3.2: exactly one, in HTTP/1.1.
    if hosts > 1 || (hosts == 0 && !is_old) {
        return Err(refused(400, "the request has no field Host, or several"));
    }
    Ok(Some((request, len)))
}

fn once(field: &mut Option<String>, text: &str) -> Result<(), Refused> {
    match field.replace(text.to_owned()) {
        None => Ok(()),
        Some(_) => Err(refused(400, "a field comes twice")),
    }
}

/// The path of a target in origin form or absolute form.
fn path(target: &str) -> Result<String, Refused> {
    let absolute = ["http://", "https://"].iter().find_map(|scheme| {
        let start = target.get(..scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then(|| &target[scheme.len()..])
    });
    let path = match absolute {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    if !path.starts_with('/') {
        return Err(refused(400, "the target of the request is no path"));
    }
    decoded(path).ok_or(refused(400, "the target of the request isn't text"))
}

/// `%XX` decoded; `None` where that isn't UTF-8, or the digits are none.
fn decoded(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digit = |at: usize| rest.get(at).and_then(|&digit| char::from(digit).to_digit(16));
        let value = digit(0)? * 16 + digit(1)?;
        bytes.push(u8::try_from(value).ok()?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(text: &str) -> Result<Option<(Request, usize)>, Refused> {
        parse(text.as_bytes())
    }

    fn whole(text: &str) -> Request {
        let (request, len) = head(text).expect("a head").expect("a whole head");
        assert_eq!(len, text.len());
        request
    }

    #[test]
    fn a_head_is_read_field_by_field() {
        let request = whole(
            "GET /a%20b?x=1 HTTP/1.1\r\nHost: h\r\nRANGE:  bytes=0-9 \r\nIf-Range: \"a\"\r\nIf-None-Match: \"a\"\r\n\
             If-None-Match: W/\"b\"\r\nAccept: */*\r\n\r\n",
        );
        assert_eq!(request.query.as_deref(), Some("x=1"));
        assert!(!request.shows_pages);
        assert!(whole("GET / HTTP/1.1\r\nHost: h\r\nAccept: text/html;q=0.9, */*\r\n\r\n").shows_pages);
        assert_eq!(request.path, "/a b");
        assert_eq!(request.range.as_deref(), Some("bytes=0-9"));
        assert_eq!(request.if_range.as_deref(), Some("\"a\""));
        assert_eq!(request.if_none_match.as_deref(), Some("\"a\", W/\"b\""));
        assert!(request.keeps_alive && !request.has_content && !request.is_old);
    }

    #[test]
    fn names_of_this_machine_are_known() {
        let more = ["Disks.example.org.".to_owned(), String::new()];
        let is_local = |host: &str| Request { host: Some(host.to_owned()), ..Request::default() }.has_local_name(&more);
        for host in [
            "localhost",
            "LocalHost:80",
            "localhost.",
            "a.localhost:1",
            "127.0.0.1",
            "10.1.2.3:8080",
            "[::1]",
            "[::1]:80",
            "disks.example.org:80",
            "disks.EXAMPLE.org.",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in ["", "example.org", "localhost.example.org:80", "notlocalhost", "[::1", "[x]", "[::1]x", "::1"] {
            assert!(!is_local(host), "{host}");
        }
        assert!(Request::default().has_local_name(&more));
    }

    #[test]
    fn connections_stay_as_the_versions_say() {
        assert!(whole("GET / HTTP/1.1\r\nHost: h\r\n\r\n").keeps_alive);
        assert!(!whole("GET / HTTP/1.1\r\nHost: h\r\nConnection: TE, close\r\n\r\n").keeps_alive);
        assert!(!whole("GET / HTTP/1.0\r\n\r\n").keeps_alive);
        assert!(whole("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").keeps_alive);
    }

    #[test]
    fn content_is_noticed() {
        assert!(whole("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n").has_content);
        assert!(whole("PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n").has_content);
        assert!(!whole("GET / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n").has_content);
    }

    #[test]
    fn targets_are_paths() {
        assert_eq!(whole("GET http://h:80/disk#x HTTP/1.1\r\nHost: h\r\n\r\n").path, "/disk");
        assert_eq!(whole("GET HTTPS://h HTTP/1.1\r\nHost: h\r\n\r\n").path, "/");
        for target in ["*", "disk", "/%", "/%f", "/%zz", "/%ff"] {
            let refused = head(&format!("GET {target} HTTP/1.1\r\nHost: h\r\n\r\n")).expect_err(target);
            assert_eq!(refused.status, 400, "{target}");
        }
    }

    #[test]
    fn what_is_no_head_is_refused() {
        let status = |text: &str| head(text).expect_err(text).status;
        assert_eq!(status("GET / HTTP/2.0\r\nHost: h\r\n\r\n"), 505);
        assert_eq!(status("\x16\x03\x01 hello"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nHost: a\r\nRange: bytes=0-1\r\nRange: bytes=0-1\r\n\r\n"), 400);
        assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: a\r\n{}\r\n", "A: b\r\n".repeat(65))), 431);
        assert_eq!(status(&format!("GET /{} HTTP/1.1\r\nHost: a", "x".repeat(MAX_HEAD_BYTES))), 431);
        assert_eq!(head("GET / HTT"), Ok(None));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_have_an_answer(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..512)) {
            if let Ok(Some((_, len))) = parse(&bytes) {
                assert!(len <= bytes.len());
            }
        }
    }
}
