// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The age of a file's times: those of a young change tell too little.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest tick of a kernel is 10 ms. Before Linux 6.13 two changes in one tick have one time.
const TICK: Duration = Duration::from_millis(20);

/// Of file systems that keep whole seconds, as ext4 does with small inodes.
const SECOND: Duration = Duration::from_secs(2);

/// True where a change of now could leave this stamp, or could have done so for a time until now.
pub(crate) fn is_young(stamp: [u64; 7], time: Duration) -> bool {
    let [.., mtime_ns, ctime_seconds, ctime_ns] = stamp;
    let changed = Duration::from_secs(ctime_seconds) + Duration::from_nanos(ctime_ns);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let grain = if mtime_ns == 0 && ctime_ns == 0 { SECOND } else { TICK };
    is_lately(changed, now, grain + time)
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
