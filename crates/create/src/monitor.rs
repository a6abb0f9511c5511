// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The rules of a monitor for new images (`blockdev-create`), which differ from those of a command line. Each format has
//! them in its line. The sentences are QEMU's.

use cowshed_types::{Error, Result};

/// Numbers among the options of a monitor's client, by their keys.
pub type Numbers<'a> = &'a dyn Fn(&str) -> Result<Option<u64>>;

/// The rules of one driver.
#[derive(Clone, Copy)]
pub struct MonitorRules {
    /// The format, where the driver has another name.
    pub format: Option<&'static str>,
    /// Refuses a size that no image of the format has, before anything else.
    pub check_size: fn(u64) -> Result<()>,
    /// Refuses a size that is no whole number of sectors. `None`: it is rounded up.
    pub refuses_odd_size: Option<&'static str>,
    /// The format of a backing file without one. The header has a mark of a raw file at most, so another format is as good
    /// as none.
    pub unsaid_backing_format: Option<&'static str>,
    /// As in QEMU options are refused before the file is looked at, and the job ends before its answer.
    pub ends_at_once: bool,
    /// The files beside the image are its extents, and no data file.
    pub has_extents: bool,
    /// The option that stands for all blocks allocated, in place of `preallocation=metadata`. Other modes are refused.
    pub when_allocated: Option<&'static str>,
    /// Refuses a size that the system has no number for.
    pub checks_offset: bool,
    /// Refuses sizes of logs, blocks and clusters that no image has. `-o` of `create` rounds some of them.
    pub check_units: fn(Numbers<'_>) -> Result<()>,
}

impl MonitorRules {
    /// Those of most formats.
    pub(crate) const SECTORS: MonitorRules = MonitorRules {
        format: None,
        check_size: |_| Ok(()),
        refuses_odd_size: Some("Image size must be a multiple of 512 bytes"),
        unsaid_backing_format: None,
        ends_at_once: false,
        has_extents: false,
        when_allocated: None,
        checks_offset: false,
        check_units: |_| Ok(()),
    };
    /// Those of formats that round a size up.
    pub(crate) const ROUNDED: MonitorRules = MonitorRules { refuses_odd_size: None, ..MonitorRules::SECTORS };
}

fn refuse(message: &str) -> Result<()> {
    Err(Error::invalid_argument(message))
}

pub(crate) fn check_vdi_size(size: u64) -> Result<()> {
    const MOST: u64 = 0x1_ffff_f800_0000;
    match size > MOST {
        true => refuse(&format!("Unsupported VDI image size (size is {size:#x}, max supported is {MOST:#x})")),
        false => Ok(()),
    }
}

pub(crate) fn check_vhdx_size(size: u64) -> Result<()> {
    match size > 64 << 40 {
        true => refuse("Image size too large; max of 64TB"),
        false => Ok(()),
    }
}

pub(crate) fn check_vpc_size(size: u64) -> Result<()> {
    match size > 2040 << 30 {
        true => refuse("Disk size is too large, max size is 2040 GiB"),
        false => Ok(()),
    }
}

pub(crate) fn check_parallels_size(size: u64) -> Result<()> {
    match size > i64::MAX as u64 - 511 {
        true => refuse("Image size is too large for this cluster size"),
        false => Ok(()),
    }
}

pub(crate) fn check_vhdx(number: Numbers<'_>) -> Result<()> {
    const MIB: u64 = 1 << 20;
    match (number("log-size")?, number("block-size")?) {
        (Some(log), _) if log >= 4096 * MIB => refuse("Log size must be smaller than 4 GB"),
        (Some(log), _) if !log.is_multiple_of(MIB) => refuse("Log size must be a multiple of 1 MB"),
        (_, Some(block)) if block == 0 || !block.is_multiple_of(MIB) || i64::try_from(block).is_err() => {
            refuse("Block size must be a multiple of 1 MB")
        }
        (_, Some(block)) if !block.is_power_of_two() => refuse("Block size must be a power of two"),
        (_, Some(block)) if block > 256 * MIB => refuse("Block size must not exceed 268435456"),
        _ => Ok(()),
    }
}

pub(crate) fn check_parallels(number: Numbers<'_>) -> Result<()> {
    match number("cluster-size")? {
        Some(cluster) if !cluster.is_multiple_of(512) => refuse("Cluster size must be a multiple of 512 bytes"),
        _ => Ok(()),
    }
}
