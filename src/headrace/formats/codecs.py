"""Which codec serves a request or a record: formats by name, and schemas by what the request says of them.

Source: sidecar.md 4 (formats) and 5.2 (precedence and conflicts of schema inputs).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from headrace import errors
from headrace.formats.codec import Codec
from headrace.formats.codec_binary import BinaryCodec
from headrace.formats.codec_json import JsonCodec
from headrace.formats.codec_string import StringCodec
from headrace.formats.framing import header_of, schema_id_of, unframe
from headrace.formats.kept import Kept
from headrace.formats.registry import Reference, RegisteredSchema, SchemaRegistry
from headrace.formats.schema_codec import SchemaCodec, compile_schema

_PLAIN: Final[dict[str, Codec]] = {"BINARY": BinaryCodec(), "STRING": StringCodec(), "JSON": JsonCodec()}
_TYPES: Final = {"AVRO": "AVRO", "JSONSCHEMA": "JSON", "PROTOBUF": "PROTOBUF"}
"""Formats with a schema, and what the registry calls them."""
_COMPILED: Final = 1000
_COMPILED_BYTES: Final = 4_194_304
"""Of the texts; what is made of a text takes some times more."""


class SchemaChoice(NamedTuple):
    """What a request says of one schema; None for what it does not say."""

    format: str | None = None
    """Name of the format, in any case."""
    text: str | None = None
    id: int | None = None
    version: int | None = None
    subject: str | None = None
    """Instead of the one by the strategy."""
    references: tuple[Reference, ...] = ()
    """What the text refers to."""
    message: str | None = None
    """Full name of the message type to write, of a Protobuf schema with several; None for the first."""


_NO_SCHEMA: Final = SchemaChoice()[1:]


class SchemaRules(NamedTuple):
    """How schemas are found where a request leaves it open."""

    strategy: Literal["topic", "record", "topic_record"] = "topic"
    """What names the subject."""
    auto_register: bool = True
    """Whether a schema's text is registered when it is not there."""
    format_from_subject: bool = False
    """Whether the subject's newest schema, if any, decides the format when the request names none."""


_RULES: Final = SchemaRules()


class Writing(NamedTuple):
    """A codec for what is to be written, and the id of its schema if it has one."""

    codec: Codec
    schema_id: int | None = None


class Codecs:
    """Finds codecs, and keeps those that were compiled from a schema."""

    def __init__(self, registry: SchemaRegistry, *, plain_unions: bool = False) -> None:
        """Ask this registry; `plain_unions` is whether JSON has Avro's unions without the branch's name."""
        self._registry = registry
        self._plain_unions = plain_unions
        self._compiled: Kept[SchemaCodec] = Kept(_COMPILED, _COMPILED_BYTES)

    def needs_no_schema(self, choice: SchemaChoice, default_format: str, rules: SchemaRules = _RULES) -> bool:
        """Return whether `for_writing` would name a codec without asking anybody."""
        from_subject = choice.format is None and rules.format_from_subject
        return (choice.format or default_format).upper() in _PLAIN and not from_subject and choice[1:] == _NO_SCHEMA

    async def for_writing(
        self, choice: SchemaChoice, default_format: str, subject: str, rules: SchemaRules = _RULES
    ) -> Writing:
        """Return the codec that a request asks for.

        Args:
            choice: What the request says.
            default_format: The format when it names none.
            subject: The subject by the topic's name: `<topic>-key` or `<topic>-value`.
            rules: What the configuration says.

        Raises:
            InvalidRequest: No such format; or the subject takes its name from a schema, and none is given.
            SchemaConflict: The request names its schema in two ways.
            SchemaNotFound: The registry does not have it.
            SchemaInvalid: The text is no schema, or the registry refuses it.
            RegistryUnavailable: The registry is needed and does not answer.
        """
        name = format_name(choice.format or default_format)
        if choice.format is None and choice.text is not None:
            raise errors.SchemaWithoutFormat()
        # A schema named without a format is meant to be used, whatever the default format is.
        named = choice.id if choice.id is not None else choice.version
        if choice.format is None and named is None and rules.format_from_subject:
            with contextlib.suppress(errors.SchemaNotFound):
                return await self._writing(await self._registry.of_subject(choice.subject or subject), choice)
        if name in _PLAIN and (choice.format is not None or named is None):
            return Writing(_PLAIN[name])
        return await self._writing(await self._resolve(choice, name, subject, rules), choice)

    def for_reading(self, format_text: str) -> Reader:
        """Return what decodes stored bytes of a format.

        Raises:
            InvalidRequest: No such format.
        """
        name = format_name(format_text)
        return Reader(self, _PLAIN.get(name))

    async def load(self, schema_id: int) -> None:
        """Make a schema ready for `loaded`, if the registry has it and it is usable.

        Raises:
            RegistryUnavailable: It is not known here, and the registry does not answer.
        """
        with contextlib.suppress(errors.FormatError):
            await self._codec_of(await self._registry.by_id(schema_id))

    def loaded(self, schema_id: int) -> Codec | None:
        """Return the codec of a schema that was loaded lately."""
        return self._compiled.peek((schema_id, None))

    async def _writing(self, schema: RegisteredSchema, choice: SchemaChoice) -> Writing:
        return Writing(_Framed(schema.id, await self._codec_of(schema, choice.message)), schema.id)

    async def _resolve(self, choice: SchemaChoice, name: str, subject: str, rules: SchemaRules) -> RegisteredSchema:
        if choice.id is not None:
            if choice.version is not None:
                raise errors.SchemaConflict("give the schema by id or by version, not both")
            if choice.text is not None:
                raise errors.SchemaWithSchemaId()
            return await self._of_subject_by_id(choice, choice.id, subject, rules)
        if choice.version is not None:
            if choice.text is not None:
                raise errors.SchemaWithSchemaVersion()
            return await self._registry.of_subject(_subject(choice, subject, rules), choice.version)
        if choice.text is None:
            return await self._registry.of_subject(_subject(choice, subject, rules))
        schema_type, codec = _TYPES[name], None
        if choice.subject is None and rules.strategy != "topic":
            codec = await self._compile(schema_type, choice.text, choice.references, choice.message)
        subject = _subject(choice, subject, rules, codec)
        return await self._registry.register(
            subject, choice.text, schema_type, choice.references, create=rules.auto_register
        )

    async def _of_subject_by_id(
        self, choice: SchemaChoice, schema_id: int, subject: str, rules: SchemaRules
    ) -> RegisteredSchema:
        schema = await self._registry.by_id(schema_id)
        codec = None if rules.strategy == "topic" else await self._codec_of(schema, choice.message)
        subject = _subject(choice, subject, rules, codec)
        subjects = await self._registry.subjects_of(schema_id)
        if subject not in subjects:
            raise errors.SchemaNotFound(
                f"schema id {schema_id} is not registered under subject {subject}: "
                "name its subject (keySchemaSubject, valueSchemaSubject) or register it there"
            )
        return schema

    async def _codec_of(self, schema: RegisteredSchema, message: str | None = None) -> SchemaCodec:
        key = schema.id, message
        codec = self._compiled.use(key)
        if codec is None:
            codec = await self._compile(schema.type, schema.text, schema.references, message)
            self._compiled.put(key, codec, len(schema.text))
        return codec

    async def _compile(
        self, schema_type: str, text: str, references: tuple[Reference, ...], message: str | None
    ) -> SchemaCodec:
        texts = await self._registry.texts_of(references)
        return compile_schema(schema_type, text, texts, message, plain_unions=self._plain_unions)


class Reader:
    """Decodes stored bytes of one format into JSON text."""

    def __init__(self, codecs: Codecs, plain: Codec | None) -> None:
        """Decode by `plain`, or by the schema that the bytes name when there is none."""
        self._codecs = codecs
        self._plain = plain
        self.names_schemas = plain is None
        """Whether the bytes name their schema, so that `prepare` has something to do."""
        self._text = plain.text if isinstance(plain, JsonCodec) else self._decode_text

    async def prepare(self, payloads: Iterable[bytes | None]) -> None:
        """Fetch every schema that these bytes name; await it before `decode`. Cheap when all are known.

        Raises:
            RegistryUnavailable: A schema is not known here, and the registry does not answer; try again later.
        """
        if self.names_schemas:
            for schema_id in {schema_id_of(data) for data in payloads if data}:
                if schema_id is not None:
                    await self._codecs.load(schema_id)

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
        codec = self._codecs.loaded(schema_id)
        if codec is None:
            raise errors.DecodeError(
                f"the schema registry has no usable schema of id {schema_id}, which the bytes name"
            )
        return codec.decode(payload)

    def texts(self, payloads: Iterable[bytes | None]) -> list[str | None]:
        """Return what `decode` does for many, as text."""
        text = self._text
        return [None if data is None else text(data) for data in payloads]

    def _decode_text(self, data: bytes) -> str:
        return str(self.decode(data) or b"", "utf-8")


class _Framed:
    """Writes payloads of one schema with its id before them."""

    def __init__(self, schema_id: int, inner: Codec) -> None:
        self._header = header_of(schema_id)
        self._inner = inner

    def encode(self, text: bytes) -> bytes:
        return self._header + self._inner.encode(text)

    def decode(self, data: bytes) -> bytes:
        return self._inner.decode(unframe(data)[1])


def _subject(choice: SchemaChoice, subject: str, rules: SchemaRules, codec: SchemaCodec | None = None) -> str:
    if choice.subject is not None:
        return choice.subject
    if rules.strategy == "topic":
        return subject
    if codec is None or not codec.record_name:
        raise errors.InvalidRequest(
            f"subjects take their names from the schema (producer.subject_strategy: {rules.strategy}), and the request "
            "gives none that has a name: name the subject (keySchemaSubject, valueSchemaSubject), a schema id or a text"
        )
    topic = subject.rpartition("-")[0]
    return codec.record_name if rules.strategy == "record" else f"{topic}-{codec.record_name}"


def format_name(name: str) -> str:
    """Return a format's name in capitals; any case is taken.

    Raises:
        InvalidRequest: No such format.
    """
    found = name.upper()
    if found not in _PLAIN and found not in _TYPES:
        served = ", ".join([*_PLAIN, *_TYPES])
        raise errors.InvalidRequest(f"format {name[:40]!r} is not served: use one of {served}, in any case")
    return found
