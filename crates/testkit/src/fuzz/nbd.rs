// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Entry points of `cowshed-nbd-proto`: messages of a stranger at the other end of a connection.

use super::replay::Entry;
use cowshed_nbd_proto::option::{
    InfoRequest, MetaContextRequest, OptionHeader, OptionReply, OptionReplyHeader, parse_export_name,
};
use cowshed_nbd_proto::reply::kind;
use cowshed_nbd_proto::request::StatusFilter;
use cowshed_nbd_proto::{Chunk, HeaderStyle, NbdUri, ReplyHeader, ReplyStyle, Request, greeting};

/// All entry points of this file.
pub const ENTRIES: &[Entry] = &[("nbd_client", client), ("nbd_server", server), ("nbd_uri", uri)];

/// A client's messages: flags, options, requests. An accepted message can be written again, with the same bytes.
pub fn client(data: &[u8]) {
    let Some((first, data)) = data.split_first_chunk::<4>() else { return };
    let _ = greeting::parse_client_flags(*first);
    let mut rest = data;
    while let Some((header, behind)) = rest.split_first_chunk() {
        let Ok(OptionHeader { option, len }) = OptionHeader::parse(header) else { break };
        let (body, behind) = behind.split_at((len as usize).min(behind.len()));
        if let Ok(request) = InfoRequest::parse(body) {
            assert_eq!(InfoRequest::parse(&request.encode()), Ok(request));
        }
        if let Ok(request) = MetaContextRequest::parse(body)
            && !request.too_many
        {
            assert_eq!(MetaContextRequest::parse(&request.encode()), Ok(request));
        }
        let _ = (parse_export_name(body), option);
        rest = behind;
    }
    for style in [HeaderStyle::Compact, HeaderStyle::Extended] {
        let Ok(request) = Request::parse(style, rest) else { continue };
        let (bytes, len) = request.encode(style);
        assert_eq!(bytes[..len], rest[..len]);
        let payload = rest.get(len..).unwrap_or_default();
        if let Ok(filter) = StatusFilter::parse(payload) {
            assert!(!filter.contexts.is_empty());
        }
    }
}

/// A server's messages: option replies, then replies.
pub fn server(data: &[u8]) {
    let mut rest = data;
    while let Some((header, behind)) = rest.split_first_chunk() {
        let Ok(header) = OptionReplyHeader::parse(header) else { break };
        let (body, behind) = behind.split_at((header.len as usize).min(behind.len()));
        if let Ok(reply) = OptionReply::parse(header.kind, body)
            && !matches!(reply, OptionReply::Unknown)
        {
            let mut again = Vec::new();
            reply.append(header.option, &mut again);
            let (head, body) = again.split_first_chunk().unwrap();
            let head = OptionReplyHeader::parse(head).unwrap();
            assert_eq!(OptionReply::parse(head.kind, body), Ok(reply));
        }
        rest = behind;
    }
    for style in [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended] {
        let Some(magic) = rest.first_chunk::<4>() else { return };
        let Ok(needed) = ReplyHeader::bytes_needed(style, *magic) else { continue };
        let Some((head, payload)) = rest.split_at_checked(needed) else { continue };
        let header = ReplyHeader::parse(head).unwrap();
        if let ReplyHeader::Chunk { kind: chunk, payload_bytes, .. } = header
            && chunk != kind::OFFSET_DATA
        {
            let payload = &payload[..payload.len().min(usize::try_from(payload_bytes).unwrap_or(usize::MAX))];
            if let Ok(Chunk::Status(status)) = Chunk::parse(chunk, payload) {
                assert!(status.runs().count() > 0);
            }
        }
    }
}

/// A name: an accepted one can be printed and then means the same.
pub fn uri(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(uri) = NbdUri::parse(text)
        && text.contains("://")
    {
        assert_eq!(NbdUri::parse(&uri.to_string()).unwrap(), uri, "{uri}");
    }
}
