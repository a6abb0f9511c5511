// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Numbers at places of structs.

macro_rules! number {
    ($get:ident, $put:ident, $number:ty) => {
        /// The number at `at`; zero where the bytes end before it does.
        pub fn $get(bytes: &[u8], at: usize) -> $number {
            bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |bytes| <$number>::from_ne_bytes(*bytes))
        }

        /// Puts a number to `at`, within the bytes.
        pub fn $put(bytes: &mut [u8], at: usize, value: $number) {
            bytes[at..at + size_of::<$number>()].copy_from_slice(&value.to_ne_bytes());
        }
    };
}

number!(u16_at, put_u16, u16);
number!(u32_at, put_u32, u32);
number!(u64_at, put_u64, u64);
