// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `help`, and the help and version that go with the name qemu-img.

use super::{COMMANDS, Verb, parser};
use crate::invocation::QEMU_IMG_LEVEL;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use cowshed_image::DRIVERS;

pub const VERB: Verb = Verb {
    name: "help",
    about: "Explain a command",
    operands: "[COMMAND]",
    details: "Without COMMAND: the list of commands.",
    examples: "  cowshed help convert",
    in_qemu_img: false,
    arguments: HelpArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct HelpArgs {
    /// The command
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
}

/// The drivers, in qemu-img's order and lines. Programs look for names here.
fn formats() -> String {
    const MOST_COLUMNS: usize = 76;
    // A driver of ours that QEMU lacks.
    let drivers = DRIVERS.schemas().filter(|driver| driver.name != "fault");
    let mut names: Vec<_> = drivers.map(|driver| driver.name).collect();
    names.sort_unstable();
    let mut lines = vec![String::from(" ")];
    for name in names {
        if let Some(line) = lines.last_mut().filter(|line| line.len() + 1 + name.len() <= MOST_COLUMNS) {
            line.push(' ');
            line.push_str(name);
        } else {
            lines.push(format!("  {name}"));
        }
    }
    lines.join("\n")
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = HelpArgs::from_arg_matches(matches)?;
    let mut root = parser::root(console.persona);
    root.build();
    let help = match &args.command {
        None => root.render_long_help(),
        Some(word) => match root.find_subcommand_mut(word) {
            Some(command) => command.render_long_help(),
            None => return Err(Failure::usage(format!("Command not found: {word}"))),
        },
    };
    match console.colour() {
        true => console.print(help.ansi()),
        false => console.print(help),
    }
    Ok(0)
}

/// `qemu-img --help` and `--version`, whose text scripts read: the version's number, the list of formats.
///
/// Returns false when the arguments ask for neither.
pub fn answer_as_qemu_img(arguments: &[String], console: &mut Console) -> bool {
    match arguments.first().map(String::as_str) {
        Some("-V" | "--version") => {
            console.line(format_args!("qemu-img version {QEMU_IMG_LEVEL} (Cowshed {})", env!("CARGO_PKG_VERSION")));
            true
        }
        Some("-h" | "--help") => {
            console.line(format_args!("qemu-img version {QEMU_IMG_LEVEL} (Cowshed {})", env!("CARGO_PKG_VERSION")));
            console.line(
                "Disk image utility.  Usage:\n\n  qemu-img [standard options] COMMAND [--help | command options]\n\n\
                 Standard options:\n  -h, --help\n     display this help and exit\n  -V, --version\n     \
                 display version info and exit\n  -T,--trace TRACE\n     accepted, without effect\n\n\
                 Recognized commands (run qemu-img COMMAND --help for command-specific help):\n",
            );
            for verb in COMMANDS.iter().filter(|verb| verb.in_qemu_img) {
                console.line(format_args!("  {} - {}", verb.name, verb.about));
            }
            console.line(format_args!("\nSupported image formats:\n\n{}", formats()));
            true
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invocation::Persona;

    #[test]
    fn every_command_has_a_help_with_examples() {
        for verb in COMMANDS {
            let help = parser::command(verb, Persona::Cowshed).render_long_help().to_string();
            assert!(help.contains("Examples:\n"), "{}", verb.name);
            let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words.starts_with(verb.about), "{words}");
            assert!(verb.examples.contains(&format!("cowshed {}", verb.name)), "{}", verb.name);
        }
    }

    #[test]
    fn the_parser_is_sound() {
        parser::root(Persona::Cowshed).debug_assert();
        parser::root(Persona::QemuImg).debug_assert();
    }
}
