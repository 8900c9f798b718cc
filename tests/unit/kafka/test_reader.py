"""What the client's records become, and the end of reading."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka import reader
from headrace.kafka.fetch_queue import to_parts
from headrace.records import TopicPartition
from tests.assigned_consumer import message
from tests.group_member import P0, P1


class Taken:
    """A record as the client gives it when a name is not UTF-8: it fails once, and then holds nothing for the name."""

    def __init__(self) -> None:
        make, put = ctypes.pythonapi.PyTuple_New, ctypes.pythonapi.PyTuple_SetItem
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_ssize_t]
        put.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.py_object]
        nameless, value = make(2), b"1"
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        put(id(nameless), 1, value)
        self._headers: list[Any] = [("a", b"0"), nameless, ("a", None)]
        self._failed = False

    def headers(self) -> Any:
        if not self._failed:
            self._failed = True
            raise SystemError("returned a result with an exception set")
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 7

    def __getattr__(self, name: str) -> Any:
        return lambda: {"topic": "t", "partition": 0, "offset": 3}.get(name)


def test_a_header_whose_name_is_not_utf8_ends_nothing() -> None:
    """Clients of other languages write such names; value and place are kept, and so are the other headers."""
    expected = [("a", b"0"), ("\ufffd", b"1"), ("a", None)]
    plain = message(TopicPartition("t", 0), 3)
    [batch] = to_parts([plain, Taken(), plain, Taken(), Taken()]).parts
    assert [record.headers for record in batch] == [[], expected, [], expected, expected]
    for _ in range(2):
        assert batch[1].headers == expected


def test_records_of_the_client_are_batches_by_partition() -> None:
    """Holes and nulls in any order; a batch ends where the topic or the partition changes."""
    places = [P0, P0, P1, P0, TopicPartition("u", 0), P1]
    batches = to_parts([message(place, 3 * offset) for offset, place in enumerate(places)]).parts
    assert [(batch.topic_partition, batch.offsets) for batch in batches] == [
        (P0, [0, 3]),
        (P1, [6]),
        (P0, [9]),
        (TopicPartition("u", 0), [12]),
        (P1, [15]),
    ]
    for batch in batches:
        count = len(batch)
        assert (batch.keys, batch.values, batch.sizes) == ([b"k"] * count, [b"v"] * count, [2] * count)
        assert (batch.timestamps_ms, batch.headers) == ([1000] * count, None)


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_is_never_lost(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Also in the turn of the loop in which a batch arrives."""
    batch = asyncio.get_running_loop().create_future()

    async def parts(*_: Any) -> AsyncGenerator[reader.ReadPart, None]:
        yield await batch
        await asyncio.Event().wait()

    async def read() -> None:
        async for _ in reader.read_columns(KafkaConfig(), {}, {}, {}, 1):
            await asyncio.sleep(0)

    monkeypatch.setattr(reader, "_read_parts", parts)
    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    batch.set_result(reader.ReadPart([], {P0: 1}))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done
    assert task.cancelled()
