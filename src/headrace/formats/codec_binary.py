"""BINARY: any bytes, as standard base64 with padding in a JSON string. Source: RFC 4648 section 4."""

from __future__ import annotations

import binascii

import msgspec

from headrace.errors import EncodeError

_decode_text = msgspec.json.Decoder(str).decode


class BinaryCodec:
    """Bytes as base64."""

    def encode(self, text: bytes) -> bytes:
        try:
            return binascii.a2b_base64(_decode_text(text), strict_mode=True)
        except (msgspec.DecodeError, ValueError) as cause:
            raise EncodeError(f"BINARY takes a JSON string in standard base64 with padding: {cause}") from cause

    def decode(self, data: bytes) -> bytes:
        return b'"' + binascii.b2a_base64(data, newline=False) + b'"'
