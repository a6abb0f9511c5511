// SPDX-License-Identifier: Apache-2.0 OR MIT
//! QMP: the schema and sessions.

mod schema;
mod session;
