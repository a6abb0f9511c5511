// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Leaving the signals that end the process to one of its threads.
//!
//! Linux prefers the first thread for a signal of the process. A handler waits while that thread is in a call that a kill
//! alone ends. The open of a file whose server has stopped is such a call. So the first thread blocks the signals.

use std::mem::MaybeUninit;

/// The signals that end the process in order.
const ENDS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// The blocked signals of a thread.
#[derive(Clone, Copy)]
pub struct SignalMask(libc::sigset_t);

impl SignalMask {
    /// Blocks the signals that end the process for this thread, and for those that it starts. The mask before.
    pub fn block_ends() -> SignalMask {
        change(libc::SIG_BLOCK)
    }

    /// This mask is that of the calling thread from now on.
    pub fn set(&self) {
        // SAFETY: the set is a whole one, of the kernel. The one before is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}

impl std::fmt::Debug for SignalMask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SignalMask")
    }
}

/// Starts a program that gets the three standard streams alone of this process's descriptors. It heeds the signals that end a process,
/// though this thread may leave them to others.
pub fn spawn_apart(command: &mut std::process::Command) -> std::io::Result<std::process::Child> {
    // SAFETY: the call touches no memory, and closes nothing here. A kernel that lacks it passes the descriptors on.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    let before = change(libc::SIG_UNBLOCK);
    let started = command.spawn();
    before.set();
    started
}

/// Adds the signals to the mask of this thread, or takes them off. The mask before.
fn change(how: libc::c_int) -> SignalMask {
    let mut ends = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: `sigemptyset` makes a whole set of `ends`. Zeroes are a set without signals, and the last call writes the
    // one before there. Both live for the calls, which fail for no valid number.
    unsafe {
        libc::sigemptyset(ends.as_mut_ptr());
        for signal in ENDS {
            libc::sigaddset(ends.as_mut_ptr(), signal);
        }
        libc::pthread_sigmask(how, ends.as_ptr(), before.as_mut_ptr());
        SignalMask(before.assume_init())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap().to_owned()
    }

    #[test]
    fn children_get_signals_and_no_descriptors() {
        use std::os::fd::AsRawFd;
        let first = blocked();
        let kept = std::fs::File::open("/dev/null").unwrap();
        rustix::io::fcntl_setfd(&kept, rustix::io::FdFlags::empty()).unwrap();
        let before = SignalMask::block_ends();
        assert!(blocked().ends_with("4003"), "{}", blocked());
        let script = format!("grep SigBlk /proc/self/status; ls -l /proc/$$/fd/{}", kept.as_raw_fd());
        let mut command = std::process::Command::new("sh");
        let child = spawn_apart(command.args(["-c", &script]).stdout(std::process::Stdio::piped()));
        let said = child.unwrap().wait_with_output().unwrap().stdout;
        assert_eq!(String::from_utf8(said).unwrap().trim_end(), first);
        assert!(blocked().ends_with("4003"), "{}", blocked());
        before.set();
        assert_eq!(blocked(), first);
    }
}
