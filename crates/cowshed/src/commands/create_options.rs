// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `-o help`: the options that a format has at creation.

use crate::output::{Console, Failure};
use cowshed_image::create::schema::{help_lines, options_of};

/// True when one of the lists asks for help: an element `help` or `?`.
pub fn asks_for_help(lists: &[String]) -> bool {
    lists.iter().flat_map(|list| list.split(',')).any(|element| element == "help" || element == "?")
}

/// True of a format that no image can be created in.
pub fn is_unknown(format: &str) -> bool {
    options_of(format).is_none()
}

/// Refuses a format that no image can be created in; none is raw.
pub fn require_format(format: Option<&str>) -> Result<(), Failure> {
    let format = format.unwrap_or("raw");
    options_of(format).map(drop).ok_or_else(|| Failure::new(format!("Unknown file format '{format}'")))
}

/// Prints the options of `format`.
pub fn print_help(format: &str, console: &mut Console) -> Result<u8, Failure> {
    let options = options_of(format).ok_or_else(|| Failure::new(format!("Unknown file format '{format}'")))?;
    console.line(format_args!("Supported {format} options:"));
    help_lines(options).iter().for_each(|line| console.line(line));
    Ok(0)
}
