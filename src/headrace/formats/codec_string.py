"""STRING: UTF-8 text, as a JSON string."""

from __future__ import annotations

import msgspec

from headrace.errors import DecodeError, EncodeError

_decode_text = msgspec.json.Decoder(str).decode
_encode_text = msgspec.json.Encoder().encode


class StringCodec:
    """UTF-8 text."""

    def encode(self, text: bytes) -> bytes:
        try:
            return _decode_text(text).encode()
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise EncodeError(f"STRING takes a JSON string: {cause}") from cause

    def decode(self, data: bytes) -> bytes:
        try:
            return _encode_text(str(data, "utf-8"))
        except UnicodeDecodeError as cause:
            raise DecodeError(f"not UTF-8 text, which STRING needs: {cause.reason} at byte {cause.start}") from cause
