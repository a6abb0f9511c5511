// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Changes of a node by the graph while the node stays open. No request runs meanwhile.

use super::edge::note_graph_change;
use super::{Apply, ChildLink, ChildRole, Children, DetectZeroes, Edge, LockSource, Node};
use crate::options::BlockdevOptions;
use cowshed_types::Result;
use std::sync::PoisonError;

impl Node {
    /// The child edges.
    pub(crate) fn child_links(&self) -> Vec<ChildLink> {
        self.children.links()
    }

    /// Makes the image complete on disk, as a close would leave it.
    pub(crate) async fn complete(&self) -> Result<()> {
        // Not one that may begin before it is polled.
        let result = self.driver.complete(Box::pin(self.run_flush())).await;
        result.map_err(|error| error.file(self.filename()))
    }

    /// Refuses writes from now on and lets others write to the file as little as before. [`Node::complete`] has run.
    pub(crate) fn stop_writing(&self) -> Result<()> {
        match self.driver.protocol_file() {
            Some(_) if self.settings.locks() != LockSource::Opening => self.pass_permissions()?,
            Some(file) => file.lock(Edge::of("", false, false).permissions)?,
            None => self.driver.stop_writing()?,
        }
        self.settings.set_read_only(true);
        self.set_option("read-only", true.into());
        Ok(())
    }

    /// True while it is read-only because of a snapshot above it, and for no option.
    pub(crate) fn is_below_snapshot(&self) -> bool {
        self.is_read_only() && self.settings.is_below_snapshot()
    }

    /// True where the options of this node, or of a node that stores it, say that it is read-only: nodes above can't make
    /// it writable.
    pub fn stays_read_only(&self) -> bool {
        let mut storage = self.children().into_iter().filter(|child| child.role != ChildRole::Backing);
        self.is_read_only()
            && (self.settings.said_read_only() == Some(true) || storage.any(|child| child.node.stays_read_only()))
    }

    /// The option `read-only` of this node's own, where it has one.
    pub(crate) fn said_read_only(&self) -> Option<bool> {
        self.settings.said_read_only()
    }

    /// This node was described with the parent that has these children, not named there.
    pub(crate) fn describe_by(&self, siblings: &Children) {
        *self.described_by.lock().unwrap_or_else(PoisonError::into_inner) = Some(siblings.id());
    }

    /// It has left the parent that it was described with.
    pub(crate) fn forget_describer(&self, parent: &Node) {
        let mut describer = self.described_by.lock().unwrap_or_else(PoisonError::into_inner);
        if *describer == Some(parent.children.id()) {
            *describer = None;
        }
    }

    /// True for a child that was described with this parent: it is reopened together with it.
    pub(crate) fn is_described_by(&self, parent: &Node) -> bool {
        *self.described_by.lock().unwrap_or_else(PoisonError::into_inner) == Some(parent.children.id())
    }

    /// With `below` it is read-only for no other reason from now on, until it is reopened.
    pub(crate) fn put_below_snapshot(&self, below: bool) {
        self.settings.set_below_snapshot(below);
    }

    /// True from [`Node::put_below_snapshot`] on, whether it is read-only or not.
    pub(crate) fn was_put_below_snapshot(&self) -> bool {
        self.settings.is_below_snapshot()
    }

    /// Sets other options; the steps that can fail have been taken.
    pub(crate) fn apply(
        &self,
        options: BlockdevOptions,
        discard: bool,
        detect_zeroes: DetectZeroes,
        apply: Option<Apply>,
    ) {
        self.settings.set_below_snapshot(false);
        self.settings.set_said_read_only(options.flag("read-only"));
        self.settings.set_discards(discard);
        self.tell_file_of_discards();
        self.settings.set_detect_zeroes(detect_zeroes);
        let shown = self.file().cloned();
        if let Some(apply) = apply {
            apply(self);
            note_graph_change();
        }
        // It may show another file, or a part of one: its observer goes along.
        if let Some(file) = shown {
            file.observe(self.number, None);
        }
        self.renew_observer();
        *self.options.lock().unwrap_or_else(PoisonError::into_inner) = options;
    }

    /// Formats and raw images give back space of the file without asking the node.
    pub(super) fn tell_file_of_discards(&self) {
        if let Some(file) = self.driver.protocol_file() {
            file.set_keeps_space(!self.discards());
        }
    }

    /// Notes the new value of an option.
    pub(crate) fn set_option(&self, key: &str, value: serde_json::Value) {
        self.options.lock().unwrap_or_else(PoisonError::into_inner).insert(key, value);
    }

    /// Notes that an option is gone.
    pub(crate) fn remove_option(&self, key: &str) {
        self.options.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// Every node of its request is open.
    pub(crate) async fn begin_writing(&self) -> Result<()> {
        match self.is_read_only() {
            true => Ok(()),
            false => self.driver.begin_writing().await.map_err(|error| error.file(self.filename())),
        }
    }

    /// Takes writes from now on; the children that store it are writable already.
    pub(crate) async fn start_writing(&self) -> Result<()> {
        match self.driver.protocol_file() {
            Some(file) => file.make_writable(self.locks_for_writing(file))?,
            None => self.driver.start_writing(&self.options(), self.discards()).await?,
        }
        self.settings.set_read_only(false);
        self.set_option("read-only", false.into());
        Ok(())
    }
}
