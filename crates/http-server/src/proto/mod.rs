// SPDX-License-Identifier: Apache-2.0 OR MIT
//! HTTP/1.1 (RFC 9110, RFC 9112) as far as a server of byte ranges needs it: bytes and structs, no I/O, no time.
//!
//! - `request`: the head of a request
//! - `range`: the fields Range and If-Range, and the ranges that they name
//! - `answer`: from a request and the known facts of the content to the head of the response

pub mod answer;
pub mod range;
pub mod request;
