// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The name by which the program was called, and its consequences.

use crate::commands::TOOLS;
use cowshed_types::text_of_name;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// The version of qemu-img whose options and output we follow; `qemu-img --version` reports it, because scripts
/// choose their options by that number.
pub const QEMU_IMG_LEVEL: &str = "11.1.0";

/// The tool whose manners apply: the words of the output, never the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persona {
    /// Our own name: made for a person at a terminal.
    Cowshed,
    /// `qemu-img`: the text that scripts parse.
    QemuImg,
    /// Another program of QEMU, by its name: one of [`crate::commands::TOOLS`].
    Tool(&'static str),
}

impl Persona {
    /// The name that starts each message.
    pub fn name(self) -> &'static str {
        match self {
            Persona::Cowshed => "cowshed",
            Persona::QemuImg => "qemu-img",
            Persona::Tool(name) => name,
        }
    }
}

/// True where the process runs under the name of a program of QEMU; false for `cowshed qemu-nbd`.
pub fn has_name_of_qemu() -> bool {
    let program = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
    name.is_some_and(|name| TOOLS.iter().any(|tool| is_called(&name, tool.name)))
}

/// True of a program's name, also with the endings of diversions, alternatives and versions: `qemu-img.distrib`,
/// `qemu-img-11`.
fn is_called(name: &str, program: &str) -> bool {
    name.strip_prefix(program).is_some_and(|rest| rest.is_empty() || rest.starts_with(['-', '.']))
}

/// The command line, taken apart as far as the name decides.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The tool whose manners apply.
    pub persona: Persona,
    /// The arguments after the program's name.
    pub arguments: Vec<String>,
}

impl Invocation {
    /// Takes the whole argument vector, program name first. `cowshed qemu-img ARGS` (or `cowshed img ARGS`) is `qemu-img ARGS`,
    /// `cowshed qemu-nbd ARGS` is `qemu-nbd ARGS`.
    /// Arguments that are not UTF-8 become text by [`cowshed_types::text_of_name`].
    pub fn from_argv(argv: impl IntoIterator<Item = std::ffi::OsString>) -> Self {
        let mut argv = argv.into_iter();
        let program = argv.next().unwrap_or_default();
        let name = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
        let tool = |name: &str| TOOLS.iter().find(|tool| tool.name == name).map(|tool| Persona::Tool(tool.name));
        let mut persona = match name.as_deref() {
            Some(name) if is_called(name, "qemu-img") => Persona::QemuImg,
            Some(name) => {
                let called = TOOLS.iter().find(|tool| is_called(name, tool.name));
                called.map_or(Persona::Cowshed, |tool| Persona::Tool(tool.name))
            }
            None => Persona::Cowshed,
        };
        let mut arguments: Vec<String> = argv.map(|argument| text_of_name(argument.as_bytes()).into_owned()).collect();
        if persona == Persona::Cowshed && arguments.first().is_some_and(|first| first == "img" || first == "qemu-img") {
            arguments.remove(0);
            persona = Persona::QemuImg;
        } else if persona == Persona::Cowshed
            && let Some(tool) = arguments.first().and_then(|first| tool(first))
        {
            arguments.remove(0);
            persona = tool;
        }
        Self { persona, arguments }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn invocation(argv: &[&str]) -> Invocation {
        Invocation::from_argv(argv.iter().map(Into::into))
    }

    #[test]
    fn the_name_decides_the_manners() {
        assert_eq!(invocation(&["/usr/bin/qemu-img", "info"]).persona, Persona::QemuImg);
        assert_eq!(invocation(&["/usr/bin/qemu-img.distrib", "info"]).persona, Persona::QemuImg);
        assert_eq!(invocation(&["qemu-nbd-11.1", "a"]).persona, Persona::Tool("qemu-nbd"));
        assert_eq!(invocation(&["qemu-imgx", "info"]).persona, Persona::Cowshed);
        assert_eq!(invocation(&["./cowshed", "info"]).persona, Persona::Cowshed);
        assert_eq!(invocation(&[]).persona, Persona::Cowshed);
        for name in ["img", "qemu-img"] {
            let nested = invocation(&["cowshed", name, "info", "a"]);
            assert_eq!(nested.persona, Persona::QemuImg);
            assert_eq!(nested.arguments, ["info", "a"]);
        }
        assert_eq!(invocation(&["/usr/bin/qemu-nbd", "-t", "a"]).persona, Persona::Tool("qemu-nbd"));
        let nested = invocation(&["cowshed", "qemu-storage-daemon", "--daemonize"]);
        assert_eq!(nested.persona, Persona::Tool("qemu-storage-daemon"));
        assert_eq!(nested.arguments, ["--daemonize"]);
    }
}
