// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The cost of an attachment, its statistics and a throttle filter: `queue_cost MODE REQUESTS [OPTIONS]` reads 4 KiB at
//! a time, sixteen requests at once, from a disk that is nothing or that OPTIONS name
//! (`driver=raw,file.filename=/tmp/disk`). With two numbers of requests under an instruction counter
//! (`valgrind --tool=callgrind …`) the difference is the cost of the requests.
//!
//! MODE: MODE: `node` (the node itself), `uncounted` (through an attachment without statistics), `queue` (with them).
//! Further ones are `unlimited` (and a throttle filter without limits) and `throttle` (with limits that are not
//! reached). A `-write` behind it writes instead.

use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::{IoBuf, rt};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mode = arguments.next().unwrap_or_else(|| "queue".to_owned());
    let requests: u64 = arguments.next().unwrap_or_else(|| "100000".to_owned()).parse()?;
    let options = arguments.next();
    // Requests to nothing never wait: others must get their turn.
    let yields = options.is_none();
    let options = options.unwrap_or_else(|| "driver=null-co,size=1G".to_owned());
    let writes = mode.ends_with("-write");
    let mode = mode.trim_end_matches("-write");
    let depth = 16;
    rt::block_on(async {
        let graph = Graph::new(&cowshed_image::DRIVERS);
        let options = BlockdevOptions::from_keyval(&options)?.with("node-name", "n");
        let node = graph.add(options).await?;
        let mut request = AttachRequest::export("e", true);
        if mode == "uncounted" {
            request = request.without_statistics();
        }
        let attachment = graph.attach(&node, request).await?;
        let blocks = node.size() / 4096;
        let mut limits = Limits::new();
        if mode == "throttle" {
            limits.set("iops-total", 1_000_000_000)?;
            limits.set("bps-total", 1_000_000_000_000)?;
        }
        if mode == "throttle" || mode == "unlimited" {
            graph.throttle_groups().create("g", limits)?;
            let filter = BlockdevOptions::from_keyval("driver=throttle,node-name=t,throttle-group=g")?;
            graph.insert_filter(&node, filter).await?;
        }
        let tasks: Vec<_> = (0..depth)
            .map(|_| {
                let (queue, node, direct) = (attachment.queue(), node.clone(), mode == "node");
                rt::spawn(async move {
                    let mut buf = IoBuf::zeroed(4096);
                    for number in 0..requests / depth {
                        let offset = number % blocks * 4096;
                        let (result, back) = match (direct, writes) {
                            (true, false) => node.read(offset, buf).await,
                            (true, true) => node.write(offset, buf).await,
                            (false, false) => queue.read(offset, buf).await,
                            (false, true) => queue.write(offset, buf).await,
                        };
                        result?;
                        buf = back;
                        if yields {
                            rt::yield_now().await;
                        }
                    }
                    Ok::<(), cowshed_types::Error>(())
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        println!("{mode}: {requests} requests");
        Ok(())
    })
}
