// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon as a process of its own, with the clients that people have: QEMU, fio, libnbd's tools, nbdkit, a guest.

mod changes;
mod device;
mod export_faults;
mod export_lives;
mod exposure;
mod faults;
mod floods;
mod fuse;
mod fuse_edges;
mod fuse_killed;
mod guest;
mod guest_disks;
mod guest_faults;
mod guest_killed;
mod guest_mount;
mod http;
mod http_tags;
mod killed;
mod load;
mod lost_streams;
mod no_space;
mod options;
mod process;
mod signals;
mod startup;
mod stress;
mod stuck;
mod ublk;
mod untrusted;
mod upgrade;
mod vhost;
