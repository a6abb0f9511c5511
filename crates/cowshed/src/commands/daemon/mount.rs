// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `mount`: an image's disk as a file. `umount`: the end of that.

use super::super::Verb;
use super::super::arguments::FaultArgs;
use super::super::untrusted::PolicyArgs;
use super::{BoundArgs, LogFormat, Running, mount_guard, queues};
use crate::output::{Console, Failure};
use clap::{ArgMatches, Args, FromArgMatches, ValueEnum};
use cowshed_daemon::{Drive, MonitorAddress, Setup, Step};
use cowshed_storage::{FileIdentity, path_of_text};
use cowshed_types::{Error, ErrorKind};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

pub const VERB: Verb = Verb {
    name: "mount",
    about: "Show an image's disk as a file",
    operands: "IMAGE FILE",
    details: "FILE must exist, and shows the bytes of the disk until it is unmounted (cowshed umount FILE). Programs read and write it as a raw \
              image. A process in the background serves it. It flushes and closes the image when FILE is unmounted, and FILE is unmounted when that process \
              ends, in whatever way.\n\n\
              Users need no rights of root: fusermount3 (package fuse3) mounts for them. See docs/fuse.md.",
    examples: "  touch disk.raw && cowshed mount disk.qcow2 disk.raw
      For reading: fdisk -l disk.raw, dd if=disk.raw, mount -o loop,ro disk.raw …
  cowshed mount --writable disk.qcow2 disk.raw
      For writing, too.
  cowshed mount --snapshot before-upgrade disk.qcow2 disk.raw
      The disk as an internal snapshot has it.
  cowshed mount --partition 2 disk.qcow2 part.raw && mount -o loop,ro part.raw /mnt
      The file system of the second partition.",
    in_qemu_img: false,
    arguments,
    run,
};

pub const UMOUNT: Verb = Verb {
    name: "umount",
    about: "Unmount a file that `mount`, or an export of type fuse, shows",
    operands: "FILE",
    details: "Written data is synced before. When the command returns, the process that `mount` has started has closed the image. While a program has FILE open, the \
              command is refused. With --lazy nothing is waited for, and the process that serves FILE goes on until programs have closed it.",
    examples: "  cowshed umount disk.raw",
    in_qemu_img: false,
    arguments: UmountArgs::augment_args,
    run: unmount,
};

/// So long `umount` waits for the image to be closed. Another mount namespace may have the file still.
const CLOSING_LIMIT: Duration = Duration::from_secs(60);

/// A disk that syncs for longer may never answer, and `umount` says so.
const SYNC_NOTICE: Duration = Duration::from_secs(5);

/// The users that may reach the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Others {
    /// All that its mode lets, where the system permits it
    #[default]
    Auto,
    /// All that its mode lets
    On,
    /// The user of this process alone
    Off,
}

#[derive(Args, Clone, Debug)]
struct MountArgs {
    /// Format of IMAGE [default: probed]
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// IMAGE is an option string (driver=…,file.filename=…)
    #[arg(long)]
    image_opts: bool,
    /// Let programs write
    #[arg(short, long)]
    writable: bool,
    /// Writes behind the end make the disk longer
    #[arg(long, requires = "writable")]
    growable: bool,
    /// Show an internal snapshot, for reading: an ID or name, snapshot.id=ID or snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "ID", conflicts_with = "writable")]
    snapshot: Option<String>,
    /// Show one partition of the disk: 1 to 4 of an MBR, from 5 on its logical ones, or those of a GPT
    #[arg(short = 'P', long, value_name = "N", conflicts_with = "growable")]
    partition: Option<u32>,
    /// Users that may reach FILE
    #[arg(long, value_enum, default_value_t, value_name = "auto|on|off")]
    allow_other: Others,
    /// Cache mode of IMAGE: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE")]
    cache: Option<String>,
    /// Stay in the foreground; Ctrl-C unmounts
    #[arg(long)]
    foreground: bool,
    /// Threads that serve [default: the number of processors, at most 4]
    #[arg(long, value_name = "N")]
    queues: Option<usize>,
    /// Start a QMP monitor on a Unix socket
    #[arg(long, value_name = "PATH")]
    monitor: Option<String>,
    /// Write the process's number to a file
    #[arg(long, value_name = "PATH")]
    pidfile: Option<String>,
    /// Define an object, for example the secret of an encrypted image
    #[arg(long = "object", value_name = "TYPE,id=ID,…")]
    objects: Vec<String>,
    #[command(flatten)]
    faults: FaultArgs,
    #[command(flatten)]
    bounds: BoundArgs,
    #[command(flatten)]
    untrusted: PolicyArgs,
    /// The image, and the file that shows it
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn arguments(command: clap::Command) -> clap::Command {
    // A daemon isn't confined.
    let help = "The image may be hostile: no other file is opened on its word, and its tables have tighter limits";
    MountArgs::augment_args(command).mut_arg("untrusted", |argument| argument.help(help))
}

/// The id of the export and the name of its node.
const ID: &str = "disk";

impl MountArgs {
    fn drive(&self, image: &str) -> Result<Drive, Failure> {
        let mut drive = match (self.image_opts, &self.format) {
            (true, Some(_)) => return Err(Failure::new("--image-opts and --format are mutually exclusive")),
            (true, None) => Drive::image_opts(ID, image, self.writable)?,
            (false, format) => Drive::file(ID, image, format.as_deref(), self.writable)?,
        };
        if self.writable {
            // A file system that is trimmed should shrink.
            drive.set("discard", "unmap")?;
        }
        if let Some(mode) = &self.cache {
            drive.set("cache", mode)?;
        }
        if let Some(snapshot) = &self.snapshot {
            drive.load_snapshot(snapshot)?;
        }
        if let Some(number) = self.partition {
            drive.show_partition(number);
        }
        if let Some(faults) = self.faults.options()? {
            drive.fail_by(faults);
        }
        if self.untrusted.is_on() {
            drive.hold_to(self.untrusted.policy()?);
        }
        Ok(drive)
    }
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = MountArgs::from_arg_matches(matches)?;
    if super::show_object_help(&args.objects, console)? {
        return Ok(0);
    }
    args.untrusted.check()?;
    let [image, file] = &args.files[..] else {
        return Err(Failure::usage("Expecting an image file name and the name of the file that shows it"));
    };
    // Before any look at the file: its server may be gone, or may not answer.
    if let Ok(path) = std::fs::canonicalize(&*path_of_text(file)) {
        cowshed_fuse::check_free(&path).map_err(|error| Failure::new(format!("{file}: {}", error.message())))?;
    }
    let same = |name: &String| FileIdentity::of_path(&path_of_text(name));
    if !args.image_opts && same(image).is_some_and(|identity| Some(identity) == same(file)) {
        return Err(Failure::new(format!("{file}: is the image itself, which a mount would hide")));
    }
    let drive = args.drive(image)?;
    let options = json!({"type": "fuse", "id": ID, "node-name": ID, "mountpoint": file, "writable": args.writable,
    "growable": args.growable, "allow-other": match args.allow_other {
        Others::Auto => "auto",
        Others::On => "on",
        Others::Off => "off",
    }});
    let mut steps = args.objects.iter().map(|object| Step::object(object)).collect::<Result<Vec<_>, _>>()?;
    steps.push(Step::drive("IMAGE", drive));
    steps.push(Step::call("FILE", "block-export-add", "BlockExportOptions", options));
    if let Some(path) = &args.monitor {
        steps.push(Step::monitor_at("--monitor", MonitorAddress::Unix(path.into()), false));
    }
    let running = Running {
        setup: Setup {
            steps,
            queues: queues(args.queues)?,
            vhost_queues: 1,
            stop_when_idle: true,
            stop_limit: args.bounds.stop_limit(),
            turn_limit: cowshed_daemon::TURN_LIMIT,
            request_memory_bytes: args.bounds.request_memory_bytes()?,
            mount_guard: mount_guard(),
        },
        background: !args.foreground,
        leaves_folder: false,
        pid_frame: "",
        pid_file: args.pidfile.clone(),
        takes_over: false,
        device: None,
        log: LogFormat::Text,
        log_level: "warn",
        // The names of the operands add nothing to the names of the files.
        worded: Box::new(|error| {
            let text = error.to_string();
            let bare = ["FILE: ", "IMAGE: "].iter().find_map(|operand| text.strip_prefix(operand));
            Failure::new(bare.unwrap_or(&text).to_owned())
        }),
        kept: None,
    };
    running.run(|_| ())
}

#[derive(Args, Clone, Debug)]
struct UmountArgs {
    /// Wait for the end of the process that keeps the standard input, then unmount the file system with that number
    #[arg(long, value_name = "NUMBER", hide = true)]
    guard: Option<u64>,
    /// Unmount though programs have FILE open, or the disk answers nothing: until they close it, they read and write it, and the
    /// image stays open
    #[arg(long)]
    lazy: bool,
    /// The file
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    files: Vec<String>,
}

fn unmount(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = UmountArgs::from_arg_matches(matches)?;
    let file = super::super::arguments::one_file(&args.files)?;
    if let Some(number) = args.guard {
        return Ok(u8::from(cowshed_fuse::run_guard(number, Path::new(file)).is_err()));
    }
    let path = std::fs::canonicalize(&*path_of_text(file));
    let path = path.map_err(|error| Error::io(&error, "could not look at it").file(file))?;
    match cowshed_fuse::find_mount(&path)? {
        Some(kind) if kind == cowshed_fuse::FILE_SYSTEM => {}
        Some(kind) => return Err(Failure::new(format!("{file}: is a mount of another program, of the type {kind}"))),
        None => return Err(Failure::new(format!("{file}: is not mounted"))),
    }
    let server = cowshed_fuse::MountServer::of_mount(&path).filter(|_| !args.lazy);
    unmount_aloud(file, &path, args.lazy, console).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::Busy => "; --lazy unmounts it while programs have it open",
            // Another user's: no option helps.
            ErrorKind::PermissionDenied => "",
            _ => "; --lazy unmounts it all the same, and loses writes that are not synced",
        };
        Failure::new(format!("{}{hint}", error.file(file)))
    })?;
    match server.filter(|server| !server.has_ended_within(CLOSING_LIMIT)) {
        Some(server) => {
            let number = server.number();
            let reason =
                "a program has the file open, or another mount namespace (a container) has a copy of the mount";
            let message = format!("{file}: is unmounted, but process {number} has not closed the image yet");
            Err(Failure::new(format!("{message}: {reason}; `kill {number}` ends it in order")))
        }
        None => Ok(0),
    }
}

/// As [`cowshed_fuse::unmount_in_order`], with a line where that takes long.
fn unmount_aloud(name: &str, path: &Path, lazily: bool, console: &mut Console) -> Result<(), Error> {
    let (ended, outcome) = std::sync::mpsc::channel();
    let file = path.to_owned();
    let work = move || {
        // The receiver waits for it.
        let _ = ended.send(cowshed_fuse::unmount_in_order(&file, lazily));
    };
    if std::thread::Builder::new().spawn(work).is_err() {
        return cowshed_fuse::unmount_in_order(path, lazily);
    }
    let outcome = outcome.recv_timeout(SYNC_NOTICE).or_else(|_| {
        console.complain(format!("{name}: waits for the disk to sync; Ctrl-C gives up, and --lazy does not wait"));
        outcome.recv()
    });
    outcome.unwrap_or_else(|_| Err(Error::internal("the thread that unmounts has ended")))
}
