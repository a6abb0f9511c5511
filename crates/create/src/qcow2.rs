// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The options of a fresh qcow2 image and their rules.

use crate::encryption::ImageEncryption;
use crate::schema::OptionValues;
use cowshed_image::node::Preallocation;
use cowshed_image::secret::Secret;
use cowshed_storage::LayoutHints;
use cowshed_types::{Compression, Error, Result, name_of_text};

/// Largest L1 table, bytes: QEMU opens no image with a larger one.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Largest backing file name in a header, bytes.
pub const MAX_BACKING_NAME_BYTES: usize = 1023;

/// The options of a new qcow2 image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2CreateOptions {
    /// Virtual size in bytes, a multiple of 512.
    pub size: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// log2 of the cluster size in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// log2 of the refcount width in bits, 0 to 6.
    pub refcount_order: u32,
    /// Subclusters.
    pub extended_l2: bool,
    /// Refcounts may lag behind while the dirty bit is set.
    pub lazy_refcounts: bool,
    /// The compression of compressed clusters.
    pub compression: Compression,
    /// The space to allocate at once.
    pub preallocation: Preallocation,
    /// External data file, as the header names it.
    pub data_file: Option<String>,
    /// The data file is a raw image at any time.
    pub data_file_raw: bool,
    /// The data file exists and is kept as it is.
    pub keep_data_file: bool,
    /// Backing file, as the header names it.
    pub backing_file: Option<String>,
    /// Its format.
    pub backing_format: Option<String>,
    /// Hints for the place of its files on the disk.
    pub hints: LayoutHints,
    /// The encryption of its clusters.
    pub encryption: Option<ImageEncryption>,
}

impl Default for Qcow2CreateOptions {
    fn default() -> Self {
        Qcow2CreateOptions {
            size: 0,
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            preallocation: Preallocation::Off,
            data_file: None,
            data_file_raw: false,
            keep_data_file: false,
            backing_file: None,
            backing_format: None,
            hints: LayoutHints::default(),
            encryption: None,
        }
    }
}

/// log2 of `value` when it is a power of two.
fn exact_log2(value: u64) -> Option<u32> {
    value.is_power_of_two().then(|| value.trailing_zeros())
}

/// Options `nocow` and `extent_size_hint`, of every format. Files of virtual disks grow in many places: by default they do so
/// in pieces of a megabyte, as QEMU's do.
pub fn layout_hints(values: &OptionValues) -> Result<LayoutHints> {
    const DEFAULT_EXTENT_BYTES: u64 = 1 << 20;
    let bytes = values.number("extent_size_hint").unwrap_or(DEFAULT_EXTENT_BYTES);
    let extent_bytes = u32::try_from(bytes)
        .map_err(|_| Error::invalid_argument("extent size hint too large").field("extent_size_hint").value(bytes))?;
    let extent_bytes = Some(extent_bytes).filter(|bytes| *bytes > 0);
    Ok(LayoutHints { no_cow: values.switch("nocow"), extent_bytes })
}

/// QEMU's sentence for refcounts whose width version 2 doesn't have.
const REFCOUNTS_OF_V3: &str = "Different refcount widths than 16 bits require compatibility level 1.1 or above (use \
                               version=v3 or greater)";

/// QEMU's words for a value that is none of the known ones; `parameter` is its name for the option.
fn not_accepted(parameter: &str, value: &str, known: &str) -> Error {
    Error::invalid_argument(format!("Parameter '{parameter}' does not accept value '{value}'"))
        .hint(format!(": {known}"))
}

/// `value` of option `preallocation`.
pub fn parse_preallocation(value: &str) -> Result<Preallocation> {
    match value {
        "off" => Ok(Preallocation::Off),
        "metadata" => Ok(Preallocation::Metadata),
        "falloc" => Ok(Preallocation::Falloc),
        "full" => Ok(Preallocation::Full),
        _ => {
            Err(not_accepted("preallocation", value, "off, metadata, falloc and full are known").field("preallocation"))
        }
    }
}

/// Smallest clusters that subclusters are for, as a power of two.
const MIN_EXTENDED_CLUSTER_BITS: u32 = 14;
/// QEMU's sentence for smaller clusters.
const SMALL_EXTENDED: &str = "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes";

/// QEMU's sentence for preallocation over a backing file's data.
const PREALLOCATED_OVERLAY: &str =
    "Backing file and preallocation can only be used at the same time if extended_l2 is on";

fn version_of(values: &OptionValues) -> Result<u32> {
    match values.get("compat") {
        None | Some("1.1" | "v3") => Ok(3),
        Some("0.10" | "v2") => Ok(2),
        Some(other) => Err(not_accepted("version", other, "0.10, v2, 1.1 and v3 are known").field("compat")),
    }
}

fn cluster_bits_of(values: &OptionValues) -> Result<u32> {
    let cluster_size = values.number("cluster_size").unwrap_or(65536);
    exact_log2(cluster_size).filter(|bits| (9..=21).contains(bits)).ok_or_else(|| {
        Error::invalid_argument("Cluster size must be a power of two between 512 and 2048k")
            .field("cluster_size")
            .value(cluster_size)
    })
}

fn refcount_order_of(values: &OptionValues) -> Result<u32> {
    let refcount_bits = values.number("refcount_bits").unwrap_or(16);
    exact_log2(refcount_bits).filter(|order| *order <= 6).ok_or_else(|| {
        Error::invalid_argument("Refcount width must be a power of two and may not exceed 64 bits")
            .field("refcount_bits")
            .value(refcount_bits)
    })
}

impl Qcow2CreateOptions {
    /// From `-o` values and a size in bytes; checks everything that doesn't need a file.
    pub fn from_values(size: u64, values: &OptionValues) -> Result<Self> {
        let version = version_of(values)?;
        let preallocation = values.get("preallocation").map_or(Ok(Preallocation::Off), parse_preallocation)?;
        let compression = match values.get("compression_type") {
            None | Some("zlib") => Compression::Zlib,
            Some("zstd") => Compression::Zstd,
            Some(other) => {
                return Err(
                    not_accepted("compression-type", other, "zlib and zstd are known").field("compression_type")
                );
            }
        };
        let cluster_bits = cluster_bits_of(values)?;
        let extended_l2 = values.switch("extended_l2");
        if values.is_given("backing_file") && preallocation != Preallocation::Off && !extended_l2 {
            return Err(Error::invalid_argument(PREALLOCATED_OVERLAY).field("preallocation"));
        }
        let refcount_order = refcount_order_of(values)?;
        let text = |key| values.get(key).map(str::to_owned);
        let options = Qcow2CreateOptions {
            size: round_size(size)?,
            version,
            cluster_bits,
            refcount_order,
            extended_l2,
            lazy_refcounts: values.switch("lazy_refcounts"),
            compression,
            preallocation,
            // The header has no protocol: a name there is always that of a file.
            data_file: text("data_file").map(|name| name.strip_prefix("file:").map_or(name.clone(), str::to_owned)),
            data_file_raw: values.switch("data_file_raw"),
            keep_data_file: values.switch("keep_data_file"),
            backing_file: text("backing_file"),
            backing_format: text("backing_fmt"),
            hints: layout_hints(values)?,
            encryption: ImageEncryption::from_values(values)?,
        };
        options.check()?;
        Ok(options)
    }

    /// As [`Qcow2CreateOptions::from_values`], for the options that decide an image's size. The others aren't looked
    /// at, as in QEMU. Errors come in QEMU's order and words.
    pub fn to_measure(size: u64, values: &OptionValues) -> Result<Self> {
        let cluster_bits = cluster_bits_of(values)?;
        let extended_l2 = values.switch("extended_l2");
        if extended_l2 && cluster_bits < MIN_EXTENDED_CLUSTER_BITS {
            return Err(Error::invalid_argument(SMALL_EXTENDED).field("extended_l2"));
        }
        let version = version_of(values).map_err(|error| {
            let sentence = format!("Invalid compatibility level: '{}'", values.get("compat").unwrap_or_default());
            error.qemu(sentence)
        })?;
        let refcount_order = refcount_order_of(values)?;
        if version < 3 && refcount_order != 4 {
            let error = Error::invalid_argument(REFCOUNTS_OF_V3).field("refcount_bits");
            return Err(error.qemu(REFCOUNTS_OF_V3.replace("version=v3", "compat=1.1")));
        }
        let given = values.get("preallocation").unwrap_or("off");
        let preallocation =
            parse_preallocation(given).map_err(|error| error.qemu(format!("invalid parameter value: {given}")))?;
        let encryption = match values.get("encrypt.format") {
            Some("luks") => ImageEncryption::from_values(values)?,
            // The legacy method takes no space.
            _ => None,
        };
        let backing_file = values.get("backing_file").map(str::to_owned);
        let options = Qcow2CreateOptions {
            size: round_size(size)?,
            version,
            cluster_bits,
            refcount_order,
            extended_l2,
            preallocation,
            backing_file,
            encryption,
            ..Qcow2CreateOptions::default()
        };
        options.l1_entries()?;
        Ok(options)
    }

    /// With the passphrase that the options name.
    pub fn with_secrets(mut self, secrets: &[(String, Secret)]) -> Result<Self> {
        self.encryption = self.encryption.map(|new| new.with_secrets(secrets)).transpose()?;
        Ok(self)
    }

    /// Checks the combination of the options.
    pub fn check(&self) -> Result<()> {
        let refuse = |field, message: &str| Err(Error::invalid_argument(message).field(field));
        if self.version < 3 {
            let v3 =
                |what| format!("{what} supported with compatibility level 1.1 and above (use version=v3 or greater)");
            if self.refcount_order != 4 {
                return refuse("refcount_bits", REFCOUNTS_OF_V3);
            }
            if self.lazy_refcounts {
                return refuse("lazy_refcounts", &v3("Lazy refcounts only"));
            }
            if self.extended_l2 {
                return refuse("extended_l2", &v3("Extended L2 entries are only"));
            }
            if self.data_file_raw && self.data_file.is_none() {
                return refuse("data_file_raw", "data-file-raw requires data-file");
            }
            if self.compression != Compression::Zlib {
                return refuse("compression_type", &v3("Non-zlib compression type is only"));
            }
            if self.data_file.is_some() {
                return refuse("data_file", &v3("External data files are only"));
            }
        }
        if self.extended_l2 && self.cluster_bits < MIN_EXTENDED_CLUSTER_BITS {
            return refuse("extended_l2", SMALL_EXTENDED);
        }
        if self.data_file_raw && self.data_file.is_none() {
            return refuse("data_file_raw", "data-file-raw requires data-file");
        }
        if self.data_file_raw && self.backing_file.is_some() {
            return refuse("data_file_raw", "Backing file and data-file-raw cannot be used at the same time");
        }
        if self.keep_data_file {
            self.check_kept_data_file()?;
        }
        if self.backing_file.is_some() && self.preallocation != Preallocation::Off && !self.extended_l2 {
            return refuse("preallocation", PREALLOCATED_OVERLAY);
        }
        if self.backing_format.is_some() && self.backing_file.is_none() {
            return refuse("backing_fmt", "Backing format cannot be used without backing file");
        }
        self.check_names()?;
        self.l1_entries().map(|_| ())
    }

    fn check_kept_data_file(&self) -> Result<()> {
        if self.data_file.is_none() {
            return Err(Error::invalid_argument("keep_data_file requires data_file").field("keep_data_file"));
        }
        if !self.data_file_raw && self.preallocation != Preallocation::Metadata {
            return Err(Error::invalid_argument(
                "keep_data_file=on requires preallocation=metadata or data_file_raw=on, or the contents of the data \
                 file would not be visible",
            )
            .field("keep_data_file")
            .qemu(
                "'keep_data_file=on' requires 'preallocation=metadata' or 'data_file_raw=on', or the file contents will \
                 not be visible",
            ));
        }
        Ok(())
    }

    fn check_names(&self) -> Result<()> {
        for (field, name) in [("backing_file", &self.backing_file), ("data_file", &self.data_file)] {
            let Some(name) = name else { continue };
            if name.is_empty() {
                let error = Error::invalid_argument("the file name is empty").field(field);
                return Err(error.qemu("Could not create '': No such file or directory"));
            }
            if name.contains('\0') {
                return Err(Error::invalid_argument("the file name contains a NUL").field(field));
            }
            let bytes = name_of_text(name).len();
            if bytes > MAX_BACKING_NAME_BYTES {
                return Err(Error::invalid_argument(format!(
                    "the file name is longer than the {MAX_BACKING_NAME_BYTES} bytes that a header may hold"
                ))
                .field(field)
                .value(format!("{bytes} bytes")));
            }
        }
        Ok(())
    }

    /// Cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Entries of an L2 table, which is one cluster.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / if self.extended_l2 { 16 } else { 8 }
    }

    /// True when every guest cluster is mapped from the start. A raw data file always is: its bytes belong to the
    /// guest, whichever program wrote them.
    pub fn is_mapped(&self) -> bool {
        self.preallocation != Preallocation::Off || self.data_file_raw
    }

    /// Guest bytes that one L2 table maps.
    fn bytes_per_l2(&self) -> u64 {
        self.l2_entries() * self.cluster_bytes()
    }

    /// Entries of the L1 table; an error when it would be larger than QEMU opens.
    pub fn l1_entries(&self) -> Result<u64> {
        let entries = self.size.div_ceil(self.bytes_per_l2());
        if entries * 8 > MAX_L1_BYTES {
            return Err(too_large("qcow2").value(self.size));
        }
        Ok(entries)
    }
}

pub(super) fn too_large(format: &str) -> Error {
    Error::invalid_argument(format!(
        "The image size is too large for file format '{format}' (try using a larger cluster size)"
    ))
    .field("size")
}

/// Rounds a virtual size up to whole sectors of 512 bytes; an error from 2^63 on.
pub fn round_size(size: u64) -> Result<u64> {
    size.checked_next_multiple_of(512)
        .filter(|size| i64::try_from(*size).is_ok())
        .ok_or_else(|| Error::invalid_argument("The image size must be below 2^63 bytes").field("size").value(size))
}
