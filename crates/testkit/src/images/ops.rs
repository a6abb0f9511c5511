// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Seeded operations on a virtual disk.

use super::spec::Qcow2Spec;
use crate::random::Random;
use cowshed_image::node::Preallocation::{self, Falloc, Full, Metadata, Off};
use std::collections::BTreeSet;

/// The bytes of a write, by which the operation that wrote them is found, and the place in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Texture {
    /// One byte over and over (0 too).
    Constant(u8),
    /// Counted 8-byte words after a tag: compressible, yet no two words alike.
    Counted(u32),
    /// Pseudo-random bytes, which no codec makes smaller.
    Random(u64),
}

impl Texture {
    /// Fills `buffer` with this texture from its start.
    pub fn fill(self, buffer: &mut [u8]) {
        match self {
            Texture::Constant(byte) => buffer.fill(byte),
            Texture::Counted(tag) => {
                for (index, word) in buffer.chunks_mut(8).enumerate() {
                    let value = (u64::from(tag) << 32) | (index as u64 & 0xffff_ffff);
                    word.copy_from_slice(&value.to_be_bytes()[..word.len()]);
                }
            }
            Texture::Random(seed) => {
                let mut random = Random::new(seed);
                for word in buffer.chunks_mut(8) {
                    word.copy_from_slice(&random.next_u64().to_le_bytes()[..word.len()]);
                }
            }
        }
    }
}

/// One operation. Offsets and lengths in bytes, inside the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Write data.
    Write {
        /// First byte.
        offset: u64,
        /// Bytes, not 0.
        len: u64,
        /// The data.
        texture: Texture,
    },
    /// Write one whole cluster compressed.
    WriteCompressed {
        /// A multiple of the cluster size.
        offset: u64,
        /// The cluster size, less at the end of the disk.
        len: u64,
        /// The data.
        texture: Texture,
    },
    /// Make a range read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes, not 0.
        len: u64,
        /// The space may be given back.
        unmap: bool,
    },
    /// Give a range back.
    Discard {
        /// First byte.
        offset: u64,
        /// Bytes, not 0.
        len: u64,
    },
    /// Change the size of the disk.
    Resize {
        /// New size in bytes, a multiple of 512.
        size: u64,
        /// The preallocation of the new part (off where the disk shrinks).
        preallocation: Preallocation,
    },
    /// Make everything durable.
    Flush,
}

/// Draws `count` operations for an image of `size` bytes. `written` remembers, over the sessions of one image, the
/// clusters that may be allocated: QEMU refuses to write compressed over those.
pub fn generate(
    random: &mut Random,
    spec: &Qcow2Spec,
    size: &mut u64,
    count: usize,
    written: &mut BTreeSet<u64>,
) -> Vec<Op> {
    let may_compress = spec.allows_compression() && spec.preallocation == "off";
    let mut ops = Vec::with_capacity(count);
    for _ in 0..count {
        let op = match random.below(100) {
            0..50 => {
                let (offset, len) = range(random, spec, *size);
                Op::Write { offset, len, texture: texture(random) }
            }
            50..65 if may_compress => match compressed(random, spec, *size, written) {
                Some(op) => op,
                None => continue,
            },
            50..78 => {
                let (offset, len) = range(random, spec, *size);
                Op::WriteZeroes { offset, len, unmap: random.chance(50) }
            }
            78..92 => {
                let (offset, len) = range(random, spec, *size);
                Op::Discard { offset, len }
            }
            // QEMU can't grow a v2 image over a longer backing file: there is no zero cluster to hide it.
            92..95 if !spec.is_v2 => {
                let old = *size;
                let op = resize(random, spec, size);
                if let Op::Resize { preallocation: Metadata | Falloc | Full, .. } = op {
                    written.extend(old / spec.cluster_size..size.div_ceil(spec.cluster_size));
                }
                op
            }
            _ => Op::Flush,
        };
        remember(&op, spec, written);
        ops.push(op);
    }
    ops
}

fn resize(random: &mut Random, spec: &Qcow2Spec, size: &mut u64) -> Op {
    // A raw data file follows the size of the image only when it grows.
    let old = *size;
    let grow = random.chance(60) || spec.data_file.is_some();
    let step = 512 * (1 + random.below((3 * spec.cluster_size).max(8192) / 512));
    // QEMU keeps the rest of a cluster that a shrink cuts, and shows it again when the disk grows. So the shared
    // operations cut between clusters; cuts inside of one have tests of their own.
    let shrunk = size.saturating_sub(step) / spec.cluster_size * spec.cluster_size;
    *size = if grow || shrunk == 0 { *size + step } else { shrunk };
    let preallocation = match *size > old && random.chance(40) {
        true => random.pick(&[Metadata, Falloc, Full]),
        false => Off,
    };
    Op::Resize { size: *size, preallocation }
}

fn remember(op: &Op, spec: &Qcow2Spec, written: &mut BTreeSet<u64>) {
    if let Op::Write { offset, len, .. }
    | Op::WriteCompressed { offset, len, .. }
    | Op::WriteZeroes { offset, len, .. }
    | Op::Discard { offset, len } = *op
    {
        written.extend(offset / spec.cluster_size..=(offset + len - 1) / spec.cluster_size);
    }
}

fn compressed(random: &mut Random, spec: &Qcow2Spec, size: u64, written: &BTreeSet<u64>) -> Option<Op> {
    let cluster = random.below(size.div_ceil(spec.cluster_size));
    if written.contains(&cluster) {
        return None;
    }
    let offset = cluster * spec.cluster_size;
    Some(Op::WriteCompressed { offset, len: spec.cluster_size.min(size - offset), texture: texture(random) })
}

fn texture(random: &mut Random) -> Texture {
    match random.below(10) {
        0 => Texture::Constant(0),
        1..3 => Texture::Constant(1 + random.below(255) as u8),
        3..7 => Texture::Counted(random.next_u64() as u32 | 1),
        _ => Texture::Random(random.next_u64()),
    }
}

/// A range with a bias to the edges where engines go wrong: (sub)clusters, sectors, the end of the disk.
fn range(random: &mut Random, spec: &Qcow2Spec, size: u64) -> (u64, u64) {
    let subcluster = if spec.extended_l2 { spec.cluster_size / 32 } else { spec.cluster_size };
    let grain = random.pick(&[1, 512, 4096, subcluster, subcluster, spec.cluster_size, spec.cluster_size]);
    let longest = (4 * spec.cluster_size).clamp(16384, 1 << 20).min(size);
    let mut offset = random.below(size) / grain * grain;
    if random.chance(10) {
        offset = size - 1 - random.below(longest).min(size - 1);
    }
    let mut len = 1 + random.below(longest);
    if random.chance(70) {
        len = len.div_ceil(grain) * grain;
    }
    (offset, len.min(size - offset).max(1))
}
