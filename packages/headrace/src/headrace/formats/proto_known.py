"""Protobuf files that a schema may import without a reference, as with Confluent's registry and serializers."""

import re
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FileDescriptorProto

_IN_LIBRARIES: Final = re.compile(r"google/(protobuf|type)/[a-z_]+\.proto")
_OPTIONS: Final = ("file", "message", "field", "enum", "enum_value")
_CONFLUENT: Final = {
    "confluent/meta.proto": 'import "google/protobuf/descriptor.proto"; package confluent;'
    "message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; repeated Rule rules = 4;}"
    "message Rule { string name = 1; string doc = 2; string expr = 3; string sql = 4; }"
    + "".join(
        f"extend google.protobuf.{name.title().replace('_', '')}Options {{ Meta {name}_meta = 1088; }}"
        for name in _OPTIONS
    ),
    "confluent/type/decimal.proto": "package confluent.type;"
    "message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }",
    "confluent/type/variant.proto": "package confluent.type; message Variant { bytes metadata = 1; bytes value = 2; }",
    "confluent/types/decimal.proto": 'import public "confluent/type/decimal.proto";',
}
"""Connect's and Debezium's converters write the first two; the last is the older name."""


def known_texts(sources: Iterable[str]) -> dict[str, str]:
    """Return the source texts of known files that these texts may import, directly or by one another."""
    if not any("confluent/" in source for source in sources):
        return {}
    return {name: f'syntax = "proto3"; {text}' for name, text in _CONFLUENT.items()}


def is_known(name: str) -> bool:
    """Return whether a library has this file."""
    return _IN_LIBRARIES.fullmatch(name) is not None


def known_folders() -> list[str]:
    """Return folders in which the compiler finds known files."""
    spec = find_spec("google.type")
    folders = spec.submodule_search_locations if spec else None
    return [folder.removesuffix("/google/type") for folder in folders or ()]


def known_descriptor(name: str) -> FileDescriptorProto | None:
    """Return the descriptor of a known file from the library that has it."""
    if not is_known(name):
        return None
    try:
        module: Any = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    except ImportError:
        return None
    return FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
