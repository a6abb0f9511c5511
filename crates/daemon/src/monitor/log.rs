// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Copies of the monitors' messages, in files.

use cowshed_types::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// `logfile`, `logappend` and `logtimestamp` of a character device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// The file; it is made where there is none.
    pub path: PathBuf,
    /// Keep the content that the file has.
    pub append: bool,
    /// Begin each line with its time.
    pub timestamps: bool,
}

/// A file that takes a copy of all that a character device sends.
#[derive(Debug)]
pub struct Log {
    state: Mutex<LogState>,
    timestamps: bool,
}

#[derive(Debug)]
struct LogState {
    file: File,
    /// The next byte begins a line.
    begins: bool,
    /// An error was reported; the next ones are not.
    has_failed: bool,
}

impl Log {
    /// Opens the file.
    pub fn open(options: &LogOptions) -> Result<Arc<Log>> {
        let mut how = OpenOptions::new();
        match options.append {
            true => how.append(true),
            false => how.write(true).truncate(true),
        };
        let path = options.path.display();
        let failed = |error: io::Error| {
            Error::io(&error, "could not open the log")
                .file(path.to_string())
                .qemu(format!("Could not create '{path}'"))
        };
        let file = how.create(true).open(&options.path).map_err(failed)?;
        let state = Mutex::new(LogState { file, begins: true, has_failed: false });
        Ok(Arc::new(Log { state, timestamps: options.timestamps }))
    }

    /// Adds bytes. An error is reported once, and changes nothing else.
    pub(super) fn write(&self, bytes: &[u8]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let written = match self.timestamps {
            true => {
                let (lines, begins) = dated(bytes, state.begins);
                state.begins = begins;
                state.file.write_all(&lines)
            }
            false => state.file.write_all(bytes),
        };
        if let Err(error) = written
            && !std::mem::replace(&mut state.has_failed, true)
        {
            tracing::warn!(%error, "the log of a character device can't be written; what it lacks is lost");
        }
    }
}

/// With the time before each line that begins here, and whether the next byte begins one.
fn dated(bytes: &[u8], mut begins: bool) -> (Vec<u8>, bool) {
    let mut lines = Vec::with_capacity(bytes.len() + 32);
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        if begins {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            lines.extend_from_slice(date(now.as_secs(), now.subsec_micros()).as_bytes());
            lines.push(b' ');
        }
        lines.extend_from_slice(line);
        begins = line.ends_with(b"\n");
    }
    (lines, begins)
}

/// Seconds since 1970 as `2026-11-26T11:17:47.077616Z`.
fn date(seconds: u64, micros: u32) -> String {
    const DAY: u64 = 86_400;
    let (mut days, rest) = (seconds / DAY, seconds % DAY);
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000007Z"),
            (951_782_399, "2000-02-28T23:59:59.000007Z"),
            (951_782_400, "2000-02-29T00:00:00.000007Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000007Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000007Z"),
            (1_795_691_867, "2026-11-26T11:17:47.000007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000007Z"),
        ] {
            assert_eq!(date(seconds, 7), expected);
        }
    }

    #[test]
    fn a_line_that_comes_in_parts_has_one_time() {
        let (first, begins) = dated(b"ab", true);
        assert!(first.ends_with(b"Z ab") && !begins);
        assert_eq!(dated(b"c\n", begins), (b"c\n".to_vec(), true));
        let (lines, _) = dated(b"x\ny\n", true);
        assert_eq!(lines.iter().filter(|byte| **byte == b'Z').count(), 2);
    }
}
