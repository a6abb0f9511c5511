// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The part of tar that packages use: plain files in one folder. POSIX ustar with GNU's and pax's long names and sizes.

use crate::limits;
use cowshed_types::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::io::{self, Read, Seek, SeekFrom};

/// Headers and data are in blocks of this many bytes.
pub const BLOCK_BYTES: u64 = 512;
/// Archives end at a multiple of this, as those of other programs do.
pub const RECORD_BYTES: u64 = 10240;
/// A longer header of pax, or a longer name, is refused.
const MOST_EXTRA_BYTES: u64 = 64 << 10;
/// From here on 11 octal digits can't hold the length.
const OCTAL_END: u64 = 1 << 33;

/// A file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name: one component, no folder.
    pub name: String,
    /// Its first byte in the archive.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// The dialect of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// POSIX 1003.1-1988.
    Ustar,
    /// GNU tar before POSIX (`--format=oldgnu`).
    OldGnu,
}

/// True when these first bytes of a file are the header of a descriptor in an archive.
pub fn starts_with_descriptor(block: &[u8]) -> bool {
    let Some(block) = block.first_chunk::<512>() else { return false };
    let name = text(&block[..100]);
    is_sum_right(block) && name.is_some_and(|name| has_ending(&name, "ovf"))
}

/// True when a name ends with a dot and this, in any case.
pub fn has_ending(name: &str, ending: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(start, end)| !start.is_empty() && end.eq_ignore_ascii_case(ending))
}

/// The files of an archive of `archive_len` bytes, in its order.
///
/// # Errors
/// For an archive that is damaged, cut off, or has more than plain files in one folder.
pub fn members(archive: &mut (impl Read + Seek), archive_len: u64) -> Result<Vec<Member>> {
    let mut walk = Walk { archive, archive_len, offset: 0 };
    let (mut members, mut names) = (Vec::new(), HashSet::new());
    let mut next = Extra::default();
    let mut headers = 0;
    while let Some(header) = walk.header()? {
        // Headers without a file of their own count too.
        headers += 1;
        if headers > 3 * limits::MEMBERS || members.len() >= limits::MEMBERS {
            return Err(Error::new(ErrorKind::Limit, format!("more than {} files in the archive", limits::MEMBERS)));
        }
        let kind = header.block[156];
        match kind {
            b'x' | b'g' => {
                let records = walk.extra(header.len)?;
                let extra = Extra::of_pax(&records, header.offset)?;
                match kind {
                    // A long name of GNU may come before it.
                    b'x' => next = Extra { name: extra.name.or(next.name), len: extra.len.or(next.len) },
                    _ if extra != Extra::default() => {
                        return Err(unsupported("names or sizes in a global header", header.offset));
                    }
                    _ => {}
                }
                continue;
            }
            b'L' => {
                let name = walk.extra(header.len)?;
                next.name = Some(text(&name).ok_or_else(|| damaged("a name is no UTF-8", header.offset))?);
                continue;
            }
            _ => {}
        }
        let extra = std::mem::take(&mut next);
        let name = match extra.name {
            Some(name) => name,
            None => name_of(&header.block).ok_or_else(|| damaged("a name is no UTF-8", header.offset))?,
        };
        let len = extra.len.unwrap_or(header.len);
        // A folder has no content. `tar -C folder .` has an entry for the folder itself, other programs have empty ones.
        if kind == b'5' {
            walk.skip(0)?;
            continue;
        }
        if !matches!(kind, b'0' | 0 | b'7') {
            let kind = printable(&char::from(kind).to_string());
            return Err(unsupported(
                &format!("'{}' is no plain file (type '{kind}')", printable(&name)),
                header.offset,
            ));
        }
        let name = plain_name(&name)?.to_owned();
        let offset = walk.offset;
        walk.skip(len).map_err(|error| error.context(format!("file '{name}'")))?;
        if !names.insert(name.clone()) {
            return Err(damaged(&format!("two files have the name '{name}'"), header.offset));
        }
        members.push(Member { name, offset, len });
    }
    Ok(members)
}

/// The name without a leading `./`, if it is one plain component.
///
/// # Errors
/// For names that lead to another folder, that terminals would obey, or that are too long.
pub fn plain_name(name: &str) -> Result<&str> {
    let plain = without_folder(name);
    let is_plain = !plain.is_empty()
        && !matches!(plain, "." | "..")
        && !plain.contains(|c: char| c == '/' || c == '\\' || is_obeyed(c))
        && plain.len() <= limits::NAME_BYTES;
    match is_plain {
        true => Ok(plain),
        false => Err(Error::new(
            ErrorKind::InvalidImage,
            format!("'{}' is no name of a file in the package's own folder", printable(name)),
        )),
    }
}

/// The name without `./` in front, however often.
pub fn without_folder(name: &str) -> &str {
    name.trim_start_matches("./")
}

/// Control characters, and those that change the order or the look of a text around them.
fn is_obeyed(c: char) -> bool {
    let is_format = matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}');
    c.is_control() || is_format
}

/// A text for messages: no control characters, and not without end.
pub fn printable(text: &str) -> String {
    const MOST: usize = 200;
    let mut shown: String = text.chars().take(MOST).flat_map(|c| escaped(c).collect::<Vec<char>>()).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

fn escaped(c: char) -> Box<dyn Iterator<Item = char>> {
    match is_obeyed(c) {
        true => Box::new(c.escape_default()),
        false => Box::new(std::iter::once(c)),
    }
}

/// The header of a file.
///
/// # Errors
/// For names that have no room in it.
pub fn header(name: &str, len: u64, seconds: u64, dialect: Dialect) -> Result<[u8; 512]> {
    let name = plain_name(name)?;
    let mut block = [0; 512];
    let Some(place) = block[..100].get_mut(..name.len()) else {
        return Err(Error::invalid_argument(format!("'{name}' is longer than 100 bytes, the most in an archive")));
    };
    place.copy_from_slice(name.as_bytes());
    let put =
        |block: &mut [u8; 512], at: usize, text: &str| block[at..at + text.len()].copy_from_slice(text.as_bytes());
    put(&mut block, 100, "0000644\0");
    put(&mut block, 108, "0000000\0");
    put(&mut block, 116, "0000000\0");
    block[124..136].copy_from_slice(&length(len));
    put(&mut block, 136, &format!("{:011o}\0", seconds.min(OCTAL_END - 1)));
    block[156] = b'0';
    match dialect {
        Dialect::Ustar => put(&mut block, 257, "ustar\x0000"),
        Dialect::OldGnu => put(&mut block, 257, "ustar  \0"),
    }
    let sum = sum(&block);
    put(&mut block, 148, &format!("{sum:06o}\0 "));
    Ok(block)
}

/// The most holes of a file that [`sparse_header`] takes.
pub const MOST_RUNS: usize = 1 << 20;

/// The header of a file with holes in GNU's old way, and the further blocks behind it: `runs` has the start and the
/// length of each run of data, in order, and the file has `len` bytes. The data of the runs follow, one behind the
/// other.
///
/// # Errors
/// For names that have no room, and for more than [`MOST_RUNS`].
pub fn sparse_header(name: &str, len: u64, runs: &[(u64, u64)], seconds: u64) -> Result<Vec<u8>> {
    const IN_HEADER: usize = 4;
    const IN_BLOCK: usize = 21;
    if runs.len() >= MOST_RUNS {
        return Err(Error::new(ErrorKind::Limit, "the file has too many holes for an archive"));
    }
    let mut runs = runs.to_vec();
    // A hole at the end has an empty run behind it.
    if runs.last().is_none_or(|(start, size)| start + size < len) {
        runs.push((len, 0));
    }
    let stored = runs.iter().map(|(_, size)| size).sum();
    let mut block = header(name, stored, seconds, Dialect::OldGnu)?;
    block[156] = b'S';
    let entry = |bytes: &mut [u8], (start, size): (u64, u64)| {
        bytes[..12].copy_from_slice(&length(start));
        bytes[12..24].copy_from_slice(&length(size));
    };
    let (first, others) = runs.split_at(runs.len().min(IN_HEADER));
    for (place, run) in block[386..482].chunks_exact_mut(24).zip(first) {
        entry(place, *run);
    }
    block[482] = u8::from(!others.is_empty());
    block[483..495].copy_from_slice(&length(len));
    let sum = format!("{:06o}\0 ", sum(&block));
    block[148..156].copy_from_slice(sum.as_bytes());
    let mut bytes = block.to_vec();
    let blocks = others.chunks(IN_BLOCK).len();
    for (index, part) in others.chunks(IN_BLOCK).enumerate() {
        let mut block = [0; 512];
        for (place, run) in block[..504].chunks_exact_mut(24).zip(part) {
            entry(place, *run);
        }
        block[504] = u8::from(index + 1 < blocks);
        bytes.extend_from_slice(&block);
    }
    Ok(bytes)
}

/// A length in a header: octal digits, from 8 GiB on GNU's way, which readers know for longer than pax's: the number itself,
/// big-endian.
fn length(len: u64) -> [u8; 12] {
    let mut field = [0; 12];
    match len < OCTAL_END {
        true => field.copy_from_slice(format!("{len:011o}\0").as_bytes()),
        false => {
            field[0] = 0x80;
            field[4..].copy_from_slice(&len.to_be_bytes());
        }
    }
    field
}

/// The zeroes between a file of this length and the next header.
pub fn padding(len: u64) -> usize {
    (len.wrapping_neg() % BLOCK_BYTES) as usize
}

/// The zeroes at the end of an archive whose files, padded, take this many bytes.
pub fn end(len: u64) -> usize {
    let with_mark = len + 2 * BLOCK_BYTES;
    (with_mark.next_multiple_of(RECORD_BYTES) - len) as usize
}

struct Walk<'a, A> {
    archive: &'a mut A,
    archive_len: u64,
    /// The next header, or the data behind the one that was read.
    offset: u64,
}

struct Header {
    block: [u8; 512],
    offset: u64,
    len: u64,
}

impl<A: Read + Seek> Walk<'_, A> {
    /// The next header; `None` at the end of the archive.
    fn header(&mut self) -> Result<Option<Header>> {
        if self.offset == self.archive_len {
            return Ok(None);
        }
        let offset = self.offset;
        let mut block = [0; 512];
        self.read(&mut block)?;
        if block == [0; 512] {
            return self.end(offset);
        }
        if !is_sum_right(&block) {
            let what = if offset == 0 { "no tar archive" } else { "the checksum of a header is wrong" };
            return Err(damaged(what, offset));
        }
        let len = number(&block[124..136]).ok_or_else(|| damaged("the length of a file is no number", offset))?;
        Ok(Some(Header { block, offset, len }))
    }

    /// The end of an archive is two blocks of zeroes, or one as the last block. A header behind one alone shows that the other was
    /// a header once.
    fn end(&mut self, zeroes: u64) -> Result<Option<Header>> {
        let mut block = [0; 512];
        if self.archive_len - self.offset >= BLOCK_BYTES {
            self.read(&mut block)?;
        }
        match block != [0; 512] && is_sum_right(&block) {
            true => Err(damaged("files follow on a lone block of zeroes", zeroes)),
            false => Ok(None),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        let read = self.archive.seek(SeekFrom::Start(self.offset)).and_then(|_| self.archive.read_exact(bytes));
        match read {
            Ok(()) => self.offset += bytes.len() as u64,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.cut_off()),
            Err(error) => return Err(Error::io(&error, "could not read the archive")),
        }
        Ok(())
    }

    /// The data of a header with more fields of the next file.
    fn extra(&mut self, len: u64) -> Result<Vec<u8>> {
        if len > MOST_EXTRA_BYTES {
            return Err(Error::new(ErrorKind::Limit, format!("a header of {len} bytes in the archive")));
        }
        let mut bytes = vec![0; len as usize];
        self.read(&mut bytes)?;
        self.skip(0)?;
        self.offset = self.offset.next_multiple_of(BLOCK_BYTES);
        Ok(bytes)
    }

    /// Goes past the data of a file.
    fn skip(&mut self, len: u64) -> Result<()> {
        let end = self.offset.checked_add(len).filter(|&end| end <= self.archive_len).ok_or_else(|| self.cut_off())?;
        // The padding of the last file may be missing with the mark of the end.
        self.offset = end.next_multiple_of(BLOCK_BYTES).min(self.archive_len.max(end));
        Ok(())
    }

    fn cut_off(&self) -> Error {
        let message = format!("the archive is cut off: it has {} bytes", self.archive_len);
        Error::new(ErrorKind::InvalidImage, message).offset(self.offset)
    }
}

/// The fields of a file that headers before its own give.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Extra {
    name: Option<String>,
    len: Option<u64>,
}

impl Extra {
    /// Records of pax: `LENGTH KEY=VALUE\n`, where the length counts all of it.
    fn of_pax(mut records: &[u8], offset: u64) -> Result<Extra> {
        let wrong = || damaged("a header of pax is damaged", offset);
        let mut extra = Extra::default();
        while !records.is_empty() {
            let space = records.iter().position(|&byte| byte == b' ').ok_or_else(wrong)?;
            let len = std::str::from_utf8(&records[..space]).ok().and_then(|digits| digits.parse::<usize>().ok());
            let len = len.filter(|&len| len > space + 1 && len <= records.len()).ok_or_else(wrong)?;
            let record = records[space + 1..len].strip_suffix(b"\n").ok_or_else(wrong)?;
            let equals = record.iter().position(|&byte| byte == b'=').ok_or_else(wrong)?;
            let value = || std::str::from_utf8(&record[equals + 1..]).map_err(|_| wrong());
            match &record[..equals] {
                // Without a value the header's own field counts.
                b"path" => extra.name = Some(value()?.to_owned()).filter(|name| !name.is_empty()),
                b"size" => extra.len = size_of(value()?).map_err(|()| wrong())?,
                key if key.starts_with(b"GNU.sparse") => return Err(unsupported("a file with holes", offset)),
                _ => {}
            }
            records = &records[len..];
        }
        Ok(extra)
    }
}

/// A length in decimal digits; `None` for no value.
fn size_of(value: &str) -> std::result::Result<Option<u64>, ()> {
    if value.is_empty() {
        return Ok(None);
    }
    let digits = value.bytes().all(|digit| digit.is_ascii_digit()).then_some(value);
    digits.and_then(|digits| digits.parse().ok()).filter(is_length).map(Some).ok_or(())
}

fn is_length(len: &u64) -> bool {
    i64::try_from(*len).is_ok()
}

/// The name in a header, with the folder that ustar keeps apart.
fn name_of(block: &[u8; 512]) -> Option<String> {
    let name = text(&block[..100])?;
    let folder = match &block[257..265] {
        b"ustar\x0000" => text(&block[345..500])?,
        _ => String::new(),
    };
    Some(if folder.is_empty() { name } else { format!("{folder}/{name}") })
}

/// Bytes up to the first NUL.
fn text(bytes: &[u8]) -> Option<String> {
    let len = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8(bytes[..len].to_vec()).ok()
}

/// Octal digits, or GNU's big-endian number with the first bit set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let (high, low) = field.split_at(field.len() - 8);
        let is_small =
            high.split_first().is_some_and(|(mark, rest)| *mark == 0x80 && rest.iter().all(|&byte| byte == 0));
        return low.try_into().ok().map(u64::from_be_bytes).filter(|len| is_small && is_length(len));
    }
    let digits = text(field)?;
    let digits = digits.trim_matches(' ');
    if digits.is_empty() {
        return Some(0);
    }
    digits.bytes().all(|digit| (b'0'..=b'7').contains(&digit)).then(|| u64::from_str_radix(digits, 8).ok())?
}

/// The sum of a header's bytes, its own field taken for spaces.
fn sum(block: &[u8; 512]) -> u64 {
    let others = block[..148].iter().chain(&block[156..]);
    others.map(|&byte| u64::from(byte)).sum::<u64>() + 8 * u64::from(b' ')
}

fn is_sum_right(block: &[u8; 512]) -> bool {
    number(&block[148..156]) == Some(sum(block))
}

fn damaged(what: &str, offset: u64) -> Error {
    Error::new(ErrorKind::InvalidImage, what).offset(offset)
}

fn unsupported(what: &str, offset: u64) -> Error {
    Error::unsupported(format!("{what}; a package has plain files alone")).offset(offset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (name, content) in files {
            bytes.extend(header(name, content.len() as u64, 0, Dialect::Ustar).unwrap());
            bytes.extend_from_slice(content);
            bytes.resize(bytes.len() + padding(content.len() as u64), 0);
        }
        let len = bytes.len();
        bytes.resize(len + end(len as u64), 0);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<Vec<Member>> {
        members(&mut Cursor::new(bytes), bytes.len() as u64)
    }

    /// A header of a kind, with the right sum.
    fn special(name: &str, len: u64, change: impl FnOnce(&mut [u8; 512])) -> [u8; 512] {
        let mut block = header(name, len, 0, Dialect::Ustar).unwrap();
        change(&mut block);
        let sum = sum(&block);
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        block
    }

    #[test]
    fn written_archives_are_read() {
        let bytes = archive(&[("a.ovf", b"x"), ("b.mf", &[1; 512]), ("c.vmdk", &[2; 513])]);
        assert!((bytes.len() as u64).is_multiple_of(RECORD_BYTES) && starts_with_descriptor(&bytes));
        let found = read(&bytes).unwrap();
        let shown: Vec<_> = found.iter().map(|m| (m.name.as_str(), m.offset, m.len)).collect();
        assert_eq!(shown, [("a.ovf", 512, 1), ("b.mf", 1536, 512), ("c.vmdk", 2560, 513)]);
    }

    #[test]
    fn long_files_have_their_length() {
        for len in [0, OCTAL_END - 1, OCTAL_END, 1 << 45] {
            let block = header("a", len, 0, Dialect::OldGnu).unwrap();
            assert_eq!(number(&block[124..136]), Some(len));
            assert!(is_sum_right(&block));
        }
        assert!(header(&"a".repeat(101), 0, 0, Dialect::Ustar).is_err());
    }

    #[test]
    fn long_names_of_pax_and_gnu_are_read() {
        let name = "n".repeat(150);
        for kind in [b'x', b'L'] {
            let record = format!("{} path={name}\n", 150 + 10);
            let extra = if kind == b'x' { record.into_bytes() } else { [name.as_bytes(), b"\0"].concat() };
            let mut bytes = special("extra", extra.len() as u64, |block| block[156] = kind).to_vec();
            bytes.extend(&extra);
            bytes.resize(1024, 0);
            bytes.extend(header("short", 3, 0, Dialect::Ustar).unwrap());
            bytes.extend(b"abc");
            assert_eq!(read(&bytes).unwrap(), [Member { name: name.clone(), offset: 1536, len: 3 }]);
        }
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        for name in [
            "../x",
            "/etc/passwd",
            "a/b",
            "..",
            ".",
            "",
            "a\\b",
            "a\nb",
            "./../x",
            "\u{1b}[31m",
            "a\u{202e}b",
            "./",
            "././.",
        ] {
            assert!(plain_name(name).is_err(), "{name:?}");
        }
        assert_eq!(plain_name("./a.vmdk").unwrap(), "a.vmdk");
        assert_eq!(plain_name("././a.vmdk").unwrap(), "a.vmdk");
        assert_eq!(printable("a\u{202e}b"), "a\\u{202e}b");
        let with_folder = special("passwd", 0, |block| block[345..348].copy_from_slice(b"../"));
        assert!(read(&with_folder).unwrap_err().to_string().contains("no name of a file"));
    }

    #[test]
    fn what_is_no_plain_file_is_refused() {
        for kind in [b'1', b'2', b'3', b'4', b'6', b'S', b'K', b'M', 0xff] {
            let error = read(&special("name", 0, |block| block[156] = kind)).unwrap_err();
            assert!(error.to_string().contains("is no plain file"), "{error}");
        }
        for name in ["./", "empty/"] {
            let folder = special("placeholder", 0, |block| {
                block[..100].fill(0);
                block[..name.len()].copy_from_slice(name.as_bytes());
                block[156] = b'5';
            });
            assert_eq!(read(&folder).unwrap(), [], "{name}: a folder has no content");
        }
    }

    #[test]
    fn damage_is_named() {
        let good = archive(&[("a.ovf", b"x"), ("b.vmdk", &[2; 5000])]);
        assert!(read(&good[..good.len() - 10000]).unwrap_err().to_string().contains("cut off"));
        for len in [1, 511, 512, 1500, 2000] {
            assert!(read(&good[..len]).unwrap_err().to_string().contains("cut off"), "{len}");
        }
        let mut bad = good.clone();
        bad[1024] ^= 1;
        assert!(read(&bad).unwrap_err().to_string().contains("checksum"));
        // A checksum in the form of a length.
        bad[1024 + 148] = 0xff;
        assert!(read(&bad).unwrap_err().to_string().contains("checksum"));
        assert!(read(&[7; 512]).unwrap_err().to_string().contains("no tar archive"));
        let twice = archive(&[("a.ovf", b"x"), ("a.ovf", b"y")]);
        assert!(read(&twice).unwrap_err().to_string().contains("two files"));
        let endless = special("a", 0, |block| block[124..136].copy_from_slice(&[0xff; 12]));
        assert!(read(&endless).unwrap_err().to_string().contains("no number"));
        let long = special("a", 0, |block| block[124..136].copy_from_slice(b"777777777777"));
        assert!(read(&long).unwrap_err().to_string().contains("cut off"));
        let huge = special("a", 1 << 20, |block| block[156] = b'x');
        assert_eq!(read(&huge).unwrap_err().kind(), ErrorKind::Limit);
    }

    #[test]
    fn a_lone_block_of_zeroes_is_no_end() {
        let first = archive(&[("a.ovf", b"x")]);
        let [first, second] = [&first[..1024], &archive(&[("b.vmdk", b"y")])[..1024]];
        let zeroes = [0; 512];
        assert!(read(&[first, &zeroes, second].concat()).unwrap_err().to_string().contains("lone block of zeroes"));
        for end in [&[][..], &zeroes, &[0; 1024], &[0; 700]] {
            assert_eq!(read(&[first, end].concat()).unwrap().len(), 1);
        }
        // As tar reads them: behind two blocks, and behind one, comes no file.
        assert_eq!(read(&[first, &[0; 1024], second].concat()).unwrap().len(), 1);
        assert_eq!(read(&[first, &zeroes, &[7; 512]].concat()).unwrap().len(), 1);
    }

    #[test]
    fn headers_before_a_file_add_up() {
        let name = "n".repeat(150);
        let with = |records: &str| {
            let mut bytes = Vec::new();
            for (kind, extra) in [(b'L', format!("{name}\0")), (b'x', records.to_owned())] {
                bytes.extend(special("extra", extra.len() as u64, |block| block[156] = kind));
                bytes.extend(extra.as_bytes());
                bytes.resize(bytes.len().next_multiple_of(512), 0);
            }
            bytes.extend(header("short", 3, 0, Dialect::Ustar).unwrap());
            bytes.extend(b"abc");
            read(&bytes)
        };
        for (records, shown, len) in [
            ("12 atime=12\n", name.as_str(), 3),
            ("10 size=2\n", &name, 2),
            ("8 size=\n", &name, 3),
            ("8 path=\n", &name, 3),
            ("10 path=p\n", "p", 3),
        ] {
            let found = with(records).unwrap();
            assert_eq!((found[0].name.as_str(), found[0].len), (shown, len), "{records}");
        }
        assert!(with("11 size=+2\n").unwrap_err().to_string().contains("damaged"));
    }

    #[test]
    fn archives_without_end_are_bounded() {
        let mut many = Vec::new();
        for _ in 0..3 * limits::MEMBERS + 1 {
            many.extend(special("x", 0, |block| block[156] = b'g'));
        }
        assert_eq!(read(&many).unwrap_err().kind(), ErrorKind::Limit);
    }
}
