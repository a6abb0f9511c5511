// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The crash enumerator on a toy whose right and wrong forms are known: a right protocol must pass, and each wrong
//! one must be caught. Without this, a clean run on the real engine would prove nothing.
//!
//! The toy is a copy-on-write disk of 64 sectors. The file holds a header sector that names one of two table slots, the
//! two slots (a sector of 64 pointers each), and data sectors. A write goes to a free sector. A flush writes the table
//! to the other slot, and after a barrier over table and data the header, then a second barrier.

use cowshed_simulator::{Config, PageMap, Snapshot, World};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::crash::{CrashFailure, CrashPlan, CrashReport, explore};
use cowshed_testkit::model::Model;
use cowshed_testkit::operations::OpGen;
use cowshed_testkit::runner::{GuestDisk, check_disk_after_cut, run_steps};
use cowshed_types::Result;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::Path;

const SECTOR: u64 = 512;
const SECTORS: usize = 64;
const FIRST_DATA: u64 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slip {
    None,
    /// The table names a sector whose data is still under way.
    PublishBeforeData,
    /// No barrier between table and header.
    NoBarrierAfterTable,
    /// The header goes out before the table.
    HeaderFirst,
    /// The flush is acknowledged before its last barrier.
    EarlyAcknowledgement,
    /// A replaced sector is used again before the table without it is durable.
    EarlyReuse,
    /// A failed flush is tried again: right only because the file stays poisoned.
    RetryAfterFailedSync,
}

struct Toy {
    file: File,
    slip: Slip,
    table: RefCell<Vec<u64>>,
    slot: Cell<u64>,
    free: RefCell<BTreeSet<u64>>,
    /// Replaced since the last flush began: free when it has ended.
    replaced: RefCell<Vec<u64>>,
    end: Cell<u64>,
    flushing: Cell<bool>,
}

async fn write(file: &File, sector: u64, bytes: &[u8]) -> Result<()> {
    file.write_at(IoBuf::copy_from(bytes), sector * SECTOR).await.0
}

async fn read(file: &File, sector: u64) -> Result<IoBuf> {
    let (result, buf) = file.read_at(IoBuf::zeroed(SECTOR as usize), sector * SECTOR).await;
    result.map(|()| buf)
}

impl Toy {
    async fn open(slip: Slip) -> Result<Toy> {
        let file = File::open(Path::new("toy"), &OpenOptions { write: true, ..OpenOptions::default() })?;
        let header = read(&file, 0).await?;
        let slot = u64::from(header[0]);
        let bytes = read(&file, 1 + slot).await?;
        let table: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let end = (file.len().div_ceil(SECTOR)).max(FIRST_DATA).max(table.iter().max().unwrap_or(&0) + 1);
        let free = (FIRST_DATA..end).filter(|sector| !table.contains(sector)).collect();
        Ok(Toy {
            file,
            slip,
            table: table.into(),
            slot: slot.into(),
            free: RefCell::new(free),
            replaced: RefCell::default(),
            end: end.into(),
            flushing: false.into(),
        })
    }

    fn allocate(&self) -> u64 {
        self.free.borrow_mut().pop_first().unwrap_or_else(|| {
            self.end.set(self.end.get() + 1);
            self.end.get() - 1
        })
    }

    async fn flush_alone(&self) -> Result<()> {
        // The outgoing table still names the clusters that are replaced from now on.
        let replaced = self.replaced.take();
        let table: Vec<u8> = self.table.borrow().iter().flat_map(|pointer| pointer.to_le_bytes()).collect();
        let slot = 1 - self.slot.get();
        let mut header = vec![0; SECTOR as usize];
        header[0] = slot as u8;
        if self.slip == Slip::HeaderFirst {
            write(&self.file, 0, &header).await?;
            self.file.sync().await?;
        }
        write(&self.file, 1 + slot, &table).await?;
        if self.slip != Slip::NoBarrierAfterTable {
            self.file.sync().await?;
        }
        write(&self.file, 0, &header).await?;
        if self.slip == Slip::EarlyAcknowledgement {
            let file = self.file.clone();
            rt::spawn(async move { file.sync().await });
        } else {
            self.file.sync().await?;
        }
        self.slot.set(slot);
        self.free.borrow_mut().extend(replaced);
        Ok(())
    }

    async fn write_sector(&self, guest: usize, bytes: &[u8]) -> Result<()> {
        let host = self.allocate();
        if self.slip != Slip::PublishBeforeData {
            write(&self.file, host, bytes).await?;
        }
        let old = std::mem::replace(&mut self.table.borrow_mut()[guest], host);
        if self.slip == Slip::PublishBeforeData {
            write(&self.file, host, bytes).await?;
        }
        match (old, self.slip) {
            (0, _) => {}
            (old, Slip::EarlyReuse) => drop(self.free.borrow_mut().insert(old)),
            (old, _) => self.replaced.borrow_mut().push(old),
        }
        Ok(())
    }
}

impl GuestDisk for Toy {
    async fn read(&self, offset: u64, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        for at in (0..buf.len() as u64).step_by(SECTOR as usize) {
            // As an engine must: a sector that is being read may not be used again. The toy copies under no lock,
            // so it looks again.
            loop {
                let guest = ((offset + at) / SECTOR) as usize;
                let host = self.table.borrow()[guest];
                if host == 0 {
                    buf[at as usize..][..SECTOR as usize].fill(0);
                    break;
                }
                match read(&self.file, host).await {
                    Ok(bytes) => buf[at as usize..][..SECTOR as usize].copy_from_slice(&bytes),
                    Err(error) => return (Err(error), buf),
                }
                if self.table.borrow()[guest] == host {
                    break;
                }
            }
        }
        (Ok(()), buf)
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        for at in (0..buf.len() as u64).step_by(SECTOR as usize) {
            let guest = ((offset + at) / SECTOR) as usize;
            if let Err(error) = self.write_sector(guest, &buf[at as usize..][..SECTOR as usize]).await {
                return (Err(error), buf);
            }
        }
        (Ok(()), buf)
    }

    async fn write_zeroes(&self, offset: u64, len: u64, _may_unmap: bool) -> Result<()> {
        self.write(offset, IoBuf::zeroed(len as usize)).await.0
    }

    async fn discard(&self, _offset: u64, _len: u64) -> Result<()> {
        Ok(())
    }

    async fn write_compressed(&self, offset: u64, buf: IoBuf) -> Result<()> {
        self.write(offset, buf).await.0
    }

    async fn resize(&self, _bytes: u64) -> Result<()> {
        Ok(())
    }

    fn size(&self) -> u64 {
        SECTORS as u64 * SECTOR
    }

    async fn flush(&self) -> Result<()> {
        while self.flushing.replace(true) {
            // Simulated time, until the other flush has ended.
            rt::sleep(std::time::Duration::from_micros(50)).await;
        }
        let mut result = self.flush_alone().await;
        if self.slip == Slip::RetryAfterFailedSync && result.is_err() {
            result = self.flush_alone().await;
        }
        self.flushing.set(false);
        result
    }
}

fn run(slip: Slip, seed: u64, plan: &CrashPlan, fault: bool) -> std::result::Result<CrashReport, Box<CrashFailure>> {
    let files: Snapshot = [("toy".to_owned(), PageMap::with_len(FIRST_DATA * SECTOR))].into();
    let world = World::with_files(Config::new(seed), &files);
    let steps = OpGen { max_bytes: 4096, ..OpGen::new(SECTORS as u64 * SECTOR, 2048) }.steps(seed, 40);
    if fault {
        use cowshed_simulator::{Effect, Fault, OpKind};
        let fault = Fault::new(Effect::Fail(cowshed_types::Errno::EIO)).kind(OpKind::Sync).skip(seed % 5);
        world.add_fault(fault);
    }
    let model = Model::new(vec![0; SECTORS * SECTOR as usize]);
    let (outcome, _toy) = world.run(async {
        let toy = Toy::open(slip).await.expect("the toy opens");
        run_steps(toy, &world, model, &steps).await
    });
    assert!(fault || outcome.errors.is_empty(), "seed {seed}: {:?}", outcome.errors);
    // These slips also show while the toy runs; that is not the point here.
    let seen_live = matches!(slip, Slip::EarlyReuse | Slip::PublishBeforeData);
    assert!(seen_live || outcome.wrong_reads.is_empty(), "seed {seed}: {:?}", outcome.wrong_reads);
    explore(&world.trace(), plan, |case| {
        let disk = World::with_files(Config { in_order: true, ..Config::new(0) }, &case.state.files);
        disk.run(async {
            let toy = Toy::open(slip).await.map_err(|error| error.to_string())?;
            check_disk_after_cut(&toy, &outcome.model, case.position).await
        })
    })
}

#[test]
fn the_right_protocol_survives_every_cut() {
    let mut report = CrashReport::default();
    let started = std::time::Instant::now();
    for seed in 0..12 {
        for fault in [false, true] {
            match run(Slip::None, seed, &CrashPlan::new(seed), fault) {
                Ok(more) => report.add(&more),
                Err(failure) => panic!("seed {seed}: {failure}"),
            }
        }
    }
    println!("toy: {report} in {:?}", started.elapsed());
    assert!(report.distinct() > 2000, "{report}");
}

#[test]
fn a_retried_flush_acknowledges_nothing_that_was_dropped() {
    for seed in 0..6 {
        if let Err(failure) = run(Slip::RetryAfterFailedSync, seed, &CrashPlan::new(seed), true) {
            panic!("seed {seed}: {failure}");
        }
    }
}

fn is_caught(slip: Slip) {
    let caught = (0..20).find_map(|seed| run(slip, seed, &CrashPlan::new(seed), false).err());
    let failure = caught.unwrap_or_else(|| panic!("{slip:?} was not caught"));
    println!("{slip:?}: {failure}");
}

#[test]
fn a_pointer_before_its_data_is_caught() {
    is_caught(Slip::PublishBeforeData);
}

#[test]
fn a_missing_barrier_after_the_table_is_caught() {
    is_caught(Slip::NoBarrierAfterTable);
}

#[test]
fn a_header_before_its_table_is_caught() {
    is_caught(Slip::HeaderFirst);
}

#[test]
fn an_early_acknowledgement_is_caught() {
    is_caught(Slip::EarlyAcknowledgement);
}

#[test]
fn an_early_reuse_is_caught() {
    is_caught(Slip::EarlyReuse);
}
