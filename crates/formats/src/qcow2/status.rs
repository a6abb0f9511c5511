// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Block status: the status of a range in this layer.

use super::Qcow2Driver;
use cowshed_graph::node::StatusExtent;
use cowshed_qcow2::ExtentList;
use cowshed_types::{Extent, GuestOffset, Mapping, Result, StoredIn};
use std::cell::OnceCell;
use std::sync::Arc;

/// Names of the files that runs are in, made once for all of them.
#[derive(Default)]
struct Names([OnceCell<Arc<str>>; 2]);

impl Qcow2Driver {
    /// Runs in order without gaps, at least one, at most `max_runs`. The node has checked the range.
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let mut runs: Vec<StatusExtent> = Vec::new();
        let names = Names::default();
        let mut at = offset;
        while at < offset + len {
            let mut extents = ExtentList::default();
            let mapped = self.plan(|engine| engine.map(GuestOffset(at), offset + len - at, &mut extents)).await?;
            for extent in extents.iter() {
                let run = self.status_of(extent, &names);
                let count = runs.len();
                match runs.last_mut() {
                    Some(last) if continues(last, &run) => last.len += run.len,
                    _ if count >= max_runs => return self.with_holes(runs, max_runs).await,
                    _ => runs.push(run),
                }
            }
            at += mapped;
        }
        self.with_holes(runs, max_runs).await
    }

    fn status_of(&self, extent: &Extent, names: &Names) -> StatusExtent {
        let file_of = |stored_in: StoredIn| {
            let place = &names.0[usize::from(stored_in == StoredIn::DataFile)];
            Some(Arc::clone(place.get_or_init(|| self.stored_in(stored_in).name().into())))
        };
        let nothing = StatusExtent {
            start: extent.guest.0,
            len: extent.len,
            data: false,
            zero: false,
            present: false,
            compressed: false,
            offset: None,
            file: None,
            depth: 0,
        };
        match extent.mapping {
            Mapping::Data { host, file, encrypted } => StatusExtent {
                data: true,
                present: true,
                offset: (!encrypted).then_some(host.0),
                file: if encrypted { None } else { file_of(file) },
                ..nothing
            },
            Mapping::Zero { host } => StatusExtent {
                zero: true,
                present: true,
                offset: host.map(|host| host.0),
                file: host.and_then(|_| file_of(self.data_place())),
                ..nothing
            },
            Mapping::Unallocated => StatusExtent { zero: self.backing.load().is_none() && !self.no_backing, ..nothing },
            Mapping::Compressed { .. } => StatusExtent { data: true, present: true, compressed: true, ..nothing },
        }
    }
}

fn continues(last: &StatusExtent, next: &StatusExtent) -> bool {
    let kind = |run: &StatusExtent| (run.data, run.zero, run.present, run.compressed, run.file.is_some());
    kind(last) == kind(next) && last.offset.map(|offset| offset + last.len) == next.offset
}
