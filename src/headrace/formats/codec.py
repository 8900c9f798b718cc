"""What every codec offers: JSON text in, stored bytes out, and the way back.

Values stay JSON text on both sides, so a value is spliced into a body without being taken apart, and numbers keep
every digit. Null never reaches a codec: callers store it as null bytes (a tombstone, or no key).
"""

from __future__ import annotations

from typing import Protocol


class Codec(Protocol):
    """One format, or one format with its schema."""

    def encode(self, text: bytes) -> bytes:
        """Return the stored bytes of one JSON value.

        Raises:
            EncodeError: The value does not fit; the message names the cause and never the value.
        """

    def decode(self, data: bytes) -> bytes:
        """Return stored bytes as JSON text.

        Raises:
            DecodeError: The bytes are not of this format.
        """
