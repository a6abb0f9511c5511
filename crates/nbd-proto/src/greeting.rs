// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The first bytes in both directions, and the old way to choose an export.

use crate::cursor::{Cursor, Malformed};
use crate::flags::{ClientFlags, HandshakeFlags, TransmissionFlags};

/// `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second magic of the oldstyle negotiation, which is obsolete.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Bytes of the server's greeting.
pub const GREETING_BYTES: usize = 18;
/// Zero bytes after the answer to `NBD_OPT_EXPORT_NAME`, unless left out by agreement.
pub const EXPORT_NAME_ZEROES: usize = 124;
/// Bytes of the oldstyle greeting between its two magics and the zeroes, as many as after `NBD_OPT_EXPORT_NAME`.
pub const OLDSTYLE_BYTES: usize = 12;
/// Bytes of the answer to `NBD_OPT_EXPORT_NAME` without the zeroes.
pub const EXPORT_NAME_BYTES: usize = 10;

/// The server's first bytes.
pub fn encode(flags: HandshakeFlags) -> [u8; GREETING_BYTES] {
    let mut bytes = [0; GREETING_BYTES];
    bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
    bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
    bytes[16..].copy_from_slice(&flags.0.to_be_bytes());
    bytes
}

/// The server's flags; unknown ones are left out, as a client should.
pub fn parse(bytes: &[u8; GREETING_BYTES]) -> Result<HandshakeFlags, Malformed> {
    let mut cursor = Cursor::new(bytes);
    if cursor.u64()? != INIT_MAGIC {
        return Err(Malformed("this is not an NBD server"));
    }
    match cursor.u64()? {
        OPTION_MAGIC => {}
        _ => return Err(Malformed("this is not an NBD server")),
    }
    Ok(HandshakeFlags(cursor.u16()? & HandshakeFlags::ALL.0))
}

/// True for the first 16 bytes of a server that speaks the oldstyle protocol: one export without a name, and no options.
pub fn is_oldstyle(bytes: &[u8]) -> bool {
    bytes.get(..16).is_some_and(|start| start == [INIT_MAGIC.to_be_bytes(), OLDSTYLE_MAGIC.to_be_bytes()].concat())
}

/// Size in bytes and flags from the bytes that follow these: "32 bits, flags", of which the lower half is of the
/// transmission.
pub fn parse_oldstyle(bytes: &[u8; OLDSTYLE_BYTES]) -> Result<(u64, TransmissionFlags), Malformed> {
    let mut cursor = Cursor::new(bytes);
    let size = cursor.u64()?;
    let flags = TransmissionFlags((cursor.u32()? & 0xffff) as u16);
    // Without this one the others mean nothing.
    let has_flags = flags.contains(TransmissionFlags::HAS_FLAGS);
    Ok((size, if has_flags { flags } else { TransmissionFlags::default() }))
}

/// The client's answer: "the server MUST drop the connection if the client sets an unknown flag".
pub fn parse_client_flags(bytes: [u8; 4]) -> Result<ClientFlags, Malformed> {
    let flags = ClientFlags(u32::from_be_bytes(bytes));
    if ClientFlags::ALL.contains(flags) { Ok(flags) } else { Err(Malformed("the client sets unknown flags")) }
}

/// The answer to `NBD_OPT_EXPORT_NAME`, without the zeroes.
pub fn encode_export(size_bytes: u64, flags: TransmissionFlags) -> [u8; EXPORT_NAME_BYTES] {
    let mut bytes = [0; EXPORT_NAME_BYTES];
    bytes[..8].copy_from_slice(&size_bytes.to_be_bytes());
    bytes[8..].copy_from_slice(&flags.0.to_be_bytes());
    bytes
}

/// Size in bytes and flags from that answer.
pub fn parse_export(bytes: &[u8; EXPORT_NAME_BYTES]) -> Result<(u64, TransmissionFlags), Malformed> {
    let mut cursor = Cursor::new(bytes);
    Ok((cursor.u64()?, TransmissionFlags(cursor.u16()?)))
}
