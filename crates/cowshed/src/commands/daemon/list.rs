// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `qemu-nbd --list`: the exports of a server, in the words of QEMU's.

use crate::output::{Console, Failure};
use cowshed_daemon::client::{ClientOptions, ListedExport, TransmissionFlags, list_exports};
use cowshed_storage::rt;
use cowshed_storage::socket::SocketAddress;
use cowshed_types::Error;

/// Names of the flags, in the order of their bits.
const FLAGS: &[(TransmissionFlags, &str)] = &[
    (TransmissionFlags::READ_ONLY, "readonly"),
    (TransmissionFlags::SEND_FLUSH, "flush"),
    (TransmissionFlags::SEND_FUA, "fua"),
    (TransmissionFlags::ROTATIONAL, "rotational"),
    (TransmissionFlags::SEND_TRIM, "trim"),
    (TransmissionFlags::SEND_WRITE_ZEROES, "zeroes"),
    (TransmissionFlags::SEND_DF, "df"),
    (TransmissionFlags::CAN_MULTI_CONN, "multi"),
    (TransmissionFlags::SEND_RESIZE, "resize"),
    (TransmissionFlags::SEND_CACHE, "cache"),
    (TransmissionFlags::SEND_FAST_ZERO, "fast-zero"),
    (TransmissionFlags::BLOCK_STATUS_PAYLOAD, "block-status-payload"),
];

/// `port`: the text that means the server's port.
pub(super) fn run(server: &ClientOptions, port: Option<&str>, console: &mut Console) -> Result<u8, Failure> {
    // QEMU doesn't name the server, and names the port as it was given.
    let failed = |error: Error| {
        let mut sentence = error.sentence();
        if let (Some(text), SocketAddress::Tcp { port, .. }) = (port, &server.address) {
            sentence = sentence.replacen(&format!(":{port}'"), &format!(":{text}'"), 1);
        }
        Failure { sentence: Some(sentence), ..Failure::from(error) }
    };
    let exports = rt::block_on(list_exports(server)).map_err(failed)?;
    console.line(format_args!("exports available: {}", exports.len()));
    for export in &exports {
        print(export, console);
    }
    Ok(0)
}

fn print(export: &ListedExport, console: &mut Console) {
    console.line(format_args!(" export: '{}'", export.name));
    let Some(facts) = &export.facts else { return };
    if !facts.description.is_empty() {
        console.line(format_args!("  description: {}", facts.description));
    }
    if facts.flags.contains(TransmissionFlags::HAS_FLAGS) {
        let flags = FLAGS.iter().filter(|(flag, _)| facts.flags.contains(*flag));
        let names: String = flags.map(|(_, name)| format!("{name} ")).collect();
        console.line(format_args!("  size:  {}", facts.size));
        console.line(format_args!("  flags: {:#x} ( {names})", facts.flags.0));
    }
    if export.has_block_sizes {
        console.line(format_args!("  min block: {}", facts.block_sizes.minimum));
        console.line(format_args!("  opt block: {}", facts.block_sizes.preferred));
        console.line(format_args!("  max block: {}", facts.block_sizes.maximum));
    }
    console.line(format_args!("  transaction size: {}", if export.is_extended { "64-bit" } else { "32-bit" }));
    if !export.contexts.is_empty() {
        console.line(format_args!("  available meta contexts: {}", export.contexts.len()));
        for context in &export.contexts {
            console.line(format_args!("   {context}"));
        }
    }
}
