"""The frames between a process and a child that it started: a 4-byte big-endian length, then one msgpack value.

Both sides refuse a frame beyond a bound. Every worker of a function loads this module, so it needs msgspec alone.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeVar

import msgspec

M = TypeVar("M")

MAX_FRAME_BYTES = 1 << 30
"""The bound, unless a connection has a lower one."""
_PREFIX_BYTES: Final = 4
_encoder = msgspec.msgpack.Encoder()


class ProtocolBroken(Exception):
    """The other side sent bytes that are not a frame; the connection cannot be used any more."""


def encode_frame(message: object, most_bytes: int | None = None) -> bytearray:
    """Return a message as one frame.

    Raises:
        ProtocolBroken: It is larger than `most_bytes`, or `MAX_FRAME_BYTES`.
    """
    frame = bytearray(_PREFIX_BYTES)
    _encoder.encode_into(message, frame, _PREFIX_BYTES)
    size = len(frame) - _PREFIX_BYTES
    if size > (most_bytes or MAX_FRAME_BYTES):
        raise ProtocolBroken(f"a frame of {size} bytes is larger than {most_bytes or MAX_FRAME_BYTES}")
    frame[:_PREFIX_BYTES] = size.to_bytes(_PREFIX_BYTES, "big")
    return frame


class FrameReader(Generic[M]):
    """Puts the messages of a byte stream together, however the stream is cut."""

    def __init__(self, decode: Callable[[memoryview], M], most_bytes: int | None = None) -> None:
        self._decode = decode
        self._most_bytes = most_bytes or MAX_FRAME_BYTES
        self._held = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Take the next bytes of the stream and return the messages they complete, in order.

        Raises:
            ProtocolBroken: These bytes are not a frame.
        """
        self._held += data
        messages: list[M] = []
        begin, held = 0, len(self._held)
        with memoryview(self._held) as view:
            while held - begin >= _PREFIX_BYTES:
                size = int.from_bytes(view[begin : begin + _PREFIX_BYTES], "big")
                if size > self._most_bytes:
                    raise ProtocolBroken(f"a frame of {size} bytes is announced, {self._most_bytes} are allowed")
                end = begin + _PREFIX_BYTES + size
                if end > held:
                    break
                with view[begin + _PREFIX_BYTES : end] as payload:
                    try:
                        messages.append(self._decode(payload))
                    except (ValueError, RecursionError) as cause:
                        raise ProtocolBroken(f"a frame has an unexpected content: {cause}") from None
                begin = end
        del self._held[:begin]
        return messages
