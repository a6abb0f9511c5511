// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Brings an image to the content of a raw file and writes only the differences, so that an overlay stays small.
//!
//! `cargo run --release -p cowshed --example patch -- overlay.qcow2 wanted.raw`
//!
//! It shows the library at work: one thread, many requests in flight.

use cowshed::{Disk, Error, IoBuf, OpenRequest, Queue, Result};
use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::rc::Rc;

/// The range that one request compares and, if need be, writes, in bytes.
const PIECE_BYTES: u64 = 64 << 10;
/// Requests in flight.
const DEPTH: usize = 16;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, wanted] = &arguments[..] else {
        eprintln!("usage: patch IMAGE RAW-FILE");
        return ExitCode::FAILURE;
    };
    match patch(image, wanted) {
        Ok((written, size)) => {
            println!("{image}: {written} of {size} bytes differed and were written");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("patch: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the bytes written and the size of the disk.
fn patch(image: &str, wanted: &str) -> Result<(u64, u64)> {
    let raw = Rc::new(File::open(wanted).map_err(|error| Error::io(&error, "could not open").file(wanted))?);
    let length = raw.metadata().map_err(|error| Error::io(&error, "could not get the size").file(wanted))?.len();
    let disk = Disk::open(OpenRequest::file(image).writable(true))?;
    let size = disk.size();
    if length != size {
        return Err(Error::invalid_argument(format!("{wanted} has {length} bytes, the disk {size}")).file(image));
    }
    let (next, written) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    cowshed::block_on(async {
        let tasks: Vec<_> = (0..DEPTH)
            .map(|_| {
                let (queue, raw) = (disk.queue(), Rc::clone(&raw));
                let (next, written) = (Rc::clone(&next), Rc::clone(&written));
                cowshed::spawn(async move {
                    while next.get() < size {
                        let offset = next.replace(next.get() + PIECE_BYTES);
                        let len = PIECE_BYTES.min(size - offset) as usize;
                        // Not in one expression: others add to it while this one waits.
                        let bytes = piece(&queue, &raw, offset, len).await?;
                        written.set(written.get() + bytes);
                    }
                    Ok::<(), Error>(())
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        disk.queue().flush().await
    })?;
    disk.close()?;
    Ok((written.get(), size))
}

/// Compares one piece and writes it if it differs. Returns the bytes written.
async fn piece(queue: &Queue, raw: &File, offset: u64, len: usize) -> Result<u64> {
    let mut wanted = IoBuf::zeroed(len);
    raw.read_exact_at(&mut wanted, offset).map_err(|error| Error::io(&error, "could not read").offset(offset))?;
    let (result, present) = queue.read(offset, IoBuf::zeroed(len)).await;
    result?;
    if present[..] == wanted[..] {
        return Ok(0);
    }
    queue.write(offset, wanted).await.0?;
    Ok(len as u64)
}
