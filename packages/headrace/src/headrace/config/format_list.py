"""The list of formats, `formats/formats.csv`. To add a format, add a row there and a module in the same folder.

The list is read here, because the configuration must not import codecs. Function workers import this module, so it
must stay light.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple


class Format(NamedTuple):
    """One row."""

    name: str
    """In lower case. Each format with a schema has an extra of the package with this name."""
    code: int
    """The documented number in a request."""
    light_4j_code: int
    """The number in a request in light-4j's code."""
    codec: str
    """The class; in the module of `headrace.formats` with the format's name, or in `plain`."""
    schema_type: str
    """The schema registry's name for its schemas; empty if it needs none."""
    media_type: str
    """Media type of a body that is one value. If it is not JSON, the value in JSON is a string."""


with (Path(__file__).parents[1] / "formats" / "formats.csv").open(newline="") as _file:
    _, *_lines = csv.reader(_file)
_rows = [Format(name, int(code), int(other), *rest) for name, code, other, *rest in _lines]
FORMATS: Final[Mapping[str, Format]] = {row.name: row for row in _rows}
SCHEMA_TYPES: Final = {row.name: row.schema_type for row in _rows if row.schema_type}
"""Formats with a schema, and the schema registry's name for each."""
ANY_SCHEMA: Final = next(iter(SCHEMA_TYPES))
"""A format with a schema, to read bytes that name their schema: that one says which format they are of."""
STRINGS: Final = frozenset(row.name for row in _rows if row.media_type != "application/json")
"""The formats whose values are strings in JSON."""
