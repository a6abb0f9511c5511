// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The files that a reference of the descriptor stands for: one, or several that were cut from one.

use crate::envelope::FileReference;
use crate::limits;
use cowshed_types::{Error, ErrorKind, Result};

/// The count of files that a reference stands for.
pub(crate) fn count_of(reference: &FileReference) -> u64 {
    match (reference.chunk_bytes, reference.size) {
        (Some(chunk), Some(size)) => size.div_ceil(chunk).clamp(1, 1 + limits::MEMBERS as u64),
        _ => 1,
    }
}

/// The names of the files that a reference stands for, with their lengths as far as known.
pub fn pieces_of(reference: &FileReference) -> Result<Vec<(String, Option<u64>)>> {
    let (Some(chunk), Some(size)) = (reference.chunk_bytes, reference.size) else {
        return Ok(vec![(reference.href.clone(), reference.size)]);
    };
    let count = size.div_ceil(chunk).max(1);
    if count > limits::MEMBERS as u64 {
        return Err(Error::new(ErrorKind::Limit, format!("more than {} pieces of a file", limits::MEMBERS)));
    }
    let len = |index: u64| chunk.min(size - index * chunk);
    Ok((0..count).map(|index| (format!("{}.{index:09}", reference.href), Some(len(index)))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_file_and_no_more() {
        let reference = |size, chunk| FileReference {
            href: "d".to_owned(),
            size: Some(size),
            chunk_bytes: Some(chunk),
            ..FileReference::default()
        };
        let lens = |size, chunk| -> Vec<u64> {
            pieces_of(&reference(size, chunk)).unwrap().iter().filter_map(|(_, len)| *len).collect()
        };
        assert_eq!(lens(10, 4), [4, 4, 2]);
        assert_eq!(lens(8, 4), [4, 4]);
        assert_eq!(lens(0, 4), [0]);
        assert_eq!(pieces_of(&reference(10, 4)).unwrap()[2].0, "d.000000002");
        assert_eq!(pieces_of(&reference(u64::MAX >> 1, 1)).unwrap_err().kind(), ErrorKind::Limit);
    }
}
