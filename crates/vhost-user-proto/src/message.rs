// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Messages on the socket: a header of 12 bytes, then a body.

use crate::malformed::{u16_at, u32_at, u64_at};
use crate::regions::REGION_BYTES;
use crate::{Malformed, Region};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 12;
/// The longest body that any message may have, in bytes.
pub const MAX_BODY_BYTES: u32 = 4096;
/// The longest range of the config space in one message, in bytes.
pub const MAX_CONFIG_BYTES: u32 = 256;
/// The most regions in one `SET_MEM_TABLE`, and so the most descriptors that one message may bring.
pub const MAX_TABLE_REGIONS: usize = 8;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// In the number of `SET_VRING_KICK`, `CALL` and `ERR`: no descriptor comes along.
const NO_DESCRIPTOR: u64 = 1 << 8;
/// Bytes in front of a range of the config space.
const CONFIG_HEAD_BYTES: usize = 12;
const INFLIGHT_BYTES: usize = 20;

/// Numbers of requests.
pub mod request {
    #![allow(missing_docs, reason = "the names are those of the specification")]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    /// A message of the back end, on its own channel: the config space has changed.
    pub const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageHeader {
    /// The kind of request.
    pub request: u32,
    /// The sender asks for an answer also where the message has none of its own.
    pub needs_reply: bool,
    /// Bytes of the body.
    pub body_bytes: u32,
}

impl MessageHeader {
    /// Parses the header of a message of a front end.
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<MessageHeader, Malformed> {
        let (request, flags, body_bytes) = (u32_at(bytes, 0), u32_at(bytes, 4), u32_at(bytes, 8));
        if flags & VERSION_MASK != VERSION {
            return Err(Malformed::new("version of a message, in its flags", flags));
        }
        if flags & REPLY != 0 {
            return Err(Malformed::new("a reply without a request, flags", flags));
        }
        if body_bytes > MAX_BODY_BYTES {
            return Err(Malformed::new("length of a message", body_bytes));
        }
        Ok(MessageHeader { request, needs_reply: flags & NEED_REPLY != 0, body_bytes })
    }

    /// The bytes of a message: for a client, and for the back end's own channel.
    pub fn message(request: u32, needs_reply: bool, body: &[u8]) -> Vec<u8> {
        encode(request, VERSION | if needs_reply { NEED_REPLY } else { 0 }, body)
    }

    /// The bytes of a reply to the message.
    pub fn reply(&self, body: &[u8]) -> Vec<u8> {
        encode(self.request, VERSION | REPLY, body)
    }
}

fn encode(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    // Bodies have at most MAX_BODY_BYTES.
    for number in [request, flags, u32::try_from(body.len()).unwrap_or(u32::MAX)] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(body);
    bytes
}

/// Where a ring is, by the front end's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingAddresses {
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the used ring.
    pub used: u64,
    /// Address of the available ring.
    pub available: u64,
}

/// A region for requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightPlace {
    /// Its length in bytes.
    pub len: u64,
    /// Its offset in its file, in bytes.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Number of places of each queue's ring.
    pub ring_size: u16,
}

impl InflightPlace {
    /// The body of a message, with as many bytes as the front end's had: C pads it.
    pub fn encode(&self, body_bytes: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24);
        bytes.extend(self.len.to_le_bytes());
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.queues.to_le_bytes());
        bytes.extend(self.ring_size.to_le_bytes());
        bytes.resize((body_bytes as usize).clamp(INFLIGHT_BYTES, 24), 0);
        bytes
    }
}

/// A message of a front end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the specification")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetVringNum {
        ring: u32,
        size: u32,
    },
    SetVringAddr {
        ring: u32,
        addresses: RingAddresses,
    },
    SetVringBase {
        ring: u32,
        base: u32,
    },
    GetVringBase {
        ring: u32,
    },
    SetVringKick {
        ring: u32,
        has_descriptor: bool,
    },
    SetVringCall {
        ring: u32,
        has_descriptor: bool,
    },
    SetVringErr {
        ring: u32,
        has_descriptor: bool,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable {
        ring: u32,
        enable: bool,
    },
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        len: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        flags: u32,
        bytes: Vec<u8>,
    },
    GetInflightFd(InflightPlace),
    SetInflightFd(InflightPlace),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(Region),
    /// A message that was not agreed on, or that is unknown.
    Other(u32),
}

impl Message {
    /// Parses the body behind a header.
    pub fn parse(header: &MessageHeader, body: &[u8]) -> Result<Message, Malformed> {
        use request::*;
        let needs = |len: usize| match body.len() >= len {
            true => Ok(()),
            false => Err(Malformed::new("a message's body is too short; the request", header.request)),
        };
        let number = || needs(8).map(|()| u64_at(body, 0));
        let pair = || needs(8).map(|()| (u32_at(body, 0), u32_at(body, 4)));
        let descriptor = || number().map(|number| ((number & 0xff) as u32, number & NO_DESCRIPTOR == 0));
        Ok(match header.request {
            GET_FEATURES => Message::GetFeatures,
            SET_FEATURES => Message::SetFeatures(number()?),
            SET_OWNER => Message::SetOwner,
            RESET_OWNER => Message::ResetOwner,
            SET_MEM_TABLE => Message::SetMemTable(table(body)?),
            SET_VRING_NUM => pair().map(|(ring, size)| Message::SetVringNum { ring, size })?,
            SET_VRING_ADDR => {
                needs(40)?;
                let addresses =
                    RingAddresses { descriptors: u64_at(body, 8), used: u64_at(body, 16), available: u64_at(body, 24) };
                Message::SetVringAddr { ring: u32_at(body, 0), addresses }
            }
            SET_VRING_BASE => pair().map(|(ring, base)| Message::SetVringBase { ring, base })?,
            GET_VRING_BASE => pair().map(|(ring, _)| Message::GetVringBase { ring })?,
            SET_VRING_KICK => {
                descriptor().map(|(ring, has_descriptor)| Message::SetVringKick { ring, has_descriptor })?
            }
            SET_VRING_CALL => {
                descriptor().map(|(ring, has_descriptor)| Message::SetVringCall { ring, has_descriptor })?
            }
            SET_VRING_ERR => {
                descriptor().map(|(ring, has_descriptor)| Message::SetVringErr { ring, has_descriptor })?
            }
            GET_PROTOCOL_FEATURES => Message::GetProtocolFeatures,
            SET_PROTOCOL_FEATURES => Message::SetProtocolFeatures(number()?),
            GET_QUEUE_NUM => Message::GetQueueNum,
            SET_VRING_ENABLE => pair().map(|(ring, on)| Message::SetVringEnable { ring, enable: on != 0 })?,
            SET_BACKEND_REQ_FD => Message::SetBackendReqFd,
            GET_CONFIG => {
                let (offset, len, flags) = config_range(header, body)?;
                Message::GetConfig { offset, len, flags }
            }
            SET_CONFIG => {
                let (offset, len, flags) = config_range(header, body)?;
                needs(CONFIG_HEAD_BYTES + len as usize)?;
                let bytes = body[CONFIG_HEAD_BYTES..][..len as usize].to_vec();
                Message::SetConfig { offset, flags, bytes }
            }
            GET_INFLIGHT_FD => Message::GetInflightFd(inflight(header, body)?),
            SET_INFLIGHT_FD => Message::SetInflightFd(inflight(header, body)?),
            RESET_DEVICE => Message::ResetDevice,
            GET_MAX_MEM_SLOTS => Message::GetMaxMemSlots,
            ADD_MEM_REG => Message::AddMemReg(single_region(header, body)?),
            REM_MEM_REG => Message::RemMemReg(single_region(header, body)?),
            other => Message::Other(other),
        })
    }

    /// True for one that has an answer of its own, and gets no other.
    pub fn has_reply(&self) -> bool {
        matches!(
            self,
            Message::GetFeatures
                | Message::GetVringBase { .. }
                | Message::GetProtocolFeatures
                | Message::GetQueueNum
                | Message::GetConfig { .. }
                | Message::GetInflightFd(_)
                | Message::GetMaxMemSlots
        )
    }
}

fn table(body: &[u8]) -> Result<Vec<Region>, Malformed> {
    let count = u32_at(body, 0) as usize;
    if body.len() < 8 || count > MAX_TABLE_REGIONS || body.len() < 8 + count * REGION_BYTES {
        return Err(Malformed::new("a table of memory has no room for its regions, or too many", count as u64));
    }
    body[8..].as_chunks::<REGION_BYTES>().0[..count].iter().map(Region::parse).collect()
}

fn single_region(header: &MessageHeader, body: &[u8]) -> Result<Region, Malformed> {
    let bytes = body.get(8..).and_then(<[u8]>::first_chunk::<REGION_BYTES>);
    Region::parse(bytes.ok_or(Malformed::new("a message's body is too short; the request", header.request))?)
}

fn config_range(header: &MessageHeader, body: &[u8]) -> Result<(u32, u32, u32), Malformed> {
    if body.len() < CONFIG_HEAD_BYTES {
        return Err(Malformed::new("a message's body is too short; the request", header.request));
    }
    let (offset, len, flags) = (u32_at(body, 0), u32_at(body, 4), u32_at(body, 8));
    match offset.checked_add(len) {
        Some(end) if end <= MAX_CONFIG_BYTES => Ok((offset, len, flags)),
        _ => Err(Malformed::new("a range passes the end of the config space; its offset", offset)),
    }
}

/// The body of the reply to `GET_CONFIG`.
pub fn config_reply(offset: u32, flags: u32, bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::with_capacity(CONFIG_HEAD_BYTES + bytes.len());
    for number in [offset, u32::try_from(bytes.len()).unwrap_or(0), flags] {
        body.extend(number.to_le_bytes());
    }
    body.extend(bytes);
    body
}

fn inflight(header: &MessageHeader, body: &[u8]) -> Result<InflightPlace, Malformed> {
    if body.len() < INFLIGHT_BYTES {
        return Err(Malformed::new("a message's body is too short; the request", header.request));
    }
    let (len, offset) = (u64_at(body, 0), u64_at(body, 8));
    Ok(InflightPlace { len, offset, queues: u16_at(body, 16), ring_size: u16_at(body, 18) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        let (head, body) = bytes.split_first_chunk().unwrap();
        let header = MessageHeader::parse(head)?;
        assert_eq!(header.body_bytes as usize, body.len());
        Message::parse(&header, body)
    }

    #[test]
    fn messages_are_read_as_the_specification_has_them() {
        let region = Region { guest_address: 1 << 20, len: 1 << 12, front_end_address: 7 << 30, file_offset: 4096 };
        let mut table = vec![1, 0, 0, 0, 0, 0, 0, 0];
        table.extend(region.encode());
        let message = |request, body: &[u8]| parse(&MessageHeader::message(request, false, body));
        assert_eq!(message(request::SET_MEM_TABLE, &table), Ok(Message::SetMemTable(vec![region])));
        assert_eq!(message(request::ADD_MEM_REG, &table), Ok(Message::AddMemReg(region)));
        assert!(message(request::SET_MEM_TABLE, &table[..32]).is_err());
        let kick = |number: u64| message(request::SET_VRING_KICK, &number.to_le_bytes());
        assert_eq!(kick(3), Ok(Message::SetVringKick { ring: 3, has_descriptor: true }));
        assert_eq!(kick(0x103), Ok(Message::SetVringKick { ring: 3, has_descriptor: false }));
        let config =
            |offset: u32, len: u32| message(request::GET_CONFIG, &config_reply(offset, 0, &vec![0; len as usize]));
        assert_eq!(config(8, 0), Ok(Message::GetConfig { offset: 8, len: 0, flags: 0 }));
        assert!(config(250, 7).is_err());
        let place = InflightPlace { len: 8192, offset: 0, queues: 2, ring_size: 128 };
        for len in [20, 24] {
            let body = place.encode(len);
            assert_eq!(
                (body.len(), message(request::SET_INFLIGHT_FD, &body)),
                (len as usize, Ok(Message::SetInflightFd(place)))
            );
        }
        assert_eq!(message(99, &[]), Ok(Message::Other(99)));
    }

    #[test]
    fn wrong_headers_are_refused() {
        let sound = MessageHeader::message(request::GET_FEATURES, true, &[]);
        let header = MessageHeader::parse(sound.first_chunk().unwrap()).unwrap();
        assert!(header.needs_reply);
        assert!(MessageHeader::parse(header.reply(&[]).first_chunk().unwrap()).is_err(), "a reply is no request");
        let mut other = sound.clone();
        other[4] = 2;
        assert!(MessageHeader::parse(other.first_chunk().unwrap()).is_err(), "another version");
        let mut long = sound;
        long[8..].copy_from_slice(&(MAX_BODY_BYTES + 1).to_le_bytes());
        assert!(MessageHeader::parse(long.first_chunk().unwrap()).is_err(), "too long");
    }

    proptest! {
        #[test]
        fn no_body_makes_a_parser_panic(number in 0u32..48, body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let header = MessageHeader { request: number, needs_reply: false, body_bytes: body.len() as u32 };
            if let Ok(Message::SetMemTable(regions)) = Message::parse(&header, &body) {
                prop_assert!(regions.len() <= MAX_TABLE_REGIONS);
            }
        }
    }
}
