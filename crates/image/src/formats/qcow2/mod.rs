// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The qcow2 driver: carries out the plans of the engine.
#![allow(missing_docs)]

use super::OpenContext;
use crate::node::{Preallocation, StatusExtent, ZeroFlags};
use cowshed_block::Result;
use cowshed_storage::IoBuf;

/// An open qcow2 image.
pub struct Qcow2Driver {}

impl Qcow2Driver {
    pub async fn open(context: OpenContext) -> Result<Qcow2Driver> {
        let _ = context;
        todo!()
    }
    pub fn size(&self) -> u64 {
        todo!()
    }
    pub async fn read(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _ = (offset, buf);
        todo!()
    }
    pub async fn write(&self, offset: u64, buf: IoBuf) -> (Result<()>, IoBuf) {
        let _ = (offset, buf);
        todo!()
    }
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: ZeroFlags) -> Result<()> {
        let _ = (offset, len, flags);
        todo!()
    }
    pub async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        todo!()
    }
    pub async fn flush(&self) -> Result<()> {
        todo!()
    }
    pub async fn write_compressed(&self, clusters: Vec<(u64, IoBuf)>) -> Result<()> {
        let _ = clusters;
        todo!()
    }
    pub async fn block_status(&self, offset: u64, len: u64, max_runs: usize) -> Result<Vec<StatusExtent>> {
        let _ = (offset, len, max_runs);
        todo!()
    }
    pub async fn resize(&self, size: u64, preallocation: Preallocation) -> Result<()> {
        let _ = (size, preallocation);
        todo!()
    }
    pub async fn close(&self) -> Result<()> {
        todo!()
    }
}
