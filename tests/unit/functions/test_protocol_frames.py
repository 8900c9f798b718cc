"""The framing between parent and worker."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.functions import protocol

BYTES = st.none() | st.binary(max_size=50)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=3)


@st.composite
def work(draw: st.DrawFn) -> protocol.Work:
    count = draw(st.integers(1, 5))
    column = {"min_size": count, "max_size": count}
    return protocol.Work(
        draw(st.text(min_size=1, max_size=10)),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.lists(st.integers(0, 2**63 - 1), **column)),
        draw(st.lists(st.integers(-1, 2**62), **column)),
        draw(st.lists(BYTES, **column)),
        draw(st.lists(BYTES, **column)),
        draw(st.none() | st.lists(HEADERS, **column)),
    )


SCHEMAS = st.builds(
    protocol.Schema, st.integers(0, 2**31 - 1), st.text(), st.text(), st.dictionaries(st.text(), st.text())
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@given(st.lists(work() | SCHEMAS, max_size=4), st.lists(st.integers(0)))
def test_messages_survive_however_the_stream_is_cut(messages: list[protocol.ToWorker], cuts: list[int]) -> None:
    """What goes in comes out, in order, for every way of cutting the bytes."""
    reader = protocol.FrameReader(protocol.decode_to_worker)
    stream = b"".join(protocol.encode_frame(message) for message in messages)
    assert [message for piece in cut(stream, cuts) for message in reader.feed(piece)] == messages


@given(st.binary(min_size=4, max_size=200))
def test_foreign_bytes_break_the_connection_and_nothing_else(data: bytes) -> None:
    """Bytes that are not a frame end in `ProtocolBroken` or in waiting for more, never in another error."""
    try:
        protocol.FrameReader(protocol.decode_to_parent).feed(data)
    except protocol.ProtocolBroken:
        return


def test_an_impossible_length_is_refused_at_once() -> None:
    """A length beyond the limit is not waited for."""
    with pytest.raises(protocol.ProtocolBroken, match="announced"):
        protocol.FrameReader(protocol.decode_to_parent).feed(b"\xff\xff\xff\xff")
