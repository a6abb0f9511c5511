// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The nodes of running jobs, and the commands that may use them all the same.

use super::{Job, Jobs, Status};
use cowshed_image::Node;
use cowshed_image::node::ChildRole;
use cowshed_qmp::{QmpError, QmpResult};
use std::rc::Rc;
use std::sync::Arc;

fn has(nodes: &[Arc<Node>], node: &Arc<Node>) -> bool {
    nodes.iter().any(|known| Arc::ptr_eq(known, node))
}

impl Job {
    /// True until it has ended, for the nodes that others must leave as they are.
    fn works_on(&self, node: &Arc<Node>) -> bool {
        !matches!(self.status(), Status::Concluded | Status::Null) && has(&self.nodes.borrow(), node)
    }

    /// True for those of its nodes that a backup may read beside it.
    fn lends(&self, node: &Arc<Node>) -> bool {
        has(&self.readable, node)
    }

    /// Makes copied parts go from their source.
    pub fn set_empties_source(&self, empties: bool) {
        self.empties_source.set(empties);
    }

    fn backs_up(&self, node: &Arc<Node>) -> bool {
        self.kind == "backup" && self.lends(node)
    }
}

impl Jobs {
    fn working_on(&self, node: &Arc<Node>) -> Vec<Rc<Job>> {
        self.list.borrow().iter().filter(|job| job.works_on(node)).cloned().collect()
    }

    /// True while a job works on the node.
    pub fn works_on(&self, node: &Arc<Node>) -> bool {
        !self.working_on(node).is_empty()
    }

    /// True while backups read the node and no other job works on it.
    pub fn back_up(&self, node: &Arc<Node>) -> bool {
        let users = self.working_on(node);
        !users.is_empty() && users.iter().all(|job| job.backs_up(node))
    }

    /// Refused while a job works on the node.
    pub fn check_free(&self, node: &Arc<Node>) -> QmpResult<()> {
        self.check_free_as(node, node.name(), |_| false)
    }

    /// As [`Jobs::check_free`], but for jobs that let a backup read the node.
    pub fn check_readable(&self, node: &Arc<Node>) -> QmpResult<()> {
        self.check_free_as(node, node.name(), |job| job.lends(node))
    }

    /// As [`Jobs::check_free`], but for backups that do no more than read the node.
    pub fn check_free_but_for_backups(&self, node: &Arc<Node>) -> QmpResult<()> {
        self.check_free_as(node, node.name(), |job| job.backs_up(node) && !job.empties_source.get())
    }

    /// The refusal names the node so. The jobs that are `borne` don't count.
    fn check_free_as(&self, node: &Arc<Node>, name: &str, borne: impl Fn(&Job) -> bool) -> QmpResult<()> {
        match self.working_on(node).into_iter().find(|job| !borne(job)) {
            Some(job) => Err(QmpError::generic(format!(
                "Node '{name}' is busy: block device is in use by block job: {}",
                job.kind
            ))),
            None => Ok(()),
        }
    }

    /// As [`Jobs::check_free`], of the node and of all that it passes on to as a filter.
    pub fn check_disk_free(&self, node: &Arc<Node>) -> QmpResult<()> {
        let below = |node: &Arc<Node>| node.is_filter().then(|| node.child(ChildRole::File)).flatten();
        for part in std::iter::successors(Some(Arc::clone(node)), below) {
            self.check_free_as(&part, node.name(), |_| false)?;
        }
        Ok(())
    }
}
