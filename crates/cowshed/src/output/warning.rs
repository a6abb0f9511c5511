// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Warnings about an image that was opened, on standard error.

use crate::invocation::{Persona, has_name_of_qemu};
use cowshed_image::graph::{Corruption, print_corruptions};
use cowshed_jobs::check::report::lines_of;
use cowshed_offline::check::{CheckReport, print_recoveries};
use cowshed_storage::File;
use cowshed_types::{in_lines, name_of_text, visible_name};
use std::io::Write;
use std::sync::OnceLock;

/// Fields of a snapshot table that can't be read.
const FIELDS: [&str; 2] = ["(snapshots_offset", "(snapshot_extra_data_size"];

/// The warning about a folder as a disk. QEMU leaves nothing out: scripts must see it under each name.
const LEFT_OUT: &str = " entries are left out, ";

/// A warning of QEMU's that is shown under QEMU's names only.
const SHORT_FORM: &str = "short-form boolean option '";

/// The warning about the target of a backup.
const NO_UNIT: &str = "The target block device doesn't provide information about the block size";

static PERSONA: OnceLock<Persona> = OnceLock::new();

/// Sets the manners of this process's warnings. The first call counts.
pub fn set_persona(persona: Persona) {
    let _ = PERSONA.set(persona);
    print_corruptions(print_corruption);
    print_recoveries(print_recovery);
}

/// The tool whose manners this process has.
pub fn persona() -> Persona {
    PERSONA.get().copied().unwrap_or(Persona::Cowshed)
}

/// Prints one warning. A failure of that has nowhere to go.
pub fn print(text: &str) {
    if let Some(text) = worded(persona(), &in_lines(text)) {
        let _ = std::io::stderr().lock().write_all(&name_of_text(&text));
    }
}

/// Prints that an image was found to be corrupt, unless a log of this process has it. Under QEMU's names none does.
fn print_corruption(corruption: &Corruption) {
    let is_logged = tracing::dispatcher::has_been_set() && !has_name_of_qemu();
    let Some(line) = corruption.line().filter(|_| !is_logged) else { return };
    let text = match PERSONA.get() {
        Some(Persona::QemuImg | Persona::Tool(_)) => format!("{line}\n"),
        Some(Persona::Cowshed) | None if corruption.fatal => {
            format!("cowshed: warning: marking the image as corrupt: {}\n", corruption.message)
        }
        Some(Persona::Cowshed) | None => format!("cowshed: warning: the image is corrupt: {}\n", corruption.message),
    };
    let _ = std::io::stderr().lock().write_all(&name_of_text(&text));
}

/// Prints the repair of an image that was not closed cleanly: under QEMU's names in the lines of `check -r all`, as there.
fn print_recovery(file: &File, report: &CheckReport) {
    let mut stderr = std::io::stderr().lock();
    if let Some(Persona::QemuImg | Persona::Tool(_)) = PERSONA.get() {
        for line in lines_of(report) {
            let _ = stderr.write_all(&name_of_text(&format!("{}\n", in_lines(&line))));
        }
        return;
    }
    let (leaks, corruptions) = (report.counters.leaks_fixed, report.counters.corruptions_fixed);
    if leaks + corruptions == 0 {
        return;
    }
    let name = file.name();
    let text = format!(
        "{name}: the image was not closed cleanly: {leaks} leaked clusters and {corruptions} corruptions were repaired"
    );
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => drop(stderr.write_all(&name_of_text(&format!("cowshed: warning: {}\n", visible_name(&text))))),
    }
}

/// Prints the last words of a process that ends early, whatever its manners.
pub fn print_always(text: &str) {
    let name = PERSONA.get().copied().unwrap_or(Persona::Cowshed).name();
    let _ = std::io::stderr().lock().write_all(&name_of_text(&format!("{name}: {}\n", in_lines(text))));
}

/// As qemu-img there are a guessed raw format, in words that scripts know, and snapshots that can't be shown.
fn worded(persona: Persona, text: &str) -> Option<String> {
    match persona {
        Persona::QemuImg if FIELDS.iter().any(|field| text.contains(field)) => {
            Some(format!("qemu-img: warning: {text}\n"))
        }
        Persona::Tool(_) | Persona::QemuImg => as_qemu(persona, text),
        Persona::Cowshed if text.starts_with(SHORT_FORM) => None,
        Persona::Cowshed => Some(format!("cowshed: warning: {text}\n")),
    }
}

/// The warnings of QEMU's tools that scripts know, and those about content that isn't shown.
fn as_qemu(persona: Persona, text: &str) -> Option<String> {
    if let Some((place, _)) = text.split_once(SHORT_FORM).filter(|(place, _)| place.starts_with("--")) {
        return Some(format!("{}: {place}warning: {}\n", persona.name(), &text[place.len()..]));
    }
    let is_known = ["Use of \"backing\"", SHORT_FORM, NO_UNIT].iter().any(|start| text.starts_with(start));
    if is_known || text.contains(LEFT_OUT) {
        return Some(format!("{}: warning: {text}\n", persona.name()));
    }
    text.split_once(": the image format was not given").map(|(name, _)| {
        format!(
            "WARNING: Image format was not specified for '{name}' and probing guessed raw.\n         \
                 Automatically detecting the format is dangerous for raw images, write operations on block 0 will be \
                 restricted.\n         Specify the 'raw' format explicitly to remove the restrictions.\n"
        )
    })
}
