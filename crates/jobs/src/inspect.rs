// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The demands of an image on a program that opens it, found without meeting any of them: for services that take images
//! from strangers.
//!
//! Opens the one file, reads its header and the tables that the header names, and follows nothing.

mod blocks;
mod vmdk;

use crate::layer::Qcow2Layer;
use cowshed_image::open::Policy;
use cowshed_layout::probe::{PROBE_BYTES, PROBE_TAIL_BYTES, probe_with_tail};
use cowshed_layout::qcow2::features::{AUTOCLEAR_BITMAPS, AUTOCLEAR_KNOWN, COMPAT_KNOWN, FeatureKind};
use cowshed_layout::qcow2::{Extension, Header};
use cowshed_storage::{CacheMode, File, IoBuf, Locking, OpenOptions, path_of_text};
use cowshed_types::Result;

/// The verdict about an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum InspectVerdict {
    /// It asks for nothing but itself, and nothing about it is strange.
    Harmless,
    /// It names other files.
    AsksForFiles,
    /// It is damaged, made to do harm, or of a format that we can't judge.
    Suspicious,
}

/// Another file that the image names.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Asked {
    /// "backing-file", "data-file" or "extent".
    pub role: &'static str,
    /// The name as the image has it; none where the image needs the file and doesn't name it.
    pub name: Option<String>,
    /// The format as the image has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
}

/// Sizes of the structures that must be read to use the image, as the header claims them, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct TableSizes {
    /// The active L1 table.
    pub l1: u64,
    /// The refcount table.
    pub refcount_table: u64,
    /// Length of the directory of bitmaps, in bytes.
    pub bitmap_directory: u64,
}

/// The description of the file.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Inspection {
    /// The verdict.
    pub verdict: InspectVerdict,
    /// The name that the user gave.
    pub filename: String,
    /// The format that its first bytes look like.
    pub format: String,
    /// Length of the file, bytes.
    pub file_size: u64,
    /// Size of the disk, bytes, where the header could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_size: Option<u64>,
    /// The files that it names.
    pub asks_for: Vec<Asked>,
    /// "aes" or "luks".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encryption: Option<&'static str>,
    /// Internal snapshots that the header counts.
    pub snapshots: u32,
    /// Persistent bitmaps that the header counts.
    pub bitmaps: u32,
    /// Feature bits and header extensions that we don't know.
    pub unknown_features: Vec<String>,
    /// Sizes of its tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tables: Option<TableSizes>,
    /// The reasons for suspicion, one sentence each.
    pub suspicions: Vec<String>,
}

impl Inspection {
    /// 0 harmless, 2 otherwise.
    pub fn exit_code(&self) -> u8 {
        if self.verdict == InspectVerdict::Harmless { 0 } else { 2 }
    }

    fn conclude(mut self) -> Inspection {
        self.verdict = match (self.suspicions.is_empty(), self.asks_for.is_empty()) {
            (false, _) => InspectVerdict::Suspicious,
            (true, false) => InspectVerdict::AsksForFiles,
            (true, true) => InspectVerdict::Harmless,
        };
        self
    }
}

/// Inspects the file `path`, which is taken as a path whatever it looks like.
pub async fn run(path: &str) -> Result<Inspection> {
    let options = OpenOptions { cache: CacheMode::default(), locking: Locking::Off, ..OpenOptions::default() };
    let file = File::open(&path_of_text(path), &options)?;
    let len = usize::try_from(file.len()).unwrap_or(usize::MAX);
    let (result, first) = file.read_at(IoBuf::zeroed(len.min(PROBE_BYTES)), 0).await;
    result?;
    let last_len = len.min(PROBE_TAIL_BYTES);
    let (result, last) = file.read_at(IoBuf::zeroed(last_len), file.len() - last_len as u64).await;
    result?;
    let mut inspection = Inspection {
        verdict: InspectVerdict::Suspicious,
        filename: path.to_owned(),
        format: probe_with_tail(&first, &last).as_str().to_owned(),
        file_size: file.len(),
        virtual_size: None,
        asks_for: Vec::new(),
        encryption: None,
        snapshots: 0,
        bitmaps: 0,
        unknown_features: Vec::new(),
        tables: None,
        suspicions: Vec::new(),
    };
    match inspection.format.as_str() {
        "raw" => inspection.virtual_size = Some(file.len()),
        "qcow2" => match cowshed_offline::read_header(&file).await {
            Ok(header) => inspect_qcow2(&mut inspection, Qcow2Layer { header, file }).await,
            Err(error) => inspection.suspicions.push(error.to_string()),
        },
        "vmdk" => vmdk::inspect(&mut inspection, &file).await,
        format if blocks::FORMATS.contains(&format) => blocks::inspect(&mut inspection, path).await,
        other => {
            let text = format!("images of format '{other}' can't be judged: they may name other files");
            inspection.suspicions.push(text);
        }
    }
    Ok(inspection.conclude())
}

async fn inspect_qcow2(inspection: &mut Inspection, layer: Qcow2Layer) {
    let header = &layer.header;
    inspection.virtual_size = Some(header.size);
    inspection.snapshots = header.nb_snapshots;
    inspection.bitmaps = header.bitmaps().map_or(0, |bitmaps| bitmaps.nb_bitmaps);
    inspection.encryption = match header.crypt_method {
        0 => None,
        1 => Some("aes"),
        _ => Some("luks"),
    };
    inspection.tables = Some(TableSizes {
        l1: u64::from(header.l1_size) * 8,
        refcount_table: u64::from(header.refcount_table_clusters).saturating_mul(header.cluster_size()),
        bitmap_directory: header.bitmaps().map_or(0, |bitmaps| bitmaps.directory_size),
    });
    inspection.unknown_features = unknown_features(header);
    inspection.asks_for = asked(header);
    let suspicions = &mut inspection.suspicions;
    for asked in &inspection.asks_for {
        if let Some(name) = asked.name.as_deref().and_then(strange_name) {
            suspicions.push(format!("the name of its {} is {name}", asked.role));
        }
    }
    if inspection.asks_for.iter().any(|asked| asked.role == "backing-file" && asked.format.is_none()) {
        suspicions.push("it doesn't say the format of its backing file, whose content would decide".to_owned());
    }
    let mut note = |result: Result<()>| suspicions.extend(result.err().map(|error| error.to_string()));
    note(Policy::untrusted().check_header(header));
    note(header.check_tables_within(layer.file.len()));
    note(header.require_refcount_table());
    if header.is_corrupt() {
        suspicions.push("it is marked as corrupt".to_owned());
    }
    // Their lengths are within the limits: else the header has been found suspicious already.
    if suspicions.is_empty() {
        let mut note = |result: Result<()>| suspicions.extend(result.err().map(|error| error.to_string()));
        note(layer.bitmaps().await.map(drop));
        note(layer.snapshots().await.and_then(|snapshots| {
            snapshots.iter().try_for_each(|snapshot| snapshot.validate(header.version, header.cluster_bits))
        }));
    }
}

fn asked(header: &Header) -> Vec<Asked> {
    let backing = header.backing_file_name().filter(|name| !name.is_empty()).map(|name| Asked {
        role: "backing-file",
        name: Some(name.into_owned()),
        format: header.backing_format().map(|format| format.into_owned()),
    });
    // The name counts only with its bit. Without the bit it still names the intended file.
    let data_name = header.data_file_name().map(|name| name.into_owned());
    let data = (header.has_data_file() || data_name.is_some()).then_some(Asked {
        role: "data-file",
        name: data_name,
        format: None,
    });
    backing.into_iter().chain(data).collect()
}

/// The reason for which a name is more than that of a file.
fn strange_name(name: &str) -> Option<String> {
    if name.starts_with("json:") {
        return Some("a description that can name any driver and any file (json:)".to_owned());
    }
    let protocol = name.find([':', '/']).filter(|at| name.as_bytes()[*at] == b':').map(|at| &name[..at])?;
    Some(format!("one with the protocol '{protocol}'"))
}

fn unknown_features(header: &Header) -> Vec<String> {
    // Unknown incompatible bits make the header unreadable; these two are kept or cleared.
    let masks = [
        ("compatible", FeatureKind::Compatible, header.compatible_features & !COMPAT_KNOWN),
        ("autoclear", FeatureKind::Autoclear, header.autoclear_features & !AUTOCLEAR_KNOWN),
    ];
    let mut unknown = Vec::new();
    for (word, kind, mask) in masks {
        for bit in (0..64u8).filter(|bit| mask >> bit & 1 != 0) {
            let name = header.feature_name(kind, bit).map(|name| format!(" ({name})")).unwrap_or_default();
            unknown.push(format!("{word} bit {bit}{name}"));
        }
    }
    for extension in &header.extensions {
        if let Extension::Unknown { kind, data } = extension {
            unknown.push(format!("header extension {kind:#010x} of {} bytes", data.len()));
        }
    }
    if header.bitmaps().is_some() && header.autoclear_features & AUTOCLEAR_BITMAPS == 0 {
        unknown.push("bitmaps that no longer count".to_owned());
    }
    unknown
}
