// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The keys of the driver.

use cowshed_graph::options::{DriverKind, DriverSchema, Key, KeyType, REQUIRED, key};

pub(super) const SCHEMA: DriverSchema =
    DriverSchema { name: "qcow2", kind: DriverKind::Format, about: "QEMU's image format", keys: KEYS };

const KEYS: &[Key] = &[
    key("file", KeyType::Child, REQUIRED, "the image file"),
    key("backing", KeyType::ChildOrNull, "as the image says", "the backing file; null for none"),
    key("data-file", KeyType::Child, "as the image says", "the external data file"),
    key("lazy-refcounts", KeyType::Bool, "as the image says", "keep refcounts on disk only loosely up to date"),
    key("l2-cache-size", KeyType::Size, "as l2-cache-coverage", "memory for the guest-to-host mapping"),
    key("l2-cache-coverage", KeyType::Size, "the whole disk", "how much disk the mapping in memory covers"),
    key("l2-cache-entry-size", KeyType::Size, "4k", "granularity of the mapping's cache"),
    key("refcount-cache-size", KeyType::Size, "4 clusters", "memory for refcounts"),
    key("cache-size", KeyType::Size, "", "both caches together, 4 : 1"),
    key("cache-clean-interval", KeyType::Number(0, u64::MAX), "600", "seconds after which unused cache is dropped"),
    key(
        "overlap-check",
        KeyType::ChoiceOrStruct(OVERLAP_TEMPLATES, OVERLAP),
        "cached",
        "catch writes that would land on metadata",
    ),
    key("encrypt", KeyType::Struct(ENCRYPT), "as the image says", "the key of an encrypted image"),
    key("discard-no-unref", KeyType::Bool, "off", "keep discarded clusters allocated"),
    key("pass-discard-request", KeyType::Bool, "as discard", "pass discards of the guest on to the file"),
    key("pass-discard-snapshot", KeyType::Bool, "on", "discard what a deleted snapshot frees"),
    key("pass-discard-other", KeyType::Bool, "off", "discard what is freed otherwise"),
];

const ENCRYPT: &[Key] = &[
    key("format", KeyType::Choice(&["luks", "aes"]), "as the image says", "the method that the image must have"),
    key("key-secret", KeyType::Text, "", "id of the secret with the passphrase"),
];

const OVERLAP_TEMPLATES: &[&str] = &["none", "constant", "cached", "all"];

const OVERLAP: &[Key] = &[
    key("template", KeyType::Choice(OVERLAP_TEMPLATES), "cached", "the checks to start from"),
    key("main-header", KeyType::Bool, "as the template", "the header"),
    key("active-l1", KeyType::Bool, "as the template", "the L1 table"),
    key("active-l2", KeyType::Bool, "as the template", "the L2 tables"),
    key("refcount-table", KeyType::Bool, "as the template", "the refcount table"),
    key("refcount-block", KeyType::Bool, "as the template", "the refcount blocks"),
    key("snapshot-table", KeyType::Bool, "as the template", "the snapshot table"),
    key("inactive-l1", KeyType::Bool, "as the template", "the snapshots' L1 tables"),
    key("inactive-l2", KeyType::Bool, "as the template", "the snapshots' L2 tables"),
    key("bitmap-directory", KeyType::Bool, "as the template", "the directory of bitmaps"),
];
