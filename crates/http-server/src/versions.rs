// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The versions of the contents of which hosts have had bytes, and how far.

use std::collections::BTreeMap;

/// Hosts and paths that are told apart.
const MOST: usize = 1024;

/// The ends of the bytes that were sent of one content.
#[derive(Clone, Copy, Default)]
struct SentEnds {
    /// The last version that was sent.
    version: u64,
    /// Its farthest end, in bytes.
    end: u64,
    /// The farthest end of all versions before.
    end_before: u64,
}

impl SentEnds {
    fn add(&mut self, version: u64, end: u64) {
        if version != self.version {
            *self = SentEnds { version, end: 0, end_before: self.of_others(version) };
        }
        self.end = self.end.max(end);
    }

    /// The farthest end of all versions but this one.
    fn of_others(&self, version: u64) -> u64 {
        if version == self.version { self.end_before } else { self.end_before.max(self.end) }
    }
}

/// The bytes of each version that each host has had.
///
/// A client that asks for the rest of a file has its first bytes. The last of them is of a version that was sent to its host up to
/// there. So they are of this version where no other one was sent so far.
#[derive(Default)]
pub(crate) struct SentVersions {
    /// By the host and the path.
    hosts: BTreeMap<(String, String), SentEnds>,
    /// By the path: hosts that had no room.
    others: BTreeMap<String, SentEnds>,
}

impl SentVersions {
    /// Notes that a host gets bytes of a version, up to `end`.
    pub(crate) fn note(&mut self, host: &str, path: &str, version: u64, end: u64) {
        let key = (host.to_owned(), path.to_owned());
        if self.hosts.len() >= MOST
            && !self.hosts.contains_key(&key)
            && let Some(((_, path), ends)) = self.hosts.pop_first()
        {
            let others = self.others.entry(path).or_default();
            others.end_before = others.end_before.max(ends.end_before);
            others.add(ends.version, ends.end);
        }
        self.hosts.entry(key).or_default().add(version, end);
    }

    /// True where the first `len` bytes that a host has may be of another version.
    pub(crate) fn may_be_of_another(&self, host: &str, path: &str, version: u64, len: u64) -> bool {
        let ends = self.hosts.get(&(host.to_owned(), path.to_owned()));
        [ends, self.others.get(path)].into_iter().flatten().any(|ends| ends.of_others(version) >= len.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_behind_the_bytes_of_other_versions_is_sound() {
        let mut sent = SentVersions::default();
        sent.note("a", "/d", 1, 300);
        let may = |sent: &SentVersions, version, len| sent.may_be_of_another("a", "/d", version, len);
        assert!(!may(&sent, 1, 300) && may(&sent, 2, 300) && !may(&sent, 2, 301));
        sent.note("a", "/d", 2, 1000);
        assert!(may(&sent, 2, 300) && !may(&sent, 2, 301) && may(&sent, 3, 1000));
        assert!(!sent.may_be_of_another("b", "/d", 2, 5) && !sent.may_be_of_another("a", "/e", 2, 5));
    }

    #[test]
    fn hosts_without_room_are_not_forgotten() {
        let mut sent = SentVersions::default();
        sent.note("a", "/d", 1, 300);
        for number in 0..MOST {
            sent.note(&format!("b{number}"), "/d", 2, 10);
        }
        assert_eq!(sent.hosts.len(), MOST);
        // This was "a", and may be another one.
        assert!(sent.may_be_of_another("a", "/d", 2, 300) && !sent.may_be_of_another("a", "/d", 2, 301));
    }
}
