"""Reading typed values out of a parsed function.yaml: any letter case, strict kinds, and messages with a place.

Unknown keys are warnings, because Nuclio ignores them and unmodified files must load; wrong values are errors.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from headrace.config.yaml_tree import Path, dotted
from headrace.errors import FunctionInvalid
from headrace.functions.durations import parse_duration

log = logging.getLogger(__name__)

_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


class Fields:
    """One mapping of the file, with the annotations that stand in for keys it lacks."""

    def __init__(
        self,
        found: Any,
        path: Path,
        places: Mapping[Path, str],
        annotations: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a mapping.

        Args:
            found: The mapping; None counts as empty.
            path: Where it is in the file.
            places: Path to `file:line`.
            annotations: Annotation keys to text; used by readers that are given an annotation's name.
        """
        self.path = path
        self._places = places
        if found is not None and not isinstance(found, dict):
            self._refuse(path, "should be a mapping of names to values")
        self._values = {str(name).lower(): (name, value) for name, value in (found or {}).items()}
        self._annotations = annotations or {}

    def below(self, name: str, annotations: Mapping[str, Any] | None = None) -> Fields:
        """Return the mapping under a key, empty when the key is absent."""
        path, value = self._find(name)
        return Fields(value, path, self._places, annotations)

    def items(self) -> list[tuple[str, Fields]]:
        """Return the mappings under every key, in the file's order."""
        return [(name, self.below(name)) for name, _ in self._values.values()]

    def plain(self) -> dict[str, Any]:
        """Return the values as they are, by their names as written."""
        return dict(self._values.values())

    def has(self, name: str, annotation: str = "") -> bool:
        """Whether the key or its annotation is there."""
        return self._value(name, annotation)[1] is not None

    def text(self, name: str, default: str = "", annotation: str = "") -> str:
        """Return text."""
        path, value = self._value(name, annotation)
        if value is None:
            return default
        if not isinstance(value, str):
            self._refuse(path, f"is {value!r}: write text, in quotes if it looks like a number")
        return value

    def choice(self, name: str, allowed: Collection[str], default: str, annotation: str = "") -> str:
        """Return one of the allowed words, which may be written in any letter case."""
        text = self.text(name, default, annotation)
        for word in allowed:
            if word.lower() == text.lower():
                return word
        near = difflib.get_close_matches(text.lower(), [word.lower() for word in allowed], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        return self.refuse(name, f"is {text!r}: {hint}write one of {', '.join(allowed)}", annotation)

    def number(self, name: str, default: int, least: int, most: int, annotation: str = "") -> int:
        """Return a whole number between two bounds, both inclusive."""
        path, value = self._value(name, annotation)
        if value is None:
            return default
        if path[:2] == ("metadata", "annotations") and isinstance(value, str):
            value = int(value) if value.lstrip("+-").isdecimal() else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(path, f"is {value!r}: write a whole number from {least} to {most}")
        if not least <= int(value) <= most:
            self._refuse(path, f"is {value}: write a number from {least} to {most}")
        return int(value)

    def switch(self, name: str, default: bool, annotation: str = "") -> bool:
        """Return true or false; annotations may use Go's words."""
        path, value = self._value(name, annotation)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        if path[:2] == ("metadata", "annotations") and value in _TRUE | _FALSE:
            return value in _TRUE
        return self._refuse(path, f"is {value!r}: write true or false")

    def duration(self, name: str, default: float, annotation: str = "", least: float = 0.0) -> float:
        """Return seconds of a Go duration."""
        path, value = self._value(name, annotation)
        if value is None or value == "":
            return default
        try:
            seconds = parse_duration(value if isinstance(value, str) else str(value))
        except ValueError:
            self._refuse(path, f"is {value!r}: write a number with a unit, such as 10s, 1m30s or 250ms")
        if seconds < least:
            self._refuse(path, f"is {value}: write {least:g}s or more")
        return seconds

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of text; empty when the key is absent."""
        path, value = self._find(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._refuse(path, f"is {value!r}: write a list of text, such as [a, b]")
        return tuple(value)

    def mappings(self, name: str) -> list[Fields]:
        """Return a list of mappings; empty when the key is absent."""
        path, value = self._find(name)
        if value is not None and not isinstance(value, list):
            self._refuse(path, "should be a list")
        return [Fields(item, (*path, index), self._places) for index, item in enumerate(value or [])]

    def warn_unknown(self, known: Collection[str]) -> None:
        """Log each key that nobody reads, with the nearest one that somebody does."""
        lower = {name.lower(): name for name in known}
        for name, (written, _) in self._values.items():
            if name not in lower:
                near = difflib.get_close_matches(name, lower, 1)
                hint = f"; did you mean {lower[near[0]]}?" if near else ""
                path = (*self.path, written)
                log.warning("%s: %s is not known and has no effect%s", self._place(path), dotted(path), hint)

    def warn_without_effect(self, names: Collection[str]) -> None:
        """Log keys of Nuclio's that are set and that Headrace does not follow."""
        found = [str(written) for name, (written, _) in self._values.items() if name in {n.lower() for n in names}]
        if found:
            text = ", ".join(found)
            log.warning("%s: %s: without effect in Headrace: %s", self._place(self.path), dotted(self.path), text)

    def refuse(self, name: str, sentence: str, annotation: str = "") -> NoReturn:
        """Raise for a key, naming file, line, path and what to write."""
        self._refuse(self._value(name, annotation)[0], sentence)

    def _find(self, name: str) -> tuple[Path, Any]:
        written, value = self._values.get(name.lower(), (name, None))
        return (*self.path, written), value

    def _value(self, name: str, annotation: str) -> tuple[Path, Any]:
        """The key's value, else its annotation's: attributes beat annotations."""
        path, value = self._find(name)
        if value is None and annotation and (key := f"nuclio.io/{annotation}") in self._annotations:
            return ("metadata", "annotations", key), self._annotations[key]
        return path, value

    def _place(self, path: Path) -> str:
        while path and path not in self._places:
            path = path[:-1]
        return self._places.get(path, "function.yaml")

    def _refuse(self, path: Path, sentence: str) -> NoReturn:
        where = f"{self._place(path)}: {dotted(path)}" if path else self._place(path)
        raise FunctionInvalid(f"{where} {sentence}")
