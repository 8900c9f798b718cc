"""Patterns of topic names: linear in time whatever they are, and over whole names.

They are matched by the engine that pydantic brings, Rust's `regex`, which like RE2 never tracks back; Python's own
needs seconds for a bad pattern (reliability.md, row S2). Kafka's client never sees a pattern.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Final

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

_MAX_REPEATS: Final = 250
"""About the length of a topic's name."""
_COUNT: Final = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_CLASSES: Final = {
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "d": "[0-9]",
    "D": "[^0-9]",
    "s": r"[\t-\r ]",
    "S": r"[^\t-\r ]",
}


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Return whether a name fits as a whole.

    Raises:
        ValueError: It is no pattern, or one that takes too much memory.
    """
    text = _ESCAPE.sub(_ascii, text)
    if math.prod(max(int(least), int(most or 0), 1) for least, most in _COUNT.findall(text)) > _MAX_REPEATS:
        raise ValueError(
            f"is no pattern: repeats a part more than {_MAX_REPEATS} times. Write one such as metrics\\..*"
        )
    try:
        _engine(text)  # alone first: "a)|(b" is none
        return _engine(f"^(?:{text})$").isinstance_python
    except SchemaError as cause:
        why = str(cause).strip().splitlines()[-1].strip().removeprefix("error: ")
        raise ValueError(f"is no pattern: {why}. Write one such as metrics\\..* (RE2's syntax)") from None


def _ascii(escape: re.Match[str]) -> str:
    """Return an escape in the alphabet of topic names; with all of Unicode a pattern takes 100 times as long."""
    if escape[1] in "pP":
        raise ValueError("is no pattern: topics have ASCII letters only. Write one such as [A-Za-z]+ in place of \\p")
    return _CLASSES.get(escape[1], escape[0])


def fits_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return whether a name fits one of these patterns."""
    fits = [compile_pattern(text) for text in patterns]
    return lambda name: any(fit(name) for fit in fits)


def _engine(pattern: str) -> SchemaValidator:
    return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))


def _checked(text: str) -> str:
    compile_pattern(text)
    return text


TopicPattern = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_checked)]
