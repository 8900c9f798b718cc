"""Which topics a consumer reads as the cluster's topics change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from headrace.config.section import fits_any
from headrace.kafka import Subscription
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster


def look(changes: Sequence[dict[str, str]], *topics: str, pattern: str = "") -> list[Any]:
    """Return the calls of the consumer, with one look per change of the topics and their ids, 5 s apart."""
    calls: list[Any] = []
    consumer: Any = SimpleNamespace(
        subscribe=calls.append, topics_found=bool, topic_recreated=lambda topic, after: calls.append((topic, after))
    )

    async def run() -> None:
        clock, cluster = ManualClock(0), MemoryCluster()
        fits = fits_any([pattern]) if pattern else None
        service = Subscription("s", consumer, cluster, clock, topics=topics, fits=fits)  # type: ignore[arg-type]
        for ids in changes:
            cluster.brokers.topics.clear()
            for name, topic_id in ids.items():
                cluster.brokers.create_topic(name).id = topic_id
            await service._look()
            await clock.advance(5)

    asyncio.run(run())
    return calls


def test_topics_that_fit_are_added_and_those_that_are_gone_for_two_looks_are_dropped() -> None:
    """One look may be at a broker that has just started and knows no topics yet."""
    changes = [{"m.a": "1"}, {"m.a": "1", "m.b": "2", "x": "3"}, {}, {"m.a": "1"}, {"m.a": "1"}]
    calls = look(changes, "own", pattern=r"m\..*")
    assert calls == [["own", "m.a"], ["own", "m.a", "m.b"], ["own", "m.a"]]


def test_a_topic_with_another_id_was_created_anew() -> None:
    """Told once, with the time from which an assignment knows: now, or when it was first seen to be gone."""
    assert look([{"a": "1"}, {"a": "2"}, {"a": "2"}], "a") == [("a", 5.0)]
    assert look([{"a": "1"}, {}, {}, {"a": "2"}], "a") == [("a", 5.0)]
    assert look([{"a": "1"}, {}, {"a": "1"}], "a") == []
