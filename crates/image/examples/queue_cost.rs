// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What an attachment, its statistics and a throttle filter cost: `queue_cost node|queue|unlimited|throttle READS` reads
//! 4 KiB at a time from a disk that is nothing. With two numbers of reads under an instruction counter
//! (`valgrind --tool=callgrind …`) the difference is what the reads cost.

use cowshed_image::filters::throttle::Limits;
use cowshed_image::graph::{AttachRequest, Graph};
use cowshed_image::options::BlockdevOptions;
use cowshed_storage::{IoBuf, rt};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mode = arguments.next().unwrap_or_else(|| "queue".to_owned());
    let reads: u64 = arguments.next().unwrap_or_else(|| "100000".to_owned()).parse()?;
    let depth = 16;
    rt::block_on(async {
        let graph = Graph::new();
        let options = BlockdevOptions::from_keyval("driver=null-co,node-name=n,size=1G")?;
        let node = graph.add(options).await?;
        let attachment = graph.attach(&node, AttachRequest::export("e", true)).await?;
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
                    for number in 0..reads / depth {
                        let offset = number * 4096 % (1 << 29);
                        let (result, back) = match direct {
                            true => node.read(offset, buf).await,
                            false => queue.read(offset, buf).await,
                        };
                        result?;
                        buf = back;
                        rt::yield_now().await;
                    }
                    Ok::<(), cowshed_block::Error>(())
                })
            })
            .collect();
        for task in tasks {
            task.await?;
        }
        println!("{mode}: {reads} reads");
        Ok(())
    })
}
