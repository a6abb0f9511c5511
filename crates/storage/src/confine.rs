// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks a thread in before it looks at an image from a stranger: Landlock for files, seccomp for system calls.
//!
//! Rights are taken from the calling thread and from the threads that it starts later, and can't be given back. So a
//! program confines itself on its main thread, before it starts any other. The policy of `cowshed-graph` decides which
//! files are opened on an image's word; this module bounds the harm when our code is wrong.
//!
//! The io_uring of a confined thread is forbidden, since its operations pass seccomp by. Its I/O goes through the
//! thread pool.

mod calls;

use calls::Extra;
use cowshed_types::{Error, ErrorKind, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, PathFdError, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use std::path::{Path, PathBuf};

/// The newest rights of Landlock that we ask for; an older kernel gives those that it has.
const LANDLOCK_ABI: ABI = ABI::V6;

/// The part of the confinement that the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// All of it.
    Full,
    /// The part of it that an older kernel knows.
    Partial,
    /// Nothing.
    None,
}

impl Enforcement {
    /// `full`, `partial` or `none`.
    pub fn as_str(self) -> &'static str {
        match self {
            Enforcement::Full => "full",
            Enforcement::Partial => "partial",
            Enforcement::None => "none",
        }
    }
}

/// The outcome of [`Confinement::apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confined {
    /// Opening other files (and other processes' sockets and signals): Landlock, since Linux 5.13.
    pub files: Enforcement,
    /// Everything that work on images doesn't need, such as starting programs, opening sockets, tracing, typing into the
    /// terminal: seccomp.
    pub system_calls: Enforcement,
}

/// The files and system calls that a confined thread may still use. Files that are open already stay so.
#[derive(Clone, Debug, Default)]
pub struct Confinement {
    readable: Vec<PathBuf>,
    writable: Vec<PathBuf>,
    reads_everything: bool,
    writes_everything: bool,
    extra: Extra,
}

impl Confinement {
    /// Nothing can be opened.
    pub fn new() -> Self {
        Self::default()
    }

    /// This file, or everything in this folder, can be opened for reading.
    pub fn read(&mut self, path: impl Into<PathBuf>) -> &mut Self {
        self.readable.push(path.into());
        self
    }

    /// This file can be opened for writing, too; in this folder files can be created and written. A path without a file
    /// stands for its folder.
    pub fn write(&mut self, path: impl Into<PathBuf>) -> &mut Self {
        self.writable.push(path.into());
        self
    }

    /// Every file can be opened for reading: where it isn't known beforehand which ones an image will name.
    pub fn read_everything(&mut self) -> &mut Self {
        self.reads_everything = true;
        self
    }

    /// Every file can be opened for reading and writing.
    pub fn write_everything(&mut self) -> &mut Self {
        self.writes_everything = true;
        self
    }

    /// Sockets can be made and connected: for images that the user has on the network.
    pub fn connect(&mut self) -> &mut Self {
        self.extra.connects = true;
        self
    }

    /// The mode of the terminal can be changed: for a prompt on which lines are edited.
    pub fn edit_lines(&mut self) -> &mut Self {
        self.extra.edits_lines = true;
        self
    }

    /// Attributes of files can be set: for a new file whose options decide its place on the disk.
    pub fn place_files(&mut self) -> &mut Self {
        self.extra.places_files = true;
        self
    }

    /// Confines this thread and those that it will start. A kernel that can't do it, or not all of it, is no error: the
    /// result shows it. A path that is there and can't be looked at is one.
    pub fn apply(&self) -> Result<Confined> {
        Ok(Confined { files: self.confine_files()?, system_calls: calls::confine(self.extra)? })
    }

    fn confine_files(&self) -> Result<Enforcement> {
        if self.writes_everything {
            return Ok(Enforcement::None);
        }
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(LANDLOCK_ABI))
            .and_then(|ruleset| match self.extra.connects {
                true => Ok(ruleset),
                false => ruleset
                    .handle_access(AccessNet::from_all(LANDLOCK_ABI))
                    .and_then(|ruleset| ruleset.scope(Scope::from_all(LANDLOCK_ABI))),
            })
            .and_then(Ruleset::create)
            .map_err(|error| landlock_error(&error))?;
        let reading = AccessFs::ReadFile | AccessFs::ReadDir;
        if self.reads_everything {
            ruleset = allow(ruleset, Path::new("/"), reading)?;
        }
        for path in &self.readable {
            ruleset = allow(ruleset, path, reading)?;
        }
        let writing = reading | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev;
        for path in &self.writable {
            ruleset = match std::fs::metadata(path) {
                Ok(metadata) if !metadata.is_dir() => allow(ruleset, path, writing)?,
                Ok(_) => allow(ruleset, path, writing | AccessFs::MakeReg)?,
                Err(_) => allow(ruleset, folder_of(path), writing | AccessFs::MakeReg)?,
            };
        }
        let status = ruleset.restrict_self().map_err(|error| landlock_error(&error))?;
        Ok(match status.ruleset {
            RulesetStatus::FullyEnforced => Enforcement::Full,
            RulesetStatus::PartiallyEnforced => Enforcement::Partial,
            RulesetStatus::NotEnforced => Enforcement::None,
        })
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Adds a rule. A path that isn't there needs none: its opening will report that in its own words.
fn allow(ruleset: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated> {
    let opened = match PathFd::new(path) {
        Ok(opened) => opened,
        Err(PathFdError::OpenCall { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(ruleset);
        }
        Err(error) => return Err(refused(&error).file(crate::text_of_path(path))),
    };
    // A right for folders only would be an error on a file.
    let is_folder = std::fs::metadata(path).is_ok_and(|metadata| metadata.is_dir());
    let access = if is_folder { access } else { access & AccessFs::from_file(LANDLOCK_ABI) };
    ruleset.add_rule(PathBeneath::new(opened, access)).map_err(|error| landlock_error(&error))
}

fn landlock_error(error: &RulesetError) -> Error {
    refused(error)
}

fn refused(error: &dyn std::error::Error) -> Error {
    Error::new(ErrorKind::PermissionDenied, format!("could not confine the process: {error}"))
}
