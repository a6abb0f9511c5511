// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting for other threads.

pub(crate) use cowshed_storage::signal::{Mailbox, Watched, lock};
