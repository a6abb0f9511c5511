// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Small images made by the real QEMU tools, to be damaged: each format feature is in one of them.

use crate::qemu::{Qemu, temp_dir};
use std::path::{Path, PathBuf};

/// The recipe of an image: options of `create`, then commands of qemu-io (several in one run by `; `), `snapshot NAME`
/// and `bitmap NAME`.
pub struct Specimen {
    /// Its name.
    pub name: &'static str,
    /// `create -o`; `{dir}` is the folder.
    pub options: &'static str,
    /// Commands of qemu-io, `snapshot NAME` and `bitmap NAME`, in order.
    pub steps: &'static [&'static str],
}

/// Virtual size of each image, in bytes.
pub const SIZE: u64 = 8 << 20;

/// The images, over the feature matrix.
pub const SPECIMENS: &[Specimen] = &[
    Specimen {
        name: "plain",
        options: "cluster_size=64k",
        steps: &["write -P 1 0 1M", "write -P 2 2M 1M", "write -z 1M 128k"],
    },
    Specimen { name: "v2", options: "compat=0.10", steps: &["write -P 1 0 1M", "write -P 2 3M 200k"] },
    Specimen { name: "tiny", options: "cluster_size=512", steps: &["write -P 1 0 300k", "write -P 2 5M 100k"] },
    Specimen { name: "bits1", options: "refcount_bits=1,cluster_size=4k", steps: &["write -P 1 0 300k"] },
    Specimen {
        name: "bits2",
        options: "refcount_bits=2,cluster_size=4k",
        steps: &["write -P 1 0 300k", "snapshot a", "write -P 3 4k 9k"],
    },
    Specimen { name: "bits4", options: "refcount_bits=4,cluster_size=4k", steps: &["write -P 1 0 300k", "snapshot a"] },
    Specimen {
        name: "bits32",
        options: "refcount_bits=32",
        steps: &["write -P 1 0 300k", "snapshot a", "write -P 2 0 64k"],
    },
    Specimen {
        name: "data-file",
        options: "data_file={dir}/data.raw",
        steps: &["write -P 1 0 300k", "write -P 2 2M 1M"],
    },
    Specimen {
        name: "raw-data-file",
        options: "data_file={dir}/raw.raw,data_file_raw=on",
        steps: &["write -P 1 0 300k", "write -P 2 2M 1M"],
    },
    Specimen { name: "bits8", options: "refcount_bits=8", steps: &["write -P 1 0 300k", "write -c -P 3 1M 64k"] },
    Specimen { name: "bits64", options: "refcount_bits=64", steps: &["write -P 1 0 300k"] },
    Specimen {
        name: "snapshots",
        options: "cluster_size=16k",
        steps: &[
            "write -P 1 0 256k",
            "snapshot a",
            "write -P 2 0 64k",
            "write -P 3 2M 64k",
            "snapshot b",
            "write -P 4 64k 16k",
        ],
    },
    Specimen {
        name: "bitmaps",
        options: "cluster_size=64k",
        steps: &["write -P 1 0 256k", "bitmap b0", "bitmap b1", "write -P 2 1M 1M"],
    },
    Specimen {
        name: "subclusters",
        options: "extended_l2=on,cluster_size=64k",
        steps: &["write -P 1 0 256k", "write -P 2 300k 2k", "write -z 0 6k", "write -P 3 1M 2k"],
    },
    Specimen {
        name: "compressed",
        options: "cluster_size=64k",
        steps: &[
            "write -P 9 0 64k",
            "write -c -P 1 64k 64k; write -c -P 2 128k 64k; write -c -P 3 192k 64k",
            "write -P 4 1M 64k",
        ],
    },
    Specimen {
        name: "tiny-snapshots",
        options: "cluster_size=512",
        steps: &["write -P 1 0 70k", "snapshot a", "write -P 2 30k 40k", "write -P 3 2M 1k", "snapshot b"],
    },
    Specimen {
        name: "tiny-compressed",
        options: "cluster_size=1k,compression_type=zstd",
        steps: &["write -c -P 1 0 100k", "write -P 2 1M 20k", "snapshot a", "write -c -P 3 2M 10k"],
    },
    Specimen {
        name: "v2-compressed",
        options: "compat=0.10,cluster_size=4k",
        steps: &["write -c -P 1 0 100k", "write -P 2 1M 20k"],
    },
    Specimen {
        name: "overlay",
        options: "cluster_size=16k,extended_l2=on,backing_file={dir}/backing.raw,backing_fmt=raw",
        steps: &["write -P 1 0 100k", "write -P 2 1M 6k", "write -z 2M 6k", "snapshot a", "write -P 3 4k 9k"],
    },
    Specimen {
        name: "v2-overlay",
        options: "compat=0.10,cluster_size=4k,backing_file={dir}/backing.raw,backing_fmt=raw",
        steps: &["write -P 1 0 100k", "write -P 2 1M 6k"],
    },
    Specimen { name: "lazy", options: "lazy_refcounts=on", steps: &["write -P 1 0 1M"] },
];

/// A folder for the images, and the tools that make them.
pub struct Workbench {
    dir: tempfile::TempDir,
    /// The oracle.
    pub qemu: Qemu,
}

impl Default for Workbench {
    fn default() -> Self {
        Self::new()
    }
}

impl Workbench {
    /// An empty one; its folder goes with it.
    pub fn new() -> Self {
        Workbench { dir: temp_dir(), qemu: Qemu::system() }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// The path of the image `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.qcow2"))
    }

    /// Copies an image.
    pub fn copy(&self, from: &Path, name: &str) -> PathBuf {
        let to = self.path(name);
        std::fs::copy(from, &to).expect("copy");
        to
    }

    /// Makes the specimen `name`, afresh.
    pub fn base(&self, name: &str) -> PathBuf {
        let base = SPECIMENS.iter().find(|base| base.name == name).expect("a base image of that name");
        let path = self.path(&format!("base-{name}"));
        let options = base.options.replace("{dir}", self.dir.path().to_str().expect("text path"));
        std::fs::write(self.dir.path().join("backing.raw"), vec![0xb5; SIZE as usize]).expect("backing file");
        self.qemu.create(&path, "qcow2", &options, SIZE);
        for step in base.steps {
            let text = path.to_str().expect("text path");
            match step.split_once(' ') {
                Some(("snapshot", id)) => drop(self.qemu.img(["snapshot", "-c", id, text]).expect_ok()),
                Some(("bitmap", id)) => drop(self.qemu.img(["bitmap", "--add", text, id]).expect_ok()),
                _ => {
                    let commands: Vec<String> = step.split("; ").map(str::to_owned).collect();
                    self.qemu.io_commands(&path, "qcow2", &commands).expect_ok();
                }
            }
        }
        self.qemu.expect_clean(&path);
        path
    }

    /// The guest's bytes, `None` where qemu-img can't read them.
    pub fn content(&self, image: &Path) -> Option<Vec<u8>> {
        self.convert(image, &[])
    }

    /// As [`Workbench::content`], of an internal snapshot.
    pub fn snapshot_content(&self, image: &Path, snapshot: &str) -> Option<Vec<u8>> {
        self.convert(image, &["-l", snapshot])
    }

    fn convert(&self, image: &Path, options: &[&str]) -> Option<Vec<u8>> {
        let raw = image.with_extension("raw");
        let (from, to) = (image.to_str()?, raw.to_str()?);
        let output = self.qemu.img([&["convert", "-f", "qcow2", "-O", "raw"], options, &[from, to]].concat());
        let bytes = std::fs::read(&raw).ok();
        let _ = std::fs::remove_file(&raw);
        bytes.filter(|_| output.code == 0)
    }
}
