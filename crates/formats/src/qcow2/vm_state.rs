// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The state of a virtual machine: mapped behind the disk, from the first L1 entry on that the disk doesn't need.

use super::Qcow2Driver;
use super::extent_io::MapSpan;
use cowshed_qcow2::Engine;
use cowshed_storage::IoBuf;
use cowshed_storage::fault::Event;
use cowshed_types::{Error, Extent, Mapping, Result};

impl Qcow2Driver {
    /// The guest offset at which the state starts.
    pub(super) fn vm_state_start(&self) -> u64 {
        let geometry = self.engine.geometry();
        geometry.l1_entries_needed(self.size()) << geometry.l2_coverage_bits()
    }

    fn vm_state_range(&self, offset: u64, len: usize) -> Result<(u64, u64)> {
        if self.data_file.is_some() {
            let message = "an image with an external data file can't hold the state of a virtual machine";
            return Err(self.error(Error::unsupported(message)));
        }
        let start = self.vm_state_start().checked_add(offset);
        let end = start.and_then(|start| start.checked_add(len as u64));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.engine.geometry().max_virtual_size() => Ok((start, end)),
            _ => {
                let message = "the state of the virtual machine would be larger than the format can map";
                Err(self.error(Error::invalid_argument(message).value(offset)))
            }
        }
    }

    /// Fills `buf` from `offset` of the state; bytes that were never written read as zeroes.
    pub async fn read_vm_state(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let (start, end) = match self.vm_state_range(offset, buf.len()) {
            Ok(range) => range,
            Err(error) => return (Err(error), buf),
        };
        self.meet(Event::VmstateLoad).await;
        let map: MapSpan = Engine::map;
        self.step_by_step(start, end, buf, |at, rest| self.by_extents(map, at, end - at, rest, Self::read_state_extent))
            .await
    }

    /// Nothing of it is in a backing file, however long that is.
    async fn read_state_extent(&self, extent: Extent, mut buf: IoBuf) -> (Result<()>, IoBuf) {
        if extent.mapping == Mapping::Unallocated {
            buf.fill(0);
            return (Ok(()), buf);
        }
        self.read_extent(extent, buf, false).await
    }

    /// See [`cowshed_graph::Node::write_vm_state`]. The L1 table grows for it.
    pub(crate) async fn write_vm_state(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let prepared = match self.vm_state_range(offset, buf.len()) {
            Ok((start, end)) => self.be_writable().await.map(|()| (start, end)),
            Err(error) => Err(error),
        };
        let (start, end) = match prepared {
            Ok(range) => range,
            Err(error) => return (Err(error), buf),
        };
        self.meet(Event::VmstateSave).await;
        if let Err(error) = self.grow_l1(end).await {
            return (Err(error), buf);
        }
        self.write_range(start, buf).await
    }
}
