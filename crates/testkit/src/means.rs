// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The optimisations that no option switches off. The code has a switch for each, `cowshed_types::without!("NAME")`,
//! which changes nothing that a user sees. `scripts/without` builds the program with these switches;
//! `cowshed-bench means` measures it with and without each. `tests/tree/switches.rs` keeps the list true.

/// One optimisation.
#[derive(Clone, Copy, Debug)]
pub struct Means {
    /// Its name.
    pub name: &'static str,
    /// The behaviour without it.
    pub about: &'static str,
}

/// The environment variable with the names that are switched off, with commas between them
/// (`crates/types/src/switches.rs`).
pub const VARIABLE: &str = "COWSHED_WITHOUT";

/// The list.
pub const MEANS: &[Means] = &[
    Means { name: "compact_slices", about: "every slice of the mapping is an array of its entries" },
    Means { name: "owners_of_granules", about: "a read asks each layer of the chain in turn" },
    Means { name: "places_of_granules", about: "a read asks the mapping of the layer that has it" },
    Means {
        name: "image_passed_over",
        about: "a read asks the mapping of the image itself first, though it has no writers",
    },
    Means { name: "mapping_of_a_base_once", about: "each overlay has its base's mapping in memory for itself" },
    Means { name: "decompressed_kept", about: "each small read decompresses its cluster again" },
    Means { name: "read_ahead", about: "a compressed cluster is read and decompressed when it is asked for" },
    Means {
        name: "whole_cluster_decoder",
        about: "zlib-rs decompresses, as it does for streams that the decoder of whole clusters doesn't take",
    },
    Means {
        name: "cluster_deflater",
        about: "zlib-rs deflates, at zlib's default level and with the same window of 4 KiB",
    },
    Means {
        name: "all_cores",
        about: "one thread does all compression, decompression and encryption that is handed on",
    },
    Means { name: "wide_zero_search", about: "zeroes are looked for byte by byte" },
    Means { name: "large_pieces", about: "convert reads and writes pieces of 64 KiB, a cluster each" },
    Means {
        name: "joined_extents",
        about: "each cluster is an extent and a request of its own, also where it continues the one before",
    },
    Means { name: "vectored_writes", about: "data and what is copied around them are written one after the other" },
    Means { name: "merged_copy", about: "what is copied before the data and behind them is read by two requests" },
    Means { name: "extents_at_once", about: "clusters are allocated, counted, written and mapped one by one" },
    Means { name: "write_behind", about: "new data wait for the flush" },
    Means {
        name: "late_write_back",
        about: "metadata are written as soon as they fill half of the cache, also where all of them have room",
    },
    Means { name: "seek_data", about: "holes of files are not asked for: all is read" },
    Means { name: "check_in_parallel", about: "one thread reads and compares the tables" },
];
