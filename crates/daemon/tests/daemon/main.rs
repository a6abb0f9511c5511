// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon as its clients see it.

mod activity;
mod after_jobs;
mod authorization;
mod backups;
mod beside_qemu;
mod bitmaps;
mod commits;
mod damage;
mod documents;
mod drives;
mod during_jobs;
mod exported_files;
mod exports;
mod failed_jobs;
mod fleecing;
mod grouped;
mod header_names;
mod ids;
mod internal;
mod jobs;
mod kinds;
mod limits;
mod load;
mod locks;
mod monitors;
mod nodes;
mod onto_itself;
mod outgoing;
mod pull_backup;
mod python;
mod quorum;
mod running;
mod snapshots;
mod statistics;
mod streams;
