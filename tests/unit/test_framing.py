"""The frames between a process and its child."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.framing import FrameReader, ProtocolBroken, encode_frame
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
    reader = FrameReader(protocol.decode_to_worker)
    stream = b"".join(encode_frame(message) for message in messages)
    assert [message for piece in cut(stream, cuts) for message in reader.feed(piece)] == messages


@given(st.binary(max_size=200), st.booleans())
def test_foreign_bytes_break_the_connection_and_nothing_else(data: bytes, in_a_frame: bool) -> None:
    """Bytes that are not a frame end in `ProtocolBroken` or in waiting for more, never in another error."""
    messages: Sequence[protocol.ToParent] = ()
    with contextlib.suppress(ProtocolBroken):
        messages = FrameReader(protocol.decode_to_parent).feed(len(data).to_bytes(4, "big") * in_a_frame + data)
    assert all(isinstance(message, msgspec.Struct) for message in messages)


@pytest.mark.parametrize("content", [b"\x92\x02\xa2\xff\xfe", b"\x93\x01\xc0" + b"\x91" * 100_000, b"\xc1", b""])
def test_a_frame_with_another_content_breaks_the_connection(content: bytes) -> None:
    """A text that is not UTF-8, a value that is too deep, no value."""
    with pytest.raises(ProtocolBroken, match="unexpected content"):
        FrameReader(protocol.decode_to_parent).feed(len(content).to_bytes(4, "big") + content)


@pytest.mark.parametrize(("size", "most_bytes"), [(2**32 - 1, None), (2**30 + 1, None), (101, 100)])
def test_an_impossible_length_is_refused_at_once(size: int, most_bytes: int | None) -> None:
    """A length beyond the limit is not waited for."""
    with pytest.raises(ProtocolBroken, match="announced"):
        FrameReader(protocol.decode_to_parent, most_bytes).feed(size.to_bytes(4, "big"))


def test_a_frame_beyond_the_bound_is_not_made() -> None:
    """The bound is that of the content."""
    assert FrameReader(msgspec.msgpack.decode, 100).feed(encode_frame(b"x" * 98, 100)) == [b"x" * 98]
    with pytest.raises(ProtocolBroken, match="a frame of 101 bytes is larger than 100"):
        encode_frame(b"x" * 99, 100)
