"""How many keys the files of users have: each path that a user can set, counted once for each kind of its section.

A section is no key, and neither is a constant, which only code sets. A key of a function file that is Nuclio's and
does nothing in Headrace is not counted: a warning names it, and nobody needs to know it. It is also no key if it only
holds other keys. A row of the table with several keys has as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest

from headrace.config.explain import moved
from headrace.config.model import HeadraceConfig
from headrace.config.section import Section
from headrace.functions.function_keys import KEYS
from headrace.pipelines.spec import PipelineSpec

MAPPINGS = {
    *("metadata", "spec", "annotations", "triggers", "build", "env", "volumes", "loggerSinks", "attributes", "batch"),
    *("valueFrom", "secretKeyRef", "configMapKeyRef", "volume", "secret", "volumeMount", "tls", "sasl", "oauth"),
}
"""Keys of a function file that hold other keys."""


def sections_of(kind: Any) -> list[type[Section]]:
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind]
    return [section for part in get_args(kind) for section in sections_of(part)]


def is_map(kind: Any) -> bool:
    return get_origin(kind) is dict or (get_origin(kind) is not list and any(map(is_map, get_args(kind))))


def walk(model: type[Section], *, constants: bool, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each setting or constant; one comes again for each kind of source or sink that has it."""
    for name, field in model.model_fields.items():
        path = *at, field.alias or name
        below = sections_of(field.annotation) if name not in model.internal else []
        for section in below:
            yield from walk(section, constants=constants, at=(*path, "<name>") if is_map(field.annotation) else path)
        if not below and (name in model.internal) == constants:
            yield path


def function_keys() -> list[str]:
    """Return the keys that have an effect, with their mapping."""
    found = [key for key in KEYS if key.where != "kind" and not key.becomes.startswith(("nothing", "refused"))]
    return [f"{key.where}.{key.key}" for key in found if key.key not in MAPPINGS]


FILES = {
    "headrace.yaml": (lambda: set(walk(HeadraceConfig, constants=False)), 185),
    "pipeline": (lambda: [*walk(PipelineSpec, constants=False)], 120),
    "function": (function_keys, 110),
}


@pytest.mark.parametrize("file", FILES)
def test_a_file_has_no_more_keys_than_its_bound(file: str) -> None:
    """The message has the number now."""
    keys, bound = FILES[file]
    found = len(keys())
    assert 0 < found <= bound, f"{file}: {found} of {bound}"


@pytest.mark.parametrize("model", [HeadraceConfig, PipelineSpec])
def test_what_a_user_cannot_set_has_a_sentence_for_old_files(model: type[Section]) -> None:
    """It says what holds now."""
    found = [*walk(model, constants=True)]
    assert len(found) > 10
    assert [path for path in found if not moved(path)] == []
