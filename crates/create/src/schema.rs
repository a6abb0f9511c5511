// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The `-o` options of `create`, per format, and the parser of their lists.

use crate::monitor::MonitorRules;
use cowshed_image::options::{parse_on_off, parse_size, size_refused};
use cowshed_types::{Error, Result};

/// The type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// Any text.
    Text,
    /// `on` or `off`.
    Switch,
    /// A number without a suffix.
    Number,
    /// A number of bytes with an optional suffix.
    Size,
}

/// One option of `create`.
#[derive(Clone, Copy, Debug)]
pub struct CreateOption {
    /// The key.
    pub name: &'static str,
    /// Type of the value.
    pub kind: OptionKind,
    /// One line of help.
    pub help: &'static str,
    /// The default value; `summary` lines show it.
    pub default: Option<&'static str>,
}

const fn option(name: &'static str, kind: OptionKind, help: &'static str) -> CreateOption {
    CreateOption { name, kind, help, default: None }
}

const fn preset(name: &'static str, kind: OptionKind, default: &'static str, help: &'static str) -> CreateOption {
    CreateOption { name, kind, help, default: Some(default) }
}

use OptionKind::{Number, Size, Switch, Text};

/// Options of a qcow2 image, in the order in which `summary` lines name them.
pub const QCOW2: &[CreateOption] = &[
    option("encryption", Switch, "the old spelling of encrypt.format=aes, which is unsafe"),
    option(
        "encrypt.format",
        Text,
        "how to encrypt: luks (it hides the data; it does not notice damage to it), or aes (unsafe: for old readers)",
    ),
    option("encrypt.key-secret", Text, "id of the secret object with the passphrase"),
    option("encrypt.cipher-alg", Text, "cipher of the data [default: aes-256]"),
    option("encrypt.cipher-mode", Text, "mode of that cipher [default: xts]"),
    option("encrypt.ivgen-alg", Text, "how initialization vectors are made [default: plain64]"),
    option("encrypt.ivgen-hash-alg", Text, "hash that the vectors are made with [default: sha256]"),
    option("encrypt.hash-alg", Text, "hash of the key derivation [default: sha256]"),
    option("encrypt.iter-time", Number, "milliseconds that one guess of the passphrase should cost [default: 2000]"),
    preset("cluster_size", Size, "65536", "unit of allocation: a power of two from 512 to 2M"),
    preset("extended_l2", Switch, "off", "32 subclusters in each cluster (clusters of 16k or more)"),
    option("preallocation", Text, "what to allocate at once: off, metadata, falloc or full"),
    preset("compression_type", Text, "zlib", "how compressed clusters are encoded: zlib or zstd"),
    option("keep_data_file", Switch, "the external data file exists already and keeps its content"),
    option("size", Size, "size of the virtual disk"),
    option("compat", Text, "version of the format: 0.10 (v2) or 1.1 (v3)"),
    option("backing_file", Text, "image that unallocated clusters read from"),
    option("backing_fmt", Text, "format of the backing file"),
    option("data_file", Text, "file that holds the guest's clusters, apart from the metadata"),
    option("data_file_raw", Switch, "the data file is a raw image of the disk at any time"),
    preset("lazy_refcounts", Switch, "off", "write reference counts at close only, under the dirty bit"),
    preset("refcount_bits", Number, "16", "width of a reference count: 1, 2, 4, 8, 16, 32 or 64 bits"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a LUKS volume.
pub const LUKS: &[CreateOption] = &[
    option("size", Size, "size of the virtual disk"),
    option("key-secret", Text, "id of the secret object with the passphrase"),
    option("cipher-alg", Text, "cipher of the data [default: aes-256]"),
    option(
        "cipher-mode",
        Text,
        "mode of that cipher: xts hides the data; it does not notice damage to it, nor do the others [default: xts]",
    ),
    option("ivgen-alg", Text, "how initialization vectors are made [default: plain64]"),
    option("ivgen-hash-alg", Text, "hash that the vectors are made with [default: sha256]"),
    option("hash-alg", Text, "hash of the key derivation [default: sha256]"),
    option("iter-time", Number, "milliseconds that one guess of the passphrase should cost [default: 2000]"),
    option("detached-header", Switch, "only the header: the disk's data is in a file of its own"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of key slots, of a LUKS volume that exists: `amend` changes them.
pub const LUKS_SLOTS: &[CreateOption] = &[
    option("state", Text, "active: one more passphrase opens the image; inactive: one less"),
    option("new-secret", Text, "id of the secret with the passphrase of an activated slot"),
    option("old-secret", Text, "id of the secret with the passphrase whose slots become inactive"),
    option("keyslot", Number, "the slot, 0 to 7"),
    option("iter-time", Number, "milliseconds that one guess of the passphrase should cost [default: 2000]"),
];

/// Options of a raw image.
pub const RAW: &[CreateOption] = &[
    option("size", Size, "size of the virtual disk"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a VDI image, and of the file below.
pub const VDI: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    preset("static", Switch, "off", "VDI static (pre-allocated) image"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a VMDK disk, and of the files below.
pub const VMDK: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    option("adapter_type", Text, "Virtual adapter type, can be one of ide (default), lsilogic, buslogic or legacyESX"),
    option("backing_file", Text, "File name of a base image"),
    option("backing_fmt", Text, "Must be 'vmdk' if present"),
    preset("compat6", Switch, "off", "VMDK version 6 image"),
    preset("hwversion", Text, "undefined", "VMDK hardware version"),
    option("toolsversion", Text, "VMware guest tools version"),
    option(
        "subformat",
        Text,
        "VMDK flat extent format, can be one of {monolithicSparse (default) | monolithicFlat | twoGbMaxExtentSparse | twoGbMaxExtentFlat | streamOptimized} ",
    ),
    option("zeroed_grain", Switch, "Enable efficient zero writes using the zeroed-grain GTE feature"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a VHD image, and of the file below.
pub const VPC: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    option("subformat", Text, "Type of virtual hard disk format. Supported formats are {dynamic (default) | fixed} "),
    option(
        "force_size",
        Switch,
        "Force disk size calculation to use the actual size specified, rather than using the nearest CHS-based calculation",
    ),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a QED image, and of the file below.
pub const QED: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    option("backing_file", Text, "File name of a base image"),
    option("backing_fmt", Text, "Image format of the base image"),
    preset("cluster_size", Size, "65536", "Cluster size (in bytes)"),
    option("table_size", Size, "L1/L2 table size (in clusters)"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a qcow image (version 1), and of the file below.
pub const QCOW: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    option("backing_file", Text, "File name of a base image"),
    option("backing_fmt", Text, "Format of the backing image"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a Parallels image, and of the file below.
pub const PARALLELS: &[CreateOption] = &[
    option("size", Size, "Virtual disk size"),
    preset("cluster_size", Size, "1048576", "Parallels image cluster size"),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a VHDX image, and of the file below.
pub const VHDX: &[CreateOption] = &[
    option("size", Size, "Virtual disk size; max of 64TB."),
    preset("log_size", Size, "1048576", "Log size; min 1MB."),
    preset("block_size", Size, "0", "Block Size; min 1MB, max 256MB. 0 means auto-calculate based on image size."),
    option("subformat", Text, "VHDX format type, can be either 'dynamic' or 'fixed'. Default is 'dynamic'."),
    option(
        "block_state_zero",
        Switch,
        "Force use of payload blocks of type 'ZERO'. Non-standard, but default.  Do not set to 'off' when using 'qemu-img convert' with subformat=dynamic.",
    ),
    option("preallocation", Text, "what to allocate at once: off, falloc or full"),
    option("nocow", Switch, "write the file in place where the file system copies on write (btrfs)"),
    option("extent_size_hint", Size, "piece of the disk to allocate at once (XFS); 0: none [default: 1M]"),
];

/// Options of a qcow2 image that exists which can be changed.
pub const QCOW2_AMEND: &[CreateOption] = &[
    option("backing_file", Text, "image that unallocated clusters read from: only its name"),
    option("backing_fmt", Text, "format of the backing file"),
    option("compat", Text, "version of the format: 0.10 (v2) or 1.1 (v3)"),
    option("data_file", Text, "file that holds the guest's clusters: only its name"),
    option("data_file_raw", Switch, "off: the data file need not stay a raw image of the disk"),
    option("encrypt.iter-time", Number, "milliseconds that one guess of the passphrase should cost"),
    option("encrypt.keyslot", Number, "the key slot to change"),
    option("encrypt.new-secret", Text, "id of the secret with the passphrase of an activated slot"),
    option("encrypt.old-secret", Text, "id of the secret with the passphrase whose slots become inactive"),
    option("encrypt.state", Text, "what the slots become: active or inactive"),
    option("lazy_refcounts", Switch, "write reference counts at close only, under the dirty bit"),
    option("refcount_bits", Number, "width of a reference count: 1, 2, 4, 8, 16, 32 or 64 bits"),
    option("size", Size, "size of the virtual disk"),
];

/// A format whose images are created by code of its own.
struct OwnFormat {
    name: &'static str,
    options: &'static [CreateOption],
    /// Options of an image that exists which can be changed.
    amended: Option<&'static [CreateOption]>,
    by_monitor: Option<MonitorRules>,
    packing: ImageCompression,
}

const OWN_FORMATS: &[OwnFormat] = &[
    OwnFormat {
        name: "qcow2",
        options: QCOW2,
        amended: Some(QCOW2_AMEND),
        by_monitor: Some(MonitorRules::SECTORS),
        packing: ImageCompression::Clusters,
    },
    OwnFormat {
        name: "luks",
        options: LUKS,
        amended: Some(LUKS_SLOTS),
        by_monitor: Some(MonitorRules::ROUNDED),
        packing: ImageCompression::None,
    },
    // By a monitor it is the file that the next driver creates.
    OwnFormat { name: "raw", options: RAW, amended: None, by_monitor: None, packing: ImageCompression::None },
    OwnFormat {
        name: "file",
        options: RAW,
        amended: None,
        by_monitor: Some(MonitorRules { format: Some("raw"), checks_offset: true, ..MonitorRules::ROUNDED }),
        packing: ImageCompression::None,
    },
];

fn own(format: &str) -> Option<&'static OwnFormat> {
    OWN_FORMATS.iter().find(|own| own.name == format)
}

/// The options of a format, `None` when images of this format can't be created.
pub fn options_of(format: &str) -> Option<&'static [CreateOption]> {
    own(format).map(|own| own.options).or_else(|| crate::fresh::find(format).map(|format| format.options))
}

/// Options of images of `format` that can be changed afterwards, key slots among them; `None` where it has none.
pub fn amended_options_of(format: &str) -> Option<&'static [CreateOption]> {
    own(format)?.amended
}

/// How new images take compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageCompression {
    /// Not at all.
    None,
    /// A cluster at a time, at any place.
    Clusters,
    /// Data that are to be compressed are taken, and stay plain.
    Plain,
    /// Each cluster is compressed, and written once.
    Stream,
}

/// How new images of a format take compressed data, by the options of their creation (`key=value,…`). Options that
/// creation would refuse mean none.
pub fn compression_of(format: &str, options: &[String]) -> ImageCompression {
    let by_options = |fresh: &crate::fresh::FreshFormat| {
        let values = OptionValues::parse(fresh.options, options).ok()?;
        Some((fresh.packing)(&values))
    };
    match own(format) {
        Some(own) => own.packing,
        None => crate::fresh::find(format).and_then(by_options).unwrap_or(ImageCompression::None),
    }
}

/// The rules of a monitor for new images by this driver. `None`: a monitor makes none.
pub fn monitor_rules_of(driver: &str) -> Option<&'static MonitorRules> {
    match own(driver) {
        Some(own) => own.by_monitor.as_ref(),
        None => crate::fresh::find(driver).map(|format| &format.by_monitor),
    }
}

/// The lines that `-o help` prints, sorted by name.
pub fn help_lines(options: &[CreateOption]) -> Vec<String> {
    let mut lines: Vec<String> = options
        .iter()
        .map(|option| {
            let kind = match option.kind {
                Text => "str",
                Switch => "bool (on/off)",
                Number => "num",
                Size => "size",
            };
            let left = format!("  {}=<{kind}>", option.name);
            format!("{left:<24} - {}", option.help)
        })
        .collect();
    lines.sort();
    lines
}

/// Refuses a list with an empty element at an end, as qemu-img does: it is nearly always a slip of the shell's quoting.
pub fn check_list(list: &str) -> Result<()> {
    match list.is_empty() || list.starts_with(',') || (list.ends_with(',') && !list.ends_with(",,")) {
        true => Err(Error::invalid_argument(format!("Invalid option list: {list}"))),
        false => Ok(()),
    }
}

/// The given options of one image: the last value of a key counts.
#[derive(Clone, Debug)]
pub struct OptionValues {
    schema: &'static [CreateOption],
    values: Vec<(&'static str, String)>,
}

impl OptionValues {
    /// Parses `-o` lists after `schema`: unknown keys and values of the wrong type are refused by name.
    pub fn parse(schema: &'static [CreateOption], lists: &[String]) -> Result<OptionValues> {
        let mut parsed = OptionValues { schema, values: Vec::new() };
        for list in lists {
            check_list(list)?;
            for item in split_list(list) {
                parsed.set_item(&item)?;
            }
        }
        Ok(parsed)
    }

    fn set_item(&mut self, item: &str) -> Result<()> {
        let (key, value) = match item.split_once('=') {
            Some((key, value)) => (key, value.to_owned()),
            // A bare key switches on; with "no" before it, off. QEMU leaves out each "no" of a bare key, that of "nocow" too.
            // It ends at its first comma: only a value has two for one.
            None => {
                let item = item.split(',').next().unwrap_or_default();
                match item.strip_prefix("no") {
                    Some(rest) if self.find(rest).is_ok() => (rest, "off".to_owned()),
                    Some(rest) => {
                        let sentence = format!("Invalid parameter '{rest}'");
                        let message = match self.find(item) {
                            Ok(_) => format!("'{item}' needs a value: {item}=on"),
                            Err(error) => error.message().to_owned(),
                        };
                        return Err(Error::invalid_argument(message).qemu(sentence));
                    }
                    None => (item, "on".to_owned()),
                }
            }
        };
        self.set(key, value)
    }

    /// Sets a value after checking its type.
    pub fn set(&mut self, key: &str, value: String) -> Result<()> {
        let option = self.find(key)?;
        let value = match option.kind {
            Text => value,
            Switch => {
                parse_on_off(&value).ok_or_else(|| wrong(option, "'on' or 'off'", &value))?;
                value
            }
            // QEMU counts a negative number from 2^64 down, and shows it as it was given.
            Number if value.starts_with('-') => {
                parse_number(&value[1..]).ok_or_else(|| wrong(option, "a number", &value))?;
                value
            }
            Number => match parse_number(&value) {
                Some(number) => number.to_string(),
                None if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) => {
                    let sentence = format!("Value '{value}' is too large for parameter '{}'", option.name);
                    return Err(wrong(option, "a number", &value).qemu(sentence));
                }
                None => return Err(wrong(option, "a number", &value)),
            },
            Size => parse_size(&value).map_err(|_| wrong(option, SIZE_EXPECTED, &value))?.to_string(),
        };
        self.values.retain(|(name, _)| *name != option.name);
        self.values.push((option.name, value));
        Ok(())
    }

    fn find(&self, key: &str) -> Result<&'static CreateOption> {
        self.schema
            .iter()
            .find(|option| option.name == key)
            .ok_or_else(|| Error::invalid_argument(format!("Invalid parameter '{key}'")))
    }

    /// The value as given (sizes and numbers in decimal), or the default.
    pub fn get(&self, key: &str) -> Option<&str> {
        let given = self.values.iter().find(|(name, _)| *name == key).map(|(_, value)| value.as_str());
        given.or_else(|| self.schema.iter().find(|option| option.name == key).and_then(|option| option.default))
    }

    /// True when the user gave it.
    pub fn is_given(&self, key: &str) -> bool {
        self.values.iter().any(|(name, _)| *name == key)
    }

    /// The options given whose names start with `prefix`.
    pub fn given_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'static str> + 'a {
        self.values.iter().map(|(name, _)| *name).filter(move |name| name.starts_with(prefix))
    }

    /// The value of a switch; false when neither given nor preset.
    pub fn switch(&self, key: &str) -> bool {
        self.get(key).and_then(parse_on_off).unwrap_or(false)
    }

    /// The value of a number or size.
    pub fn number(&self, key: &str) -> Option<u64> {
        let value = self.get(key)?;
        match value.strip_prefix('-') {
            Some(rest) => parse_number(rest).map(u64::wrapping_neg),
            None => value.parse().ok(),
        }
    }

    /// The same for an integer of 64 bits with a sign, which larger numbers are not. Messages call it `shown`.
    pub fn integer(&self, key: &str, shown: &str) -> Result<Option<u64>> {
        let number = self.number(key);
        match self.get(key) {
            Some(value) if !value.starts_with('-') && number.is_some_and(|number| i64::try_from(number).is_err()) => {
                let error = Error::invalid_argument(format!("Parameter '{shown}' expects integer"));
                Err(error.value(format!("'{value}'")))
            }
            _ => Ok(number),
        }
    }

    /// ` key=value key=value`, in the order of the schema; commas are doubled as qemu-img doubles them.
    pub fn summary(&self) -> String {
        let mut line = String::new();
        for option in self.schema {
            if let Some(value) = self.get(option.name) {
                line.push_str(&format!(" {}={}", option.name, value.replace(',', ",,")));
            }
        }
        line
    }
}

/// QEMU's words for the form of a size.
const SIZE_EXPECTED: &str = "a non-negative number below 2^64 with an optional suffix k, M, G, T, P or E";

fn wrong(option: &CreateOption, expected: &str, value: &str) -> Error {
    let error = Error::invalid_argument(format!("Parameter '{}' expects {expected}", option.name));
    let error = error.value(format!("'{value}'"));
    match expected == SIZE_EXPECTED {
        true => error.qemu(size_refused(option.name, value)),
        false => error,
    }
}

/// Splits at single commas; a doubled one stands for itself.
fn split_list(list: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = list.chars().peekable();
    while let Some(char) = chars.next() {
        if char == ',' && chars.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(char);
        }
    }
    items
}

fn parse_number(value: &str) -> Option<u64> {
    match value.strip_prefix("0x").or_else(|| value.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => value.parse().ok(),
    }
}
