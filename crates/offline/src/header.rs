// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The header of a qcow2 image, for the driver and for the tools on the bare file.

use cowshed_layout::qcow2::Header;
use cowshed_storage::{File, IoBuf};
use cowshed_types::{Error, Result};

/// Reads and checks the header of a qcow2 image: one read unless the header needs more than 64 KiB.
pub async fn read_header(file: &File) -> Result<Header> {
    read_header_as(file, false).await
}

/// As [`read_header`]; `check`: faults that a check can judge are no error.
pub async fn read_header_as(file: &File, check: bool) -> Result<Header> {
    let in_file = |error: Error| error.file(file.name());
    let bytes = read_header_bytes(file).await.map_err(in_file)?;
    let parsed = if check { Header::parse_to_check(&bytes) } else { Header::parse(&bytes) };
    parsed.map_err(in_file)
}

/// The bytes of the header, as far as the file has them, unchecked.
pub(crate) async fn read_header_bytes(file: &File) -> Result<IoBuf> {
    const FIRST_READ_BYTES: u64 = 64 << 10;
    let read = async |len: u64| {
        let (result, buf) = file.read_at(IoBuf::try_zeroed(len as usize)?, 0).await;
        // Damage has sentences of its own.
        result.map(|()| buf).map_err(|error| error.qemu("Could not read qcow2 header"))
    };
    let mut bytes = read(file.len().min(FIRST_READ_BYTES)).await?;
    let needed = Header::bytes_needed(&bytes)? as u64;
    if needed > bytes.len() as u64 && file.len() > bytes.len() as u64 {
        bytes = read(file.len().min(needed)).await?;
    }
    Ok(bytes)
}
