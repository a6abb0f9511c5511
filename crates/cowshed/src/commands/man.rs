// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `man`: writes the manual pages.

use super::parser::EXAMPLES;
use super::{Program, Verb};
use crate::output::{Console, Failure};
use clap::builder::Resettable;
use clap::{ArgMatches, Args, FromArgMatches};
use std::path::{Path, PathBuf};

pub const VERB: Verb = Verb {
    name: "man",
    about: "Write the manual pages",
    operands: "",
    details: "One page for the program and one for each command, made from the same table as --help.",
    examples: "  cowshed man --dir /usr/share/man/man1
  cowshed man --dir ~/.local/share/man/man1 --program qemu-img
  cowshed man | man -l -
      The page of the program, on the screen.",
    in_qemu_img: false,
    arguments: ManArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct ManArgs {
    /// Write all pages into this folder, which is made if need be
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    dir: Option<PathBuf>,
    /// The name that the pages are about
    #[arg(long, value_enum, default_value_t, value_name = "NAME")]
    program: Program,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = ManArgs::from_arg_matches(matches)?;
    let name = args.program.name();
    let mut root = args.program.command();
    root.build();
    let Some(dir) = args.dir else {
        console.print(String::from_utf8_lossy(&page(&root, name)?));
        return Ok(0);
    };
    std::fs::create_dir_all(&dir).map_err(|error| failed(&dir, &error))?;
    write_page(&dir, &root, name)?;
    for command in root.get_subcommands() {
        write_page(&dir, command, &format!("{name}-{}", command.get_name()))?;
    }
    Ok(0)
}

fn write_page(dir: &Path, command: &clap::Command, title: &str) -> Result<(), Failure> {
    let path = dir.join(format!("{title}.1"));
    std::fs::write(&path, page(command, title)?).map_err(|error| failed(&path, &error))
}

fn page(command: &clap::Command, title: &str) -> Result<Vec<u8>, Failure> {
    let closing = command.get_after_help().map(|text| closing_section(&text.to_string())).unwrap_or_default();
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone().name(title.to_owned()).after_help(Resettable::Reset))
        .render(&mut page)
        .map_err(|error| Failure::new(format!("could not make the page {title}: {error}")))?;
    page.extend_from_slice(closing.as_bytes());
    Ok(page)
}

/// The last section of a page. Examples stand there as in the source, so that they can be copied: `man` would fill and hyphenate
/// their lines.
fn closing_section(text: &str) -> String {
    match text.strip_prefix(EXAMPLES) {
        Some(examples) => format!(".SH EXAMPLES\n.nf\n{}\n.fi\n", escaped(examples.trim_end())),
        None => format!(".SH NOTES\n{}\n", escaped(text.trim_end())),
    }
}

/// A text with the characters that `man` would print as others, and without requests.
fn escaped(text: &str) -> String {
    let mut page = String::new();
    for (number, line) in text.lines().enumerate() {
        if number > 0 {
            page.push('\n');
        }
        if line.starts_with(['.', '\'']) {
            page.push_str("\\&");
        }
        for character in line.chars() {
            match character {
                '\\' => page.push_str("\\e"),
                '-' => page.push_str("\\-"),
                '\'' => page.push_str("\\(aq"),
                '`' => page.push_str("\\(ga"),
                '^' => page.push_str("\\(ha"),
                '~' => page.push_str("\\(ti"),
                _ => page.push(character),
            }
        }
    }
    page
}

fn failed(path: &Path, error: &std::io::Error) -> Failure {
    let error = cowshed_types::Error::io(error, "could not write");
    Failure::new(format!("{}: {error}", path.display()))
}
