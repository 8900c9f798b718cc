"""JSON: any JSON value, stored as the very text that came. Source: RFC 8259."""

from __future__ import annotations

import msgspec

from headrace.errors import DecodeError

_check = msgspec.json.Decoder(msgspec.Raw).decode


class JsonCodec:
    """JSON text, untouched: integers of any size, decimals and the order of fields survive."""

    def encode(self, text: bytes) -> bytes:
        return text  # the parser of the request has checked it

    def decode(self, data: bytes) -> bytes:
        self.text(data)
        return data

    def text(self, data: bytes) -> str:
        """Return what `decode` does as text.

        Raises:
            DecodeError: The bytes are not JSON.
        """
        try:
            _check(data)
            return str(data, "utf-8")  # the check above looks into no string
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise DecodeError(f"not JSON text: {cause}") from cause
