// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `completions`: scripts that let a shell complete our command lines.

use super::arguments::CACHE_MODES;
use super::{Program, Verb};
use crate::output::{Console, Failure};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};
use clap_complete::Shell;
use cowshed_create::schema::options_of;
use cowshed_image::DRIVERS;
use cowshed_image::options::DriverKind;

pub const VERB: Verb = Verb {
    name: "completions",
    about: "Print a completion script for a shell",
    operands: "SHELL",
    details: "Put the script where the shell looks for completions. It also knows the values of -f, -O, -t, -T and -o: formats, \
              cache modes, and the options of new images.",
    examples: "  cowshed completions bash > /usr/share/bash-completion/completions/cowshed
  cowshed completions bash --program qemu-img > ~/.local/share/bash-completion/completions/qemu-img
  cowshed completions zsh > /usr/share/zsh/site-functions/_cowshed
  cowshed completions fish > ~/.config/fish/completions/cowshed.fish",
    in_qemu_img: false,
    arguments: CompletionsArgs::augment_args,
    run,
};

#[derive(Args, Clone, Debug)]
struct CompletionsArgs {
    /// The shell
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
    /// The name that the shell completes for
    #[arg(long, value_enum, default_value_t, value_name = "NAME")]
    program: Program,
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = CompletionsArgs::from_arg_matches(matches)?;
    let mut script = Vec::new();
    let mut command = with_values(args.program.command());
    clap_complete::generate(args.shell, &mut command, args.program.name(), &mut script);
    let mut text = String::from_utf8_lossy(&script).into_owned();
    if args.shell == Shell::Bash {
        // The generator takes the hyphen of a program's name for the border of a command, but only in half of the script.
        let (half, whole) = (args.program.name().replace('-', "__subcmd__"), args.program.name().replace('-', "__"));
        text = text.replace(&half, &whole);
    }
    console.print(text);
    Ok(0)
}

/// The command line with the values that options take. Only completions have them: the verbs refuse wrong values in QEMU's words.
fn with_values(command: Command) -> Command {
    let command = command.mut_args(|arg| match values(&arg) {
        Some(values) => arg.value_parser(PossibleValuesParser::new(values)),
        None => arg,
    });
    command.mut_subcommands(with_values)
}

/// The possible values of an option, by the name of its value.
fn values(arg: &Arg) -> Option<Vec<String>> {
    let name = arg.get_value_names()?.first()?.as_str();
    let texts = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
    if name.ends_with("FMT_OPTS") {
        return Some(options_of("qcow2")?.iter().map(|option| format!("{}=", option.name)).collect());
    }
    if name.ends_with("FMT") || (name == "FORMAT" && arg.get_short() == Some('f')) {
        let is_new = arg.get_short() == Some('O');
        let formats = DRIVERS.schemas().filter(|schema| schema.kind == DriverKind::Format).map(|schema| schema.name);
        let formats = formats.filter(|name| !is_new || options_of(name).is_some());
        return texts(&formats.collect::<Vec<_>>());
    }
    let is_cache =
        name.contains("CACHE") || arg.get_help().is_some_and(|help| help.to_string().starts_with("Cache mode"));
    is_cache.then(|| texts(CACHE_MODES))?
}
