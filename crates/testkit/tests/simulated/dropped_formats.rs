// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of formats without reference counts and of LUKS volumes, whose futures are dropped half-way. A request that has begun
//! ends, and no other one suffers.

use crate::crash_encryption::volume_of;
use crate::fresh_images::{IMAGE, Kind, SECTOR, SECTORS, kinds, split_vmdk};
use cowshed_image::secret::Secret;
use cowshed_image::{Node, OpenRequest, ZeroFlags, open};
use cowshed_simulator::{Config, PageMap, World};
use cowshed_storage::IoBuf;
use cowshed_testkit::random::{Random, for_each_seed};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;

/// The dropped request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Request {
    /// A part of a new block.
    Part,
    /// Several new blocks, the first and the last in part.
    Blocks,
    InPlace,
    Zeroes,
    Discard,
    Flush,
}

const REQUESTS: &[Request] =
    &[Request::Part, Request::Blocks, Request::InPlace, Request::Zeroes, Request::Discard, Request::Flush];
const NEW: u8 = 0xd5;
/// Sectors written before.
const BEFORE: Range<usize> = 0..20;
/// Sectors written afterwards.
const LATER: Range<usize> = 96..160;

impl Request {
    fn sectors(self) -> Range<usize> {
        match self {
            Request::Part => 41..44,
            Request::Blocks => 43..70,
            Request::InPlace => 3..12,
            Request::Zeroes => 2..13,
            Request::Discard => 8..16,
            Request::Flush => 0..0,
        }
    }

    async fn run(self, node: &Node, kind: Kind) {
        if self == Request::Flush {
            return node.flush().await.expect("a flush");
        }
        for part in kind.parts(self.sectors()) {
            let (at, len) = (kind.offset(part.start), part.len() * SECTOR);
            match self {
                Request::Zeroes => node.write_zeroes(at, len as u64, ZeroFlags::default()).await,
                Request::Discard => node.discard(at, len as u64).await,
                _ => node.write(at, IoBuf::copy_from(&vec![NEW; len])).await.0,
            }
            .expect("it is carried out");
        }
    }
}

/// A format and the files of an image.
type Image = (Kind, Vec<(String, Vec<u8>)>);

/// The values that each sector may have.
type Allowed = Vec<Vec<u8>>;

async fn open_now(kind: Kind) -> Arc<Node> {
    let key = if kind.format == "luks" { ",key-secret=s" } else { "" };
    let options = format!("driver={},discard=unmap,file.filename={IMAGE}{key}", kind.format);
    let request = OpenRequest::image_opts(&options).expect("good options").writable(true);
    open(request.secrets([("s".to_owned(), Secret::new(b"one".to_vec()))])).await.expect("the image opens")
}

async fn write(node: &Node, kind: Kind, allowed: &mut Allowed, sectors: Range<usize>, value: u8) {
    for part in kind.parts(sectors) {
        let bytes = IoBuf::copy_from(&vec![value; part.len() * SECTOR]);
        node.write(kind.offset(part.start), bytes).await.0.expect("a write");
        allowed[part].fill(vec![value]);
    }
}

/// Polls `times` times at most; true at the end of the future.
async fn poll_times(request: impl Future<Output = ()>, times: usize) -> bool {
    let (mut request, mut left) = (Box::pin(request), times);
    std::future::poll_fn(|context| {
        if left == 0 {
            return Poll::Ready(false);
        }
        left -= 1;
        request.as_mut().poll(context).map(|()| true)
    })
    .await
}

/// True when the request has ended before it could be dropped.
fn run(kind: Kind, files: &[(String, Vec<u8>)], request: Request, polls: usize, seed: u64) -> bool {
    let about = format!("seed {seed}, {}, {request:?} dropped after {polls} polls", kind.format);
    let world = World::new(Config::new(seed));
    for (name, bytes) in files {
        world.add_file(name, PageMap::from_bytes(bytes));
    }
    let random = &mut Random::new(seed ^ (polls as u64) << 32);
    // Sectors of a LUKS volume that were never written read as noise.
    let mut allowed: Allowed = vec![vec![0]; SECTORS];
    let ended = world.run(async {
        let node = open_now(kind).await;
        if kind.format == "luks" {
            write(&node, kind, &mut allowed, 0..SECTORS, 0).await;
        }
        write(&node, kind, &mut allowed, BEFORE, 1).await;
        if random.chance(50) {
            node.flush().await.expect("a flush");
        }
        let ended = poll_times(request.run(&node, kind), polls).await;
        let (value, is_sure) = match request {
            Request::Zeroes => (0, ended),
            Request::Discard => (0, false),
            _ => (NEW, ended),
        };
        for values in &mut allowed[request.sectors()] {
            values.push(value);
            if is_sure {
                *values = vec![value];
            }
        }
        if random.chance(75) {
            for start in LATER.step_by(4) {
                write(&node, kind, &mut allowed, start..start + 4, 7).await;
                if random.chance(30) {
                    node.flush().await.expect("a flush");
                }
            }
        }
        node.close().await.expect("a good close");
        ended
    });
    world.run(async {
        let node = open_now(kind).await;
        for part in kind.parts(0..SECTORS) {
            let (result, bytes) = node.read(kind.offset(part.start), IoBuf::zeroed(part.len() * SECTOR)).await;
            result.expect("a read");
            for (sector, bytes) in part.zip(bytes.chunks(SECTOR)) {
                let is_one = bytes.iter().all(|byte| *byte == bytes[0]);
                assert!(is_one && allowed[sector].contains(&bytes[0]), "{about}: sector {sector}: {:?}", &bytes[..4]);
            }
        }
        node.close().await.expect("a good close");
    });
    ended
}

#[test]
fn requests_of_other_formats_may_be_dropped() {
    let mut images: Vec<Image> =
        kinds().into_iter().map(|(kind, bytes)| (kind, vec![(IMAGE.to_owned(), bytes)])).collect();
    images.push(split_vmdk());
    let luks = volume_of((SECTORS * SECTOR) as u64);
    images.push((Kind { format: "luks", block_bytes: 4096 }, vec![(IMAGE.to_owned(), luks)]));
    for_each_seed(2, |seed| {
        for (kind, files) in &images {
            for &request in REQUESTS {
                let mut polls = 0;
                while !run(*kind, files, request, polls, seed) {
                    polls += 1;
                    assert!(polls < 1000, "{}: {request:?} does not end", kind.format);
                }
            }
            let most = (0..1000).find(|polls| run(*kind, files, Request::Blocks, *polls, seed));
            assert!(most > Some(1), "{}: no request was dropped half-way", kind.format);
        }
    });
}
