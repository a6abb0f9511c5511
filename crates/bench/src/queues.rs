// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One image served by several threads at once: the gain of the second thread.

use crate::Settings;
use crate::fixture;
use crate::table::{Outcome, Row};
use cowshed_image::node::Node;
use cowshed_image::options::BlockdevOptions;
use cowshed_image::{OpenRequest, open};
use cowshed_storage::{IoBuf, rt};
use cowshed_testkit::random::Random;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const DEPTH: u64 = 32;
const REQUEST_BYTES: u64 = 4096;

/// Reads from one and from two queues, of a disk without storage and of an image in the page cache.
pub fn run(settings: &Settings) -> Result<Vec<Row>, String> {
    let nothing = BlockdevOptions::new().with("driver", "null-co").with("size", "1G");
    let image = fixture::converted(settings, &fixture::full(settings)?, "allocated", &["-S", "0"])?;
    Ok(vec![
        scaling(settings, "null-co", || OpenRequest::options(nothing.clone()))?,
        scaling(settings, "qcow2 in the page cache", || request_of(&image))?,
    ])
}

fn request_of(image: &Path) -> OpenRequest {
    OpenRequest::file(image.to_string_lossy()).format("qcow2")
}

fn scaling(settings: &Settings, name: &str, request: impl Fn() -> OpenRequest) -> Result<Row, String> {
    let node = rt::block_on(open(request())).map_err(|error| error.to_string())?;
    let (mut one, mut two) = (Vec::new(), Vec::new());
    let time = Duration::from_secs(settings.seconds);
    per_second(&node, 2, time)?;
    for round in 0..settings.rounds {
        if round % 2 == 0 {
            one.push(per_second(&node, 1, time)?);
            two.push(per_second(&node, 2, time)?);
        } else {
            two.push(per_second(&node, 2, time)?);
            one.push(per_second(&node, 1, time)?);
        }
    }
    rt::block_on(node.close()).map_err(|error| error.to_string())?;
    let name = format!("4 KiB reads at depth 32 a queue, one and two queues: {name}");
    Ok(Row::new(name, "≥ 1.8×", Outcome::Scaling { one, two }))
}

/// Requests per second of all queues together.
fn per_second(node: &Arc<Node>, queues: u64, time: Duration) -> Result<f64, String> {
    let barrier = Arc::new(Barrier::new(queues as usize));
    let threads: Vec<_> = (0..queues)
        .map(|queue| {
            let (node, barrier) = (Arc::clone(node), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                let started = Instant::now();
                let count = rt::block_on(load(&node, queue, started + time));
                count.map(|count| count as f64 / started.elapsed().as_secs_f64())
            })
        })
        .collect();
    let mut sum = 0.0;
    for thread in threads {
        let rate = thread.join().map_err(|_| "a queue panicked".to_owned())?;
        sum += rate.map_err(|error| error.to_string())?;
    }
    Ok(sum)
}

async fn load(node: &Arc<Node>, queue: u64, until: Instant) -> cowshed_types::Result<u64> {
    let streams: Vec<_> =
        (0..DEPTH).map(|task| rt::spawn(stream(Arc::clone(node), Random::new(queue * DEPTH + task), until))).collect();
    let mut count = 0;
    for stream in streams {
        count += stream.await?;
    }
    Ok(count)
}

async fn stream(node: Arc<Node>, mut random: Random, until: Instant) -> cowshed_types::Result<u64> {
    /// Requests between two looks at the clock.
    const BATCH: u64 = 256;
    let blocks = node.size() / REQUEST_BYTES;
    let (mut buffer, mut count) = (IoBuf::zeroed(REQUEST_BYTES as usize), 0);
    while Instant::now() < until {
        for _ in 0..BATCH {
            let (result, returned) = node.read(random.below(blocks) * REQUEST_BYTES, buffer).await;
            buffer = returned;
            result?;
        }
        count += BATCH;
    }
    Ok(count)
}
