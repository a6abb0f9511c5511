// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests go on over the next connection, whatever that one offers, or fail; they never do something else.

use crate::fake::{BLOCK_STATUS, Fake, Offer, READ, Seen, TRIM, WRITE, WRITE_ZEROES};
use cowshed_nbd::Client;
use cowshed_storage::{IoBuf, rt};
use cowshed_types::Errno;
use std::time::Duration;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const SIZE: u64 = 8 * MIB;
const LONG: Duration = Duration::from_secs(600);

/// Ranges of requests of one connection: they follow one another, and none is longer than `most`.
fn expect_pieces(seen: &[Seen], connection: usize, start: u64, end: u64, most: u64) {
    let mut at = start;
    for piece in seen.iter().filter(|seen| seen.connection == connection) {
        assert_eq!(piece.offset, at, "{seen:?}");
        assert!(piece.len <= most, "{seen:?}");
        at += piece.len;
    }
    assert_eq!(at, end, "{seen:?}");
}

#[test]
fn each_outage_has_the_reconnect_delay_of_its_own() {
    let delay = Duration::from_millis(300);
    let dying = Offer { dies_after: Some(Duration::from_millis(200)), ..Offer::new(SIZE) };
    let fake = Fake::start(&[dying, dying, dying, dying, Offer::new(SIZE)]);
    rt::block_on(async {
        let client = Client::connect(fake.options(delay)).await.expect("connect");
        client.write(0, IoBuf::zeroed(4096), false).await.0.expect("the fifth server carries it out");
        client.close().await;
    });
    assert_eq!(fake.seen(WRITE).len(), 5);
}

#[test]
fn a_request_that_every_server_dies_of_fails_at_last() {
    let fake = Fake::start(&[Offer::new(SIZE).dying()]);
    rt::block_on(async {
        let client = Client::connect(fake.options(Duration::from_millis(200))).await.expect("connect");
        let (result, _) = client.write(0, IoBuf::zeroed(4096), false).await;
        assert_eq!(result, Err(Errno::EIO));
        client.close().await;
    });
    assert_eq!(fake.seen(WRITE).len(), 16);
}

#[test]
fn without_a_reconnect_delay_a_lost_request_fails_at_once() {
    let fake = Fake::start(&[Offer::new(SIZE).dying(), Offer::new(SIZE)]);
    rt::block_on(async {
        let client = Client::connect(fake.options(Duration::ZERO)).await.expect("connect");
        assert_eq!(client.write(0, IoBuf::zeroed(4096), false).await.0, Err(Errno::EIO));
        client.write(0, IoBuf::zeroed(4096), false).await.0.expect("the next one connects again");
        client.close().await;
    });
    assert_eq!(fake.seen(WRITE).len(), 2);
}

#[test]
fn zeroes_are_cut_to_the_longest_request_of_the_server() {
    let sizes = Some([512, 4096, 64 << 10]);
    let fake = Fake::start(&[Offer { block_sizes: sizes, ..Offer::new(SIZE) }]);
    rt::block_on(async {
        let client = Client::connect(fake.options(Duration::ZERO)).await.expect("connect");
        client.write_zeroes(4096, MIB, true, false).await.expect("zeroes");
        client.trim(4096, MIB).await.expect("trim");
        client.close().await;
    });
    expect_pieces(&fake.seen(WRITE_ZEROES), 0, 4096, MIB + 4096, 64 * KIB);
    assert_eq!(fake.seen(TRIM).len(), 1, "a range without data isn't cut, as by QEMU");
}

#[test]
fn zeroes_are_cut_where_the_server_says_no_limit() {
    let fake = Fake::start(&[Offer::new(1 << 30)]);
    rt::block_on(async {
        let client = Client::connect(fake.options(Duration::ZERO)).await.expect("connect");
        client.write_zeroes(0, 100 * MIB, true, false).await.expect("zeroes");
        client.close().await;
    });
    expect_pieces(&fake.seen(WRITE_ZEROES), 0, 0, 100 * MIB, 32 * MIB);
}

#[test]
fn server_with_a_smaller_limit_gets_smaller_requests() {
    let sizes = |maximum| Some([512, 4096, maximum]);
    let first = Offer { block_sizes: sizes(1 << 20), ..Offer::new(SIZE) }.dying();
    let then = Offer { block_sizes: sizes(64 << 10), ..Offer::new(SIZE) };
    for command in [READ, WRITE, WRITE_ZEROES] {
        let fake = Fake::start(&[first, then]);
        rt::block_on(async {
            let client = Client::connect(fake.options(LONG)).await.expect("connect");
            match command {
                READ => {
                    let (result, buf) = client.read(4096, IoBuf::copy_from(&vec![7; 3 << 20])).await;
                    result.expect("read");
                    assert!(buf.len() == 3 << 20 && buf.iter().all(|byte| *byte == 0), "all of it was read");
                }
                WRITE => {
                    let (result, buf) = client.write(4096, IoBuf::copy_from(&vec![7; 3 << 20]), true).await;
                    result.expect("write");
                    assert!(buf.len() == 3 << 20 && buf.iter().all(|byte| *byte == 7), "the buffer is whole");
                }
                _ => client.write_zeroes(4096, 3 * MIB, true, false).await.expect("zeroes"),
            }
            client.close().await;
        });
        let seen = fake.seen(command);
        assert_eq!(seen[0], Seen { connection: 0, command, offset: 4096, len: MIB });
        expect_pieces(&seen, 1, 4096, 3 * MIB + 4096, 64 * KIB);
    }
}

#[test]
fn server_with_larger_blocks_gets_whole_blocks() {
    let first = Offer { block_sizes: Some([512, 4096, 1 << 20]), ..Offer::new(SIZE) }.dying();
    let then = Offer { block_sizes: Some([4096, 4096, 1 << 20]), ..Offer::new(SIZE) };
    let fake = Fake::start(&[first, then]);
    rt::block_on(async {
        let client = Client::connect(fake.options(LONG)).await.expect("connect");
        assert_eq!(client.write(512, IoBuf::zeroed(512), false).await.0, Err(Errno::EINVAL));
        assert_eq!(client.read(4096, IoBuf::zeroed(512)).await.0, Err(Errno::EINVAL));
        assert_eq!(client.write_zeroes(4096, 512, false, false).await, Err(Errno::EINVAL));
        client.write(4096, IoBuf::zeroed(4096), false).await.0.expect("whole blocks are written");
        client.close().await;
    });
    let on_second = |seen: &&Seen| seen.connection == 1;
    assert_eq!(fake.seen(WRITE).iter().filter(on_second).count(), 1);
    assert_eq!(fake.seen(READ).len() + fake.seen(WRITE_ZEROES).len(), 0);
}

#[test]
fn a_server_that_comes_back_without_block_status_is_not_asked() {
    let first = Offer { structured: true, has_status: true, ..Offer::new(SIZE) }.dying();
    let then = Offer { structured: true, ..Offer::new(SIZE) };
    let fake = Fake::start(&[first, then]);
    rt::block_on(async {
        let client = Client::connect(fake.options(LONG)).await.expect("connect");
        assert!(client.facts().has_status);
        assert_eq!(client.block_status(0, SIZE).await, Ok(Vec::new()), "nothing is known");
        client.close().await;
    });
    assert!(fake.seen(BLOCK_STATUS).iter().all(|seen| seen.connection == 0));
}

/// A length of more than 32 bits must not lose its upper half on the way to a server without extended headers.
#[test]
fn server_without_extended_headers_gets_the_whole_range() {
    const LEN: u64 = 6 << 30;
    let first = Offer { extended: true, ..Offer::new(8 << 30) }.dying();
    let fake = Fake::start(&[first, Offer::new(8 << 30)]);
    rt::block_on(async {
        let client = Client::connect(fake.options(LONG)).await.expect("connect");
        client.trim(0, LEN).await.expect("trim");
        client.close().await;
    });
    let seen = fake.seen(TRIM);
    assert_eq!(seen[0], Seen { connection: 0, command: TRIM, offset: 0, len: LEN });
    expect_pieces(&seen, 1, 0, LEN, 1 << 32);
}
