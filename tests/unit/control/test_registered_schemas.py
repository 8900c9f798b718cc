"""Reads of the schema registry: what of them may fail, and how many there are at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.kafka import SchemaRegistryConfig
from headrace.control.cluster import registered_schemas
from headrace.control.cluster.registered_schemas import RegisteredSchemas
from headrace.errors import RegistryUnavailable, SchemaNotFound, TooManyRequests
from headrace.formats.registry import RegisteredSchema, SchemaRegistry, SubjectVersion
from headrace.testing import ManualClock


async def test_a_subject_that_cannot_be_read_does_not_hide_the_others() -> None:
    """One that is deleted meanwhile is left out; without a registry the sentence names the setting."""
    failures = {"broken": RegistryUnavailable("HTTP 500"), "gone": SchemaNotFound("gone")}

    async def read(subject: str) -> Any:
        if subject in failures:
            raise failures[subject]
        return SubjectVersion(3, RegisteredSchema(7, "AVRO", '"int"')) if subject else ["gone", "good", "broken"]

    async def refuse(_: str) -> Any:
        raise RegistryUnavailable("HTTP 403")

    registry: Any = SimpleNamespace(subjects=lambda: read(""), read_version=read, compatibility_of=refuse)
    found = (await RegisteredSchemas(registry).subjects(bool, 0, 9)).subjects
    assert [(one.subject, one.version, one.problem) for one in found] == [
        ("broken", 0, "HTTP 500"),
        ("good", 3, "HTTP 403"),
    ]
    missing = SchemaRegistry(SchemaRegistryConfig(url="http://127.0.0.1:1"), ManualClock())
    with pytest.raises(RegistryUnavailable, match=r"schema_registry\.url"):
        await RegisteredSchemas(missing).subjects(bool, 0, 9)
    await missing.close()


async def test_reads_are_few_at_a_time_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight requests to the registry, four views, and a limit of time for each."""
    monkeypatch.setattr(registered_schemas, "_LIMIT_SECONDS", 0.05)
    names = [f"{number:02}" for number in range(50)]
    running: list[str] = []

    async def hang(subject: str) -> Any:
        running.append(subject)
        assert len(running) <= 8
        try:
            await asyncio.Event().wait()
        finally:
            running.remove(subject)

    registry: Any = SimpleNamespace(subjects=lambda: asyncio.sleep(0, names), read_version=hang)
    schemas = RegisteredSchemas(registry)
    found = await asyncio.gather(*(schemas.subjects(bool, 0, 50) for _ in range(5)), return_exceptions=True)
    assert [type(one) for one in found] == [RegistryUnavailable] * 4 + [TooManyRequests]
