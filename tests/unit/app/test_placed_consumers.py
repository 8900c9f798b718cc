"""Reactive consumers, standing queries and functions of the file with and without `placement`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headrace.app.app import App
from headrace.cli.status import Poll, page
from headrace.commands.command_parts import CommandParts
from headrace.commands.placement.consumer_groups import ConsumerGroups
from headrace.config.load import load_config
from headrace.config.whole_file import WholeFile
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.functions.function_parts import FunctionParts
from headrace.functions.workers import FunctionService
from headrace.kafka import Consumer
from headrace.records import TopicPartition
from headrace.runtime.feature_parts import NeededParts
from headrace_devkit.testing import ManualClock
from headrace_queries.filtered_destination import FilteredDestination
from headrace_queries.standing import problems_of, with_standing_queries

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
    made = [one for spec in groups.of_file.values() for one in spec.make()]
    members = [one._policy.member.properties for one in made if isinstance(one, Consumer)]
    assert [one["group.instance.id"] for one in members] == ["p0.reactive_a", "p0.reactive_b_c"]
    places = {TopicPartition("t", number): 1 for number in range(150)}
    for one in parts.running.values():
        one.pump.on_assigned(places, {})
    assert {one.pump.hooks.commits.most_seconds for one in parts.running.values()} == {0.03 * 250}


def test_status_says_what_runs_here() -> None:
    """The first line has what readiness says of the placement, also while it is fine."""
    services = {"placement": {"ready": True, "reason": "p0 runs 4 of 9 consumers in zone a"}}
    poll = Poll(0.0, {"readiness": {"ready": True, "services": services}}, {})
    assert "ready, 1 of 1 service; p0 runs 4 of 9 consumers in zone a" in page("http://x", poll, None)


def function_file(folder: Path, name: str, **triggers: Any) -> str:
    file = folder / f"{name}.yaml"
    file.touch(0o600)
    kafka = {"kind": "kafka", "attributes": {"topics": ["t"], "consumerGroup": name}}
    spec = {"handler": "m:h", "triggers": {"k": kafka, **triggers}}
    file.write_text(yaml.safe_dump({"metadata": {"name": name}, "spec": spec}))
    return str(file)


async def test_a_function_is_placed_with_its_workers_unless_it_has_more_than_groups(tmp_path: Path) -> None:
    """One with a port, or with partitions of its own, runs in every process, as without placement."""
    fixed = {"kind": "kafka", "attributes": {"topics": ["u"], "consumerGroup": "g", "partitions": [1]}}
    files = [
        function_file(tmp_path, "f"),
        function_file(tmp_path, "web", h={"kind": "http"}),
        function_file(tmp_path, "own", l=fixed),
    ]
    app = app_of(tmp_path, functions=files, placement={"process": "p0"})
    parts = NeededParts(app.process.parts)
    placed = parts.of(CommandParts).placed
    assert placed
    assert [*placed.of_file] == ["a", "b c", "function f"]
    assert [*parts.of(FunctionParts).reloads()] == ["function web", "function own"]
    made = placed.of_file["function f"].make()
    assert len([one for one in made if isinstance(one, FunctionService)]) == 1
    assert "f.k" in parts.of(ConsumersParts).running
    placed.of_file["function f"].on_stopped()
    assert "f.k" not in parts.of(ConsumersParts).running


async def test_a_placed_standing_query_gets_rows(tmp_path: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(
        "placement: {process: p0}\n"
        "tables: {stock: {topic: s, schema: 'item STRING, n BIGINT'}}\n"
        "queries: {low: {sql: SELECT * FROM stock WHERE n < 5 EMIT CHANGES, backend: {url: http://localhost:1/}}}\n"
    )
    app = App(with_standing_queries(load_config(file, {}, check=problems_of)), ManualClock())
    parts = NeededParts(app.process.parts)
    placed = parts.of(CommandParts).placed
    assert placed
    placed.of_file["low"].make()
    assert isinstance(parts.of(ConsumersParts).running["low"].destination, FilteredDestination)
