// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The block graph and its drivers, also beside the real QEMU.

mod blkdebug;
mod blkdebug_events;
mod block_formats;
mod caches;
mod chain;
mod cipher;
mod codec_qemu;
mod create_layout;
mod cut_short;
mod damage;
mod encryption;
mod encryption_create;
mod filters;
mod guessed;
mod live_graph;
mod open;
mod overlap;
mod policy;
mod read_ahead;
mod replicas_and_logs;
mod space_ahead;
mod statistics;
mod throttle;
mod vvfat;
