// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `qemu-storage-daemon`: nodes, exports and monitors, all from the command line.

use super::super::Verb;
use super::{BoundArgs, LogFormat, Running, default_queues};
use crate::output::{Console, Failure};
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use cowshed_daemon::{Chardevs, Setup, Step};

pub const VERB: Verb = Verb {
    name: "qemu-storage-daemon",
    about: "Serve what the command line says, with the options of QEMU's storage daemon",
    operands: "",
    details: "The options are carried out in the order given. See docs/daemon.md for the commands of its monitors.",
    examples: "  qemu-storage-daemon \\
      --blockdev file,node-name=f,filename=disk.qcow2 --blockdev qcow2,node-name=disk,file=f \\
      --nbd-server addr.type=unix,addr.path=nbd.sock --export nbd,id=e,node-name=disk,writable=on \\
      --chardev socket,id=m,path=qmp.sock,server=on,wait=off --monitor m
      Serves disk.qcow2 over NBD, with a QMP monitor.",
    in_qemu_img: false,
    arguments,
    run,
};

/// Options that are steps: each may come several times, and their order counts.
const STEPS: &[(&str, &str, &str)] = &[
    ("blockdev", "[driver=]DRIVER,node-name=NAME,…", "Add a block node"),
    ("chardev", "OPTIONS", "Say where a monitor can be: socket,id=ID,path=PATH,server=on,wait=off or stdio,id=ID"),
    ("export", "[type=]TYPE,id=ID,node-name=NAME,…", "Export a node"),
    ("monitor", "[chardev=]ID,…", "Start a QMP monitor on a character device"),
    ("nbd-server", "addr.type=TYPE,…", "Start the NBD server"),
    ("object", "TYPE,id=ID,…", "Create an object"),
];

fn arguments(command: clap::Command) -> clap::Command {
    let step = |(name, value, help): &(&'static str, &'static str, &'static str)| {
        Arg::new(*name).long(*name).value_name(*value).action(ArgAction::Append).help(*help)
    };
    BoundArgs::augment_args(command).args(STEPS.iter().map(step)).args([
        Arg::new("daemonize").long("daemonize").action(ArgAction::SetTrue).help("Go into the background once it is up"),
        Arg::new("pidfile").long("pidfile").value_name("PATH").help("Write the process's number to a file"),
        Arg::new("metadata-budget")
            .long("metadata-budget")
            .value_name("SIZE")
            .help("Memory that the metadata of all images may take, at least 1M [default: 256M]"),
        Arg::new("trace")
            .short('T')
            .long("trace")
            .value_name("TRACE")
            .action(ArgAction::Append)
            .help("Accepted without effect"),
    ])
}

/// Prints the help that `--object` and `--chardev` ask for with `help`; the exit code when one did.
fn show_help(matches: &ArgMatches, console: &mut Console) -> Result<Option<u8>, Failure> {
    let values = |name: &str| matches.get_many::<String>(name).into_iter().flatten();
    if let Some((help, code)) = values("chardev").find_map(|text| cowshed_daemon::chardev_help(text)) {
        console.line(help);
        return Ok(Some(code));
    }
    Ok(super::show_object_help(values("object"), console)?.then_some(0))
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    if let Some(code) = show_help(matches, console)? {
        return Ok(code);
    }
    let bounds = BoundArgs::from_arg_matches(matches)?;
    let running = Running {
        setup: Setup {
            steps: steps(matches)?,
            queues: default_queues(),
            vhost_queues: 1,
            stop_when_idle: false,
            stop_limit: bounds.stop_limit(),
            turn_limit: cowshed_daemon::TURN_LIMIT,
            request_memory_bytes: bounds.request_memory_bytes()?,
            mount_guard: super::mount_guard(),
        },
        worded: Box::new(super::as_it_is),
        kept: None,
        background: matches.get_flag("daemonize"),
        leaves_folder: matches.get_flag("daemonize"),
        pid_frame: "cannot create PID file: ",
        pid_file: matches.get_one("pidfile").cloned(),
        takes_over: false,
        device: None,
        log: LogFormat::Text,
        log_level: "warn",
    };
    running.run(|_| ())
}

fn steps(matches: &ArgMatches) -> Result<Vec<Step>, Failure> {
    let mut given: Vec<(usize, &str, &String)> = Vec::new();
    for (name, ..) in STEPS {
        let (Some(values), Some(indices)) = (matches.get_many::<String>(name), matches.indices_of(name)) else {
            continue;
        };
        given.extend(indices.zip(values).map(|(index, value)| (index, *name, value)));
    }
    given.sort_by_key(|(index, ..)| *index);
    let mut chardevs = Chardevs::default();
    let mut steps = Vec::new();
    if let Some(size) = matches.get_one::<String>("metadata-budget") {
        steps.push(Step::metadata_budget("--metadata-budget", size)?);
    }
    for (_, name, value) in given {
        let step = match name {
            "chardev" => Step::chardev(value, &mut chardevs),
            "monitor" => Step::monitor(value, &chardevs),
            "blockdev" => Step::blockdev(value),
            "export" => Step::export(value),
            "nbd-server" => Step::nbd_server(value),
            _ => Step::object(value),
        };
        // A wrong option fails in its turn, behind the steps before it.
        let step = step.unwrap_or_else(|error| Step::refused(&format!("--{name} {value}"), error));
        let is_last = step.is_refused();
        steps.push(step);
        if is_last {
            break;
        }
    }
    if matches.get_flag("daemonize") {
        return Ok(steps.into_iter().map(Step::anchored).collect());
    }
    Ok(steps)
}
