// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The engine on the simulated disk: power cuts, I/O errors, dropped requests, the fuzzer's inputs.

mod check_owners;
mod corpus;
mod crash_create;
mod crash_encryption;
mod crash_engine;
mod crash_filters;
mod crash_findings;
mod crash_formats;
mod crash_growth;
mod crash_live;
mod crash_parents;
mod crash_repairs;
mod crash_shrink;
mod crash_stale_records;
mod crash_toy;
mod drained_jobs;
mod dropped_formats;
mod dropped_requests;
mod failed_headers;
mod failure_shapes;
mod fresh_images;
mod full_again;
mod full_formats;
mod live_copies;
mod nbd;
mod outdated_tables;
mod rescue;
mod silent_targets;
mod storage_shapes;
mod vhost;
