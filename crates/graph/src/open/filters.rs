// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Opens filters, and the drivers that keep one disk in several nodes.

use super::build::{Draft, Opened, Opener, Role, TreePlace};
use super::file_names::{RULES_AND_FILE, TWO_FILES};
use super::line::{DriverLine, FirstUse, Mention, Telling};
use crate::filters::throttle::no_group;
use crate::filters::{
    Agreement, Compress, CopyBeforeWrite, CopyOnRead, FAULT_SCHEMA, Fault, LogOptions, LogWrites, Preallocate,
    Replicas, SHARED_BY_VOTERS, SnapshotAccess, Throttle, agreement_of, check_agreement, preallocated_sizes,
    read_scenario, rules_of, saving_options,
};
use crate::node::{Below, ChildRole, Home, Link, LockSource, Node, storage_of};
use crate::options::{self, BlkdebugOptions, schemas};
use crate::protocols::FileDriver;
use cowshed_storage::{PermissionSet, Permissions};
use cowshed_types::{DirtyBits, Error, ErrorKind, Result};
use serde_json::Value;
use std::rc::Rc;
use std::sync::Arc;

/// It uses the file itself.
const BLKDEBUG: DriverLine = DriverLine::new(&schemas::BLKDEBUG, |opener, draft| Box::pin(blkdebug(opener, draft)))
    .prepared_by(|_, draft| options::read_config(&mut draft.options))
    .asking_first(FirstUse::Opening)
    .telling(Telling::AllBut("image"))
    .reading(RULES_AND_FILE);
const THROTTLE: DriverLine = DriverLine::new(&schemas::THROTTLE, |opener, draft| Box::pin(throttle(opener, draft)))
    .telling(Telling::Keys(&["throttle-group"]));
const COPY_ON_READ: DriverLine =
    DriverLine::new(&schemas::COPY_ON_READ, |opener, draft| Box::pin(copy_on_read(opener, draft))).never_reopened();
const COPY_BEFORE_WRITE: DriverLine =
    DriverLine::new(&schemas::COPY_BEFORE_WRITE, |opener, draft| Box::pin(copy_before_write(opener, draft)))
        .named_as_its_disk()
        .staying_read_only();
/// It only reads.
const SNAPSHOT_ACCESS: DriverLine =
    DriverLine::new(&schemas::SNAPSHOT_ACCESS, |opener, draft| Box::pin(snapshot_access(opener, draft)))
        .asking_first(FirstUse::Opening);
const COMPRESS: DriverLine =
    DriverLine::new(&schemas::COMPRESS, |opener, draft| Box::pin(compress(opener, draft))).staying_read_only();
const PREALLOCATE: DriverLine =
    DriverLine::new(&schemas::PREALLOCATE, |opener, draft| Box::pin(preallocate(opener, draft)));
/// It writes to a second file as soon as it is written to.
const LOG_WRITES: DriverLine =
    DriverLine::new(&schemas::LOG_WRITES, |opener, draft| Box::pin(log_writes(opener, draft)))
        .telling(Telling::Keys(&["log-append", "log-sector-size"]))
        .staying_read_only()
        .named_by_images(Mention::Never("a log of writes by"));
const VERIFY: DriverLine = DriverLine::new(&schemas::VERIFY, |opener, draft| Box::pin(verify(opener, draft)))
    .asking_first(FirstUse::WhereUsersLock(Permissions::NONE))
    .reading(TWO_FILES)
    .staying_read_only();
const QUORUM: DriverLine = DriverLine::new(&schemas::QUORUM, |opener, draft| Box::pin(quorum(opener, draft)))
    .prepared_by(|_, draft| check_agreement(&mut draft.options))
    .asking_first(FirstUse::WhereUsersLock(SHARED_BY_VOTERS))
    .telling(Telling::Keys(&["vote-threshold", "blkverify", "rewrite-corrupted", "read-pattern"]))
    .staying_read_only();
const FAULT: DriverLine = DriverLine::new(&FAULT_SCHEMA, |opener, draft| Box::pin(fault(opener, draft)))
    .prepared_by(|_, draft| read_scenario(&mut draft.options));

/// The filters, in the order of the help.
pub const FILTERS: &[DriverLine] = &[
    BLKDEBUG,
    THROTTLE,
    COPY_ON_READ,
    COPY_BEFORE_WRITE,
    SNAPSHOT_ACCESS,
    COMPRESS,
    PREALLOCATE,
    LOG_WRITES,
    VERIFY,
    QUORUM,
    FAULT,
];

/// The edge to a filter's `file`, which must be open.
fn below(draft: &Draft) -> Below {
    Below::new(draft.children.link(ChildRole::File).unwrap_or_default())
}

/// The options of a child that the schema requires.
fn spec(draft: &Draft, key: &str) -> Value {
    draft.options.get(key).cloned().unwrap_or(Value::Null)
}

async fn throttle(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.file_child(draft).await?;
    let name = draft.options.text("throttle-group").unwrap_or_default();
    let group = opener.graph.throttle_groups().find(name).ok_or_else(|| no_group(name))?;
    Ok((Box::new(Throttle::new(below(draft), group)), child.filename()))
}

async fn copy_on_read(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.file_child(draft).await?;
    let bottom = draft.options.text("bottom").map(str::to_owned);
    // Copies are written for readers, too. Above a single layer there is nothing to copy.
    if child.is_read_only() && bottom.as_deref() != Some(child.name()) {
        return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
    }
    if let Some(name) = &bottom {
        let layer = opener.graph.find(name);
        let layer = layer.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("Bottom node '{name}' not found")))?;
        if layer.is_filter() {
            return Err(Error::invalid_argument(format!("Bottom node '{name}' is a filter")));
        }
    }
    Ok((Box::new(CopyOnRead::new(below(draft), bottom)), child.filename()))
}

async fn fault(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.file_child(draft).await?;
    let rules = rules_of(&draft.options);
    let seed = draft.options.number("seed").unwrap_or(0);
    Ok((Box::new(Fault::new(below(draft), rules, seed)), child.filename()))
}

async fn compress(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.file_child(draft).await?;
    let filter = Compress::new(below(draft));
    filter.cluster_bytes()?;
    Ok((Box::new(filter), child.filename()))
}

async fn preallocate(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    // As in QEMU its own options are looked at before the file.
    let sizes = preallocated_sizes(&draft.options)?;
    let child = opener.file_child(draft).await?;
    Ok((Box::new(Preallocate::new(below(draft), sizes)), child.filename()))
}

async fn log_writes(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    const SECTOR_BYTES: u64 = 512;
    const UPDATE_INTERVAL: u64 = 4096;
    let append = draft.options.flag("log-append").unwrap_or(false);
    let sector = draft.options.number("log-sector-size");
    if append && sector.is_some() {
        return Err(Error::invalid_argument("log-append and log-sector-size are mutually exclusive"));
    }
    let options = LogOptions {
        append,
        sector_bytes: sector.unwrap_or(SECTOR_BYTES),
        update_interval: draft.options.number("log-super-update-interval").unwrap_or(UPDATE_INTERVAL),
    };
    let child = opener.file_child(draft).await?;
    let writable = !draft.settings.read_only;
    let log = opener.child(draft, ChildRole::Log, spec(draft, "log"), draft.place.storage("log", writable)).await?;
    if storage_of(&log).iter().any(|node| storage_of(&child).iter().any(|disk| Arc::ptr_eq(disk, node))) {
        let message = format!("the log '{}' and the disk '{}' share storage", log.name(), child.name());
        return Err(Error::invalid_argument(message));
    }
    if writable {
        let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE | PermissionSet::RESIZE;
        log.change_user(&draft.name, Permissions { used, shared: PermissionSet::CONSISTENT_READ })?;
    }
    let filter = LogWrites::open(below(draft), log.storage(), options).await?;
    Ok((Box::new(filter), child.filename()))
}

/// A node that keeps the whole disk as others do.
async fn replica(opener: &Rc<Opener>, draft: &mut Draft, role: ChildRole, options: Value) -> Result<Arc<Node>> {
    let writable = !draft.settings.read_only;
    let place = TreePlace { role: Role::Replica, ..draft.place.storage(&role.name(), writable) };
    let path = opener.path_of_files();
    let node = opener.child(draft, role, options, place).await?;
    opener.back_to(path);
    Ok(node)
}

fn links(draft: &Draft) -> Vec<Arc<Link>> {
    draft.children.links().into_iter().map(|child| child.link).collect()
}

async fn verify(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let writable = !draft.settings.read_only;
    let path = opener.path_of_files();
    let raw = opener.child(draft, ChildRole::Raw, spec(draft, "raw"), draft.place.storage("raw", writable)).await?;
    opener.back_to(path);
    let test = replica(opener, draft, ChildRole::Test, spec(draft, "test")).await?;
    if test.size() > raw.size() {
        let message = format!("'{}' is shorter than '{}', which is to be verified by it", raw.name(), test.name());
        return Err(Error::invalid_argument(message).value(raw.size()));
    }
    let name = raw.filename();
    Ok((Box::new(Replicas::new(Agreement::Verify, links(draft), &draft.name, opener.graph.reporter())), name))
}

async fn quorum(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let agreement = agreement_of(&draft.options)?;
    // A writer beside it would make its copies differ.
    draft.place.share_writes &= opener.no_io;
    let given = draft.options.get("children").and_then(Value::as_array).cloned().unwrap_or_default();
    let mut sizes = Vec::with_capacity(given.len());
    let mut name = String::new();
    for (index, options) in given.into_iter().enumerate() {
        let role = ChildRole::Replica(u32::try_from(index).unwrap_or(u32::MAX));
        let node = replica(opener, draft, role, options).await?;
        sizes.push(node.size());
        if name.is_empty() {
            name = node.filename();
        }
    }
    if sizes.iter().any(|size| *size != sizes[0]) {
        let error = Error::invalid_argument("the children of a quorum must have one size");
        let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let error = error.value(sizes.join(", "));
        return Err(error.qemu("Could not refresh total sector count: Input/output error"));
    }
    Ok((Box::new(Replicas::new(agreement, links(draft), &draft.name, opener.graph.reporter())), name))
}

/// Faults below the nodes above this one: its file is the child's with the rules in front.
async fn blkdebug(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    BlkdebugOptions::check_events(&draft.options, &draft.place.path)?;
    let options = BlkdebugOptions::new(&draft.options);
    // Sharing with writers is defined for plain files only.
    draft.place.share_writes = false;
    draft.settings.locks = LockSource::Opening;
    let spec = spec(draft, "image");
    let place = draft.place.storage("image", !draft.settings.read_only);
    let child = opener.child(draft, ChildRole::Image, spec, place).await?;
    let filename = child.filename();
    let file = child.storage();
    let align = options.align;
    let file =
        file.with_faults(Arc::new(options.faults), align, options.max_transfer).map_err(|error| match align {
            Some(align) => error.qemu(format!("Cannot meet constraints with align {align}")),
            None => error,
        })?;
    let null_reads_zeroes = child.null_reads_zeroes();
    let name = schemas::BLKDEBUG.name;
    Ok((Box::new(FileDriver { name, file, kind: None, null_reads_zeroes, context: None }), filename))
}

async fn copy_before_write(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    // Its target is written to, so an image could have a second file changed that it names for reading.
    if draft.settings.read_only {
        return Err(Error::new(ErrorKind::ReadOnly, "Block node is read-only"));
    }
    let path = opener.path_of_files();
    let child = opener.file_child(draft).await?;
    opener.back_to(path);
    let spec = spec(draft, "target");
    let target = opener.child(draft, ChildRole::Target, spec, draft.place.storage("target", true)).await?;
    if storage_of(&target).iter().any(|below| Arc::ptr_eq(below, &child)) {
        let message = format!(
            "the target '{}' is stored in '{}', whose past it is to keep: it needs storage of its own",
            target.name(),
            child.name()
        );
        return Err(Error::invalid_argument(message));
    }
    if target.size() != child.size() {
        let message = format!("the target '{}' must be as large as '{}'", target.name(), child.name());
        return Err(Error::invalid_argument(message).value(target.size()));
    }
    let used = PermissionSet::CONSISTENT_READ | PermissionSet::WRITE;
    let shared = PermissionSet::ALL & !PermissionSet::RESIZE;
    target.change_user(&draft.name, Permissions { used, shared })?;
    let bits = kept_bits(opener, draft, child.size()).await?;
    let options = saving_options(&draft.options, &draft.place.path, bits)?;
    let below = Below::new(draft.children.link(ChildRole::File).unwrap_or_default());
    let link = draft.children.link(ChildRole::Target).unwrap_or_default();
    let copy = CopyBeforeWrite::new(below, link, options)?;
    Ok((Box::new(copy), child.filename()))
}

/// The present bits of the bitmap of a copy-before-write filter, if it has one.
async fn kept_bits(opener: &Opener, draft: &Draft, size: u64) -> Result<Option<Arc<DirtyBits>>> {
    let Some(Value::Object(bitmap)) = draft.options.get("bitmap") else { return Ok(None) };
    let text = |key: &str| bitmap.get(key).and_then(Value::as_str).unwrap_or_default();
    let node = opener.graph.node(text("node"))?;
    node.check_bitmap(text("name")).await?;
    let bits = node.bitmap_bits(text("name")).await?;
    if bits.disk_bytes() != size {
        let message =
            format!("the bitmap '{}' is of a disk of another size, the filter's has {size} bytes", text("name"));
        return Err(Error::invalid_argument(message).value(bits.disk_bytes()));
    }
    Ok(Some(bits))
}

async fn snapshot_access(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    // It reads the disk as it was, so writers below don't matter.
    draft.place.share_writes = true;
    let spec = spec(draft, "file");
    let child = opener.child(draft, ChildRole::File, spec, draft.place.storage("file", false)).await?;
    let link = draft.children.link(ChildRole::File).unwrap_or_default();
    Ok((Box::new(SnapshotAccess::new(link)), child.filename()))
}
