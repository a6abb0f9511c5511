// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every option and every command, against a model of the bytes.

use crate::served;

use crate::served::Served;
use crate::served::wire::Wire;
use cowshed_image::OpenRequest;
use cowshed_nbd_proto::flags::{ClientFlags, CommandFlags, STATE_HOLE, STATE_ZERO, TransmissionFlags};
use cowshed_nbd_proto::option::{BlockSizes, InfoRequest, MetaContextRequest, OptionReply, code, rep};
use cowshed_nbd_proto::{Command, NbdErrno, ReplyStyle, Request};
use cowshed_nbd_server::{Limits, ServerConfig};
use cowshed_storage::{Socket, rt};
use cowshed_testkit::qemu::Qemu;
use std::sync::Arc;

const SIZE: u64 = 4 << 20;
const NONE: CommandFlags = CommandFlags(0);
const STYLES: [ReplyStyle; 3] = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended];

/// A server with an empty qcow2 image under the name "disk".
fn serve() -> Served {
    let served = Served::start(ServerConfig::default());
    let image = served.path("disk.qcow2");
    Qemu::system().create(&image, "qcow2", "", SIZE);
    served.export(OpenRequest::file(image.to_str().unwrap()).writable(true).discard(true), |export| {
        export.name = "disk".to_owned();
        export.description = "for tests".to_owned();
        export.allocation_depth = true;
    });
    served
}

fn info(name: &str, block_size: bool) -> Vec<u8> {
    InfoRequest { name, block_size, canonical_name: false, description: false }.encode()
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    MetaContextRequest { name, queries: queries.to_vec(), too_many: false }.encode()
}

#[test]
fn every_option_is_answered() {
    let served = serve();
    let mut wire = Wire::connect(&served.socket);
    // Unknown ones, also those that the protocol had once.
    for option in [0, 4, 12, 99, u32::MAX] {
        assert_eq!(wire.outcome(option, b"whatever"), rep::ERR_UNSUP);
    }
    let list = wire.option(code::LIST, &[]);
    let server = OptionReply::parse(list[0].0, &list[0].1).unwrap();
    assert_eq!(server, OptionReply::Server { name: "disk", description: "for tests" });
    assert_eq!((list.len(), list[1].0), (2, rep::ACK));
    for option in [code::LIST, code::STRUCTURED_REPLY, code::EXTENDED_HEADERS, code::STARTTLS] {
        assert_eq!(wire.outcome(option, b"x"), rep::ERR_INVALID, "option {option} has no data");
    }
    let start = wire.option(code::STARTTLS, &[]);
    let refusal = OptionReply::parse(start[0].0, &start[0].1).unwrap();
    assert_eq!(refusal, OptionReply::Refused(rep::ERR_POLICY, "TLS not configured"));
    // The choice of metadata needs structured replies.
    assert_eq!(wire.outcome(code::SET_META_CONTEXT, &contexts("disk", &["base:allocation"])), rep::ERR_INVALID);
    assert_eq!(wire.option(code::LIST_META_CONTEXT, &contexts("disk", &[])).len(), 3, "two contexts and the end");
    wire.expect_ack(code::STRUCTURED_REPLY);
    assert_eq!(wire.outcome(code::STRUCTURED_REPLY, &[]), rep::ERR_INVALID, "they are chosen already");
    wire.replies = ReplyStyle::Structured;
    let names = |replies: Vec<(u32, Vec<u8>)>| -> Vec<(u32, String)> {
        assert_eq!(replies.last().unwrap().0, rep::ACK);
        let parse = |(kind, data): &(u32, Vec<u8>)| match OptionReply::parse(*kind, data).unwrap() {
            OptionReply::MetaContext(number, name) => Some((number, name.to_owned())),
            _ => None,
        };
        replies.iter().filter_map(parse).collect()
    };
    let both = [(0, "base:allocation".to_owned()), (0, "qemu:allocation-depth".to_owned())];
    assert_eq!(names(wire.option(code::LIST_META_CONTEXT, &contexts("disk", &[]))), both);
    assert_eq!(names(wire.option(code::LIST_META_CONTEXT, &contexts("disk", &["base:"]))), both[..1]);
    assert_eq!(names(wire.option(code::SET_META_CONTEXT, &contexts("disk", &["base:", "x-no:thing"]))), []);
    let set =
        names(wire.option(code::SET_META_CONTEXT, &contexts("disk", &["qemu:allocation-depth", "base:allocation"])));
    assert_eq!((set.len(), set[0].0 != set[1].0), (2, true));
    assert_eq!(wire.outcome(code::SET_META_CONTEXT, &contexts("nothing", &[])), rep::ERR_UNKNOWN);
    assert_eq!(wire.outcome(code::SET_META_CONTEXT, &[0, 0, 0, 9, b'd']), rep::ERR_INVALID);
    let many = vec!["base:allocation"; 300];
    assert_eq!(wire.outcome(code::SET_META_CONTEXT, &contexts("disk", &many)), rep::ERR_TOO_BIG);
    // Information about exports.
    assert_eq!(wire.outcome(code::INFO, &info("nothing", true)), rep::ERR_UNKNOWN);
    assert_eq!(wire.outcome(code::INFO, &info("", true)), rep::ERR_UNKNOWN, "there is no default export");
    assert_eq!(wire.outcome(code::INFO, &[1, 2, 3]), rep::ERR_INVALID);
    let mut long = info("disk", true);
    long.push(0);
    assert_eq!(wire.outcome(code::INFO, &long), rep::ERR_INVALID);
    let replies = wire.option(code::INFO, &info("disk", true));
    let parsed: Vec<_> = replies.iter().map(|(kind, data)| OptionReply::parse(*kind, data).unwrap()).collect();
    assert!(matches!(parsed[0], OptionReply::Export(SIZE, _)), "{parsed:?}");
    assert_eq!(parsed[1], OptionReply::BlockSize(BlockSizes::UNSAID));
    assert_eq!(wire.option(code::GO, &info("disk", true)), replies, "GO says what INFO said");
    assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0);
    served.stop();
}

#[test]
fn extended_headers_take_precedence() {
    let served = serve();
    let mut wire = Wire::connect(&served.socket);
    wire.expect_ack(code::EXTENDED_HEADERS);
    assert_eq!(wire.outcome(code::STRUCTURED_REPLY, &[]), rep::ERR_EXT_HEADER_REQD);
    // The old way to choose an export has no place for them.
    wire.send(&cowshed_nbd_proto::option::encode(code::EXPORT_NAME, b"disk"));
    wire.expect_end();
    let (_, flags) = Wire::enter(&served.socket, ReplyStyle::Extended, "disk", &["base:allocation"]);
    assert!(flags.contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD));
    let (_, flags) = Wire::enter(&served.socket, ReplyStyle::Extended, "disk", &[]);
    assert!(!flags.contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD));
    // A client that only asked may still choose contexts, as with QEMU's server.
    let mut wire = Wire::connect(&served.socket);
    wire.expect_ack(code::EXTENDED_HEADERS);
    let replies = wire.option(code::INFO, &info("disk", false));
    let OptionReply::Export(_, flags) = OptionReply::parse(replies[0].0, &replies[0].1).unwrap() else { panic!() };
    assert!(flags.contains(TransmissionFlags::BLOCK_STATUS_PAYLOAD));
    let (_, flags) = Wire::enter(&served.socket, ReplyStyle::Simple, "disk", &[]);
    assert!(!flags.contains(TransmissionFlags::SEND_DF));
    served.stop();
}

#[test]
fn the_old_way_to_choose_an_export_works() {
    let served = serve();
    for (flags, zeroes) in [(ClientFlags::FIXED_NEWSTYLE | ClientFlags::NO_ZEROES, 0), (ClientFlags::default(), 124)] {
        let mut wire = Wire::connect_with(&served.socket, flags);
        wire.send(&cowshed_nbd_proto::option::encode(code::EXPORT_NAME, b"disk"));
        let (size, _) = cowshed_nbd_proto::greeting::parse_export(&wire.array()).unwrap();
        assert_eq!(size, SIZE);
        assert_eq!(wire.bytes(zeroes), vec![0; zeroes]);
        assert_eq!(wire.ask(Command::Read, NONE, 0, 512).data, vec![0; 512]);
    }
    let mut wire = Wire::connect(&served.socket);
    wire.send(&cowshed_nbd_proto::option::encode(code::EXPORT_NAME, b"nothing"));
    wire.expect_end();
    let mut wire = Wire::connect(&served.socket);
    assert_eq!(wire.outcome(code::ABORT, b"data is ignored"), rep::ACK);
    wire.expect_end();
    served.stop();
}

/// A small generator, so that runs can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn every_command_in_every_style_is_what_the_model_says() {
    let seed = std::env::var("COWSHED_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let served = serve();
    let mut model = vec![0u8; SIZE as usize];
    for (round, style) in STYLES.into_iter().cycle().take(6).enumerate() {
        let queries: &[&str] = if style == ReplyStyle::Simple { &[] } else { &["base:allocation"] };
        let (mut wire, _) = Wire::enter(&served.socket, style, "disk", queries);
        let mut random = Random(seed + round as u64);
        for step in 0..150 {
            let offset = random.below(SIZE - 1);
            let length = (1 + random.below(200_000)).min(SIZE - offset);
            let range = offset as usize..(offset + length) as usize;
            let fua = NONE.with(CommandFlags::FUA, random.below(4) == 0);
            let context = format!("seed {seed}, {style:?}, step {step}");
            match random.below(8) {
                0 | 1 => {
                    let byte = random.below(256) as u8;
                    let data: Vec<u8> = (0..length).map(|i| byte.wrapping_add((i / 512) as u8)).collect();
                    assert_eq!(wire.write(fua, offset, &data).errno, 0, "{context}");
                    model[range].copy_from_slice(&data);
                }
                2 => {
                    let flags = fua.with(CommandFlags::NO_HOLE, random.below(2) == 0);
                    assert_eq!(wire.ask(Command::WriteZeroes, flags, offset, length).errno, 0, "{context}");
                    model[range].fill(0);
                }
                3 => {
                    let flags = fua | CommandFlags::FAST_ZERO;
                    match wire.ask(Command::WriteZeroes, flags, offset, length).errno {
                        0 => model[range].fill(0),
                        errno => assert_eq!(errno, NbdErrno::ENOTSUP.0, "{context}"),
                    }
                }
                4 => {
                    assert_eq!(wire.ask(Command::Trim, fua, offset, length).errno, 0, "{context}");
                    // A trimmed range's contents are the server's choice; ours: the old bytes, or zeroes.
                    let now = wire.ask(Command::Read, NONE, offset, length).data;
                    for (now, before) in now.iter().zip(&mut model[range]) {
                        assert!(*now == *before || *now == 0, "{context}");
                        *before = *now;
                    }
                }
                5 => {
                    assert_eq!(wire.ask(Command::Flush, NONE, 0, 0).errno, 0, "{context}");
                    assert_eq!(wire.ask(Command::Cache, NONE, offset, length).errno, 0, "{context}");
                }
                6 if style != ReplyStyle::Simple => {
                    let flags = NONE.with(CommandFlags::REQ_ONE, random.below(2) == 0);
                    let status = wire.ask(Command::BlockStatus, flags, offset, length).status;
                    assert_eq!(status.len(), 1, "{context}");
                    let mut at = offset;
                    for run in &status[0].1 {
                        assert!(run.len > 0 && run.flags & !(STATE_HOLE | STATE_ZERO) == 0);
                        let zero = model[at as usize..(at + run.len).min(SIZE) as usize].iter().all(|&b| b == 0);
                        assert!(zero || run.flags & STATE_ZERO == 0, "{context}: {run:?} at {at}");
                        at += run.len;
                    }
                    assert!(at <= offset + length);
                    assert!(flags == NONE || status[0].1.len() == 1, "{context}");
                }
                _ => {
                    let df = style != ReplyStyle::Simple && random.below(2) == 0;
                    let reply = wire.ask(Command::Read, NONE.with(CommandFlags::DF, df), offset, length);
                    let wrong = reply.data.iter().zip(&model[range]).position(|(found, expected)| found != expected);
                    assert_eq!(wrong, None, "{context}: {offset} {length} {:?}", reply.pieces);
                    assert!(!df || reply.pieces.len() == 1, "{context}");
                }
            }
        }
    }
    served.stop();
}

#[test]
fn errors_are_those_of_the_protocol() {
    let served = serve();
    let image = served.path("small.raw");
    std::fs::write(&image, vec![1; 1 << 20]).unwrap();
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw"), |export| {
        export.name = "blocks".to_owned();
        export.block_sizes = BlockSizes { minimum: 4096, preferred: 8192, maximum: 1 << 16 };
    });
    for style in STYLES {
        let (mut wire, _) = Wire::enter(&served.socket, style, "disk", &[]);
        let extended = style == ReplyStyle::Extended;
        let fua = CommandFlags::FUA;
        for (command, flags, offset, length, errno) in [
            (Command::Read, NONE, SIZE, 1, NbdErrno::EINVAL),
            (Command::Read, NONE, u64::MAX, 512, NbdErrno::EINVAL),
            (Command::Read, NONE, 0, 33 << 20, NbdErrno::EINVAL),
            (Command::Cache, NONE, SIZE - 1, 2, NbdErrno::EINVAL),
            (Command::Trim, NONE, SIZE - 1, 2, NbdErrno::EINVAL),
            (Command::WriteZeroes, NONE, SIZE - 1, 2, NbdErrno::ENOSPC),
            (Command::BlockStatus, NONE, 0, 512, NbdErrno::EINVAL),
            (Command::Unknown(77), NONE, 0, 512, NbdErrno::EINVAL),
            (Command::Read, CommandFlags(1 << 14), 0, 512, NbdErrno::EINVAL),
            (Command::Read, CommandFlags::NO_HOLE, 0, 512, NbdErrno::EINVAL),
            (Command::Flush, CommandFlags::REQ_ONE, 0, 0, NbdErrno::EINVAL),
            (Command::Flush, fua, 0, 0, NbdErrno(0)),
            (Command::Read, fua, 0, 512, NbdErrno(0)),
            (Command::Read, NONE, 5, 0, NbdErrno(0)),
            (Command::WriteZeroes, NONE, SIZE, 0, NbdErrno(0)),
            (Command::Trim, fua, 0, 0, NbdErrno(0)),
        ] {
            let reply = wire.ask(command, flags, offset, length);
            assert_eq!(reply.errno, errno.0, "{style:?} {command:?} {flags:?} {offset} {length}: {reply:?}");
            assert_eq!(reply.message.is_empty(), errno.0 == 0 || style == ReplyStyle::Simple);
        }
        let df = wire.ask(Command::Read, CommandFlags::DF, 0, 512);
        assert_eq!(df.errno == 0, style != ReplyStyle::Simple);
        assert_eq!(wire.write(NONE, SIZE - 1, &[1, 2]).errno, NbdErrno::ENOSPC.0);
        assert_eq!(wire.write(CommandFlags::DF, 0, &[1, 2]).errno, NbdErrno::EINVAL.0);
        assert_eq!(wire.write(NONE, 7, &[]).errno, 0);
        if extended {
            // QEMU's client doesn't set the flag: the data of a write follows all the same.
            let cookie = wire.request(Command::Write, NONE, 512, 512, &[6; 512]);
            assert_eq!(wire.collect(cookie, 0, 0).errno, 0);
            assert_eq!(wire.ask(Command::Read, NONE, 512, 512).data, [6; 512]);
            // An empty payload names no range.
            let cookie = wire.request(Command::BlockStatus, CommandFlags::PAYLOAD_LEN, 0, 0, &[]);
            assert_eq!(wire.collect(cookie, 0, 0).errno, NbdErrno::EINVAL.0);
            // A payload that doesn't belong there is taken and thrown away.
            let cookie = wire.request(Command::Read, CommandFlags::PAYLOAD_LEN, 0, 5, b"12345");
            assert_eq!(wire.collect(cookie, 0, 0).errno, NbdErrno::EINVAL.0);
            let zeroes = wire.ask(Command::WriteZeroes, NONE, 0, 1 << 40);
            assert_eq!(zeroes.errno, NbdErrno::ENOSPC.0);
        }
        // The connection is still in step.
        assert_eq!(wire.ask(Command::Read, NONE, 0, 512).errno, 0);

        let (mut wire, flags) = Wire::enter(&served.socket, style, "blocks", &[]);
        assert!(flags.contains(TransmissionFlags::READ_ONLY) && !flags.contains(TransmissionFlags::SEND_TRIM));
        assert_eq!(wire.write(NONE, 0, &[0; 4096]).errno, NbdErrno::EPERM.0);
        for (command, offset, length, errno) in [
            (Command::Trim, 0, 4096, NbdErrno::EPERM),
            (Command::WriteZeroes, 0, 4096, NbdErrno::EPERM),
            (Command::Read, 512, 4096, NbdErrno::EINVAL),
            (Command::Read, 0, 512, NbdErrno::EINVAL),
            (Command::Read, 0, (1 << 16) + 4096, NbdErrno::EINVAL),
            (Command::Read, 0, 1 << 16, NbdErrno(0)),
            (Command::Flush, 0, 0, NbdErrno(0)),
        ] {
            assert_eq!(
                wire.ask(command, NONE, offset, length).errno,
                errno.0,
                "{style:?} {command:?} {offset} {length}"
            );
        }
        wire.request(Command::Disconnect, NONE, 0, 0, &[]);
        wire.expect_end();
    }
    served.stop();
}

/// As QEMU's: a client that heeds it reads and writes whole blocks, and one that doesn't is served.
#[test]
fn the_block_of_a_disk_is_told_and_not_enforced() {
    let served = serve();
    let image = served.path("sectors.raw");
    std::fs::write(&image, vec![1; (1 << 20) + 512]).unwrap();
    for (name, unit_bytes, told) in [("sectors", 512, 512), ("pages", 4096, 1), ("large", 1 << 20, 1)] {
        served.export(OpenRequest::file(image.to_str().unwrap()).format("raw"), |export| {
            export.name = name.to_owned();
            export.unit_bytes = unit_bytes;
        });
        let replies = Wire::connect(&served.socket).option(code::INFO, &info(name, true));
        let sizes = OptionReply::parse(replies[1].0, &replies[1].1).unwrap();
        assert_eq!(sizes, OptionReply::BlockSize(BlockSizes { minimum: told, ..BlockSizes::UNSAID }), "{name}");
        let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Structured, name, &[]);
        assert_eq!(wire.ask(Command::Read, NONE, 3, 5).data, [1; 5]);
    }
    served.stop();
}

/// The data of a write is never taken for a request, whatever is wrong with the write.
#[test]
fn the_data_of_a_refused_write_is_no_request() {
    let served = serve();
    let request = |name| {
        let raw = served.path(name);
        std::fs::write(&raw, vec![1; 1 << 20]).unwrap();
        OpenRequest::file(raw.to_str().unwrap()).format("raw")
    };
    served.export(request("read-only.raw"), |export| export.name = "read-only".to_owned());
    served.export(request("blocks.raw").writable(true), |export| {
        export.name = "blocks".to_owned();
        export.block_sizes = BlockSizes { minimum: 4096, preferred: 8192, maximum: 1 << 16 };
    });
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "disk", &[]);
    assert_eq!(wire.write(NONE, 0, &[7; 4096]).errno, 0);
    for style in STYLES {
        for (name, command, flags, offset, length) in [
            ("disk", Command::Write, NONE, SIZE, 4096),
            ("disk", Command::Write, NONE, u64::MAX, 4096),
            ("disk", Command::Write, CommandFlags(1 << 14), 65536, 4096),
            ("disk", Command::Write, CommandFlags::REQ_ONE, 65536, 4096),
            ("disk", Command::Write, CommandFlags::NO_HOLE, 65536, 4096),
            ("disk", Command::Write, NONE, SIZE - 4096, 32 << 20),
            ("read-only", Command::Write, NONE, 65536, 4096),
            ("blocks", Command::Write, NONE, 512, 4096),
            ("blocks", Command::Write, NONE, 65536, 64),
            ("blocks", Command::Write, NONE, 65536, (1 << 16) + 4096),
            ("disk", Command::Read, CommandFlags::PAYLOAD_LEN, 65536, 4096),
            ("disk", Command::Trim, CommandFlags::PAYLOAD_LEN, 65536, 4096),
            ("disk", Command::Flush, CommandFlags::PAYLOAD_LEN, 0, 4096),
            ("disk", Command::Cache, CommandFlags::PAYLOAD_LEN, 0, 4096),
            ("disk", Command::WriteZeroes, CommandFlags::PAYLOAD_LEN, 65536, 4096),
            ("disk", Command::BlockStatus, CommandFlags::PAYLOAD_LEN, 0, 4096),
            ("disk", Command::Unknown(77), CommandFlags::PAYLOAD_LEN, 0, 4096),
        ] {
            // Compact headers have a payload only with a write.
            if command != Command::Write && style != ReplyStyle::Extended {
                continue;
            }
            for flags in [flags, flags | CommandFlags::PAYLOAD_LEN] {
                let (mut wire, _) = Wire::enter(&served.socket, style, name, &[]);
                // Each piece of the data is a request that overwrites the start of the disk.
                let smuggled =
                    Request { command: Command::WriteZeroes, flags: NONE, cookie: 666, offset: 0, length: 512 };
                let (header, len) = smuggled.encode(wire.headers);
                let mut payload = header[..len].repeat(length as usize / len + 1);
                payload.truncate(length as usize);
                let before = wire.ask(Command::Read, NONE, 0, 4096).data;
                let cookie = wire.request(command, flags, offset, length, &payload);
                let reply = wire.collect(cookie, offset, 0);
                let context = format!("{name} {style:?} {command:?} {flags:?} {offset} {length}");
                assert_ne!(reply.errno, 0, "{context}");
                let after = wire.ask(Command::Read, NONE, 0, 4096);
                assert!(after.errno == 0 && after.data == before, "{context}");
            }
        }
        // More data than the limit allows ends the connection.
        for flags in [NONE, CommandFlags::PAYLOAD_LEN] {
            let (mut wire, _) = Wire::enter(&served.socket, style, "disk", &[]);
            wire.request(Command::Write, flags, 0, (32 << 20) + 1, &[]);
            wire.expect_end();
        }
    }
    served.stop();
}

#[test]
fn write_zeroes_obeys_no_hole_and_fast_zero() {
    let served = serve();
    let (base, old) = (served.path("base.raw"), served.path("old.qcow2"));
    let content = served::write_pattern(&base, SIZE, 4);
    let qemu = Qemu::system();
    // Version 2 has no zero flag above a backing file: zeroes must be written there.
    let create = ["create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-F", "raw", "-b", base.to_str().unwrap()];
    qemu.img(create.into_iter().chain([old.to_str().unwrap()])).expect_ok();
    served.export(OpenRequest::file(old.to_str().unwrap()).writable(true).discard(true), |export| {
        export.name = "old".to_owned();
    });
    const PIECE: u64 = 65536;
    for style in STYLES {
        let (mut wire, flags) = Wire::enter(&served.socket, style, "old", &[]);
        assert!(flags.contains(TransmissionFlags::SEND_FAST_ZERO));
        for no_hole in [CommandFlags(0), CommandFlags::NO_HOLE] {
            let refused = wire.ask(Command::WriteZeroes, CommandFlags::FAST_ZERO | no_hole, PIECE, PIECE);
            assert_eq!(refused.errno, NbdErrno::ENOTSUP.0, "{style:?}");
        }
        let now = wire.ask(Command::Read, NONE, PIECE, PIECE).data;
        assert!(now == content[PIECE as usize..2 * PIECE as usize], "a refusal changes nothing");
    }
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Structured, "old", &[]);
    assert_eq!(wire.ask(Command::WriteZeroes, NONE, PIECE, PIECE).errno, 0);
    assert_eq!(wire.ask(Command::Read, NONE, PIECE, PIECE).data, vec![0; PIECE as usize]);

    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Structured, "disk", &[]);
    assert_eq!(wire.write(NONE, 0, &vec![1; 4 * PIECE as usize]).errno, 0);
    assert_eq!(wire.ask(Command::WriteZeroes, CommandFlags::NO_HOLE, 0, PIECE).errno, 0);
    assert_eq!(wire.ask(Command::WriteZeroes, NONE, 2 * PIECE, PIECE).errno, 0);
    assert_eq!(wire.ask(Command::Read, NONE, 0, PIECE).data, vec![0; PIECE as usize]);
    let image = served.path("disk.qcow2");
    let _folder = served.stop();
    let map = qemu.map(&image, "qcow2");
    let run_at = |offset: u64| map.iter().find(|run| run.start == offset).unwrap_or_else(|| panic!("{map:?}"));
    assert!(run_at(0).zero && run_at(0).offset.is_some(), "NO_HOLE keeps the cluster: {map:?}");
    assert!(run_at(2 * PIECE).zero && run_at(2 * PIECE).offset.is_none(), "without it the cluster is freed: {map:?}");
}

#[test]
fn a_status_can_name_its_contexts() {
    let served = serve();
    let queries = ["base:allocation", "qemu:allocation-depth"];
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Extended, "disk", &queries);
    assert_eq!(wire.write(NONE, 1 << 20, &[1; 65536]).errno, 0);
    let both = wire.ask(Command::BlockStatus, NONE, 0, SIZE).status;
    let numbers: Vec<u32> = both.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [0, 1]);
    let depths: Vec<(u64, u32)> = both[1].1.iter().map(|run| (run.len, run.flags)).collect();
    assert_eq!(depths, [(1 << 20, 0), (65536, 1), (SIZE - (1 << 20) - 65536, 0)]);
    let mut filtered = |ids: &[u32], effect: u64| {
        let mut payload = effect.to_be_bytes().to_vec();
        payload.extend(ids.iter().flat_map(|id| id.to_be_bytes()));
        let cookie = wire.request(Command::BlockStatus, CommandFlags::PAYLOAD_LEN, 0, payload.len() as u64, &payload);
        wire.collect(cookie, 0, 0)
    };
    assert_eq!(filtered(&[1], SIZE).status, both[1..]);
    assert_eq!(filtered(&[0], SIZE).status, both[..1]);
    for (ids, effect) in [(&[2][..], SIZE), (&[0, 0], SIZE), (&[], SIZE), (&[0], SIZE + 1), (&[0], 0)] {
        assert_eq!(filtered(ids, effect).errno, NbdErrno::EINVAL.0, "{ids:?} {effect}");
    }
    served.stop();
}

#[test]
fn many_requests_are_in_flight_and_none_is_mixed_up() {
    let limits = Limits { max_requests: 8, max_bytes_in_flight: 1 << 20, ..Limits::default() };
    let served = Served::start(ServerConfig { limits, ..ServerConfig::default() });
    let image = served.path("disk.raw");
    let content = served::write_pattern(&image, 16 << 20, 9);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw"), |_| ());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    // All requests go out before any reply is read: more than the server takes at once.
    let cookies: Vec<u64> = (0..200).map(|i| wire.request(Command::Read, NONE, i * 70_000, 65_536, &[])).collect();
    let mut seen = [false; 200];
    for _ in 0..200 {
        let header: [u8; 16] = wire.array();
        let cookie = u64::from_be_bytes(header[8..].try_into().unwrap());
        let index = cookies.iter().position(|&known| known == cookie).expect("a known cookie");
        assert!(!std::mem::replace(&mut seen[index], true));
        assert!(wire.bytes(65_536) == content[index * 70_000..][..65_536]);
    }
    served.stop();
}

#[test]
fn a_stream_of_requests_is_answered_right_with_pauses_and_without() {
    // Enough for windows with pauses before receiving, which every connection tries after its first 512 requests.
    const REQUESTS: u64 = 10_000;
    const SLOTS: u64 = 32;
    const BYTES: u64 = 4096;
    let served = Served::start(ServerConfig::default());
    let image = served.path("disk.raw");
    let mut content = served::write_pattern(&image, SLOTS * BYTES, 21);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw").writable(true), |_| ());
    let (mut wire, _) = Wire::enter(&served.socket, ReplyStyle::Simple, "", &[]);
    let mut sent = 0;
    // In each slot one request at a time: mostly reads.
    let mut send = |wire: &mut Wire, slot: u64, content: &mut [u8]| {
        sent += 1;
        let writes = sent % 7 == 0;
        let own = &mut content[(slot * BYTES) as usize..][..BYTES as usize];
        if writes {
            own.fill(sent as u8);
        }
        let (command, payload) = if writes { (Command::Write, &*own) } else { (Command::Read, &[][..]) };
        (wire.request(command, NONE, slot * BYTES, BYTES, payload), writes)
    };
    let mut in_flight: Vec<(u64, bool)> = (0..SLOTS).map(|slot| send(&mut wire, slot, &mut content)).collect();
    for received in 0..REQUESTS {
        let header: [u8; 16] = wire.array();
        let cookie = u64::from_be_bytes(header[8..].try_into().unwrap());
        assert_eq!(header[4..8], [0; 4], "request {cookie} failed");
        let slot = in_flight.iter().position(|&(known, _)| known == cookie).expect("a known cookie");
        let (_, writes) = in_flight[slot];
        let own = &content[slot * BYTES as usize..][..BYTES as usize];
        assert!(writes || wire.bytes(BYTES as usize) == own, "request {cookie}");
        // Towards the end only one slot is used: the gathered replies aren't there any more.
        if received + SLOTS < REQUESTS - 1000 || (slot == 0 && received < REQUESTS - 1) {
            in_flight[slot] = send(&mut wire, slot as u64, &mut content);
        } else {
            in_flight[slot] = (0, false);
        }
        if in_flight.iter().all(|request| request.0 == 0) {
            break;
        }
    }
    wire.request(Command::Disconnect, NONE, 0, 0, &[]);
    wire.expect_end();
    let _dir = served.stop();
    assert!(std::fs::read(&image).unwrap() == content);
}

#[test]
fn client_is_served_on_the_callers_executor() {
    let served = Served::start(ServerConfig::default());
    let image = served.path("disk.raw");
    let content = served::write_pattern(&image, 4 << 20, 5);
    served.export(OpenRequest::file(image.to_str().unwrap()).format("raw"), |_| ());
    let path = served.path("own.sock");
    let listener = std::os::unix::net::UnixListener::bind(&path).expect("listen");
    let server = Arc::clone(&served.server);
    let serving = std::thread::spawn(move || {
        let (stream, _) = listener.accept().expect("a client");
        stream.set_nonblocking(true).expect("a socket that doesn't wait");
        rt::block_on(server.serve_here(Socket::from_descriptor(stream.into())));
    });
    let (mut wire, _) = Wire::enter(&path, ReplyStyle::Structured, "", &[]);
    for at in [0, 1 << 20, (4 << 20) - 65_536] {
        assert!(wire.ask(Command::Read, NONE, at, 65_536).data == content[at as usize..][..65_536]);
    }
    assert!(!serving.is_finished(), "it serves as long as the client stays");
    drop(wire);
    serving.join().expect("it ends when the client has left");
    served.stop();
}
