// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of one layer, drawn so that every combination is one that qemu-img accepts.

use crate::random::Random;
use std::path::Path;

/// Format of a layer.
#[derive(Clone, Debug)]
pub enum Format {
    /// A plain file.
    Raw,
    /// A qcow2 image.
    Qcow2(Qcow2Spec),
}

/// External data file of a qcow2 image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataFile {
    /// `data_file=…`.
    Mapped,
    /// `data_file=…,data_file_raw=on`: host offset = guest offset.
    Raw,
}

/// The `-o` options of a qcow2 image.
#[derive(Clone, Debug)]
pub struct Qcow2Spec {
    /// `compat=0.10`.
    pub is_v2: bool,
    /// Bytes, 512 to 2 MiB.
    pub cluster_size: u64,
    /// Width of a reference count in bits, 1 to 64.
    pub refcount_bits: u64,
    /// Subclusters.
    pub extended_l2: bool,
    /// `compression_type=zstd`.
    pub zstd: bool,
    /// External data file.
    pub data_file: Option<DataFile>,
    /// `lazy_refcounts=on`.
    pub lazy_refcounts: bool,
    /// `preallocation=…`.
    pub preallocation: &'static str,
}

impl Default for Qcow2Spec {
    fn default() -> Self {
        Qcow2Spec {
            is_v2: false,
            cluster_size: 65536,
            refcount_bits: 16,
            extended_l2: false,
            zstd: false,
            data_file: None,
            lazy_refcounts: false,
            preallocation: "off",
        }
    }
}

impl Qcow2Spec {
    /// A random valid combination.
    pub fn random(random: &mut Random, has_backing: bool) -> Self {
        let mut spec = Qcow2Spec {
            cluster_size: random.pick(&[512, 1024, 4096, 4096, 16384, 32768, 65536, 65536, 65536, 262_144, 2 << 20]),
            ..Self::default()
        };
        spec.is_v2 = random.chance(20);
        if !spec.is_v2 {
            spec.refcount_bits = random.pick(&[1, 2, 4, 8, 16, 16, 16, 32, 64]);
            spec.extended_l2 = spec.cluster_size >= 16384 && random.chance(45);
            spec.zstd = random.chance(40);
            spec.lazy_refcounts = random.chance(25);
            if random.chance(20) {
                let raw_is_allowed = !has_backing;
                spec.data_file =
                    Some(if raw_is_allowed && random.chance(50) { DataFile::Raw } else { DataFile::Mapped });
            }
        }
        // qemu-img allows preallocation over a backing file with subclusters only.
        if random.chance(25) && (!has_backing || spec.extended_l2) {
            spec.preallocation = random.pick(&["metadata", "falloc", "full"]);
        }
        spec
    }

    /// True when clusters of the image may be compressed.
    pub fn allows_compression(&self) -> bool {
        self.data_file.is_none()
    }

    /// The text behind `-o`. `backing` is (path, format).
    pub fn options(&self, image: &Path, backing: Option<(&Path, &str)>) -> String {
        let mut options = vec![
            format!("compat={}", if self.is_v2 { "0.10" } else { "1.1" }),
            format!("cluster_size={}", self.cluster_size),
        ];
        if !self.is_v2 {
            options.push(format!("refcount_bits={}", self.refcount_bits));
            options.push(format!("lazy_refcounts={}", on_off(self.lazy_refcounts)));
            options.push(format!("extended_l2={}", on_off(self.extended_l2)));
            options.push(format!("compression_type={}", if self.zstd { "zstd" } else { "zlib" }));
        }
        if let Some(kind) = self.data_file {
            options.push(format!("data_file={}", image.with_extension("data").display()));
            options.push(format!("data_file_raw={}", on_off(kind == DataFile::Raw)));
        }
        // With a raw data file qemu-img needs at least the metadata and chooses it itself.
        if self.preallocation != "off" {
            options.push(format!("preallocation={}", self.preallocation));
        }
        if let Some((path, format)) = backing {
            options.push(format!("backing_file={},backing_fmt={format}", path.display()));
        }
        options.join(",")
    }
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}
