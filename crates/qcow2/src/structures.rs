// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The metadata structures of an image, and sets of them.

/// Metadata structures that writes are checked against; the names are those of `overlap-check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Structure {
    MainHeader,
    ActiveL1,
    ActiveL2,
    RefcountTable,
    RefcountBlock,
    SnapshotTable,
    InactiveL1,
    InactiveL2,
    BitmapDirectory,
}

impl Structure {
    /// The name in messages.
    pub const fn name(self) -> &'static str {
        match self {
            Structure::MainHeader => "qcow2_header",
            Structure::ActiveL1 => "active L1 table",
            Structure::ActiveL2 => "active L2 table",
            Structure::RefcountTable => "refcount table",
            Structure::RefcountBlock => "refcount block",
            Structure::SnapshotTable => "snapshot table",
            Structure::InactiveL1 => "inactive L1 table",
            Structure::InactiveL2 => "inactive L2 table",
            Structure::BitmapDirectory => "bitmap directory",
        }
    }
}

/// The structures that are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverlapSet(u16);

impl OverlapSet {
    /// No checks.
    pub const NONE: OverlapSet = OverlapSet(0);

    /// With one more structure.
    #[must_use]
    pub const fn with(self, structure: Structure, checked: bool) -> Self {
        if checked { OverlapSet(self.0 | 1 << structure as u16) } else { self }
    }

    pub(crate) const fn bits(self) -> u16 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u16) -> OverlapSet {
        OverlapSet(bits)
    }

    /// True when the structure is checked.
    pub const fn contains(self, structure: Structure) -> bool {
        self.0 >> structure as u16 & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets() {
        let set = OverlapSet::NONE.with(Structure::ActiveL2, true).with(Structure::ActiveL1, false);
        assert!(set.contains(Structure::ActiveL2) && !set.contains(Structure::ActiveL1));
    }
}
