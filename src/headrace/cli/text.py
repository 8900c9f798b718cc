"""Keys and values between what people see (lines of text) and what Kafka stores."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headrace.config.model import SchemaRegistryConfig
from headrace.errors import DecodeError, EncodeError
from headrace.formats.codec_binary import BinaryCodec
from headrace.formats.codec_json import JsonCodec
from headrace.formats.codec_string import StringCodec

FORMATS = ("string", "json", "binary", "avro")

_PLAIN = {"string": StringCodec(), "json": JsonCodec(), "binary": BinaryCodec()}


class Reader:
    """Stored bytes as JSON text."""

    def __init__(self, registry: SchemaRegistryConfig) -> None:
        self._registry = registry

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def json_text(self, data: bytes | None, name: str) -> bytes:
        """Return stored bytes of a format as JSON text; null bytes are null.

        Raises:
            DecodeError: The bytes are not of this format.
        """
        if data is None:
            return b"null"
        return _PLAIN[name].decode(data)


class Writer:
    """Lines of text as stored bytes."""

    def __init__(self, registry: SchemaRegistryConfig, topic: str) -> None:
        self._registry = registry
        self._topic = topic

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, cause: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def stored(self, text: bytes, name: str, *, is_key: bool) -> bytes:
        """Return the bytes to store for a text in a format.

        Raises:
            EncodeError: The text is not of this format.
        """
        if name == "binary":
            return _PLAIN[name].encode(b'"' + text + b'"')
        try:
            _PLAIN[name].decode(text)
        except DecodeError as cause:
            raise EncodeError(str(cause)) from cause
        return text
