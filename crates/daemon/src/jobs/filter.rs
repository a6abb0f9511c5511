// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The filter node that a mirror or a commit has in QEMU (`filter-node-name`). Requests need none here: the source
//! counts its own writes. So the name stands for the node that would be the filter's child, and is listed as a node.

use super::{Job, Jobs};
use cowshed_image::Node;
use cowshed_image::graph::HeldName;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Such a filter, until its job ends.
pub(crate) struct JobFilter {
    pub held: HeldName,
    /// The driver that QEMU names.
    pub driver: &'static str,
    /// The node below it.
    pub below: Arc<Node>,
}

impl JobFilter {
    pub fn name(&self) -> &str {
        self.held.name()
    }

    /// `below`: the `BlockDeviceInfo` of the node below it. `flat`: without the images below.
    fn describe(&self, flat: bool, mut below: Map<String, Value>) -> Map<String, Value> {
        let is_mirror = self.driver == "mirror_top";
        let image_below = below.get("image").cloned().filter(|_| !flat);
        if let Some(depth) = below.get("backing_file_depth").and_then(Value::as_u64).filter(|_| !flat) {
            below.insert("backing_file_depth".to_owned(), json!(depth + 1));
        }
        for (key, value) in [
            ("node-name", json!(self.name())),
            ("drv", json!(self.driver)),
            ("ro", json!(!is_mirror || self.below.is_read_only())),
            ("children", json!([{"child": "backing", "node-name": self.below.name()}])),
            ("write_threshold", json!(0)),
            ("encrypted", json!(false)),
            ("detect_zeroes", json!("off")),
        ] {
            below.insert(key.to_owned(), value);
        }
        below.shift_remove("backing_file");
        below.shift_remove("dirty-bitmaps");
        if let Some(image) = below.get_mut("image").and_then(Value::as_object_mut) {
            let of_the_image =
                ["backing-filename", "backing-filename-format", "full-backing-filename", "backing-image"];
            for key in of_the_image.into_iter().chain(["format-specific", "snapshots", "encrypted"]) {
                image.shift_remove(key);
            }
            image.insert("format".to_owned(), json!(self.driver));
            let limits =
                json!({"request-alignment": 1, "min-mem-alignment": 512, "opt-mem-alignment": 4096, "max-iov": 1024});
            image.insert("limits".to_owned(), limits);
            image.extend(image_below.map(|below| ("backing-image".to_owned(), below)));
        }
        below
    }
}

impl Job {
    /// The job has this filter until it ends.
    pub fn set_filter(&self, filter: Option<JobFilter>) {
        *self.filter.borrow_mut() = filter;
    }

    /// Gives the name of its filter up.
    pub fn release_filter(&self) -> Option<String> {
        self.filter.take().map(|filter| filter.name().to_owned())
    }

    /// The entry of its filter in the list: its name, the node below, and the entry. `described`: the entry of that
    /// node.
    pub fn listed_filter(
        &self,
        flat: bool,
        described: impl Fn(&Node) -> Option<Map<String, Value>>,
    ) -> Option<ListedFilter> {
        let filter = self.filter.borrow();
        let filter = filter.as_ref()?;
        let mut entry = filter.describe(flat, described(&filter.below)?);
        if let Some(mirror) = self.mirror.borrow().as_ref() {
            let (granularity, count) = mirror.missing();
            let map = json!({"granularity": granularity, "count": count, "recording": false, "busy": false,
                             "persistent": false});
            entry.insert("dirty-bitmaps".to_owned(), json!([map]));
        }
        Some(ListedFilter { name: filter.name().to_owned(), below: Arc::clone(&filter.below), entry })
    }
}

/// A filter in the list of nodes.
pub(crate) struct ListedFilter {
    pub name: String,
    pub below: Arc<Node>,
    pub entry: Map<String, Value>,
}

impl Jobs {
    /// The node that stands for the filter of this name, and its job.
    pub fn behind_filter(&self, name: &str) -> Option<(Arc<Node>, &'static str)> {
        self.list().into_iter().find_map(|job| {
            let filter = job.filter.borrow();
            let filter = filter.as_ref().filter(|filter| filter.name() == name)?;
            Some((Arc::clone(&filter.below), job.kind))
        })
    }
}
