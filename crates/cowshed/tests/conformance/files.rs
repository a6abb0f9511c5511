// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Compares the files that two runs left: names, lengths, headers, allocation maps and content.

use cowshed_testkit::qemu::Qemu;
use rustix::fs::SeekFrom;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

const QCOW2_MAGIC: &[u8] = b"QFI\xfb";
/// Of the extents of a VMDK disk, which have no descriptor.
const EXTENT_MAGIC: &[u8] = b"KDMV";
/// At the end of a fixed VHD.
const FOOTER_MAGIC: &[u8] = b"conectix";
const FOOTER_BYTES: u64 = 512;
const LUKS_MAGIC: &[u8] = b"LUKS\xba\xbe";
/// The space that two writers may leave free in the file, in bytes.
const GROWTH: u64 = 512 << 10;
/// The part of a file with its header and what belongs to it, in bytes.
const START_BYTES: u64 = 2 << 20;
/// The piece in which files are compared, in bytes.
const PIECE_BYTES: u64 = 256 << 10;
/// Header fields with the places of tables, which are the writer's affair.
const PLACES: [std::ops::Range<usize>; 3] = [40..48, 48..56, 64..72];

/// Pairs of QEMU's and our descriptions of files, where they differ.
pub fn differences(qemu: &Qemu, theirs: &Path, ours: &Path) -> Vec<(String, String)> {
    let names = |folder: &Path| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry"));
        let entries = entries.filter(|entry| entry.file_type().is_ok_and(|kind| !kind.is_socket()));
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let (their_names, our_names) = (names(theirs), names(ours));
    let mut found = Vec::new();
    for name in their_names.union(&our_names) {
        match (their_names.contains(name), our_names.contains(name)) {
            (true, true) => found.extend(difference(qemu, &theirs.join(name), &ours.join(name), name)),
            (is_theirs, is_ours) => found.push((format!("{name}: {is_theirs}"), format!("{name}: {is_ours}"))),
        }
    }
    found
}

fn difference(qemu: &Qemu, theirs: &Path, ours: &Path, name: &str) -> Option<(String, String)> {
    let (their_ends, our_ends) = (Ends::read(theirs), Ends::read(ours));
    if their_ends == our_ends && has_same_bytes(theirs, ours, their_ends.length) {
        return None;
    }
    let described = |path: &Path, ends: &Ends| format!("{name}: {}", describe(qemu, path, ends));
    let (mut of_theirs, mut of_ours) = (described(theirs, &their_ends), described(ours, &our_ends));
    // Keys and their salts are random. An extent alone is no disk: it was compared along with its descriptor.
    if their_ends.start.starts_with(EXTENT_MAGIC) && name.contains("-s0") {
        return None;
    }
    if !their_ends.start.starts_with(LUKS_MAGIC) && !is_encrypted(&their_ends.start) {
        let format = format_of(qemu, theirs, &their_ends);
        let said = qemu.img(["compare", "-U", &layer(&format, theirs), &layer(&format, ours)]);
        if said.code != 0 {
            of_theirs += &format!("\ncontent: {}{}", said.stdout, said.stderr);
        }
    }
    // Of qcow2 only a file that is much longer is a difference: clusters that were freed and weren't used again.
    if is_qcow2(&their_ends.start) && our_ends.length > their_ends.length + GROWTH {
        of_theirs += &format!("\nlength: {}", their_ends.length);
        of_ours += &format!("\nlength: {}", our_ends.length);
    }
    if of_theirs == of_ours {
        return None;
    }
    of_ours.push('\n');
    of_theirs.push('\n');
    Some((of_theirs, of_ours))
}

/// The parts of a file that tell its format and its fields. Folders and devices have none.
#[derive(Default, PartialEq)]
struct Ends {
    length: u64,
    start: Vec<u8>,
    footer: Vec<u8>,
}

impl Ends {
    fn read(path: &Path) -> Ends {
        if !path.is_file() {
            return Ends::default();
        }
        let Ok(file) = File::open(path) else { return Ends::default() };
        let length = file.metadata().map_or(0, |about| about.len());
        let read = |bytes: u64, at: u64| {
            let mut read = vec![0; bytes as usize];
            file.read_exact_at(&mut read, at).map_or_else(|_| Vec::new(), |()| read)
        };
        let footer = length.min(FOOTER_BYTES);
        Ends { length, start: read(length.min(START_BYTES), 0), footer: read(footer, length - footer) }
    }
}

/// Whether two files of a length have the same content. Common holes aren't read.
fn has_same_bytes(one: &Path, other: &Path, length: u64) -> bool {
    if length == 0 {
        return true;
    }
    let files = [one, other].map(|path| File::open(path).expect("a file"));
    let mut pieces = [(); 2].map(|()| vec![0; PIECE_BYTES as usize]);
    let mut at = 0;
    while let Some(start) = files.iter().filter_map(|file| next_data(file, at)).min() {
        let bytes = PIECE_BYTES.min(length - start) as usize;
        for (file, piece) in files.iter().zip(&mut pieces) {
            file.read_exact_at(&mut piece[..bytes], start).expect("the file can be read");
        }
        if pieces[0][..bytes] != pieces[1][..bytes] {
            return false;
        }
        at = start + bytes as u64;
    }
    true
}

/// Where the next data of a file is that lies at `at` or behind it.
fn next_data(file: &File, at: u64) -> Option<u64> {
    rustix::fs::seek(file, SeekFrom::Data(at)).ok()
}

fn is_encrypted(bytes: &[u8]) -> bool {
    is_qcow2(bytes) && bytes.get(32..36).is_some_and(|method| method != [0; 4])
}

/// Version 1 is the format before.
fn is_qcow2(bytes: &[u8]) -> bool {
    bytes.starts_with(QCOW2_MAGIC) && bytes.get(4..8) != Some(&[0, 0, 0, 1])
}

fn format_of(qemu: &Qemu, path: &Path, ends: &Ends) -> String {
    if ends.footer.starts_with(FOOTER_MAGIC) {
        return "vpc".to_owned();
    }
    if is_qcow2(&ends.start) {
        return "qcow2".to_owned();
    }
    let info = qemu.img(["info", "-U", "--output=json", &path.display().to_string()]);
    let info: serde_json::Value = serde_json::from_str(&info.stdout).unwrap_or_default();
    info.get("format").and_then(|format| format.as_str()).unwrap_or("raw").to_owned()
}

/// The name of an image without its backing files, which are compared by themselves, and may be missing or a loop.
fn layer(format: &str, path: &Path) -> String {
    let mut options = serde_json::json!({"driver": format, "file": {"driver": "file", "filename": path}});
    if ["qcow", "qcow2", "qed", "vmdk"].contains(&format) {
        options["backing"] = serde_json::Value::Null;
    }
    format!("json:{options}")
}

/// Length, header and map. The places of clusters, and whether the file has holes in them, are the writer's affair.
fn describe(qemu: &Qemu, path: &Path, ends: &Ends) -> String {
    if !is_qcow2(&ends.start) {
        // Of an image the content counts, and where it stands is the writer's affair.
        return match format_of(qemu, path, ends) {
            format if format == "raw" => format!("{} bytes", ends.length),
            format => format!("an image of the format {format}"),
        };
    }
    let mut text = header(&ends.start);
    let map = qemu.img(["map", "-U", "--output=json", &layer("qcow2", path)]);
    let map: serde_json::Value = serde_json::from_str(&map.stdout).unwrap_or_default();
    let mut last: Option<(serde_json::Value, u64, u64)> = None;
    let line = |(entry, start, end): &(serde_json::Value, u64, u64)| format!("\nmap: {start}-{end} {entry}");
    for entry in map.as_array().into_iter().flatten() {
        let mut kind = entry.clone();
        let object = kind.as_object_mut().expect("an object");
        let mut number = |key| object.remove(key).and_then(|value| value.as_u64()).unwrap_or_default();
        let (start, length, _) = (number("start"), number("length"), number("offset"));
        if object.get("data").is_some_and(|data| data == true) {
            object.remove("zero");
        }
        match &mut last {
            Some((before, _, end)) if *before == kind && *end == start => *end += length,
            _ => {
                text += &last.as_ref().map(line).unwrap_or_default();
                last = Some((kind, start, start + length));
            }
        }
    }
    text + &last.as_ref().map(line).unwrap_or_default()
}

/// Fields and extensions of a qcow2 header, one a line, without the places of tables.
fn header(bytes: &[u8]) -> String {
    let number =
        |at: usize| bytes.get(at..at + 4).map_or(0, |field| u32::from_be_bytes(field.try_into().unwrap_or_default()));
    let length = if number(4) < 3 { 72 } else { number(100) as usize };
    let mut fields = bytes.get(..length.min(bytes.len())).unwrap_or_default().to_vec();
    for range in PLACES {
        fields.get_mut(range).into_iter().for_each(|field| field.fill(0));
    }
    // The place of the backing file's name follows from the extensions.
    let (name_at, name_length) = (number(12) as usize, number(16) as usize);
    fields.get_mut(8..16).into_iter().for_each(|field| field.fill(0));
    let mut text = format!("\nheader: {}", hex(&fields));
    let name = bytes.get(name_at..name_at.saturating_add(name_length)).unwrap_or_default();
    text += &format!("\nbacking file: {}", String::from_utf8_lossy(name));
    let mut at = length;
    while let Some(kind) = bytes.get(at..at + 4) {
        let size = number(at + 4) as usize;
        let data = bytes.get(at + 8..(at + 8).saturating_add(size)).unwrap_or_default();
        // The bitmap directory and the header of LUKS are places.
        let data = if matches!(number(at), 0x2385_2875 | 0x0537_be77) { String::new() } else { hex(data) };
        text += &format!("\nextension {}: {data}", hex(kind));
        if number(at) == 0 {
            break;
        }
        at += 8 + size.next_multiple_of(8);
    }
    text
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
