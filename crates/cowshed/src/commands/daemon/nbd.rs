// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `qemu-nbd`: one image, one export.

use super::super::arguments::{check_loop, is_of_images, objects};
use super::super::{Verb, sizes};
use super::device::{self, DeviceLink};
use super::{BoundArgs, LogFormat, Running, default_queues};
use crate::invocation::{Persona, has_name_of_qemu};
use crate::output::{Console, Failure};
use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args, FromArgMatches};
use cowshed_daemon::client::ClientOptions;
use cowshed_daemon::{Drive, OFFSET, Setup, Step, check_object, check_server_credentials, client_credentials};
use cowshed_image::SnapshotName;
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::{Listener, SocketAddress, path_of_text, text_of_path};
use cowshed_types::Error;
use serde_json::json;
use std::cell::RefCell;

pub const VERB: Verb = Verb {
    name: "qemu-nbd",
    about: "Serve one image over NBD, with the options of qemu-nbd",
    operands: "FILE",
    details: "Without -t it ends when its last client goes. -c makes a block device of the image, by the kernel's nbd driver (modprobe nbd); -d takes it away.",
    examples: "  qemu-nbd -t -k /run/disk.sock -f qcow2 disk.qcow2
  qemu-nbd -c /dev/nbd0 -f qcow2 disk.qcow2
  qemu-nbd -d /dev/nbd0
  qemu-nbd -r -p 10809 -x disk disk.qcow2
  qemu-nbd -L -k /run/disk.sock",
    in_qemu_img: false,
    arguments: NbdArgs::augment_args,
    run,
};

/// The message where there is not one image.
pub const WRONG_COUNT: &str = "Invalid number of arguments";

/// The port that NBD has from IANA.
const DEFAULT_PORT: u16 = 10809;

/// The subject of the server's errors.
const SERVER: &str = "the NBD server";
/// The subject of the export's errors.
const EXPORT: &str = "the export";
/// The subject of errors of options that come behind those of the server.
const LATE: &str = "the options of the image";

/// The name of the one node.
const NODE: &str = "disk";

#[derive(Args, Clone, Debug)]
struct NbdArgs {
    /// Port to listen on [default: 10809]
    #[arg(short, long, value_name = "PORT")]
    port: Option<String>,
    /// Address to listen on [default: all]
    #[arg(short, long, value_name = "ADDRESS")]
    bind: Option<String>,
    /// Listen on a Unix socket
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<String>,
    /// The most clients at a time; 0 is any number
    #[arg(short = 'e', long, value_name = "NUM", default_value = "1", allow_hyphen_values = true)]
    shared: String,
    /// Go on after the last client
    #[arg(short = 't', long)]
    persistent: bool,
    /// Log what clients do
    #[arg(short, long)]
    verbose: bool,
    /// Name of the export
    #[arg(short = 'x', long, value_name = "NAME", default_value = "")]
    export_name: String,
    /// Description of the export
    #[arg(short = 'D', long, value_name = "TEXT", default_value = "")]
    description: String,
    /// Seconds that a client may take to choose an export; 0 is for ever
    #[arg(long, value_name = "NUM", allow_hyphen_values = true)]
    handshake_limit: Option<String>,
    /// Leave out this many bytes at the start of the disk
    #[arg(short, long, value_name = "OFFSET")]
    offset: Option<String>,
    /// Offer the context qemu:allocation-depth
    #[arg(short = 'A', long)]
    allocation_depth: bool,
    /// Offer the context qemu:dirty-bitmap:NAME; the bitmap may be a backing file's
    #[arg(short = 'B', long, value_name = "NAME")]
    bitmap: Vec<String>,
    /// List the exports of another server
    #[arg(short = 'L', long)]
    list: bool,
    /// Define an object, for example credentials
    #[arg(long = "object", value_name = "TYPE,id=ID,…")]
    objects: Vec<String>,
    /// Encrypt, with the credentials of an object
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Let in only whom an object (authz-…) allows, by the name in the certificate
    #[arg(long, value_name = "ID")]
    tls_authz: Option<String>,
    /// Name in the server's certificate, for --list [default: the host, else localhost]
    #[arg(long, value_name = "NAME")]
    tls_hostname: Option<String>,
    /// Accepted without effect
    #[arg(short = 'T', long, value_name = "TRACE")]
    trace: Vec<String>,
    /// Go into the background once it is up
    #[arg(long)]
    fork: bool,
    /// Write the process's number to a file
    #[arg(long, value_name = "PATH")]
    pid_file: Option<String>,
    /// Label of the socket (not supported)
    #[arg(long, value_name = "LABEL")]
    selinux_label: Option<String>,
    /// Make a block device of the image, by the kernel's nbd driver, in the background unless -v is given
    #[arg(short, long, value_name = "DEV", action = ArgAction::Append)]
    connect: Vec<String>,
    /// Take a block device's connection away: FILE is the device
    #[arg(short, long)]
    disconnect: bool,
    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,
    /// Serve for reading only
    #[arg(short, long)]
    read_only: bool,
    /// Leave the image as it is: writes go to a temporary overlay in TMPDIR [default: /var/tmp]
    #[arg(short, long)]
    snapshot: bool,
    /// Serve an internal snapshot, for reading: an ID or name, snapshot.id=ID or snapshot.name=NAME
    #[arg(short, long, value_name = "SNAPSHOT")]
    load_snapshot: Option<String>,
    /// The same as --cache=none
    #[arg(short, long, num_args = 0, default_missing_value = "none", action = ArgAction::Append)]
    nocache: Vec<String>,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE", action = ArgAction::Append)]
    cache: Vec<String>,
    /// The engine of the I/O: io_uring, threads or native
    #[arg(long, value_name = "MODE", action = ArgAction::Append)]
    aio: Vec<String>,
    /// Pass discards on: ignore or unmap
    #[arg(long, value_name = "MODE", action = ArgAction::Append)]
    discard: Vec<String>,
    /// Turn writes of zeroes into zero writes: off, on or unmap
    #[arg(long, value_name = "MODE")]
    detect_zeroes: Option<String>,
    /// FILE is an option string
    #[arg(long)]
    image_opts: bool,
    #[command(flatten)]
    bounds: BoundArgs,
    /// The image
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: Vec<String>,
}

/// The longest name or description of an export.
const MAX_NAME_BYTES: usize = 4096;

/// Options whose values QEMU checks while it reads them, by the parser's names.
const CHECKED: &[&str] = &[
    "nocache",
    "cache",
    "aio",
    "discard",
    "detect_zeroes",
    "offset",
    "load_snapshot",
    "shared",
    "socket",
    "handshake_limit",
    "export_name",
    "description",
    "objects",
];

impl NbdArgs {
    /// Checks the values of options in their order.
    fn check_values(&self, matches: &ArgMatches) -> Result<(), Failure> {
        let mut given: Vec<(usize, &str, String)> = Vec::new();
        for name in CHECKED.iter().filter(|name| matches.value_source(name) == Some(ValueSource::CommandLine)) {
            let values: Vec<String> = match matches.try_get_many::<String>(name) {
                Ok(values) => values.into_iter().flatten().cloned().collect(),
                Err(_) => vec![String::new()],
            };
            let indices = matches.indices_of(name).into_iter().flatten();
            given.extend(indices.zip(values).map(|(index, value)| (index, *name, value)));
        }
        given.sort_by_key(|(index, ..)| *index);
        let mut known: Vec<&str> = Vec::new();
        let mut unmaps = false;
        for (_, name, value) in &given {
            let is_again = known.contains(name);
            match *name {
                "nocache" | "cache" if known.iter().any(|known| ["nocache", "cache"].contains(known)) => {
                    return Err(Failure::new("-n and --cache can only be specified once"));
                }
                "aio" | "discard" if is_again => {
                    return Err(Failure::new(format!("--{name} can only be specified once")));
                }
                "cache" | "aio" | "discard" => check_mode(name, value)?,
                "detect_zeroes" => {
                    check_mode("detect-zeroes", value)?;
                    if value == "unmap" && !unmaps {
                        return Err(Failure::new(UNMAPS_WITHOUT_DISCARD));
                    }
                }
                "offset" => drop(offset_of(value)?),
                "load_snapshot" => drop(SnapshotName::parse(value).map_err(of_snapshot)?),
                "shared" => drop(self.shared()?),
                "handshake_limit" => drop(self.handshake_limit()?),
                "export_name" if value.len() > MAX_NAME_BYTES => {
                    return Err(Failure::new(format!("export name '{value}' too long")));
                }
                "description" if value.len() > MAX_NAME_BYTES => {
                    return Err(Failure::new(format!("export description '{value}' too long")));
                }
                "socket" if has_name_of_qemu() && !value.starts_with('/') => {
                    return Err(Failure::new("socket path must be absolute"));
                }
                "objects" => {
                    let checked = Step::object(value).and_then(|_| check_object(value));
                    checked.map_err(|error| Failure { sentence: Some(error.sentence()), ..Failure::from(error) })?;
                    check_loop(value.split(',').next().unwrap_or_default().trim_start_matches("qom-type="))?;
                }
                _ => {}
            }
            unmaps |= *name == "discard" && ["unmap", "on"].contains(&value.as_str());
            known.push(name);
        }
        Ok(())
    }

    /// True where the options say that the image is raw.
    fn is_raw(&self, file: &str) -> bool {
        match self.image_opts {
            true => file.split(',').any(|item| item == "driver=raw"),
            false => self.format.as_deref() == Some("raw"),
        }
    }

    /// Checks the options beside each other.
    fn check(&self) -> Result<(), Failure> {
        if self.selinux_label.is_some() {
            let message = "the option '--selinux-label' is not supported: label the socket's folder instead";
            return Err(Failure::new(message));
        }
        Listener::check_passed()?;
        match (self.list, self.file.len()) {
            (true, _) => self.check_list()?,
            (false, 1) => {}
            (false, _) => return Err(Failure::usage(WRONG_COUNT)),
        }
        let is_activated = Listener::are_passed();
        let is_encrypted = self.tls_creds.is_some();
        let wrong = [
            (is_encrypted && !self.connect.is_empty(), "TLS is not supported with a host device"),
            (
                is_encrypted && self.list && self.tls_authz.is_some(),
                "TLS authorization is incompatible with export list",
            ),
            (
                is_encrypted && !self.list && self.tls_hostname.is_some(),
                "TLS hostname is only supported with export list",
            ),
            (!is_encrypted && self.tls_authz.is_some(), "--tls-authz is not permitted without --tls-creds"),
            (!is_encrypted && self.tls_hostname.is_some(), "--tls-hostname is not permitted without --tls-creds"),
            (
                self.image_opts && self.format.is_some() && !self.disconnect && !self.list,
                "--image-opts and -f are mutually exclusive",
            ),
            (is_activated && self.bind.is_some(), "The interface can't be set when using socket activation"),
            (is_activated && self.port.is_some(), "TCP port number can't be set when using socket activation"),
            (is_activated && self.socket.is_some(), "Unix socket can't be set when using socket activation"),
            (is_activated && !self.connect.is_empty(), "NBD device can't be set when using socket activation"),
        ];
        match wrong.iter().find(|(is_so, _)| *is_so) {
            Some((_, message)) => Err(Failure::new(*message)),
            None => Ok(()),
        }
    }

    /// The largest number of clients at a time.
    fn shared(&self) -> Result<usize, Failure> {
        let number = sizes::integer(&self.shared).and_then(|number| i32::try_from(number).ok());
        let number = number.and_then(|number| usize::try_from(number).ok());
        number.ok_or_else(|| Failure::new(format!("Invalid shared device number '{}'", self.shared)))
    }

    /// Seconds that a client may take to choose an export.
    fn handshake_limit(&self) -> Result<Option<u64>, Failure> {
        let Some(text) = &self.handshake_limit else { return Ok(None) };
        let number = sizes::integer(text).and_then(|number| u32::try_from(number).ok());
        number
            .map(|number| Some(number.into()))
            .ok_or_else(|| Failure::new(format!("Invalid handshake limit '{text}'")))
    }

    /// Refuses options of one device beside `--list`, in QEMU's words.
    fn check_list(&self) -> Result<(), Failure> {
        let per_device = !self.export_name.is_empty()
            || !self.description.is_empty()
            || self.offset.is_some()
            || self.format.is_some()
            || self.load_snapshot.is_some()
            || self.allocation_depth
            || !self.bitmap.is_empty()
            || self.disconnect
            || !self.nocache.is_empty()
            || self.detect_zeroes.is_some()
            || !self.connect.is_empty()
            || [&self.aio, &self.discard, &self.cache].iter().any(|given| !given.is_empty());
        match () {
            () if !self.file.is_empty() => Err(Failure::new("List mode is incompatible with a file name")),
            () if per_device => Err(Failure::new("List mode is incompatible with per-device settings")),
            () if Listener::are_passed() => Err(Failure::new("List mode is incompatible with socket activation")),
            () if self.fork => Err(Failure::new("List mode is incompatible with forking")),
            () => Ok(()),
        }
    }

    /// The server whose exports are to be listed.
    fn server(&self) -> Result<ClientOptions, Failure> {
        let address = match &self.socket {
            Some(path) => SocketAddress::Unix(path.clone()),
            None => SocketAddress::Tcp {
                // Credentials are of a name.
                host: self
                    .bind
                    .clone()
                    .unwrap_or_else(|| if self.tls_creds.is_some() { "localhost" } else { "0.0.0.0" }.to_owned()),
                port: self.port()?,
            },
        };
        let mut options = ClientOptions::new(address, "");
        options.tls = self.tls_creds.as_ref().map(|id| client_credentials(&self.objects, id)).transpose()?;
        options.tls_hostname.clone_from(&self.tls_hostname);
        Ok(options)
    }

    /// The device that `--connect` names, with the options that it needs of the rest.
    fn device_link(&self, file: &str) -> Option<DeviceLink> {
        // QEMU takes the last one.
        let device = self.connect.last()?;
        // The process leaves its folder before it uses them.
        let anchored = |path: &str| {
            let path = std::path::absolute(path_of_text(path)).ok().filter(|_| !path.starts_with('/'));
            path.map(|path| text_of_path(&path))
        };
        let socket = self.socket.clone().unwrap_or_else(|| device::default_socket(device));
        Some(DeviceLink {
            device: anchored(device).unwrap_or_else(|| device.clone()),
            named: device.clone(),
            socket: anchored(&socket).unwrap_or(socket),
            name: self.export_name.clone(),
            file: file.to_owned(),
            verbose: self.verbose,
        })
    }

    fn port(&self) -> Result<u16, Failure> {
        let Some(text) = &self.port else { return Ok(DEFAULT_PORT) };
        let host = self.bind.as_deref().unwrap_or("0.0.0.0");
        let unknown = || format!("address resolution failed for {host}:{text}: Servname not supported for ai_socktype");
        port_of(text).ok_or_else(|| Failure::new(unknown()))
    }

    /// `None`: the sockets that a service manager passed.
    fn address(&self, link: Option<&DeviceLink>) -> Result<Option<SocketAddress>, Failure> {
        if let Some(link) = link {
            return Ok(Some(SocketAddress::Unix(link.socket.clone())));
        }
        if Listener::are_passed() {
            return Ok(None);
        }
        Ok(Some(match &self.socket {
            Some(path) => SocketAddress::Unix(path.clone()),
            None => SocketAddress::Tcp { host: self.bind.clone().unwrap_or_default(), port: self.port()? },
        }))
    }

    /// A snapshot can only be read, with or without the option.
    fn is_writable(&self) -> bool {
        !self.read_only && self.load_snapshot.is_none()
    }

    fn drive(&self, file: &str) -> Result<Drive, Failure> {
        let writable = self.is_writable();
        let unopened = |error: Error| unopened(file, &error);
        let own = match self.image_opts {
            true => BlockdevOptions::from_image_opts(file).unwrap_or_else(|_| BlockdevOptions::new()),
            false => BlockdevOptions::new(),
        };
        let discard = own.text("discard").or(self.discard.first().map(String::as_str));
        if own.text("detect-zeroes") == Some("unmap") && !discard.is_some_and(|mode| ["unmap", "on"].contains(&mode)) {
            return Err(unopened(Error::invalid_argument(UNMAPS_WITHOUT_DISCARD)));
        }
        let mut drive = match self.image_opts {
            true => Drive::image_opts(NODE, file, writable).map_err(unopened)?,
            false => Drive::file(NODE, file, self.format.as_deref(), writable).map_err(unopened)?,
        };
        if let Some(offset) = self.offset.as_deref().map(offset_of).transpose()?.filter(|offset| *offset > 0) {
            drive.show_from(offset);
        }
        if let Some(snapshot) = &self.load_snapshot {
            drive.load_snapshot(snapshot).map_err(of_snapshot)?;
        }
        if self.snapshot {
            drive.keep_writes_apart();
        }
        drive.export_alone();
        let first = |given: &[String]| given.first().cloned();
        let cache = if !self.nocache.is_empty() { Some("none".to_owned()) } else { first(&self.cache) };
        // Of the image's own options `discard` counts more than the command line, and `detect-zeroes` less.
        let detect_zeroes = self.detect_zeroes.clone().unwrap_or_else(|| "off".to_owned());
        let settings = [("cache", cache), ("aio", first(&self.aio)), ("detect-zeroes", Some(detect_zeroes))];
        for (key, value) in settings {
            if let Some(value) = value {
                drive.set(key, &value)?;
            }
        }
        if let Some(mode) = first(&self.discard) {
            drive.set_default("discard", &mode);
        }
        Ok(drive)
    }
}

/// QEMU's refusal of a mode of `detect-zeroes`.
const UNMAPS_WITHOUT_DISCARD: &str =
    "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap";

/// Bytes of the image that are left out in front. Under QEMU's name the number has no suffix.
fn offset_of(text: &str) -> Result<u64, Failure> {
    match has_name_of_qemu() {
        true => sizes::unsigned(text).ok_or_else(|| Failure::new(format!("Invalid offset '{text}'"))),
        false => sizes::size("offset", text),
    }
}

/// An error of the snapshot that `--load-snapshot` names.
fn of_snapshot(error: Error) -> Failure {
    let failure = Failure::from(error);
    // This program spells it so.
    let sentence = failure.sentence.as_ref().map(|sentence| {
        sentence.replace("qemu-img: Failed in parsing snapshot param '", "qemu-nbd: Failed in parsing snapshot param `")
    });
    Failure { sentence, ..failure }
}

/// Refuses a mode that an option doesn't have, in QEMU's words: each option has its own.
fn check_mode(key: &str, value: &str) -> Result<(), Failure> {
    let (known, sentence): (&[&str], String) = match key {
        "aio" => (&["threads", "native", "io_uring"], format!("Invalid aio mode '{value}'")),
        "cache" => (
            &["none", "off", "writeback", "writethrough", "directsync", "unsafe"],
            format!("Invalid cache mode `{value}'"),
        ),
        "discard" => (&["ignore", "off", "unmap", "on"], format!("Invalid discard mode `{value}'")),
        "detect-zeroes" => {
            (&["off", "on", "unmap"], format!("Failed to parse detect_zeroes mode: invalid parameter value: {value}"))
        }
        _ => return Ok(()),
    };
    match known.contains(&value) {
        true => Ok(()),
        false => Err(Failure {
            sentence: Some(sentence.clone()),
            ..Failure::new(format!("{sentence}, not one of {}", known.join(", ")))
        }),
    }
}

/// The image could not be opened. QEMU frames the reason.
fn unopened(file: &str, error: &Error) -> Failure {
    let failure = Failure::from(error.clone());
    let reason = Failure::open(Persona::QemuImg, file, error).message;
    let sentence = match reason.strip_prefix(&format!("Could not open '{file}': ")) {
        Some(reason) => format!("Failed to blk_new_open '{file}': {reason}"),
        None => reason,
    };
    Failure { sentence: Some(sentence), ..failure }
}

/// The failure of a daemon's start.
fn unstarted(file: &str, error: &Error) -> Failure {
    match error.file_name() {
        Some(SERVER) => {
            let sentence = error.sentence();
            let frame = if sentence.contains("TLS credentials") { "Failed to get TLS creds: " } else { "" };
            Failure { sentence: Some(format!("{frame}{sentence}")), ..Failure::new(error.to_string()) }
        }
        // The image isn't at fault.
        Some(option) if option == OFFSET || option.starts_with("--object ") => {
            Failure { sentence: Some(error.sentence()), ..Failure::new(error.to_string()) }
        }
        Some(EXPORT) => Failure {
            sentence: Some(error.message().to_owned()),
            ..Failure::new(error.to_string().replacen(EXPORT, file, 1))
        },
        _ => unopened(file, error),
    }
}

/// As [`unstarted`], for an image that is only read. Of a raw image QEMU opens the file first, and then asks that its size stays. Of
/// another format it asks that nothing is written.
fn unread(file: &str, is_raw: bool, error: &Error) -> Failure {
    const KEPT: &str = "shared \"resize\" lock";
    let failure = unstarted(file, error);
    let reworded =
        failure.sentence.as_deref().filter(|sentence| sentence.contains(KEPT)).map(|sentence| match is_raw {
            true => sentence.replacen(&format!("Failed to blk_new_open '{file}': "), "", 1),
            false => sentence.replacen(KEPT, "shared \"write\" lock", 1),
        });
    Failure { sentence: reworded.or_else(|| failure.sentence.clone()), ..failure }
}

/// The port that a text means: a number, of which the low 16 bits count, as in C, or the name of a service.
fn port_of(text: &str) -> Option<u16> {
    let text = text.trim_start();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        let low = text.parse::<u64>().unwrap_or(u64::MAX) & u64::from(u32::MAX);
        // A negative number in 32 bits is the name of a service there, and none has such a name.
        let number = u32::try_from(low).ok().filter(|number| i32::try_from(*number).is_ok())?;
        return u16::try_from(number & u32::from(u16::MAX)).ok();
    }
    let services = std::fs::read_to_string("/etc/services").unwrap_or_default();
    services.lines().find_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let (name, place) = (words.next()?, words.next()?);
        let port = place.strip_suffix("/tcp")?;
        (name == text || words.any(|alias| alias == text)).then(|| port.parse().ok())?
    })
}

fn run(matches: &ArgMatches, console: &mut Console) -> Result<u8, Failure> {
    let args = NbdArgs::from_arg_matches(matches)?;
    if super::show_object_help(&args.objects, console)? {
        return Ok(0);
    }
    args.check_values(matches)?;
    if args.list {
        // Objects that aren't credentials must be good, too.
        let images = args.objects.iter().filter(|object| is_of_images(object)).cloned().collect::<Vec<_>>();
        objects(&images)?;
    }
    args.check()?;
    if args.list {
        return super::list::run(&args.server()?, args.port.as_deref(), console);
    }
    let [file] = args.file.as_slice() else { return Err(Failure::usage(WRONG_COUNT)) };
    if args.disconnect {
        // Without use, and looked for as in QEMU.
        args.tls_creds.as_ref().map_or(Ok(()), |id| check_server_credentials(&args.objects, id))?;
        return device::disconnect(file, console);
    }
    let image = file.clone();
    let link = args.device_link(file);
    let mut steps = Vec::new();
    for object in &args.objects {
        steps.push(Step::object(object)?);
    }
    // Errors in the image's options, too, come behind errors of the server.
    let (drive, late) = match args.drive(file) {
        Ok(drive) => (Step::drive(file, drive), None),
        Err(failure) => (Step::refused(LATE, Error::invalid_argument(failure.message.clone())), Some(failure)),
    };
    steps.push(Step::serve(
        args.address(link.as_ref())?,
        (args.tls_creds.clone(), args.tls_authz.clone()),
        args.shared()?,
        args.handshake_limit()?,
    ));
    // As QEMU's, that listens first. Clients wait for the export.
    steps.push(drive);
    // QEMU puts each in front of those before.
    let bitmaps: Vec<&String> = args.bitmap.iter().rev().collect();
    let export = json!({"type": "nbd", "id": NODE, "node-name": NODE, "name": args.export_name, "writable": args.is_writable(),
                        "description": args.description, "allocation-depth": args.allocation_depth,
                        "bitmaps": bitmaps});
    steps.push(Step::call(EXPORT, "block-export-add", "BlockExportOptions", export));
    let late = RefCell::new(late);
    let (is_written, is_raw) = (args.is_writable(), args.is_raw(file));
    let running = Running {
        setup: Setup {
            steps,
            queues: default_queues(),
            vhost_queues: 1,
            stop_when_idle: !args.persistent,
            stop_limit: args.bounds.stop_limit(),
            turn_limit: cowshed_daemon::TURN_LIMIT,
            request_memory_bytes: args.bounds.request_memory_bytes()?,
            mount_guard: super::mount_guard(),
        },
        kept: None,
        background: args.fork || (link.is_some() && !args.verbose),
        leaves_folder: true,
        pid_frame: "",
        device: link,
        pid_file: args.pid_file.clone(),
        takes_over: false,
        log: LogFormat::Text,
        log_level: match args.verbose && !has_name_of_qemu() {
            // The line names the exports, where a client asks for another one.
            true => "warn,cowshed_nbd_server::negotiation=info",
            false => "warn",
        },
        worded: Box::new(move |error| match error.file_name() {
            Some(LATE) => late.take().unwrap_or_else(|| Failure::from(error.clone())),
            _ if is_written => unstarted(&image, error),
            _ => unread(&image, is_raw, error),
        }),
    };
    running.run(|_| ())
}
