// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Real processes and threads: killed writers, a full file system, the client of Linux in an emulated guest.

mod file_locks;
mod full_disk;
mod image_locks;
mod linux_client;
mod real_processes;
mod real_threads;
