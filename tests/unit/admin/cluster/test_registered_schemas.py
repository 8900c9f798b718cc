"""Reads of the schema registry: what of them may fail, and how many there are at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.admin.cluster import registered_schemas
from headrace.errors import RegistryUnavailable, SchemaNotFound, TooManyRequests
from headrace.formats.registry import RegisteredSchema, SubjectVersion

FOUND = {"a": RegistryUnavailable("HTTP 500"), "b": SchemaNotFound(), "c": RegisteredSchema(7, "AVRO", '"int"')}


async def test_reads_fail_alone_are_few_at_a_time_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read of a subject hides no other one; eight requests and four views at a time; a limit of time."""
    monkeypatch.setattr(registered_schemas, "_LIMIT_SECONDS", 0.05)
    running: list[str] = []

    async def read(subject: str) -> Any:
        running.append(subject)
        try:
            found = FOUND[subject] if subject in FOUND else await asyncio.sleep(1000)
        finally:
            assert len(running) <= 8
            running.remove(subject)
        if isinstance(found, Exception):
            raise found
        return SubjectVersion(3, found)

    def view(names: Any) -> Any:
        registry: Any = SimpleNamespace(subjects=lambda: asyncio.sleep(0, names), read_version=read)
        registry.compatibility_of = lambda _: read("a")
        return registered_schemas.RegisteredSchemas(registry).subjects

    found = (await view([*FOUND])(bool, 0, 9)).subjects
    assert [(one.version, one.problem) for one in found] == [(0, "HTTP 500"), (3, "HTTP 500")]
    hanging = view([f"hangs-{number}" for number in range(50)])
    outcomes = await asyncio.gather(*(hanging(bool, 0, 50) for _ in range(5)), return_exceptions=True)
    assert [*map(type, outcomes)] == [RegistryUnavailable] * 4 + [TooManyRequests]
