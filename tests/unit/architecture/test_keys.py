"""What code alone sets in a section has a sentence for files that still have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

import pytest

from headrace.config.explain import moved
from headrace.config.model import HeadraceConfig
from headrace.config.section import Section
from headrace_pipelines.spec import PipelineSpec


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


@pytest.mark.parametrize("model", [HeadraceConfig, PipelineSpec])
def test_what_a_user_cannot_set_has_a_sentence_for_old_files(model: type[Section]) -> None:
    """It says what holds now."""
    found = [*walk(model, constants=True)]
    assert len(found) > 10
    assert [path for path in found if not moved(path)] == []
