// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rules of our own name for a new image. Its name's ending decides the format where the user names none, and no file
//! of that name may exist. Under QEMU's name the format is raw, and an existing file is overwritten.

use crate::invocation::Persona;
use crate::output::{Console, Failure};
use cowshed_create::schema::options_of;
use cowshed_storage::path_of_text;
use std::path::{Path, PathBuf};

/// Formats by the ending of a file's name.
const ENDINGS: &[(&str, &str)] = &[
    ("qcow2", "qcow2"),
    ("qcow", "qcow2"),
    ("raw", "raw"),
    ("img", "raw"),
    ("luks", "luks"),
    ("vmdk", "vmdk"),
    ("vdi", "vdi"),
    ("vhd", "vpc"),
    ("vhdx", "vhdx"),
    ("qed", "qed"),
];

/// The format of a new image, and the message about it when the image is made.
pub struct ChosenFormat {
    /// The format.
    pub format: String,
    notice: Option<String>,
}

impl ChosenFormat {
    /// Prints the origin of the format, where the command line named none.
    pub fn print_notice(&self, quiet: bool, console: &mut Console) {
        if let Some(notice) = self.notice.as_deref().filter(|_| !quiet) {
            console.complain(notice);
        }
    }
}

/// The format of a new image: the one that is given, else under our own name the one that the name's ending means, else
/// raw. `option` is the option that would name one.
pub fn format(given: Option<&str>, name: &str, option: &str, console: &Console) -> Result<ChosenFormat, Failure> {
    if let (None, Persona::Cowshed) = (given, console.persona)
        && let Some((ending, format)) = by_ending(name)
    {
        if options_of(format).is_none() {
            return Err(Failure::new(format!(
                "{name}: the ending '.{ending}' means the format '{format}', which can't be written; {option} names another"
            )));
        }
        let notice = (format != "raw")
            .then(|| format!("the format of '{name}' is {format}, by its ending ({option} names another)"));
        return Ok(ChosenFormat { format: format.to_owned(), notice });
    }
    Ok(ChosenFormat { format: given.unwrap_or("raw").to_owned(), notice: None })
}

fn by_ending(name: &str) -> Option<(&'static str, &'static str)> {
    let ending = Path::new(name).extension()?.to_str()?.to_ascii_lowercase();
    ENDINGS.iter().find(|(known, _)| *known == ending).copied()
}

/// The local file of a name.
pub fn local_path(name: &str) -> PathBuf {
    path_of_text(name.strip_prefix("file:").unwrap_or(name))
}

/// True where a new image replaces no file: under our own name without `--force`.
pub fn keeps_existing(force: bool, console: &Console) -> bool {
    !force && console.persona == Persona::Cowshed
}

/// Refuses a file that is there already, under our own name and without `--force`. Devices are there always.
pub fn check_absent(name: &str, force: bool, console: &Console) -> Result<(), Failure> {
    let path = local_path(name);
    if !keeps_existing(force, console) || !path.is_file() {
        return Ok(());
    }
    Err(Failure::new(format!("{name}: the file exists already; --force overwrites it")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endings_mean_formats() {
        for (name, format) in [
            ("a.qcow2", Some("qcow2")),
            ("a.b/c.IMG", Some("raw")),
            ("a.vhd", Some("vpc")),
            ("a", None),
            ("a.b/c", None),
            (".qcow2", None),
            ("nbd://host/x", None),
        ] {
            assert_eq!(by_ending(name).map(|(_, format)| format), format, "{name}");
        }
    }
}
