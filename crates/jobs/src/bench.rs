// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A simple benchmark: many requests of one kind, a fixed number of them at a time.

use crate::{ImageSpec, JobHandle, in_work};
use cowshed_image::Node;
use cowshed_storage::IoBuf;
use cowshed_types::{Error, ErrorKind, Result};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests between two looks at whether the job was cancelled.
const REQUESTS_BETWEEN_LOOKS: u64 = 256;

/// The requests of a benchmark, and their image.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// The image.
    pub image: ImageSpec,
    /// Requests.
    pub count: u64,
    /// Requests in flight at a time, at least 1.
    pub depth: u64,
    /// Offset of the first request in bytes.
    pub offset: u64,
    /// Bytes of each, at least 1.
    pub buffer_bytes: u64,
    /// Bytes from one to the next, modulo the size of the image; 0: `buffer_bytes`.
    pub step_bytes: u64,
    /// Write this byte; `None`: read.
    pub pattern: Option<u8>,
    /// Flush whenever the number of requests left is a multiple of this; 0: never.
    pub flush_interval: u64,
    /// Flush beside other requests; else all end before.
    pub keeps_flowing: bool,
}

/// The duration of the requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BenchOutcome {
    /// Requests done, flushes not counted.
    pub requests: u64,
    /// Number of flushes done.
    pub flushes: u64,
    /// Bytes read or written.
    pub bytes: u64,
    /// The time from the first request to the end of the last.
    pub elapsed: Duration,
}

impl BenchOptions {
    /// Bytes from one request to the next.
    pub fn step(&self) -> u64 {
        if self.step_bytes == 0 { self.buffer_bytes } else { self.step_bytes }
    }

    fn check(&self) -> Result<()> {
        let refuse = |field, message: &str| Err(Error::invalid_argument(message).field(field));
        match self {
            BenchOptions { depth: 0, .. } => refuse("depth", "the number of requests in flight must be 1 or more"),
            BenchOptions { buffer_bytes: 0, .. } => refuse("buffer-size", "the buffer size must be 1 or more"),
            BenchOptions { pattern: None, flush_interval: 1.., .. } => {
                refuse("flush-interval", "--flush-interval is only available in write tests")
            }
            BenchOptions { flush_interval: interval @ 1.., depth, .. } if interval < depth => {
                refuse("flush-interval", "Flush interval can't be smaller than depth")
            }
            _ => Ok(()),
        }
    }
}

/// An open image, ready to be measured.
pub struct Bench<'a> {
    options: &'a BenchOptions,
    node: Arc<Node>,
}

impl<'a> Bench<'a> {
    /// Checks the options and opens the image.
    pub async fn open(options: &'a BenchOptions) -> Result<Bench<'a>> {
        options.check()?;
        let writable = options.pattern.is_some();
        let request = options.image.request()?.writable(writable);
        let node = options.image.open(request).await?;
        Ok(Bench { options, node })
    }

    /// Runs it and closes the image.
    pub async fn run(self, job: &JobHandle) -> Result<BenchOutcome> {
        let result = self.requests(job).await;
        let result = result.map_err(|error| in_work(error, "Failed request").file(self.node.filename()));
        let closed = self.node.close().await;
        result.and_then(|outcome| closed.map(|()| outcome))
    }

    async fn requests(&self, job: &JobHandle) -> Result<BenchOutcome> {
        let options = self.options;
        let size = self.node.size();
        let mut running: FuturesUnordered<LocalBoxFuture<'_, (Result<()>, Option<IoBuf>)>> = FuturesUnordered::new();
        let mut spare: Vec<IoBuf> = Vec::new();
        let mut outcome = BenchOutcome { requests: 0, flushes: 0, bytes: 0, elapsed: Duration::ZERO };
        let (mut left, mut offset) = (options.count, options.offset);
        job.set_len(options.count);
        let start = Instant::now();
        let mut result = Ok(());
        // Requests in flight end also after an error.
        while (left > 0 && result.is_ok()) || !running.is_empty() {
            let may_start = result.is_ok() && left > 0 && (running.len() as u64) < options.depth;
            if !may_start {
                if let Some((done, buf)) = running.next().await {
                    result = result.and(done);
                    spare.extend(buf);
                }
                continue;
            }
            let buf = spare.pop().unwrap_or_else(|| self.buffer());
            running.push(Box::pin(self.request(offset, buf)));
            offset = next_offset(offset, options.step(), size.saturating_sub(options.buffer_bytes));
            left -= 1;
            outcome.requests += 1;
            outcome.bytes += options.buffer_bytes;
            if left.is_multiple_of(REQUESTS_BETWEEN_LOOKS) {
                job.advance(options.count - left - job.progress().offset);
                result = job.pause_point().await;
            }
            if options.flush_interval > 0 && left.is_multiple_of(options.flush_interval) {
                outcome.flushes += 1;
                if options.keeps_flowing {
                    running.push(Box::pin(async { (self.node.flush().await, None) }));
                    continue;
                }
                while let Some((done, buf)) = running.next().await {
                    result = result.and(done);
                    spare.extend(buf);
                }
                if result.is_ok() {
                    result = self.node.flush().await;
                }
            }
        }
        outcome.elapsed = start.elapsed();
        result.map(|()| outcome)
    }

    fn buffer(&self) -> IoBuf {
        let mut buf = IoBuf::zeroed(self.options.buffer_bytes as usize);
        buf.fill(self.options.pattern.unwrap_or(0));
        buf
    }

    async fn request(&self, offset: u64, buf: IoBuf) -> (Result<()>, Option<IoBuf>) {
        let end = offset.checked_add(self.options.buffer_bytes);
        if end.is_none_or(|end| end > self.node.size()) {
            let message = "the request reaches past the end of the image";
            let error = Error::new(ErrorKind::InvalidArgument, message).with_errno(cowshed_types::Errno::EIO);
            return (Err(error.value(format!("{} bytes at {offset}", self.options.buffer_bytes))), Some(buf));
        }
        let (result, buf) = match self.options.pattern {
            Some(_) => self.node.write(offset, buf).await,
            None => self.node.read(offset, buf).await,
        };
        (result, Some(buf))
    }
}

/// Behind the last of `room` places it goes on from the start, as QEMU 11 does.
fn next_offset(offset: u64, step: u64, room: u64) -> u64 {
    match room {
        0 => 0,
        _ => (u128::from(offset) + u128::from(step)).rem_euclid(u128::from(room)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::next_offset;

    /// The offsets were seen with QEMU 11.1 on an image of 10 KiB.
    #[test]
    fn offsets_wrap_before_the_end() {
        let offsets = |first: u64, step: u64, buffer: u64| {
            let mut offset = first;
            let next = |_| {
                let at = offset;
                offset = next_offset(offset, step, 10240 - buffer);
                at
            };
            (0..8).map(next).collect::<Vec<u64>>()
        };
        assert_eq!(offsets(0, 3072, 4096), [0, 3072, 0, 3072, 0, 3072, 0, 3072]);
        assert_eq!(offsets(0, 7168, 4096), [0, 1024, 2048, 3072, 4096, 5120, 0, 1024]);
        assert_eq!(offsets(5120, 1024, 3072), [5120, 6144, 0, 1024, 2048, 3072, 4096, 5120]);
        assert_eq!(next_offset(5, 1, 0), 0);
        assert!(next_offset(u64::MAX - 1, u64::MAX, 1 << 20) < 1 << 20);
    }
}
