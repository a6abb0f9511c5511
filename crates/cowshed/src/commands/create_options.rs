// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `-o help`: the options that a format has at creation.

use crate::invocation::Persona;
use crate::output::{Console, Failure};
use cowshed_create::schema::{CreateOption, check_list, help_lines, options_of};
use cowshed_image::DRIVERS;
use cowshed_image::options::{DriverKind, DriverSchema};

/// True when one of the lists asks for help: an element `help` or `?`. A list with an empty element at an end is refused, as
/// qemu-img does before all else.
pub fn asks_for_help(lists: &[String]) -> Result<bool, Failure> {
    lists.iter().try_for_each(|list| check_list(list))?;
    Ok(lists.iter().flat_map(|list| list.split(',')).any(|element| element == "help" || element == "?"))
}

/// Drivers of QEMU with images that QEMU doesn't make either.
const ONLY_READ: [&str; 4] = ["bochs", "cloop", "dmg", "vvfat"];

/// The words for a format that no image can be created in.
pub fn refusal(format: &str) -> String {
    let makes_none =
        |schema: &DriverSchema| schema.kind == DriverKind::Filter || ["null-co", "null-aio"].contains(&format);
    match DRIVERS.schema(format).filter(|_| format != "fault") {
        Some(schema) if makes_none(schema) || ONLY_READ.contains(&format) => {
            format!("Format driver '{format}' does not support image creation")
        }
        None if ONLY_READ.contains(&format) => format!("Format driver '{format}' does not support image creation"),
        _ => format!("Unknown file format '{format}'"),
    }
}

/// True for a driver of a device or of an export, where QEMU makes images in what is there already.
pub fn is_storage(format: &str) -> bool {
    let is_there = |schema: &DriverSchema| schema.kind == DriverKind::Protocol && options_of(format).is_none();
    DRIVERS.schema(format).is_some_and(is_there) && refusal(format).starts_with("Unknown ") && format != "fault"
}

/// Refuses a format that no image can be created in; none is raw.
pub fn require_format(format: Option<&str>) -> Result<(), Failure> {
    let format = format.unwrap_or("raw");
    options_of(format).map(drop).ok_or_else(|| Failure::new(refusal(format)))
}

/// Prints the options of `format`. qemu-img leaves out those of the file below unless the command line names that file.
pub fn print_help(format: &str, names_file: bool, console: &mut Console) -> Result<u8, Failure> {
    let options = options_of(format).ok_or_else(|| Failure::new(refusal(format)))?;
    let leaves_out = console.persona == Persona::QemuImg && !names_file;
    let options: Vec<CreateOption> =
        options.iter().filter(|option| !leaves_out || !is_of_protocol(format, option.name)).copied().collect();
    match console.persona == Persona::QemuImg && names_file {
        true => console.line("Supported options:"),
        false => console.line(format_args!("Supported {format} options:")),
    }
    help_lines(&options).iter().for_each(|line| console.line(line));
    if leaves_out {
        console.line("\nThe protocol level may support further options.");
        console.line("Specify the target filename to include those options.");
    }
    Ok(0)
}

/// True for options that QEMU's driver of files has, not the format.
fn is_of_protocol(format: &str, option: &str) -> bool {
    match option {
        "nocow" | "extent_size_hint" => true,
        "preallocation" => format != "qcow2",
        _ => false,
    }
}
