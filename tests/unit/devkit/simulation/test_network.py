"""Connections between machines: a peer that does not read slows down what writes."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace_devkit.simulation.network import Network, Transport
from headrace_devkit.simulation.world import World


class Writer(asyncio.Protocol):
    """Notes when it may not write."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pause_writing(self) -> None:
        self.told.append("pause")

    def resume_writing(self) -> None:
        self.told.append("resume")


class Reader(asyncio.Protocol):
    """Counts what it reads."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.size_bytes += len(data)


def test_a_peer_that_does_not_read_fills_the_buffer_of_the_writer() -> None:
    """What the kernels hold is not in the buffer. When the peer reads, the writer may continue."""
    world = World(1)
    network, writer, reader = Network(world), Writer(), Reader()
    near, far = world.machine("near"), world.machine("far")
    network.join(near)
    ends: list[Any] = []

    def accept(transport: Transport) -> None:
        transport.set_protocol(reader)
        transport.pause_reading()
        ends.append(transport)

    async def write() -> None:
        transport, _ = await network.connect(near.loop, lambda: writer, "far", 80)
        ends.append(transport)

    network.listen(far, 80, accept)
    near.loop.start(write(), lambda task: world.note("ended", str(task.exception())))
    world.run(1)
    slow, fast = ends
    fast.write(bytes(262_144))
    assert (fast.get_write_buffer_size(), writer.told) == (0, [])
    for _ in range(3):
        fast.write(bytes(40_000))
    world.run(5)
    assert (fast.get_write_buffer_size(), writer.told, reader.size_bytes) == (120_000, ["pause"], 0)
    slow.resume_reading()
    world.run(5)
    assert (fast.get_write_buffer_size(), writer.told, reader.size_bytes) == (0, ["pause", "resume"], 382_144)
    assert not world.problems
