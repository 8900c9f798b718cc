"""Which topics a consumer reads as the cluster's topics change, with a cluster from a table."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

from headrace.config.section import fits_any
from headrace.kafka import Subscription, TopicInfo
from headrace_devkit.testing import ManualClock


class Cluster:
    """Topics with ids, and a consumer that records its calls."""

    def __init__(self, **ids: str) -> None:
        self.ids = ids
        self.calls: list[Any] = []

    async def list_topics(self) -> list[TopicInfo]:
        return [TopicInfo(name, []) for name in sorted(self.ids)]

    async def topic_ids(self, names: Collection[str]) -> dict[str, str]:
        return {name: self.ids[name] for name in names if name in self.ids}

    def subscribe(self, topics: Sequence[str]) -> None:
        self.calls.append(list(topics))

    def topics_found(self, topics: Collection[str]) -> None:
        pass

    def topic_recreated(self, topic: str, after: float) -> None:
        self.calls.append((topic, after))


def look(cluster: Cluster, changes: Sequence[dict[str, str]], *topics: str, pattern: str = "") -> list[Any]:
    """Return the calls of the consumer, with one look per change, 5 s apart."""

    async def run() -> None:
        clock = ManualClock(0)
        fits = fits_any([pattern]) if pattern else None
        service = Subscription("s", cluster, cluster, clock, topics=topics, fits=fits)  # type: ignore[arg-type]
        for ids in changes:
            cluster.ids = ids
            await service._look()
            await clock.advance(5)

    asyncio.run(run())
    return cluster.calls


def test_topics_that_fit_are_added_and_those_that_are_gone_for_two_looks_are_dropped() -> None:
    """One look may be at a broker that has just started and knows no topics yet."""
    changes = [{"m.a": "1"}, {"m.a": "1", "m.b": "2", "x": "3"}, {}, {"m.a": "1"}, {"m.a": "1"}]
    calls = look(Cluster(), changes, "own", pattern=r"m\..*")
    assert calls == [["own", "m.a"], ["own", "m.a", "m.b"], ["own", "m.a"]]


def test_a_topic_with_another_id_was_created_anew() -> None:
    """Told once, with the time from which an assignment knows: now, or when it was first seen to be gone."""
    assert look(Cluster(), [{"a": "1"}, {"a": "2"}, {"a": "2"}], "a") == [("a", 5.0)]
    assert look(Cluster(), [{"a": "1"}, {}, {}, {"a": "2"}], "a") == [("a", 5.0)]
    assert look(Cluster(), [{"a": "1"}, {}, {"a": "1"}], "a") == []
