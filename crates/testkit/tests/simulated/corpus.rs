// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fuzzer's inputs through the fuzzer's entry points, on a stable compiler.

use cowshed_testkit::fuzz::replay::{mutate, replay};
use cowshed_testkit::fuzz::{engine, fuse, http, image, layout, nbd, ova, ublk, vhost};

#[test]
fn inputs_of_the_layout() {
    replay(layout::ENTRIES);
}

#[test]
fn mutations_of_the_layout() {
    mutate(layout::ENTRIES, 20_000);
}

#[test]
fn inputs_of_codecs_and_options() {
    replay(image::ENTRIES);
}

#[test]
fn mutations_of_codecs_and_options() {
    mutate(image::ENTRIES, 20_000);
}

#[test]
fn inputs_of_nbd() {
    replay(nbd::ENTRIES);
}

#[test]
fn mutations_of_nbd() {
    mutate(nbd::ENTRIES, 20_000);
}

#[test]
fn inputs_of_fuse() {
    replay(fuse::ENTRIES);
}

#[test]
fn mutations_of_fuse() {
    mutate(fuse::ENTRIES, 20_000);
}

#[test]
fn inputs_of_http() {
    replay(http::ENTRIES);
}

#[test]
fn mutations_of_http() {
    mutate(http::ENTRIES, 20_000);
}

#[test]
fn inputs_of_ublk() {
    replay(ublk::ENTRIES);
}

#[test]
fn mutations_of_ublk() {
    mutate(ublk::ENTRIES, 20_000);
}

#[test]
fn inputs_of_packages() {
    replay(ova::ENTRIES);
}

#[test]
fn mutations_of_packages() {
    mutate(ova::ENTRIES, 20_000);
}

#[test]
fn inputs_of_vhost() {
    replay(vhost::ENTRIES);
}

#[test]
fn mutations_of_vhost() {
    mutate(vhost::ENTRIES, 20_000);
}

#[test]
fn inputs_of_whole_images() {
    replay(engine::ENTRIES);
}

#[test]
fn mutations_of_whole_images() {
    mutate(engine::ENTRIES, 2_000);
}
