// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Quorum and blkverify: one disk kept in several nodes, whose answers are compared.

use crate::node::{
    ChildRole, Driver, Link, LocalFuture, Node, QuorumReport, QuorumWork, Ranges, Reporter, StatusExtent, Transfer,
    Work, ZeroFlags,
};
use crate::options::{BlockdevOptions, schemas};
use cowshed_storage::{IoBuf, PermissionSet, Permissions};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use futures_util::future::join_all;
use serde_json::Value;
use std::future::Future;
use std::sync::Arc;

/// Runs that one question about the mapping returns at most.
const STATUS_RUNS: usize = 16;

/// The rights at the nodes that vote while the quorum has no users: no other user may write to them.
pub(crate) const SHARED_BY_VOTERS: Permissions =
    Permissions { used: PermissionSet::NONE, shared: PermissionSet::ALL.without(PermissionSet::WRITE) };

/// The use of the nodes' answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Agreement {
    /// `blkverify`: the second node, under test, must answer as the first.
    Verify,
    /// `quorum`: the number that must agree.
    Votes {
        /// The number of nodes that must succeed or agree.
        threshold: usize,
        /// Reads take the first node that answers.
        fifo: bool,
        /// A node that is outvoted gets the majority's content.
        rewrite: bool,
        /// Both nodes must agree on every byte, and a difference is reported.
        verify: bool,
    },
}

/// The driver. Reads and writes of one range take turns, or a read under way would meet one node before a write and another after it.
pub(crate) struct Replicas {
    agreement: Agreement,
    links: Vec<Arc<Link>>,
    ranges: Arc<Ranges>,
    /// The name of its node, and the graph that hears of a quorum's troubles.
    name: String,
    graph: Box<dyn Reporter>,
}

impl Replicas {
    /// `links` lead to the nodes; of `blkverify` to the trusted one and to the one under test.
    pub(crate) fn new(agreement: Agreement, links: Vec<Arc<Link>>, name: &str, graph: Box<dyn Reporter>) -> Replicas {
        Replicas { agreement, links, ranges: Arc::default(), name: name.to_owned(), graph }
    }

    fn nodes(&self) -> Result<Vec<Arc<Node>>> {
        let nodes = self.links.iter().map(|link| link.get().ok_or_else(|| Error::internal("a copy without a node")));
        nodes.collect()
    }

    /// The number of nodes that must succeed or agree.
    fn threshold(&self) -> usize {
        match self.agreement {
            Agreement::Verify => self.links.len(),
            Agreement::Votes { threshold, .. } => threshold,
        }
    }

    fn verifies(&self) -> bool {
        matches!(self.agreement, Agreement::Verify | Agreement::Votes { verify: true, .. })
    }

    /// The answer that counts, by its number.
    async fn agreed(&self, nodes: &[Arc<Node>], offset: u64, answers: &[Result<IoBuf>]) -> Result<usize> {
        let len = answers.iter().flatten().next().map_or(0, |buf| buf.len() as u64);
        self.check_outcomes("read", offset, answers)?;
        let good: Vec<usize> = (0..answers.len()).filter(|at| answers[*at].is_ok()).collect();
        let bytes = |at: usize| answers[at].as_ref().map_or(&[][..], |buf| &buf[..]);
        let votes = |at: usize| good.iter().filter(|other| bytes(**other) == bytes(at)).count();
        // Of equal numbers of votes the later answer counts, as in QEMU.
        let winner = good.iter().copied().max_by_key(|at| votes(*at)).unwrap_or(0);
        if votes(winner) == answers.len() {
            return Ok(winner);
        }
        if self.verifies()
            && let [first, .., last] = good[..]
            && let Some(at) = bytes(first).iter().zip(bytes(last)).position(|(one, other)| one != other)
        {
            return Err(self.mismatch(offset, bytes(first).len(), at as u64));
        }
        if votes(winner) < self.threshold() {
            self.report_failure(offset, len);
            return Err(Error::os(Errno::EIO, "too few copies of the disk agree").offset(offset));
        }
        for at in good.iter().copied().filter(|at| bytes(*at) != bytes(winner)) {
            self.report_bad(&nodes[at], QuorumWork::Read, None, (offset, len));
        }
        if let Agreement::Votes { rewrite: true, .. } = self.agreement {
            for at in good.iter().copied().filter(|at| bytes(*at) != bytes(winner)) {
                // The user's bytes are right without it.
                if let Err(error) = nodes[at].write_boxed(offset, IoBuf::copy_from(bytes(winner))).await.0 {
                    tracing::warn!(node = nodes[at].name(), %error, "a copy that differs could not be rewritten");
                }
            }
        }
        Ok(winner)
    }

    /// An error when too few copies have done it.
    fn check_outcomes<T>(&self, what: &str, offset: u64, answers: &[Result<T>]) -> Result<()> {
        let errors: Vec<&Error> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
        if errors.is_empty() || answers.len() - errors.len() >= self.threshold() {
            return Ok(());
        }
        if self.agreement == Agreement::Verify && errors.len() < answers.len() {
            let numbers = answers.iter().map(|answer| answer.as_ref().err().map_or(0, |error| -error.errno().0));
            let numbers: Vec<String> = numbers.rev().map(|number| number.to_string()).collect();
            let report = format!("blkverify: {what} offset={offset} return value mismatch {}", numbers.join(" != "));
            return Err(Error::os(Errno::EIO, "one copy of the disk fails and the other doesn't")
                .offset(offset)
                .with_report(report));
        }
        let votes = |error: &Error| errors.iter().filter(|other| other.errno() == error.errno()).count();
        let most = errors.iter().max_by_key(|error| votes(error));
        Err(most.map_or_else(|| Error::internal("no error"), |error| (*error).clone()))
    }

    fn mismatch(&self, offset: u64, len: usize, at: u64) -> Error {
        let place = offset + at;
        let what = if self.agreement == Agreement::Verify { "read " } else { "" };
        let name = self.name();
        let report = format!("{name}: {what}offset={offset} bytes={len} contents mismatch at offset {place}");
        Error::os(Errno::EIO, "the copies of the disk differ").offset(place).with_report(report)
    }

    /// Tells of the copies that have failed, and whether the others are too few.
    fn report_outcomes<T>(&self, nodes: &[Arc<Node>], work: QuorumWork, range: (u64, u64), answers: &[Result<T>]) {
        let failed = nodes.iter().zip(answers).filter_map(|(node, answer)| Some((node, answer.as_ref().err()?)));
        let count = failed.clone().count();
        failed.for_each(|(node, error)| self.report_bad(node, work, Some(error), range));
        // As in QEMU the caller of a flush alone learns that it failed.
        if count > 0 && answers.len() - count < self.threshold() && work != QuorumWork::Flush {
            self.report_failure(range.0, range.1);
        }
    }

    fn report_bad(&self, node: &Node, work: QuorumWork, error: Option<&Error>, (offset, len): (u64, u64)) {
        let error = error.map(Error::errno);
        self.report(&QuorumReport::Bad { node_name: node.name().to_owned(), work, error }, offset, len);
    }

    fn report_failure(&self, offset: u64, len: u64) {
        self.report(&QuorumReport::Failure { node_name: self.name.clone() }, offset, len);
    }

    fn report(&self, report: &QuorumReport, offset: u64, len: u64) {
        if matches!(self.agreement, Agreement::Votes { .. }) {
            self.graph.report_quorum(report, offset, len);
        }
    }

    /// Has every copy do something; enough of them must succeed.
    async fn all<F>(
        &self,
        (what, work): (&str, QuorumWork),
        (offset, len): (u64, u64),
        run: impl Fn(Arc<Node>) -> F,
    ) -> Result<()>
    where
        F: Future<Output = Result<()>>,
    {
        let nodes = self.nodes()?;
        let outcomes = join_all(nodes.iter().cloned().map(run)).await;
        self.report_outcomes(&nodes, work, (offset, len), &outcomes);
        self.check_outcomes(what, offset, &outcomes)
    }

    /// The first node that can be read answers.
    async fn read_first(&self, nodes: &[Arc<Node>], offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let (len, mut buf) = (buf.len() as u64, buf);
        let mut failed = Error::internal("no copy to read");
        for node in nodes {
            let (result, back) = node.read_boxed(offset, buf).await;
            match result {
                Ok(()) => return (Ok(()), back),
                Err(error) => {
                    self.report_bad(node, QuorumWork::Read, Some(&error), (offset, len));
                    (failed, buf) = (error, back);
                }
            }
        }
        (Err(failed), buf)
    }
}

impl Driver for Replicas {
    fn name(&self) -> &'static str {
        match self.agreement {
            Agreement::Verify => schemas::VERIFY.name,
            Agreement::Votes { .. } => schemas::QUORUM.name,
        }
    }

    fn holds_changes(&self) -> bool {
        false
    }

    /// The size of the node under test, else of all.
    fn size(&self) -> u64 {
        let mut sizes = self.links.iter().filter_map(|link| link.load().as_ref().map(|node| node.size()));
        match self.agreement {
            Agreement::Verify => sizes.next_back().unwrap_or(0),
            Agreement::Votes { .. } => sizes.min().unwrap_or(0),
        }
    }

    fn refusal(&self) -> Error {
        Error::unsupported("Image format driver does not support resize")
    }

    /// For the tools their opening decides.
    fn passes_permissions(&self, by_users: bool) -> bool {
        by_users
    }

    /// As in QEMU: the tested copy may get another length by a write, and no other user may write to copies that vote.
    fn permissions(&self, role: ChildRole, wanted: Permissions, _read_only: bool) -> Permissions {
        match role {
            ChildRole::Test if wanted.used.contains(PermissionSet::WRITE) => {
                Permissions { used: wanted.used | PermissionSet::RESIZE, ..wanted }
            }
            ChildRole::Replica(_) => Permissions { shared: wanted.shared & SHARED_BY_VOTERS.shared, ..wanted },
            _ => wanted,
        }
    }

    fn read(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let len = buf.len() as u64;
            let _claim = self.ranges.claim(offset, len).await;
            let nodes = match self.nodes() {
                Ok(nodes) => nodes,
                Err(error) => return (Err(error), buf),
            };
            if let Agreement::Votes { fifo: true, .. } = self.agreement {
                return self.read_first(&nodes, offset, buf).await;
            }
            let reads = nodes.iter().map(|node| async move {
                let (result, buf) = node.read_boxed(offset, IoBuf::try_zeroed(len as usize)?).await;
                result.map(|()| buf)
            });
            let answers = join_all(reads).await;
            self.report_outcomes(&nodes, QuorumWork::Read, (offset, len), &answers);
            match self.agreed(&nodes, offset, &answers).await {
                Ok(winner) => {
                    let mut buf = buf;
                    match answers.into_iter().nth(winner) {
                        Some(Ok(bytes)) => buf.copy_from_slice(&bytes),
                        _ => return (Err(Error::internal("no answer has won")), buf),
                    }
                    (Ok(()), buf)
                }
                Err(error) => (Err(error), buf),
            }
        })
    }

    fn write(&self, offset: u64, buf: IoBuf) -> Transfer<'_> {
        Box::pin(async move {
            let len = buf.len() as u64;
            let _claim = self.ranges.claim(offset, len).await;
            let bytes = &buf[..];
            let write = |node: Arc<Node>| async move { node.write_boxed(offset, IoBuf::copy_from(bytes)).await.0 };
            (self.all(("write", QuorumWork::Write), (offset, len), write).await, buf)
        })
    }

    fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Work<'_> {
        Box::pin(async move {
            let _claim = self.ranges.claim(offset, len).await;
            let write = |node: Arc<Node>| async move { node.write_zeroes_boxed(offset, len, flags).await };
            self.all(("write", QuorumWork::Write), (offset, len), write).await
        })
    }

    fn flush(&self) -> Work<'_> {
        Box::pin(async move {
            self.all(("flush", QuorumWork::Flush), (0, 0), |node| async move { node.flush_boxed().await }).await
        })
    }

    /// Zeroes where all copies have them, else data without a place.
    fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> LocalFuture<'_, Result<Vec<StatusExtent>>> {
        Box::pin(async move {
            let nodes = self.nodes()?;
            if self.agreement == Agreement::Verify {
                let trusted = nodes.first().ok_or_else(|| Error::internal("no copy"))?;
                let inside = trusted.size().saturating_sub(offset).min(len);
                return trusted.block_status_chain_boxed(offset, inside, max_runs).await.map(|runs| {
                    let own = |run: StatusExtent| StatusExtent { present: true, depth: 0, ..run };
                    runs.into_iter().map(own).collect()
                });
            }
            let end = offset.saturating_add(len);
            let (mut at, mut runs) = (offset, Vec::<StatusExtent>::new());
            while at < end && runs.len() < max_runs {
                let (mut next, mut zero) = (end, true);
                for node in &nodes {
                    let found = node.block_status_chain_boxed(at, end - at, STATUS_RUNS).await?;
                    let first =
                        found.first().ok_or_else(|| Error::new(ErrorKind::InvalidImage, "a copy without a map"))?;
                    let is_zero = |run: &StatusExtent| run.zero;
                    let like_first = found.iter().take_while(|run| is_zero(run) == is_zero(first));
                    next = next.min(like_first.map(|run| run.start + run.len).last().unwrap_or(end));
                    zero &= is_zero(first);
                }
                match runs.last_mut().filter(|last| last.zero == zero) {
                    Some(last) => last.len = next - last.start,
                    None => runs.push(StatusExtent {
                        start: at,
                        len: next - at,
                        data: !zero,
                        zero,
                        present: true,
                        compressed: false,
                        offset: None,
                        file: None,
                        depth: 0,
                    }),
                }
                at = next;
            }
            Ok(runs)
        })
    }
}

/// Refuses a wrong number of votes, in QEMU's order and words, before the keys are looked at one by one.
/// In a name of a file the copies may have their numbers as keys.
pub(crate) fn check_agreement(options: &mut BlockdevOptions) -> Result<()> {
    if let Some(Value::Object(numbered)) = options.get("children")
        && !numbered.is_empty()
    {
        let listed: Option<Vec<Value>> = (0..numbered.len()).map(|at| numbered.get(&at.to_string()).cloned()).collect();
        let listed = listed.ok_or_else(|| Error::invalid_argument("Option children is not a valid array"))?;
        options.insert("children", listed);
    }
    match options.get("children").and_then(Value::as_array) {
        Some(children) if !children.is_empty() => Ok(()),
        _ => Err(Error::invalid_argument("Number of provided children must be 1 or more")),
    }
}

/// Options of `quorum`.
pub(crate) fn agreement_of(options: &BlockdevOptions) -> Result<Agreement> {
    let refused = |message: &str| Err(Error::invalid_argument(message));
    let children = options.get("children").and_then(Value::as_array).map_or(0, Vec::len);
    let threshold = usize::try_from(options.number("vote-threshold").unwrap_or(0)).unwrap_or(usize::MAX);
    if threshold == 0 {
        return refused("Parameter 'vote-threshold' expects a value >= 1");
    }
    if threshold > children {
        return refused("threshold may not exceed children count");
    }
    let fifo = match options.text("read-pattern") {
        None | Some("quorum") => false,
        Some("fifo") => true,
        Some(_) => return refused("Please set read-pattern as fifo or quorum"),
    };
    // Where only one node is read, nothing is compared.
    let flag = |key: &str| !fifo && options.flag(key).unwrap_or(false);
    let (verify, rewrite) = (flag("blkverify"), flag("rewrite-corrupted"));
    if verify && (children != 2 || threshold != 2) {
        return refused("blkverify=on can only be set if there are exactly two files and vote-threshold is 2");
    }
    if verify && rewrite {
        return refused("rewrite-corrupted=on cannot be used with blkverify=on");
    }
    Ok(Agreement::Votes { threshold, fifo, rewrite, verify })
}
