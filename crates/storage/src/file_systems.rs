// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The types of file systems, by their magic numbers (`statfs.f_type`).

/// In memory: tmpfs, which memfds are in, and hugetlbfs.
pub(crate) const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x9584_58f6];

/// Of this machine: ext4, XFS, Btrfs and F2FS.
pub(crate) const LOCAL: [u64; 4] = [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010];

/// Others whose times this machine's kernel keeps: overlayfs, ZFS, bcachefs; SquashFS, EROFS and ISO 9660, whose files don't change.
const WITH_TIMES: [u64; 6] = [0x794c_7630, 0x2fc1_2fc1, 0xca45_1a4e, 0x7371_7368, 0xe0f5_e1e2, 0x9660];

/// True where the kernel of this machine moves the times of a file with each change. The server of a FUSE or network file system may
/// do so late or never, and times of FAT are too coarse.
pub(crate) fn tell_changes(kind: u64) -> bool {
    [&IN_MEMORY[..], &LOCAL, &WITH_TIMES].iter().any(|known| known.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_file_systems_tell_no_changes() {
        for (name, kind) in [("ext4", 0xef53), ("tmpfs", 0x0102_1994), ("overlayfs", 0x794c_7630)] {
            assert!(tell_changes(kind), "{name}");
        }
        let foreign = [("FUSE", 0x6573_5546), ("NFS", 0x6969), ("SMB 2", 0xfe53_4d42), ("CIFS", 0xff53_4d42)];
        for (name, kind) in foreign.into_iter().chain([("9P", 0x0102_1997), ("Ceph", 0x00c3_6400), ("FAT", 0x4d44)]) {
            assert!(!tell_changes(kind), "{name}");
        }
    }
}
