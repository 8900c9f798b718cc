"""Where a group resumes if its backend stores the offsets: with a client that responds from a list."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition
from headrace.sidecar.reactive.client import get_offset
from yaml_table import table

EPOCHS = {TopicPartition("a.b", 0): 7, TopicPartition("c", 12): 8}


class Client:
    url = "http://b"

    def __init__(self, *responses: tuple[int, bytes]) -> None:
        self.paths: list[str] = []
        self._responses = list(responses)

    async def get(self, path: str) -> Any:
        self.paths.append(path)
        status, body = self._responses.pop(0)
        return SimpleNamespace(status=status, body=body)


def ask(client: Any, partition: TopicPartition) -> int | None:
    return asyncio.run(get_offset(client, "/offsets", "g & h", partition, EPOCHS[partition]))


def test_each_partition_has_a_request_with_its_epoch() -> None:
    """Null is none; further fields are ignored."""
    client = Client((200, b'{"offset": 3, "more": 1}'), (200, b'{"offset": null}'))
    assert [ask(client, partition) for partition in EPOCHS] == [3, None]
    assert client.paths == [
        "/offsets?group=g+%26+h&topic=a.b&partition=0&epoch=7",
        "/offsets?group=g+%26+h&topic=c&partition=12&epoch=8",
    ]


@pytest.mark.parametrize(("status", "body", "says"), table(__file__, "anything_else_is_not_an_offset"))
def test_anything_else_is_not_an_offset(status: int, body: str, says: str) -> None:
    """Nothing is guessed: another offset would lose or repeat records."""
    with pytest.raises(DestinationUnavailable, match=says):
        ask(Client((status, body.replace("DEEP", "[" * 60_000).encode())), TopicPartition("c", 12))


@pytest.mark.parametrize(("settings", "is_taken"), table(__file__, "one_offset_needs_records_that_end_one_after"))
def test_one_offset_needs_records_that_end_one_after_the_other(settings: dict[str, Any], is_taken: bool) -> None:
    """Else the store would pass a record that is still being tried, and drop it when it comes again."""
    mode = settings.pop("mode", "results")
    backend = {"url": "http://localhost", "offsets_path": "/offsets", "mode": mode}
    reactive = {"topics": ["t"], "group": "g", "backend": backend, **settings}
    if is_taken:
        ReactiveConsumerConfig.model_validate(reactive)
        return
    with pytest.raises(ValueError, match="records must be completed one after the other"):
        ReactiveConsumerConfig.model_validate(reactive)
