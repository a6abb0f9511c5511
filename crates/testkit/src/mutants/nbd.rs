// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Slips of an NBD server towards its clients, of a client towards its server, and of a vhost-user back end.

use super::Mutant;

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "lost_nbd_write_is_success",
        about: "the NBD client says that a write was done whose connection was lost before the reply",
        test: ("nbd", "lost_write_is_an_error_or_sent_again"),
    },
    Mutant {
        name: "fua_left_out_by_the_nbd_client",
        about: "the NBD client leaves FUA out of a durable write",
        test: ("nbd", "a_write_with_fua_is_flushed_before_its_reply"),
    },
    Mutant {
        name: "fua_left_out_by_the_nbd_server",
        about: "the NBD server answers a write with FUA before it is durable",
        test: ("nbd", "a_write_with_fua_is_flushed_before_its_reply"),
    },
    Mutant {
        name: "closing_left_out_of_the_intake",
        about: "the NBD server takes requests of a client that is told to go",
        test: ("nbd", "buffered_requests_do_not_delay_removal_of_an_export"),
    },
    Mutant {
        name: "requests_of_a_dead_connection",
        about: "the NBD server carries out what lies in the buffers of a connection that is dead",
        test: ("nbd", "requests_of_a_dead_connection_are_not_begun"),
    },
    Mutant {
        name: "another_size_after_a_reconnect",
        about: "the NBD client takes any export of that name for the one that it was connected to",
        test: ("nbd", "a_server_that_comes_back_with_another_size_is_refused"),
    },
    Mutant {
        name: "pieces_of_a_write_in_one_place",
        about: "the NBD server writes each piece of a long request to the request's start",
        test: ("nbd-server/memory", "requests_that_go_in_pieces_are_whole"),
    },
    Mutant {
        name: "half_options_take_places",
        about: "an NBD connection takes a place before the data of its first option is there",
        test: ("nbd-server/hostile", "an_option_without_its_data_takes_no_place"),
    },
    Mutant {
        name: "outages_share_a_reconnect_delay",
        about: "the reconnect delay of an NBD request runs from its first outage on",
        test: ("nbd/outages", "each_outage_has_the_reconnect_delay_of_its_own"),
    },
    Mutant {
        name: "rest_of_a_shortened_trim_left_out",
        about: "the NBD client takes a request for whole that went to a server without extended headers in part",
        test: ("nbd/outages", "server_without_extended_headers_gets_the_whole_range"),
    },
    Mutant {
        name: "zeroes_beyond_the_servers_maximum",
        about: "the NBD client sends zero writes that are longer than the server's longest request",
        test: ("nbd/outages", "zeroes_are_cut_to_the_longest_request_of_the_server"),
    },
    Mutant {
        name: "note_of_a_request_ends_before_its_place_in_the_ring",
        about: "a vhost-user back end takes a request for ended before the guest can see that",
        test: ("vhost", "a_kill_between_any_two_steps_loses_nothing_and_repeats_nothing"),
    },
    Mutant {
        name: "loss_is_told_to_one_flush_alone",
        about: "a vhost-user back end forgets that changes are lost as soon as one flush has failed",
        test: ("vhost", "a_flush_after_a_kill_promises_nothing_that_is_lost"),
    },
    Mutant {
        name: "unflushed_changes_are_not_noted",
        about: "a vhost-user back end leaves no note of changes that die with it",
        test: ("vhost", "a_flush_after_a_kill_promises_nothing_that_is_lost"),
    },
    Mutant {
        name: "changes_of_a_cycle_count_as_written",
        about: "a vhost-user back end notes no changes that a flush of tables is still writing",
        test: ("vhost-user/src/tests/notes", "a_write_that_ends_during_write_back_is_noted"),
    },
    Mutant {
        name: "entries_of_new_blocks_count_as_written",
        about: "a vhost-user back end notes no changes of a format whose entries wait for a flush",
        test: ("vhost", "a_flush_after_a_kill_promises_nothing_that_is_lost"),
    },
    Mutant {
        name: "vhost_flush_promises_without_a_sync",
        about: "a vhost-user back end reports a flush that it has not carried out",
        test: ("vhost", "a_power_cut_takes_nothing_that_the_guest_has_flushed"),
    },
];
