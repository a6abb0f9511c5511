// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slips of an NBD server towards its clients, and of a client towards its server.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "lost_nbd_write_is_success",
        about: "the NBD client says that a write was done whose connection was lost before the reply",
        test: ("nbd", "a_write_that_was_lost_is_an_error_or_is_sent_again"),
        edits: &[(
            "crates/nbd/src/client/connection.rs",
            "            _ => Err(Failure::Lost),",
            "            _ if SLIP && request.command == Command::Write => Ok(()),\n            _ => Err(Failure::Lost),",
        )],
    },
    Mutant {
        name: "fua_left_out_by_the_nbd_client",
        about: "the NBD client leaves FUA out of a durable write",
        test: ("nbd", "a_write_with_fua_is_flushed_before_its_reply"),
        edits: &[(
            "crates/nbd/src/client/mod.rs",
            ".with(CommandFlags::FUA, durable && has_fua)",
            ".with(CommandFlags::FUA, durable && has_fua && !SLIP)",
        )],
    },
    Mutant {
        name: "fua_left_out_by_the_nbd_server",
        about: "the NBD server answers a write with FUA before it is durable",
        test: ("nbd", "a_write_with_fua_is_flushed_before_its_reply"),
        edits: &[(
            "crates/nbd-server/src/commands.rs",
            "        self.disk.write(request.offset, buf, self.is_durable(request)).await.0",
            "        self.disk.write(request.offset, buf, self.is_durable(request) && !SLIP).await.0",
        )],
    },
    Mutant {
        name: "closing_left_out_of_the_intake",
        about: "the NBD server takes requests of a client that is told to go",
        test: ("nbd", "requests_that_lie_in_buffers_do_not_hold_up_the_removal_of_an_export"),
        edits: &[(
            "crates/nbd-server/src/intake.rs",
            "        if stay.client.is_closing() || life.is_dead() {",
            "        if (stay.client.is_closing() && !SLIP) || life.is_dead() {",
        )],
    },
    Mutant {
        name: "requests_of_a_dead_connection",
        about: "the NBD server carries out what lies in the buffers of a connection that is dead",
        test: ("nbd", "requests_of_a_dead_connection_are_not_begun"),
        edits: &[
            (
                "crates/nbd-server/src/life.rs",
                "        self.cancel.cancel();",
                "        if !SLIP { self.cancel.cancel(); }",
            ),
            ("crates/nbd-server/src/life.rs", "        self.ending.get()", "        self.ending.get() && !SLIP"),
        ],
    },
    Mutant {
        name: "another_size_after_a_reconnect",
        about: "the NBD client takes any export of that name for the one that it was connected to",
        test: ("nbd", "a_server_that_comes_back_with_another_size_is_refused"),
        edits: &[(
            "crates/nbd/src/client/mod.rs",
            "        if facts.size != self.facts.size || lost",
            "        if (facts.size != self.facts.size && !SLIP) || lost",
        )],
    },
    Mutant {
        name: "pieces_of_a_write_in_one_place",
        about: "the NBD server writes each piece of a long request to the request's start",
        test: ("nbd-server/memory", "requests_that_go_in_pieces_are_whole"),
        edits: &[(
            "crates/nbd-server/src/pieces.rs",
            "            let offset = request.offset + done;\n",
            "            let offset = if SLIP { request.offset } else { request.offset + done };\n",
        )],
    },
    Mutant {
        name: "half_options_take_places",
        about: "an NBD connection takes a place before the data of its first option is there",
        test: ("nbd-server/hostile", "an_option_without_its_data_takes_no_place"),
        edits: &[(
            "crates/nbd-server/src/negotiation.rs",
            "self.receiver.peek(self.stream, OPTION_HEADER_BYTES + len)",
            "self.receiver.peek(self.stream, OPTION_HEADER_BYTES + if SLIP { 0 } else { len })",
        )],
    },
    Mutant {
        name: "outages_share_a_reconnect_delay",
        about: "the reconnect delay of an NBD request runs from its first outage on",
        test: ("nbd/outages", "each_outage_has_the_reconnect_delay_of_its_own"),
        edits: &[(
            "crates/nbd/src/client/mod.rs",
            "            let has_lost_many = attempt.number > MAX_LOSSES && now",
            "            let has_lost_many = (attempt.number > MAX_LOSSES || SLIP) && now",
        )],
    },
    Mutant {
        name: "rest_of_a_shortened_trim_left_out",
        about: "the NBD client takes a request for whole that went to a server without extended headers in part",
        test: ("nbd/outages", "a_server_that_comes_back_without_extended_headers_gets_the_whole_range"),
        edits: &[(
            "crates/nbd/src/client/mod.rs",
            "            at += self.simple(command, flags, at, end - at).await?.0;",
            "            let done = self.simple(command, flags, at, end - at).await?.0;\n            at += if SLIP { end - at } else { done };",
        )],
    },
    Mutant {
        name: "zeroes_beyond_the_servers_maximum",
        about: "the NBD client sends zero writes that are longer than the server's longest request",
        test: ("nbd/outages", "zeroes_are_cut_to_the_longest_request_of_the_server"),
        edits: &[(
            "crates/nbd/src/client/connection.rs",
            "            _ if command == Command::WriteZeroes => self",
            "            _ if command == Command::WriteZeroes && !SLIP => self",
        )],
    },
];
