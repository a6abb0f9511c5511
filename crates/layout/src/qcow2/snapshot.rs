// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The snapshot table ("Snapshots").

use super::{Parsed, limits};
use crate::bytes::{be16_at, be32_at, be64_at};
use cowshed_types::{Error, LINE_END, Result};

/// Where the field `l1_size` is in an entry, in bytes.
pub const L1_SIZE_OFFSET: u64 = 8;
/// Bytes of an entry without its variable part.
const FIXED_BYTES: usize = 40;
/// Bytes of extra data whose meaning is known: size of the VM state, size of the disk, instruction count.
const KNOWN_EXTRA_BYTES: usize = 24;

/// An entry of the snapshot table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Host offset of the snapshot's L1 table, in bytes. Alignment is checked by [`Snapshot::validate`].
    pub l1_table_offset: u64,
    /// Entries of the snapshot's L1 table.
    pub l1_size: u32,
    /// Seconds since the Epoch when it was taken.
    pub date_s: u32,
    /// The rest of that time in nanoseconds.
    pub date_ns: u32,
    /// Time that the guest had been running, in nanoseconds.
    pub vm_clock_ns: u64,
    /// Bytes of VM state as the 32-bit field has them; see [`Snapshot::vm_state_bytes`].
    pub vm_state_size_32: u32,
    /// Extra data, fields that this crate doesn't know included; kept byte for byte.
    pub extra_data: Vec<u8>,
    /// Unique ID, as bytes; usually a decimal number.
    pub id: Vec<u8>,
    /// Name, as bytes.
    pub name: Vec<u8>,
}

impl Snapshot {
    /// Bytes of VM state; the extra data's 64-bit field goes before the 32-bit one.
    pub fn vm_state_bytes(&self) -> u64 {
        be64_at(&self.extra_data, 0).unwrap_or(u64::from(self.vm_state_size_32))
    }

    /// Virtual disk size of the snapshot in bytes, where the entry has it (it must in version 3).
    pub fn disk_size_bytes(&self) -> Option<u64> {
        be64_at(&self.extra_data, 8)
    }

    /// The record/replay instruction count; `None` where absent or disabled (-1).
    pub fn icount(&self) -> Option<u64> {
        be64_at(&self.extra_data, 16).filter(|count| *count != u64::MAX)
    }

    /// Bytes that the entry takes in the table, padding included.
    pub fn encoded_len(&self) -> usize {
        (FIXED_BYTES + self.extra_data.len() + self.id.len() + self.name.len()).next_multiple_of(8)
    }

    /// Parses the entry at the start of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Parsed<Self>> {
        Self::parse_fields(bytes, false).unwrap_or(Ok(Parsed::Incomplete { need: FIXED_BYTES }))
    }

    /// `None` where not even the fixed part is there. `trim`: of more extra data than there may be, only the known fields are
    /// taken.
    fn parse_fields(bytes: &[u8], trim: bool) -> Option<Result<Parsed<Self>>> {
        let id_len = usize::from(be16_at(bytes, 12)?);
        let name_len = usize::from(be16_at(bytes, 14)?);
        let extra_bytes = be32_at(bytes, 36)?;
        let is_long = extra_bytes > limits::SNAPSHOT_EXTRA_BYTES;
        if is_long && !trim {
            let message = format!("more than {} bytes of extra data in a snapshot", limits::SNAPSHOT_EXTRA_BYTES);
            return Some(Err(Error::invalid_image("snapshot_extra_data_size", extra_bytes, message)));
        }
        // No overflow: 40 + 2^32 + 2 * 65535 at most.
        let extra_end = FIXED_BYTES + extra_bytes as usize;
        let id_end = extra_end + id_len;
        let name_end = id_end + name_len;
        let len = name_end.next_multiple_of(8);
        // A table's last entry may go without its padding where the file ends.
        let (Some(extra_data), Some(id), Some(name)) =
            (bytes.get(FIXED_BYTES..extra_end), bytes.get(extra_end..id_end), bytes.get(id_end..name_end))
        else {
            return Some(Ok(Parsed::Incomplete { need: name_end }));
        };
        let value = Snapshot {
            l1_table_offset: be64_at(bytes, 0)?,
            l1_size: be32_at(bytes, 8)?,
            date_s: be32_at(bytes, 16)?,
            date_ns: be32_at(bytes, 20)?,
            vm_clock_ns: be64_at(bytes, 24)?,
            vm_state_size_32: be32_at(bytes, 32)?,
            extra_data: if is_long { extra_data[..KNOWN_EXTRA_BYTES].to_vec() } else { extra_data.to_vec() },
            id: id.to_vec(),
            name: name.to_vec(),
        };
        Some(Ok(Parsed::Complete { value, len }))
    }

    /// The bytes of the entry in the table. Fails where ID, name or extra data are too long.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let short = |what: &'static str, len: usize| {
            u16::try_from(len).map_err(|_| Error::invalid_argument(format!("{what} is too long")).value(len))
        };
        let (id_len, name_len) = (short("snapshot ID", self.id.len())?, short("snapshot name", self.name.len())?);
        if self.extra_data.len() > limits::SNAPSHOT_EXTRA_BYTES as usize {
            return Err(Error::internal("snapshot extra data is too long").value(self.extra_data.len()));
        }
        let mut bytes = Vec::with_capacity(self.encoded_len());
        bytes.extend_from_slice(&self.l1_table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.l1_size.to_be_bytes());
        bytes.extend_from_slice(&id_len.to_be_bytes());
        bytes.extend_from_slice(&name_len.to_be_bytes());
        bytes.extend_from_slice(&self.date_s.to_be_bytes());
        bytes.extend_from_slice(&self.date_ns.to_be_bytes());
        bytes.extend_from_slice(&self.vm_clock_ns.to_be_bytes());
        bytes.extend_from_slice(&self.vm_state_size_32.to_be_bytes());
        bytes.extend_from_slice(&(self.extra_data.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&self.extra_data);
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(&self.name);
        bytes.resize(self.encoded_len(), 0);
        Ok(bytes)
    }

    /// Checks the entry's pointers: alignment and size of the L1 table, and the extra data of version 3.
    pub fn validate(&self, version: u32, cluster_bits: u32) -> Result<()> {
        let bytes = u64::from(self.l1_size) * 8;
        if bytes > limits::L1_BYTES {
            let message = format!("L1 table of a snapshot is larger than {} MiB", limits::L1_BYTES >> 20);
            return Err(Error::invalid_image("snapshot_l1_size", self.l1_size, message));
        }
        let start = self.l1_table_offset;
        let error =
            |message: &str| Err(Error::invalid_image("snapshot_l1_table_offset", format!("{start:#x}"), message));
        if !start.is_multiple_of(1 << cluster_bits) {
            return error("offset is not cluster-aligned");
        }
        if bytes != 0 && (start == 0 || start.checked_add(bytes).is_none_or(|end| end > limits::HOST_OFFSET_END)) {
            return error("L1 table of a snapshot lies outside of the format's range");
        }
        if version >= 3 && self.extra_data.len() < 16 {
            let message = "a snapshot of a version 3 image has at least 16 bytes of extra data";
            return Err(Error::invalid_image("snapshot_extra_data_size", self.extra_data.len(), message));
        }
        Ok(())
    }
}

/// Parses a table of `count` entries (the header's `nb_snapshots`, at most 65536) at the start of `bytes`, which end
/// with the table or later. `Incomplete` names the bytes needed to come one entry further.
pub fn parse_table(bytes: &[u8], count: u32) -> Result<Parsed<Vec<Snapshot>>> {
    if count > limits::SNAPSHOTS {
        let message = format!("more than {} internal snapshots", limits::SNAPSHOTS);
        return Err(Error::invalid_image("nb_snapshots", count, message));
    }
    let mut snapshots = Vec::new();
    let mut at = 0usize;
    for index in 0..count {
        match Snapshot::parse(bytes.get(at..).unwrap_or_default())
            .map_err(|error| error.context(format!("snapshot table entry {index}")).qemu(too_much_extra(index)))?
        {
            Parsed::Complete { value, len } => {
                snapshots.push(value);
                at += len;
            }
            Parsed::Incomplete { need } => return within_limit(at + need).map(|need| Parsed::Incomplete { need }),
        }
    }
    let len = within_limit(at)?;
    Ok(Parsed::Complete { value: snapshots, len })
}

/// QEMU's sentence for an entry with too much extra data.
fn too_much_extra(index: u32) -> String {
    format!(
        "Too much extra metadata in snapshot table entry {index}{LINE_END}You can force-remove this extra metadata with \
         qemu-img check -r all"
    )
}

/// The readable part of a damaged table, for a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Salvaged {
    /// The entries up to the first one that doesn't end within the bytes at hand.
    pub snapshots: Vec<Snapshot>,
    /// Where each of them starts, in bytes from the start of the table.
    pub starts: Vec<usize>,
    /// The indices of those that have more extra data than there may be; only the known fields were taken.
    pub trimmed: Vec<u32>,
    /// Bytes that they take.
    pub len: usize,
    /// Bytes needed to come one entry further; `None` when none is missing.
    pub need: Option<usize>,
}

/// As [`parse_table`], as far as it goes: extra data may be too long, and an entry without an end is left out.
pub fn salvage_table(bytes: &[u8], count: u32) -> Salvaged {
    let mut found = Salvaged::default();
    for index in 0..count {
        let rest = bytes.get(found.len..).unwrap_or_default();
        match Snapshot::parse_fields(rest, true) {
            Some(Ok(Parsed::Complete { value, len })) => {
                if be32_at(rest, 36).is_some_and(|extra_bytes| extra_bytes > limits::SNAPSHOT_EXTRA_BYTES) {
                    found.trimmed.push(index);
                }
                found.snapshots.push(value);
                found.starts.push(found.len);
                found.len += len;
            }
            other => {
                let need = match other {
                    Some(Ok(Parsed::Incomplete { need })) => need,
                    _ => FIXED_BYTES,
                };
                found.need = Some(found.len + need);
                break;
            }
        }
    }
    found
}

fn within_limit(len: usize) -> Result<usize> {
    if len as u64 > limits::SNAPSHOT_TABLE_BYTES {
        let message = format!("snapshot table is larger than {} MiB", limits::SNAPSHOT_TABLE_BYTES >> 20);
        return Err(Error::invalid_image("snapshots_offset", format!("{len} bytes"), message));
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    prop_compose! {
        fn snapshot()(
            numbers: (u64, u32, u32, u32, u64, u32),
            extra_data in vec(any::<u8>(), 0..40),
            id in vec(any::<u8>(), 0..20),
            name in vec(any::<u8>(), 0..300),
        ) -> Snapshot {
            let (l1_table_offset, l1_size, date_s, date_ns, vm_clock_ns, vm_state_size_32) = numbers;
            Snapshot { l1_table_offset, l1_size, date_s, date_ns, vm_clock_ns, vm_state_size_32, extra_data, id, name }
        }
    }

    proptest! {
        #[test]
        fn table_round_trip(snapshots in vec(snapshot(), 0..6)) {
            let bytes: Vec<u8> = snapshots.iter().flat_map(|snapshot| snapshot.encode().unwrap()).collect();
            let count = snapshots.len() as u32;
            let parsed = parse_table(&bytes, count).unwrap();
            prop_assert_eq!(parsed, Parsed::Complete { value: snapshots, len: bytes.len() });
            // Reading on as demanded ends, and never asks for more than there is.
            let mut have = 0;
            while let Parsed::Incomplete { need } = parse_table(&bytes[..have], count).unwrap() {
                prop_assert!(need > have && need <= bytes.len());
                have = need;
            }
        }

        #[test]
        fn any_bytes_parse_without_panic(bytes in vec(any::<u8>(), 0..300), count in 0u32..70000) {
            if let Ok(Parsed::Complete { value, .. }) = parse_table(&bytes, count) {
                prop_assert_eq!(value.len(), count as usize);
                for snapshot in value {
                    let _ = (snapshot.validate(3, 16), snapshot.vm_state_bytes(), snapshot.icount());
                }
            }
        }
    }

    #[test]
    fn a_damaged_table_is_read_as_far_as_it_goes() {
        let entry = |extra: usize, name: &str| Snapshot {
            l1_table_offset: 65536,
            l1_size: 1,
            date_s: 1,
            date_ns: 2,
            vm_clock_ns: 3,
            vm_state_size_32: 0,
            extra_data: (0..extra).map(|at| at as u8).collect(),
            id: b"1".to_vec(),
            name: name.as_bytes().to_vec(),
        };
        let (short, last) = (entry(16, "short"), entry(24, "last"));
        let mut long = entry(1000, "long").encode().unwrap();
        long[36..40].copy_from_slice(&2000u32.to_be_bytes());
        long.splice(1040..1040, vec![7; 1000]);
        let table = [short.encode().unwrap(), long.clone(), last.encode().unwrap()].concat();
        assert!(parse_table(&table, 3).is_err());
        let found = salvage_table(&table, 3);
        let trimmed = Snapshot { extra_data: (0..24).collect(), ..entry(0, "long") };
        assert_eq!(found.snapshots, [short.clone(), trimmed, last]);
        let starts = vec![0, short.encoded_len(), short.encoded_len() + long.len()];
        assert_eq!((found.starts, found.trimmed, found.len, found.need), (starts, vec![1], table.len(), None));
        let cut = salvage_table(&table[..short.encoded_len() + 100], 3);
        assert_eq!((cut.snapshots, cut.len), (vec![short.clone()], short.encoded_len()));
        assert!(cut.need.is_some_and(|need| need > short.encoded_len() + 100));
        let none = salvage_table(&[], 3);
        assert_eq!((none.snapshots.len(), none.need), (0, Some(FIXED_BYTES)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_salvaged_without_panic(bytes in vec(any::<u8>(), 0..3000), count in 0u32..70000) {
            let found = salvage_table(&bytes, count);
            prop_assert!(found.snapshots.len() == count as usize || found.need.is_some_and(|need| need > bytes.len()));
        }
    }

    #[test]
    fn extra_data_fields() {
        let mut snapshot = match Snapshot::parse(&[0; 40]).unwrap() {
            Parsed::Complete { value, .. } => value,
            Parsed::Incomplete { need } => panic!("{need}"),
        };
        snapshot.vm_state_size_32 = 7;
        assert_eq!((snapshot.vm_state_bytes(), snapshot.disk_size_bytes(), snapshot.icount()), (7, None, None));
        assert!(snapshot.validate(2, 16).is_ok());
        assert!(snapshot.validate(3, 16).is_err());
        snapshot.extra_data = [8u64.to_be_bytes(), 9u64.to_be_bytes(), u64::MAX.to_be_bytes()].concat();
        assert_eq!((snapshot.vm_state_bytes(), snapshot.disk_size_bytes(), snapshot.icount()), (8, Some(9), None));
        assert!(snapshot.validate(3, 16).is_ok());
        snapshot.l1_table_offset = 0x200;
        assert!(snapshot.validate(3, 16).is_err());
        snapshot.l1_size = u32::MAX;
        assert!(snapshot.validate(3, 16).is_err());
    }

    #[test]
    fn huge_extra_data_is_refused() {
        let mut bytes = [0u8; 64];
        bytes[36..40].copy_from_slice(&u32::MAX.to_be_bytes());
        let error = parse_table(&bytes, 1).unwrap_err();
        assert!(error.to_string().starts_with("snapshot table entry 0: more than 1024 bytes"), "{error}");
        assert!(parse_table(&bytes, 65537).is_err());
    }
}
