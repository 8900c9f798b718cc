"""Tables of the tests: a YAML file beside a test file holds its tables and texts by name."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def _tables(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def table(test: str, name: str) -> Any:
    """What is called `name` in the YAML file that has the name of the file `test`; KeyError if nothing is."""
    return _tables(Path(test).with_suffix(".yaml"))[name]
