// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The error numbers that may travel, and the way from and to the system's.

use cowshed_types::Errno;

/// An error number of the protocol ("Error values").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NbdErrno(pub u32);

#[allow(missing_docs)]
impl NbdErrno {
    pub const EPERM: NbdErrno = NbdErrno(1);
    pub const EIO: NbdErrno = NbdErrno(5);
    pub const ENOMEM: NbdErrno = NbdErrno(12);
    pub const EINVAL: NbdErrno = NbdErrno(22);
    pub const ENOSPC: NbdErrno = NbdErrno(28);
    pub const EOVERFLOW: NbdErrno = NbdErrno(75);
    pub const ENOTSUP: NbdErrno = NbdErrno(95);
    pub const ESHUTDOWN: NbdErrno = NbdErrno(108);
}

impl NbdErrno {
    /// The number that a server sends for an error of its system: QEMU's choice. Errors without a number in the
    /// protocol are `EINVAL`, and so is `EACCES`.
    pub fn from_errno(errno: Errno) -> NbdErrno {
        const ESHUTDOWN: i32 = 108;
        const EOVERFLOW: i32 = 75;
        const EDQUOT: i32 = 122;
        match errno {
            Errno::EPERM | Errno::EROFS => NbdErrno::EPERM,
            Errno::EIO => NbdErrno::EIO,
            Errno::ENOMEM => NbdErrno::ENOMEM,
            Errno::ENOSPC | Errno::EFBIG | Errno(EDQUOT) => NbdErrno::ENOSPC,
            Errno(EOVERFLOW) => NbdErrno::EOVERFLOW,
            Errno::ENOTSUP => NbdErrno::ENOTSUP,
            Errno(ESHUTDOWN) => NbdErrno::ESHUTDOWN,
            _ => NbdErrno::EINVAL,
        }
    }

    /// The client's reading of the number: one that the protocol doesn't know is treated as `EINVAL`.
    pub fn to_errno(self) -> Errno {
        const ESHUTDOWN: i32 = 108;
        const EOVERFLOW: i32 = 75;
        match self {
            NbdErrno::EPERM => Errno::EPERM,
            NbdErrno::EIO => Errno::EIO,
            NbdErrno::ENOMEM => Errno::ENOMEM,
            NbdErrno::ENOSPC => Errno::ENOSPC,
            NbdErrno::EOVERFLOW => Errno(EOVERFLOW),
            NbdErrno::ENOTSUP => Errno::ENOTSUP,
            NbdErrno::ESHUTDOWN => Errno(ESHUTDOWN),
            _ => Errno::EINVAL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_of_the_protocol_travel() {
        for number in 1..200 {
            let sent = NbdErrno::from_errno(Errno(number));
            assert!([1, 5, 12, 22, 28, 75, 95, 108].contains(&sent.0), "{number} becomes {}", sent.0);
            assert_eq!(sent.to_errno().0 as u32, sent.0);
        }
        // As QEMU 11 sends them.
        for (number, sent) in [(2, 22), (11, 22), (13, 22), (27, 28), (30, 1), (74, 22), (95, 95), (110, 22), (117, 22)]
        {
            assert_eq!(NbdErrno::from_errno(Errno(number)).0, sent, "{number}");
        }
        assert_eq!(NbdErrno::from_errno(Errno(122)), NbdErrno::ENOSPC);
        assert_eq!(NbdErrno(4711).to_errno(), Errno::EINVAL);
        assert_eq!(NbdErrno::ESHUTDOWN.to_errno(), Errno(108));
    }
}
