// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Images that other products made: crates/testkit/images.

use crate::oracle::{Oracle, ours, words};
use crate::written_edges::io;
use cowshed_testkit::random::Random;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Puts a sample under a name into the folder.
#[track_caller]
fn unpack(oracle: &Oracle, sample: &str, name: &str) {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testkit/images");
    let output = Command::new("gzip").arg("-dc").arg(images.join(format!("{sample}.gz"))).output().unwrap();
    assert!(output.status.success(), "{sample}: {}", String::from_utf8_lossy(&output.stderr));
    fs::write(oracle.work().join(name), output.stdout).unwrap();
}

/// QEMU refuses to read such an image, and carries its log out where it may write.
#[test]
fn vhdx_log_is_replayed_in_memory_or_in_the_file() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-log-replay.vhdx", "sample.vhdx");
    let before = fs::read(oracle.work().join("sample.vhdx")).unwrap();
    for name in ["theirs.vhdx", "ours.vhdx"] {
        fs::write(oracle.work().join(name), &before).unwrap();
    }
    assert_eq!(oracle.real(&oracle.work(), &words("convert -f vhdx -O raw sample.vhdx none")).code, Some(1));
    let real = oracle.real(&oracle.work(), &words("check -r all -f vhdx theirs.vhdx"));
    assert_eq!(real.code, Some(0), "{}", real.err);
    oracle.make("convert -f vhdx -O raw theirs.vhdx truth");
    // Without a right to write, nothing is written.
    ours(&oracle, "compare -f vhdx -F raw sample.vhdx truth");
    ours(&oracle, "convert -f vhdx -O qcow2 sample.vhdx out.qcow2");
    oracle.make("compare -f qcow2 -F raw out.qcow2 truth");
    ours(&oracle, "check -f vhdx sample.vhdx");
    ours(&oracle, "check -r all --dry-run -f vhdx sample.vhdx");
    assert!(fs::read(oracle.work().join("sample.vhdx")).unwrap() == before, "it was written to");
    // With it, the file becomes one that QEMU reads.
    let said = oracle.ours(&oracle.work(), &words("check -r all -f vhdx ours.vhdx"));
    assert_eq!((said.out, said.err, said.code), (real.out, real.err, real.code));
    oracle.make("compare -f vhdx -F raw ours.vhdx truth");
    oracle.make("check -f vhdx ours.vhdx");
    let said = oracle.ours(&oracle.work(), &words("check -r all -f vhdx ours.vhdx"));
    assert_eq!(said.out, "No errors were found on the image.\n");
}

/// A log that was cut off with its file.
#[test]
fn vhdx_shorter_than_its_log_knows_is_refused() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-log-replay.vhdx", "sample.vhdx");
    let path = oracle.work().join("sample.vhdx");
    let len = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(len - (1 << 20)).unwrap();
    for line in ["info -f vhdx sample.vhdx", "check -r all -f vhdx sample.vhdx"] {
        let message = oracle.refused(line);
        assert!(message.contains("FlushedFileOffset") && message.contains("cut off"), "{message}");
    }
}

/// The disk by the tables of a VHD of type 4. A sector whose bit is set is in this file, every other one in the parent.
fn merged_vhd(child: &[u8], parent: &[u8]) -> Vec<u8> {
    let be32 = |at: usize| u32::from_be_bytes(child[at..at + 4].try_into().unwrap()) as usize;
    let header = be32(child.len() - 512 + 20);
    let (table, blocks, block_bytes) = (be32(header + 20), be32(header + 28), be32(header + 32));
    let mut disk = parent[..parent.len() - 512].to_vec();
    for block in 0..blocks {
        let entry = be32(table + block * 4);
        if entry == 0xffff_ffff {
            continue;
        }
        let (bitmap, data) = (entry * 512, entry * 512 + 512);
        for sector in 0..block_bytes / 512 {
            if child[bitmap + sector / 8] >> (7 - sector % 8) & 1 == 1 {
                let (from, to) = (data + sector * 512, block * block_bytes + sector * 512);
                disk[to..to + 512].copy_from_slice(&child[from..from + 512]);
            }
        }
    }
    disk
}

/// QEMU 11 reads the difference without its parent, and without a warning.
#[test]
fn a_vhd_that_is_a_difference_is_read_over_its_parent() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-fat-parent.vhd", "fat-parent.vhd");
    unpack(&oracle, "windows-fat-differential.vhd", "child.vhd");
    let read = |name: &str| fs::read(oracle.work().join(name)).unwrap();
    let truth = merged_vhd(&read("child.vhd"), &read("fat-parent.vhd"));
    fs::write(oracle.work().join("truth"), &truth).unwrap();
    ours(&oracle, "convert -f vpc -O raw child.vhd out");
    assert!(read("out") == truth && truth != read("fat-parent.vhd")[..truth.len()]);
    ours(&oracle, "compare -f vpc -F raw child.vhd truth");
    // A disk that is no difference has no parent, whatever its opening options are.
    for (driver, name) in [("vpc", "fat-parent.vhd"), ("vdi", "new.vdi"), ("vhdx", "new.vhdx")] {
        if driver != "vpc" {
            oracle.make(&format!("create -q -f {driver} {name} 1M"));
        }
        let options = format!(
            "driver={driver},file.filename={name},backing.driver=raw,backing.file.driver=file,backing.file.filename=truth"
        );
        let message = oracle.refused(&format!("convert -O raw --image-opts {options} out"));
        assert!(message.contains("Driver doesn't support backing files"), "{message}");
    }
    let info = ours(&oracle, "info -f vpc --output=json --backing-chain child.vhd");
    assert!(info.contains("\"backing-filename\": \"fat-parent.vhd\""), "{info}");
    let map = ours(&oracle, "map -f vpc child.vhd");
    assert!(map.contains("fat-parent.vhd") && map.contains("child.vhd"), "{map}");
    ours(&oracle, "create -q -f qcow2 -b child.vhd -F vpc top.qcow2");
    ours(&oracle, "compare -f qcow2 -F raw top.qcow2 truth");
    // It is read, and not written.
    let message = oracle.refused("resize -f vpc child.vhd 8M");
    assert!(message.contains("can only be read"), "{message}");
    // The policy for untrusted images: no file on the image's word.
    let message = oracle.refused("convert --untrusted -f vpc -O raw child.vhd out");
    assert!(message.contains("fat-parent.vhd"), "{message}");
    ours(&oracle, "convert --untrusted --allow backing -f vpc -O raw child.vhd out");
    assert!(read("out") == truth);
    // Another disk in the parent's place, and none.
    oracle.make("create -q -f vpc -o subformat=fixed,force_size=on fat-parent.vhd 4M");
    for line in ["convert -f vpc -O raw child.vhd out", "info -f vpc --backing-chain child.vhd"] {
        let message = oracle.refused(line);
        assert!(message.contains("is not the parent of this disk"), "{line}: {message}");
    }
    ours(&oracle, "info -f vpc child.vhd");
    fs::remove_file(oracle.work().join("fat-parent.vhd")).unwrap();
    let message = oracle.refused("convert -f vpc -O raw child.vhd out");
    assert!(message.contains("fat-parent.vhd"), "{message}");
}

/// Writes to a VHD leave its UUID as it is, so the time of the parent's file counts, as in Windows.
#[test]
fn vhd_over_a_changed_parent_is_refused() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-fat-parent.vhd", "fat-parent.vhd");
    unpack(&oracle, "windows-fat-differential.vhd", "child.vhd");
    let path = oracle.work().join("child.vhd");
    let mut child = fs::read(&path).unwrap();
    let header = u64::from_be_bytes(child[16..24].try_into().unwrap()) as usize;
    assert_eq!(child[header + 56..header + 60], [0; 4], "Windows left the time out");
    let (since_2000, year_2000) = (600_000_000_u32, 946_684_800);
    child[header + 56..header + 60].copy_from_slice(&since_2000.to_be_bytes());
    child[header + 36..header + 40].fill(0);
    let sum: u32 = child[header..header + 1024].iter().map(|byte| u32::from(*byte)).sum();
    child[header + 36..header + 40].copy_from_slice(&(!sum).to_be_bytes());
    fs::write(&path, &child).unwrap();
    let parent = fs::File::options().write(true).open(oracle.work().join("fat-parent.vhd")).unwrap();
    let set_time =
        |seconds: u64| parent.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds)).unwrap();
    let written = year_2000 + u64::from(since_2000);
    for time in [written, written - 2, written + 2] {
        set_time(time);
        ours(&oracle, "convert -f vpc -O raw child.vhd out");
    }
    for time in [written - 3, written + 3] {
        set_time(time);
        let message = oracle.refused("convert -f vpc -O raw child.vhd out");
        assert!(message.contains("parent_timestamp") && message.contains("fat-parent.vhd"), "{message}");
        let message = oracle.refused("info --backing-chain -f vpc child.vhd");
        assert!(message.contains("parent_timestamp"), "{message}");
        ours(&oracle, "info -f vpc child.vhd");
        ours(&oracle, "convert -O raw --image-opts driver=vpc,parent-time=ignore,file.filename=child.vhd again");
    }
    assert!(fs::read(oracle.work().join("out")).unwrap() == fs::read(oracle.work().join("again")).unwrap());
}

/// The parent that a user names is the user's choice: a shorter one ends in zeroes, and the end of a longer one doesn't
/// show.
#[test]
fn shorter_parent_is_read_to_its_end() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-fat-parent.vhd", "fat-parent.vhd");
    unpack(&oracle, "windows-fat-differential.vhd", "child.vhd");
    let read = |name: &str| fs::read(oracle.work().join(name)).unwrap();
    let child = read("child.vhd");
    let disk_bytes = merged_vhd(&child, &read("fat-parent.vhd")).len();
    for len in [0, 512, 70_000, disk_bytes - 512, disk_bytes + 512, 2 * disk_bytes] {
        let parent: Vec<u8> = (0..len).map(|at| (at / 512 + 1) as u8).collect();
        fs::write(oracle.work().join("other.raw"), &parent).unwrap();
        let line = "convert -O raw --image-opts driver=vpc,file.filename=child.vhd,backing.driver=raw,\
                    backing.file.driver=file,backing.file.filename=other.raw out";
        ours(&oracle, line);
        let mut below = parent;
        below.resize(disk_bytes, 0);
        below.resize(disk_bytes + 512, 0);
        assert!(read("out") == merged_vhd(&child, &below), "a parent of {len} bytes");
    }
}

fn le32(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn le64(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// Where regions and items of a VHDX file are, by the first bytes of their GUIDs.
struct VhdxPlaces {
    table: usize,
    parameters: usize,
    size: usize,
    sector: usize,
}

impl VhdxPlaces {
    fn of(file: &[u8]) -> VhdxPlaces {
        let region = |guid: &[u8]| {
            let entries = (0..le32(file, (192 << 10) + 8)).map(|index| (192 << 10) + 16 + 32 * index);
            entries.into_iter().find(|at| file[*at..].starts_with(guid)).map(|at| le64(file, at + 16)).unwrap()
        };
        let metadata = region(&[0x06, 0xa2, 0x7c, 0x8b]);
        let item = |guid: &[u8]| {
            let entries = (1..2048).map(|index| metadata + 32 * index);
            entries
                .into_iter()
                .find(|at| file[*at..].starts_with(guid))
                .map(|at| metadata + le32(file, at + 16))
                .unwrap()
        };
        VhdxPlaces {
            table: region(&[0x66, 0x77, 0xc2, 0x2d]),
            parameters: item(&[0x37, 0x67, 0xa1, 0xca]),
            size: item(&[0x24, 0x42, 0xa5, 0x2f]),
            sector: item(&[0x1d, 0xbf, 0x41, 0x81]),
        }
    }
}

/// The disk by the tables of a VHDX file, over the content of its parent. A sector of a block that is there in part is in
/// the file where its bit is set.
fn merged_vhdx(file: &[u8], parent: &[u8]) -> Vec<u8> {
    let places = VhdxPlaces::of(file);
    let (block, size, sector) = (le32(file, places.parameters), le64(file, places.size), le32(file, places.sector));
    let chunk = (1 << 23) * sector / block;
    let place = |entry: usize| le64(file, places.table + 8 * entry) >> 20 << 20;
    let mut disk = parent[..size].to_vec();
    for number in 0..size.div_ceil(block) {
        let entry = number + number / chunk;
        let (start, end, data) = (number * block, size.min((number + 1) * block), place(entry));
        match le64(file, places.table + 8 * entry) & 7 {
            0 => {}
            6 => disk[start..end].copy_from_slice(&file[data..][..end - start]),
            7 => {
                let bitmap = place(number / chunk * (chunk + 1) + chunk);
                for (index, part) in disk[start..end].chunks_mut(sector).enumerate() {
                    let bit = number % chunk * (block / sector) + index;
                    if file[bitmap + bit / 8] >> (bit % 8) & 1 == 1 {
                        part.copy_from_slice(&file[data + index * sector..][..sector]);
                    }
                }
            }
            _ => disk[start..end].fill(0),
        }
    }
    disk
}

#[test]
fn a_vhdx_that_is_a_difference_is_read_over_its_parent() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-fat-parent.vhdx", "fat-parent.vhdx");
    unpack(&oracle, "windows-fat-differential.vhdx", "child.vhdx");
    let read = |name: &str| fs::read(oracle.work().join(name)).unwrap();
    ours(&oracle, "convert -f vhdx -O raw child.vhdx out");
    oracle.make("convert -f vhdx -O raw fat-parent.vhdx parent");
    let truth = merged_vhdx(&read("child.vhdx"), &read("parent"));
    assert!(read("out") == truth && truth != read("parent"));
    ours(&oracle, "check -f vhdx child.vhdx");
    let map = ours(&oracle, "map -f vhdx child.vhdx");
    assert!(map.contains("fat-parent.vhdx") && map.contains("child.vhdx"), "{map}");
    let message = oracle.refused("convert --untrusted -f vhdx -O raw child.vhdx out");
    assert!(message.contains("fat-parent.vhdx"), "{message}");
    let message = oracle.refused("resize -f vhdx child.vhdx 8M");
    assert!(message.contains("can only be read"), "{message}");
    // A write to the parent gives it another GUID: the difference belongs to its old state.
    let script = ["-f", "vhdx", "-c", "write -P 1 0 512", "fat-parent.vhdx"];
    let done = Command::new(oracle.qemu.io_path()).args(script).current_dir(oracle.work()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let message = oracle.refused("convert -f vhdx -O raw child.vhdx out");
    assert!(message.contains("was changed since"), "{message}");
}

/// VirtualBox names a parent by its UUID alone: the user names the file.
#[test]
fn differencing_vdi_is_read_over_a_given_parent() {
    let oracle = Oracle::new();
    for (name, pattern, at) in [("parent.vdi", 1, "0"), ("child.vdi", 2, "1M")] {
        oracle.make(&format!("create -q -f vdi {name} 4M"));
        let write = format!("write -P {pattern} {at} 2M");
        let script = ["-f", "vdi", "-c", &write, name];
        let done = Command::new(oracle.qemu.io_path()).args(script).current_dir(oracle.work()).output().unwrap();
        assert!(done.status.success());
    }
    let path = oracle.work().join("child.vdi");
    let (parent, mut child) = (fs::read(oracle.work().join("parent.vdi")).unwrap(), fs::read(&path).unwrap());
    child[76] = 4;
    child[424..440].copy_from_slice(&parent[392..408]);
    child[440..456].copy_from_slice(&parent[408..424]);
    fs::write(&path, &child).unwrap();
    let message = oracle.refused("convert -f vdi -O raw child.vdi out");
    assert!(message.contains("names no file: say which one it is"), "{message}");
    let line = "convert -O raw --image-opts driver=vdi,file.driver=file,file.filename=child.vdi,backing.driver=vdi,\
                backing.file.driver=file,backing.file.filename=parent.vdi out";
    ours(&oracle, line);
    let disk = fs::read(oracle.work().join("out")).unwrap();
    let mut model = vec![0; 4 << 20];
    model[..1 << 20].fill(1);
    model[1 << 20..3 << 20].fill(2);
    assert!(disk == model);
    // By its UUIDs, in the folders that the user names: a link there isn't followed.
    for name in ["snapshots", "elsewhere", "copies"] {
        fs::create_dir(oracle.work().join(name)).unwrap();
    }
    fs::rename(oracle.work().join("parent.vdi"), oracle.work().join("elsewhere/base.vdi")).unwrap();
    std::os::unix::fs::symlink("../elsewhere/base.vdi", oracle.work().join("snapshots/base.vdi")).unwrap();
    fs::write(oracle.work().join("elsewhere/other.vdi"), &child).unwrap();
    fs::write(oracle.work().join("elsewhere/notes.txt"), "no disk").unwrap();
    let by_uuid =
        |folders: &str| format!("convert -O raw --image-opts driver=vdi,file.filename=child.vdi,{folders} out");
    let message = oracle.refused(&by_uuid("parents=snapshots"));
    assert!(message.contains("no file in snapshots is the parent"), "{message}");
    for folders in ["parents=elsewhere", "parents.0=snapshots,parents.1=elsewhere"] {
        fs::remove_file(oracle.work().join("out")).unwrap();
        ours(&oracle, &by_uuid(folders));
        assert!(fs::read(oracle.work().join("out")).unwrap() == model);
    }
    ours(
        &oracle,
        "create -q -f qcow2 -F vdi -b json:{\"driver\":\"vdi\",\"file.filename\":\"child.vdi\",\"parents\":[\"elsewhere\"]} top.qcow2 4M",
    );
    ours(&oracle, "compare -f qcow2 -F raw top.qcow2 out");
    let message = oracle.refused(&format!("{} --untrusted", by_uuid("parents=elsewhere")));
    assert!(message.contains("policy"), "{message}");
    ours(&oracle, &format!("{} --untrusted --allow backing", by_uuid("parents=elsewhere")));
    // Of two copies none is taken, and a changed one is reported.
    fs::copy(oracle.work().join("elsewhere/base.vdi"), oracle.work().join("copies/base.vdi")).unwrap();
    let message = oracle.refused(&by_uuid("parents.0=elsewhere,parents.1=copies"));
    assert!(message.contains("several files could be the parent"), "{message}");
    let mut changed = parent.clone();
    changed[408] ^= 1;
    fs::write(oracle.work().join("copies/base.vdi"), changed).unwrap();
    let message = oracle.refused(&by_uuid("parents=copies"));
    assert!(message.contains("is not the parent of this disk, or was changed since"), "{message}");
    fs::rename(oracle.work().join("elsewhere/base.vdi"), oracle.work().join("parent.vdi")).unwrap();
    // A block of zeroes covers the parent's.
    child[512..516].copy_from_slice(&0xffff_fffe_u32.to_le_bytes());
    fs::write(&path, &child).unwrap();
    ours(&oracle, line);
    model[..1 << 20].fill(0);
    assert!(fs::read(oracle.work().join("out")).unwrap() == model);
    // A parent that changed, by its header.
    child[440] ^= 1;
    fs::write(&path, &child).unwrap();
    assert!(oracle.refused(line).contains("is not the parent of this disk"));
}

/// Sectors of 4096 bytes: a bit of a bitmap stands for one of them, and the bitmaps' entries are farther apart in the table.
/// QEMU 11 refuses such images.
#[test]
fn vhdx_with_large_sectors_is_read_and_written() {
    let oracle = Oracle::new();
    // A table in which 512-byte sectors would put an entry of a bitmap behind each 4096 blocks.
    oracle.make("create -q -f vhdx -o block_size=1M disk.vhdx 5G");
    let path = oracle.work().join("disk.vhdx");
    let mut file = fs::read(&path).unwrap();
    let places = VhdxPlaces::of(&file);
    file[places.sector..places.sector + 4].copy_from_slice(&4096u32.to_le_bytes());
    fs::write(&path, &file).unwrap();
    let said = oracle.real(&oracle.work(), &words("info -f vhdx disk.vhdx"));
    assert!(said.code == Some(1) && said.err.contains("Operation not supported"), "{said:?}");
    let writes: [(u8, u64, u64); 4] =
        [(1, 0, 8192), (2, 3 << 20, 4096), (3, 4099 << 20, 2 << 20), (4, (5 << 30) - 4096, 4096)];
    for (value, at, len) in writes {
        io(&oracle, "vhdx", "disk.vhdx", &[&format!("write -P {value} {at} {len}")]);
    }
    ours(&oracle, "check -f vhdx disk.vhdx");
    let file = fs::read(&path).unwrap();
    let block = |number: usize| {
        let entry = le64(&file, places.table + 8 * number);
        assert_eq!(entry & 7, 6, "block {number}");
        file[entry >> 20 << 20..][..1 << 20].to_vec()
    };
    assert!(block(0)[..8192] == [1; 8192] && block(0)[8192..].iter().all(|byte| *byte == 0));
    assert!(block(3)[..4096] == [2; 4096]);
    assert!(block(4099) == [3; 1 << 20] && block(4100) == [3; 1 << 20]);
    assert!(block(5119)[(1 << 20) - 4096..] == [4; 4096]);
    fs::File::create(oracle.work().join("model")).unwrap().set_len(5 << 30).unwrap();
    for (value, at, len) in writes {
        io(&oracle, "raw", "model", &[&format!("write -P {value} {at} {len}")]);
    }
    ours(&oracle, "compare -f vhdx -F raw disk.vhdx model");
    let map = ours(&oracle, "map --output=json -f vhdx disk.vhdx");
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    let starts: Vec<u64> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|run| run["data"] == true)
        .map(|run| run["start"].as_u64().unwrap())
        .collect();
    assert_eq!(starts.first().zip(starts.last()), Some((&0, &((5 << 30) - 4096))), "{map}");
    // The same of a difference: its one bitmap has another entry.
    unpack(&oracle, "windows-fat-parent.vhdx", "fat-parent.vhdx");
    unpack(&oracle, "windows-fat-differential.vhdx", "child.vhdx");
    oracle.make("convert -f vhdx -O raw fat-parent.vhdx parent");
    let path = oracle.work().join("child.vhdx");
    let mut child = fs::read(&path).unwrap();
    let places = VhdxPlaces::of(&child);
    let chunk = (1 << 23) * 512 / le32(&child, places.parameters);
    let bitmap = child[places.table + 8 * chunk..][..8].to_vec();
    child[places.table + 8 * chunk..][..8].fill(0);
    child[places.table + 64 * chunk..][..8].copy_from_slice(&bitmap);
    child[places.sector..places.sector + 4].copy_from_slice(&4096u32.to_le_bytes());
    fs::write(&path, &child).unwrap();
    let truth = merged_vhdx(&child, &fs::read(oracle.work().join("parent")).unwrap());
    ours(&oracle, "convert -f vhdx -O raw child.vhdx out");
    assert!(fs::read(oracle.work().join("out")).unwrap() == truth);
}

/// The one disk that VMware wrote in three kinds.
fn disks_of_vmware(oracle: &Oracle) -> [&'static str; 3] {
    unpack(oracle, "vmware-monolithicSparse.vmdk", "sparse.vmdk");
    unpack(oracle, "vmware-streamOptimized.vmdk", "stream.vmdk");
    for name in ["twoGbMaxExtentSparse.vmdk", "twoGbMaxExtentSparse-s001.vmdk"] {
        unpack(oracle, name, name);
    }
    ["sparse.vmdk", "stream.vmdk", "twoGbMaxExtentSparse.vmdk"]
}

fn sha256(oracle: &Oracle, name: &str) -> String {
    let output = Command::new("sha256sum").arg(oracle.work().join(name)).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
fn three_kinds_of_a_vmware_disk_are_equal() {
    let oracle = Oracle::new();
    for disk in disks_of_vmware(&oracle) {
        ours(&oracle, &format!("convert -f vmdk -O raw {disk} out"));
        let sum = sha256(&oracle, "out");
        assert_eq!(sum, "a3bcf05f07a1c06a3380eeca8571f0efb2b85afafa1e21662b8cad436d1f7727", "{disk}");
        oracle.make(&format!("compare -f vmdk -F raw {disk} out"));
        ours(&oracle, &format!("check -f vmdk {disk}"));
        ours(&oracle, &format!("info {disk}"));
    }
    // The tool that packs machines.
    unpack(&oracle, "ovftool-streamOptimized.vmdk", "ovftool.vmdk");
    ours(&oracle, "convert -f vmdk -O raw ovftool.vmdk out");
    oracle.make("compare -f vmdk -F raw ovftool.vmdk out");
    ours(&oracle, "check -f vmdk ovftool.vmdk");
}

fn qemu_io(oracle: &Oracle, format: &str, image: &str, command: &str) {
    let script = ["-f", format, "-c", command, image];
    let done = Command::new(oracle.qemu.io_path()).args(script).current_dir(oracle.work()).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// New grains, and grains that are there, by us and by QEMU; VMware's own lines of the descriptor stay.
#[test]
fn disks_of_products_are_written_in_turns_with_qemu() {
    let oracle = Oracle::new();
    disks_of_vmware(&oracle);
    unpack(&oracle, "windows-log-replay.vhdx", "log.vhdx");
    unpack(&oracle, "windows-fat-parent.vhd", "fat.vhd");
    // The log of the sample is carried out.
    oracle.make("check -q -r all -f vhdx log.vhdx");
    for (format, disk) in
        [("vmdk", "sparse.vmdk"), ("vmdk", "twoGbMaxExtentSparse.vmdk"), ("vhdx", "log.vhdx"), ("vpc", "fat.vhd")]
    {
        oracle.make(&format!("convert -f {format} -O raw {disk} model"));
        let mut model = fs::read(oracle.work().join("model")).unwrap();
        let random = &mut Random::new(model.len() as u64);
        for turn in 1..=12u8 {
            let len = [512, 4096, 100_352][random.below(3) as usize];
            let at = random.below((model.len() - len) as u64 / 512) as usize * 512;
            let write = format!("write -P {turn} {at} {len}");
            match turn % 2 {
                0 => qemu_io(&oracle, format, disk, &write),
                _ => io(&oracle, format, disk, &[&write]),
            }
            model[at..at + len].fill(turn);
        }
        fs::write(oracle.work().join("model"), &model).unwrap();
        oracle.make(&format!("compare -f {format} -F raw {disk} model"));
        ours(&oracle, &format!("compare -f {format} -F raw {disk} model"));
        if format != "vpc" {
            ours(&oracle, &format!("check -f {format} {disk}"));
        }
    }
    for disk in ["sparse.vmdk", "twoGbMaxExtentSparse.vmdk"] {
        let bytes = fs::read(oracle.work().join(disk)).unwrap();
        let text = String::from_utf8_lossy(&bytes[..bytes.len().min(4096)]).into_owned();
        assert!(text.contains("isNativeSnapshot=\"no\"") && text.contains("ddb.deletable = \"true\""), "{text}");
        // The longer id has changed with the content id, once at least by us.
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("the line");
            line.trim_matches([' ', '=', '"']).to_owned()
        };
        assert_ne!(value("CID"), "00000000");
        assert!(!["c44fce", "798347"].iter().any(|old| value("ddb.longContentID").ends_with(old)), "{text}");
    }
}

/// An XFS of 10 GiB that Windows keeps in a VHDX file.
#[test]
fn vhdx_of_windows_with_xfs_is_read_as_qemu_reads_it() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-xfs5.vhdx", "xfs.vhdx");
    ours(&oracle, "check -f vhdx xfs.vhdx");
    ours(&oracle, "convert -f vhdx -O qcow2 xfs.vhdx out.qcow2");
    oracle.make("compare -f vhdx -F qcow2 xfs.vhdx out.qcow2");
    io(&oracle, "vhdx", "xfs.vhdx", &["write -P 7 9G 1M", "write -P 8 0 64k"]);
    oracle.make("check -q -f vhdx xfs.vhdx");
}

/// File systems and partition tables, through each format and back.
#[test]
fn disks_with_file_systems_come_back_from_each_format() {
    let oracle = Oracle::new();
    for disk in ["fs-gpt", "fs-mbr", "fs-ntfs", "fs-ext4", "fs-xfs", "fs-lvm"] {
        unpack(&oracle, &format!("{disk}.raw"), disk);
        for (format, options) in [
            ("vmdk", ""),
            ("vmdk", "-o subformat=streamOptimized"),
            ("vdi", ""),
            ("vpc", "-o force_size=on"),
            ("vhdx", ""),
            ("qed", ""),
            ("qcow", "-c"),
            ("parallels", ""),
            ("qcow2", "-c"),
        ] {
            ours(&oracle, &format!("convert -f raw -O {format} {options} {disk} image"));
            oracle.make(&format!("compare -q -f raw -F {format} {disk} image"));
            ours(&oracle, &format!("convert -f {format} -O raw image back"));
            let [source, back] = [disk, "back"].map(|name| fs::read(oracle.work().join(name)).unwrap());
            assert!(back.len() >= source.len() && back[..source.len()] == source, "{disk} {format} {options}");
        }
    }
}

/// Windows wrote only the absolute path into some images: its last part, beside the image.
#[test]
fn vhd_with_an_absolute_path_alone_finds_its_parent() {
    let oracle = Oracle::new();
    unpack(&oracle, "windows-fat-parent.vhd", "fat-parent.vhd");
    unpack(&oracle, "windows-fat-differential.vhd", "child.vhd");
    let path = oracle.work().join("child.vhd");
    let mut child = fs::read(&path).unwrap();
    let truth = merged_vhd(&child, &fs::read(oracle.work().join("fat-parent.vhd")).unwrap());
    let header = u64::from_be_bytes(child[16..24].try_into().unwrap()) as usize;
    let locators = (0..8).map(|index| header + 576 + 24 * index);
    let relative: Vec<usize> = locators.filter(|at| child[*at..].starts_with(b"W2ru")).collect();
    assert_eq!(relative.len(), 1);
    child[relative[0]..relative[0] + 24].fill(0);
    child[header + 36..header + 40].fill(0);
    let sum: u32 = child[header..header + 1024].iter().map(|byte| u32::from(*byte)).sum();
    child[header + 36..header + 40].copy_from_slice(&(!sum).to_be_bytes());
    fs::write(&path, &child).unwrap();
    ours(&oracle, "convert -f vpc -O raw child.vhd out");
    assert!(fs::read(oracle.work().join("out")).unwrap() == truth);
    fs::rename(oracle.work().join("fat-parent.vhd"), oracle.work().join("other.vhd")).unwrap();
    let message = oracle.refused("convert -f vpc -O raw child.vhd out");
    assert!(message.contains("fat-parent.vhd") && !message.contains('\\'), "{message}");
}
