// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The thread of a program that waits for the reply to a request.

/// Signals that end no process by default: `CHLD`, `CONT`, `STOP`, `TSTP`, `TTIN`, `TTOU`, `URG` and `WINCH`.
const HARMLESS: u64 = mask(17) | mask(18) | mask(19) | mask(20) | mask(21) | mask(22) | mask(23) | mask(28);

const fn mask(signal: u32) -> u64 {
    1 << (signal - 1)
}

/// True where a signal ends the thread as soon as its request is answered, or has ended it already. Then no program
/// sees the answer. False also of a thread that this process can't see: one of another namespace, or a hidden one.
///
/// Only `status` may be read. Others, such as `stat`, wait for an execve(2) of the process, and that closes files: it waits for
/// this server.
///
/// `thread` is its number in the header of the request, zero for none.
pub(crate) fn is_dying(thread: u32) -> bool {
    let status = || std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    thread != 0 && has_fatal_signal(&status())
}

/// True where `/proc/PID/status` has a signal that the thread neither blocks nor ignores nor catches. A process that exits
/// by it has it still.
fn has_fatal_signal(status: &str) -> bool {
    let set = |name: &str| {
        let digits = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
    };
    let sets = [set("SigPnd"), set("ShdPnd"), set("SigBlk"), set("SigIgn"), set("SigCgt")];
    match sets {
        [Some(own), Some(shared), Some(blocked), Some(ignored), Some(caught)] => {
            (own | shared) & !(blocked | ignored | caught | HARMLESS) != 0
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(own: u64, shared: u64, caught: u64) -> String {
        let more = "SigBlk:\t0000000000000200\nSigIgn:\t0000000000001000\n";
        format!("Name:\tdd\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\n{more}SigCgt:\t{caught:016x}\n")
    }

    #[test]
    fn signals_that_end_a_program_are_fatal() {
        const KILL: u64 = mask(9);
        const TERM: u64 = mask(15);
        const QUIT: u64 = mask(3);
        let is_fatal = |own, shared, caught| has_fatal_signal(&status(own, shared, caught));
        assert!(is_fatal(KILL, 0, 0) && is_fatal(0, KILL, 0) && is_fatal(0, TERM, 0) && is_fatal(QUIT, 0, 0));
        assert!(!is_fatal(0, 0, 0) && !is_fatal(0, TERM, TERM), "no signal, or one that is caught");
        assert!(!is_fatal(mask(10), mask(13), 0), "blocked, ignored");
        assert!(!is_fatal(mask(17), mask(20) | mask(28), 0), "a child, a stop, another size of the window");
        assert!(!has_fatal_signal("") && !has_fatal_signal("SigPnd:\t0000000000000100\n"));
    }

    #[test]
    fn living_thread_is_not_dying() {
        assert!(!is_dying(0) && !is_dying(std::process::id()));
    }
}
