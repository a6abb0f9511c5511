// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The functions of `zstd.rs` in a build without the feature `zstd`.

use cowshed_types::{Error, Result};

pub(super) const LEVEL_DEFAULT: i32 = 1;

#[cold]
fn missing() -> Error {
    Error::unsupported("compression type zstd is not built in (feature `zstd`)")
}

pub(super) fn validate_level(_level: i32) -> Result<()> {
    Err(missing())
}

/// No cluster shrinks: each is stored uncompressed, which every compression type allows.
pub(super) fn compress(_level: i32, _cluster: &[u8], _out: &mut [u8]) -> Option<usize> {
    None
}

pub(super) fn decompress(_compressed: &[u8], _cluster: &mut [u8]) -> Result<()> {
    Err(missing())
}

#[cfg(test)]
mod tests {
    use crate::Codec;
    use cowshed_types::{Compression, ErrorKind};

    #[test]
    fn zstd_is_refused_by_the_name_of_its_feature() {
        let codec = Codec::new(Compression::Zstd);
        assert_eq!(codec.compress(&[0; 65536], &mut Vec::new()), None);
        let errors = [codec.decompress(&[0; 512], &mut [0; 65536]).unwrap_err(), Codec::zstd(1).unwrap_err()];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains("feature `zstd`"), "{error}");
        }
    }
}
