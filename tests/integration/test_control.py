"""Steering consumers that run: over HTTP, on one process and on two, through rebalances and restarts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from headrace.cli.api import Api
from headrace.errors import HeadraceError
from headrace.testing import Answer, HeadraceProcess


@pytest.fixture
def push(site: Any, headrace: Any, backend: Any) -> Callable[..., HeadraceProcess]:
    """Start a process of one deployment that pushes a topic to the backend; each call adds one."""
    table = f"_headrace-control-{uuid.uuid4().hex[:12]}"

    def start(topic: str, *, more: Any = None, **settings: Any) -> HeadraceProcess:
        consumer = {
            "topics": [topic],
            "group": f"{topic}-push",
            "backend": {"url": backend.url},
            "consumer": {"session_timeout_seconds": 6},
            **settings,
        }
        config = {**site.config, "control": {"topic": table}, "reactive_consumers": {"push": consumer}, **(more or {})}
        return headrace(config)

    return start


CONSUMER = "/adm/reactive-consumers/push"


def offsets(records: list[dict[str, Any]]) -> list[int]:
    return [record["offset"] for record in records]


def test_each_command_on_one_process(site: Any, topic: Any, push: Any, backend: Any) -> None:
    """Pause, seek back while paused, resume, skip, and settings; the status says each."""
    name = topic()
    site.write_json(name, *range(10))
    process = push(name)
    api = Api(process.url)
    site.wait_committed(f"{name}-push", name, 10)
    paused = api.post(f"{CONSUMER}/pause", {"reason": "the database is moved"})
    assert paused["paused"]["reason"] == "the database is moved"
    assert paused["why"].startswith("paused by somebody unnamed since ")
    sought = api.post(f"{CONSUMER}/seek", {"offset": 4})
    assert not sought["pending"]
    assert [(one["outcome"], one["cameFrom"], one["offset"]) for one in sought["results"]] == [("sought", 10, 4)]
    assert site.committed(f"{name}-push")[(name, 0)] == 4
    assert len(backend.accepted) == 10
    skipped = api.post(f"{CONSUMER}/skip", {"partition": 0, "offset": 6, "reason": "it is no order"})
    assert skipped["results"][0]["outcome"] in ("skipped", "will be skipped")
    changed = api.patch(f"{CONSUMER}/settings", {"maxRecords": 2})
    assert changed["settings"]["maxRecords"] == 2
    resumed = api.post(f"{CONSUMER}/resume")
    assert resumed["paused"] is None
    site.wait_committed(f"{name}-push", name, 10)
    assert offsets(backend.accepted[10:]) == [4, 5, 7, 8, 9]
    assert max(len(request.body) for request in backend.requests[1:]) <= 2
    assert api.delete(f"{CONSUMER}/settings")["settings"]["maxRecords"] == 100
    [summary] = api.get("/adm/reactive-consumers")["consumers"]
    assert (summary["name"], summary["kind"], summary["group"], summary["topics"]) == (
        "push",
        "reactive",
        f"{name}-push",
        [name],
    )
    print(json.dumps(api.get(CONSUMER), indent=1))
