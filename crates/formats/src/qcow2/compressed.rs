// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Writing compressed clusters: compressed side by side on the pool, written as one run per batch.

use super::Qcow2Driver;
use cowshed_qcow2::{CompressedAllocation, CompressedPlace};
use cowshed_storage::fault::Event;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::{Error, GuestOffset, Result};
use futures_util::future::join_all;
use std::sync::atomic::Ordering;

struct Pending<'a> {
    driver: &'a Qcow2Driver,
    allocation: Option<CompressedAllocation>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        // After a panic the engine must not be touched: a second panic here would end the process.
        if let Some(allocation) = self.allocation.take().filter(|_| !std::thread::panicking()) {
            self.driver.engine.abort_compressed(allocation, false);
            self.driver.events.notify();
        }
    }
}

impl Qcow2Driver {
    /// Writes whole clusters, compressed where that makes them smaller. Each element is (guest offset, bytes of one guest
    /// cluster; the last one of the disk may be shorter). No cluster twice.
    pub async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        self.be_writable().await?;
        if self.data_file.is_some() {
            let message = "an image with an external data file can't hold compressed clusters";
            return Err(self.error(Error::unsupported(message)));
        }
        if self.engine.config().encrypted {
            return Err(self.error(Error::unsupported("encrypted images can't have compressed clusters")));
        }
        let size = self.cluster_size();
        for (guest, bytes) in &clusters {
            let is_last = guest + bytes.len() as u64 == self.size();
            if guest % size != 0 || (bytes.len() as u64 != size && !is_last) {
                return Err(Error::invalid_argument("compressed writes take whole clusters").value(guest));
            }
        }
        if self.is_recording() {
            for (guest, bytes) in &clusters {
                self.record(*guest, bytes.len() as u64).await?;
            }
        }
        let codec = self.codec();
        let work = clusters.into_iter().map(|(guest, bytes)| {
            rt::run_on_cpu_pool(move || {
                let mut out = Vec::new();
                let is_small = match bytes.len() as u64 == size {
                    true => codec.compress(&bytes, &mut out).is_some(),
                    false => {
                        let mut padded = bytes.to_vec();
                        padded.resize(size as usize, 0);
                        codec.compress(&padded, &mut out).is_some()
                    }
                };
                (guest, bytes, is_small.then_some(out))
            })
        });
        let mut batch = Vec::new();
        for (guest, bytes, compressed) in join_all(work).await {
            match compressed {
                Some(compressed) => batch.push((guest, compressed)),
                None => self.write_range(guest, bytes).await.0?,
            }
        }
        self.write_batch(&batch).await
    }

    async fn write_batch(&self, mut batch: &[(u64, Vec<u8>)]) -> Result<()> {
        while !batch.is_empty() {
            self.throttle_dirty().await?;
            let wanted: Vec<(GuestOffset, u64)> =
                batch.iter().map(|(guest, bytes)| (GuestOffset(*guest), bytes.len() as u64)).collect();
            let allocation = self.plan(|engine| engine.begin_compressed(&wanted)).await?;
            let mut pending = Pending { driver: self, allocation: Some(allocation) };
            let (result, count) = match &pending.allocation {
                Some(allocation) => (self.write_places(&allocation.places, batch).await, allocation.places.len()),
                None => (Err(Error::internal("an allocation went away")), 0),
            };
            let result = match (result, pending.allocation.take()) {
                (Ok(()), Some(allocation)) => self.engine.commit_compressed(allocation),
                (Err(error), Some(allocation)) => {
                    self.engine.abort_compressed(allocation, true);
                    Err(error)
                }
                (result, None) => result,
            };
            self.wrote_metadata.store(true, Ordering::Relaxed);
            self.events.notify();
            match result {
                Err(error) if self.gains_space(&error).await => continue,
                done => done?,
            }
            batch = &batch[count..];
        }
        Ok(())
    }

    /// Writes each gapless run of places by one operation, its last sector filled up with zeroes. The filling never
    /// goes past the run's last cluster, which is smaller than a sector of some disks and has neighbours of its own.
    async fn write_places(&self, places: &[CompressedPlace], batch: &[(u64, Vec<u8>)]) -> Result<()> {
        self.meet(Event::WriteCompressed).await;
        let sector = self.engine.config().sector_bytes;
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (place, (_, bytes)) in places.iter().zip(batch) {
            match runs.last_mut() {
                Some((start, run)) if *start + run.len() as u64 == place.host.0 => run.extend_from_slice(bytes),
                _ => runs.push((place.host.0, bytes.clone())),
            }
        }
        let writes = runs.into_iter().map(|(host, mut run)| {
            let end = host + run.len() as u64;
            let padded_end = end.next_multiple_of(sector).min(end.next_multiple_of(self.cluster_size()));
            run.resize((padded_end - host) as usize, 0);
            self.file.write_at(IoBuf::copy_from(&run), host)
        });
        let mut result = Ok(());
        for (outcome, _) in join_all(writes).await {
            if result.is_ok() {
                result = outcome;
            }
        }
        result
    }
}
