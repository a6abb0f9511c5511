// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The parser, built from the commands table, and the words of its refusals.

use super::{COMMANDS, Verb};
use crate::invocation::{Persona, QEMU_IMG_LEVEL};
use crate::output::{Console, Failure};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Command};

/// The line in front of a verb's examples.
pub const EXAMPLES: &str = "Examples:\n";

/// The whole command line of a persona.
pub fn root(persona: Persona) -> Command {
    root_with(persona, |_| true)
}

/// The command line of a persona with the arguments of the verb `word`. Other verbs have only their names: a short
/// command notices the time that all arguments take.
pub fn root_for(persona: Persona, word: &str) -> Command {
    root_with(persona, |verb| verb.name == word)
}

fn root_with(persona: Persona, is_wanted: impl Fn(&Verb) -> bool) -> Command {
    let verbs = COMMANDS.iter().filter(|verb| persona == Persona::Cowshed || verb.in_qemu_img);
    Command::new(persona.name())
        .bin_name(persona.name())
        .about("Creates, converts, inspects, checks, repairs and serves disk images: qcow2, raw, LUKS, VMDK, VDI, VHD, VHDX, qcow, QED and Parallels")
        .version(version(persona))
        .args_override_self(true)
        .infer_long_args(true)
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .subcommand_value_name("COMMAND")
        .subcommand_help_heading("Commands")
        .after_help(format!("'{} COMMAND --help' explains a command and shows examples.", persona.name()))
        .arg(
            Arg::new("trace")
                .short('T')
                .long("trace")
                .value_name("TRACE")
                .action(ArgAction::Append)
                .help("Accepted for the sake of scripts, without effect"),
        )
        .subcommands(verbs.map(|verb| match is_wanted(verb) {
            true => command(verb, persona),
            false => Command::new(verb.name),
        }))
}

/// The parser of one verb.
pub fn command(verb: &Verb, persona: Persona) -> Command {
    let ours = |text: &str| match persona {
        Persona::Cowshed | Persona::Tool(_) => text.to_owned(),
        Persona::QemuImg => text.replace("cowshed ", "qemu-img "),
    };
    let usage = format!("{} {} [OPTIONS] {}", persona.name(), verb.name, verb.operands);
    // The derived arguments bring the comments of their structs along as descriptions: ours come after them.
    let command = (verb.arguments)(Command::new(verb.name))
        .about(verb.about)
        .long_about(format!("{}.\n\n{}", verb.about, ours(verb.details)))
        .after_help(format!("{EXAMPLES}{}", ours(verb.examples)))
        .override_usage(usage.trim_end().to_owned())
        .args_override_self(true)
        .infer_long_args(true);
    let command = if persona == Persona::Cowshed { command } else { with_abbreviations(command, verb.name) };
    // As with getopt the argument after an option is its value, whatever it looks like.
    command.mut_args(|arg| match arg.is_positional() || !takes_value(&arg) {
        true => arg,
        false => arg.allow_hyphen_values(true),
    })
}

/// Long options that no program of QEMU has.
const OURS: &[&str] = &[
    "allow",
    "compression-level",
    "compression-window",
    "disk",
    "dry-run",
    "for",
    "limit",
    "lossy",
    "memory",
    "metadata-budget",
    "reflink",
    "request-memory",
    "stop-timeout",
    "time-limit",
    "undo",
    "undo-log",
    "untrusted",
    "vm-cpus",
    "vm-firmware",
    "vm-memory",
    "vm-name",
    "vm-network",
];

/// Long options that QEMU has in other verbs only.
const OURS_OF: &[(&str, &str)] =
    &[("bench", "output"), ("check", "progress"), ("convert", "force"), ("create", "force"), ("dd", "force")];

/// Long options of verbs and tools that begin alike, in the order in which QEMU's parser lists them.
const ALIKE: &[(&str, &[&str])] = &[
    ("amend", &["format", "options", "force", "object"]),
    ("bench", &["format", "cache", "count", "flush-interval", "no-drain", "native", "offset", "force-share", "object"]),
    ("bitmap", &["remove", "remove-all", "source-file", "source-format"]),
    ("check", &["format", "output", "force-share", "object"]),
    (
        "convert",
        &[
            "source-format",
            "source-cache",
            "snapshot",
            "target-format",
            "target-image-opts",
            "target-format-options",
            "target-cache",
            "target-is-zero",
            "bitmaps",
            "skip-broken-bitmaps",
            "salvage",
            "sparse-size",
            "backing",
            "backing-format",
            "parallel",
            "oob-writes",
            "progress",
            "object",
        ],
    ),
    ("create", &["options", "backing", "backing-format", "backing-unsafe", "object"]),
    ("dd", &["format", "output-format", "force-share", "object"]),
    ("info", &["format", "output", "force-share", "object"]),
    ("map", &["format", "output", "force-share", "object"]),
    (
        "measure",
        &[
            "source-format",
            "source-image-opts",
            "snapshot",
            "target-format",
            "target-format-options",
            "options",
            "size",
            "output",
            "format",
            "force-share",
            "object",
        ],
    ),
    (
        "rebase",
        &["format", "backing", "backing-format", "cache", "backing-cache", "backing-unsafe", "compress", "force-share"],
    ),
    ("snapshot", &["format", "force-share"]),
    (
        "qemu-nbd",
        &[
            "help",
            "version",
            "bind",
            "port",
            "socket",
            "offset",
            "snapshot",
            "connect",
            "disconnect",
            "list",
            "load-snapshot",
            "cache",
            "allocation-depth",
            "aio",
            "discard",
            "detect-zeroes",
            "shared",
            "format",
            "persistent",
            "verbose",
            "object",
            "description",
            "tls-creds",
            "tls-hostname",
            "tls-authz",
            "trace",
            "fork",
            "pid-file",
            "selinux-label",
            "bitmap",
            "handshake-limit",
        ],
    ),
    ("qemu-io", &["format", "cmd", "nocache", "copy-on-read", "native-aio", "cache", "force-share"]),
];

/// The long options of QEMU that `start` may mean, where it may mean several.
fn possibilities(program: &str, start: &str) -> Vec<&'static str> {
    let (_, known) = ALIKE.iter().find(|(name, _)| *name == program).copied().unwrap_or_default();
    let meant: Vec<&str> = known.iter().copied().filter(|long| long.starts_with(start)).collect();
    if meant.len() > 1 && !meant.contains(&start) { meant } else { Vec::new() }
}

/// Under a name of QEMU its long options may be cut short where only ours begin alike.
fn with_abbreviations(command: Command, verb: &str) -> Command {
    let longs: Vec<String> = command.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect();
    let is_ours = |long: &str| OURS.contains(&long) || OURS_OF.contains(&(verb, long));
    command.mut_args(|arg| {
        let Some(long) = arg.get_long().filter(|long| !is_ours(long)) else { return arg };
        let starts = |start: &str, ours: bool| {
            longs.iter().filter(|other| other.starts_with(start) && is_ours(other) == ours).count()
        };
        let begins = (1..long.len()).filter_map(|end| long.get(..end));
        let unique = begins.filter(|start| {
            starts(start, false) == 1 && starts(start, true) > 0 && !longs.iter().any(|other| other == start)
        });
        let aliases: Vec<String> = unique.map(str::to_owned).collect();
        arg.aliases(aliases)
    })
}

fn takes_value(arg: &clap::Arg) -> bool {
    // Flags that keep their places on the command line are options with no value.
    arg.get_action().takes_values() && arg.get_num_args().is_none_or(|count| count.takes_values())
}

/// The parser of a program without verbs.
pub fn tool(tool: &Verb) -> Command {
    command(tool, Persona::Tool(tool.name))
        .override_usage(format!("{} [OPTIONS] {}", tool.name, tool.operands).trim_end().to_owned())
        .version(match tool.name {
            // The only one without the word.
            "qemu-nbd" => version(Persona::QemuImg).replace("version ", ""),
            _ => version(Persona::QemuImg),
        })
}

/// The text of `--version` after the name.
fn version(persona: Persona) -> String {
    match persona {
        Persona::Cowshed | Persona::Tool(_) => env!("CARGO_PKG_VERSION").to_owned(),
        Persona::QemuImg => format!("version {QEMU_IMG_LEVEL} (Cowshed {})", env!("CARGO_PKG_VERSION")),
    }
}

/// `resize FILE -1G`: the last argument is a size even where it looks like an option.
pub fn shield_negative_size(arguments: &[String]) -> Vec<String> {
    let mut arguments = arguments.to_vec();
    let is_resize = super::verb_word(&arguments) == Some("resize");
    let last_is_size = arguments.last().is_some_and(|last| {
        let mut characters = last.chars();
        characters.next() == Some('-') && characters.next().is_some_and(|next| next.is_ascii_digit())
    });
    if is_resize && last_is_size && !arguments.iter().any(|argument| argument == "--") {
        arguments.insert(arguments.len() - 1, "--".to_owned());
    }
    arguments
}

/// Prints help and version; turns a mistake into one line in getopt's words.
pub fn explain(
    error: &clap::Error,
    root: &Command,
    arguments: &[String],
    console: &mut Console,
) -> Result<(), Failure> {
    let argument = || match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.clone(),
        Some(ContextValue::Strings(arguments)) => arguments.join(", "),
        _ => String::new(),
    };
    let value = || context(error, ContextKind::InvalidValue);
    // `-r ''` and `--repair=` have a value.
    let is_empty = |word: &String| word.is_empty() || (word.starts_with("--") && word.ends_with('='));
    let is_missing = value().is_empty() && !arguments.iter().any(is_empty);
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let text = match console.colour() {
                true => error.render().ansi().to_string(),
                false => error.render().to_string(),
            };
            console.print(text);
            Ok(())
        }
        ErrorKind::InvalidSubcommand => {
            let word = context(error, ContextKind::InvalidSubcommand);
            Err(Failure::usage(format!("Command not found: {word}{}", suggestion(error, console))))
        }
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            Err(Failure::usage("Not enough arguments"))
        }
        ErrorKind::UnknownArgument if console.persona == Persona::Cowshed => {
            Err(Failure::usage(format!("unrecognized option '{}'{}", argument(), suggestion(error, console))))
        }
        ErrorKind::UnknownArgument
            if console.persona == Persona::Tool("qemu-storage-daemon") && !argument().starts_with('-') =>
        {
            Err(Failure::new(format!("{}: Unexpected argument", argument())))
        }
        ErrorKind::UnknownArgument => Err(of_getopt(match argument().strip_prefix('-') {
            Some(short) if !short.starts_with('-') => {
                format!("invalid option -- '{}'", short.chars().next().unwrap_or('-'))
            }
            _ => {
                // With its value, as in the argument.
                let option = argument();
                let start = format!("{option}=");
                let given = arguments.iter().find(|word| word.starts_with(&start)).cloned();
                let program = match console.persona {
                    Persona::Tool(name) => name,
                    _ => super::verb_word(arguments).unwrap_or_default(),
                };
                let meant = possibilities(program, option.trim_start_matches('-'));
                let given = given.unwrap_or(option);
                match meant.iter().map(|long| format!(" '--{long}'")).collect::<String>() {
                    none if none.is_empty() => format!("unrecognized option '{given}'"),
                    meant => format!("option '{given}' is ambiguous; possibilities:{meant}"),
                }
            }
        })),
        ErrorKind::InvalidValue if is_missing && console.persona == Persona::Cowshed => {
            Err(Failure::usage(format!("the option '{}' requires an argument", argument())))
        }
        // The value is missing at the end of the command line.
        ErrorKind::InvalidValue if is_missing => Err(of_getopt(match arguments.last() {
            Some(last) if last.starts_with("--") => {
                // In full, however it is cut short.
                let long = argument();
                let long = long.split([' ', '=']).next().filter(|long| long.starts_with("--")).unwrap_or(last);
                format!("option '{long}' requires an argument")
            }
            last => {
                let short = last.and_then(|last| last.chars().last()).unwrap_or('-');
                format!("option requires an argument -- '{short}'")
            }
        })),
        ErrorKind::InvalidValue => Err(Failure::usage(invalid_value(error, root, &argument(), &value()))),
        ErrorKind::TooManyValues if console.persona != Persona::Cowshed => {
            let long = argument();
            let long = long.split(['=', ' ']).next().unwrap_or_default();
            Err(of_getopt(format!("option '{long}' doesn't allow an argument")))
        }
        ErrorKind::TooManyValues => Err(Failure::usage(format!("the option '{}' takes no argument", argument()))),
        ErrorKind::MissingRequiredArgument => {
            Err(Failure::usage(format!("the following required arguments were not provided: {}", argument())))
        }
        _ => {
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default();
            Err(Failure::usage(line.strip_prefix("error: ").unwrap_or(line).to_owned()))
        }
    }
}

/// A complaint of the parser of options, in getopt's form.
fn of_getopt(message: String) -> Failure {
    Failure { names_verb: true, ..Failure::usage(message) }
}

fn context(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    }
}

fn suggestion(error: &clap::Error, console: &Console) -> String {
    let suggested = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand].into_iter().find_map(|kind| {
        match error.get(kind) {
            Some(ContextValue::String(text)) => Some(text.clone()),
            // The parser puts the likeliest last.
            Some(ContextValue::Strings(texts)) => texts.last().cloned(),
            _ => None,
        }
    });
    match suggested {
        Some(text) if console.persona != Persona::QemuImg => format!(" (did you mean '{text}'?)"),
        _ => String::new(),
    }
}

/// `--output expects 'human' or 'json', not 'xml'`, in QEMU 11's words.
fn invalid_value(error: &clap::Error, root: &Command, argument: &str, value: &str) -> String {
    let allowed = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(allowed)) => {
            allowed.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" or ")
        }
        _ => "another value".to_owned(),
    };
    let long = argument.split([' ', '=']).next().unwrap_or(argument);
    let short = root.get_subcommands().flat_map(Command::get_arguments).find_map(|known| {
        let is_it = known.get_long().is_some_and(|name| long.strip_prefix("--") == Some(name));
        known.get_short().filter(|_| is_it)
    });
    match short {
        Some(short) => format!("{long} (-{short}) expects {allowed}, not '{value}'"),
        None => format!("{long} expects {allowed}, not '{value}'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_options_of_qemu_count_for_abbreviations_under_its_names() {
        let parse = |persona: Persona, line: &str| {
            let verb = line.split(' ').next().unwrap_or_default();
            let words = std::iter::once("program").chain(line.split(' '));
            root_for(persona, verb).try_get_matches_from(words).map_err(|error| error.kind())
        };
        for line in [
            "create --f=qcow2 a 1M",
            "create --for qcow2 a 1M",
            "bench --a threads a",
            "bitmap --a a b",
            "compare --a raw a b",
            "convert --com a b",
            "convert --forc a b",
            "convert --r 1M a b",
            "dd --forc if=a of=b",
            "info --l a",
            "info --limi a",
            "snapshot --a one a",
            "snapshot --li a",
        ] {
            assert!(parse(Persona::QemuImg, line).is_ok(), "{line}");
            assert!(parse(Persona::Cowshed, line).is_err(), "{line}");
        }
        // These two are options of ours in full.
        let convert = parse(Persona::QemuImg, "convert --for azure a b").expect("the platform");
        let (_, convert) = convert.subcommand().expect("a verb");
        assert!(!convert.get_flag("force_share"));
        for line in ["create --b a 1M", "convert --s raw a b"] {
            assert_eq!(parse(Persona::QemuImg, line).expect_err(line), ErrorKind::UnknownArgument, "{line}");
        }
    }
}
