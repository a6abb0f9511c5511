// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks a thread in before it looks at an image from a stranger: Landlock for files, seccomp for system calls.
//!
//! What is taken away holds for the calling thread and for the threads that it starts later, and can't be given back: a
//! program calls it on its main thread before any other. The gate of `cowshed-image` decides which files are opened
//! on an image's word; this is what stands behind it when our code is wrong.
//!
//! The io_uring of a confined thread is forbidden, since what it does passes seccomp by; its I/O goes through the thread
//! pool.

use cowshed_block::{Error, ErrorKind, Result};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, PathFdError, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The newest rights of Landlock that we ask for; an older kernel gives what it has.
const LANDLOCK_ABI: ABI = ABI::V6;

/// How much of what was asked for the kernel enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// All of it.
    Full,
    /// What an older kernel knows.
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

/// What became of [`Confinement::apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confined {
    /// Opening other files (and other processes' sockets and signals): Landlock, since Linux 5.13.
    pub files: Enforcement,
    /// Starting programs, opening sockets, tracing, mounting and the like: seccomp.
    pub system_calls: Enforcement,
}

/// What a confined thread may still open. Files that are open already stay so.
#[derive(Clone, Debug, Default)]
pub struct Confinement {
    readable: Vec<PathBuf>,
    writable: Vec<PathBuf>,
    reads_everything: bool,
    writes_everything: bool,
    connects: bool,
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

    /// This file can be opened for writing, too; in this folder files can be created and written. A path where nothing
    /// is stands for its folder.
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
        self.connects = true;
        self
    }

    /// Confines this thread and those that it will start. A kernel that can't do it, or not all of it, is no error: the
    /// answer says so. A path that is there and can't be looked at is one.
    pub fn apply(&self) -> Result<Confined> {
        Ok(Confined { files: self.confine_files()?, system_calls: confine_system_calls(self.connects)? })
    }

    fn confine_files(&self) -> Result<Enforcement> {
        if self.writes_everything {
            return Ok(Enforcement::None);
        }
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(LANDLOCK_ABI))
            .and_then(|ruleset| match self.connects {
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

/// Adds a rule. A path that isn't there needs none: opening it will say so in its own words.
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

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Forbids what no work on images needs. Programs are started by a process of their own: without one there is none.
fn confine_system_calls(connects: bool) -> Result<Enforcement> {
    let Ok(arch) = std::env::consts::ARCH.try_into() else { return Ok(Enforcement::None) };
    let filter = |rules: Rules, errno: i32| -> Result<BpfProgram> {
        let action = SeccompAction::Errno(errno.unsigned_abs());
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).map_err(|error| refused(&error))?;
        filter.try_into().map_err(|error: seccompiler::BackendError| refused(&error))
    };
    let mut forbidden: Rules = FORBIDDEN.iter().map(|call| (*call, Vec::new())).collect();
    if connects {
        CONNECTING.iter().for_each(|call| drop(forbidden.remove(call)));
    }
    // A thread is started by `clone`, too.
    let no_thread = SeccompCondition::new(
        0,
        SeccompCmpArgLen::Qword,
        SeccompCmpOp::MaskedEq(libc::CLONE_THREAD.unsigned_abs().into()),
        0,
    );
    let rule = no_thread.and_then(|condition| SeccompRule::new(vec![condition])).map_err(|error| refused(&error))?;
    forbidden.insert(libc::SYS_clone, vec![rule]);
    // The arguments of `clone3` can't be looked at; without it the C library takes `clone`. Without io_uring our own
    // I/O takes threads.
    let missing = [libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];
    for program in [
        filter(missing.into_iter().map(|call| (call, Vec::new())).collect(), libc::ENOSYS)?,
        filter(forbidden, libc::EPERM)?,
    ] {
        match seccompiler::apply_filter(&program) {
            Ok(()) => {}
            // A kernel without it, or a sandbox around us that forbids to make another.
            Err(seccompiler::Error::Prctl(_) | seccompiler::Error::Seccomp(_)) => return Ok(Enforcement::None),
            Err(error) => return Err(refused(&error)),
        }
    }
    Ok(Enforcement::Full)
}

/// Of these, what a client of a server needs.
const CONNECTING: &[i64] = &[libc::SYS_socket, libc::SYS_connect];

/// Programs, other processes, the network, mounts, keys, the kernel itself, and attributes of files.
const FORBIDDEN: &[i64] = &[
    libc::SYS_execve,
    libc::SYS_execveat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_fork,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_kcmp,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    libc::SYS_personality,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mknod,
    libc::SYS_mknodat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_chown,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lchown,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
];
