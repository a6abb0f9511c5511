// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keys of the terminal, one by one, while a screen is drawn again and again.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use std::io::{IsTerminal, Read, stdin};
use std::time::{Duration, Instant};

/// The terminal sends each key at once and shows none, until this is dropped. Interrupts still work.
pub struct Keys {
    before: Option<Termios>,
}

impl Keys {
    /// Of standard input, where that is a terminal that the program is in front of.
    pub fn new() -> Keys {
        let before = stdin().is_terminal().then(|| tcgetattr(stdin()).ok()).flatten();
        if let Some(before) = &before {
            let mut modes = before.clone();
            modes.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            modes.special_codes[SpecialCodeIndex::VMIN] = 1;
            modes.special_codes[SpecialCodeIndex::VTIME] = 0;
            // Without it keys come after Enter, which is no reason not to go on.
            let _ = tcsetattr(stdin(), OptionalActions::Now, &modes);
        }
        Keys { before }
    }

    /// Waits; true when `q` was pressed meanwhile.
    pub fn wait_for_q(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if self.before.is_none() {
                std::thread::sleep(left);
                return false;
            }
            let seconds = i64::try_from(left.as_secs()).unwrap_or(i64::MAX);
            let timeout = Timespec { tv_sec: seconds, tv_nsec: left.subsec_nanos().into() };
            let input = stdin();
            let mut ready = [PollFd::new(&input, PollFlags::IN)];
            if poll(&mut ready, Some(&timeout)).is_ok_and(|ready| ready > 0) {
                let mut keys = [0; 64];
                match stdin().lock().read(&mut keys) {
                    Ok(read) if keys[..read].contains(&b'q') => return true,
                    // The terminal is gone.
                    Ok(0) | Err(_) => return true,
                    Ok(_) => {}
                }
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = tcsetattr(stdin(), OptionalActions::Now, before);
        }
    }
}
