// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The words in which options and clients are refused. Those for the client are QEMU's, because its tools print them. The errors
//! have QEMU's sentence for its log besides our own.

use cowshed_nbd_proto::Malformed;
use cowshed_nbd_proto::option::code;
use cowshed_types::{Error, ErrorKind};

/// QEMU's words for a client that has gone.
pub const ENDED: &str = "Unexpected end-of-file before all data were read";
/// The refusal of a second or a weaker choice of headers.
pub const EXTENDED_ALREADY: &str = "extended headers already negotiated";

/// The options by the names that QEMU gives them.
const NAMES: [(u32, &str); 10] = [
    (code::EXPORT_NAME, "export name"),
    (code::ABORT, "abort"),
    (code::LIST, "list"),
    (code::STARTTLS, "starttls"),
    (code::INFO, "info"),
    (code::GO, "go"),
    (code::STRUCTURED_REPLY, "structured reply"),
    (code::LIST_META_CONTEXT, "list meta context"),
    (code::SET_META_CONTEXT, "set meta context"),
    (code::EXTENDED_HEADERS, "extended headers"),
];

/// The name of an option that this version knows.
pub fn name(option: u32) -> Option<&'static str> {
    NAMES.iter().find(|(known, _)| *known == option).map(|(_, name)| *name)
}

fn shown(option: u32) -> &'static str {
    name(option).unwrap_or("<unknown>")
}

/// The client breaks the protocol.
pub fn broken(why: Malformed) -> Error {
    Error::new(ErrorKind::Io, format!("the client breaks the protocol: {why}"))
}

/// The client asks for something that it doesn't get.
pub fn refused(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, why)
}

/// The client has left between two options.
pub fn left() -> Error {
    let why = Error::new(ErrorKind::Cancelled, "the client left without choosing an export");
    why.qemu(format!("Failed to read opts magic: {ENDED}"))
}

/// The error of a handshake of TLS. The words for it are the library's.
pub fn of_tls(error: Error) -> Error {
    let words = error.sentence();
    let words = words.strip_prefix("TLS failed: ").unwrap_or(&words);
    let sentence = format!("TLS handshake failed: {words}");
    error.qemu(sentence)
}

pub fn unsupported(option: u32) -> String {
    format!("Unsupported option {option} ({})", shown(option))
}

pub fn too_long(option: u32) -> String {
    format!("option '{}' has unexpected length", shown(option))
}

pub fn too_early(option: u32) -> String {
    format!("Option {option:#x} not permitted before TLS")
}

pub fn unstructured(option: u32) -> String {
    format!("request option '{}' when structured reply is not negotiated", shown(option))
}

/// The fault of an option's data.
pub fn malformed(option: u32, data: &[u8], why: Malformed) -> String {
    let name_bytes = data.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes));
    match why {
        Malformed::TOO_SHORT => format!("Inconsistent lengths in option {}", shown(option)),
        Malformed::TOO_LONG => too_long(option),
        Malformed::NUL => format!("Unexpected embedded NUL in option {}", shown(option)),
        Malformed::LONG_STRING if name_bytes as usize > cowshed_nbd_proto::MAX_STRING_BYTES => {
            format!("Invalid name length: {name_bytes}")
        }
        Malformed(why) => why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cowshed_nbd_proto::option::{InfoRequest, MetaContextRequest};

    #[test]
    fn faults_of_options_have_the_words_of_qemu() {
        let info = |data: &[u8]| malformed(code::GO, data, InfoRequest::parse(data).expect_err("a fault"));
        assert_eq!(info(&[0]), "Inconsistent lengths in option go");
        assert_eq!(info(&[0; 7]), "option 'go' has unexpected length");
        assert_eq!(info(&[0, 0, 0, 1, 0, 0, 0]), "Unexpected embedded NUL in option go");
        assert_eq!(info(&[0, 0, 16, 1, 0, 0, 0]), "Invalid name length: 4097");
        let data = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 5, 1];
        let why = MetaContextRequest::parse(&data).expect_err("a fault");
        assert_eq!(malformed(code::SET_META_CONTEXT, &data, why), "Inconsistent lengths in option set meta context");
        assert_eq!(unsupported(99), "Unsupported option 99 (<unknown>)");
    }
}
