// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The signs of changes that other programs make.

use super::File;
use crate::medium::Medium;
use crate::stamp::is_young;
use std::time::Duration;

/// A write moves the times when it begins. Its last bytes come later, but hardly more than this time later.
const WRITE: Duration = Duration::from_secs(2);

impl File {
    /// Numbers that identify the open file. Another write, truncation or change of attributes changes them. `None`
    /// where the storage is no file of this machine.
    pub fn change_stamp(&self) -> Option<[u64; 7]> {
        self.0.medium.change_stamp()
    }

    /// True where each change moves [`File::change_stamp`]: the kernel of this machine keeps the times of the file. The servers of FUSE
    /// and network file systems may move them late or never.
    pub fn tells_changes(&self) -> bool {
        matches!(&self.0.medium, Medium::Host(host) if host.tells_changes())
    }

    /// True where another program has changed a file of this machine since it was opened here. Of one to which this process has
    /// written that is unknown: false.
    pub fn was_changed_by_others(&self) -> bool {
        matches!(&self.0.medium, Medium::Host(host) if host.was_changed()) && !self.statistics().has_changes()
    }

    /// True for a while after a change of a file of this machine: another change could leave the same stamp.
    pub fn was_changed_lately(&self) -> bool {
        self.tells_changes() && self.change_stamp().is_some_and(|stamp| is_young(stamp, Duration::ZERO))
    }

    /// True for some seconds after a change of a file of this machine: the write that made it may still be under way.
    pub fn may_be_amid_write(&self) -> bool {
        self.tells_changes() && self.change_stamp().is_some_and(|stamp| is_young(stamp, WRITE))
    }

    /// True where another change soon after the opening could have left the stamp of then. See [`File::was_changed_by_others`].
    pub fn was_opened_young(&self) -> bool {
        matches!(&self.0.medium, Medium::Host(host) if host.was_opened_young()) && self.tells_changes()
    }
}
