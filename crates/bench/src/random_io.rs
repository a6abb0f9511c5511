// SPDX-License-Identifier: Apache-2.0 OR MIT
//! CPU time of a 4 KiB request through the library and on the raw file, both from the page cache.

use crate::Settings;
use crate::fixture;
use crate::table::{Outcome, Row};
use cowshed_image::node::Node;
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{File, IoBuf, OpenOptions, rt};
use cowshed_testkit::random::Random;
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const DEPTH: u64 = 32;
const REQUEST_BYTES: u64 = 4096;
/// Requests of each side in a round.
const REQUESTS: u64 = 200_000;

/// The target of the requests.
#[derive(Clone)]
enum Target {
    Image(Arc<Node>),
    File(File),
}

/// Random reads.
pub fn read(settings: &Settings) -> Result<Vec<Row>, String> {
    Ok(vec![case(settings, "random 4 KiB reads, depth 32", false)?])
}

/// Random overwrites of allocated clusters.
pub fn overwrite(settings: &Settings) -> Result<Vec<Row>, String> {
    Ok(vec![case(settings, "random 4 KiB overwrites, depth 32", true)?])
}

fn case(settings: &Settings, name: &str, write: bool) -> Result<Row, String> {
    let source = fixture::full(settings)?;
    // Everything allocated, also zeroes in the data.
    let converted = fixture::converted(settings, &source, "allocated", &["-S", "0"])?;
    let (raw, image) = (copy(&source)?, copy(&converted)?);
    let bytes = std::fs::metadata(&raw).map_err(|e| e.to_string())?.len();
    let (mut library_ns, mut file_ns) = (Vec::new(), Vec::new());
    let measured = rt::block_on(async {
        let request = OpenRequest::file(image.to_string_lossy()).format("qcow2").writable(write);
        let node = Target::Image(open(request).await?);
        let file = Target::File(File::open(&raw, &OpenOptions { write, ..OpenOptions::default() })?);
        for round in 0..=settings.rounds {
            let (library, plain) = (
                nanoseconds(&node, bytes, write, round as u64).await?,
                nanoseconds(&file, bytes, write, round as u64).await?,
            );
            // The first round fills the caches.
            if round > 0 {
                library_ns.push(library);
                file_ns.push(plain);
            }
        }
        match &node {
            Target::Image(node) => node.close().await,
            Target::File(_) => Ok(()),
        }
    });
    measured.map_err(|error| error.to_string())?;
    for path in [&raw, &image] {
        std::fs::remove_file(path).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(Row::new(name, "≤ 1.3 × the raw file", Outcome::Requests { library_ns, file_ns }))
}

/// CPU time of the process per request, in nanoseconds.
async fn nanoseconds(target: &Target, bytes: u64, write: bool, seed: u64) -> cowshed_types::Result<f64> {
    let started = cpu_nanoseconds();
    let tasks: Vec<_> = (0..DEPTH)
        .map(|task| rt::spawn(stream(target.clone(), bytes, write, Random::new(seed * DEPTH + task))))
        .collect();
    for task in tasks {
        task.await?;
    }
    Ok((cpu_nanoseconds() - started) as f64 / REQUESTS as f64)
}

async fn stream(target: Target, bytes: u64, write: bool, mut random: Random) -> cowshed_types::Result<()> {
    let mut buffer = IoBuf::zeroed(REQUEST_BYTES as usize);
    for _ in 0..REQUESTS / DEPTH {
        let offset = random.below(bytes / REQUEST_BYTES) * REQUEST_BYTES;
        let (result, returned) = match (&target, write) {
            (Target::Image(node), false) => node.read(offset, buffer).await,
            (Target::Image(node), true) => node.write(offset, buffer).await,
            (Target::File(file), false) => file.read_at(buffer, offset).await,
            (Target::File(file), true) => file.write_at(buffer, offset).await,
        };
        buffer = returned;
        result?;
    }
    Ok(())
}

/// CPU time of this process so far.
pub fn cpu_nanoseconds() -> i128 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

fn copy(source: &Path) -> Result<PathBuf, String> {
    let copy = source.with_extension("work");
    let target = match source.extension() {
        Some(extension) => copy.with_extension(format!("{}.work", extension.to_string_lossy())),
        None => copy,
    };
    std::fs::copy(source, &target).map_err(|e| format!("{}: {e}", target.display()))?;
    Ok(target)
}
