// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The flag fields.

macro_rules! flags {
    ($(#[$about:meta])* $name:ident($width:ty) { $($(#[$doc:meta])* $flag:ident = $bit:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub $width);

        impl $name {
            $($(#[$doc])* pub const $flag: $name = $name(1 << $bit);)*
            /// All flags that this version knows.
            pub const ALL: $name = $name(0 $(| 1 << $bit)*);

            /// True when every flag of `other` is set.
            #[inline]
            pub const fn contains(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// These flags and `other`, if `wanted`.
            #[must_use]
            pub const fn with(self, other: $name, wanted: bool) -> $name {
                if wanted { $name(self.0 | other.0) } else { self }
            }

            /// The flags that are not in `other`.
            #[must_use]
            pub const fn without(self, other: $name) -> $name {
                $name(self.0 & !other.0)
            }
        }

        impl std::ops::BitOr for $name {
            type Output = $name;
            fn bitor(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }
    };
}

flags! {
    /// The server's flags in its greeting.
    HandshakeFlags(u16) {
        /// Options other than `NBD_OPT_EXPORT_NAME` work.
        FIXED_NEWSTYLE = 0,
        /// The 124 zero bytes can be left out.
        NO_ZEROES = 1,
    }
}

flags! {
    /// The client's flags in its answer to the greeting.
    ClientFlags(u32) {
        /// The client may send options other than `NBD_OPT_EXPORT_NAME`.
        FIXED_NEWSTYLE = 0,
        /// Leave the 124 zero bytes out.
        NO_ZEROES = 1,
    }
}

flags! {
    /// The abilities of an export.
    TransmissionFlags(u16) {
        /// Always set.
        HAS_FLAGS = 0,
        /// Writes are refused.
        READ_ONLY = 1,
        /// `NBD_CMD_FLUSH` works.
        SEND_FLUSH = 2,
        /// `NBD_CMD_FLAG_FUA` works.
        SEND_FUA = 3,
        /// A rotating disk.
        ROTATIONAL = 4,
        /// `NBD_CMD_TRIM` works.
        SEND_TRIM = 5,
        /// `NBD_CMD_WRITE_ZEROES` works.
        SEND_WRITE_ZEROES = 6,
        /// `NBD_CMD_FLAG_DF` works.
        SEND_DF = 7,
        /// A flush on one connection covers the writes of others.
        CAN_MULTI_CONN = 8,
        /// The experimental extension for `NBD_CMD_RESIZE`.
        SEND_RESIZE = 9,
        /// `NBD_CMD_CACHE` works.
        SEND_CACHE = 10,
        /// `NBD_CMD_FLAG_FAST_ZERO` works.
        SEND_FAST_ZERO = 11,
        /// `NBD_CMD_BLOCK_STATUS` may name the contexts that it is about.
        BLOCK_STATUS_PAYLOAD = 12,
    }
}

flags! {
    /// Flags of a request.
    CommandFlags(u16) {
        /// Reply only when it is durable.
        FUA = 0,
        /// `WRITE_ZEROES`: keep the space.
        NO_HOLE = 1,
        /// `READ`: one content chunk.
        DF = 2,
        /// `BLOCK_STATUS`: one extent.
        REQ_ONE = 3,
        /// `WRITE_ZEROES`: fail rather than be slow.
        FAST_ZERO = 4,
        /// With extended headers: the length is that of a payload.
        PAYLOAD_LEN = 5,
    }
}

flags! {
    /// Flags of a structured reply chunk.
    ReplyFlags(u16) {
        /// The last chunk of its reply.
        DONE = 0,
    }
}

/// `base:allocation`: not allocated.
pub const STATE_HOLE: u32 = 1;
/// `base:allocation`: reads as zeroes.
pub const STATE_ZERO: u32 = 2;
/// `qemu:dirty-bitmap:…`: dirty.
pub const STATE_DIRTY: u32 = 1;
