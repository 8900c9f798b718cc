"""The keys of a function file: one table, which reads the file and makes the reference page.

`becomes` says what a key does. Keys that are "nothing" are named in one warning for their mapping. "nothing in Nuclio
either" is silent.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "nuclio.io/kafka-"
IGNORED: Final = "nothing"
_SILENT: Final = "nothing in Nuclio either"
_OF_LOGIN: Final = {"login": "attributes", "login.tls": "tls", "login.sasl": "sasl", "login.sasl.oauth": "oauth"}
"""Parts of the table about TLS and login, and the mapping that has their keys."""


class FunctionKey(NamedTuple):
    """A key, and what Headrace does with it."""

    where: str
    """The mapping that has it; `login` and parts of it for TLS and login of a Kafka trigger."""
    key: str
    annotation: str
    """The annotation that may replace the key, without `nuclio.io/kafka-`; empty if there is none."""
    type: str
    """Only of keys that no model has."""
    becomes: str

    @property
    def is_read(self) -> bool:
        return self.becomes not in (IGNORED, _SILENT)


with Path(__file__).with_suffix(".csv").open(newline="") as _file:
    KEYS: Final = [FunctionKey(**row | {"key": key}) for row in csv.DictReader(_file) for key in row["key"].split()]
    """A row of the file may have several keys."""

LOGIN: Final[Mapping[str, FunctionKey]] = {
    f"{key.where}.{key.key}".removeprefix("login."): key for key in KEYS if key.where in _OF_LOGIN
}
"""Keys of TLS and login by their path in the attributes of a Kafka trigger."""
ANNOTATED: Final = [key for key in KEYS if key.annotation and key.where in ("trigger", "attributes")]
"""Keys of a Kafka trigger that an annotation may replace."""
OTHER_ANNOTATIONS: Final[Mapping[str, str]] = {key.key: key.annotation for key in KEYS if key.where == "annotation"}
"""Annotations without the prefix, and the name with the prefix that each means."""
OTHER_KINDS: Final[Sequence[str]] = [key.key for key in KEYS if key.where == "kind"]
"""Further kinds of triggers of Nuclio."""

_MAPPINGS: Final[dict[str, dict[str, FunctionKey]]] = {}
for _key in KEYS:
    _MAPPINGS.setdefault(_OF_LOGIN.get(_key.where, _key.where), {})[_key.key] = _key
_MAPPINGS["annotations"] = {key.annotation: key for key in (*ANNOTATED, *LOGIN.values())}


def add_mapping(mapping: str, keys: Sequence[FunctionKey]) -> None:
    """Add the keys of a mapping, unless the table has them already."""
    if mapping not in _MAPPINGS:
        _MAPPINGS[mapping] = {key.key: key for key in keys}
        KEYS.extend(keys)


def keys_of(mapping: str) -> Mapping[str, FunctionKey]:
    """Return the known keys of a mapping by their names; of `annotations` those behind the prefix."""
    return _MAPPINGS[mapping]


def read_keys_of(mapping: str) -> Sequence[str]:
    """Return the keys of a mapping for which a misspelling is an error: those that Headrace reads."""
    return [name for name, key in _MAPPINGS[mapping].items() if key.is_read]
