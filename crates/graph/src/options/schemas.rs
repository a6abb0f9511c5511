// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The keys of drivers, for every option syntax and for the help. Most formats have theirs beside them.

use super::schema::{DriverKind, DriverSchema, Key, KeyType, REQUIRED};
use cowshed_storage::fault::{Event, IoType};

/// An option of a driver: its name, the type of its value, its default and its line of help.
pub const fn key(name: &'static str, value: KeyType, default: &'static str, help: &'static str) -> Key {
    Key { name, value, default, help }
}

/// The keys that every driver takes.
pub const COMMON: &[Key] = &[
    key("driver", KeyType::Text, "probed", "the driver"),
    key("node-name", KeyType::Text, "generated", "the name of the node in the graph"),
    key("read-only", KeyType::Bool, "as the parent", "never write"),
    key("auto-read-only", KeyType::Bool, "off", "open for reading where writing isn't permitted"),
    key("active", KeyType::Bool, "on", "off: added to a daemon without being opened (blockdev-set-active)"),
    key("force-share", KeyType::Bool, "off", "share everything with other users of the file; needs read-only"),
    key("discard", KeyType::Choice(&["ignore", "unmap", "off", "on"]), "ignore", "pass discards on"),
    key("detect-zeroes", KeyType::Choice(&["off", "on", "unmap"]), "off", "turn writes of zeroes into zero writes"),
    key("cache", KeyType::Struct(CACHE), "", "use of the host's page cache"),
];

pub(super) const CACHE: &[Key] = &[
    key("direct", KeyType::Bool, "as the parent", "bypass the page cache (O_DIRECT)"),
    key("no-flush", KeyType::Bool, "as the parent", "ignore flushes"),
];

pub(crate) const FILE: DriverSchema =
    DriverSchema { name: "file", kind: DriverKind::Protocol, about: "a regular file", keys: FILE_KEYS };
pub(crate) const HOST_DEVICE: DriverSchema = DriverSchema {
    name: "host_device",
    kind: DriverKind::Protocol,
    about: "a block device of the host",
    keys: FILE_KEYS,
};
pub(crate) const HOST_CDROM: DriverSchema = DriverSchema {
    name: "host_cdrom",
    kind: DriverKind::Protocol,
    about: "a CD-ROM drive of the host",
    keys: FILE_KEYS,
};
pub(crate) const NBD: DriverSchema =
    DriverSchema { name: "nbd", kind: DriverKind::Protocol, about: "an export of an NBD server", keys: NBD_KEYS };
pub(crate) const NULL_CO: DriverSchema = DriverSchema {
    name: "null-co",
    kind: DriverKind::Protocol,
    about: "no storage at all, for measuring",
    keys: NULL_KEYS,
};
pub(crate) const NULL_AIO: DriverSchema = DriverSchema {
    name: "null-aio",
    kind: DriverKind::Protocol,
    about: "the same, by its other name",
    keys: NULL_KEYS,
};
pub(crate) const BLKDEBUG: DriverSchema = DriverSchema {
    name: "blkdebug",
    kind: DriverKind::Filter,
    about: "faults below a format: errors, delays, torn and lost writes, corrupted reads",
    keys: BLKDEBUG_KEYS,
};
pub(crate) const THROTTLE: DriverSchema = DriverSchema {
    name: "throttle",
    kind: DriverKind::Filter,
    about: "limits operations and bytes per second",
    keys: THROTTLE_KEYS,
};
pub(crate) const COPY_ON_READ: DriverSchema = DriverSchema {
    name: "copy-on-read",
    kind: DriverKind::Filter,
    about: "copies what is read from a backing file into the image",
    keys: COPY_ON_READ_KEYS,
};
pub(crate) const COPY_BEFORE_WRITE: DriverSchema = DriverSchema {
    name: "copy-before-write",
    kind: DriverKind::Filter,
    about: "saves to a target what is about to be overwritten",
    keys: COPY_BEFORE_WRITE_KEYS,
};
pub(crate) const SNAPSHOT_ACCESS: DriverSchema = DriverSchema {
    name: "snapshot-access",
    kind: DriverKind::Filter,
    about: "the disk as it was when its copy-before-write filter came",
    keys: SNAPSHOT_ACCESS_KEYS,
};
pub(crate) const COMPRESS: DriverSchema = DriverSchema {
    name: "compress",
    kind: DriverKind::Filter,
    about: "has what is written compressed in the image",
    keys: COMPRESS_KEYS,
};
pub(crate) const PREALLOCATE: DriverSchema = DriverSchema {
    name: "preallocate",
    kind: DriverKind::Filter,
    about: "reserves space ahead for a file that grows",
    keys: PREALLOCATE_KEYS,
};
pub(crate) const LOG_WRITES: DriverSchema = DriverSchema {
    name: "blklogwrites",
    kind: DriverKind::Filter,
    about: "logs writes as dm-log-writes does",
    keys: LOG_WRITES_KEYS,
};
pub(crate) const VERIFY: DriverSchema = DriverSchema {
    name: "blkverify",
    kind: DriverKind::Filter,
    about: "compares what an image reads with a trusted copy",
    keys: VERIFY_KEYS,
};
pub(crate) const QUORUM: DriverSchema = DriverSchema {
    name: "quorum",
    kind: DriverKind::Filter,
    about: "one disk in several nodes, which vote on what is read",
    keys: QUORUM_KEYS,
};

const FILE_KEYS: &[Key] = &[
    key("filename", KeyType::Text, REQUIRED, "path of the file"),
    key("aio", KeyType::Choice(&["threads", "native", "io_uring"]), "io_uring where it works", "the engine of the I/O"),
    key("aio-max-batch", KeyType::Number(0, u64::MAX), "0", "accepted: operations are handed over as they come"),
    key("drop-cache", KeyType::Bool, "on", "accepted: an image that is opened again is read again"),
    key("locking", KeyType::Choice(&["auto", "on", "off"]), "auto", "lock the file against other users"),
    key("pr-manager", KeyType::Text, "none", "refused: there are no objects for persistent reservations"),
    key("x-check-cache-dropped", KeyType::Bool, "off", "accepted: an image that is opened again is read again"),
];

const NBD_KEYS: &[Key] = &[
    key("server", KeyType::Struct(NBD_SERVER), "from the older keys", "where the server is"),
    key("path", KeyType::Text, "", "older spelling of server.path"),
    key("host", KeyType::Text, "", "older spelling of server.host"),
    key("port", KeyType::Text, "10809", "older spelling of server.port"),
    key("export", KeyType::Text, "the default one", "name of the export"),
    key(
        "x-dirty-bitmap",
        KeyType::Text,
        "base:allocation",
        "metadata context that a map shows: what is set is no data",
    ),
    key("tls-creds", KeyType::Text, "no encryption", "id of TLS credentials"),
    key("tls-certificates", KeyType::Text, "no encryption", "folder with TLS credentials, instead of tls-creds"),
    key("tls-hostname", KeyType::Text, "the host", "name in the server's certificate"),
    key("tls-verify-peer", KeyType::Bool, "on", "whether the server's certificate must be right"),
    key("reconnect-delay", KeyType::Number(0, MAX_SECONDS), "0", "seconds to wait for a lost server"),
    key("open-timeout", KeyType::Number(0, MAX_SECONDS), "0", "seconds to try the first connection"),
];

const MAX_SECONDS: u64 = u32::MAX as u64;

const NBD_SERVER: &[Key] = &[
    key("type", KeyType::Choice(&["inet", "unix"]), REQUIRED, "the kind of address"),
    key("path", KeyType::Text, "", "path of the Unix socket"),
    key("abstract", KeyType::Bool, "off", "the path is a name in the abstract namespace"),
    key("tight", KeyType::Bool, "on", "an abstract name ends with its last letter, without padding"),
    key("host", KeyType::Text, "", "host name or address"),
    key("port", KeyType::Text, "10809", "port"),
];

const NULL_KEYS: &[Key] = &[
    key("size", KeyType::Size, "1G", "size of the disk"),
    key("latency-ns", KeyType::Number(0, i64::MAX as u64), "0", "how long each request takes, in nanoseconds"),
    key("read-zeroes", KeyType::Bool, "on", "a map shows zeroes; reads give zeroes in any case"),
];

const THROTTLE_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the node whose requests are limited"),
    key("throttle-group", KeyType::Text, REQUIRED, "the group whose limits count"),
];

const COPY_ON_READ_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the image that gets the copies"),
    key("bottom", KeyType::Text, "the whole chain", "node-name of the last layer that is copied from"),
];

const COPY_BEFORE_WRITE_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the disk whose old data is saved"),
    key("target", KeyType::Child, REQUIRED, "where it is saved"),
    key(
        "on-cbw-error",
        KeyType::Choice(&["break-guest-write", "break-snapshot"]),
        "break-guest-write",
        "what fails when old data can't be saved: the write, or the target",
    ),
    key("bitmap", KeyType::Struct(BITMAP), "the whole disk", "save only what is dirty here, at this moment"),
    key("cbw-timeout", KeyType::Number(0, MAX_SECONDS), "0", "seconds after which saving has failed; 0: never"),
    key("min-cluster-size", KeyType::Size, "0", "the least to save at once; 64k and the target's cluster count too"),
];

const BITMAP: &[Key] = &[
    key("node", KeyType::Text, REQUIRED, "node-name of the bitmap's node"),
    key("name", KeyType::Text, REQUIRED, "name of the bitmap"),
];

const SNAPSHOT_ACCESS_KEYS: &[Key] = &[key("file", KeyType::Child, REQUIRED, "a copy-before-write node")];

const COMPRESS_KEYS: &[Key] = &[key("file", KeyType::Child, REQUIRED, "the image whose clusters are compressed")];

const PREALLOCATE_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the file that grows"),
    key("prealloc-align", KeyType::Size, "1M", "the file's length is a multiple of this"),
    key("prealloc-size", KeyType::Size, "128M", "space that is reserved beyond what is stored"),
];

const LOG_WRITES_KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the disk whose writes are logged"),
    key("log", KeyType::Child, REQUIRED, "where the log is"),
    key("log-append", KeyType::Bool, "off", "go on with the log that is there"),
    key("log-sector-size", KeyType::Size, "512", "unit of the log, in bytes"),
    key(
        "log-super-update-interval",
        KeyType::Number(0, u64::MAX),
        "4096",
        "count entries in the log's superblock so often",
    ),
];

const VERIFY_KEYS: &[Key] = &[
    key("raw", KeyType::Child, REQUIRED, "the copy that is trusted"),
    key("test", KeyType::Child, REQUIRED, "the image that must read as that copy"),
];

const QUORUM_KEYS: &[Key] = &[
    key("children", KeyType::Children, REQUIRED, "the nodes that keep the disk"),
    key("vote-threshold", KeyType::Number(0, u32::MAX as u64), "(at least 1)", "the number that must agree"),
    key("blkverify", KeyType::Bool, "off", "two nodes must agree on each byte, and a difference is reported"),
    key("rewrite-corrupted", KeyType::Bool, "off", "nodes that are outvoted get what the majority has"),
    key("read-pattern", KeyType::Text, "quorum", "quorum: all are read; fifo: the first that answers"),
];

const BLKDEBUG_KEYS: &[Key] = &[
    key("image", KeyType::Child, REQUIRED, "the node whose I/O meets the faults"),
    key("inject-error", KeyType::List(INJECT_ERROR), "", "rules: which I/O is hit, and how"),
    key("set-state", KeyType::List(SET_STATE), "", "changes of the state that rules can depend on"),
    key("align", KeyType::Size, "as the image", "alignment of offsets and lengths that the node asks for"),
    key("max-transfer", KeyType::Size, "no limit", "the most bytes moved by one operation"),
    key("opt-write-zero", KeyType::Size, "as the image", "what zeroes are aligned to: shown as a limit"),
    key("max-write-zero", KeyType::Size, "no limit", "the most zeroes of one operation: shown as a limit"),
    key("opt-discard", KeyType::Size, "as the image", "what discards are aligned to: shown as a limit"),
    key("max-discard", KeyType::Size, "no limit", "the most bytes that one discard gives back: shown as a limit"),
    key("seed", KeyType::Number(0, u64::MAX), "0", "decides about what is left to chance"),
    key("config", KeyType::Text, "", "a file with rules"),
];

const INJECT_ERROR: &[Key] = &[
    key("event", KeyType::Choice(Event::NAMES), "none", "the rule counts from this event on"),
    key("state", KeyType::Number(0, u32::MAX as u64), "any", "the event counts only in this state"),
    key("iotype", KeyType::Choice(IoType::NAMES), "read, write, write-zeroes, discard, flush", "the kind of I/O"),
    key("errno", KeyType::Number(0, 4095), "5", "the error number; 0 for none"),
    key("sector", KeyType::Number(0, 1 << 54), "any", "only I/O that touches this sector of 512 bytes"),
    key("sectors", KeyType::Number(1, 1 << 54), "1", "the number of sectors from 'sector' on"),
    key("once", KeyType::Bool, "off", "the same as times=1"),
    key("immediately", KeyType::Bool, "off", "accepted: errors always come at once, unless delayed"),
    key("action", KeyType::Choice(FAULT_ACTIONS), "fail", "what happens"),
    key("bytes", KeyType::Size, "half of it", "how much a torn write or a short transfer moves"),
    key("delay-ms", KeyType::Number(0, 86_400_000), "0", "wait first, in milliseconds"),
    key("delay-ns", KeyType::Number(0, u64::MAX), "0", "wait first, in nanoseconds; besides delay-ms"),
    key("probability-percent", KeyType::Number(0, 100), "100", "how many of what matches are hit"),
    key("skip", KeyType::Number(0, u64::MAX), "0", "the number that pass first"),
    key("times", KeyType::Number(1, u64::MAX), "no limit", "the number that are hit"),
];

/// The actions of a rule; [`super::typed`] reads them.
const FAULT_ACTIONS: &[&str] = &["fail", "torn", "short", "corrupt", "lose", "delay"];

const SET_STATE: &[Key] = &[
    key("event", KeyType::Choice(Event::NAMES), REQUIRED, "when"),
    key("state", KeyType::Number(0, u32::MAX as u64), "any", "in which state"),
    key("new_state", KeyType::Number(0, u32::MAX as u64), "0", "the state afterwards"),
];
