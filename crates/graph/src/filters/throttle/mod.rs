// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The throttle filter: requests wait until the limits of its group let them go.
//!
//! A request counts the same whether it meets data, zeroes or a hole; flushes and questions about the mapping don't
//! count.

mod group;
mod limits;
mod meter;
mod schedule;
#[cfg(test)]
mod tests;

pub(crate) use group::Credit;
pub use group::{Group, Groups};
pub use limits::{Limit, Limited, Limits, MAX_RATE};
pub use meter::{Direction, Meter};
pub use schedule::{Entry, Schedule, ThrottleWaits};

use super::Filter;
use crate::node::{Apply, Below, Intent, LiveOptions, Mapped, Node, Transfer, Work, ZeroFlags, done};
use crate::options::BlockdevOptions;
use arc_swap::ArcSwap;
use cowshed_storage::IoBuf;
#[cfg(doc)]
use cowshed_storage::rt;
use cowshed_types::{Error, ErrorKind, Result, slip};
use group::Membership;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    /// The filter that [`Throttle::note_entrance`] was called of, as an address; 0: none.
    static ENTRANCE: Cell<usize> = const { Cell::new(0) };
}

/// The filter.
pub struct Throttle {
    below: Below,
    member: ArcSwap<Membership>,
    /// Drains under way: a member that joins meanwhile must not hold requests back either.
    drains: AtomicU32,
}

impl Throttle {
    pub(crate) fn new(below: Below, group: Arc<Group>) -> Throttle {
        let member = ArcSwap::from_pointee(Membership::new(group));
        Throttle { below, member, drains: AtomicU32::new(0) }
    }

    /// The group whose limits count.
    pub fn group(&self) -> Arc<Group> {
        Arc::clone(self.member.load().group())
    }

    /// The waits of its requests since it joined the group.
    pub fn waits(&self) -> ThrottleWaits {
        self.member.load().waits()
    }

    /// Goes over to another group. Requests that wait in the old one go at once.
    pub fn set_group(&self, group: Arc<Group>) {
        if Arc::ptr_eq(&group, self.member.load().group()) {
            return;
        }
        let member = Membership::new(group);
        for _ in 0..self.drains.load(Ordering::SeqCst) {
            member.begin_free();
        }
        let old = self.member.swap(Arc::new(member));
        // Waiting requests hold the old membership until they are through.
        old.begin_free();
    }

    /// Leaves its group for good: the node is closed.
    pub(crate) fn leave_group(&self) {
        if let Ok(nowhere) = Group::new("", Limits::new()) {
            self.set_group(nowhere);
        }
    }

    /// Lets waiting requests go, and holds nothing back until [`Throttle::end_drain`].
    pub(crate) fn begin_drain(&self) {
        self.drains.fetch_add(1, Ordering::SeqCst);
        if slip!("drain_holds_throttled_requests") {
            return;
        }
        self.member.load().begin_free();
    }

    pub(crate) fn end_drain(&self) {
        self.drains.fetch_sub(1, Ordering::SeqCst);
        if slip!("drain_holds_throttled_requests") {
            return;
        }
        self.member.load().end_free();
    }

    /// Lets a request of `bytes` go without waiting, if it may, and fills `credit` for those behind it. False: it must
    /// be admitted in the usual way; nothing was counted.
    #[cold]
    pub(crate) fn lend(&self, credit: &Credit, direction: Direction, bytes: u64) -> bool {
        self.member.load().lend(credit, direction, bytes)
    }

    /// The next request of this thread that waits here has not begun anywhere else: it needn't begin at all when its
    /// client goes ([`rt::is_cancelled`]). A request of a format above has, and must not fail for that.
    pub(crate) fn note_entrance(&self) {
        ENTRANCE.set(std::ptr::from_ref(self).addr());
    }

    /// Waits as a request of `bytes` does; an error when its client has gone before it began.
    pub(crate) async fn admit(&self, direction: Direction, bytes: u64) -> Result<()> {
        let may_cancel = ENTRANCE.take() == std::ptr::from_ref(self).addr();
        self.member.load().admit(direction, bytes, may_cancel).await
    }
}

/// The error where a throttle filter is to have a group that there is not.
pub(crate) fn no_group(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("Throttle group '{name}' does not exist"))
}

impl LiveOptions for Throttle {
    fn keys(&self) -> &'static [&'static str] {
        &["throttle-group"]
    }

    fn check(&self, node: &Node, options: &BlockdevOptions, _discards: bool) -> Result<Apply> {
        let name = options.text("throttle-group").unwrap_or_default();
        let group = node.graph().throttle_groups().find(name).ok_or_else(|| no_group(name))?;
        Ok(Box::new(move |node| {
            if let Some(throttle) = node.throttle() {
                throttle.set_group(group);
            }
        }))
    }
}

impl Filter for Throttle {
    fn name(&self) -> &'static str {
        "throttle"
    }

    fn moves_freely(&self) -> bool {
        true
    }

    fn live_options(&self) -> Option<&dyn LiveOptions> {
        Some(self)
    }

    fn below(&self) -> &Below {
        &self.below
    }

    fn map(&self, _offset: u64, _len: u64, _intent: Intent) -> Mapped<'_> {
        Mapped::Special
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            if let Err(error) = self.admit(Direction::Read, buf.len() as u64).await {
                return (Err(error), buf);
            }
            self.below.read(offset, buf).await
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            if let Err(error) = self.admit(Direction::Write, buf.len() as u64).await {
                return (Err(error), buf);
            }
            self.below.write(offset, buf).await
        })
    }

    fn write_unchanged(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            if let Err(error) = self.admit(Direction::Write, buf.len() as u64).await {
                return (Err(error), buf);
            }
            self.below.write_unchanged(offset, buf).await
        })
    }

    fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Work<'_> {
        Box::pin(async move {
            for (_, buf) in &clusters {
                self.admit(Direction::Write, buf.len() as u64).await?;
            }
            self.below.write_compressed(clusters).await
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            self.admit(Direction::Write, len).await?;
            self.below.write_zeroes(offset, len, flags).await
        })
    }

    fn write_zeroes_unchanged(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            self.admit(Direction::Write, len).await?;
            self.below.write_zeroes_unchanged(offset, len, flags).await
        })
    }

    fn discard(&self, offset: u64, len: u64) -> Work<'_> {
        Box::pin(async move {
            self.admit(Direction::Write, len).await?;
            self.below.discard(offset, len).await
        })
    }

    fn close(&self, _read_only: bool) -> Work<'_> {
        self.leave_group();
        done(Ok(()))
    }
}

impl Node {
    /// The throttle filter, when this node is one.
    pub fn throttle(&self) -> Option<&Throttle> {
        self.driver().downcast()
    }
}
