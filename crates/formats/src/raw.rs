// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Raw: the file has the plain bytes of the disk, optionally in a window of it (`offset`, `size`).

use cowshed_graph::node::{
    Apply, Below, ChildRole, Driver, Intent, Link, LiveOptions, LocalFuture, Mapped, Node, Preallocation, StatusExtent,
    Transfer, Work, ZeroFlags,
};
use cowshed_graph::open::{Draft, DriverLine, FirstUse, Opened, Opener, Telling};
use cowshed_graph::options::{BlockdevOptions, DriverKind, DriverSchema, KeyType, REQUIRED, key};
use cowshed_graph::protocols::{discard_file, zero_file};
use cowshed_storage::{File, IoBuf, Permissions};
use cowshed_types::{Error, ErrorKind, Result};
use serde_json::Value;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The keys of the part of its child that the disk is.
const WINDOW_KEYS: &[&str] = &["offset", "size"];

/// QEMU's refusal to resize.
const FIXED: &str = "Cannot resize fixed-size raw disks";

const SCHEMA: DriverSchema = DriverSchema {
    name: "raw",
    kind: DriverKind::Format,
    about: "the bytes as they are, or a window of them",
    keys: &[
        key("file", KeyType::Child, REQUIRED, "where the bytes are"),
        key("offset", KeyType::Size, "0", "first byte of the window"),
        key("size", KeyType::Size, "up to the end", "length of the window"),
    ],
};

/// The line of the table.
pub(crate) const DRIVER: DriverLine = DriverLine::new(&SCHEMA, |opener, draft| Box::pin(open(opener, draft)))
    .passing_on()
    .asking_first(FirstUse::WhereUsersLock(Permissions::NONE))
    .telling(Telling::Keys(WINDOW_KEYS));

/// The part of its child that the disk is.
#[derive(Debug)]
struct RawOptions {
    offset: u64,
    size: Option<u64>,
}

impl RawOptions {
    fn new(options: &BlockdevOptions) -> RawOptions {
        RawOptions { offset: options.number("offset").unwrap_or(0), size: options.number("size") }
    }
}

/// The name of a part of a file; `None` for all of it.
fn name_of_window(options: &BlockdevOptions) -> Option<String> {
    if window_of(options) == (0, None) {
        return None;
    }
    let mut named = BlockdevOptions::new().with("driver", "raw");
    for key in WINDOW_KEYS {
        if let Some(value) = options.get(key) {
            named.insert(*key, value.clone());
        }
    }
    Some(named.with("file", options.get("file").cloned().unwrap_or(Value::Null)).to_json_name())
}

async fn open(opener: &Rc<Opener>, draft: &mut Draft) -> Opened {
    let child = opener.file_child(draft).await?;
    let options = RawOptions::new(&draft.options);
    if options.size.is_some_and(|size| !size.is_multiple_of(512)) {
        let message = "Specified size is not multiple of 512";
        return Err(Error::invalid_argument(message).file(child.filename()).qemu(message));
    }
    let filename = name_of_window(&draft.options).unwrap_or_else(|| child.filename());
    let link = draft.children.link(ChildRole::File).unwrap_or_default();
    let raw =
        RawDriver::new(&child, link, options.offset, options.size).map_err(|error| error.file(child.filename()))?;
    Ok((Box::new(raw), filename))
}

/// A raw image over a child node.
pub(crate) struct RawDriver {
    child: Below,
    /// The file of the child that it was opened with, where that is a plain protocol node: saves a hop on every request.
    opened_file: Option<File>,
    /// A reopening has put another child below it.
    moved: AtomicBool,
    /// Changes only while no request runs.
    window: Window,
}

/// The part of the child that the disk is.
struct Window {
    /// First byte in the child.
    offset: AtomicU64,
    /// Length in bytes where it was given; else `TO_THE_END`.
    size: AtomicU64,
}

/// No disk is as long: sizes are signed.
const TO_THE_END: u64 = u64::MAX;

impl RawDriver {
    /// A window of `child`. `offset` and `size` are in bytes; the window must lie inside the child.
    pub(crate) fn new(child: &Node, link: Arc<Link>, offset: u64, size: Option<u64>) -> Result<RawDriver> {
        Self::check_window(child, offset, size)?;
        let opened_file = child.file().cloned();
        let window = Window { offset: AtomicU64::new(offset), size: AtomicU64::new(size.unwrap_or(TO_THE_END)) };
        Ok(RawDriver { child: Below::new(link), opened_file, moved: AtomicBool::new(false), window })
    }

    /// Another window, checked. No request runs.
    fn set_window(&self, offset: u64, size: Option<u64>) {
        self.window.offset.store(offset, Ordering::Release);
        self.window.size.store(size.unwrap_or(TO_THE_END), Ordering::Release);
    }

    /// Refuses a window that isn't inside of the child.
    fn check_window(child: &Node, offset: u64, size: Option<u64>) -> Result<()> {
        let available = child.size().checked_sub(offset).ok_or_else(|| {
            let size = child.size();
            Error::invalid_argument(format!("'offset' is past the end of the file ({size} bytes)"))
                .value(offset)
                .qemu(format!("Offset ({offset}) cannot be greater than size of the containing file ({size})"))
        })?;
        if let Some(size) = size
            && !size.is_multiple_of(512)
        {
            return Err(Error::invalid_argument("Specified size is not multiple of 512").value(size));
        }
        if let Some(size) = size
            && size > available
        {
            return Err(Error::invalid_argument(format!(
                "'offset' + 'size' is past the end of the file ({} bytes)",
                child.size()
            ))
            .value(size)
            .qemu(format!(
                "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the  actual size of the containing file ({})",
                child.size()
            )));
        }
        Ok(())
    }

    /// The file that requests go to without a node between.
    #[inline]
    fn file(&self) -> Option<&File> {
        self.opened_file.as_ref().filter(|_| !self.moved.load(Ordering::Relaxed))
    }

    fn offset(&self) -> u64 {
        self.window.offset.load(Ordering::Relaxed)
    }

    fn fixed_size(&self) -> Option<u64> {
        Some(self.window.size.load(Ordering::Relaxed)).filter(|size| *size != TO_THE_END)
    }

    /// The node checked `offset` against the window, so the sum stays inside the child.
    fn host(&self, offset: u64) -> u64 {
        self.offset() + offset
    }
}

impl Driver for RawDriver {
    fn name(&self) -> &'static str {
        "raw"
    }

    fn is_raw(&self) -> bool {
        true
    }

    fn name_of_options(&self, node: &Node) -> Option<String> {
        (!self.shows_all_of_child()).then(|| name_of_window(&node.options())).flatten()
    }

    fn holds_changes(&self) -> bool {
        false
    }

    fn size(&self) -> u64 {
        self.fixed_size().unwrap_or_else(|| self.child.size().saturating_sub(self.offset()))
    }

    #[inline]
    fn map(&self, offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        match self.file() {
            Some(file) => Mapped::File { file, host: self.host(offset), guard: None },
            None => Mapped::Below(&self.child, self.host(offset)),
        }
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.file() {
                Some(file) => file.read_at(buf, self.host(offset)).await,
                None => self.child.read(self.host(offset), buf).await,
            }
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            match self.file() {
                Some(file) => file.write_at(buf, self.host(offset)).await,
                None => self.child.write(self.host(offset), buf).await,
            }
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            match self.file() {
                Some(file) => zero_file(file, self.host(offset), len, flags).await,
                None => self.child.write_zeroes(self.host(offset), len, flags).await,
            }
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            match self.file() {
                Some(file) => discard_file(file, self.host(offset), len).await,
                None => self.child.discard(self.host(offset), len).await,
            }
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move {
            match self.file() {
                Some(file) => file.sync().await,
                None => self.child.flush().await,
            }
        })
    }

    fn resize(&self, size: u64, preallocation: Preallocation) -> Work<'_> {
        Box::pin(async move {
            if self.fixed_size().is_some() {
                return Err(Error::unsupported("a raw window with a fixed 'size' can't be resized").qemu(FIXED));
            }
            let end = self.offset().checked_add(size).filter(|&end| i64::try_from(end).is_ok());
            let end = end.ok_or_else(|| Error::invalid_argument("the new size is too large").value(size))?;
            // Through the node, so that its size follows.
            self.child.resize(end, preallocation).await
        })
    }

    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move {
            let mut runs = self.child.node()?.block_status_boxed(self.host(offset), len, max_runs).await?;
            for run in &mut runs {
                run.start -= self.offset();
            }
            Ok(runs)
        })
    }

    fn whole_file(&self) -> Option<&File> {
        self.file().filter(|_| self.shows_all_of_child())
    }

    fn part_of_child(&self, disk: &Range<u64>) -> Range<u64> {
        let offset = self.offset();
        let end = disk.end.min(self.fixed_size().unwrap_or(u64::MAX));
        offset.saturating_add(disk.start)..offset.saturating_add(end)
    }

    fn shows_all_of_child(&self) -> bool {
        self.offset() == 0 && self.fixed_size().is_none()
    }

    fn can_grow(&self) -> bool {
        self.fixed_size().is_none() && self.child.node().is_ok_and(|below| below.driver().can_grow())
    }

    fn fixed_length(&self) -> Option<&'static str> {
        match self.fixed_size() {
            Some(_) => Some(FIXED),
            None => self.child.node().ok().and_then(|below| below.driver().fixed_length()),
        }
    }

    fn grows_by_zeroes(&self) -> bool {
        self.child.node().is_ok_and(|below| below.driver().grows_by_zeroes())
    }

    fn passes_permissions(&self, by_users: bool) -> bool {
        by_users
    }

    fn live_options(&self) -> Option<&dyn LiveOptions> {
        Some(self)
    }

    fn moves_freely(&self) -> bool {
        true
    }
}

/// The window that options name: its first byte, and its length where they have one.
fn window_of(options: &BlockdevOptions) -> (u64, Option<u64>) {
    (options.number("offset").unwrap_or(0), options.number("size"))
}

impl LiveOptions for RawDriver {
    fn keys(&self) -> &'static [&'static str] {
        WINDOW_KEYS
    }

    fn check(&self, node: &Node, options: &BlockdevOptions, _discards: bool) -> Result<Apply> {
        let (offset, size) = window_of(options);
        let child = self.child.node()?;
        let other = options.text("file").filter(|name| *name != child.name());
        let moved = other.and_then(|name| node.graph().find(name));
        if moved.is_none() && window_of(&node.options()) == (offset, size) {
            return Ok(Box::new(|_| ()));
        }
        if let Some(user) = node.graph().bound_user(node) {
            let message = format!(
                "node '{}' is in use by '{user}', so its 'offset', 'size' and 'file' can't change",
                node.name()
            );
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let below = moved.as_deref().unwrap_or(&child);
        RawDriver::check_window(below, offset, size)?;
        // A layer over it has taken its size at its opening.
        if let Some(user) = node.user_names().iter().find(|user| !user.starts_with("attachment:"))
            && size.unwrap_or(below.size() - offset) != node.size()
        {
            let message = format!("node '{}' is in use by '{user}', so its size can't change", node.name());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        if let Some(user) = node.user_names().first()
            && moved.is_some()
            && size.unwrap_or(below.size() - offset) < node.size()
        {
            let message = format!("node '{}' is in use by '{user}', and '{}' is shorter", node.name(), below.name());
            return Err(Error::new(ErrorKind::Busy, message));
        }
        let moves = moved.is_some();
        Ok(Box::new(move |node| {
            if let Some(raw) = node.driver().downcast::<RawDriver>() {
                raw.set_window(offset, size);
                raw.moved.fetch_or(moves, Ordering::Release);
            }
        }))
    }
}
