# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Makes a.dmg, a.bochs and a.cloop in the current directory: 64 MiB that begin with 1 MiB of the byte 7."""

import base64
import struct
import zlib

MIB = 1 << 20
SIZE = 64 * MIB
data = b"\7" * MIB

# Apple: one table with a raw piece, zeroes, and an end.
pieces = [(1, 0, MIB // 512, 0, MIB), (2, MIB // 512, (SIZE - MIB) // 512, MIB, 0), (0xFFFFFFFF, SIZE // 512, 0, MIB, 0)]
table = b"mish" + struct.pack(">IQQQ", 1, 0, SIZE // 512, 0)
table = table.ljust(200, b"\0") + struct.pack(">I", len(pieces))
for kind, *numbers in pieces:
    table += struct.pack(">II4Q", kind, 0, *numbers)
encoded = base64.b64encode(table).decode()
plist = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<plist version="1.0"><dict><key>resource-fork</key><dict><key>blkx</key><array>'
    f"<dict><key>Data</key><data>{encoded}</data></dict></array></dict></dict></plist>\n"
).encode()
trailer = bytearray(512)
trailer[0:4] = b"koly"
struct.pack_into(">II", trailer, 4, 4, 512)
struct.pack_into(">QQ", trailer, 24, 0, MIB)
struct.pack_into(">QQ", trailer, 216, MIB, len(plist))
struct.pack_into(">Q", trailer, 492, SIZE // 512)
with open("a.dmg", "wb") as file:
    file.write(data + plist + trailer)

# Bochs: extents of 1 MiB, of which the first is there.
header = bytearray(512)
for at, text in [(0, b"Bochs Virtual HD Image"), (32, b"Redolog"), (48, b"Growing")]:
    header[at : at + len(text)] = text
struct.pack_into("<5I", header, 64, 0x20000, 512, SIZE // MIB, 512, MIB)
struct.pack_into("<Q", header, 88, SIZE)
catalog = struct.pack("<I", 0) + b"\xff" * 4 * (SIZE // MIB - 1)
with open("a.bochs", "wb") as file:
    file.write(header + catalog + b"\xff" * 512 + data)

# cloop: blocks of 64 KiB.
block = 65536
packed = [zlib.compress(b"\7" * block)] * (MIB // block) + [zlib.compress(bytes(block))] * ((SIZE - MIB) // block)
head = b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n".ljust(128, b"\0")
head += struct.pack(">II", block, len(packed))
at = len(head) + 8 * (len(packed) + 1)
for piece in packed:
    head += struct.pack(">Q", at)
    at += len(piece)
with open("a.cloop", "wb") as file:
    file.write(head + struct.pack(">Q", at) + b"".join(packed))
