// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Disks of the kind seSparse, which ESX makes for snapshots. The real qemu-img reads them and makes none, so a generator here
//! lays them out, and the real tool says whether it is right: docs/decisions/0014-sesparse.md.

use crate::oracle::{Oracle, words};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// Words of the header.
const CAPACITY: usize = 2;
const VOLATILE: usize = 10;
const DIRECTORY: usize = 16;
const DIRECTORY_SIZE: usize = 17;
const TABLES: usize = 18;
const GRAINS: usize = 24;

/// Where the parts of the generator's extents are, in sectors.
const VOLATILE_AT: usize = 1;
const DIRECTORY_AT: usize = 8;
const TABLES_AT: usize = 16;
const TABLE_SECTORS: usize = 64;
const TABLE_COUNT: usize = 3;
const GRAINS_AT: usize = TABLES_AT + TABLE_COUNT * TABLE_SECTORS + 16;
const GRAIN_BYTES: usize = 4096;
const SPAN_BYTES: u64 = 16 << 20;

/// The entry of a table that names grain `number`.
fn grain(number: u64) -> u64 {
    3 << 60 | (number & 0xfff) << 48 | number >> 12
}

/// The entry of a directory that names table `number`.
fn table(number: u64) -> u64 {
    0x1000_0000 << 32 | number
}

/// An extent before it is a file.
#[derive(Clone)]
struct Extent {
    header: [u64; 64],
    volatile: [u64; 64],
    directory: Vec<u64>,
    /// Table, index, entry.
    entries: Vec<(usize, usize, u64)>,
    grains: u8,
}

impl Extent {
    /// Three tables, of which the disk uses one, and grains that are numbered from 1 on by their bytes.
    fn new(sectors: u64) -> Self {
        let mut header = [0; 64];
        header[..6].copy_from_slice(&[0xcafe_babe, 0x2_0000_0001, sectors, 8, 64, 0]);
        let [volatile, directory, tables, grains] =
            [VOLATILE_AT, DIRECTORY_AT, TABLES_AT, GRAINS_AT].map(|sector| sector as u64);
        let bitmap = grains - 16;
        header[VOLATILE..26].copy_from_slice(&[
            volatile,
            1,
            2,
            2,
            4,
            4,
            directory,
            8,
            tables,
            bitmap - tables,
            bitmap,
            8,
            bitmap + 8,
            8,
            grains,
            64,
        ]);
        let mut volatile = [0; 64];
        volatile[..4].copy_from_slice(&[0xcafe_cafe, 1, 7, 0]);
        let entries = vec![
            (0, 1, 1 << 60),
            (0, 2, 2 << 60),
            (0, 3, grain(0)),
            (0, 4, grain(1)),
            (0, 5, grain(3)),
            (0, 7, 1 << 60),
            (0, 255, grain(4)),
        ];
        Extent { header, volatile, directory: vec![table(0)], entries, grains: 8 }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; GRAINS_AT * 512];
        let mut put = |at: usize, words: &[u64]| {
            for (index, word) in words.iter().enumerate() {
                bytes[at + index * 8..at + index * 8 + 8].copy_from_slice(&word.to_le_bytes());
            }
        };
        put(0, &self.header);
        put(VOLATILE_AT * 512, &self.volatile);
        put(DIRECTORY_AT * 512, &self.directory);
        for (table, index, entry) in &self.entries {
            put((TABLES_AT + table * TABLE_SECTORS) * 512 + index * 8, &[*entry]);
        }
        for number in 0..self.grains {
            bytes.extend([number + 1; GRAIN_BYTES]);
        }
        bytes
    }

    /// Writes the extent and a descriptor. `parent`: its content id and name.
    fn write(&self, folder: &Path, name: &str, parent: Option<(&str, &str)>) {
        fs::write(folder.join(format!("{name}-sesparse.vmdk")), self.bytes()).unwrap();
        describe(folder, name, &format!("RW {} SESPARSE \"{name}-sesparse.vmdk\"", self.header[CAPACITY]), parent);
    }
}

fn describe(folder: &Path, name: &str, lines: &str, parent: Option<(&str, &str)>) {
    let (cid, hint) =
        parent.map_or(("ffffffff", String::new()), |(cid, file)| (cid, format!("parentFileNameHint=\"{file}\"\n")));
    let text = format!(
        "# Disk DescriptorFile\nversion=1\nCID=7fffffff\nparentCID={cid}\nisNativeSnapshot=\"no\"\ncreateType=\"seSparse\"\n{hint}\
         # Extent description\n{lines}\n"
    );
    fs::write(folder.join(format!("{name}.vmdk")), text).unwrap();
}

/// The bytes of a disk of [`Extent::new`] over `below`.
fn expected(mut below: Vec<u8>) -> Vec<u8> {
    for (index, byte) in [(1, 0), (2, 0), (3, 1), (4, 2), (5, 4), (7, 0), (255, 5)] {
        let end = below.len();
        below[(index * GRAIN_BYTES).min(end)..((index + 1) * GRAIN_BYTES).min(end)].fill(byte);
    }
    below
}

/// The content id of an image of QEMU's.
fn content_id(path: &Path) -> String {
    let bytes = fs::read(path).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let at = text.find("\nCID=").unwrap() + 5;
    text[at..].lines().next().unwrap().to_owned()
}

#[test]
fn se_sparse_disks_are_read_as_qemu_reads_them() {
    let oracle = Oracle::new();
    let work = oracle.work();
    // The last grain is not whole.
    for sectors in [2048, 2047, 65_536] {
        Extent::new(sectors).write(&work, "disk", None);
        fs::write(work.join("expected.raw"), expected(vec![0; sectors as usize * 512])).unwrap();
        oracle.make("compare -f raw -F vmdk expected.raw disk.vmdk");
        for line in [
            "info disk.vmdk",
            "info --output=json disk.vmdk",
            "map disk.vmdk",
            "map --output=json disk.vmdk",
            "check disk.vmdk",
            "measure -O qcow2 disk.vmdk",
            "compare -f raw expected.raw disk.vmdk",
            "snapshot -l disk.vmdk",
        ] {
            oracle.compare(line);
        }
        oracle.compare_writing("convert -O qcow2 disk.vmdk out.qcow2", |_, own| {
            let line = "compare -f raw -F qcow2 expected.raw out.qcow2";
            let said = oracle.real(own, &words(line));
            assert_eq!(said.code, Some(0), "{line}: {}{}", said.out, said.err);
        });
    }
    // Over a parent: an entry of 0 is its data, unmapped grains are zeroes. A grain number of more than 12 bits takes its upper part
    // from the low end of the entry.
    oracle.make("create -q -f vmdk base.vmdk 32M");
    oracle.io(&["write -P 0x77 0 32M"], "base.vmdk");
    let mut top = Extent::new(65_536);
    top.directory = vec![0, table(2)];
    for entry in &mut top.entries {
        entry.0 = 2;
    }
    top.write(&work, "top", Some((&content_id(&work.join("base.vmdk")), "base.vmdk")));
    let below = vec![0x77; 16 << 20];
    let disk = [below.clone(), expected(below)].concat();
    fs::write(work.join("top.raw"), disk).unwrap();
    oracle.make("compare -f raw -F vmdk top.raw top.vmdk");
    for line in ["map --output=json top.vmdk", "info --backing-chain top.vmdk", "compare -f raw top.raw top.vmdk"] {
        oracle.compare(line);
    }
    let mut far = Extent::new(2048);
    far.entries = vec![(0, 0, grain(0x1001)), (0, 1, grain(0xfff))];
    let mut bytes = far.bytes();
    bytes.resize(GRAINS_AT * 512 + 0x1002 * GRAIN_BYTES, 0xee);
    far.write(&work, "far", None);
    fs::write(work.join("far-sesparse.vmdk"), bytes).unwrap();
    let mut data = vec![0; 1 << 20];
    data[..2 * GRAIN_BYTES].fill(0xee);
    fs::write(work.join("far.raw"), data).unwrap();
    oracle.make("compare -f raw -F vmdk far.raw far.vmdk");
    oracle.compare("map --output=json far.vmdk");
    oracle.compare("compare -f raw far.raw far.vmdk");
    oracle.verdict();
}

#[test]
fn se_sparse_disks_are_read_and_not_written() {
    let oracle = Oracle::new();
    let work = oracle.work();
    Extent::new(2048).write(&work, "disk", None);
    fs::write(work.join("zero.raw"), vec![0; 1 << 20]).unwrap();
    let before = fs::read(work.join("disk-sesparse.vmdk")).unwrap();
    for line in [
        "check -r all disk.vmdk",
        "resize disk.vmdk 2M",
        "commit disk.vmdk",
        "rebase -u -b x disk.vmdk",
        "snapshot -c a disk.vmdk",
        "bench -w -c 1 disk.vmdk",
        "convert -n -O vmdk zero.raw disk.vmdk",
        "convert -O vmdk -o subformat=seSparse zero.raw new.vmdk",
        "info -f vmdk disk-sesparse.vmdk",
    ] {
        oracle.compare(line);
    }
    oracle.compare("create -f vmdk -b disk.vmdk -F vmdk over.vmdk");
    oracle.io(&["write -P 9 64k 512"], "over.vmdk");
    oracle.compare("map --output=json over.vmdk");
    oracle.verdict();
    // QEMU says "Block job failed: Operation not supported".
    let said = oracle.refused("commit over.vmdk");
    assert!(said.contains("No write support for seSparse images available"), "{said}");
    let said = oracle.refused("info disk-sesparse.vmdk");
    assert!(said.contains("invalid VMDK image descriptor"), "{said}");
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
        let output = command.args(arguments).current_dir(&work).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (code, said) = run(&["info", "disk-sesparse.vmdk"]);
    assert!(code == Some(1) && said.contains("open the disk by its descriptor"), "{said}");
    let (code, said) =
        run(&["io", "-c", "read -P 1 12k 4k", "--image-opts", "driver=vmdk,auto-read-only=on,file.filename=disk.vmdk"]);
    assert!(code == Some(1) && said.contains("read-only"), "{said}");
    let (code, said) = run(&["io", "-r", "-c", "read -P 1 12k 4k", "disk.vmdk"]);
    assert!(code == Some(0) && !said.contains("verification failed"), "{said}");
    let (code, said) = run(&["io", "-c", "write 0 512", "disk.vmdk"]);
    assert!(code == Some(1) && said.contains("No write support for seSparse images available"), "{said}");
    assert_eq!(fs::read(work.join("disk-sesparse.vmdk")).unwrap(), before);
}

/// Both tools on a disk with one word changed. Ours may refuse more, and says something else nowhere.
#[test]
fn each_field_of_an_se_sparse_extent_counts_as_in_qemu() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let good = Extent::new(65_536);
    let mut stricter = Vec::new();
    let mut compare = |extent: &Extent, what: String| {
        fs::write(work.join("disk-sesparse.vmdk"), extent.bytes()).unwrap();
        let [real, ours] = ["info", "map --output=json"]
            .map(|verb| {
                let arguments = words(&format!("{verb} disk.vmdk"));
                (oracle.real(&work, &arguments), oracle.ours(&work, &arguments))
            })
            .map(|(real, ours)| ((real.code, real.out, real.err), (ours.code, ours.out, ours.err)));
        for (real, ours) in [real, ours] {
            match (real.0, ours.0) {
                (Some(0), Some(1)) => stricter.push(what.clone()),
                // The reason, where QEMU has a number alone.
                (Some(1), Some(1)) if real.2.contains("Input/output error") => {}
                _ => assert_eq!(ours, real, "{what}"),
            }
        }
    };
    describe(&work, "disk", "RW 65536 SESPARSE \"disk-sesparse.vmdk\"", None);
    compare(&good, "nothing".to_owned());
    for word in 0..27 {
        for bit in [0, 5, 20, 31, 33, 53, 54, 63] {
            // A length that the descriptor contradicts is refused here: the line counts.
            if word == CAPACITY {
                continue;
            }
            let mut changed = good.clone();
            changed.header[word] ^= 1 << bit;
            compare(&changed, format!("word {word} bit {bit}"));
        }
    }
    for (word, value) in [(0, 0), (0, 0xcafe_babe), (1, 9), (2, 1 << 40), (3, 1), (3, 1 << 63), (4, 1)] {
        let mut changed = good.clone();
        changed.volatile[word] = value;
        compare(&changed, format!("volatile word {word} = {value:#x}"));
    }
    for (field, value, bits) in [("directory", table(0), 0..64), ("table", grain(1), 0..64)] {
        for bit in bits.step_by(7).chain([60, 61, 62, 63]) {
            let mut changed = good.clone();
            match field {
                "directory" => changed.directory[0] = value ^ 1 << bit,
                _ => changed.entries[4].2 = value ^ 1 << bit,
            }
            compare(&changed, format!("{field} bit {bit}"));
        }
    }
    // QEMU takes zeroes for places behind the file's end, and cuts numbers that are too large.
    stricter.dedup();
    let known = |what: &String| {
        ["word 10 ", "word 16 ", "word 17 ", "word 18 ", "word 24 ", "directory bit", "table bit"]
            .iter()
            .any(|part| what.starts_with(part))
    };
    let unknown: Vec<_> = stricter.iter().filter(|what| !known(what)).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

/// Our words, under our own name; QEMU reads zeroes there, or fails in the middle.
#[test]
fn se_sparse_extents_that_lie_are_refused_by_name() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let good = Extent::new(65_536);
    describe(&work, "disk", "RW 65536 SESPARSE \"disk-sesparse.vmdk\"", None);
    let with = |change: &dyn Fn(&mut Extent)| {
        let mut extent = good.clone();
        change(&mut extent);
        extent.bytes()
    };
    let cut = |len: usize| good.bytes()[..len].to_vec();
    let far = 1 << 40;
    let cases: [(&str, Vec<u8>, &str); 16] = [
        ("empty", Vec::new(), "no seSparse extent"),
        ("half a header", cut(16), "grainSize"),
        ("header alone", cut(512), "volatile header"),
        ("no directory", cut(DIRECTORY_AT * 512), "grain directory is not in the file"),
        ("half a table", cut((TABLES_AT + 1) * 512), "a grain table is not in the file"),
        ("no grains", cut(GRAINS_AT * 512), "after EOF"),
        ("half a grain", cut(GRAINS_AT * 512 + 100), "after EOF"),
        ("journal", with(&|extent| extent.volatile[3] = 1), "replayJournal"),
        ("directory too short", with(&|extent| extent.header[DIRECTORY_SIZE] = 0), "too short"),
        ("directory far", with(&|extent| extent.header[DIRECTORY] = far), "grain directory is not in the file"),
        ("directory too far", with(&|extent| extent.header[DIRECTORY] = 1 << 60), "impossible"),
        ("tables far", with(&|extent| extent.header[TABLES] = far), "a grain table is not in the file"),
        ("grains far", with(&|extent| extent.header[GRAINS] = far), "after EOF"),
        (
            "a table far",
            with(&|extent| extent.directory[0] = table(u64::from(u32::MAX))),
            "a grain table is not in the file",
        ),
        ("no table", with(&|extent| extent.directory[0] = 2 << 60), "names no table"),
        ("no grain", with(&|extent| extent.entries[4].2 = 4 << 60), "of no known kind"),
    ];
    for (name, bytes, part) in cases {
        fs::write(work.join("disk-sesparse.vmdk"), bytes).unwrap();
        for verb in ["map", "check", "convert --force -O raw", "compare"] {
            let end = match verb {
                "convert --force -O raw" => " out.raw",
                "compare" => " disk.vmdk",
                _ => "",
            };
            let mut command = Command::new(env!("CARGO_BIN_EXE_cowshed"));
            let line = format!("{verb} --untrusted --allow extents disk.vmdk{end}");
            let output = command.args(words(&line)).current_dir(&work).output().expect("it runs");
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            assert!(output.status.code().is_some_and(|code| code > 0), "{name}: {line}: {said}");
            assert!(said.contains(part), "{name}: {line}: {said}");
        }
    }
    // A capacity that the line contradicts, and extents that contradict their lines.
    for (extent, line, part) in [
        (Extent::new(65_535), "RW 65536 SESPARSE \"disk-sesparse.vmdk\"", "65536 sectors"),
        (Extent::new(65_536), "RW 65536 SPARSE \"disk-sesparse.vmdk\"", "no sparse VMDK extent"),
        (Extent::new(65_536), "RW 65536 VMFSSPARSE \"disk-sesparse.vmdk\"", "no sparse VMDK extent"),
        (Extent::new(65_536), "RW 65536 SESPARSE \"disk.vmdk\"", "disk.vmdk"),
        (Extent::new(65_536), "RW 65536 SESPARSE \"missing.vmdk\"", "missing.vmdk"),
    ] {
        fs::write(work.join("disk-sesparse.vmdk"), extent.bytes()).unwrap();
        describe(&work, "disk", line, None);
        let said = crate::ova::refused(&oracle, "info disk.vmdk", &[]);
        assert!(said.contains(part), "{line}: {said}");
    }
}

#[test]
fn a_check_finds_se_sparse_grains_and_tables_on_each_other() {
    let oracle = Oracle::new();
    let work = oracle.work();
    let mut extent = Extent::new((SPAN_BYTES / 512) * 2);
    extent.directory = vec![table(0), table(0)];
    extent.entries.push((0, 9, grain(3)));
    extent.write(&work, "disk", None);
    let said = oracle.ours(&work, &words("check disk.vmdk"));
    assert_eq!(said.code, Some(2), "{}{}", said.out, said.err);
    let all = said.out + &said.err;
    assert!(all.contains("grain table 1 lies on grain table 0"), "{all}");
    assert!(all.contains("a grain of table 0 lies on a grain of table 0"), "{all}");
    assert!(all.contains("2 errors were found"), "{all}");
}

/// A descriptor has thousands of lines. All of them share one bound of tables in memory.
#[test]
fn tables_of_many_extents_share_one_bound_of_memory() {
    const TABLES: usize = 40;
    let oracle = Oracle::new();
    let work = oracle.work();
    let mut extent = Extent::new(SPAN_BYTES / 512 * TABLES as u64);
    extent.directory = (0..TABLES as u64).map(table).collect();
    let head = extent.bytes()[..TABLES_AT * 512].to_vec();
    let lines: Vec<String> = (0..1000)
        .map(|index| {
            let name = format!("part{index}.vmdk");
            let file = fs::File::create(work.join(&name)).unwrap();
            file.write_all_at(&head, 0).unwrap();
            // A page of data in each table, so none is passed over as a hole.
            for table in 0..TABLES {
                file.write_all_at(&[0], ((TABLES_AT + table * TABLE_SECTORS) * 512) as u64).unwrap();
            }
            file.set_len(((TABLES_AT + TABLES * TABLE_SECTORS) * 512) as u64).unwrap();
            format!("RW {} SESPARSE \"{name}\"", extent.header[CAPACITY])
        })
        .collect();
    describe(&work, "many", &lines.join("\n"), None);
    // 1.2 GiB without a bound.
    let script = "ulimit -v 786432; exec \"$0\" map --untrusted --allow extents many.vmdk";
    let mut command = Command::new("sh");
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_cowshed")]).current_dir(&work).output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

/// An extent of many tables: those of `entries`, or holes of the file.
fn write_large(folder: &Path, tables: u64, entries: &[u64], grains: u64) {
    let directory_sectors = (tables * 8).div_ceil(512);
    let first_table = (DIRECTORY_AT as u64 + directory_sectors).next_multiple_of(64);
    let first_grain = first_table + tables * TABLE_SECTORS as u64;
    let mut extent = Extent::new(tables * SPAN_BYTES / 512);
    extent.header[DIRECTORY_SIZE] = directory_sectors;
    extent.header[TABLES] = first_table;
    extent.header[GRAINS] = first_grain;
    describe(folder, "large", &format!("RW {} SESPARSE \"large-s.vmdk\"", extent.header[CAPACITY]), None);
    let file = fs::File::create(folder.join("large-s.vmdk")).unwrap();
    let put = |sector: u64, words: &[u64]| {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        file.write_all_at(&bytes, sector * 512).unwrap();
    };
    put(0, &extent.header);
    put(VOLATILE_AT as u64, &extent.volatile);
    put(DIRECTORY_AT as u64, &(0..tables).map(table).collect::<Vec<_>>());
    put(first_table, entries);
    file.set_len(first_grain * 512 + grains * GRAIN_BYTES as u64).unwrap();
}

/// More than 4 Mi grains, of which none follows another one in the file.
#[test]
fn millions_of_grains_in_any_order_are_checked() {
    const GRAINS: u64 = (4 << 20) + 4096;
    let oracle = Oracle::new();
    let work = oracle.work();
    let mut entries: Vec<u64> = (0..GRAINS).rev().map(grain).collect();
    write_large(&work, GRAINS / 4096, &entries, GRAINS);
    let said = oracle.ours(&work, &words("check large.vmdk"));
    assert_eq!(said.code, Some(0), "{}{}", said.out, said.err);
    entries.swap(4096, 4_000_000);
    entries[5] = grain(GRAINS - 5000);
    write_large(&work, GRAINS / 4096, &entries, GRAINS);
    let said = oracle.ours(&work, &words("check large.vmdk"));
    let all = said.out + &said.err;
    assert!(said.code == Some(2) && all.contains("a grain of table 1 lies on a grain of table 0"), "{all}");
    assert!(all.contains("1 errors were found"), "{all}");
}

/// 2 GiB of tables that were never written. Reading them takes 16 seconds.
#[test]
fn se_sparse_tables_in_holes_are_passed_over() {
    let oracle = Oracle::new();
    let work = oracle.work();
    write_large(&work, 1 << 16, &[grain(0)], 8);
    for (verb, lines) in [("check", 1), ("map --output=json", 2)] {
        let line = format!("6 {} {verb} large.vmdk", env!("CARGO_BIN_EXE_cowshed"));
        let output = Command::new("timeout").args(words(&line)).current_dir(&work).output().expect("it runs");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.code() == Some(0) && said.lines().count() == lines, "{verb}: {said}");
    }
}

/// 256 MiB of a directory are more than all directories of a disk may have: none of it is read.
#[test]
fn a_large_directory_is_refused_before_it_is_read() {
    let oracle = Oracle::new();
    let work = oracle.work();
    write_large(&work, 1, &[], 0);
    let (sectors, directory_sectors) = ((32u64 << 20) * SPAN_BYTES / 512, 1u64 << 19);
    describe(&work, "large", &format!("RW {sectors} SESPARSE \"large-s.vmdk\""), None);
    let file = fs::OpenOptions::new().write(true).open(work.join("large-s.vmdk")).unwrap();
    for (word, value) in [(CAPACITY, sectors), (DIRECTORY_SIZE, directory_sectors)] {
        file.write_all_at(&value.to_le_bytes(), word as u64 * 8).unwrap();
    }
    file.set_len(directory_sectors * 512 * 2).unwrap();
    let mut command = Command::new("sh");
    let script = "ulimit -v 262144; exec \"$0\" info large.vmdk";
    let output = command.args(["-c", script, env!("CARGO_BIN_EXE_cowshed")]).current_dir(&work).output();
    let output = output.expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("grain directories together are larger"), "{said}");
}

/// A directory of 512 Ki entries that name one table: it is read once.
#[test]
fn a_table_behind_each_entry_of_a_directory_is_read_once() {
    const ENTRIES: u64 = 512 << 10;
    let oracle = Oracle::new();
    let work = oracle.work();
    let mut header = b"KDMV".to_vec();
    header.extend([1u32, 1].iter().flat_map(|word| word.to_le_bytes()));
    let sectors = ENTRIES * 512 * 128;
    header.extend([sectors, 128, 1, 1].iter().flat_map(|word| word.to_le_bytes()));
    header.extend(512u32.to_le_bytes());
    let directory = 8;
    let table = directory + ENTRIES * 4 / 512;
    header.extend([0, directory, table + 8].iter().flat_map(|word| word.to_le_bytes()));
    header.extend(b"\0\n \r\n");
    header.resize(512, 0);
    header.extend(b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"monolithicSparse\"\n");
    header.resize(directory as usize * 512, 0);
    header.extend((0..ENTRIES).flat_map(|_| (table as u32).to_le_bytes()));
    // Two grains in turn, so that no entry goes on with the one before.
    let grain = table as u32 + 8;
    header.extend((0..512u32).flat_map(|index| (grain + index % 2 * 128).to_le_bytes()));
    header.resize((table + 8 + 256) as usize * 512, 7);
    fs::write(work.join("disk.vmdk"), header).unwrap();
    let arguments = ["20", env!("CARGO_BIN_EXE_cowshed"), "check", "disk.vmdk"];
    let output = Command::new("timeout").args(arguments).current_dir(&work).output().expect("it runs");
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("lies on grain table"), "{said}");
}
