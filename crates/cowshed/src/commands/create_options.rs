// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `-o help`: the options that a format has at creation.

use crate::output::{Console, Failure};

/// True when one of the lists asks for help: an element `help` or `?`.
pub fn asks_for_help(lists: &[String]) -> bool {
    lists.iter().flat_map(|list| list.split(',')).any(|element| element == "help" || element == "?")
}

/// Option, kind of value and meaning, in qemu-img's order; the words after the dash are ours.
const QCOW2: &[(&str, &str, &str)] = &[
    ("backing_file", "str", "File name of a base image"),
    ("backing_fmt", "str", "Image format of the base image"),
    ("cluster_size", "size", "qcow2 cluster size"),
    ("compat", "str", "Compatibility level (v2 [0.10] or v3 [1.1])"),
    ("compression_type", "str", "Method of compressed clusters: zlib or zstd"),
    ("data_file", "str", "File name of an external data file"),
    ("data_file_raw", "bool (on/off)", "The external data file must stay valid as a raw image"),
    ("extended_l2", "bool (on/off)", "Extended L2 tables: clusters of 32 subclusters"),
    ("lazy_refcounts", "bool (on/off)", "Postpone refcount updates"),
    ("nocow", "bool (on/off)", "Ask the file system not to copy on write"),
    ("preallocation", "str", "Preallocation mode: off, metadata, falloc, full"),
    ("refcount_bits", "num", "Width of a reference count entry in bits"),
    ("size", "size", "Virtual disk size"),
];

const RAW: &[(&str, &str, &str)] = &[
    ("nocow", "bool (on/off)", "Ask the file system not to copy on write"),
    ("preallocation", "str", "Preallocation mode: off, falloc, full"),
    ("size", "size", "Virtual disk size"),
];

/// Prints the options of `format`.
pub fn print_help(format: &str, console: &mut Console) -> Result<u8, Failure> {
    let options = match format {
        "qcow2" => QCOW2,
        "raw" => RAW,
        other => return Err(Failure::new(format!("Unknown file format '{other}'"))),
    };
    console.line(format_args!("Supported {format} options:"));
    for (name, kind, meaning) in options {
        let left = format!("{name}=<{kind}>");
        console.line(format_args!("  {left:<22} - {meaning}"));
    }
    Ok(0)
}
