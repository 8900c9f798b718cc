"""The offset map: which records above the committed offset are completed, as text in the commit's metadata.

With it a restart repeats only what was not completed. Every map of at most `SPAN_OFFSETS` offsets fits Kafka's limit of
4,096 characters, in any pattern, so no map is ever left out. If the record at the committed offset has failed, the text
also has its attempts: the second version of the format, which earlier releases read as no map.
"""

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

SPAN_OFFSETS = 24_000
"""Most offsets from the committed one to the highest completed one: at one bit each 3,000 of 3,072 bytes."""
_MAGIC = b"HR\x01"
_MAGIC_WITH_TRIES = b"HR\x02"
_HEAD = struct.Struct(">3sBqI")
_TRIES = struct.Struct(">Id")
_MOST_ATTEMPTS, _LAST_TIME = 1_000_000, 32_503_680_000
"""Beyond them, in the year 3000, Headrace did not write the numbers, and no dead letter could have them."""
_SUM = struct.Struct(">I")
_GAPS, _BITS, _DEFLATED = range(3)
_COMPLETED, _IN_FLIGHT = b"01"


class Tries(NamedTuple):
    """The failures of a record so far."""

    attempts: int
    first_failed_at: float
    """Seconds since the epoch."""


class OffsetMap(NamedTuple):
    """What is completed from the committed offset on: everything below `end` except the records in flight.

    Holes count as completed: compaction, aborted transactions and markers leave offsets without a record.
    """

    base: int
    """The committed offset of the map."""
    end: int
    """One more than the highest completed offset."""
    in_flight: frozenset[int]
    """Offsets from `base` to `end` that are not completed."""
    tries: Tries | None = None
    """Those of the record at the committed offset, if it has failed."""

    def has(self, offset: int) -> bool:
        """Whether the record at this offset is completed."""
        return self.base <= offset < self.end and offset not in self.in_flight


def encode(base: int, end: int, in_flight: Sequence[int], tries: Tries | None = None) -> str:
    """Return a map as text: the smallest of a list of gaps, a bitmap and a deflated bitmap.

    Args:
        base: The committed offset.
        end: One more than the highest completed offset.
        in_flight: Offsets between the two that are not completed, ascending.
        tries: Those of the record at `base`, if it has failed; then the map may be empty.

    Raises:
        ValueError: The span is larger than `SPAN_OFFSETS`.
    """
    span = end - base
    if not (0 if tries else 1) <= span <= SPAN_OFFSETS:
        raise ValueError(f"an offset map spans 1 to {SPAN_OFFSETS} offsets, not {span}")
    codec, payload = _smallest(base, span, in_flight) if span else (_GAPS, b"")
    history = _TRIES.pack(*tries) if tries else b""
    data = _HEAD.pack(_MAGIC_WITH_TRIES if tries else _MAGIC, codec, base, span) + history + payload
    return base64.b64encode(data + _SUM.pack(zlib.crc32(data))).decode()


def _smallest(base: int, span: int, in_flight: Sequence[int]) -> tuple[int, bytes]:
    """Return the codec that needs the fewest bytes, and these."""
    marks = bytearray([_COMPLETED]) * span
    for offset in in_flight:
        marks[offset - base] = _IN_FLIGHT
    bits = int(marks, 2).to_bytes((span + 7) // 8, "big")
    payloads = {_BITS: bits, _DEFLATED: zlib.compress(bits)}
    if len(in_flight) <= len(bits):  # a gap takes at least one byte, so more gaps than bytes are never the shortest
        payloads[_GAPS] = _encode_gaps(base, in_flight)
    return min(payloads.items(), key=lambda item: len(item[1]))


def decode(text: str, base: int) -> OffsetMap | None:
    """Return the map in a commit's metadata, or None if it is not a map of exactly this committed offset.

    So the map becomes invalid when a tool sets the group to another offset.
    """
    try:
        data = base64.b64decode(text, validate=True)
        magic, codec, own_base, span = _HEAD.unpack_from(data)
        body, (checksum,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
        with_tries = magic == _MAGIC_WITH_TRIES
        if own_base != base or zlib.crc32(body) != checksum or not (0 if with_tries else 1) <= span <= SPAN_OFFSETS:
            return None
        if not with_tries and magic != _MAGIC:
            return None
        tries = Tries(*_TRIES.unpack_from(body, _HEAD.size)) if with_tries else None
        if tries and not (tries.attempts <= _MOST_ATTEMPTS and 0 <= tries.first_failed_at <= _LAST_TIME):
            return None
        payload = body[_HEAD.size + (_TRIES.size if with_tries else 0) :]
        in_flight = frozenset(_decode_in_flight(codec, payload, base, span)) if span else frozenset[int]()
        return OffsetMap(base, base + span, in_flight, tries)
    except (ValueError, struct.error, zlib.error, IndexError):
        return None


def _decode_in_flight(codec: int, payload: bytes, base: int, span: int) -> list[int]:
    if codec == _GAPS:
        return _decode_gaps(payload, base)
    bits = zlib.decompressobj().decompress(payload, SPAN_OFFSETS // 8) if codec == _DEFLATED else payload
    marks = f"{int.from_bytes(bits, 'big'):0{span}b}"
    return [base + index for index, mark in enumerate(marks) if mark == "1"]


def _encode_gaps(base: int, offsets: Sequence[int]) -> bytes:
    """Write the distance of each offset to the one before, 7 bits per byte, the high bit for "more follows"."""
    out = bytearray()
    before = base
    for offset in offsets:
        gap, before = offset - before, offset
        while gap > 0x7F:
            out.append(gap & 0x7F | 0x80)
            gap >>= 7
        out.append(gap)
    return bytes(out)


def _decode_gaps(payload: bytes, base: int) -> list[int]:
    offsets, offset, index = [], base, 0
    while index < len(payload):
        shift = 0
        while True:
            byte = payload[index]
            index += 1
            offset += (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        offsets.append(offset)
    return offsets
