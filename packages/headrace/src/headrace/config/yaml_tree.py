"""YAML text to plain values, with the line of every key. Error messages of the configuration name these lines.

Safe against hostile files: no tags that build objects; limits on the size, the depth, and the number of values with
all aliases resolved.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import HeadraceError

KeyPath = tuple[str | int, ...]
"""The keys of mappings and indexes of lists that lead to a value, from the top."""

MAX_BYTES = 1_048_576
_MAX_VALUES = 100_000
_MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"
_TYPED = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float"))
_TEXT = frozenset(_TAG + kind for kind in ("str", "timestamp", "merge", "value"))
_constructor = yaml.SafeLoader("")
_LINE = re.compile(r"([^:]*):(\d+): ")


class Problems:
    """Problems of a file: location and sentence, in the order found."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.locations: dict[KeyPath, str] = {}
        """The location (`file:line`) of each path of the file."""
        self.ignored: frozenset[str] = frozenset()
        """Sections of the file whose problems do not matter."""

    def add(self, location: str, path: KeyPath, sentence: str) -> None:
        if not self.ignored.intersection(path[:1]):
            self.found.append(": ".join(part for part in (location, dotted(path), sentence) if part))

    def report(self, path: KeyPath, sentence: str) -> None:
        """Add a problem at a path of the file."""
        self.add(self.location_of(path), path, sentence)

    def located(self, path: KeyPath, sentence: str, location: str = "") -> str:
        """Return a sentence about a path of the file, with the location, or another one, and the path before it."""
        return ": ".join(part for part in (location or self.location_of(path), dotted(path), sentence) if part)

    def location_of(self, path: KeyPath) -> str:
        """Return the location of a path, or of the nearest key around it."""
        while path and path not in self.locations:
            path = path[:-1]
        return self.locations.get(path, "")

    @property
    def ordered(self) -> list[str]:
        """The problems by their file and line; those without a line come last."""

        def line(text: str) -> tuple[float, str, float]:
            found = _LINE.match(text)
            return (0, found[1], int(found[2])) if found else (1, "", 0)

        return sorted(self.found, key=line)


def dotted(path: KeyPath) -> str:
    """Return a path as people write it: `reactive_consumers.orders.topics[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_text(path: Path, error: type[HeadraceError], advice: str) -> str:
    """Return the text of a configuration file, cut off if it is too large.

    Raises:
        HeadraceError: The file cannot be read, with the advice, or is not UTF-8; of the given class.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}. {advice}") from cause
    except UnicodeDecodeError as cause:
        line = cause.object.count(b"\n", 0, cause.start) + 1
        raise error(f"{path}:{line}: is not UTF-8 text (byte {cause.start}): save it as UTF-8") from cause


def read_tree(text: str, name: str, problems: Problems) -> Any:
    """Return the values of a YAML text; `problems` gets the location of each path.

    Keys without a value are omitted, so a section whose lines are all commented out has its defaults. Values with a
    problem are omitted too.
    """
    if len(text.encode()) > MAX_BYTES:
        problems.add(name, (), f"is larger than {MAX_BYTES} bytes, so it is not a configuration file: name another")
        return {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return _TreeWalk(name, problems).value(root, ()) if root else {}
    except yaml.MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        reason = " ".join(part for part in (cause.context, cause.problem) if part)
        problems.add(f"{name}:{mark.line + 1 if mark else 1}", (), f"is not YAML: {reason}. Correct this line")
        return {}
    except yaml.YAMLError as cause:
        problems.add(name, (), f"is not YAML: {str(cause).splitlines()[0]}")
        return {}
    except (_TooBig, RecursionError):
        problems.add(name, (), "is nested too deeply or its aliases repeat too much: write the values out")
        return {}


class _TooBig(Exception):
    """The tree is larger than any configuration."""


class _TreeWalk:
    """One pass over the parsed nodes."""

    def __init__(self, name: str, problems: Problems) -> None:
        self._name = name
        self._locations = problems.locations
        self._problems = problems
        self._values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES or len(path) > _MAX_DEPTH:
            raise _TooBig
        self._locations.setdefault(path, self._location(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._problems.add(self._location(key), path, "has a key that is not text: write a plain name")
                continue
            below = (*path, key.value)
            if key.value in found:
                first = self._locations[below]
                self._problems.add(self._location(key), below, f"is written twice (first at {first}): keep one")
                continue
            self._locations[below] = self._location(key)
            value = self.value(child, below)
            if value is not None:
                found[key.value] = value
        return found

    def _scalar(self, node: yaml.Node, path: KeyPath) -> Any:
        if node.tag in _TEXT:
            return node.value
        if node.tag not in _TYPED:
            self._problems.add(self._location(node), path, f"has the tag {node.tag}: remove it, write the plain value")
            return None
        construct: Callable[[yaml.Node], Any] = _constructor.construct_object
        try:
            return construct(node)
        except (ValueError, yaml.YAMLError):
            sentence = "is not a valid number: correct it, or put it in quotes if it is text"
            self._problems.add(self._location(node), path, sentence)
            return None

    def _location(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"
