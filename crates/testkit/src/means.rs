// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The means of speed that no option switches off: edits that take each away and leave what a user sees as it is.
//! `scripts/without` builds a copy of the sources with all of them, each behind a switch; `cowshed-bench means` measures that
//! program with and without each. `tests/tree/means.rs` keeps the list true.

use crate::switched::{Edit, Switches};

/// One means of speed.
#[derive(Clone, Copy, Debug)]
pub struct Means {
    /// Its name.
    pub name: &'static str,
    /// What is done instead without it.
    pub about: &'static str,
    /// The edits: `OFF` is true when it is switched off.
    pub edits: &'static [Edit],
}

/// The environment variable that holds the names of what is switched off, with commas between them.
pub const VARIABLE: &str = "COWSHED_WITHOUT";

/// What switches a means off. Looked up once in each place: a switch costs a request next to nothing.
pub const WITHOUT: Switches = Switches {
    word: "OFF",
    call: "cowshed_block::without!(\"NAME\")",
    reader: r#"
/// True when the means of this name is switched off.
#[doc(hidden)]
#[inline(never)]
pub fn is_without(name: &str) -> bool {
    std::env::var("COWSHED_WITHOUT").is_ok_and(|names| names.split(',').any(|known| known == name))
}

/// As [`is_without`], remembered.
#[doc(hidden)]
#[macro_export]
macro_rules! without {
    ($name:literal) => {{
        static IS_OFF: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| $crate::is_without($name));
        *IS_OFF
    }};
}
"#,
};

/// The edits of each means.
pub fn edits() -> Vec<(&'static str, &'static [Edit])> {
    MEANS.iter().map(|means| (means.name, means.edits)).collect()
}

/// The list.
pub const MEANS: &[Means] = &[
    Means {
        name: "compact_slices",
        about: "every slice of the mapping is an array of its entries",
        edits: &[(
            "crates/qcow2/src/compact.rs",
            "        let most_bytes = size_of_val(words) / 4 * 3;",
            r#"        if OFF {
            return None;
        }
        let most_bytes = size_of_val(words) / 4 * 3;"#,
        )],
    },
    Means {
        name: "owners_of_granules",
        about: "a read asks each layer of the chain in turn",
        edits: &[(
            "crates/image/src/formats/qcow2/chain_map.rs",
            "granule_bits >= GRANULE_BITS_MIN;",
            "granule_bits >= GRANULE_BITS_MIN && !OFF;",
        )],
    },
    Means {
        name: "places_of_granules",
        about: "a read asks the mapping of the layer that has it",
        edits: &[(
            "crates/image/src/formats/qcow2/chain_map.rs",
            "let place = known.host.map(",
            "let place = known.host.filter(|_| !OFF).map(",
        )],
    },
    Means {
        name: "image_passed_over",
        about: "a read asks the mapping of the image itself first, though nobody may write to it",
        edits: &[(
            "crates/image/src/formats/qcow2/chain_map.rs",
            "        let covers_itself = image.is_frozen();",
            "        let covers_itself = image.is_frozen() && !OFF;",
        )],
    },
    Means {
        name: "mapping_of_a_base_once",
        about: "each overlay has its base's mapping in memory for itself",
        edits: &[(
            "crates/image/src/formats/qcow2/shared.rs",
            "let is_quiet = is_read_only &&",
            "let is_quiet = !OFF && is_read_only &&",
        )],
    },
    Means {
        name: "inflated_kept",
        about: "each small read inflates its cluster again",
        edits: &[(
            "crates/image/src/formats/qcow2/inflated.rs",
            "        self.keep(host, len, Kept { cluster, referenced: false, is_ahead: false });",
            r#"        if !OFF {
            self.keep(host, len, Kept { cluster, referenced: false, is_ahead: false });
        }"#,
        )],
    },
    Means {
        name: "read_ahead",
        about: "a compressed cluster is read and inflated when it is asked for",
        edits: &[(
            "crates/image/src/formats/qcow2/ahead.rs",
            "let is_busy = self.ahead.requests",
            "let is_busy = OFF || self.ahead.requests",
        )],
    },
    Means {
        name: "whole_cluster_inflater",
        about: "zlib-rs inflates, as it does for streams that the decoder of whole clusters doesn't take",
        edits: &[(
            "crates/image/src/codec/zlib.rs",
            "    match DECODER.with_borrow_mut(|decoder| decoder.deflate_decompress(compressed, cluster)) {",
            r#"    if OFF {
        return decompress_tolerant(compressed, cluster);
    }
    match DECODER.with_borrow_mut(|decoder| decoder.deflate_decompress(compressed, cluster)) {"#,
        )],
    },
    Means {
        name: "cluster_deflater",
        about: "zlib-rs deflates, at zlib's default level and with the same window of 4 KiB",
        edits: &[(
            "crates/image/src/codec/zlib.rs",
            r#"    match mode {
        ZlibMode::Narrow { level } => {"#,
            r#"    thread_local! {
        static PLAIN: RefCell<Option<zlib_rs::Deflate>> = const { RefCell::new(None) };
    }
    match mode {
        ZlibMode::Narrow { .. } if OFF => PLAIN.with_borrow_mut(|slot| {
            let encoder = slot.get_or_insert_with(|| zlib_rs::Deflate::new(6, false, 12));
            encoder.reset();
            match encoder.compress(cluster, out, zlib_rs::DeflateFlush::Finish) {
                Ok(zlib_rs::Status::StreamEnd) => usize::try_from(encoder.total_out()).ok(),
                _ => None,
            }
        }),
        ZlibMode::Narrow { level } => {"#,
        )],
    },
    Means {
        name: "all_cores",
        about: "one thread does all compression, inflation and encryption that is handed on",
        edits: &[(
            "crates/storage/src/rt/pool.rs",
            "Pool::new(\"cowshed-cpu\", cores)",
            "Pool::new(\"cowshed-cpu\", if OFF { 1 } else { cores })",
        )],
    },
    Means {
        name: "wide_zero_search",
        about: "zeroes are looked for byte by byte",
        edits: &[(
            "crates/jobs/src/zeroes.rs",
            "    let (strides, tail) = bytes.as_chunks::<STRIDE_BYTES>();\n",
            r#"    if OFF {
        return bytes.iter().all(|byte| *byte == 0);
    }
    let (strides, tail) = bytes.as_chunks::<STRIDE_BYTES>();
"#,
        )],
    },
    Means {
        name: "large_pieces",
        about: "convert reads and writes pieces of 64 KiB, a cluster each",
        edits: &[(
            "crates/jobs/src/convert/mod.rs",
            "let step = CHUNK_BYTES.max(unit)",
            "let step = if OFF { 64 << 10 } else { CHUNK_BYTES }.max(unit)",
        )],
    },
    Means {
        name: "joined_extents",
        about: "each cluster is an extent and a request of its own, also where it continues the one before",
        edits: &[(
            "crates/qcow2/src/map.rs",
            "            if continues(last, &extent) {",
            "            if !OFF && continues(last, &extent) {",
        )],
    },
    Means {
        name: "vectored_writes",
        about: "data and what is copied around them are written one after the other",
        edits: &[(
            "crates/image/src/formats/qcow2/allocate.rs",
            "        let (result, mut bufs) = file.write_vectored_at(bufs, host.0).await;",
            r#"        let (result, mut bufs) = if OFF {
            let (mut result, mut written, mut at) = (Ok(()), Vec::new(), host.0);
            for buf in bufs {
                let len = buf.len() as u64;
                let (outcome, buf) = file.write_at(buf, at).await;
                result = result.and(outcome);
                written.push(buf);
                at += len;
            }
            (result, written)
        } else {
            file.write_vectored_at(bufs, host.0).await
        };"#,
        )],
    },
    Means {
        name: "merged_copy",
        about: "what is copied before the data and behind them is read by two requests",
        edits: &[(
            "crates/image/src/formats/qcow2/allocate.rs",
            "if allocation.head == Fill::Copy && allocation.tail == Fill::Copy && total <= ONE_READ_BYTES {",
            "if !OFF && allocation.head == Fill::Copy && allocation.tail == Fill::Copy && total <= ONE_READ_BYTES {",
        )],
    },
    Means {
        name: "extents_at_once",
        about: "clusters are allocated, counted, written and mapped one by one",
        edits: &[(
            "crates/qcow2/src/allocate.rs",
            ".min(first + (MAX_BYTES >> bits).max(1));",
            ".min(first + if OFF { 1 } else { (MAX_BYTES >> bits).max(1) });",
        )],
    },
    Means {
        name: "write_behind",
        about: "new data wait for the flush",
        edits: &[(
            "crates/storage/src/file.rs",
            "        if host.is_direct() || self.0.no_flush",
            "        if OFF || host.is_direct() || self.0.no_flush",
        )],
    },
    Means {
        name: "late_write_back",
        about: "metadata are written as soon as they fill half of the cache, also where all of them have room",
        edits: &[(
            "crates/qcow2/src/engine.rs",
            "let share = if cache_bytes >= mapping_bytes {",
            "let share = if cache_bytes >= mapping_bytes && !OFF {",
        )],
    },
    Means {
        name: "seek_data",
        about: "holes of files are not asked for: all is read",
        edits: &[(
            "crates/storage/src/host/data.rs",
            "    if is_device {\n        return Ok(all);",
            "    if is_device || OFF {\n        return Ok(all);",
        )],
    },
    Means {
        name: "check_in_parallel",
        about: "one thread reads and compares the tables",
        edits: &[(
            "crates/image/src/check/sweep.rs",
            "        self.options.threads.min(usize::try_from(fit)",
            "        if OFF { 1 } else { self.options.threads }.min(usize::try_from(fit)",
        )],
    },
    Means {
        name: "gathered_requests",
        about: "no receive waits for company",
        edits: &[(
            "crates/nbd-server/src/session.rs",
            "self.gathering.borrow_mut().takes_pause() &&",
            "!OFF && self.gathering.borrow_mut().takes_pause() &&",
        )],
    },
];
