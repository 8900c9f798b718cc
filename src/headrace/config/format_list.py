"""The one list of formats, `formats/formats.csv`: a new format is a row there and a module in the same folder.

The list is read here, because the configuration may not import codecs. Function workers import this module, so it must
stay light.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple


class Format(NamedTuple):
    """One row."""

    name: str
    """In small letters. An extra of the package has the name of each format that needs a schema."""
    code: int
    """Its number in a request, as documented."""
    light_4j_code: int
    """Its number in a request, as in light-4j's code."""
    codec: str
    """Class in the module of `headrace.formats` that has the name of the format; in `plain` without a schema."""
    schema_type: str
    """The schema registry's name for its schemas; empty if it needs none."""
    media_type: str
    """Of a body that is one value. If it is not JSON, the value in JSON is a string."""


with (Path(__file__).parents[1] / "formats" / "formats.csv").open(newline="") as _file:
    _, *_lines = csv.reader(_file)
_rows = [Format(name, int(code), int(other), *rest) for name, code, other, *rest in _lines]
FORMATS: Final[Mapping[str, Format]] = {row.name: row for row in _rows}
SCHEMA_TYPES: Final = {row.name: row.schema_type for row in _rows if row.schema_type}
"""The formats with a schema, and the schema registry's name for each."""
STRINGS: Final = frozenset(row.name for row in _rows if row.media_type != "application/json")
"""The formats whose values are strings in JSON."""
