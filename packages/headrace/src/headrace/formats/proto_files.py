"""Compiles Protobuf schemas to descriptors, with protoc as a library instead of a process."""

import ast
import base64
import itertools
import tempfile
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError as ProtobufDecodeError
from grpc_tools.protoc import _protoc_compiler

from headrace.errors import SchemaInvalid
from headrace.formats.proto_known import is_known, known_descriptor, known_folders, known_texts

_MAIN: Final = "headrace-schema.proto"
_DEEPEST: Final = 100
_LARGEST_BYTES: Final = 1_048_576


def parse_proto(text: str, references: Mapping[str, str]) -> Any:
    """Return the file descriptor of a schema, in a new pool.

    Args:
        text: Source text, or a serialized file descriptor in base64, which some clients register.
        references: The same of files that it may import, by their names in the imports.

    Raises:
        SchemaInvalid: The text is not a valid schema, or imports an unknown file.
    """
    found: dict[str, FileDescriptorProto] = {}
    texts: dict[str, str] = {}
    for name, source in {**references, _MAIN: text}.items():
        file = _deserialize(name, source)
        if file:
            found[name] = file
        else:
            texts[name] = source
    imports = [name for file in found.values() for name in file.dependency]
    texts = {
        name: known for name, known in known_texts([*imports, *texts.values()]).items() if name not in found
    } | texts
    for file in _compile(texts):
        if file.name in texts or is_known(file.name):  # the compiler also finds files of other libraries
            found.setdefault(file.name, file)
    pool = DescriptorPool()
    try:
        _add(pool, _MAIN, found, set())
        return pool.FindFileByName(_MAIN)
    except (TypeError, KeyError, RecursionError) as cause:
        raise SchemaInvalid(f"not a valid Protobuf schema: {str(cause)[:500]}") from cause


def _deserialize(name: str, source: str) -> FileDescriptorProto | None:
    try:
        file = FileDescriptorProto.FromString(base64.b64decode(source, validate=True))
    except (ValueError, ProtobufDecodeError):
        return None  # source text: its spaces are not base64
    file.name = name
    return file if source else None


def _add(pool: DescriptorPool, name: str, found: Mapping[str, FileDescriptorProto], added: set[str]) -> None:
    if name in added:
        return
    added.add(name)
    file = found.get(name) or known_descriptor(name)
    if file is None:
        raise SchemaInvalid(f"the Protobuf schema imports {name}, which is not among its references")
    for imported in file.dependency:
        _add(pool, imported, found, added)
    pool.Add(file)


def _compile(texts: Mapping[str, str]) -> Iterable[FileDescriptorProto]:
    for name, text in texts.items():
        _check(name, text)
    folders = [str(files("grpc_tools") / "_proto"), *known_folders()]
    with tempfile.TemporaryDirectory(prefix="headrace-proto-") as folder:
        for name, text in texts.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name in texts:
            try:
                # Not main() of protoc, which prints errors instead of raising them.
                made = _protoc_compiler.get_protos(name.encode(), [each.encode() for each in (folder, *folders)])
            except _protoc_compiler.ProtocErrors as cause:
                raise SchemaInvalid(f"not a valid Protobuf schema: {_explain(cause)}") from cause
            yield from (file for _, code in made for file in _descriptors_in(code))


def _check(name: str, text: str) -> None:
    """Refuse names outside the folder, and texts that take the compiler seconds."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not 0 < len(name) <= 200 or not name.isprintable():
        raise SchemaInvalid(f"{name[:60]!r} is not a valid file name for a reference of a Protobuf schema")
    steps = (1 if char == "{" else -1 for char in text if char in "{}")
    if len(text) > _LARGEST_BYTES or max(itertools.accumulate(steps), default=0) > _DEEPEST:
        raise SchemaInvalid(
            f"the Protobuf schema{'' if name == _MAIN else ' ' + name} is larger than {_LARGEST_BYTES} bytes "
            f"or nested deeper than {_DEEPEST} levels"
        )


def _explain(cause: Any) -> str:
    """Return the first error of the compiler, which counts lines from 0."""
    first = cause.errors()[0]
    name, line = first.filename.decode(), first.line + 1
    position = f"line {line}" if name == _MAIN else f"{name} line {line}" if line else name
    return f"{position}: {first.message.decode(errors='replace')[:300]}"


def _descriptors_in(code: bytes) -> Iterable[FileDescriptorProto]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            yield FileDescriptorProto.FromString(ast.literal_eval(node.args[0]))
