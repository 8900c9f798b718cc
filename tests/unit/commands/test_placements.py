"""Who chooses the placement, and what each process runs by it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.commands.placement import placements as module
from headrace.commands.placement.placements import Placements
from headrace.config.placement_config import PlacementConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka import JSON_OBJECTS
from headrace.records import OutgoingRecord
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

CONSUMERS = [f"c{number}" for number in range(20)]
CHOOSER, PROCESS = "placement.control", "process.control.{}"
"""Names of leases."""


class Leases:
    """Which process holds each lease."""

    def __init__(self) -> None:
        self.holders: dict[str, str] = {}
        self.lost: dict[str, asyncio.Event] = {}
        """Of the last one that was held under a name."""
        self.is_down = False

    def of(self, process: str) -> Any:
        """Return what makes the leases of a process."""

        def lease(name: str) -> Any:
            lost = asyncio.Event()

            async def acquire() -> bool:
                if self.is_down:
                    raise KafkaUnavailable("no broker")
                is_held = self.holders.setdefault(name, process) == process
                if is_held:
                    self.lost[name] = lost
                return is_held

            async def release() -> None:
                if self.holders.get(name) == process:
                    del self.holders[name]

            async def check() -> None:
                await asyncio.sleep(0)

            return SimpleNamespace(acquire=acquire, release=release, check=check, lost=lost)

        return lease


class Deployment:
    """Processes on one control table."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.cluster, self.leases = (
            ManualClock(),
            MemoryCluster({"control": 1, "other-control": 1}),
            Leases(),
        )
        self.folder = folder
        self.running: dict[str, list[str]] = {}

        async def holders(_: object, names: Sequence[str]) -> dict[str, str]:
            await asyncio.sleep(0)
            return {name: self.leases.holders.get(name, "") for name in names}

        monkeypatch.setattr("headrace.commands.instance_owners.lease_holders", holders)

    async def process(
        self, name: str, zone: str = "", *, table: bool = True, wanted: Sequence[str] = (), control: str = "control"
    ) -> Placements:
        """Start a process; without `table` it cannot read the control table."""
        made = self.cluster.table(control, JSON_OBJECTS, self.clock)
        if table:
            self.cluster.follow(made)
        config = PlacementConfig(zone=zone)
        one = Placements(made, config, name, self.leases.of(name), None, self.folder / name, self.clock)  # type: ignore[arg-type]

        def apply() -> None:
            self.running[name] = [each for each in wanted or CONSUMERS if one.runs(each)]

        one.follow("file", lambda: wanted or CONSUMERS, apply)
        await one.start()
        one.spawn(one.run(), "run")
        await self.clock.advance(1)
        return one


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    return Deployment(tmp_path, monkeypatch)


def copies(running: dict[str, list[str]]) -> list[int]:
    return [sum(name in names for names in running.values()) for name in CONSUMERS]


async def test_without_table_or_lease_each_process_keeps_what_it_ran_last(deployment: Deployment) -> None:
    """Never all: a file has the last placement. Without one, nothing runs, and readiness has the reason."""
    one = await deployment.process("p0")
    await deployment.process("p1")
    await deployment.process("p2")
    await deployment.clock.advance(30)
    ran = deployment.running["p0"]
    assert 0 < len(ran) < 20
    deployment.leases.is_down = True
    await one.stop()
    again = await deployment.process("p0", table=False)
    assert deployment.running["p0"] == ran
    assert again.readiness().ready
    new = await deployment.process("p9", table=False)
    assert deployment.running["p9"] == []
    assert new.readiness().reason.endswith("c0 waits for the process that holds the lease placement")


async def test_a_second_process_of_the_same_name_runs_nothing(deployment: Deployment) -> None:
    """Both would be the same static members, and fence each other. After a crash the name is free again soon."""
    deployment.leases.holders[PROCESS.format("p0")] = "another p0"
    await deployment.process("p1")
    one = await deployment.process("p0")
    await deployment.clock.advance(10)
    assert one.readiness().ready
    await deployment.clock.advance(30)
    assert (deployment.running["p0"], one.readiness().ready) == ([], False)
    assert one.readiness().reason.startswith("another process has the name p0")
    del deployment.leases.holders[PROCESS.format("p0")]
    await deployment.clock.advance(30)
    assert copies(deployment.running) == [2] * 20


async def test_a_damaged_file_or_entry_runs_nothing_and_ends_nothing(deployment: Deployment) -> None:
    """An entry of another version, or half a file."""
    file = deployment.folder / "p0" / "placement.json"
    file.parent.mkdir()
    file.write_text('{"c0": ["p0"')
    deployment.leases.is_down = True
    entry = msgspec.json.encode({"processes": "p0"})
    deployment.cluster.write(OutgoingRecord("control", b"placement/c1", entry))
    one = await deployment.process("p0")
    assert deployment.running["p0"] == []
    assert one.death is None


async def test_a_consumer_runs_where_a_file_has_it(deployment: Deployment) -> None:
    """Whichever process chooses: here one with the older file. Both copies, as soon as a second process has the new."""
    await deployment.process("p0", wanted=CONSUMERS[:5])
    await deployment.process("p1", wanted=CONSUMERS[:5])
    await deployment.clock.advance(30)
    assert [*_entries(deployment)] == [f"placement/{name}" for name in CONSUMERS[:5]]
    new = await deployment.process("p2")
    await deployment.clock.advance(30)
    assert deployment.leases.holders[CHOOSER] == "p0"
    assert {*CONSUMERS[5:]} <= {*deployment.running["p2"]}
    assert new.readiness().ready
    await deployment.process("p3")
    await deployment.clock.advance(30)
    assert copies(deployment.running) == [2] * 20
    assert all({*_entries(deployment)[f"placement/{name}"]["processes"]} == {"p2", "p3"} for name in CONSUMERS[5:])


async def test_two_deployments_on_one_cluster_choose_each_for_themselves(deployment: Deployment) -> None:
    """Their control topics differ, and processes may have the same name, such as that of their machine."""
    made = [await deployment.process("p0", control=control) for control in ("control", "other-control")]
    await deployment.clock.advance(40)
    assert [one.readiness().reason for one in made] == ["p0 runs 20 of 20 consumers"] * 2


async def test_while_most_processes_restart_nothing_moves(deployment: Deployment) -> None:
    """The first one that is there again would run all consumers."""
    made = [await deployment.process(f"p{number}") for number in range(4)]
    await deployment.clock.advance(30)
    had = deployment.running["p3"]
    for one in made[:3]:
        await one.stop()
    await deployment.clock.advance(150)
    assert deployment.running["p3"] == had


async def test_a_process_that_chooses_again_has_not_watched_the_others_meanwhile(deployment: Deployment) -> None:
    """One that was away before, and is away again, is not away since then."""
    leases = deployment.leases
    await deployment.process("p0")
    await deployment.process("p1", wanted=CONSUMERS[:1])
    other = await deployment.process("p2")
    await deployment.clock.advance(30)
    had = deployment.running["p2"]
    leases.holders[PROCESS.format("p2")] = ""
    await deployment.clock.advance(60)
    leases.holders[PROCESS.format("p2")] = "p2"
    leases.holders[CHOOSER] = "somebody"
    leases.lost[CHOOSER].set()
    await deployment.clock.advance(300)
    await other.stop()
    del leases.holders[CHOOSER]
    await deployment.clock.advance(60)
    assert leases.holders[CHOOSER] == "p0"
    assert deployment.running["p2"] == had
    assert {name for names in _entries(deployment).values() for name in names["processes"]} == {"p0", "p1", "p2"}


async def test_a_control_topic_that_was_created_again_stops_nothing(deployment: Deployment) -> None:
    """Its entries come one after the other: each process keeps what it ran until it reads another choice."""
    made = [await deployment.process(name) for name in ("p0", "p1", "p2")]
    await deployment.clock.advance(30)
    before = dict(deployment.running)
    for table in deployment.cluster.tables:
        table._entries.by_key.clear()
    for each in made:
        each.wake()
    await deployment.clock.advance(1)
    assert deployment.running == before
    await deployment.clock.advance(60)
    assert deployment.running == before


async def test_an_error_of_kafka_starts_nothing_in_a_second_process_of_the_same_name(deployment: Deployment) -> None:
    deployment.leases.holders[PROCESS.format("p0")] = "another p0"
    deployment.cluster.write(OutgoingRecord("control", b"process/p0", b'{"zone": ""}'))
    await deployment.process("p1")
    await deployment.process("p0")
    await deployment.clock.advance(60)
    assert deployment.running["p0"] == []
    deployment.leases.is_down = True
    await deployment.clock.advance(10)
    assert deployment.running["p0"] == []


async def test_the_first_choice_waits_for_processes_that_start_together(deployment: Deployment) -> None:
    """Otherwise the first one would start all consumers, and stop most of them again."""
    await deployment.process("p0")
    for name in ("p1", "p2", "p3"):
        await deployment.process(name)
    assert sum(copies(deployment.running)) == 0
    await deployment.clock.advance(10)
    assert copies(deployment.running) == [2] * 20
    assert max(len(names) for names in deployment.running.values()) <= 14


async def test_a_consumer_that_was_removed_is_not_counted(deployment: Deployment) -> None:
    await deployment.process("p0")
    await deployment.clock.advance(30)
    one = await deployment.process("p0", wanted=CONSUMERS[:3])
    assert one.readiness().reason == "p0 runs 3 of 3 consumers"


def _entries(deployment: Deployment) -> dict[str, Any]:
    table = deployment.cluster.table("control", JSON_OBJECTS, deployment.clock)
    deployment.cluster.follow(table)
    return {key: json.loads(json.dumps(one)) for key, one in table.items("placement/").items()}


def test_a_process_is_away_for_longer_than_a_restart() -> None:
    assert module._AWAY_SECONDS >= 300
