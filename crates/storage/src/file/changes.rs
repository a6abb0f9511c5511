// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The signs of changes that other programs make.

use super::File;
use crate::medium::Medium;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest tick of a kernel is 10 ms. Before Linux 6.13 two changes in one tick have one time.
const TICK: Duration = Duration::from_millis(20);

/// Of file systems that keep whole seconds, as ext4 does with small inodes.
const SECOND: Duration = Duration::from_secs(2);

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
        let Some([.., mtime_ns, ctime_seconds, ctime_ns]) = self.change_stamp().filter(|_| self.tells_changes()) else {
            return false;
        };
        let (changed, now) = (Duration::from_secs(ctime_seconds) + Duration::from_nanos(ctime_ns), SystemTime::now());
        let now = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        is_lately(changed, now, if mtime_ns == 0 && ctime_ns == 0 { SECOND } else { TICK })
    }
}

/// A time that is far ahead is one of a clock that was put back: later changes have other times.
fn is_lately(changed: Duration, now: Duration, grain: Duration) -> bool {
    changed <= now + grain && now < changed + grain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn change_is_late_for_one_grain() {
        let at = |ms: u64| Duration::from_secs(1_000_000) + Duration::from_millis(ms);
        assert!(is_lately(at(100), at(100), TICK) && is_lately(at(100), at(119), TICK));
        assert!(!is_lately(at(100), at(120), TICK) && is_lately(at(100), at(99), TICK));
        assert!(!is_lately(at(5000), at(0), TICK), "its clock was put back");
        assert!(is_lately(at(0), at(1999), SECOND) && !is_lately(at(0), at(2000), SECOND));
    }
}
