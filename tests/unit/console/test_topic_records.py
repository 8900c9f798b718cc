"""Records of a topic as the console shows them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

from headrace_console.topic_records import contains, read_slice


async def test_records_are_shown_in_the_formats_that_the_api_found() -> None:
    """One request; a value of a schema is JSON, and the others are the texts that the API gives."""
    place = {"topic": "t", "partition": 0, "timestamp": 5, "headers": {"X-Correlation-Id": "t:0:0"}}
    found = [
        {**place, "offset": 0, "key": "k", "keyFormat": "string", "value": {"n": "é"}, "valueFormat": "schema 2"},
        {**place, "offset": 1, "keyFormat": "null", "value": "/w==", "valueFormat": "binary"},
        {**place, "offset": 2, "key": '{"a": 1.10}', "keyFormat": "string", "valueFormat": "null"},
    ]
    get = AsyncMock(return_value={"records": found, "next_offset": 3, "end_offset": 9})
    part = await read_slice(cast(Any, SimpleNamespace(get=get)), "t", 0, 0, 3)
    shown = [(one.key, one.key_format, one.value, one.value_format) for one in part.records]
    assert shown == [
        ("k", "string", '{"n": "é"}', "schema 2"),
        ("", "null", "/w==", "binary"),
        ('{"a": 1.10}', "string", "", "null"),
    ]
    assert (part.following, part.end, get.await_args.args[1]["format"]) == (3, 9, "auto")  # type: ignore[union-attr]
    assert (part.records[0].headers, contains(part.records[0], "É")) == ([], True)
