"""Patterns of topic names: linear in time whatever they are, and over whole names.

They are matched by the engine that pydantic brings, Rust's `regex`, which like RE2 never tracks back; Python's own
needs seconds for a bad pattern (reliability.md, row S2). Kafka's client never sees a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema


def compile_pattern(text: str) -> Callable[[str], bool]:
    """Return whether a name fits as a whole.

    Raises:
        ValueError: It is no pattern, or one that takes too much memory.
    """
    try:
        _engine(text)  # alone first: "a)|(b" is none
        return _engine(f"^(?:{text})$").isinstance_python
    except SchemaError as cause:
        why = str(cause).strip().splitlines()[-1].strip().removeprefix("error: ")
        raise ValueError(f"is no pattern: {why}. Write one such as metrics\\..* (RE2's syntax)") from None


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
