// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cache modes by QEMU's names.

use cowshed_types::{Error, Result};

/// The three flags of a cache mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cache {
    /// Bypass the host's page cache (`cache.direct`).
    pub direct: bool,
    /// Ignore flushes (`cache.no-flush`).
    pub no_flush: bool,
    /// Flush after each write.
    pub writethrough: bool,
}

/// The names of the cache modes.
pub const CACHE_MODES: &[&str] = &["none", "off", "writeback", "writethrough", "directsync", "unsafe"];

impl Cache {
    /// From a name: `none` (or `off`), `writeback`, `writethrough`, `directsync`, `unsafe`.
    pub fn parse(name: &str) -> Result<Cache> {
        let (direct, no_flush, writethrough) = match name {
            "none" | "off" => (true, false, false),
            "writeback" => (false, false, false),
            "writethrough" => (false, false, true),
            "directsync" => (true, false, true),
            "unsafe" => (false, true, false),
            _ => {
                let message = format!("invalid cache mode '{name}': one of {} is expected", CACHE_MODES.join(", "));
                return Err(Error::invalid_argument(message));
            }
        };
        Ok(Cache { direct, no_flush, writethrough })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_to_its_own_mode() {
        let modes: Vec<Cache> = CACHE_MODES.iter().map(|name| Cache::parse(name).unwrap()).collect();
        assert_eq!(modes[0], modes[1]);
        assert_eq!(modes[2], Cache::default());
        assert!(modes[4].direct && modes[4].writethrough);
        let error = Cache::parse("Writeback").unwrap_err().to_string();
        assert!(error.contains("'Writeback'") && error.contains("directsync"), "{error}");
    }
}
