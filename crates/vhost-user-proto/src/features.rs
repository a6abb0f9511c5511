// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Bits that a front end and a back end agree on.

/// `SEG_MAX`: the config space has the most segments of a request.
pub const BLK_SEG_MAX: u64 = 1 << 2;
/// `RO`: the device can't be written.
pub const BLK_RO: u64 = 1 << 5;
/// `BLK_SIZE`: the config space has the logical block size.
pub const BLK_SIZE: u64 = 1 << 6;
/// `FLUSH`: the device takes flushes.
pub const BLK_FLUSH: u64 = 1 << 9;
/// `TOPOLOGY`: the config space has the physical block size and the sizes of good requests.
pub const BLK_TOPOLOGY: u64 = 1 << 10;
/// `CONFIG_WCE`: the driver may switch the write cache.
pub const BLK_CONFIG_WCE: u64 = 1 << 11;
/// `MQ`: several queues.
pub const BLK_MQ: u64 = 1 << 12;
/// `DISCARD`.
pub const BLK_DISCARD: u64 = 1 << 13;
/// `WRITE_ZEROES`.
pub const BLK_WRITE_ZEROES: u64 = 1 << 14;
/// `VHOST_USER_F_PROTOCOL_FEATURES`: there are protocol features, and rings start disabled.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// `VIRTIO_F_INDIRECT_DESC`: a descriptor may stand for a table.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// `VIRTIO_F_EVENT_IDX`: each side names the index at which it expects a notification.
pub const EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1`: little-endian, and any layout of a request.
pub const VERSION_1: u64 = 1 << 32;

/// The features that a writable device offers.
pub const OFFERED: u64 = BLK_SEG_MAX
    | BLK_SIZE
    | BLK_FLUSH
    | BLK_TOPOLOGY
    | BLK_CONFIG_WCE
    | BLK_MQ
    | BLK_DISCARD
    | BLK_WRITE_ZEROES
    | PROTOCOL_FEATURES
    | INDIRECT_DESC
    | EVENT_IDX
    | VERSION_1;

/// The features that a read-only device offers.
pub const OFFERED_READ_ONLY: u64 = (OFFERED & !(BLK_DISCARD | BLK_WRITE_ZEROES)) | BLK_RO;

/// The protocol features.
pub mod protocol {
    /// `MQ`: the number of queues can be asked for.
    pub const MQ: u64 = 1 << 0;
    /// `REPLY_ACK`: any message may ask for a reply.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// `BACKEND_REQ`: the back end has a channel for requests of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// `CONFIG`: the config space goes over the socket.
    pub const CONFIG: u64 = 1 << 9;
    /// `INFLIGHT_SHMFD`: requests in flight are noted in memory that outlives the back end.
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    /// `RESET_DEVICE`.
    pub const RESET_DEVICE: u64 = 1 << 13;
    /// `CONFIGURE_MEM_SLOTS`: regions of memory come and go one by one.
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// The offered features. `LOG_SHMFD`, the log of written pages for live migration, is missing.
    pub const OFFERED: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | RESET_DEVICE | CONFIGURE_MEM_SLOTS;
}
