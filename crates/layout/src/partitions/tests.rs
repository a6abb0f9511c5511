// SPDX-License-Identifier: Apache-2.0 OR MIT

use super::*;
use proptest::prelude::*;

const DISK_BYTES: u64 = 64 << 20;

/// A disk of zeroes with a few sectors of other bytes.
#[derive(Clone, Default)]
struct Disk(Vec<(u64, Vec<u8>)>);

impl Disk {
    fn put(&mut self, at: u64, bytes: Vec<u8>) {
        self.0.push((at, bytes));
    }

    fn read(&self, range: &Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        for (at, part) in &self.0 {
            for (index, byte) in part.iter().enumerate() {
                let place = at + index as u64;
                if range.contains(&place) {
                    bytes[(place - range.start) as usize] = *byte;
                }
            }
        }
        bytes
    }

    fn find(&self, number: u32) -> Result<Range<u64>> {
        let mut search = Search::new(number, DISK_BYTES)?;
        for _ in 0..2 * MAX_LOGICAL {
            match search.step() {
                ScanStep::Found(range) => return Ok(range),
                ScanStep::Read(range) => {
                    assert!(range.end <= DISK_BYTES && range.end - range.start <= MAX_LIST_BYTES, "{range:?}");
                    search.take(&self.read(&range))?;
                }
            }
        }
        panic!("the search doesn't end");
    }

    fn refusal(&self, number: u32) -> String {
        self.find(number).expect_err("a refusal").to_string()
    }
}

/// A sector with a table: type, first sector, number of sectors.
fn mbr(entries: &[(u8, u32, u32)]) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    for (index, (kind, first, count)) in entries.iter().enumerate() {
        let at = 446 + 16 * index;
        bytes[at + 4] = *kind;
        bytes[at + 8..at + 12].copy_from_slice(&first.to_le_bytes());
        bytes[at + 12..at + 16].copy_from_slice(&count.to_le_bytes());
    }
    bytes[510..].copy_from_slice(&[0x55, 0xaa]);
    bytes
}

/// A header for the list of entries at block `list_at`; first and last block of each partition.
fn gpt(block: u64, at: u64, list_at: u64, partitions: &[(u64, u64)]) -> [(u64, Vec<u8>); 2] {
    let mut list = vec![0; 128 * 128];
    for (entry, (first, last)) in list.chunks_mut(128).zip(partitions) {
        entry[..16].fill(if *last == 0 { 0 } else { 7 });
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
    }
    let mut header = vec![0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[8..12].copy_from_slice(&0x1_0000u32.to_le_bytes());
    header[12..16].copy_from_slice(&92u32.to_le_bytes());
    for (place, number) in [(24, at), (40, 6), (48, DISK_BYTES / block - 6), (72, list_at)] {
        header[place..place + 8].copy_from_slice(&number.to_le_bytes());
    }
    for (place, number) in [(80, 128u32), (84, 128), (88, crc32(&[&list]))] {
        header[place..place + 4].copy_from_slice(&number.to_le_bytes());
    }
    seal(&mut header);
    [(at * block, header), (list_at * block, list)]
}

fn seal(header: &mut [u8]) {
    header[16..20].fill(0);
    let sum = crc32(&[header]);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
}

fn gpt_disk(block: u64, partitions: &[(u64, u64)]) -> Disk {
    let last = DISK_BYTES / block - 1;
    let mut disk = Disk::default();
    disk.put(0, mbr(&[(0xee, 1, u32::MAX)]));
    let tables = [gpt(block, 1, 2, partitions), gpt(block, last, last - 40, partitions)];
    tables.into_iter().flatten().for_each(|(at, bytes)| disk.put(at, bytes));
    disk
}

#[test]
fn partitions_of_an_mbr_have_the_numbers_of_the_kernel() {
    let mut disk = Disk::default();
    disk.put(0, mbr(&[(0x83, 2048, 2048), (0, 0, 0), (0x0f, 8192, 8192), (0x82, 20480, 16)]));
    disk.put(8192 * 512, mbr(&[(0x83, 64, 1000), (0x05, 2048, 2048)]));
    disk.put((8192 + 2048) * 512, mbr(&[(0x83, 32, 100)]));
    let sectors = |first: u64, count: u64| first * 512..(first + count) * 512;
    assert_eq!(disk.find(1).unwrap(), sectors(2048, 2048));
    assert_eq!(disk.find(4).unwrap(), sectors(20480, 16));
    assert_eq!(disk.find(5).unwrap(), sectors(8192 + 64, 1000));
    assert_eq!(disk.find(6).unwrap(), sectors(8192 + 2048 + 32, 100));
    for number in [2, 7, u32::MAX] {
        assert_eq!(disk.refusal(number), format!("the disk has no partition {number}"));
    }
    assert!(disk.refusal(3).contains("extended"), "{}", disk.refusal(3));
    assert_eq!(disk.refusal(0), "partitions are numbered from 1");
    assert_eq!(Disk::default().refusal(1), "the disk has no partition table (MBR or GPT)");
}

/// As the Linux kernel does: the boot sector of FAT or NTFS has the same signature.
#[test]
fn a_file_system_without_partitions_has_no_table() {
    let mut sector = mbr(&[(0x83, 2048, 2048)]);
    sector[446] = 0x80;
    let disk = |sector: &[u8]| Disk(vec![(0, sector.to_vec())]);
    assert!(disk(&sector).find(1).is_ok());
    let text = b"Press any key to restart\r\nNon-system disk, remove disks or other media";
    let mut boot = mbr(&[]);
    boot[440..440 + text.len().min(70)].copy_from_slice(&text[..text.len().min(70)]);
    for number in [1, 2, 3, 4, 5] {
        assert_eq!(disk(&boot).refusal(number), "the disk has no partition table (MBR or GPT)");
    }
    for entry in 0..4 {
        let mut sector = sector.clone();
        sector[446 + 16 * entry] = 1;
        assert_eq!(disk(&sector).refusal(1), "the disk has no partition table (MBR or GPT)", "entry {entry}");
    }
    // A GPT counts by its own signature and checksums.
    let mut disk = gpt_disk(512, &[(100, 199)]);
    disk.put(446 + 16, vec![0x7f]);
    assert!(disk.find(1).is_ok());
}

#[test]
fn chains_that_go_round_or_outside_are_refused() {
    for (next, words) in [(0, "doesn't go forward"), (4, "doesn't go forward"), (8192, "outside of their partition")] {
        let mut disk = Disk::default();
        disk.put(0, mbr(&[(0x05, 8192, 8192)]));
        disk.put(8192 * 512, mbr(&[(0x83, 1, 1), (0x05, 4, 100)]));
        disk.put((8192 + 4) * 512, mbr(&[(0x83, 1, 1), (0x05, next, 100)]));
        assert!(disk.refusal(9).contains(words), "{}", disk.refusal(9));
        assert!(disk.find(6).is_ok());
    }
    let mut disk = Disk::default();
    disk.put(0, mbr(&[(0x83, 0, 1), (0x83, 2048, u32::MAX), (0x05, 8192, 8192)]));
    for (number, words) in [(1, "not inside of the disk"), (2, "not inside of the disk"), (5, "no partition table")] {
        assert!(disk.refusal(number).contains(words), "{}", disk.refusal(number));
    }
    // More links than any tool writes.
    let mut disk = Disk::default();
    disk.put(0, mbr(&[(0x05, 1, 100_000)]));
    for link in 0..1000 {
        disk.put((1 + 2 * u64::from(link)) * 512, mbr(&[(0x83, 1, 1), (0x05, 2 * (link + 1), 2)]));
    }
    assert!(disk.find(200).is_ok());
    assert!(disk.refusal(900).contains("doesn't go forward"), "{}", disk.refusal(900));
}

#[test]
fn damaged_gpt_gives_way_to_its_backup() {
    for block in BLOCK_BYTES {
        let disk = gpt_disk(block, &[(100, 199), (0, 0), (2048, 2048)]);
        assert_eq!(disk.find(1).unwrap(), 100 * block..200 * block);
        assert_eq!(disk.find(3).unwrap(), 2048 * block..2049 * block);
        for number in [2, 128, 129] {
            assert_eq!(disk.refusal(number), format!("the disk has no partition {number}"));
        }
        for damage in [block + 50, 2 * block + 5] {
            let mut damaged = disk.clone();
            damaged.put(damage, vec![0x5a]);
            assert_eq!(damaged.find(1).unwrap(), 100 * block..200 * block, "the spare table counts");
            damaged.put(DISK_BYTES - block + 20, vec![0x5a]);
            assert!(damaged.refusal(1).contains("damaged"), "{}", damaged.refusal(1));
        }
    }
}

#[test]
fn the_lack_of_a_gpt_is_said_of_its_first_place() {
    let disk = Disk(vec![(0, mbr(&[(0xee, 1, u32::MAX)]))]);
    assert!(disk.refusal(1).contains("signature at offset 0x200 "), "{}", disk.refusal(1));
    // The error of a spare header that is there tells more.
    let last = DISK_BYTES / 512 - 1;
    let mut damaged = disk.clone();
    let [(place, mut header), _] = gpt(512, last, last - 40, &[]);
    header[60] ^= 1;
    damaged.put(place, header);
    assert!(damaged.refusal(1).contains("header_crc32"), "{}", damaged.refusal(1));
}

#[test]
fn a_gpt_that_says_nonsense_is_refused() {
    type Field = (usize, Vec<u8>, &'static str);
    let fields: Vec<Field> = vec![
        (0, b"X".to_vec(), "signature"),
        (12, 91u32.to_le_bytes().into(), "header_size"),
        (12, 513u32.to_le_bytes().into(), "header_size"),
        (24, 2u64.to_le_bytes().into(), "my_lba"),
        (40, u64::MAX.to_le_bytes().into(), "first_usable_lba"),
        (72, (DISK_BYTES / 512).to_le_bytes().into(), "partition_entry_lba"),
        (72, (DISK_BYTES / 512 - 1).to_le_bytes().into(), "partition_entry_lba"),
        (80, u32::MAX.to_le_bytes().into(), "number_of_partition_entries"),
        (80, 0u32.to_le_bytes().into(), "number_of_partition_entries"),
        (84, 64u32.to_le_bytes().into(), "size_of_partition_entry"),
        (84, 129u32.to_le_bytes().into(), "size_of_partition_entry"),
    ];
    for (at, bytes, word) in fields {
        let [(place, mut header), list] = gpt(512, 1, 2, &[(100, 199)]);
        header[at..at + bytes.len()].copy_from_slice(&bytes);
        seal(&mut header);
        let mut disk = Disk(vec![(0, mbr(&[(0xee, 1, 1)])), list]);
        disk.put(place, header);
        assert!(disk.refusal(1).contains(word), "{word}: {}", disk.refusal(1));
    }
    for partition in [(199, 100), (0, 10), (100, DISK_BYTES / 512), (100, u64::MAX), (u64::MAX, u64::MAX)] {
        let refusal = gpt_disk(512, &[partition]).refusal(1);
        assert!(refusal.contains("not inside of the disk"), "{partition:?}: {refusal}");
    }
}

proptest! {
    /// All partitions that it finds are inside of the disk, and so are its reads (in `find`).
    #[test]
    fn no_table_makes_it_panic_or_run(
        number in 0u32..300, sealed in any::<bool>(), head_is_odd in any::<bool>(), mut head in proptest::collection::vec(any::<u8>(), 64),
        mut header in proptest::collection::vec(any::<u8>(), 92), kind in prop_oneof![Just(0xeeu8), Just(5), any::<u8>()],
    ) {
        head[4] = kind;
        for entry in head.chunks_mut(16).skip(usize::from(head_is_odd)) {
            entry[0] = 0x80;
        }
        head.extend([0x55, 0xaa]);
        header[..8].copy_from_slice(b"EFI PART");
        if sealed {
            header[12..16].copy_from_slice(&92u32.to_le_bytes());
            header[24..32].copy_from_slice(&1u64.to_le_bytes());
            seal(&mut header);
        }
        let disk = Disk(vec![(446, head), (512, header)]);
        if let Ok(range) = disk.find(number) {
            prop_assert!(range.start < range.end && range.end <= DISK_BYTES);
        }
    }
}
