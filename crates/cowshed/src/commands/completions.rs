// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `completions`: scripts that let a shell complete our command lines.

use super::{Verb, parser};
use crate::invocation::Persona;
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches};
use clap_complete::Shell;

pub const VERB: Verb = Verb {
    name: "completions",
    about: "Print a completion script for a shell",
    operands: "SHELL",
    details: "Put the script where the shell looks for completions.",
    examples: "  cowshed completions bash > /usr/share/bash-completion/completions/cowshed
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
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = CompletionsArgs::from_arg_matches(matches)?;
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut parser::root(Persona::Cowshed), Persona::Cowshed.name(), &mut script);
    console.print(String::from_utf8_lossy(&script));
    Ok(0)
}
