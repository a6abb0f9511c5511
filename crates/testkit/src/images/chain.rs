// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A backing chain drawn from a seed, and its files.

use super::content::Content;
use super::ops::{Op, Texture, generate};
use super::spec::{DataFile, Format, Qcow2Spec};
use crate::qemu::Qemu;
use crate::random::Random;
use cowshed_image::node::Preallocation;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One layer of a chain.
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its format.
    pub format: Format,
    /// Its virtual size in bytes when it is created.
    pub size: u64,
    /// Operations; the image is closed and opened again between sessions.
    pub sessions: Vec<Vec<Op>>,
}

impl Layer {
    /// The name of its format.
    pub fn format_name(&self) -> &'static str {
        match self.format {
            Format::Raw => "raw",
            Format::Qcow2(_) => "qcow2",
        }
    }
}

/// Layers from the base up.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The base is the first.
    pub layers: Vec<Layer>,
}

/// The files of a chain and the data of its top.
#[derive(Clone, Debug)]
pub struct Built {
    /// The top image.
    pub path: PathBuf,
    /// Its format.
    pub format: &'static str,
    /// Every image file from the base up.
    pub files: Vec<PathBuf>,
    /// The guest's data in the top.
    pub content: Content,
}

/// Carries out sessions of operations on a qcow2 image.
pub trait Executor {
    /// Opens the image for writing, carries out `ops` and closes it. Panics when one fails.
    fn session(&mut self, image: &Path, ops: &[Op]);
}

/// The sessions are done by the real `qemu-io`.
pub struct QemuIo<'a>(
    /// The tools.
    pub &'a Qemu,
);

impl Executor for QemuIo<'_> {
    fn session(&mut self, image: &Path, ops: &[Op]) {
        let folder = image.with_extension("patterns");
        std::fs::create_dir_all(&folder).expect("a folder for patterns can be made");
        // QEMU (seen with 7.2 and 11.1) goes on packing compressed clusters into a host cluster that a discard or an
        // overwrite has freed, and that another write has taken since: the two then destroy each other. It forgets
        // where it packed when it opens the image, so packing starts in a new process after anything else.
        let is_compressed = |op: &Op| matches!(op, Op::WriteCompressed { .. });
        for ops in ops.chunk_by(|before, next| is_compressed(before) || !is_compressed(next)) {
            let named = ops.iter().enumerate();
            let commands: Vec<String> = named.map(|(index, op)| command(op, &folder.join(index.to_string()))).collect();
            self.0.io_commands(image, "qcow2", &commands);
        }
        std::fs::remove_dir_all(&folder).expect("the folder of patterns can be removed");
    }
}

fn command(op: &Op, pattern_file: &Path) -> String {
    let source = |texture: Texture, len: u64| match texture {
        Texture::Constant(byte) => format!("-P {byte}"),
        _ => {
            let mut bytes = vec![0; len as usize];
            texture.fill(&mut bytes);
            std::fs::write(pattern_file, bytes).expect("a pattern file can be written");
            format!("-s {}", pattern_file.display())
        }
    };
    match *op {
        Op::Write { offset, len, texture } => format!("write -q {} {offset} {len}", source(texture, len)),
        Op::WriteCompressed { offset, len, texture } => format!("write -q -c {} {offset} {len}", source(texture, len)),
        Op::WriteZeroes { offset, len, unmap } => {
            format!("write -q -z {} {offset} {len}", if unmap { "-u" } else { "" })
        }
        Op::Discard { offset, len } => format!("discard -q {offset} {len}"),
        Op::Resize { size, preallocation } => format!("truncate -m {} {size}", preallocation.name()),
        Op::Flush => "flush".into(),
    }
}

impl Chain {
    /// One to three layers; the top is qcow2, the others qcow2 or (the base) raw, sizes and options mixed.
    pub fn random(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let count = random.pick(&[1, 1, 2, 2, 2, 3]);
        let most_sectors = random.pick(&[256, 4096, 4096, 16384]);
        let base_size = 512 * (1 + random.below(most_sectors));
        let mut layers = Vec::new();
        for index in 0..count {
            let is_top = index + 1 == count;
            // Shorter, equal or longer than the image below it.
            let size = match random.below(3) {
                0 => base_size,
                1 => base_size + 512 * random.below(1024),
                _ => (base_size / 2).next_multiple_of(512),
            };
            layers.push(if index == 0 && !is_top && random.chance(40) {
                raw_layer(&mut random, size)
            } else {
                qcow2_layer(&mut random, size, index > 0)
            });
        }
        Chain { layers }
    }

    /// Makes the files in `folder`; every session of a qcow2 layer goes to `executor`.
    #[track_caller]
    pub fn build(&self, qemu: &Qemu, folder: &Path, executor: &mut dyn Executor) -> Built {
        let mut built = Built { path: PathBuf::new(), format: "raw", files: Vec::new(), content: Content::default() };
        for (index, layer) in self.layers.iter().enumerate() {
            let path = folder.join(format!("layer{index}.{}", layer.format_name()));
            let mut content = built.content.overlay(layer.size);
            match &layer.format {
                Format::Raw => write_raw(&path, layer, &mut content),
                Format::Qcow2(spec) => {
                    let backing = (index > 0).then_some((built.path.as_path(), built.format));
                    qemu.create(&path, "qcow2", &spec.options(&path, backing), layer.size);
                    for ops in &layer.sessions {
                        ops.iter().for_each(|op| content.apply(op));
                        executor.session(&path, ops);
                    }
                }
            }
            built.files.push(path.clone());
            built = Built { path, format: layer.format_name(), files: built.files, content };
        }
        built
    }

    /// The options of each layer, for messages.
    pub fn describe(&self) -> String {
        let layers = self.layers.iter().map(|layer| {
            let ops: usize = layer.sessions.iter().map(Vec::len).sum();
            format!("  {} bytes, {ops} operations, {:?}", layer.size, layer.format)
        });
        layers.collect::<Vec<_>>().join("\n")
    }
}

fn raw_layer(random: &mut Random, size: u64) -> Layer {
    // A shell's `>>` leaves an odd length; readers must see zeroes behind it.
    let size = if random.chance(30) { size + random.below(512) } else { size };
    let mut ops = generate(random, &Qcow2Spec::default(), &mut size.clone(), 12, &mut BTreeSet::new());
    ops.retain(|op| matches!(op, Op::Write { offset, len, .. } if offset + len <= size));
    Layer { format: Format::Raw, size, sessions: vec![ops] }
}

fn qcow2_layer(random: &mut Random, size: u64, has_backing: bool) -> Layer {
    let spec = Qcow2Spec::random(random, has_backing);
    let (mut current_size, mut written) = (size, BTreeSet::new());
    let mut sessions = Vec::new();
    // A fresh overlay that grows: its last cluster comes from the backing file still.
    if has_backing && !spec.is_v2 && random.chance(40) {
        let preallocation = random.pick(&[Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full]);
        current_size += 512 * (1 + random.below(1024));
        written.extend(size / spec.cluster_size..current_size.div_ceil(spec.cluster_size));
        sessions.push(vec![Op::Resize { size: current_size, preallocation }]);
    }
    for _ in 0..1 + random.below(3) {
        let count = 5 + random.below(25) as usize;
        let mut ops = generate(random, &spec, &mut current_size, count, &mut written);
        if spec.data_file == Some(DataFile::Raw) {
            ops.retain(|op| !matches!(op, Op::WriteCompressed { .. }));
        }
        sessions.push(ops);
    }
    Layer { format: Format::Qcow2(spec), size, sessions }
}

fn write_raw(path: &Path, layer: &Layer, content: &mut Content) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::create(path).expect("a raw file can be made");
    file.set_len(layer.size).expect("a raw file can get its length");
    for op in layer.sessions.iter().flatten() {
        content.apply(op);
        if let Op::Write { offset, len, texture } = *op {
            let mut bytes = vec![0; len as usize];
            texture.fill(&mut bytes);
            file.write_all_at(&bytes, offset).expect("a raw file can be written");
        }
    }
}
