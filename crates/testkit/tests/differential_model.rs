// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The harness tested on QEMU alone: what the byte model says of seeded operations is what qemu-img reads.

use cowshed_testkit::images::{Chain, QemuIo};
use cowshed_testkit::qemu::{Qemu, temp_dir};
use cowshed_testkit::random::seeds;

#[test]
fn the_model_agrees_with_qemu() {
    let qemu = Qemu::system();
    for seed in seeds(25) {
        let (folder, chain) = (temp_dir(), Chain::random(seed));
        let mut built = chain.build(&qemu, folder.path(), &mut QemuIo(&qemu));
        if let Err(difference) = built.content.settle(&qemu.content(&built.path, built.format)) {
            panic!("seed {seed}: {difference}\n{}", chain.describe());
        }
        qemu.expect_clean(&built.path);
    }
}
