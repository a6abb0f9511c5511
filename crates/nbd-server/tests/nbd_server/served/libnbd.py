# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A client made of libnbd. Arguments: `work` or `stay`, the URI, a file with what the disk holds, and what must be negotiated."""
import sys
import nbd

MIB = 1 << 20
mode, uri, initial, wanted = sys.argv[1:5]


def connect():
    h = nbd.NBD()
    h.add_meta_context("base:allocation")
    if hasattr(h, "set_uri_allow_local_file"):
        h.set_uri_allow_local_file(True)
    h.connect_uri(uri)
    return h


def status(h):
    """Runs as (length, flags)."""
    runs, at = [], 0

    def take(context, offset, entries, error):
        assert context == "base:allocation" and error.value == 0
        pairs = entries if entries and isinstance(entries[0], tuple) else zip(entries[::2], entries[1::2])
        runs.extend(pairs)

    while at < h.get_size():
        before = sum(length for length, _ in runs)
        ask = h.block_status_64 if hasattr(h, "block_status_64") else h.block_status
        ask(h.get_size() - at, at, take)
        at = sum(length for length, _ in runs)
        assert at > before
    if hasattr(h, "can_block_status_payload") and h.can_block_status_payload():
        all_runs, runs = runs, []
        h.block_status_filter(h.get_size(), 0, ["base:allocation"], take)
        assert all(isinstance(run, tuple) for run in runs) and runs[0] == all_runs[0], (runs, all_runs)
        return all_runs
    return runs


def flags_at(runs, offset):
    for length, flags in runs:
        if offset < length:
            return flags
        offset -= length
    raise AssertionError("not covered")


def work():
    h = connect()
    content = open(initial, "rb").read()
    assert h.get_size() == len(content)
    extended = hasattr(h, "get_extended_headers_negotiated") and h.get_extended_headers_negotiated()
    assert wanted != "extended" or extended, "no extended headers"
    assert wanted != "tls" or h.get_tls_negotiated(), "no TLS"
    for at in range(0, len(content), 32 * MIB):
        piece = content[at : at + 32 * MIB]
        assert h.pread(len(piece), at) == piece
    h.pwrite(b"\5" * 65536, 65536)
    h.pwrite(b"\6" * (32 * MIB), 4 * MIB, nbd.CMD_FLAG_FUA if h.can_fua() else 0)
    h.zero(MIB, 5 * MIB)
    h.trim(MIB, 8 * MIB)
    h.pwrite(b"\t" * 777, 12345)
    h.flush()
    now = h.pread(32 * MIB, 4 * MIB)
    assert now[:MIB] == b"\6" * MIB and now[MIB : 2 * MIB] == bytes(MIB) and now[5 * MIB :] == b"\6" * (27 * MIB)
    runs = status(h)
    assert flags_at(runs, 5 * MIB + 512) & nbd.STATE_ZERO, runs
    assert not flags_at(runs, 65536) & nbd.STATE_ZERO, runs
    # A refused request leaves the connection in step.
    try:
        h.set_strict_mode(0)
        h.pwrite(b"\xff" * 65536, len(content))
        raise AssertionError("written behind the end")
    except nbd.Error as error:
        assert error.errno == "ENOSPC", error
    assert h.pread(777, 12345) == b"\t" * 777
    h.shutdown()


def stay():
    """Outlives the server: a new connection goes on."""
    h = connect()
    h.pwrite(b"\7" * 512, 1024)
    print("up", flush=True)
    sys.stdin.readline()
    try:
        h.pread(512, 0)
        raise AssertionError("the server that has ended answers")
    except nbd.Error:
        pass
    h = connect()
    h.pwrite(b"\7" * 512, 0)
    h.flush()
    assert h.pread(512, 0) == b"\7" * 512
    h.shutdown()
    print("back", flush=True)


{"work": work, "stay": stay}[mode]()
