// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Mounting a FUSE session on a file, and unmounting it.
//!
//! A process that may mount does so itself. Others ask `fusermount3`, which has the right to.

use cowshed_storage::{
    FUSE_DEVICE, FuseDevice, ServedMount, is_served_here, mounted_device, path_of_text, spawn_apart,
};
use cowshed_types::{Errno, Error, ErrorKind, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::ffi::{CString, OsStr, OsString};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The type of our file systems in lists of mounts.
pub const FILE_SYSTEM: &str = "fuse.cowshed";

/// QEMU's sentence. The library that it mounts with writes the cause to the standard error; here it follows.
const NOT_MOUNTED: &str = "Failed to mount FUSE session to export";

/// Programs that mount for users, by their preference.
const HELPERS: &[&str] = &["fusermount3", "fusermount"];

/// So long a helper may take. The daemon does nothing else meanwhile.
const HELPER_LIMIT: Duration = Duration::from_secs(10);
/// Between two looks at it.
const HELPER_PAUSE: Duration = Duration::from_millis(2);

/// The users that may reach the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllowOther {
    /// Only the user that mounts it.
    Off,
    /// All that its mode lets.
    On,
    /// As `On` where the system permits it, else as `Off`.
    #[default]
    Auto,
}

/// The options of mounting.
#[derive(Clone, Debug)]
pub(crate) struct Mount<'a> {
    pub point: &'a MountPoint,
    pub writable: bool,
    pub allow_other: AllowOther,
    /// The most bytes of one read.
    pub max_read: u32,
}

/// A file that a session may be mounted on.
#[derive(Debug)]
pub struct MountPoint {
    path: PathBuf,
    fd: OwnedFd,
    device: u64,
}

/// A session that is mounted.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub session: FuseDevice,
    pub path: PathBuf,
    /// Number of the file system.
    pub device: u64,
    pub allows_other: bool,
    pub served: ServedMount,
}

fn os_error(error: rustix::io::Errno, doing: &str) -> Error {
    Error::os(Errno(error.raw_os_error()), doing)
}

impl MountPoint {
    /// Looks at a mount point, which must be a regular file, and no export of this process. It asks no FUSE server anything, so it
    /// never waits for this process itself.
    pub fn new(name: &str) -> Result<MountPoint> {
        let named = path_of_text(name);
        let failed = |error: rustix::io::Errno| {
            let error = os_error(error, "could not look at the mount point");
            error.file(name).qemu(format!("Failed to stat '{name}'"))
        };
        let found = rustix::fs::statx(CWD, &*named, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).map_err(failed)?;
        if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile {
            let error = Error::invalid_argument("is not a regular file, as a mount point must be").file(name);
            return Err(error.qemu(format!("'{name}' is not a regular file")));
        }
        if is_served_here(&named) {
            let error = Error::new(ErrorKind::Busy, "is a FUSE export already").file(name);
            return Err(error.qemu(format!("There already is a FUSE export on '{name}'")));
        }
        let path = std::fs::canonicalize(&*named)
            .map_err(|error| failed(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO)))?;
        check_free(&path)?;
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed)?;
        let device = mounted_device(&path).map_err(|errno| Error::os(errno, "could not look at the mount point"))?;
        Ok(MountPoint { path, fd, device })
    }

    /// Its path, absolute and without links.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Mount<'_> {
    /// Opens a session and mounts it.
    ///
    /// # Errors
    /// Also where another process mounts a disk on the same file at this moment, and was faster.
    pub fn mount(&self) -> Result<Mounted> {
        let (session, allows_other) = match self.mount_directly() {
            Err(error) if is_refusal(&error) => self.mount_by_helper(&error)?,
            mounted => mounted?,
        };
        let path = self.point.path.clone();
        let failed = |errno| Error::os(errno, "could not look at the mounted file").file(shown(&path));
        let device = mounted_device(&path).map_err(failed)?;
        if device == self.point.device {
            return Err(Error::internal("the mounted file does not stand at its path").file(shown(&path)));
        }
        let mounts = list_of_mounts()?;
        if kind_below(&mounts, &path, device).is_some_and(|kind| kind == FILE_SYSTEM) {
            // Each mount above the first one is taken away by its own process, whichever stands on top.
            unmount(&path).map_err(|errno| Error::os(errno, "could not unmount").file(shown(&path)))?;
            return Err(shows_another(&path));
        }
        Ok(Mounted { session, served: ServedMount::new(device), path, device, allows_other })
    }

    fn mount_directly(&self) -> Result<(FuseDevice, bool)> {
        let session = FuseDevice::open().map_err(no_device)?;
        let allows_other = self.allow_other != AllowOther::Off;
        let mut options = format!(
            "fd={},rootmode=100000,user_id={},group_id={},default_permissions,max_read={}",
            session.as_fd().as_raw_fd(),
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
            self.max_read
        );
        if allows_other {
            options.push_str(",allow_other");
        }
        let options = CString::new(options).map_err(|_| Error::internal("options of a mount with a zero byte"))?;
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        if !self.writable {
            flags |= MountFlags::RDONLY;
        }
        // By the descriptor: the file that was looked at, whatever its path means by now.
        let target = format!("/proc/self/fd/{}", self.point.fd.as_raw_fd());
        let mounted = rustix::mount::mount("cowshed", target, FILE_SYSTEM, flags, Some(&*options));
        mounted.map_err(|error| {
            let error = os_error(error, "could not mount on it").file(shown(&self.point.path));
            error.qemu(NOT_MOUNTED)
        })?;
        Ok((session, allows_other))
    }

    /// Mounts by `fusermount3`, for users that may not mount.
    fn mount_by_helper(&self, refusal: &Error) -> Result<(FuseDevice, bool)> {
        let wanted: &[bool] = match self.allow_other {
            AllowOther::Off => &[false],
            AllowOther::On => &[true],
            AllowOther::Auto => &[true, false],
        };
        let mut said = String::new();
        for &allows_other in wanted {
            match self.ask_helper(allows_other)? {
                Asked::Mounted(session) => return Ok((session, allows_other)),
                Asked::Refused(words) => said = words,
                Asked::NoHelper => {
                    let message = format!("{}, and {} is not installed", refusal.message(), HELPERS[0]);
                    let error = Error::new(ErrorKind::PermissionDenied, message).with_errno(refusal.errno());
                    let sentence = format!("{NOT_MOUNTED}: {} is not installed", HELPERS[0]);
                    return Err(error.file(shown(&self.point.path)).qemu(sentence));
                }
            }
        }
        let error = Error::new(ErrorKind::PermissionDenied, format!("could not mount on it: {said}"));
        Err(error.file(shown(&self.point.path)).qemu(format!("{NOT_MOUNTED}: {said}")))
    }

    fn ask_helper(&self, allows_other: bool) -> Result<Asked> {
        let mut options = format!(
            "{},nosuid,nodev,noatime,default_permissions,max_read={},fsname=cowshed,subtype=cowshed",
            if self.writable { "rw" } else { "ro" },
            self.max_read
        );
        if allows_other {
            options.push_str(",allow_other");
        }
        for helper in HELPERS {
            let pair = std::os::unix::net::UnixStream::pair();
            let (ours, theirs) = pair.map_err(|error| Error::io(&error, "could not make a pair of sockets"))?;
            let mut command = Command::new(helper);
            command
                .args(["-o", &options, "--"])
                .arg(&self.point.path)
                // The helper sends the session over this descriptor: its standard input.
                .env("_FUSE_COMMFD", "0")
                .stdin(Stdio::from(OwnedFd::from(theirs)))
                .stdout(Stdio::null())
                .stderr(Stdio::piped());
            let started = spawn_apart(&mut command);
            let child = match started {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                started => started.map_err(|error| Error::io(&error, format!("could not start {helper}")))?,
            };
            let Some(ended) = ended_within(child, HELPER_LIMIT)
                .map_err(|error| Error::io(&error, format!("could not wait for {helper}")))?
            else {
                let seconds = HELPER_LIMIT.as_secs();
                return Ok(Asked::Refused(format!(
                    "{helper} does not end within {seconds} s: a file system may not answer"
                )));
            };
            if !ended.status.success() {
                let said = String::from_utf8_lossy(&ended.stderr);
                return Ok(Asked::Refused(said.lines().next().unwrap_or("the helper refused").to_owned()));
            }
            let passed = passed_descriptor(&OwnedFd::from(ours))?;
            return Ok(Asked::Mounted(FuseDevice::from_descriptor(passed)?));
        }
        Ok(Asked::NoHelper)
    }
}

fn shows_another(path: &Path) -> Error {
    let error = Error::new(ErrorKind::Busy, "shows another disk already (cowshed umount ends that)");
    error.file(shown(path)).qemu(format!("'{}' shows another disk already", path.display()))
}

/// The output of a program that ends within a time; one that doesn't is killed, and not waited for.
fn ended_within(mut child: Child, limit: Duration) -> std::io::Result<Option<Output>> {
    let end = Instant::now() + limit;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            // It may wait for a file system that never answers, and not heed that.
            let _ = child.kill();
            let _ = child.try_wait();
            return Ok(None);
        }
        std::thread::sleep(HELPER_PAUSE);
    }
    child.wait_with_output().map(Some)
}

enum Asked {
    Mounted(FuseDevice),
    Refused(String),
    NoHelper,
}

/// The descriptor that a helper has sent before it ended.
fn passed_descriptor(socket: &OwnedFd) -> Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, flags);
    received.map_err(|error| os_error(error, "could not receive the session from the helper"))?;
    let found = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    found.ok_or_else(|| Error::internal("the helper mounted and sent no session"))
}

/// True where a helper may have a right that this process lacks.
fn is_refusal(error: &Error) -> bool {
    [rustix::io::Errno::PERM, rustix::io::Errno::ACCESS].iter().any(|errno| error.errno().0 == errno.raw_os_error())
}

fn no_device(errno: Errno) -> Error {
    let refused = errno.0 == rustix::io::Errno::ACCESS.raw_os_error();
    let doing = match refused {
        true => "could not open the FUSE device",
        false => "there is no FUSE on this machine (modprobe fuse)",
    };
    Error::os(errno, doing).file(FUSE_DEVICE).qemu(format!("{NOT_MOUNTED}: {FUSE_DEVICE}"))
}

pub(crate) fn shown(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Takes a mount away. Descriptors that are open go on as long as the process that serves them.
///
/// # Errors
/// Errors of umount2(2), where no helper does it either.
pub fn unmount(path: &Path) -> std::result::Result<(), Errno> {
    unmount_with(path, UnmountFlags::DETACH, &["-u", "-z", "--"])
}

/// The same, of a file that no program has open.
///
/// # Errors
/// EBUSY where one has.
pub(crate) fn unmount_unused(path: &Path) -> std::result::Result<(), Errno> {
    unmount_with(path, UnmountFlags::empty(), &["-u", "--"])
}

fn unmount_with(path: &Path, flags: UnmountFlags, arguments: &[&str]) -> std::result::Result<(), Errno> {
    let errno = match rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(error) => Errno(error.raw_os_error()),
    };
    if errno.0 != rustix::io::Errno::PERM.raw_os_error() {
        return Err(errno);
    }
    let asked = HELPERS.iter().find_map(|helper| {
        let mut command = Command::new(helper);
        command.args(arguments).arg(path).env("LC_ALL", "C").stdin(Stdio::null()).stdout(Stdio::null());
        ended_within(spawn_apart(command.stderr(Stdio::piped())).ok()?, HELPER_LIMIT).ok()?
    });
    match asked {
        Some(output) if output.status.success() => Ok(()),
        // fusermount3 distinguishes errors by their words alone.
        Some(output) if output.stderr.windows(4).any(|word| word == b"busy") => {
            Err(Errno(rustix::io::Errno::BUSY.raw_os_error()))
        }
        _ => Err(errno),
    }
}

/// Refuses a mount point on which one of our file systems stands, also one whose server was killed. It asks no server.
///
/// # Errors
/// `Busy`, with the remedy.
pub fn check_free(path: &Path) -> Result<()> {
    match find_mount(path)? {
        Some(kind) if kind == FILE_SYSTEM => Err(shows_another(path)),
        _ => Ok(()),
    }
}

/// The type of the last file system that was mounted at `path` (absolute, without links), by `/proc/self/mountinfo`.
pub fn find_mount(path: &Path) -> Result<Option<String>> {
    Ok(mounts_at(&list_of_mounts()?, path).pop().map(|last| last.kind))
}

fn list_of_mounts() -> Result<Vec<u8>> {
    let list = std::fs::read("/proc/self/mountinfo");
    list.map_err(|error| Error::io(&error, "could not read the list of mounts"))
}

/// A line of the list.
#[derive(Debug, PartialEq, Eq)]
struct ListedMount {
    number: u64,
    /// The number of the mount that it stands on.
    parent: u64,
    /// The number of the file system.
    device: u64,
    kind: String,
}

/// The mounts at a path, in their order.
fn mounts_at(list: &[u8], path: &Path) -> Vec<ListedMount> {
    let of_line = |line: &[u8]| {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let text = |at: usize| fields.get(at).map(|field| String::from_utf8_lossy(field).into_owned());
        let dash = fields.iter().position(|field| *field == b"-")?;
        if unescaped(fields.get(4)?).as_os_str() != path.as_os_str() {
            return None;
        }
        let device = text(2)?;
        let (major, minor) = device.split_once(':')?;
        Some(ListedMount {
            number: text(0)?.parse().ok()?,
            parent: text(1)?.parse().ok()?,
            device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
            kind: text(dash + 1)?,
        })
    };
    list.split(|byte| *byte == b'\n').filter_map(of_line).collect()
}

/// The type of the file system at `path` that stands below the one with that number.
fn kind_below(list: &[u8], path: &Path, device: u64) -> Option<String> {
    let mut mounts = mounts_at(list, path);
    let parent = mounts.iter().find(|mount| mount.device == device)?.parent;
    let below = mounts.iter().position(|mount| mount.number == parent)?;
    Some(mounts.swap_remove(below).kind)
}

/// A path as the list has it: blanks and backslashes are octal numbers.
fn unescaped(field: &[u8]) -> OsString {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(byte);
                rest = &behind[3..];
            }
            None => {
                path.push(first);
                rest = behind;
            }
        }
    }
    OsString::from_vec(path)
}

/// The option string that names a path for a child process.
pub(crate) fn os_text(path: &Path) -> &OsStr {
    OsStr::from_bytes(path.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_at_a_path_counts() {
        let list = b"36 35 98:0 / /a\\040b rw - ext4 /dev/x rw\n\
            37 35 0:40 / /a\\040b ro,nosuid master:1 shared:3 - fuse.cowshed cowshed ro,user_id=0\n\
            38 35 0:41 / /c\\134d rw - fuse /dev/fuse rw\n";
        let found = |path: &str| mounts_at(list, Path::new(path)).pop().map(|mount| mount.kind);
        assert_eq!(found("/a b").as_deref(), Some("fuse.cowshed"));
        assert_eq!(found("/c\\d").as_deref(), Some("fuse"));
        assert_eq!(found("/a"), None);
        let below = |path: &str, minor| kind_below(list, Path::new(path), rustix::fs::makedev(0, minor));
        assert_eq!((below("/a b", 40), below("/c\\d", 41)), (None, None));
        let twice = b"37 35 0:40 / /m ro - fuse.cowshed cowshed ro\n38 37 0:41 / /m ro - fuse.cowshed cowshed ro\n";
        let below = |minor| kind_below(twice, Path::new("/m"), rustix::fs::makedev(0, minor));
        assert_eq!((below(40), below(41).as_deref()), (None, Some("fuse.cowshed")));
    }

    #[test]
    fn helpers_that_do_not_end_are_given_up() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let ended = ended_within(shell("echo no >&2; exit 3"), HELPER_LIMIT).unwrap().unwrap();
        assert_eq!((ended.status.code(), &ended.stderr[..]), (Some(3), &b"no\n"[..]));
        let begin = Instant::now();
        assert!(ended_within(shell("exec sleep 1000"), Duration::from_millis(50)).unwrap().is_none());
        assert!(begin.elapsed() < Duration::from_secs(100));
    }

    #[test]
    fn mount_points_are_regular_files() {
        let folder = tempfile::tempdir().unwrap();
        let name = |path: &Path| path.to_str().unwrap().to_owned();
        let error = MountPoint::new(&name(folder.path())).unwrap_err();
        assert_eq!(error.sentence(), format!("'{}' is not a regular file", folder.path().display()));
        let missing = folder.path().join("missing");
        let error = MountPoint::new(&name(&missing)).unwrap_err();
        assert_eq!(error.sentence(), format!("Failed to stat '{}': No such file or directory", missing.display()));
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::symlink("file", folder.path().join("link")).unwrap();
        let point = MountPoint::new(&name(&folder.path().join("link"))).unwrap();
        assert_eq!(point.path(), file.canonicalize().unwrap());
    }
}
