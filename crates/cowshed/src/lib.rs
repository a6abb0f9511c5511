// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Cowshed: a qcow2 engine for programs.
//!
//! A [`Disk`] is an open image. A program without a runtime uses it through [`Disk::blocking`]:
//!
//! ```
//! # fn main() -> cowshed::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.raw");
//! # std::fs::write(&path, vec![0u8; 1 << 20]).unwrap();
//! # let path = path.to_str().unwrap();
//! use cowshed::{Disk, OpenRequest};
//!
//! let disk = Disk::open(OpenRequest::file(path).format("raw").writable(true))?;
//! disk.blocking().write(4096, b"hello")?;
//! disk.blocking().flush()?;
//!
//! let mut word = [0; 5];
//! disk.blocking().read(4096, &mut word)?;
//! assert_eq!(&word, b"hello");
//! disk.close()?;
//! # Ok(())
//! # }
//! ```
//!
//! A program with many requests in flight runs tasks on a thread, with a [`Queue`] for each thread:
//!
//! ```
//! # fn main() -> cowshed::Result<()> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.raw");
//! # std::fs::write(&path, vec![7u8; 1 << 20]).unwrap();
//! # let path = path.to_str().unwrap();
//! use cowshed::{Disk, IoBuf};
//!
//! let disk = Disk::open(path)?;
//! let queue = disk.queue();
//! cowshed::block_on(async {
//!     let reads: Vec<_> = (0..32u64)
//!         .map(|n| {
//!             let queue = queue.clone();
//!             cowshed::spawn(async move { queue.read(n * 4096, IoBuf::zeroed(4096)).await })
//!         })
//!         .collect();
//!     for read in reads {
//!         let (result, bytes) = read.await;
//!         result?;
//!         assert!(bytes.iter().all(|&byte| byte == 7));
//!     }
//!     Ok::<(), cowshed::Error>(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! An image from a stranger is opened by rules; it opens no other file then:
//!
//! ```no_run
//! # fn main() -> cowshed::Result<()> {
//! # let path = "disk.qcow2";
//! use cowshed::{Disk, OpenRequest, Policy};
//!
//! let disk = Disk::open(OpenRequest::file(path).format("qcow2").policy(Policy::untrusted()))?;
//! # disk.close()
//! # }
//! ```

mod disk;

pub use cowshed_image::open::{BackingPolicy, Cache, Policy};
pub use cowshed_image::options::BlockdevOptions;
pub use cowshed_image::{Node, OpenRequest, Preallocation, StatusExtent, ZeroFlags};
pub use cowshed_storage::IoBuf;
/// Locking a process in before it opens an image from a stranger.
pub use cowshed_storage::confine;
/// Faults on demand, for testing against a failing disk: see [`Node::faults`].
pub use cowshed_storage::fault;
pub use cowshed_storage::rt::{block_on, spawn};
pub use cowshed_types::{Errno, Error, ErrorKind, Result};
pub use disk::{Blocking, Disk, Queue};
