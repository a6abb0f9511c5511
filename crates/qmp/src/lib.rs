// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QEMU machine protocol (QMP) without I/O: JSON as it streams in, the schema of commands and events, the session
//! of one client. The owner of a socket feeds bytes in and writes out the answers.

mod codec;
mod error;
mod json;
mod lexer;
mod order;
mod parse;
mod schema;
mod session;
mod size;
mod stream;
mod types;

pub use codec::{Event, Timestamp, encode, greeting, reply};
pub use error::{ErrorClass, QmpError, QmpResult};
pub use json::{MAX_DEPTH, parse_json};
pub use schema::{Schema, Strictness};
pub use session::{Command, Incoming, Session};
pub use size::size_of_text;
pub use stream::{JsonStream, MAX_TEXT_BYTES};
pub use types::{Alternative, ObjectType, SchemaMember, Type};
