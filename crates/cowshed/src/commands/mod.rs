// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands table. A verb is one file here and one line in [`COMMANDS`].

pub mod amend;
pub mod arguments;
pub mod bench;
pub mod bitmap;
pub mod check;
pub mod commit;
pub mod compare;
pub mod completions;
pub mod convert;
pub mod create;
pub mod create_options;
pub mod daemon;
pub mod dd;
pub mod help;
pub mod info;
pub mod inspect;
pub mod io;
pub mod man;
pub mod map;
pub mod measure;
mod new_image;
pub mod ova;
pub mod parser;
pub mod rebase;
pub mod rescue;
pub mod resize;
pub mod share;
pub mod sizes;
pub mod snapshot;
pub mod untrusted;
pub mod work;

use crate::invocation::{Invocation, Persona, has_name_of_qemu};
use crate::output::{Console, Failure};
use clap::ArgMatches;
use cowshed_storage::rt;

/// A verb of the command line.
pub struct Verb {
    /// Its word.
    pub name: &'static str,
    /// One line for lists.
    pub about: &'static str,
    /// The operands, for the usage line.
    pub operands: &'static str,
    /// A paragraph or more for its own help.
    pub details: &'static str,
    /// Command lines with their effects, written with `cowshed` as program name.
    pub examples: &'static str,
    /// False for verbs that only our own name has.
    pub in_qemu_img: bool,
    /// Adds its arguments.
    pub arguments: fn(clap::Command) -> clap::Command,
    /// Does the work; the exit code.
    pub run: fn(&ArgMatches, &mut Console) -> Result<u8, Failure>,
}

/// Every verb, in the order of the help.
pub const COMMANDS: &[Verb] = &[
    create::VERB,
    info::VERB,
    inspect::VERB,
    map::VERB,
    check::VERB,
    rescue::VERB,
    compare::VERB,
    convert::VERB,
    measure::VERB,
    resize::VERB,
    snapshot::VERB,
    amend::VERB,
    bitmap::VERB,
    commit::VERB,
    rebase::VERB,
    dd::VERB,
    ova::VERB,
    bench::VERB,
    io::VERB,
    daemon::serve::VERB,
    share::VERB,
    daemon::mount::VERB,
    daemon::mount::UMOUNT,
    daemon::top::VERB,
    completions::VERB,
    man::VERB,
    help::VERB,
];

pub use daemon::TOOLS;

/// A name of the program, with completions and manual pages of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Program {
    #[default]
    Cowshed,
    QemuImg,
    QemuIo,
    QemuNbd,
    QemuStorageDaemon,
}

impl Program {
    pub fn name(self) -> &'static str {
        match self {
            Program::Cowshed => "cowshed",
            Program::QemuImg => "qemu-img",
            Program::QemuIo => "qemu-io",
            Program::QemuNbd => "qemu-nbd",
            Program::QemuStorageDaemon => "qemu-storage-daemon",
        }
    }

    /// The command line of that name.
    pub fn command(self) -> clap::Command {
        match self {
            Program::Cowshed => parser::root(Persona::Cowshed),
            Program::QemuImg => parser::root(Persona::QemuImg),
            _ => match TOOLS.iter().find(|tool| tool.name == self.name()) {
                Some(tool) => parser::tool(tool),
                None => parser::root(Persona::Cowshed),
            },
        }
    }
}

/// Runs the command line; the exit code.
pub fn dispatch(invocation: &Invocation, console: &mut Console) -> u8 {
    let result = parse(invocation, console).and_then(|parsed| match parsed {
        Some((verb, matches)) => {
            let definitions = matches.try_get_many::<String>(arguments::DEFINITIONS).ok().flatten();
            let definitions: Vec<String> = definitions.into_iter().flatten().cloned().collect();
            if daemon::show_object_help(&definitions, console)? {
                return Ok(0);
            }
            rt::prepare()?;
            // qemu-img makes them while it reads its options.
            if invocation.persona != Persona::Cowshed {
                arguments::objects(&definitions)?;
            }
            (verb.run)(&matches, console)
        }
        None => Ok(0),
    });
    match result {
        Ok(code) => code,
        Err(failure) => report(&failure, invocation, console),
    }
}

/// `None`: the parser has answered by itself (help, version).
fn parse(invocation: &Invocation, console: &mut Console) -> Result<Option<(&'static Verb, ArgMatches)>, Failure> {
    if invocation.persona == Persona::QemuImg && help::answer_as_qemu_img(&invocation.arguments, console) {
        return Ok(None);
    }
    if let Persona::Tool(name) = invocation.persona {
        return parse_tool(name, invocation, console);
    }
    if invocation.persona == Persona::Cowshed && invocation.arguments.is_empty() {
        let help = parser::root(invocation.persona).render_help();
        match console.colour() {
            true => console.print(help.ansi()),
            false => console.print(help),
        }
        return Ok(None);
    }
    let arguments = parser::shield_negative_size(&invocation.arguments);
    let argv = || std::iter::once(invocation.persona.name()).chain(arguments.iter().map(String::as_str));
    // A word that resembles the verb nearly always is it.
    if let Some(word) = verb_word(&arguments)
        && let Ok(mut matches) = parser::root_for(invocation.persona, word).try_get_matches_from_mut(argv())
        && let Some((verb, matches)) = chosen(&mut matches).filter(|(verb, _)| verb.name == word)
    {
        return Ok(Some((verb, matches)));
    }
    let mut root = parser::root(invocation.persona);
    match root.try_get_matches_from_mut(argv()) {
        Ok(mut matches) => chosen(&mut matches).map(Some).ok_or_else(|| Failure::usage("Not enough arguments")),
        Err(error) => parser::explain(&error, &root, &arguments, console).map(|()| None),
    }
}

/// The verb on the command line, with its arguments.
fn chosen(matches: &mut ArgMatches) -> Option<(&'static Verb, ArgMatches)> {
    let (word, matches) = matches.remove_subcommand()?;
    COMMANDS.iter().find(|verb| verb.name == word).map(|verb| (verb, matches))
}

/// The command line of a program that has no verbs.
fn parse_tool(
    name: &str,
    invocation: &Invocation,
    console: &mut Console,
) -> Result<Option<(&'static Verb, ArgMatches)>, Failure> {
    let Some(tool) = TOOLS.iter().find(|tool| tool.name == name) else { return Ok(None) };
    let mut root = parser::tool(tool);
    match root.try_get_matches_from_mut(std::iter::once(name).chain(invocation.arguments.iter().map(String::as_str))) {
        Ok(matches) => Ok(Some((tool, matches))),
        Err(error) => parser::explain(&error, &root, &invocation.arguments, console).map(|()| None),
    }
}

/// The first argument that is neither an option of the program itself nor such an option's value.
fn verb_word(arguments: &[String]) -> Option<&str> {
    let mut arguments = arguments.iter().map(String::as_str);
    while let Some(argument) = arguments.next() {
        match argument {
            "-T" | "--trace" => drop(arguments.next()),
            option if option.starts_with('-') => {}
            word => return Some(word),
        }
    }
    None
}

fn report(failure: &Failure, invocation: &Invocation, console: &mut Console) -> u8 {
    let verb = verb_word(&invocation.arguments).filter(|word| COMMANDS.iter().any(|verb| verb.name == *word));
    let program = invocation.persona.name();
    let verb = verb.map(|verb| format!(" {verb}")).unwrap_or_default();
    match failure.text(invocation.persona) {
        "" => {}
        text if failure.names_verb && invocation.persona == Persona::QemuImg => {
            console.error_text(&format!("{program}{verb}: {text}\n"));
        }
        text => console.complain(text),
    }
    match invocation.persona {
        _ if !failure.usage => {}
        Persona::Tool("qemu-io" | "qemu-storage-daemon") => {}
        Persona::Tool("qemu-nbd") => {
            let called = std::env::args().next().filter(|_| has_name_of_qemu()).unwrap_or_else(|| program.to_owned());
            let hint = format!("Try `{called} --help' for more information.");
            // As QEMU's: its parser of options puts the program's name in front.
            match failure.text(invocation.persona) {
                daemon::nbd::WRONG_COUNT => console.error_text(&format!("{hint}\n")),
                _ => console.complain(hint),
            }
        }
        _ => console.error_text(&format!("Try '{program}{verb} --help' for more information\n")),
    }
    failure.code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verb_of(arguments: &[&str]) -> Option<&'static str> {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let invocation = Invocation { persona: Persona::QemuImg, arguments };
        let parsed = parse(&invocation, &mut Console::new(Persona::QemuImg));
        parsed.ok().flatten().map(|(verb, _)| verb.name)
    }

    #[test]
    fn verb_is_found_behind_a_similar_word() {
        assert_eq!(verb_of(&["info", "a"]), Some("info"));
        assert_eq!(verb_of(&["-T", "create", "info", "a"]), Some("info"));
        // A short form of --trace, whose value is the first word.
        assert_eq!(verb_of(&["--tra", "create", "info", "a"]), Some("info"));
        assert_eq!(verb_of(&["--tra=x", "info", "create"]), Some("info"));
    }
}
