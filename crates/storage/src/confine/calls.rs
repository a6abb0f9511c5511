// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The system calls of a confined thread: those that work on images needs, by arguments where a call can do more than
//! that. The filter refuses everything else: calls of later kernels, and the numbers of other interfaces (x32).

use super::{Enforcement, refused};
use cowshed_types::Result;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The rights of a confined thread besides its work on files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Extra {
    /// Make sockets and connect them.
    pub connects: bool,
    /// Change the mode of the terminal.
    pub edits_lines: bool,
    /// Set attributes of files, which decide their place on the disk.
    pub places_files: bool,
}

/// Confines this thread. A call that isn't allowed fails with `EPERM`. Without `clone3` the C library takes `clone`,
/// and without io_uring our own I/O takes threads, so these are missing (`ENOSYS`).
pub(super) fn confine(extra: Extra) -> Result<Enforcement> {
    let Ok(arch) = std::env::consts::ARCH.try_into() else { return Ok(Enforcement::None) };
    let missing: Rules = MISSING.iter().map(|call| (*call, Vec::new())).collect();
    for program in [
        program(missing, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS.unsigned_abs()), arch)?,
        program(allowed(extra)?, SeccompAction::Errno(libc::EPERM.unsigned_abs()), SeccompAction::Allow, arch)?,
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

fn program(rules: Rules, otherwise: SeccompAction, action: SeccompAction, arch: TargetArch) -> Result<BpfProgram> {
    let filter = SeccompFilter::new(rules, otherwise, action, arch).map_err(|error| refused(&error))?;
    filter.try_into().map_err(|error: seccompiler::BackendError| refused(&error))
}

fn allowed(extra: Extra) -> Result<Rules> {
    let mut rules: Rules = ALLOWED.iter().chain(MISSING).map(|call| (*call, Vec::new())).collect();
    // This process alone gets signals.
    let own = u64::from(std::process::id());
    by_argument(&mut rules, libc::SYS_tgkill, &[(0, own)])?;
    for request in IOCTLS {
        by_argument(&mut rules, libc::SYS_ioctl, &[(1, u64::from(*request))])?;
    }
    for command in FCNTLS {
        by_argument(&mut rules, libc::SYS_fcntl, &[(1, u64::from(command.unsigned_abs()))])?;
    }
    for option in PRCTLS {
        by_argument(&mut rules, libc::SYS_prctl, &[(0, u64::from(option.unsigned_abs()))])?;
    }
    // Its own limits can be read: the new limits are no pointer.
    let reads_own_limits =
        vec![is(0, 0)?, long(SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0))?];
    add(&mut rules, libc::SYS_prlimit64, reads_own_limits)?;
    // Threads, and no processes nor namespaces.
    let thread = libc::CLONE_THREAD.unsigned_abs();
    let flags = u64::from(thread | NAMESPACES.iter().fold(0, |all, flag| all | flag.unsigned_abs()));
    let is_thread = SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(flags), thread.into());
    add(&mut rules, libc::SYS_clone, vec![long(is_thread)?])?;
    if extra.edits_lines {
        for request in TERMINAL_IOCTLS {
            by_argument(&mut rules, libc::SYS_ioctl, &[(1, u64::from(*request))])?;
        }
    }
    if extra.places_files {
        for request in PLACING_IOCTLS {
            by_argument(&mut rules, libc::SYS_ioctl, &[(1, u64::from(*request))])?;
        }
    }
    if extra.connects {
        CONNECTING.iter().for_each(|call| drop(rules.insert(*call, Vec::new())));
        CODE_CALLS.iter().for_each(|call| drop(rules.insert(*call, Vec::new())));
        return Ok(rules);
    }
    // A pair of sockets that reach one another, and no address: how signals wake threads.
    let stream = SeccompCondition::new(
        1,
        SeccompCmpArgLen::Dword,
        SeccompCmpOp::MaskedEq(SOCKET_TYPE),
        u64::from(libc::SOCK_STREAM.unsigned_abs()),
    );
    add(&mut rules, libc::SYS_socketpair, vec![is(0, u64::from(libc::AF_UNIX.unsigned_abs()))?, long(stream)?])?;
    let no_address = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0);
    add(&mut rules, libc::SYS_sendto, vec![long(no_address)?])?;
    // The program is there already; no memory becomes code. (Names of hosts are looked up by libraries.)
    for call in CODE_CALLS {
        let code = SeccompCmpOp::MaskedEq(u64::from(libc::PROT_EXEC.unsigned_abs()));
        let no_code = SeccompCondition::new(2, SeccompCmpArgLen::Dword, code, 0);
        add(&mut rules, *call, vec![long(no_code)?])?;
    }
    Ok(rules)
}

fn long(condition: std::result::Result<SeccompCondition, seccompiler::BackendError>) -> Result<SeccompCondition> {
    condition.map_err(|error| refused(&error))
}

/// The argument has this value, as far as the kernel looks at it: 32 bits.
fn is(argument: u8, value: u64) -> Result<SeccompCondition> {
    long(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value))
}

/// Allows the call where all of these conditions hold, besides where it is allowed already.
fn add(rules: &mut Rules, call: i64, conditions: Vec<SeccompCondition>) -> Result<()> {
    let rule = SeccompRule::new(conditions).map_err(|error| refused(&error))?;
    rules.entry(call).or_default().push(rule);
    Ok(())
}

fn by_argument(rules: &mut Rules, call: i64, values: &[(u8, u64)]) -> Result<()> {
    let conditions = values.iter().map(|(argument, value)| is(*argument, *value)).collect::<Result<Vec<_>>>()?;
    add(rules, call, conditions)
}

/// Calls that the kernel doesn't seem to have.
const MISSING: &[i64] =
    &[libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// Calls that are allowed with any arguments.
const ALLOWED: &[i64] = &[
    // Files that are open.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    libc::SYS_fadvise64,
    libc::SYS_readahead,
    libc::SYS_copy_file_range,
    libc::SYS_sendfile,
    libc::SYS_getdents64,
    // Opening them, which Landlock judges, and looking at them.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_getcwd,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_lstat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_access,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_getdents,
    // Waiting for them, and for other threads.
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
    libc::SYS_recvfrom,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_select,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_dup2,
    // Memory. (`mmap` and `mprotect` are below.)
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mincore,
    libc::SYS_msync,
    libc::SYS_membarrier,
    // Threads and their end.
    libc::SYS_futex,
    libc::SYS_futex_waitv,
    libc::SYS_set_robust_list,
    libc::SYS_get_robust_list,
    libc::SYS_set_tid_address,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Signals that come.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    libc::SYS_signalfd4,
    // Time, random bytes, and ids.
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_times,
    libc::SYS_getrusage,
    libc::SYS_getrlimit,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_time,
];

/// Allowed for memory that is no code.
const CODE_CALLS: &[i64] = &[libc::SYS_mmap, libc::SYS_mprotect];

/// The calls that a client of a server needs.
const CONNECTING: &[i64] = &[
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_shutdown,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
];

/// Requests of `ioctl`. For terminals: `TCGETS`, `TCGETS2`, `TIOCGWINSZ`, and `FIONBIO`. For block devices, their size,
/// sector sizes, discard and zeroing: `BLKGETSIZE64`, `BLKSSZGET`, `BLKPBSZGET`, `BLKDISCARD`, `BLKZEROOUT`. For files,
/// shared blocks (`FICLONE`, `FICLONERANGE`) and the reading of attributes (`FS_IOC_GETFLAGS`, `FS_IOC_FSGETXATTR`).
const IOCTLS: &[u32] = &[
    0x5401,
    0x802c_542a,
    0x5413,
    0x5421,
    0x8008_1272,
    0x1268,
    0x127b,
    0x1277,
    0x127f,
    0x4004_9409,
    0x4020_940d,
    0x8008_6601,
    0x801c_581f,
];

/// `FS_IOC_SETFLAGS`, `FS_IOC_FSSETXATTR`: for options that decide a new file's place on its disk. They set any
/// attribute.
const PLACING_IOCTLS: &[u32] = &[0x4008_6602, 0x401c_5820];

/// `TCSETS`, `TCSETSW`, `TCSETSF` and their newer kind: for a prompt.
const TERMINAL_IOCTLS: &[u32] = &[0x5402, 0x5403, 0x5404, 0x402c_542b, 0x402c_542c, 0x402c_542d];

/// Commands of `fcntl`, without those that choose the receiver of a signal.
const FCNTLS: &[i32] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_GETLK,
    libc::F_SETLK,
    libc::F_SETLKW,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_GETPIPE_SZ,
];

/// Options of `prctl`: names of threads and of memory, slack of timers, and giving up more.
const PRCTLS: &[i32] = &[
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_VMA,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
];

const NAMESPACES: &[i32] = &[
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// The bits of a socket's type that aren't flags.
const SOCKET_TYPE: u64 = 0xf;
