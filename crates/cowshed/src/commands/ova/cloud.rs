// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The archive that Google's cloud imports: `disk.raw` in GNU's old tar format, compressed with gzip.

use super::archive::{beside, claim, copy, publish};
use super::gzip::Gzip;
use cowshed_jobs::convert::{self, ConvertOptions, ConvertOutcome};
use cowshed_jobs::{ImageSpec, JobHandle};
use cowshed_ova::tar;
use cowshed_storage::{DataRange, OpenOptions};
use cowshed_types::{Error, Result};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// The only name that an import takes.
const NAME: &str = "disk.raw";

/// Converts the sources to one disk, and packs it.
pub async fn pack(options: &ConvertOptions, target: &Path, force: bool, job: &JobHandle) -> Result<ConvertOutcome> {
    // A file that another one uses, and one of the sources, keep their name.
    let _held = claim(target, force)?;
    let raw = beside(target)?;
    let name = raw.path().display().to_string();
    let spec = ImageSpec { name, format: Some("raw".to_owned()), ..options.target.clone() };
    let replaced = Some(target.to_owned());
    let options = ConvertOptions { target: spec, refuses_empty: true, replaced, ..options.clone() };
    let outcome = convert::run(&options, job).await?;
    let failed = |error: &std::io::Error, doing: &str| Error::io(error, doing).file(target.display().to_string());
    // The conversion may have made the file anew.
    let mut disk = File::open(raw.path()).map_err(|error| failed(&error, "could not read the disk"))?;
    let len = disk.metadata().map_err(|error| failed(&error, "could not look at the disk"))?.len();
    let holes = cowshed_storage::File::open(raw.path(), &OpenOptions::default())?;
    let found = holes.data_ranges(0, len, usize::MAX).await?;
    let runs: Vec<_> = found.into_iter().map(|DataRange { start, end }| (start, end.min(len) - start)).collect();
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let header = tar::sparse_header(NAME, len, &runs, seconds)?;
    let mut archive = Gzip::new(beside(target)?);
    let write = |archive: &mut Gzip<_>, bytes: &[u8]| {
        archive.write_all(bytes).map_err(|error| failed(&error, "could not write the archive"))
    };
    write(&mut archive, &header)?;
    let mut stored = 0;
    for (start, size) in runs {
        disk.seek(std::io::SeekFrom::Start(start)).map_err(|error| failed(&error, "could not read the disk"))?;
        let (copied, _) = copy(&mut (&mut disk).take(size), &mut archive, job)
            .map_err(|error| error.file(target.display().to_string()))?;
        if copied != size {
            return Err(Error::internal("the disk became shorter"));
        }
        stored += size;
    }
    write(&mut archive, &[0; 512][..tar::padding(stored)])?;
    let len = header.len() as u64 + stored.next_multiple_of(tar::BLOCK_BYTES);
    write(&mut archive, &vec![0; tar::end(len)])?;
    let file = archive.finish().map_err(|error| failed(&error, "could not write the archive"))?;
    publish(file, target, force)?;
    Ok(outcome)
}
