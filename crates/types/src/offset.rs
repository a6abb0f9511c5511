// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Byte offsets, one type per address space, so that the two can't be mixed up.

use std::fmt;

macro_rules! offset {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u64);

        impl $name {
            /// The offset in bytes.
            #[inline]
            pub const fn bytes(self) -> u64 {
                self.0
            }

            /// `self + bytes`, or `None` past 2^64.
            #[inline]
            pub const fn checked_add(self, bytes: u64) -> Option<Self> {
                match self.0.checked_add(bytes) {
                    Some(sum) => Some(Self(sum)),
                    None => None,
                }
            }

            /// Rounds down to a multiple of `1 << bits`.
            #[inline]
            pub const fn align_down(self, bits: u32) -> Self {
                Self(self.0 >> bits << bits)
            }

            /// The part below `1 << bits`.
            #[inline]
            pub const fn within(self, bits: u32) -> u64 {
                self.0 & ((1 << bits) - 1)
            }

            /// True when the offset is a multiple of `1 << bits`.
            #[inline]
            pub const fn is_aligned(self, bits: u32) -> bool {
                self.within(bits) == 0
            }
        }

        /// Adds bytes. Overflow is a bug of the caller: offsets that came from a file go through `checked_add`.
        impl std::ops::Add<u64> for $name {
            type Output = Self;
            #[inline]
            fn add(self, bytes: u64) -> Self {
                Self(self.0 + bytes)
            }
        }

        /// Distance in bytes; `other` must not be larger.
        impl std::ops::Sub<$name> for $name {
            type Output = u64;
            #[inline]
            fn sub(self, other: Self) -> u64 {
                self.0 - other.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

offset! {
    /// A byte offset on the virtual disk, as the guest sees it.
    GuestOffset
}
offset! {
    /// A byte offset in the file that stores an image (or in its external data file).
    HostOffset
}
