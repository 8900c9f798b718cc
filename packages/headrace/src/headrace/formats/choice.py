"""Finds the codec of a request or a record by format and schema."""

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from cachetools import LRUCache

from headrace import errors
from headrace.config.format_list import FORMATS, SCHEMA_TYPES
from headrace.formats.plain import Codec, ValueEncoder, header_of, schema_id_of, unframe
from headrace.formats.registry import Reference, RegisteredSchema, SchemaRegistry
from headrace.formats.schema_codec import PLAIN_CODECS, SchemaCodec, compile_schema

_COMPILED_BYTES: Final = 4_194_304
"""Limit for the texts of compiled schemas; a codec takes several times the memory of its text."""
_ENTRY_BYTES: Final = 4096
"""Each counts for at least this, which bounds their number too."""
_PROBLEMS: Final = 1000


class SchemaChoice(NamedTuple):
    """The format and schema that a request names for keys or values; None for fields that it omits."""

    format: str | None = None
    """Name of the format, in any case."""
    text: str | None = None
    id: int | None = None
    version: int | None = None
    subject: str | None = None
    """Replaces the subject by the topic's name."""
    references: tuple[Reference, ...] = ()
    """Schemas that the text refers to."""
    message: str | None = None
    """Full name of the message type to write, of a Protobuf schema with several; None for the first."""


class Encoder(NamedTuple):
    """A codec for the records of a request, and the id of its schema if it has one."""

    codec: ValueEncoder
    schema_id: int | None = None


class Codecs:
    """Finds codecs, and keeps compiled schemas."""

    def __init__(self, registry: SchemaRegistry, *, plain_unions: bool = False) -> None:
        """Use a registry; with `plain_unions` Avro's unions are in JSON without the branch's name."""
        self._registry = registry
        self._plain_unions = plain_unions
        self._compiled: LRUCache[tuple[int, str | None], tuple[SchemaCodec, int]] = LRUCache(
            _COMPILED_BYTES, lambda entry: min(max(entry[1], _ENTRY_BYTES), _COMPILED_BYTES)
        )
        self._problems: LRUCache[int, errors.FormatError] = LRUCache(_PROBLEMS)
        """Why schemas could not be loaded, by id."""

    def without_schema(self, choice: SchemaChoice, default_format: str) -> Codec | None:
        """Return the codec of a request that needs no schema; None if `for_writing` must look one up.

        Raises:
            InvalidRequest: No such format.
        """
        name = choice.format or default_format
        codec = PLAIN_CODECS.get(name) or PLAIN_CODECS.get(format_name(name))
        if choice.format is None and choice[1:4] != (None, None, None):
            return None
        return codec

    async def for_writing(
        self, choice: SchemaChoice, default_format: str, subject: str, *, auto_register: bool = True
    ) -> Encoder:
        """Return the codec of a request; `subject` is that by the topic's name, `<topic>-key` or `<topic>-value`.

        Raises:
            InvalidRequest: No such format.
            SchemaConflict: The request names its schema in two ways.
            SchemaNotFound: The registry does not have it.
            SchemaInvalid: The text is not a valid schema, or the registry refuses it.
            RegistryUnavailable: The registry is needed and does not answer.
        """
        if codec := self.without_schema(choice, default_format):
            return Encoder(codec)
        name = format_name(choice.format or default_format)
        if choice.format is None and choice.text is not None and name not in SCHEMA_TYPES:
            raise errors.SchemaWithoutFormat()
        if choice.subject is not None:
            subject = choice.subject
        # A schema that is named without a format determines the format.
        return await self._encoder(await self._resolve(choice, name, subject, auto_register), choice)

    def for_reading(self, format_text: str, *, as_rows: bool = False) -> "Reader":
        """Return the reader of a format; `as_rows` is for columns of SQL.

        Raises:
            InvalidRequest: No such format.
        """
        return Reader(self, PLAIN_CODECS.get(format_name(format_text)), as_rows=as_rows)

    async def load(self, schema_id: int) -> None:
        """Make a schema ready for `loaded`, if the registry has it and it is usable.

        Raises:
            RegistryUnavailable: It is not cached, and the registry does not answer.
        """
        if isinstance(self._problems.get(schema_id), errors.SchemaInvalid):
            return  # the text of an id never changes
        try:
            await self._codec_of(await self._registry.by_id(schema_id))
        except errors.FormatError as cause:
            self._problems[schema_id] = cause.with_traceback(None)

    def loaded(self, schema_id: int) -> SchemaCodec | None:
        """Return the codec of a schema that was loaded recently."""
        entry = self._compiled.get((schema_id, None))
        return entry[0] if entry else None

    def readable(self, schema_id: int) -> SchemaCodec:
        """Return the codec of a schema that was loaded recently.

        Raises:
            DecodeError: It could not be loaded.
        """
        if codec := self.loaded(schema_id):
            return codec
        problem = self._problems.get(schema_id)
        why = problem.description if problem else "it is not loaded; try again"
        raise errors.DecodeError(f"the bytes name schema id {schema_id}, which is not usable: {why}")

    async def _encoder(self, schema: RegisteredSchema, choice: SchemaChoice) -> Encoder:
        codec = await self._codec_of(schema, choice.message)
        codec.require_writable()
        return Encoder(_Framed(schema.id, codec), schema.id)

    async def _resolve(self, choice: SchemaChoice, name: str, subject: str, auto_register: bool) -> RegisteredSchema:
        if choice.id is not None:
            if choice.version is not None:
                raise errors.SchemaConflict("give the schema by id or by version, not both")
            if choice.text is not None:
                raise errors.SchemaWithSchemaId()
            return await self._of_subject_by_id(choice.id, subject)
        if choice.version is not None:
            if choice.text is not None:
                raise errors.SchemaWithSchemaVersion()
            return await self._registry.of_subject(subject, choice.version)
        if choice.text is None:
            return await self._registry.of_subject(subject)
        return await self._registry.register(
            subject, choice.text, SCHEMA_TYPES[name], choice.references, create=auto_register
        )

    async def _of_subject_by_id(self, schema_id: int, subject: str) -> RegisteredSchema:
        schema = await self._registry.by_id(schema_id)
        if subject not in await self._registry.subjects_of(schema_id):
            raise errors.SchemaNotFound(
                f"schema id {schema_id} is not registered under subject {subject}: "
                "name its subject (keySchemaSubject, valueSchemaSubject) or register it there"
            )
        return schema

    async def _codec_of(self, schema: RegisteredSchema, message: str | None = None) -> SchemaCodec:
        key = schema.id, message
        entry = self._compiled.get(key)
        if entry is None:
            codec = await self._compile(schema.type, schema.text, schema.references, message)
            entry = self._compiled[key] = codec, len(schema.text)
        return entry[0]

    async def _compile(
        self, schema_type: str, text: str, references: tuple[Reference, ...], message: str | None
    ) -> SchemaCodec:
        texts = await self._registry.texts_of(references)
        return compile_schema(schema_type, text, texts, message, plain_unions=self._plain_unions)


class Reader:
    """Decodes stored bytes of one format into JSON text."""

    def __init__(self, codecs: Codecs, plain: Codec | None, *, as_rows: bool) -> None:
        """Decode with `plain`, or with the schema that the bytes name if it is None."""
        self._codecs = codecs
        self._plain = plain
        self._as_rows = as_rows
        self.names_schemas = plain is None
        """Whether the bytes name their schema, so that `prepare` must be called."""
        self._last_id = -1
        """Most records of a topic have the schema of the one before."""
        self._last_decode: Callable[[bytes], bytes]

    async def prepare(self, payloads: Iterable[bytes | None]) -> frozenset[int]:
        """Fetch every schema that these bytes name; await it before `decode`. Cheap if all are cached.

        Returns:
            The ids of these schemas.

        Raises:
            RegistryUnavailable: A schema is not cached, and the registry does not answer; try again later.
        """
        found = {schema_id_of(data) for data in payloads if data} if self.names_schemas else set()
        schema_ids = frozenset(schema_id for schema_id in found if schema_id is not None)
        for schema_id in schema_ids:
            await self._codecs.load(schema_id)
        return schema_ids

    def decode(self, data: bytes | None) -> bytes | None:
        """Return JSON text; None (a tombstone, no key) stays None.

        Raises:
            DecodeError: The bytes are not of this format, or name a schema that the registry does not have.
        """
        if data is None:
            return None
        if self._plain:
            return self._plain.decode(data)
        schema_id, payload = unframe(data)
        if schema_id != self._last_id:
            codec = self._codecs.readable(schema_id)
            self._last_decode = codec.decode_row if self._as_rows else codec.decode
            self._last_id = schema_id
        return self._last_decode(payload)

    def texts(self, payloads: Iterable[bytes | None]) -> list[bytes | None]:
        """Return what `decode` does for each payload."""
        decode = self._plain.decode if self._plain else self.decode
        return [None if data is None else decode(data) for data in payloads]


class _Framed:
    """Puts the schema's id before each payload."""

    def __init__(self, schema_id: int, inner: ValueEncoder) -> None:
        self._header = header_of(schema_id)
        self._inner = inner

    def encode(self, text: bytes) -> bytes:
        return self._header + self._inner.encode(text)


def format_name(name: str) -> str:
    """Return a format's name in lower case; any case is accepted.

    Raises:
        InvalidRequest: No such format.
    """
    found = name.lower()
    if found not in FORMATS:
        valid = ", ".join(FORMATS).upper()
        raise errors.InvalidRequest(f"format {name[:40]!r} is not supported: use one of {valid}, in any case")
    return found
