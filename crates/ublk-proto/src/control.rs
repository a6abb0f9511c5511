// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Features, and the struct in which the driver describes a device.

use crate::bytes::{put_u16, put_u32, put_u64, u16_at, u32_at, u64_at};
use crate::{MAX_DEPTH, MAX_REQUEST_BYTES, Malformed, SECTOR_BYTES};

/// The number by which a new device gets the first free one.
pub const ANY_DEVICE: u32 = u32::MAX;

/// The features of a device, on which the driver and its server agree.
pub mod features {
    #![allow(missing_docs, reason = "the names are those of linux/ublk_cmd.h")]
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that a dead server had are given to the next one.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    pub const UNPRIVILEGED_DEV: u64 = 1 << 5;
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// Data is read from and written to the char device.
    pub const USER_COPY: u64 = 1 << 7;
    pub const UPDATE_SIZE: u64 = 1 << 10;
}

/// Whether a device is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum UblkState {
    /// Not started, or stopped.
    Dead = 0,
    /// It is.
    Live = 1,
    /// Its server has gone, and requests wait for the next one.
    Quiesced = 2,
    /// Its server has gone, and requests fail until there is another one.
    Failing = 3,
}

/// Bytes of a [`DeviceInfo`].
pub const INFO_BYTES: usize = 64;

/// The facts that the driver and a server share about a device (`ublksrv_ctrl_dev_info`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number of queues.
    pub queues: u16,
    /// Number of requests of a queue.
    pub depth: u16,
    /// Whether it is served.
    pub state: UblkState,
    /// The longest data of a request, in bytes.
    pub max_request_bytes: u32,
    /// Number of the device.
    pub device: u32,
    /// The server's process.
    pub process: i32,
    /// The agreed [`features`].
    pub features: u64,
    /// A note of the server that the driver keeps and doesn't look at.
    pub note: u64,
    /// The user that made the device; the driver sets it.
    pub owner: u32,
}

impl DeviceInfo {
    /// As the driver takes it.
    pub fn bytes(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        put_u16(&mut bytes, 0, self.queues);
        put_u16(&mut bytes, 2, self.depth);
        put_u16(&mut bytes, 4, self.state as u16);
        put_u32(&mut bytes, 8, self.max_request_bytes);
        put_u32(&mut bytes, 12, self.device);
        put_u32(&mut bytes, 16, self.process.cast_unsigned());
        put_u64(&mut bytes, 24, self.features);
        put_u64(&mut bytes, 32, self.note);
        put_u32(&mut bytes, 40, self.owner);
        bytes
    }

    /// Reads the driver's bytes.
    ///
    /// # Errors
    /// Where a server can't work by these numbers: no queue, no request, or no whole sector of data.
    pub fn parse(bytes: &[u8; INFO_BYTES]) -> Result<DeviceInfo, Malformed> {
        let state = match u16_at(bytes, 4) {
            0 => UblkState::Dead,
            1 => UblkState::Live,
            2 => UblkState::Quiesced,
            3 => UblkState::Failing,
            other => return Err(Malformed::new("a device is in an unknown state", other)),
        };
        let info = DeviceInfo {
            queues: u16_at(bytes, 0),
            depth: u16_at(bytes, 2),
            state,
            max_request_bytes: u32_at(bytes, 8),
            device: u32_at(bytes, 12),
            process: u32_at(bytes, 16).cast_signed(),
            features: u64_at(bytes, 24),
            note: u64_at(bytes, 32),
            owner: u32_at(bytes, 40),
        };
        let (depth, data) = (info.depth, info.max_request_bytes);
        if !(1..=crate::MAX_QUEUES).contains(&info.queues) {
            return Err(Malformed::new("the number of queues is out of range", info.queues));
        }
        if !(1..=MAX_DEPTH).contains(&depth) {
            return Err(Malformed::new("the depth of a queue is out of range", depth));
        }
        if data > MAX_REQUEST_BYTES || data == 0 || !u64::from(data).is_multiple_of(SECTOR_BYTES) {
            return Err(Malformed::new("the longest data of a request is out of range", data));
        }
        Ok(info)
    }
}
