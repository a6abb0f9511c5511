// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cases of the crash test, drawn from a seed over everything that an image can be.

use crate::crash::{CrashPlan, CrashReport};
use crate::images::{self, Chain, DataFile, Format, Layer, Qcow2Spec, Texture, generate_ops};
use crate::operations::{OpGen, Step};
use crate::random::Random;
use crate::scenario::{BEHIND_A_FILTER, Prepared, Trial};
use cowshed_simulator::{Config, Fault, Features};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// One case: an image on a machine.
#[derive(Clone, Debug)]
pub struct CrashScene {
    /// The source of all of it.
    pub seed: u64,
    /// The image's layers; the top is written to.
    pub chain: Chain,
    /// The machine.
    pub config: Config,
    /// Queues that the guest's requests come from.
    pub queues: usize,
    /// Options of the driver.
    pub options: &'static str,
    /// The image has internal snapshots.
    pub snapshots: bool,
    /// Granularities of its enabled dirty bitmaps, in bytes.
    pub bitmaps: Vec<u64>,
    /// `-o` options of its encryption, "" for none.
    pub encryption: &'static str,
    /// `-o` options of the amendment behind the guest's requests, "" for none.
    pub amend: &'static str,
    /// The guest writes multiples of 512 bytes; otherwise any number.
    pub whole_sectors: bool,
    /// Writes take over blocks of another file; counts their bytes.
    pub shared: Option<Arc<AtomicU64>>,
    /// The image is on a device, whose space isn't zero and doesn't grow.
    pub on_a_device: bool,
}

/// The length and the thoroughness of a case.
#[derive(Clone, Debug)]
pub struct Effort {
    /// Requests of the guest.
    pub requests: usize,
    /// Distinct states.
    pub states: usize,
    /// The distance of distinct states of which one goes to the real `qemu-img`; 0: none.
    pub sample_qemu: usize,
    /// The disk has room for this many bytes more than the image takes at the start; `None`: endless, or enough on a
    /// device.
    pub room_bytes: Option<u64>,
}

/// More than the requests of a case need.
const DEVICE_ROOM_BYTES: u64 = 12 << 20;

const LEGACY_AES: &str = "encrypt.format=aes";
const LUKS_XTS: &str = "encrypt.format=luks,encrypt.iter-time=1,encrypt.cipher-alg=aes-128";
const LUKS_CBC: &str = "encrypt.format=luks,encrypt.iter-time=1,encrypt.cipher-alg=aes-128,encrypt.cipher-mode=cbc";

/// So little that tables come and go all the time.
const SMALL_CACHE: &str = "l2-cache-size=1k,l2-cache-entry-size=512,refcount-cache-size=2k";

impl CrashScene {
    /// The case of a seed.
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let has_backing = random.chance(40);
        let mut spec = spec(&mut random, has_backing);
        let mut size = disk_bytes(&spec, &mut random);
        let mut written = Vec::new();
        if spec.cluster_size == 512 && !spec.is_v2 && random.chance(25) {
            // So full that the refcount table must grow soon, and so large that the L1 table must when the disk does.
            spec.refcount_bits = 64;
            size = 2 << 20;
            let len = size - (160 << 10) - random.below(64) * 512;
            written.push(images::Op::Write { offset: 0, len, texture: Texture::Random(seed) });
        }
        let mut layers = Vec::new();
        if has_backing {
            layers.push(backing(&mut random, size));
        }
        let filled = if random.chance(60) { 4 + random.below(20) as usize } else { 0 };
        layers.push(Layer {
            sessions: vec![fill(&mut random, &spec, size, filled)],
            format: Format::Qcow2(spec),
            size,
        });
        let sector_bytes = random.pick(&[512, 512, 4096]);
        let features = if random.chance(15) {
            Features { punch_hole: false, zero_range: false, allocate: false, seek_data: false, copy_range: false }
        } else {
            Features::default()
        };
        let config = Config {
            sector_bytes,
            direct: random.chance(30),
            features,
            in_order: random.chance(10),
            ..Config::new(seed)
        };
        let whole_sectors = random.chance(80);
        let queues = random.pick(&[1, 2, 3, 4]);
        // Version 2 has no zero flag to keep a cluster under.
        let is_v2 = layers.iter().any(|layer| matches!(&layer.format, Format::Qcow2(spec) if spec.is_v2));
        let options = match random.below(10) {
            0..=2 => SMALL_CACHE,
            3 if !is_v2 => "discard-no-unref=on",
            _ => "",
        };
        let mut scene = CrashScene {
            seed,
            chain: Chain { layers },
            config,
            queues,
            options,
            snapshots: false,
            bitmaps: Vec::new(),
            encryption: "",
            amend: "",
            whole_sectors,
            shared: None,
            on_a_device: false,
        };
        // Each cluster is counted three times then, a compressed one's neighbours too.
        let allows_snapshots = scene.spec().data_file.is_none() && scene.sizes().1 >= 16;
        scene.snapshots = allows_snapshots && random.chance(30);
        if !scene.spec().is_v2 && random.chance(35) {
            let count = 1 + random.below(2);
            scene.bitmaps = (0..count).map(|_| random.pick(&[512, 512, 4096, 65536, 1 << 20])).collect();
        }
        // From another source, so that a seed keeps its image.
        let mut random = Random::new(seed ^ 0x6c75_6b73);
        if !has_backing && !scene.grows() && random.chance(20) {
            // A key derivation for each state is dear; the legacy method has none.
            scene.encryption = random.pick(&[LEGACY_AES, LEGACY_AES, LUKS_XTS, LUKS_CBC]);
        }
        if random.chance(12) {
            scene.amend = scene.amendment(&mut random);
        }
        scene
    }

    /// An amendment that is possible in every image of these features.
    fn amendment(&self, random: &mut Random) -> &'static str {
        let spec = self.spec();
        let is_plain = !spec.extended_l2 && spec.data_file.is_none() && self.encryption.is_empty();
        match spec.is_v2 {
            true => random.pick(&["compat=1.1", "compat=1.1,refcount_bits=64", "compat=1.1,lazy_refcounts=on"]),
            false if is_plain && !self.snapshots && self.bitmaps.is_empty() && random.chance(40) => {
                "compat=0.10,refcount_bits=16,lazy_refcounts=off"
            }
            false => random.pick(&["refcount_bits=16", "refcount_bits=32", "refcount_bits=64", "lazy_refcounts=off"]),
        }
    }

    /// The same case with the image's file behind a filter that lets everything pass.
    #[must_use]
    pub fn behind_a_filter(mut self) -> CrashScene {
        self.options = BEHIND_A_FILTER;
        self.encryption = "";
        self
    }

    /// The same case with writes that take over blocks of another file, on a file system that can; `shared` counts them.
    #[must_use]
    pub fn sharing(mut self, shared: Arc<AtomicU64>) -> CrashScene {
        self.shared = Some(shared);
        self.config.features = Features::default();
        self.encryption = "";
        self
    }

    /// The same case with the image on a device; `None` where its data are in a file beside it.
    #[must_use]
    pub fn on_a_device(mut self) -> Option<CrashScene> {
        self.on_a_device = true;
        Some(self).filter(|scene| scene.spec().data_file.is_none())
    }

    fn spec(&self) -> &Qcow2Spec {
        match self.chain.layers.last().map(|layer| &layer.format) {
            Some(Format::Qcow2(spec)) => spec,
            _ => unreachable!("the top is qcow2"),
        }
    }

    fn grows(&self) -> bool {
        self.spec().cluster_size == 512 && self.chain.layers.last().is_some_and(|layer| layer.size >= 2 << 20)
    }

    fn compresses(&self) -> bool {
        self.spec().data_file.is_none() && self.encryption.is_empty() && self.seed.is_multiple_of(3)
    }

    /// Cluster size in bytes and refcount width in bits.
    pub fn sizes(&self) -> (u64, u64) {
        let spec = self.spec();
        (spec.cluster_size, if spec.is_v2 { 16 } else { spec.refcount_bits })
    }

    /// The combination of the image's features that the published table counts by: all but cluster size and refcount
    /// width.
    pub fn combination(&self) -> String {
        let spec = self.spec();
        let words = [
            (spec.is_v2, "v2"),
            (spec.extended_l2, "extended L2"),
            (spec.lazy_refcounts, "lazy"),
            (self.chain.layers.len() > 1, "backing"),
            (self.snapshots, "snapshots"),
            (!self.bitmaps.is_empty(), "bitmaps"),
            (!self.encryption.is_empty(), "encrypted"),
            (!self.amend.is_empty(), "amended"),
            (self.compresses(), "compressed"),
            (spec.data_file == Some(DataFile::Mapped), "data file"),
            (spec.data_file == Some(DataFile::Raw), "raw data file"),
        ];
        let words: Vec<&str> = words.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word).collect();
        if words.is_empty() { "plain".to_owned() } else { words.join(" + ") }
    }

    /// The special features of this case, a word each, for counting states.
    pub fn features(&self) -> Vec<String> {
        let spec = self.spec();
        let mut words = vec![
            format!("cluster_size={}", spec.cluster_size),
            format!("refcount_bits={}", spec.refcount_bits),
            format!("sector={}", self.config.sector_bytes),
            format!("direct={}", self.config.direct),
            format!("queues={}", self.queues),
        ];
        let more = [
            (spec.is_v2, "v2"),
            (spec.extended_l2, "extended_l2"),
            (spec.lazy_refcounts, "lazy_refcounts"),
            (spec.data_file == Some(DataFile::Mapped), "data_file"),
            (spec.data_file == Some(DataFile::Raw), "data_file_raw"),
            (spec.preallocation != "off", "preallocated"),
            (self.chain.layers.len() > 1, "backing"),
            (self.snapshots, "snapshots"),
            (!self.bitmaps.is_empty(), "bitmaps"),
            (self.encryption == LEGACY_AES, "legacy AES"),
            (self.encryption.contains("luks"), "LUKS"),
            (!self.amend.is_empty(), "amended"),
            (self.grows(), "tables grow"),
            (self.config.capacity_bytes.is_some(), "disk gets full"),
            (!self.config.features.punch_hole, "no fallocate"),
            (!self.whole_sectors, "odd bytes"),
            (self.options == SMALL_CACHE, "small cache"),
            (self.options.starts_with("discard"), "discard-no-unref"),
        ];
        words.extend(more.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word.to_owned()));
        words
    }

    /// The requests of the guest.
    pub fn steps(&self, prepared: &Prepared, count: usize) -> Vec<Step> {
        let requests = prepared.requests();
        let align_bytes = if self.whole_sectors { 512 } else { 1 };
        let spec = self.spec();
        let compressed = self.compresses();
        // Growing a v2 image over a longer backing file has no way to hide that file's data.
        let resizes = !spec.is_v2 && self.seed % 4 == 1;
        OpGen { align_bytes, compressed, resizes, ..requests }.steps(self.seed, count)
    }

    /// A trial of the image, with `faults` on the machine.
    pub fn trial(&self, steps: Vec<Step>, effort: &Effort, faults: Vec<Fault>) -> Trial {
        let plan = CrashPlan { max_distinct: effort.states, ..CrashPlan::new(self.seed) };
        Trial {
            config: self.config.clone(),
            faults,
            options: self.options,
            steps,
            queues: self.queues,
            plan,
            sample_qemu: effort.sample_qemu,
            amend: self.amend,
            shared: self.shared.clone(),
        }
    }

    fn prepared(&self) -> Prepared {
        let Some(layer) = self.chain.layers.last().filter(|_| !self.encryption.is_empty()) else {
            return Prepared::with(&self.chain, self.snapshots, &self.bitmaps);
        };
        let writes = [(layer.size / 7, layer.size / 5), (layer.size / 2, layer.size / 8)];
        Prepared::encrypted(self.spec(), self.encryption, layer.size, &writes, self.snapshots, &self.bitmaps)
    }

    fn prepared_with(&self, effort: &Effort) -> Prepared {
        let mut prepared = self.prepared();
        if self.on_a_device {
            let room = effort.room_bytes.unwrap_or(DEVICE_ROOM_BYTES);
            let sector = self.config.sector_bytes;
            prepared.patch(|file| {
                let len = file.len();
                file.write(len, &vec![0xee; ((len + room).next_multiple_of(sector) - len) as usize]);
            });
        }
        prepared
    }

    /// Runs the case.
    ///
    /// # Errors
    /// The failure, and the fewest requests that show it.
    pub fn run(&self, effort: &Effort, faults: Vec<Fault>) -> Result<CrashReport, String> {
        let prepared = self.prepared_with(effort);
        let steps = self.steps(&prepared, effort.requests);
        prepared.crash_or_shrink(&self.trial_on(&prepared, steps, effort, faults.clone())).map_err(|complaint| {
            let features = self.features().join(", ");
            format!("seed {} ({features}), {effort:?}, faults {faults:?}:\n{complaint}", self.seed)
        })
    }

    /// Runs the case with the guest's requests given; a failure is not shrunk.
    ///
    /// # Errors
    /// The failure.
    pub fn run_steps(&self, effort: &Effort, faults: Vec<Fault>, steps: Vec<Step>) -> Result<CrashReport, String> {
        let prepared = self.prepared_with(effort);
        prepared.crash(&self.trial_on(&prepared, steps, effort, faults))
    }

    fn trial_on(&self, prepared: &Prepared, steps: Vec<Step>, effort: &Effort, faults: Vec<Fault>) -> Trial {
        let mut trial = self.trial(steps, effort, faults);
        if let Some(room_bytes) = effort.room_bytes {
            trial.config.capacity_bytes = Some(prepared.allocated_bytes() + room_bytes);
        }
        trial.config.fixed_length = self.on_a_device;
        trial
    }
}

fn spec(random: &mut Random, has_backing: bool) -> Qcow2Spec {
    let mut spec =
        Qcow2Spec { cluster_size: random.pick(&[512, 512, 1024, 4096, 4096, 65536]), ..Qcow2Spec::default() };
    spec.is_v2 = random.chance(10);
    if spec.is_v2 {
        return spec;
    }
    spec.refcount_bits = random.pick(&[1, 2, 4, 8, 16, 16, 32, 64]);
    if random.chance(25) {
        spec.extended_l2 = true;
        spec.cluster_size = random.pick(&[16384, 16384, 65536]);
    }
    spec.lazy_refcounts = random.chance(20);
    if random.chance(15) {
        spec.data_file = Some(if has_backing || random.chance(50) { DataFile::Mapped } else { DataFile::Raw });
    }
    if !has_backing && random.chance(15) {
        spec.preallocation = random.pick(&["metadata", "falloc"]);
    }
    spec
}

/// Small, so that states are cheap; large enough for several tables of the smallest clusters.
fn disk_bytes(spec: &Qcow2Spec, random: &mut Random) -> u64 {
    let clusters = match spec.cluster_size {
        512 | 1024 => 128 + random.below(512),
        4096 => 24 + random.below(100),
        _ => 8 + random.below(16),
    };
    // An end inside of a cluster now and then.
    clusters * spec.cluster_size - if random.chance(30) { random.below(spec.cluster_size / 512) * 512 } else { 0 }
}

fn backing(random: &mut Random, overlay_bytes: u64) -> Layer {
    let size = match random.below(3) {
        0 => overlay_bytes,
        1 => overlay_bytes / 2 / 512 * 512,
        _ => overlay_bytes + 4096,
    };
    let size = size.max(4096);
    let spec = Qcow2Spec { cluster_size: random.pick(&[512, 4096, 65536]), ..Qcow2Spec::default() };
    let sessions = vec![fill(random, &spec, size, 20)];
    Layer { format: Format::Qcow2(spec), size, sessions }
}

fn fill(random: &mut Random, spec: &Qcow2Spec, size: u64, count: usize) -> Vec<images::Op> {
    let mut ops = generate_ops(random, spec, &mut size.clone(), count, &mut BTreeSet::new());
    if spec.data_file.is_some() {
        ops.retain(|op| !matches!(op, images::Op::WriteCompressed { .. }));
    }
    // The disk keeps its size: a resize and the steps behind it go.
    let resize = ops.iter().position(|op| matches!(op, images::Op::Resize { .. }));
    ops.truncate(resize.unwrap_or(ops.len()));
    ops
}
