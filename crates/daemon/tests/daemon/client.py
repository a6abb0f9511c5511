# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The public client of QMP against our monitor: arguments are its socket, and an image."""

import asyncio
import sys

from qemu.qmp import ExecuteError, QMPClient


async def main(socket: str, image: str) -> None:
    client = QMPClient("test")
    await client.connect(socket)
    version = await client.execute("query-version")
    assert version["qemu"]["major"] == 11, version
    commands = {command["name"] for command in await client.execute("query-commands")}
    assert {"blockdev-add", "block_set_io_throttle", "transaction"} <= commands, commands
    await client.execute(
        "blockdev-add",
        {"driver": "qcow2", "node-name": "disk", "file": {"driver": "file", "filename": image}},
    )
    for command, arguments, kind, words in [
        ("nope", None, "CommandNotFound", "The command nope has not been found"),
        ("block_resize", {"size": "x"}, "GenericError", "Invalid parameter type for 'size', expected: integer"),
        ("qom-get", {"path": "z", "property": "y"}, "DeviceNotFound", "Device 'z' not found"),
    ]:
        try:
            await client.execute(command, arguments)
        except ExecuteError as error:
            assert (error.error_class, str(error)) == (kind, words), error
        else:
            raise AssertionError(f"{command} must be refused")
    nodes = await client.execute("query-named-block-nodes")
    assert any(node["node-name"] == "disk" for node in nodes), nodes
    await client.execute("quit")
    try:
        await client.disconnect()
    except EOFError:
        pass  # The daemon has hung up first.
    print("all is well")


asyncio.run(main(*sys.argv[1:]))
