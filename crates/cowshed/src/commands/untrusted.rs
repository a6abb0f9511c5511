// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `--untrusted`: the files that an image from a stranger may name, the limits of its cost, and a process that can't do
//! more than that.

use super::{sizes, work};
use crate::output::{Console, Failure};
use clap::{Args, ValueEnum};
use cowshed_image::open::Policy;
use cowshed_image::options::BlockdevOptions;
use cowshed_jobs::ImageSpec;
use cowshed_layout::probe::{self, FormatName};
use cowshed_layout::vmdk;
use cowshed_storage::confine::{Confined, Confinement, Enforcement};
use cowshed_storage::path_of_text;
use serde_json::Value;
use std::io::Read as _;
use std::path::{Component, PathBuf};
use std::time::Duration;

/// Where the time zone is looked up, for the dates of snapshots, and keys come from.
const SYSTEM_FILES: [&str; 4] = ["/etc/localtime", "/usr/share/zoneinfo", "/dev/random", "/dev/urandom"];
/// The longest time limit, in seconds: a century.
const MOST_SECONDS: f64 = 3e9;

/// For every verb that opens an image.
#[derive(Args, Clone, Debug)]
pub struct UntrustedArgs {
    #[command(flatten)]
    of_image: PolicyArgs,
    /// With --untrusted: give up after this many seconds
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<String>,
}

/// The limits of an image from a stranger.
#[derive(Args, Clone, Debug)]
pub struct PolicyArgs {
    /// The image may be hostile: no other file is opened on its word. Its tables have tighter limits, and the process
    /// is confined to the files of the command line
    #[arg(long)]
    untrusted: bool,
    /// With --untrusted: what the image may name all the same, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "backing,data-file,extents,json,probe")]
    allow: Vec<Allowed>,
    /// With --untrusted: other limits, separated by commas: chain-depth, virtual-size, table-bytes, snapshots,
    /// decompressed-bytes
    #[arg(long, value_delimiter = ',', value_name = "NAME=VALUE")]
    limit: Vec<String>,
}

/// `--allow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Allowed {
    /// Its backing file
    Backing,
    /// Its external data file
    DataFile,
    /// The files that hold the parts of a split VMDK disk, in its own folder
    Extents,
    /// Names that are json:{…}, which can be any file by any driver
    Json,
    /// A backing file whose format the image doesn't say
    Probe,
}

/// The use of a file of the command line by a verb.
pub enum Use<'a> {
    /// Reads an image.
    Read(&'a ImageSpec),
    /// Writes an image, or makes it.
    Write(&'a ImageSpec),
    /// Writes a file that is no image, or makes it.
    WriteFile(&'a str),
    /// Reads an image by its file name.
    ReadFile(&'a str),
    /// Asks for commands, on lines that are edited.
    Prompt,
    /// Makes files whose options decide their place on the disk.
    Place,
}

impl PolicyArgs {
    /// Refuses options without meaning unless `--untrusted` is given.
    pub fn check(&self) -> Result<(), Failure> {
        let message = match self {
            PolicyArgs { untrusted: true, .. } => return Ok(()),
            PolicyArgs { allow, .. } if !allow.is_empty() => {
                "--allow needs --untrusted: without it everything is allowed"
            }
            PolicyArgs { limit, .. } if !limit.is_empty() => "--limit needs --untrusted",
            PolicyArgs { .. } => return Ok(()),
        };
        Err(Failure::new(message))
    }

    /// `--untrusted` was given.
    pub fn is_on(&self) -> bool {
        self.untrusted
    }

    fn allows(&self, what: Allowed) -> bool {
        self.allow.contains(&what)
    }

    /// The policy for the images of the command line.
    pub fn policy(&self) -> Result<Policy, Failure> {
        if !self.untrusted {
            return Ok(Policy::default());
        }
        let mut policy = Policy {
            allow_backing: self.allows(Allowed::Backing),
            allow_data_file: self.allows(Allowed::DataFile),
            allow_json: self.allows(Allowed::Json),
            allow_extents: self.allows(Allowed::Extents),
            allow_backing_probe: self.allows(Allowed::Probe),
            ..Policy::untrusted()
        };
        for limit in &self.limit {
            set_limit(&mut policy, limit)?;
        }
        Ok(policy)
    }
}

impl UntrustedArgs {
    /// Refuses options without meaning unless `--untrusted` is given.
    pub fn check(&self) -> Result<(), Failure> {
        self.of_image.check()?;
        match self.is_on() || self.time_limit.is_none() {
            true => Ok(()),
            false => Err(Failure::new("--time-limit needs --untrusted")),
        }
    }

    /// `--untrusted` was given.
    pub fn is_on(&self) -> bool {
        self.of_image.is_on()
    }

    fn allows(&self, what: Allowed) -> bool {
        self.of_image.allows(what)
    }

    /// The policy for the images of the command line.
    pub fn policy(&self) -> Result<Policy, Failure> {
        let time_limit = if self.is_on() { self.time_limit()? } else { None };
        Ok(Policy { time_limit, ..self.of_image.policy()? })
    }

    /// The policy for an image that we make by ourselves: its names come from the user.
    pub fn policy_of_target(&self, is_new: bool) -> Result<Policy, Failure> {
        if is_new { Ok(Policy::default()) } else { self.policy() }
    }

    fn time_limit(&self) -> Result<Option<Duration>, Failure> {
        let Some(text) = &self.time_limit else { return Ok(None) };
        let seconds = text.parse().ok().filter(|seconds| (0.0..=MOST_SECONDS).contains(seconds));
        let seconds = seconds.ok_or_else(|| Failure::new(format!("Invalid time limit '{text}': must be seconds")))?;
        Ok(Some(Duration::from_secs_f64(seconds)))
    }

    /// With `--untrusted`: locks this process in, and watches its time. Comes before anything is opened and before other
    /// threads run.
    pub fn guard(&self, uses: &[Use<'_>], console: &mut Console) -> Result<(), Failure> {
        if !self.is_on() {
            return Ok(());
        }
        if let Some(limit) = self.time_limit()? {
            work::limit_time(limit);
        }
        let mut confinement = Confinement::new();
        for path in SYSTEM_FILES {
            confinement.read(path);
        }
        for used in uses {
            let (paths, writes) = match used {
                Use::Prompt => {
                    confinement.edit_lines();
                    continue;
                }
                Use::Place => {
                    confinement.place_files();
                    continue;
                }
                Use::Read(image) if self.allows(Allowed::Extents) => (with_extents(paths_of(image)), false),
                Use::Read(image) => (paths_of(image), false),
                Use::Write(image) => (paths_of(image), true),
                Use::ReadFile(name) => (vec![path_of_name(name)], false),
                Use::WriteFile(name) => (vec![path_of_name(name)], true),
            };
            for path in paths {
                if writes {
                    confinement.write(path)
                } else {
                    confinement.read(path)
                };
            }
        }
        if uses.iter().any(is_remote) {
            confinement.connect();
        }
        let writes = uses.iter().any(|used| matches!(used, Use::Write(_)));
        // The files that an image will name aren't known yet.
        if writes && self.allows(Allowed::DataFile) {
            confinement.write_everything();
        } else if [Allowed::Backing, Allowed::DataFile, Allowed::Json].into_iter().any(|what| self.allows(what)) {
            confinement.read_everything();
        }
        let confined = confinement.apply()?;
        warn(confined, console);
        Ok(())
    }
}

/// Locks this process in to reading one file.
pub fn confine_to(name: &str, console: &mut Console) -> Result<Confined, Failure> {
    let confined = Confinement::new().read(path_of_text(name)).apply()?;
    warn(confined, console);
    Ok(confined)
}

fn warn(confined: Confined, console: &mut Console) {
    for (what, enforced, how) in
        [("opening other files", confined.files, "Landlock"), ("system calls", confined.system_calls, "seccomp")]
    {
        if enforced == Enforcement::None {
            console
                .complain(format_args!("warning: the process is not kept from {what}: no confinement by {how} here"));
        }
    }
}

fn set_limit(policy: &mut Policy, text: &str) -> Result<(), Failure> {
    let (name, value) = text.split_once('=').unwrap_or((text, ""));
    let value = sizes::size(&format!("limit {name}"), value)?;
    let narrow = || u32::try_from(value).map_err(|_| Failure::new(format!("Invalid limit {name}: too large")));
    match name {
        "chain-depth" => policy.max_chain_depth = narrow()?,
        "virtual-size" => policy.max_virtual_size_bytes = value,
        "table-bytes" => policy.max_table_bytes = value,
        "snapshots" => policy.max_snapshots = narrow()?,
        "decompressed-bytes" => policy.max_decompressed_bytes = value,
        _ => return Err(Failure::new(format!("There is no limit '{name}'"))),
    }
    Ok(())
}

/// The file that a name on the command line means.
fn path_of_name(name: &str) -> PathBuf {
    if let Some(folder) = name.strip_prefix("fat:") {
        let is_word = |word: &str| ["12", "16", "32", "floppy", "rw"].contains(&word);
        let mut rest = folder;
        while let Some((word, behind)) = rest.split_once(':').filter(|(word, _)| is_word(word)) {
            (_, rest) = (word, behind);
        }
        return path_of_text(rest);
    }
    let plain = ["file:", "host_device:"].iter().find_map(|prefix| name.strip_prefix(prefix));
    path_of_text(plain.unwrap_or(name))
}

/// The files that the user's words name. A file that can't be read here can't be opened either; its opening reports
/// that.
fn paths_of(image: &ImageSpec) -> Vec<PathBuf> {
    let options = match image.image_opts {
        true => Some(BlockdevOptions::from_keyval(&image.name)),
        false => BlockdevOptions::from_json_name(&image.name),
    };
    let mut paths = Vec::new();
    match options {
        None => paths.push(path_of_name(&image.name)),
        Some(Ok(options)) => collect(&options.into(), &mut paths),
        Some(Err(_)) => {}
    }
    paths
}

/// The files with those beside them that hold the parts of a split disk. The image's policy decides once more whether
/// they may be opened.
fn with_extents(mut paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut extents = Vec::new();
    for path in &paths {
        let Ok(file) = std::fs::File::open(path) else { continue };
        let mut text = Vec::new();
        let most = vmdk::limits::DESCRIPTOR_BYTES as u64;
        let is_read = file.metadata().is_ok_and(|about| about.is_file() && about.len() <= most)
            && file.take(most).read_to_end(&mut text).is_ok();
        if !is_read || probe::probe(&text) != FormatName::Vmdk {
            continue;
        }
        let Ok(descriptor) = vmdk::Descriptor::parse(&text) else { continue };
        let folder = path.parent().map(PathBuf::from).unwrap_or_default();
        let inside = |name: &&str| path_of_text(name).components().all(|part| matches!(part, Component::Normal(_)));
        let names = descriptor.extents.iter().map(|extent| extent.name.as_str());
        extents
            .extend(names.filter(inside).filter(|name| !name.is_empty()).map(|name| folder.join(path_of_text(name))));
    }
    paths.append(&mut extents);
    paths
}

/// True where the user's words name an image on a server.
fn is_remote(used: &Use<'_>) -> bool {
    let (Use::Read(image) | Use::Write(image)) = used else { return false };
    let has_protocol = image.name.get(..3).is_some_and(|start| start.eq_ignore_ascii_case("nbd"))
        && image.name.contains(':')
        && !image.image_opts;
    // In option strings and descriptions: the driver by any spelling of its key.
    has_protocol || (image.image_opts || image.name.starts_with("json:")) && image.name.contains("nbd")
}

fn collect(options: &Value, paths: &mut Vec<PathBuf>) {
    let Value::Object(map) = options else { return };
    for (key, value) in map {
        match value {
            Value::String(name) if key == "filename" || key == "dir" => paths.push(path_of_text(name)),
            // These may be names of nodes as well; a file of that name then could be opened, and isn't.
            Value::String(name) if ["backing", "data-file", "file"].contains(&key.as_str()) => {
                paths.push(path_of_name(name))
            }
            other => collect(other, paths),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(spec: &ImageSpec) -> Vec<String> {
        paths_of(spec).iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn the_files_of_a_name() {
        assert_eq!(paths(&ImageSpec::file("a/b.qcow2")), ["a/b.qcow2"]);
        assert_eq!(paths(&ImageSpec::file("file:a:b")), ["a:b"]);
        let nested =
            r#"json:{"driver":"qcow2","file":{"driver":"blkdebug","image":{"filename":"x"}},"data-file.filename":"y"}"#;
        assert_eq!(paths(&ImageSpec::file(nested)), ["x", "y"]);
        let opts = "driver=qcow2,file.filename=x,backing.driver=raw,backing.file.filename=y";
        assert_eq!(paths(&ImageSpec { image_opts: true, ..ImageSpec::file(opts) }), ["x", "y"]);
        assert!(paths(&ImageSpec::file("json:{")).is_empty());
    }

    #[test]
    fn images_on_servers() {
        let remote = |image: ImageSpec| is_remote(&Use::Read(&image));
        assert!(remote(ImageSpec::file("nbd://host/disk")) && remote(ImageSpec::file("NBD+unix:///disk?socket=s")));
        assert!(remote(ImageSpec { image_opts: true, ..ImageSpec::file("driver=nbd,server.type=unix") }));
        assert!(!remote(ImageSpec::file("nbd.qcow2")) && !remote(ImageSpec::file("disk.qcow2")));
    }

    #[test]
    fn limits_are_named() {
        let mut policy = Policy::untrusted();
        for text in ["chain-depth=3", "virtual-size=1G", "table-bytes=64k", "snapshots=7", "decompressed-bytes=2M"] {
            set_limit(&mut policy, text).unwrap();
        }
        let Policy { max_chain_depth, max_virtual_size_bytes, max_table_bytes, .. } = policy;
        assert_eq!((max_chain_depth, max_virtual_size_bytes, max_table_bytes), (3, 1 << 30, 65536));
        assert_eq!((policy.max_snapshots, policy.max_decompressed_bytes), (7, 2 << 20));
        for text in ["depth=3", "chain-depth", "chain-depth=x", "chain-depth=5G"] {
            assert!(set_limit(&mut policy, text).is_err(), "{text}");
        }
    }
}
