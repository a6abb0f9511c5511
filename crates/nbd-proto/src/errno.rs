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
    /// What a server says for an error of its system. `ENOTSUP` and `EOVERFLOW` have special meanings on the wire, so
    /// an error of the system never becomes one of them.
    pub fn from_errno(errno: Errno) -> NbdErrno {
        const EDQUOT: i32 = 122;
        match errno {
            Errno::EPERM | Errno::EACCES | Errno::EROFS => NbdErrno::EPERM,
            Errno::ENOMEM => NbdErrno::ENOMEM,
            Errno::ENOSPC | Errno::EFBIG | Errno(EDQUOT) => NbdErrno::ENOSPC,
            Errno::EINVAL | Errno::ENOTSUP | Errno::ENOSYS => NbdErrno::EINVAL,
            _ => NbdErrno::EIO,
        }
    }

    /// What a client takes it for: a number that the protocol doesn't know is treated as `EINVAL`.
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
            assert!([1, 5, 12, 22, 28].contains(&sent.0), "{number} becomes {}", sent.0);
            assert_eq!(sent.to_errno().0 as u32, sent.0);
        }
        assert_eq!(NbdErrno::from_errno(Errno(122)), NbdErrno::ENOSPC);
        assert_eq!(NbdErrno(4711).to_errno(), Errno::EINVAL);
        assert_eq!(NbdErrno::ESHUTDOWN.to_errno(), Errno(108));
    }
}
