// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Byte ranges (RFC 9110, section 14).

use std::ops::Range;

/// The most ranges of a request; a client that asks for more gets none.
pub const MAX_RANGES: usize = 32;

/// The ranges that a field `Range` names in a content of some length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// All: the field has another unit, or breaks the grammar, so it doesn't count.
    All,
    /// These, as they were asked for, none of them empty; neighbours that overlap or touch are one.
    Parts(Vec<Range<u64>>),
    /// Nothing that is there, or too many ranges.
    Nothing,
}

/// A request for bytes behind others that the client has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaterRange {
    /// Its first byte; not 0.
    pub start: u64,
    /// Its last byte; `None`: all that follow.
    pub last: Option<u64>,
}

impl LaterRange {
    /// The ranges of a field `Range` that don't begin with the first byte, as one; those that count from the end are none.
    pub fn of(field: &str) -> Option<LaterRange> {
        let (_, set) = field.split_once('=')?;
        let mut found: Option<LaterRange> = None;
        for (first, last) in set.split(',').filter_map(|spec| spec.split_once('-')) {
            let Some(start) = number(first.trim()).filter(|start| *start > 0) else { continue };
            let last = number(last.trim());
            let of_both = found.map(|found| (found.start.min(start), found.last.zip(last).map(|(a, b)| a.max(b))));
            let (start, last) = of_both.unwrap_or((start, last));
            found = Some(LaterRange { start, last });
        }
        found
    }
}

/// The ranges that the value of a field `Range` names in `len` bytes.
pub fn wanted(field: &str, len: u64) -> Wanted {
    let Some((unit, set)) = field.split_once('=') else { return Wanted::All };
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return Wanted::All;
    }
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut count = 0;
    for spec in set.split(',').map(str::trim).filter(|spec| !spec.is_empty()) {
        count += 1;
        if count > MAX_RANGES {
            return Wanted::Nothing;
        }
        let Some(part) = one(spec, len) else { return Wanted::All };
        let Some(part) = part else { continue };
        match parts.last_mut() {
            Some(last) if part.start <= last.end && last.start <= part.end => {
                *last = last.start.min(part.start)..last.end.max(part.end);
            }
            _ => parts.push(part),
        }
    }
    // Ranges that overlap with earlier ones would multiply the content.
    let total = parts.iter().try_fold(0_u64, |total, part| total.checked_add(part.end - part.start));
    match (count, parts.is_empty(), total) {
        (0, ..) => Wanted::All,
        (_, true, _) => Wanted::Nothing,
        (_, _, Some(total)) if total <= len => Wanted::Parts(parts),
        _ => Wanted::Nothing,
    }
}

/// A range of the set: `None` when it breaks the grammar, `Some(None)` when nothing of it is there.
fn one(spec: &str, len: u64) -> Option<Option<Range<u64>>> {
    let (first, last) = spec.split_once('-')?;
    let (first, last) = (first.trim(), last.trim());
    if first.is_empty() {
        let count = number(last)?.min(len);
        return Some((count > 0).then(|| len - count..len));
    }
    let first = number(first)?;
    let end = match last {
        "" => len,
        last => {
            let last = number(last)?;
            if last < first {
                return None;
            }
            last.saturating_add(1).min(len)
        }
    };
    Some((first < len).then_some(first..end))
}

/// Decimal digits; a number that is too large counts as the largest one.
fn number(text: &str) -> Option<u64> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_the_rfc_has_them() {
        let parts = |field: &str| match wanted(field, 10_000) {
            Wanted::Parts(parts) => parts,
            other => panic!("{field}: {other:?}"),
        };
        // The examples of RFC 9110, 14.1.2.
        assert_eq!(parts("bytes=0-499"), [0..500]);
        assert_eq!(parts("bytes=500-999"), [500..1000]);
        assert_eq!(parts("bytes=-500"), [9500..10_000]);
        assert_eq!(parts("bytes=9500-"), [9500..10_000]);
        assert_eq!(parts("bytes=0-0,-1"), [0..1, 9999..10_000]);
        assert_eq!(parts("bytes= 0-999, 4500-5499, -1000"), [0..1000, 4500..5500, 9000..10_000]);
        assert_eq!(parts("bytes=500-600,601-999"), [500..1000]);
        assert_eq!(parts("bytes=500-700,601-999"), [500..1000]);
        assert_eq!(parts("BYTES=0-99999999999999999999999"), [0..10_000]);
        assert_eq!(parts("bytes=0-1,20000-30000"), [0..2]);
        assert_eq!(parts("bytes=-20000"), [0..10_000]);
    }

    #[test]
    fn missing_ranges_are_empty_and_wrong_ones_ignored() {
        for field in ["bytes=10000-", "bytes=10000-20000", "bytes=-0", "bytes=99999999999999999999999-"] {
            assert_eq!(wanted(field, 10_000), Wanted::Nothing, "{field}");
        }
        for field in ["lines=0-1", "bytes", "bytes=", "bytes=a-b", "bytes=5-4", "bytes=0-1,x", "bytes=-", "bytes=0x1-2"]
        {
            assert_eq!(wanted(field, 10_000), Wanted::All, "{field}");
        }
        assert_eq!(wanted("bytes=0-", 0), Wanted::Nothing);
    }

    #[test]
    fn later_ranges_begin_behind_the_first_byte() {
        let later = |field| LaterRange::of(field).map(|LaterRange { start, last }| (start, last));
        assert_eq!([later("bytes=5-"), later("bytes= 5 - 9 ")], [Some((5, None)), Some((5, Some(9)))]);
        assert_eq!([later("bytes=0-9"), later("bytes=-9"), later("bytes"), later("bytes=a-9")], [None; 4]);
        assert_eq!([later("bytes=0-9,5-9,20-29"), later("bytes=5-9,7-")], [Some((5, Some(29))), Some((5, None))]);
    }

    #[test]
    fn ranges_never_multiply_the_content() {
        assert_eq!(wanted("bytes=0-,5-6,0-", 10), Wanted::Parts(vec![0..10]));
        assert_eq!(wanted("bytes=0-8,9-9,0-8", 10), Wanted::Parts(vec![0..10]));
        assert_eq!(wanted("bytes=0-6,8-9,0-6", 10), Wanted::Nothing);
        let many = (0..MAX_RANGES + 1).map(|at| format!("{}-{}", at * 2, at * 2)).collect::<Vec<_>>().join(",");
        assert_eq!(wanted(&format!("bytes={many}"), 10_000), Wanted::Nothing);
    }

    proptest::proptest! {
        #[test]
        fn parts_lie_inside(field in "bytes=[0-9, -]{0,40}", len in 0_u64..200) {
            if let Wanted::Parts(parts) = wanted(&field, len) {
                assert!(!parts.is_empty());
                assert!(parts.iter().all(|part| part.start < part.end && part.end <= len));
            }
        }
    }
}
