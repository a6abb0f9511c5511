// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests on images of all kinds beside a byte model, with data in pieces of any length.

use super::served::{DISK_BYTES, Served};
use cowshed_testkit::programs::tool;
use cowshed_testkit::random::{Random, seeds};
use cowshed_testkit::vhost::{DATA, FrontEnd};
use std::path::Path;

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const WRITE_ZEROES: u32 = 13;
const REQUESTS: usize = 250;
const MAX_SECTORS: u64 = 160;

/// One chain of two pieces for the header, pieces for the data, and a status.
struct Chain<'a> {
    driver: &'a mut FrontEnd,
    pieces: Vec<(u64, usize)>,
}

impl Chain<'_> {
    fn new<'a>(driver: &'a mut FrontEnd, random: &mut Random, mut len: usize) -> Chain<'a> {
        let (mut pieces, mut at) = (Vec::new(), DATA + 0x1000);
        // Aligned pieces are a shape of their own.
        let unit = if random.below(3) == 0 { 4096 } else { 1 };
        while len > 0 {
            let take = match pieces.len() {
                40 => len,
                _ => ((1 + random.below(9000)) as usize).next_multiple_of(unit).min(len),
            };
            at = (at + random.below(3000)).next_multiple_of(unit as u64);
            pieces.push((at, take));
            at += take as u64;
            len -= take;
        }
        Chain { driver, pieces }
    }

    fn run(&mut self, kind: u32, sector: u64, is_read: bool) {
        let table = FrontEnd::place(0);
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.driver.guest.memory.write(DATA as usize, &header);
        self.driver.describe(table, 0, (DATA, 10, 1, 1));
        self.driver.describe(table, 1, (DATA + 10, 6, 1, 2));
        let flags = if is_read { 1 | 2 } else { 1 };
        for (number, &(at, len)) in self.pieces.iter().enumerate() {
            let index = number as u16 + 2;
            self.driver.describe(table, index, (at, len as u32, flags, index + 1));
        }
        self.driver.describe(table, self.pieces.len() as u16 + 2, (DATA + 100, 1, 2, 0));
        self.driver.guest.memory.write(DATA as usize + 100, &[0xff]);
        self.driver.offer(0, 0);
        self.driver.kick(0);
        self.driver.wait_used(0);
        assert_eq!(self.driver.bytes(DATA + 100, 1), [0], "kind {kind} at sector {sector}");
    }

    fn fill(&self, mut bytes: &[u8]) {
        for &(at, len) in &self.pieces {
            self.driver.guest.memory.write(at as usize, &bytes[..len]);
            bytes = &bytes[len..];
        }
    }

    fn bytes(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|&(at, len)| self.driver.bytes(at, len)).collect()
    }
}

fn agrees(what: &str, options: &str, make: impl FnOnce(&Path)) {
    let served = Served::made(options, make, |_| ());
    let mut driver = served.driver();
    let seed = seeds(1).next().unwrap();
    let mut random = Random::new(seed);
    let mut model = served.disk(0, DISK_BYTES as usize);
    for _ in 0..REQUESTS {
        let sectors = 1 + random.below(MAX_SECTORS);
        // Half of the disk: requests meet each other.
        let sector = random.below(DISK_BYTES / 1024 - sectors);
        let (start, len) = (sector as usize * 512, sectors as usize * 512);
        match random.below(10) {
            0..4 => {
                let value = if random.below(6) == 0 { 0 } else { random.below(256) };
                let bytes: Vec<u8> = (0..len as u64).map(|at| (value * (1 + at % 13)) as u8).collect();
                let mut chain = Chain::new(&mut driver, &mut random, len);
                chain.fill(&bytes);
                chain.run(WRITE, sector, false);
                model[start..start + len].copy_from_slice(&bytes);
            }
            4..8 => {
                let mut chain = Chain::new(&mut driver, &mut random, len);
                chain.fill(&vec![0xee; len]);
                chain.run(READ, sector, true);
                assert!(
                    chain.bytes() == model[start..start + len],
                    "{what}, seed {seed}: {sectors} sectors at {sector}"
                );
            }
            8 => {
                let mut chain = Chain::new(&mut driver, &mut random, 16);
                chain.fill(&[&sector.to_le_bytes()[..], &(sectors as u32).to_le_bytes(), &[1, 0, 0, 0]].concat());
                chain.run(WRITE_ZEROES, 0, false);
                model[start..start + len].fill(0);
            }
            _ => Chain::new(&mut driver, &mut random, 0).run(FLUSH, 0, false),
        }
    }
    assert!(served.disk(0, DISK_BYTES as usize) == model, "{what}, seed {seed}: the whole disk");
}

fn qemu_img(arguments: &[&str], image: &Path) {
    tool("qemu-img", &[arguments, &[image.to_str().unwrap(), "16M"]].concat());
}

fn raw(image: &Path) {
    std::fs::File::create(image).unwrap().set_len(DISK_BYTES).unwrap();
}

#[test]
fn pieces_of_guest_memory_agree_with_a_byte_model() {
    const FILE: &str = "file.driver=file,file.filename=";
    const DIRECT: &str = "cache.direct=on,file.driver=file,file.cache.direct=on,file.filename=";
    let on = |driver: &str, file: &str| format!("driver={driver},node-name=d,discard=unmap,{file}");
    agrees("raw", &on("raw", FILE), raw);
    agrees("raw, direct", &on("raw", DIRECT), raw);
    agrees("raw, zeroes are found", &on("raw,detect-zeroes=unmap", FILE), raw);
    agrees("qcow2", &on("qcow2", FILE), |image| qemu_img(&["create", "-q", "-f", "qcow2"], image));
    let extended = ["create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size=16k"];
    agrees("qcow2, direct", &on("qcow2", DIRECT), |image| qemu_img(&extended, image));
    agrees("qcow2 over a base", &on("qcow2", FILE), |image| {
        let base: Vec<u8> = (0..DISK_BYTES).map(|at| (at / 512 % 251) as u8).collect();
        std::fs::write(image.with_file_name("base"), base).unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw"], image);
    });
    let through =
        "driver=raw,node-name=d,discard=unmap,file.driver=blkdebug,file.image.driver=file,file.image.filename=";
    agrees("a file that may fail", through, raw);
}
