"""The registry's framing: a zero byte, the schema's id in four bytes, then the payload.

Source: Confluent Schema Registry, wire format.
"""

from __future__ import annotations

import struct

from headrace.errors import DecodeError

_HEADER = struct.Struct(">BI")


def header_of(schema_id: int) -> bytes:
    """Return the five bytes that go before a payload of this schema."""
    return _HEADER.pack(0, schema_id)


def schema_id_of(data: bytes) -> int | None:
    """Return the schema id with which the bytes begin, None when they begin with none."""
    return _HEADER.unpack_from(data)[1] if len(data) >= _HEADER.size and data[0] == 0 else None


def unframe(data: bytes) -> tuple[int, bytes]:
    """Return schema id and payload.

    Raises:
        DecodeError: The bytes do not begin with a schema id.
    """
    schema_id = schema_id_of(data)
    if schema_id is None:
        raise DecodeError(
            "the bytes do not begin with a zero byte and a schema id: "
            "they were not written through a schema registry, so read them in another format"
        )
    return schema_id, data[_HEADER.size :]
