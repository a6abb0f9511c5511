// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers, times and dumps as qemu-io prints them.

use std::fmt::Write as _;
use std::time::Duration;

const UNITS: [(&str, f64); 6] = [
    ("EiB", (1u64 << 60) as f64),
    ("PiB", (1u64 << 50) as f64),
    ("TiB", (1u64 << 40) as f64),
    ("GiB", (1u64 << 30) as f64),
    ("MiB", (1u64 << 20) as f64),
    ("KiB", 1024.0),
];

/// A number of bytes in its largest unit: `4 KiB`, `1.500 KiB`, `219.919518 bytes`.
pub fn size(bytes: f64) -> String {
    let (number, unit) = match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => (format!("{:.3}", bytes / unit), *name),
        None => (format!("{bytes:.6}"), "bytes"),
    };
    let whole = number.strip_suffix(".000").or_else(|| number.strip_suffix(".000000"));
    format!("{} {unit}", whole.unwrap_or(&number))
}

/// The facts of a request, for its report.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// The verb, in the past: "read", "wrote".
    pub what: &'a str,
    /// First byte.
    pub offset: u64,
    /// Bytes asked for.
    pub asked_bytes: u64,
    /// Bytes done.
    pub done_bytes: u64,
    /// The time that the request took.
    pub elapsed: Duration,
    /// `-C`: for programs.
    pub compact: bool,
}

impl Report<'_> {
    /// The lines, each with its end.
    pub fn render(&self) -> String {
        let seconds = self.elapsed.as_secs_f64().max(1e-9);
        let (bytes_per_second, ops_per_second) = (self.done_bytes as f64 / seconds, 1.0 / seconds);
        let centiseconds = self.elapsed.as_millis() / 10;
        let (s, cs) = (centiseconds / 100, centiseconds % 100);
        let clock = format!("{}:{:02}:{:02}.{cs:02}", s / 3600, s / 60 % 60, s % 60);
        if self.compact {
            return format!("{},1,{clock},{bytes_per_second:.3},{ops_per_second:.3}\n", self.done_bytes);
        }
        let time = if s < 60 { format!("{s:02}.{cs:02} sec") } else { clock };
        format!(
            "{} {}/{} bytes at offset {}\n{}, 1 ops; {time} ({}/sec and {ops_per_second:.4} ops/sec)\n",
            self.what,
            self.done_bytes,
            self.asked_bytes,
            self.offset,
            size(self.done_bytes as f64),
            size(bytes_per_second),
        )
    }
}

/// Sixteen bytes a line: offset, hexadecimal, text.
pub fn dump(bytes: &[u8], offset: u64) -> String {
    let mut text = String::new();
    for (index, line) in bytes.chunks(16).enumerate() {
        let _ = write!(text, "{:08x}:  ", offset + index as u64 * 16);
        for byte in line {
            let _ = write!(text, "{byte:02x} ");
        }
        text.push(' ');
        text.extend(line.iter().map(|byte| if byte.is_ascii_alphanumeric() { char::from(*byte) } else { '.' }));
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_their_largest_unit() {
        for (bytes, text) in [
            (0.0, "0 bytes"),
            (1023.0, "1023 bytes"),
            (219.919_518_2, "219.919518 bytes"),
            (1536.0, "1.500 KiB"),
            (1_048_576.0, "1 MiB"),
            (1_049_088.0, "1 MiB"),
            (1_100_288.0, "1.049 MiB"),
            ((1u64 << 62) as f64, "4 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn times_of_every_length() {
        let report = Report {
            what: "read",
            offset: 5,
            asked_bytes: 4096,
            done_bytes: 4096,
            elapsed: Duration::from_millis(2500),
            compact: false,
        };
        let expected = "read 4096/4096 bytes at offset 5\n4 KiB, 1 ops; 02.50 sec (1.600 KiB/sec and 0.4000 ops/sec)\n";
        assert_eq!(report.render(), expected);
        let long = Report { elapsed: Duration::from_secs(65), ..report };
        assert!(long.render().contains("; 0:01:05.00 ("), "{}", long.render());
        let compact = Report { compact: true, ..report };
        assert_eq!(compact.render(), "4096,1,0:00:02.50,1638.400,0.400\n");
    }

    #[test]
    fn dumps_have_sixteen_bytes_a_line() {
        assert_eq!(dump(b"ab~\xff", 100), "00000064:  61 62 7e ff  ab..\n");
        assert_eq!(dump(&[b'x'; 17], 0).lines().count(), 2);
    }
}
