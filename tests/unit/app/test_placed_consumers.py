"""Reactive consumers of the file with and without `placement`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.app.app import App
from headrace.cli.status import Poll, page
from headrace.config.whole_file import WholeFile
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.records import TopicPartition
from headrace.runtime.feature_parts import NeededParts
from headrace.sidecar.reactive.consumer_groups import ConsumerGroups
from headrace_devkit.testing import ManualClock

CONSUMERS = {name: {"topics": ["t"], "group": name, "backend": {"url": "http://localhost:1/"}} for name in ("a", "b c")}


def app_of(tmp_path: Path, **settings: Any) -> App:
    config = {"reactive_consumers": CONSUMERS, "state_dir": str(tmp_path), **settings}
    return App(WholeFile.model_validate(config), ManualClock())


async def test_a_placed_consumer_is_a_static_member_and_starts_only_where_it_was_placed(tmp_path: Path) -> None:
    """All consumers of a process share the pace of commits."""
    app = app_of(tmp_path, placement={"process": "p0"})
    parts = NeededParts(app.process.parts).of(ConsumersParts)
    (groups,) = [one for one in app.process.supervisor.services if isinstance(one, ConsumerGroups)]
    assert parts.consumers.consumers == []
    for name in CONSUMERS:
        groups.spec(name, app.process.in_force.reactive_consumers[name]).make()
    settings: Any = {name: one.delivery for name, one in parts.running.items()}
    ids = [one.consumer.properties["group.instance.id"] for one in settings.values()]
    assert ids == ["p0.a", "p0.b_c"]
    places = {TopicPartition("t", number): 1 for number in range(150)}
    for one in parts.running.values():
        one.pump.on_assigned(places, {})
    assert {one.pump.hooks.commits.most_seconds for one in parts.running.values()} == {0.03 * 250}


async def test_without_placement_every_process_runs_all(tmp_path: Path) -> None:
    app = app_of(tmp_path)
    assert not [one for one in app.process.supervisor.services if isinstance(one, ConsumerGroups)]
    found = NeededParts(app.process.parts).of(ConsumersParts).consumers.consumers
    assert [one.name for one in found] == [*CONSUMERS]


def test_status_says_what_runs_here() -> None:
    """The first line has what readiness says of the placement, also while it is fine."""
    services = {"placement": {"ready": True, "reason": "p0 runs 4 of 9 consumers in zone a"}}
    poll = Poll(0.0, {"readiness": {"ready": True, "services": services}}, {})
    assert "ready, 1 of 1 service; p0 runs 4 of 9 consumers in zone a" in page("http://x", poll, None)
