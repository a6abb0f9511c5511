// SPDX-License-Identifier: Apache-2.0 OR MIT
//! New images of formats without an engine: each is a few pieces, which `layout` knows.

use crate::behind::Behind;
use crate::file::{Failed, Manner, NewName, lengthen, same_file, write_zeroes};
use crate::monitor::{
    MonitorRules, check_parallels, check_parallels_size, check_vdi_size, check_vhdx, check_vhdx_size, check_vpc_size,
};
use crate::qcow2::{layout_hints, round_size};
use crate::schema::{CreateOption, ImageCompression, OptionValues, PARALLELS, QCOW, QED, VDI, VHDX, VMDK, VPC};
use crate::{CreateRequest, Created, path_of};
use cowshed_image::open::resolve_name;
use cowshed_image::{DRIVERS, OpenRequest, open};
use cowshed_layout::fresh::{FilePiece, FreshFile};
use cowshed_layout::parallels::NewParallels;
use cowshed_layout::qcow::NewQcow;
use cowshed_layout::qed::NewQed;
use cowshed_layout::vdi::NewVdi;
use cowshed_layout::vhdx::{Guid, NewVhdx};
use cowshed_layout::vmdk::{NEW_KINDS, NewVmdk, VmdkKind, VmwareIds};
use cowshed_layout::vpc::NewVpc;
use cowshed_storage::{File, IoBuf, path_of_text, text_of_path};
use cowshed_types::{Errno, Error, LINE_END, Result};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pieces are written in parts of this many bytes.
const CHUNK_BYTES: u64 = 1 << 20;

/// A format whose images can be created: its options, and the layout of a new image.
pub(super) struct FreshFormat {
    pub name: &'static str,
    pub options: &'static [CreateOption],
    lay_out: fn(&Request<'_>) -> Result<Fresh>,
    /// Looks at the backing file that the options name, for its facts that the image stores.
    parent: Option<fn(&OptionValues) -> Result<()>>,
    pub by_monitor: MonitorRules,
    /// How new images take compressed data, by their options.
    pub packing: fn(&OptionValues) -> ImageCompression,
}

/// The image to make.
pub(super) struct Request<'a> {
    /// The name of the image, once it is whole.
    pub filename: &'a str,
    /// At least this many bytes, whole sectors.
    pub size: u64,
    pub values: &'a OptionValues,
    /// The content id of the backing file.
    parent: Option<u32>,
    /// The names of the files beside the image; `None`: made of its own.
    part_names: Option<&'a [String]>,
    has_vmware_ids: bool,
}

/// A new image's name now, the one that it has in the end, and whether VMware's programs are to know it by identifiers of theirs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity<'a> {
    pub now: &'a str,
    pub last: &'a str,
    pub has_vmware_ids: bool,
}

/// The files of a new image.
pub(super) struct Fresh {
    pub image: FreshFile,
    pub behind: Behind,
    /// Files beside it, by their names in its folder.
    pub parts: Vec<(String, FreshFile)>,
}

impl From<FreshFile> for Fresh {
    fn from(image: FreshFile) -> Fresh {
        Fresh { image, behind: Behind::Kept, parts: Vec::new() }
    }
}

/// All of them.
const FORMATS: &[FreshFormat] = &[
    FreshFormat {
        name: "parallels",
        options: PARALLELS,
        lay_out: parallels,
        parent: None,
        by_monitor: MonitorRules {
            check_size: check_parallels_size,
            ends_at_once: true,
            check_units: check_parallels,
            ..MonitorRules::SECTORS
        },
        packing: |_| ImageCompression::None,
    },
    FreshFormat {
        name: "qcow",
        options: QCOW,
        lay_out: qcow,
        parent: None,
        by_monitor: MonitorRules { unsaid_backing_format: Some(NOT_RAW), ..MonitorRules::SECTORS },
        packing: |_| ImageCompression::Clusters,
    },
    FreshFormat {
        name: "qed",
        options: QED,
        lay_out: qed,
        parent: None,
        by_monitor: MonitorRules {
            refuses_odd_size: Some(
                "QED image size must be a non-zero multiple of cluster size and less than 70368744177664 bytes",
            ),
            unsaid_backing_format: Some(NOT_RAW),
            ends_at_once: true,
            ..MonitorRules::SECTORS
        },
        packing: |_| ImageCompression::None,
    },
    FreshFormat {
        name: "vdi",
        options: VDI,
        lay_out: vdi,
        parent: None,
        by_monitor: MonitorRules {
            check_size: check_vdi_size,
            when_allocated: Some("static=on"),
            ..MonitorRules::ROUNDED
        },
        packing: |_| ImageCompression::None,
    },
    FreshFormat {
        name: "vhdx",
        options: VHDX,
        lay_out: vhdx,
        parent: None,
        by_monitor: MonitorRules {
            check_size: check_vhdx_size,
            ends_at_once: true,
            check_units: check_vhdx,
            ..MonitorRules::SECTORS
        },
        packing: |_| ImageCompression::None,
    },
    FreshFormat {
        name: VMDK_NAME,
        options: VMDK,
        lay_out: vmdk,
        parent: Some(check_vmdk_parent),
        by_monitor: MonitorRules { unsaid_backing_format: Some(VMDK_NAME), has_extents: true, ..MonitorRules::SECTORS },
        packing: vmdk_packing,
    },
    FreshFormat {
        name: "vpc",
        options: VPC,
        lay_out: vpc,
        parent: None,
        by_monitor: MonitorRules {
            check_size: check_vpc_size,
            refuses_odd_size: Some("The requested image size cannot be represented in CHS geometry"),
            ..MonitorRules::SECTORS
        },
        packing: |_| ImageCompression::None,
    },
];

const VMDK_NAME: &str = "vmdk";
/// A format that needs no mark of a raw file.
const NOT_RAW: &str = "qcow2";

/// The format of this name, if it is one of these.
pub(super) fn find(name: &str) -> Option<&'static FreshFormat> {
    FORMATS.iter().find(|format| format.name == name)
}

/// Refuses the path of a part that may not be made.
type PartCheck<'a> = &'a dyn Fn(&Path) -> Result<()>;

impl FreshFormat {
    /// The layout of a new image whose disk has at least `size` bytes.
    pub(super) async fn lay_out(
        &self,
        identity: Identity<'_>,
        size: u64,
        values: &OptionValues,
        part_names: Option<&[String]>,
    ) -> Result<Fresh> {
        let Identity { now, last: filename, has_vmware_ids } = identity;
        let parent = match (self.parent, values.get("backing_file")) {
            (Some(check), Some(name)) => {
                check(values)?;
                Some(content_id(now, name).await?)
            }
            _ => None,
        };
        (self.lay_out)(&Request { filename, size: round_size(size)?, values, parent, part_names, has_vmware_ids })
    }

    /// Creates an image under a name. `check` refuses the names of files that must stay.
    pub(super) async fn create(
        &self,
        identity: Identity<'_>,
        size: u64,
        values: &OptionValues,
        (how, check): (&Manner, PartCheck<'_>),
    ) -> Result<Created> {
        // The layout first: an existing file keeps its contents if the image can't be laid out.
        let fresh = self.lay_out(identity, size, values, None).await?;
        let hints = layout_hints(values)?;
        let image = path_of(identity.now)?;
        let mut created = Created::default();
        let path_of_part = |name: &str| image.with_file_name(path_of_text(name));
        // All of them before the first one changes.
        for (name, _) in &fresh.parts {
            let path = path_of_part(name);
            check(&path).map_err(|error| error.file(text_of_path(&path)))?;
        }
        let mut paths = vec![image.clone()];
        for (name, _) in &fresh.parts {
            let path = path_of_part(name);
            if let Some(known) = paths.iter().find(|known| same_file(known, &path)) {
                let (known, name) = (text_of_path(known), text_of_path(&path));
                let error =
                    Error::invalid_argument(format!("two files of the image would be one: '{known}' is '{name}'"));
                return Err(error.qemu(format!(
                    "Failed to get shared \"resize\" lock{LINE_END}Is another process using the image [{name}]?"
                )));
            }
            paths.push(path);
        }
        for (name, part) in &fresh.parts {
            let path = path_of_part(name);
            let made =
                NewName::new(&path, how, Failed::Remove).fill(part.len, hints, async |file| write(file, part).await);
            match made.await {
                Ok(part) => created = created.and(part),
                Err(error) => {
                    // A folder that is missing is missing for the descriptor, too.
                    let error = match error.errno() {
                        Errno::ENOENT => Error::os(Errno::ENOENT, "could not create").file(text_of_path(&image)),
                        _ => error.file(text_of_path(&path)),
                    };
                    return Err(created.take_back(error));
                }
            }
        }
        let name = NewName::new(&image, how, Failed::Remove).with_end(fresh.behind);
        match name.fill(fresh.image.len, hints, async |file| write(file, &fresh.image).await).await {
            Ok(image) => Ok(created.and(image)),
            Err(error) => Err(created.take_back(error)),
        }
    }
}

/// The content id of the backing file of a new image.
async fn content_id(filename: &str, backing: &str) -> Result<u32> {
    let name = resolve_name(backing, Some(filename))?;
    let node = open(OpenRequest::file(&name).without_content().force_share(true)).await?;
    if node.driver_name() != VMDK_NAME {
        let message = format!("Invalid backing file format: {}. Must be vmdk", node.driver_name());
        node.close().await?;
        return Err(Error::invalid_argument(message));
    }
    let cid = node.description().and_then(|description| description.specific.pointer("/data/cid")?.as_u64());
    node.close().await?;
    cid.and_then(|cid| u32::try_from(cid).ok()).ok_or_else(|| Error::internal("a parent has no content id"))
}

/// Makes `file`, whose contents count for nothing, a new image. Its mark is written last, behind a barrier: whatever
/// happens before, the file isn't taken for an image.
pub(super) async fn write(file: &File, fresh: &FreshFile) -> Result<()> {
    if !file.is_empty() {
        // A device, or a file that wasn't truncated.
        write_zeroes(file, 0, fresh.len).await?;
        file.sync().await?;
    }
    if file.len() < fresh.len {
        lengthen(file, fresh.len).await?;
    }
    for (offset, piece) in &fresh.pieces {
        write_piece(file, *offset, piece).await?;
    }
    file.sync().await?;
    if let Some((offset, mark)) = &fresh.mark {
        file.write_at(IoBuf::copy_from(mark), *offset).await.0?;
        file.sync().await?;
    }
    Ok(())
}

async fn write_piece(file: &File, offset: u64, piece: &FilePiece) -> Result<()> {
    let mut at = 0;
    while at < piece.len() {
        let len = CHUNK_BYTES.min(piece.len() - at);
        let mut part = IoBuf::try_zeroed(len as usize)?;
        piece.fill(at, &mut part);
        file.write_at(part, offset + at).await.0?;
        at += len;
    }
    Ok(())
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    cowshed_crypto::luks::fill_random(&mut bytes)?;
    Ok(bytes)
}

/// A random UUID (RFC 9562, version 4).
fn random_uuid() -> Result<[u8; 16]> {
    let mut bytes: [u8; 16] = random()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(bytes)
}

fn vdi(asked: &Request<'_>) -> Result<Fresh> {
    let uuids = [random_uuid()?, random_uuid()?];
    let is_fixed = asked.values.switch("static");
    let image = NewVdi { size: asked.size, is_fixed, uuids }.lay_out()?;
    Ok(Fresh { behind: if is_fixed { Behind::Cut } else { Behind::Kept }, ..Fresh::from(image) })
}

/// Seconds from 1970 to 2000, where VHD begins to count.
const YEAR_2000_S: u64 = 946_684_800;

fn vpc(asked: &Request<'_>) -> Result<Fresh> {
    let values = asked.values;
    let is_fixed = is_fixed(values)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let made_at = u32::try_from(now.saturating_sub(YEAR_2000_S)).unwrap_or(u32::MAX);
    let force_size = values.switch("force_size");
    let image = NewVpc { size: asked.size, is_fixed, force_size, made_at, uuid: random_uuid()? }.lay_out()?;
    Ok(Fresh { behind: if is_fixed { Behind::Ended } else { Behind::Kept }, ..Fresh::from(image) })
}

fn parallels(asked: &Request<'_>) -> Result<Fresh> {
    let cluster_bytes = asked.values.number("cluster_size").unwrap_or(1 << 20);
    if cluster_bytes == 0 {
        return Err(Error::invalid_argument("Image size is too large for this cluster size")
            .field("cluster_size")
            .value(0));
    }
    NewParallels { size: asked.size, cluster_bytes }.lay_out().map(Fresh::from)
}

fn qcow(asked: &Request<'_>) -> Result<Fresh> {
    NewQcow { size: asked.size, backing: asked.values.get("backing_file") }.lay_out().map(Fresh::from)
}

fn qed(asked: &Request<'_>) -> Result<Fresh> {
    let values = asked.values;
    let is_raw = values.get("backing_fmt") == Some("raw");
    let new = NewQed {
        size: asked.size,
        cluster_bytes: values.number("cluster_size").unwrap_or(64 << 10),
        table_clusters: values.number("table_size").unwrap_or(4),
        backing: values.get("backing_file").map(|name| (name, is_raw)),
    };
    new.lay_out().map(|image| Fresh { behind: Behind::Counted, ..Fresh::from(image) })
}

fn vhdx(asked: &Request<'_>) -> Result<Fresh> {
    let values = asked.values;
    if values.number("log_size") == Some(0) {
        return Err(Error::invalid_argument("Log size must be a multiple of 1 MB").field("log_size").value(0));
    }
    let number: [u8; 4] = random()?;
    let new = NewVhdx {
        size: asked.size,
        is_fixed: is_fixed(values)?,
        block_bytes: values.number("block_size").unwrap_or(0),
        log_bytes: values.number("log_size").unwrap_or(0),
        marks_zeroes: values.get("block_state_zero").is_none() || values.switch("block_state_zero"),
        creator: concat!("Cowshed ", env!("CARGO_PKG_VERSION")),
        guids: [Guid::random(random()?), Guid::random(random()?), Guid::random(random()?)],
        sequence_number: u64::from(u32::from_le_bytes(number)),
    };
    new.lay_out().map(|image| Fresh { behind: Behind::Cut, ..Fresh::from(image) })
}

/// The value of `subformat` for formats with dynamic and fixed disks.
fn is_fixed(values: &OptionValues) -> Result<bool> {
    match values.get("subformat") {
        None | Some("dynamic") => Ok(false),
        Some("fixed") => Ok(true),
        Some(other) => Err(Error::invalid_argument(format!("Parameter 'subformat' does not accept value '{other}'"))
            .hint(": dynamic and fixed are known")
            .field("subformat")),
    }
}

/// The adapters that QEMU knows.
const ADAPTERS: [&str; 4] = ["ide", "buslogic", "lsilogic", "legacyESX"];

fn vmdk_kind(values: &OptionValues) -> Result<VmdkKind> {
    let name = values.get("subformat").unwrap_or("monolithicSparse");
    let known = NEW_KINDS.iter().find(|kind| kind.name == name).copied();
    known.ok_or_else(|| bad_value("subformat", name))
}

fn bad_value(option: &'static str, value: &str) -> Error {
    Error::invalid_argument(format!("invalid parameter value: {value}"))
        .field(option)
        .qemu(format!("invalid parameter value: {value}"))
}

fn check_vmdk_backing_format(values: &OptionValues) -> Result<()> {
    match values.get("backing_fmt").is_some_and(|format| format != VMDK_NAME) {
        true => Err(Error::invalid_argument("backing_file must be a vmdk image")),
        false => Ok(()),
    }
}

fn check_vmdk_parent(values: &OptionValues) -> Result<()> {
    check_vmdk_backing_format(values)?;
    match vmdk_kind(values)?.is_flat {
        true => Err(Error::invalid_argument("Flat image can't have backing file")),
        false => Ok(()),
    }
}

fn vmdk(asked: &Request<'_>) -> Result<Fresh> {
    let values = asked.values;
    check_vmdk_backing_format(values)?;
    let adapter = values.get("adapter_type").unwrap_or("ide");
    let known = ADAPTERS.iter().find(|known| **known == adapter);
    let adapter = known.ok_or_else(|| bad_value("adapter_type", adapter))?;
    let kind = vmdk_kind(values)?;
    let hardware = values.get("hwversion").filter(|version| *version != "undefined");
    if values.switch("compat6") && hardware.is_some() {
        return Err(Error::invalid_argument("compat6 cannot be enabled with hwversion set"));
    }
    let zeroed_grains = values.switch("zeroed_grain");
    if zeroed_grains && kind.is_flat {
        return Err(Error::invalid_argument("Flat image can't enable zeroed grain"));
    }
    let path = path_of(asked.filename)?;
    let name = path.file_name().map(|name| text_of_path(Path::new(name))).unwrap_or_default();
    let parent = values.get("backing_file");
    // A text of lines, with names in quotation marks.
    let parts = asked.part_names.into_iter().flatten().map(|name| Some(name.as_str()));
    let texts = parts.chain([Some(name.as_str()), parent, hardware, values.get("toolsversion")]);
    if texts.flatten().any(|text| text.contains(['"', '\n', '\r', '\0'])) {
        return Err(Error::invalid_argument("a VMDK descriptor can't hold a quotation mark or the end of a line"));
    }
    let cid: [u8; 4] = random()?;
    let ids = asked.has_vmware_ids.then(|| Ok::<_, Error>(VmwareIds { content: random()?, disk: random()? }));
    let new = NewVmdk {
        size: asked.size,
        kind,
        adapter,
        hardware: hardware.unwrap_or(if values.switch("compat6") { "6" } else { "4" }),
        tools: values.get("toolsversion").unwrap_or("2147483647"),
        zeroed_grains,
        // All ones mean that there is no parent.
        cid: u32::from_le_bytes(cid) & 0x7fff_ffff,
        parent: asked.parent.zip(parent),
        name: &name,
        part_names: asked.part_names,
        ids: ids.transpose()?,
    };
    let files = new.lay_out()?;
    Ok(Fresh { image: files.image, behind: Behind::Cut, parts: files.parts })
}

/// Disks in grains take what is to be compressed; only a stream compresses it.
fn vmdk_packing(values: &OptionValues) -> ImageCompression {
    match vmdk_kind(values) {
        Ok(kind) if kind.is_stream => ImageCompression::Stream,
        Ok(kind) if kind.is_flat => ImageCompression::None,
        // Of an unknown kind the creation speaks.
        _ => ImageCompression::Plain,
    }
}

/// The errors that QEMU finds only while it makes the image, after it has announced the image.
pub(crate) fn refused_late(request: &CreateRequest, values: &OptionValues) -> Option<Error> {
    let is_unchecked = request.backing_unchecked || values.get("backing_file").is_none();
    let name = values.get("backing_fmt").filter(|name| is_unchecked && !DRIVERS.is_name(name))?;
    let message = match request.format.as_str() {
        "qcow" => format!("unrecognized backing format '{name}'"),
        // It looks for its own name itself.
        VMDK_NAME => return None,
        _ => format!("Parameter 'backing-fmt' does not accept value '{name}'"),
    };
    Some(Error::invalid_argument(message).field("backing_fmt"))
}
