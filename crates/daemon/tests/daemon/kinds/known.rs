// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The answers that differ from QEMU's, with the reasons.

pub struct Difference {
    /// Calls, by the names of the tables.
    pub names: &'static [&'static str],
    pub kinds: &'static [&'static str],
    /// The reason, for a reader.
    #[expect(dead_code, reason = "it is read in the source")]
    pub why: &'static str,
}

pub const DIFFERENCES: &[Difference] = &[
    Difference {
        names: &[
            "grow-device",
            "snapshot-sync-device",
            "internal",
            "internal-delete",
            "backing",
            "commit",
            "stream",
            "mirror",
            "mirror-target",
            "drive-mirror",
            "backup",
            "backup-target",
            "drive-backup",
            "snapshot-overlay",
            "create",
        ],
        kinds: &["served-id"],
        why: "an export is a device here; QEMU's storage daemon has none",
    },
    Difference { names: &["grow"], kinds: &["served", "shown"], why: "a disk may grow under its clients" },
    Difference {
        names: &["inactive"],
        kinds: &["shown", "source", "target"],
        why: "an inactive node is closed, so exports and jobs keep it active",
    },
    Difference {
        names: &["snapshot", "snapshot-sync", "snapshot-transaction", "drive-backup", "stream"],
        kinds: &["file"],
        why: "an image doesn't move from its file to another node while it is open",
    },
    Difference {
        names: &["snapshot-overlay"],
        kinds: &["base", "below", "target", "old"],
        why: "what other nodes read would change under them",
    },
    Difference {
        names: &["add-copy-before-write", "add-copy-before-write-target"],
        kinds: &["file"],
        why: "the sizes are compared first, and must be equal for a filter too",
    },
    Difference {
        names: &["create"],
        kinds: &["file"],
        why: "the conflict is the same, told from the other user's side",
    },
    Difference {
        names: &["add-copy-before-write-target", "create"],
        kinds: &["target"],
        why: "the conflict is the same; the filter and the job read their target too",
    },
    Difference {
        names: &["create"],
        kinds: &["served", "shown", "source"],
        why: "the conflict is about reading first; no verb reads a file in which an image is being made",
    },
    Difference {
        names: &["add-snapshot-access"],
        kinds: &["target"],
        why: "a job's target shares no reading with nodes above it",
    },
    Difference {
        names: &["reopen", "reopen-read-only", "reopen-without-backing"],
        kinds: &["source", "target"],
        why: "nodes of a job keep their options",
    },
];
