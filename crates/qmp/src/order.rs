// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The order in which QEMU writes the members of an object: fixed for each pair of names, whatever the object.

use serde_json::{Map, Value};
use std::collections::HashMap;
use std::sync::LazyLock;

/// Names in their order, a line for those that come in the reverse order of their making.
const ORDER: &str = include_str!("order.txt");

static PLACES: LazyLock<HashMap<&str, usize>> = LazyLock::new(|| {
    let lines = ORDER.lines().filter(|line| !line.starts_with('#')).enumerate();
    lines.flat_map(|(place, line)| line.split_whitespace().map(move |name| (name, place))).collect()
});

/// The members in QEMU's order. Names that are not listed, as an id of a client may have, come last in their own order.
pub(crate) fn ordered(members: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let place = |name: &str| PLACES.get(name).copied().unwrap_or(usize::MAX);
    let mut ordered: Vec<_> = members.iter().enumerate().map(|(at, member)| (place(member.0), at, member)).collect();
    // Of names in one place the last one comes first.
    ordered.sort_by_key(|&(place, at, _)| (place, if place == usize::MAX { at } else { usize::MAX - at }));
    ordered.into_iter().map(|(_, _, member)| member).collect()
}
