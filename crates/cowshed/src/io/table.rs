// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The commands of the shell: one entry each.

use super::arguments::Arguments;
use super::outcome::{CommandFailed, Done};
use super::{Shell, background, faults, image, open, reopen, transfer, zone};
use std::pin::Pin;

/// Carries a command out.
pub type CommandFn = for<'a> fn(&'a mut Shell, Arguments) -> Pin<Box<dyn Future<Output = Done> + 'a>>;

/// A command.
pub struct ShellCommand {
    /// Its word.
    pub name: &'static str,
    /// A shorter word, "" for none.
    pub short: &'static str,
    /// The fewest words behind the name.
    pub least: usize,
    /// The most words behind it; `usize::MAX` for any number.
    pub most: usize,
    /// Its flags, see [`Arguments::parse`].
    pub flags: &'static str,
    /// It works on an open image.
    pub needs_image: bool,
    /// It changes the image.
    pub writes: bool,
    /// The words behind the name in its usage.
    pub syntax: &'static str,
    /// One line of help.
    pub about: &'static str,
    /// More lines of help.
    pub details: &'static [&'static str],
    /// Does it.
    pub run: CommandFn,
}

const ANY: usize = usize::MAX;

const BASE: ShellCommand = ShellCommand {
    name: "",
    short: "",
    least: 0,
    most: 0,
    flags: "",
    needs_image: true,
    writes: false,
    syntax: "",
    about: "",
    details: &[],
    run: |_, _| Box::pin(async { Ok(()) }),
};

const REPORT_FLAGS: &str =
    " -C       the report in a form for programs: bytes, requests, time, bytes and requests a second
 -q       no report";

const READ: &str = " -P BYTE  check that every byte is this one
 -v       print the data
 -r       accepted, without effect";

const WRITE: &str = " -P BYTE  write this byte (default: 0xcd)
 -f       durable when it returns
 -r       accepted, without effect";

const ZERO: &str = " -z       write zeroes without transferring them
 -u       with -z: the space may be given back";

const VM_STATE: &str = " -b       the state of a virtual machine, behind the disk";

const BACKGROUND: &str = " The command succeeds once the request is under way; errors and wrong data are only printed.
 -i       only say so: for other programs' statistics";

const ZONES: &str = " Only zoned block devices have zones, and no driver here speaks to one: this always fails.";

/// All of them, in the order of `help`.
pub const COMMANDS: &[ShellCommand] = &[
    ShellCommand {
        name: "abort",
        needs_image: false,
        about: "simulate a program crash using abort(3)",
        run: |shell, _| Box::pin(image::abort(shell)),
        ..BASE
    },
    ShellCommand {
        name: "aio_discard",
        least: 2,
        most: ANY,
        flags: "Cq",
        writes: true,
        syntax: "[-Cq] off len",
        about: "asynchronously discards a number of bytes",
        details: &[REPORT_FLAGS],
        run: |shell, arguments| Box::pin(background::discard(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "aio_flush",
        about: "completes all outstanding aio requests",
        run: |shell, _| Box::pin(background::flush(shell)),
        ..BASE
    },
    ShellCommand {
        name: "aio_read",
        least: 2,
        most: ANY,
        flags: "CiP:qrv",
        syntax: "[-Ciqrv] [-P pattern] off len [len..]",
        about: "asynchronously reads a number of bytes",
        details: &[READ, REPORT_FLAGS, BACKGROUND],
        run: |shell, arguments| Box::pin(background::read(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "aio_write",
        least: 2,
        most: ANY,
        flags: "CfiP:qruz",
        writes: true,
        syntax: "[-Cfiqruz] [-P pattern] off len [len..]",
        about: "asynchronously writes a number of bytes",
        details: &[WRITE, ZERO, REPORT_FLAGS, BACKGROUND],
        run: |shell, arguments| Box::pin(background::write(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "alloc",
        short: "a",
        least: 1,
        most: 2,
        syntax: "offset [count]",
        about: "checks if offset is allocated in the file",
        run: |shell, arguments| Box::pin(image::alloc(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "break",
        least: 2,
        most: 2,
        syntax: "event tag",
        about: "sets a breakpoint on event and tags the stopped request as tag",
        run: |shell, arguments| Box::pin(faults::set_break(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "close",
        short: "c",
        about: "close the current open file",
        run: |shell, _| Box::pin(open::close(shell)),
        ..BASE
    },
    ShellCommand {
        name: "discard",
        short: "d",
        least: 2,
        most: ANY,
        flags: "Cq",
        writes: true,
        syntax: "[-Cq] off len",
        about: "discards a number of bytes at a specified offset",
        details: &[REPORT_FLAGS],
        run: |shell, arguments| Box::pin(transfer::discard(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "flush",
        short: "f",
        about: "flush all in-core file state to disk",
        run: |shell, _| Box::pin(image::flush(shell)),
        ..BASE
    },
    ShellCommand {
        name: "help",
        short: "?",
        most: 1,
        needs_image: false,
        syntax: "[command]",
        about: "help for one or all commands",
        run: |shell, arguments| Box::pin(help(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "info",
        short: "i",
        about: "prints information about the current file",
        run: |shell, _| Box::pin(image::info(shell)),
        ..BASE
    },
    ShellCommand {
        name: "length",
        short: "l",
        about: "gets the length of the current file",
        run: |shell, _| Box::pin(image::length(shell)),
        ..BASE
    },
    ShellCommand {
        name: "map",
        about: "prints the allocated areas of a file",
        run: |shell, _| Box::pin(image::map(shell)),
        ..BASE
    },
    ShellCommand {
        name: "open",
        short: "o",
        least: 1,
        most: ANY,
        flags: "rsCnkUi:t:d:o:",
        needs_image: false,
        syntax: "[-rsCnkU] [-t cache] [-d discard] [-o options] [path]",
        about: "open the file specified by path",
        details: &[" -r  for reading
 -s  with a temporary overlay that takes the writes
 -n  the same as -t none
 -U  share the image with others that write to it; needs -r
 -k  the same as -i native
 -i  the engine of the I/O: threads, native, io_uring
 -t  cache mode
 -d  discards: ignore (off) or unmap (on)
 -o  options of the driver: key=value,key=value
 -C  keep what is read from the backing file"],
        run: |shell, arguments| Box::pin(open::open_command(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "quit",
        short: "q",
        most: ANY,
        needs_image: false,
        about: "exit the program",
        run: |shell, _| Box::pin(image::quit(shell)),
        ..BASE
    },
    ShellCommand {
        name: "read",
        short: "r",
        least: 2,
        most: ANY,
        flags: "bCl:pP:qrs:v",
        syntax: "[-abCqrv] [-P pattern [-s off] [-l len]] off len",
        about: "reads a number of bytes at a specified offset",
        details: &[
            READ,
            " -s OFF   with -P: skip so many bytes of what was read
 -l LEN   with -P: check only so many bytes",
            VM_STATE,
            REPORT_FLAGS,
        ],
        run: |shell, arguments| Box::pin(transfer::read(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "readv",
        least: 2,
        most: ANY,
        flags: "CP:qrv",
        syntax: "[-Cqrv] [-P pattern] off len [len..]",
        about: "reads a number of bytes at a specified offset",
        details: &[READ, REPORT_FLAGS],
        run: |shell, arguments| Box::pin(transfer::readv(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "remove_break",
        least: 1,
        most: 1,
        syntax: "tag",
        about: "remove a breakpoint by tag",
        run: |shell, arguments| Box::pin(faults::remove_break(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "reopen",
        most: ANY,
        flags: "rwc:o:",
        syntax: "[(-r|-w)] [-c cache] [-o options]",
        about: "reopens an image with new options",
        details: &[" -r  for reading
 -w  for writing
 -c  cache mode
 -o  options of the driver: key=value,key=value"],
        run: |shell, arguments| Box::pin(reopen::reopen(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "resume",
        least: 1,
        most: 1,
        syntax: "tag",
        about: "resumes the request tagged as tag",
        run: |shell, arguments| Box::pin(faults::resume(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "sigraise",
        least: 1,
        most: 1,
        needs_image: false,
        syntax: "signal",
        about: "raises a signal",
        run: |shell, arguments| Box::pin(image::sigraise(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "sleep",
        least: 1,
        most: 1,
        needs_image: false,
        about: "waits for the given value in milliseconds",
        run: |shell, arguments| Box::pin(image::sleep(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "truncate",
        short: "t",
        least: 1,
        most: 3,
        flags: "m:",
        writes: true,
        syntax: "[-m prealloc_mode] off",
        about: "truncates the current file at the given offset",
        run: |shell, arguments| Box::pin(image::truncate(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "wait_break",
        least: 1,
        most: 1,
        syntax: "tag",
        about: "waits for the suspension of a request",
        run: |shell, arguments| Box::pin(faults::wait_break(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "write",
        short: "w",
        least: 2,
        most: ANY,
        flags: "bcCfnpP:qrs:uz",
        writes: true,
        syntax: "[-bcCfnqruz] [-P pattern | -s source_file] off len",
        about: "writes a number of bytes at a specified offset",
        details: &[
            WRITE,
            ZERO,
            " -s FILE  write the content of this file, again and again
 -c       compressed, whole clusters
 -n       with -z: fail where that would be slow",
            VM_STATE,
            REPORT_FLAGS,
        ],
        run: |shell, arguments| Box::pin(transfer::write(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "writev",
        least: 2,
        most: ANY,
        flags: "CfP:qr",
        writes: true,
        syntax: "[-Cfqr] [-P pattern] off len [len..]",
        about: "writes a number of bytes at a specified offset",
        details: &[WRITE, REPORT_FLAGS],
        run: |shell, arguments| Box::pin(transfer::writev(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_append",
        short: "zap",
        least: 3,
        most: 4,
        flags: "p?",
        syntax: "offset len [len..]",
        about: "append write a number of bytes at a specified offset",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::append(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_close",
        short: "zc",
        least: 2,
        most: 2,
        syntax: "offset len",
        about: "close a range of zones in zone block device",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::manage(shell, "close", arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_finish",
        short: "zf",
        least: 2,
        most: 2,
        syntax: "offset len",
        about: "finish a range of zones in zone block device",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::manage(shell, "finish", arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_open",
        short: "zo",
        least: 2,
        most: 2,
        syntax: "offset len",
        about: "explicit open a range of zones in zone block device",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::manage(shell, "open", arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_report",
        short: "zrp",
        least: 2,
        most: 2,
        syntax: "offset number",
        about: "report zone information",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::report(shell, arguments)),
        ..BASE
    },
    ShellCommand {
        name: "zone_reset",
        short: "zrs",
        least: 2,
        most: 2,
        syntax: "offset len",
        about: "reset a zone write pointer in zone block device",
        details: &[ZONES],
        run: |shell, arguments| Box::pin(zone::manage(shell, "reset", arguments)),
        ..BASE
    },
];

/// The command with this name.
pub fn find(name: &str) -> Option<&'static ShellCommand> {
    COMMANDS.iter().find(|command| command.name == name || (!name.is_empty() && command.short == name))
}

impl ShellCommand {
    /// One line: the call and its effect.
    pub fn usage(&self) -> String {
        let space = if self.syntax.is_empty() { "" } else { " " };
        format!("{}{space}{} -- {}", self.name, self.syntax, self.about)
    }

    /// Checks the number of words behind `name`, the word that the user typed.
    pub fn check_count(&self, name: &str, count: usize) -> Done {
        if (self.least..=self.most).contains(&count) {
            return Ok(());
        }
        let expected = match (self.least, self.most) {
            (least, ANY) => format!("at least {least}"),
            (least, most) if least == most => format!("{least}"),
            (least, most) => format!("between {least} and {most}"),
        };
        Err(CommandFailed::plain_error(format!("bad argument count {count} to {name}, expected {expected} arguments")))
    }
}

async fn help(shell: &mut Shell, arguments: Arguments) -> Done {
    let Some(name) = arguments.operands.first() else {
        for command in COMMANDS {
            shell.console.line(command.usage());
        }
        shell.console.line("\nUse 'help commandname' for extended help.");
        return Ok(());
    };
    let command = find(name).ok_or_else(|| CommandFailed::output(format!("command {name} not found")))?;
    shell.console.line(command.usage());
    for text in command.details {
        shell.console.line(text);
    }
    Ok(())
}
