"""Live control: every process does what the table says for the partitions it has, once, and what it cannot do waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.control import consumer_control
from headrace.control.commands import Commands, PartitionsRequest, SettingsRequest
from headrace.control.consumer_control import NOT_READ, ConsumerControl
from headrace.control.entries import Command, iso_time, key_of, live_settings
from headrace.control.running_consumer import RunningConsumer
from headrace.delivery.status import LiveSettings
from headrace.errors import HeadraceError, KafkaUnavailable, OffsetsKeptElsewhere
from headrace.kafka import JSON_OBJECTS, Admin, CompactedTable, InternalTopic
from headrace.lifecycle import SystemClock
from headrace.records import OutgoingRecord, Produced, Record, TopicPartition

CONFIG = ReactiveConsumerConfig.model_validate({"topics": ["t"], "group": "g", "backend": {"url": "http://b"}})
P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
LIMIT_SECONDS = 60.0


class Log:
    """The topic of a deployment; what is written is read by every process at once."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.views: list[CompactedTable[Any]] = []
        self.broken = False

    async def produce(self, outgoing: Sequence[OutgoingRecord]) -> list[Any]:
        if self.broken:
            return [KafkaUnavailable("no broker answers")] * len(outgoing)
        return [self.append(record.key or b"", record.value) for record in outgoing]

    def append(self, key: bytes, value: bytes | None) -> Produced:
        record = Record("c", 0, len(self.records), 0, key, value)
        self.records.append(record)
        for view in self.views:
            view.read([record], len(self.records))
        return Produced(0, record.offset)

    async def has_topic(self, name: str) -> bool:
        raise KafkaUnavailable("this test reads by itself")

    async def written_offsets(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, len(self.records))


class FakePump:
    """Has partitions, and remembers what it was told."""

    def __init__(self, *partitions: TopicPartition) -> None:
        self.group, self.member, self.retries = "g", None, None
        self.moves = self
        self.lanes: dict[TopicPartition, Any] = {}
        self.assign(*partitions)
        self.whole = ""
        self.holds: dict[TopicPartition, str] = {}
        self.settings: LiveSettings | None = None
        self.sought: list[tuple[TopicPartition, int]] = []
        self.skipped: list[tuple[TopicPartition, int]] = []
        self.elsewhere = False
        self.last_offset = 100
        self.idle = asyncio.Event()
        self.idle.set()

    def assign(self, *partitions: TopicPartition) -> None:
        self.lanes = {p: SimpleNamespace(tracker=SimpleNamespace(frontier=7)) for p in partitions}

    def pause(self, partitions: Collection[TopicPartition] | None, why: str) -> None:
        if partitions is None:
            self.whole = why
        else:
            self.holds |= dict.fromkeys(partitions, why)

    def resume(self, partitions: Collection[TopicPartition] | None) -> None:
        if partitions is None:
            self.whole = ""
        for partition in partitions or ():
            self.holds.pop(partition, None)

    def change(self, settings: LiveSettings) -> None:
        self.settings = settings

    async def seek(self, partition: TopicPartition, offset: int) -> bool:
        if self.elsewhere:
            raise OffsetsKeptElsewhere()
        await asyncio.sleep(0)
        await self.idle.wait()
        self.sought.append((partition, offset))
        return True

    async def skip(self, partition: TopicPartition, offset: int, reason: str) -> str:
        if offset > self.last_offset:
            return "will be skipped"
        if (partition, offset) in self.skipped:
            return "ended already"
        self.skipped.append((partition, offset))
        return "skipped"


class House:
    """Processes of one deployment."""

    def __init__(self) -> None:
        self.log, self.clock = Log(), SystemClock()
        self.started: list[ConsumerControl] = []

    async def process(self, pump: FakePump, *, loaded: bool = True) -> ConsumerControl:
        """Start one."""
        admin: Any = self.log
        table = CompactedTable(
            admin, InternalTopic("c"), JSON_OBJECTS, self.log.produce, self.clock, optional="control"
        )
        made = ConsumerControl(table, {}, f"m{len(self.started)}", lambda group: [], self.clock)
        made.add(steered(pump))
        await made.start()
        self.started.append(made)
        if loaded:
            await self.load(made)
        return made

    async def load(self, process: ConsumerControl) -> None:
        """Have it read what is there."""
        process.table.read(self.log.records, len(self.log.records))
        process.table.loaded(len(self.log.records))
        self.log.views.append(process.table)
        await asyncio.sleep(0)

    async def stop(self, process: ConsumerControl) -> None:
        """End it, as a crash would."""
        self.started.remove(process)
        self.log.views.remove(process.table)
        await process.stop()


def steered(pump: FakePump) -> RunningConsumer:
    admin = Admin(KafkaConfig())  # is not contacted
    anything: Any = pump
    return RunningConsumer(
        name="orders/a b",
        kind="reactive",
        delivery=CONFIG,
        topics=["t"],
        destination=anything,
        pump=anything,
        kafka=KafkaConfig(),
        admin=admin,
    )


def live(test: Callable[[House], Coroutine[Any, Any, None]]) -> None:
    """Run a test with processes that end with it."""

    async def main() -> None:
        house = House()
        try:
            await asyncio.wait_for(test(house), LIMIT_SECONDS)
        finally:
            for process in house.started:
                assert process.death is None
                await process.stop()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 what is waited for is the work of another task
        await asyncio.sleep(0.001)


async def ask(
    process: ConsumerControl, action: str, offsets: dict[TopicPartition, int], wait_seconds: float = 60
) -> Any:
    [consumer] = process.consumers.values()
    facts = {"by": "ann", "at": 0.0, "reason": "so"}
    answer = await process.command(consumer, action, offsets, facts, wait_seconds)
    return answer.id, answer.results


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits."""
    monkeypatch.setattr(consumer_control, "_AGAIN_SECONDS", 0.001)


def test_the_process_that_has_the_partition_does_it_and_whoever_was_asked_knows() -> None:
    """Each its part, once; nothing stays in the table."""

    async def test(house: House) -> None:
        pumps = FakePump(P0), FakePump(P1)
        first, second = [await house.process(pump) for pump in pumps]
        _, results = await ask(first, "seek", {P0: 3, P1: 5})
        assert [(one.topic, one.partition, one.outcome, one.by) for one in results] == [
            (*P0, "sought", "m0"),
            (*P1, "sought", "m1"),
        ]
        assert (pumps[0].sought, pumps[1].sought) == ([(P0, 3)], [(P1, 5)])
        assert results[0].came_from == 7
        await until(lambda: not first.table.items("seek/"))
        assert second.table.items("") == {}

    live(test)


def test_a_command_waits_for_a_process_and_can_be_cancelled() -> None:
    """Until somebody is assigned the partition."""

    async def test(house: House) -> None:
        pump = FakePump()
        process = await house.process(pump)
        consumer = process.consumers["orders/a b"]
        identity, [result] = await ask(process, "seek", {P0: 3}, wait_seconds=0)
        assert result.outcome == "pending"
        assert [command.id for command in process.commands_of(consumer)] == [identity]
        assert await process.cancel(consumer, identity) == [P0]
        assert await process.cancel(consumer, identity) == []
        await ask(process, "seek", {P0: 4}, wait_seconds=0)
        pump.assign(P0)
        await until(lambda: not process.commands_of(consumer))
        assert pump.sought == [(P0, 4)]

    live(test)


def test_commands_that_wait_do_not_keep_the_process_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of one consumer must not cost a search of the whole table for each consumer, twice a second."""

    async def test(house: House) -> None:
        process = await house.process(FakePump())
        await ask(process, "seek", {P0: 3}, wait_seconds=0)

        def search(prefix: str) -> dict[str, Any]:
            raise AssertionError("the table was searched")

        monkeypatch.setattr(process.table, "items", search)
        assert process.reconcile(), "it looks again"

    live(test)


def test_a_seek_that_comes_while_another_is_done_is_done_too() -> None:
    """The first one waits for what is in flight, and its end takes away its own entry and no other."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        process = await house.process(pump)
        pump.idle.clear()
        first = asyncio.ensure_future(ask(process, "seek", {P0: 3}))
        await until(lambda: process._busy)
        second = asyncio.ensure_future(ask(process, "seek", {P0: 5}))
        await until(lambda: len(house.log.records) == 2)
        pump.idle.set()
        outcomes = [(await asked)[1][0].outcome for asked in (first, second)]
        assert (outcomes, pump.sought) == (["sought", "sought"], [(P0, 3), (P0, 5)])
        await until(lambda: not process.table.items("seek/"))

    live(test)


def test_a_partition_that_goes_before_its_command_is_done_ends_nothing() -> None:
    """A rebalance comes between seeing that it is here and doing it."""

    async def test(house: House) -> None:
        pump = FakePump()
        process = await house.process(pump)
        command = Command("seek/x/t/0/i", "seek", P0, 3, {}, "i")
        outcomes: dict[str, Any] = {}
        await process._run(process.consumers["orders/a b"], command, pump, outcomes)  # type: ignore[arg-type]
        assert (outcomes, pump.sought) == ({}, [])

    live(test)


def test_what_another_process_wrote_just_before_counts() -> None:
    """Whoever pauses here and resumes there, a moment later, means what was paused."""

    async def test(house: House) -> None:
        process = await house.process(FakePump(P0))
        consumer = process.consumers["orders/a b"]
        house.log.views.clear()  # from here on it reads late
        house.log.append(key_of("hold/", "orders/a b").encode(), msgspec.json.encode({"by": "ann", "since": 0.0}))
        house.log.append(key_of("settings/", "orders/a b").encode(), msgspec.json.encode({"max_records": 7}))
        commands = Commands(process, house.clock)
        asked = asyncio.gather(
            commands.resume(consumer, PartitionsRequest()),
            commands.change(consumer, SettingsRequest(rate_records=5), "bob"),
        )
        await asyncio.sleep(0.01)
        house.log.views.append(process.table)
        process.table.read(house.log.records, len(house.log.records))
        await asked
        assert process.hold_of(consumer) is None
        [settings] = process.table.items("settings/").values()
        assert (settings["max_records"], settings["rate_records"]) == (7, 5)

    live(test)


def test_a_record_that_is_not_here_yet_is_skipped_when_it_is() -> None:
    """By the process that has the partition then; until then the command stays in the table."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        pump.last_offset = 5
        first = await house.process(pump)
        _, [result] = await ask(first, "skip", {P0: 9})
        assert result.outcome == "will be skipped"
        assert first.death is None
        await house.stop(first)
        pump = FakePump(P0)
        second = await house.process(pump)
        await until(lambda: pump.skipped == [(P0, 9)])
        await until(lambda: not second.table.items("skip/"))

    live(test)


def test_a_seek_ends_the_skips_that_wait_for_their_record() -> None:
    """After a seek back all records are delivered again."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        pump.last_offset = 5
        process = await house.process(pump)
        await ask(process, "skip", {P0: 9})
        await ask(process, "seek", {P0: 3})
        await until(lambda: not process.commands_of(process.consumers["orders/a b"]))
        assert (pump.sought, pump.skipped) == ([(P0, 3)], [])

    live(test)


def test_there_is_an_end_to_commands_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process holds them in memory."""
    monkeypatch.setattr(consumer_control, "_MAX_UNFINISHED", 2)

    async def test(house: House) -> None:
        process = await house.process(FakePump())
        await ask(process, "seek", {P0: 1, P1: 2}, wait_seconds=0)
        with pytest.raises(HeadraceError, match="2 seeks and skips of orders/a b are pending"):
            await ask(process, "skip", {P0: 3}, wait_seconds=0)

    live(test)


def test_a_finished_command_that_a_crash_left_is_removed_and_not_run() -> None:
    """The process ended between writing the outcome and removing the entry."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        process = await house.process(pump)
        entry = msgspec.json.encode({"offset": 3, "outcome": "sought"})
        house.log.append(key_of("seek/", "orders/a b", *P0, "i").encode(), entry)
        await until(lambda: not process.table.items("seek/"))
        assert pump.sought == []

    live(test)


def test_what_is_done_and_cannot_be_told_is_told_later_and_not_done_again() -> None:
    """The table cannot be written for a while after the seek."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        process = await house.process(pump)
        entry = msgspec.json.encode({"offset": 3})
        house.log.broken = True
        house.log.append(key_of("seek/", "orders/a b", *P0, "i").encode(), entry)
        await until(lambda: pump.sought)
        for _ in range(20):
            await asyncio.sleep(0.001)
        house.log.broken = False
        await until(lambda: not process.table.items("seek/"))
        assert pump.sought == [(P0, 3)]

    live(test)


def test_a_process_that_is_behind_does_not_do_again_what_another_has_done() -> None:
    """It reads the table to its end before it does anything."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        process = await house.process(pump)
        house.log.views.clear()  # from here on it reads late
        key = key_of("seek/", "orders/a b", *P0, "i").encode()
        house.log.append(key, msgspec.json.encode({"offset": 3}))
        house.log.append(key, None)
        process.table.read(house.log.records[:1], 1)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert pump.sought == []
        process.table.read(house.log.records[1:], 2)
        await until(lambda: not process._busy)
        assert pump.sought == []
        house.log.views.append(process.table)

    live(test)


def test_what_cannot_be_done_is_refused_once() -> None:
    """And does not stay in the table to be tried for ever."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        pump.elsewhere = True
        process = await house.process(pump)
        _, [result] = await ask(process, "seek", {P0: 3})
        assert (result.outcome, "offsets_path" in result.why) == ("refused", True)
        await until(lambda: not process.table.items("seek/"))

    live(test)


def test_nothing_moves_before_it_is_known_what_is_paused() -> None:
    """A pause outlives restarts; without one, and where there can be no table, it goes on."""

    async def test(house: House) -> None:
        for held in (False, True):
            pump = FakePump(P0)
            process = await house.process(pump, loaded=False)
            assert pump.whole == NOT_READ
            await house.load(process)
            await until(lambda pump=pump: pump.whole != NOT_READ)
            assert pump.whole.startswith("paused by ann") is held
            if not held:
                await process.table.put(key_of("hold/", "orders/a b"), {"by": "ann", "since": 0.0, "reason": "so"})
                assert pump.whole == "paused by ann since 1970-01-01T00:00:00Z: so"
        without = FakePump(P0)
        process = await house.process(without, loaded=False)
        process.table.known.set()
        await until(lambda: not without.whole)

    live(test)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hold/orders%2Fa%20b/t", {}),
        ("hold/orders%2Fa%20b/t/x", {}),
        ("hold/", {}),
        ("seek/orders%2Fa%20b", {"offset": 1}),
        ("seek/orders%2Fa%20b/t/0", {"offset": 1}),
        ("seek/orders%2Fa%20b/t/0/i", {"offset": "1"}),
        ("seek/orders%2Fa%20b/t/0/i", {}),
        ("skip/orders%2Fa%20b/t/x/i", {"offset": 1}),
        ("settings/orders%2Fa%20b", {"max_records": "many", "rate_records": -1}),
        ("settings/orders%2Fa%20b", {"max_records": 10**9}),
    ],
)
def test_entries_that_say_nothing_are_passed_over(key: str, value: dict[str, Any]) -> None:
    """Somebody wrote into the table by hand; what was right before goes on to hold."""

    async def test(house: House) -> None:
        pump = FakePump(P0)
        process = await house.process(pump)
        house.log.append(key.encode(), msgspec.json.encode(value))
        _, [result] = await ask(process, "seek", {P1: 1}, wait_seconds=0)
        assert result.outcome == "pending"
        assert (pump.sought, pump.skipped, pump.whole, pump.holds) == ([], [], "", {})
        if key.startswith("settings/"):
            assert pump.settings == live_settings(CONFIG, {})

    live(test)


def test_times_that_are_none_are_left_out() -> None:
    """Whatever stands in the table, the status can be shown."""
    assert iso_time(0.0) == "1970-01-01T00:00:00Z"
    assert {iso_time(wrong) for wrong in (None, "x", {}, 1e30, float("nan"))} == {""}


def test_settings_are_those_of_the_file_with_what_was_changed() -> None:
    """By the rules of the file."""
    assert live_settings(CONFIG, {}) == LiveSettings(None, 100, 102_400, 0.0, 64)
    changed = {"by": "ann", "rate_records": 5, "max_records": 7, "max_in_flight": 2, "max_bytes": None}
    assert live_settings(CONFIG, changed) == LiveSettings(5, 7, 102_400, 0.0, 2)
    single = CONFIG.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "backend": {"url": "http://b", "mode": "single"}}
    )
    refused: list[tuple[ReactiveConsumerConfig, dict[str, Any]]] = [
        (CONFIG, {"max_records": 0}),
        (CONFIG, {"max_records": 1_000_000}),
        (CONFIG, {"rate_records": 0}),
        (CONFIG, {"rate_records": "x"}),
        (single, {"max_records": 2}),
    ]
    for delivery, wrong in refused:
        with pytest.raises(ValueError):
            live_settings(delivery, wrong)


STEPS = st.tuples(
    st.sampled_from(["hold", "release", "restart", "settings", "reset"]),
    st.sampled_from([None, P0, P1]),
    st.integers(0, 1),
)


@given(st.lists(STEPS, max_size=12))
def test_every_process_holds_what_the_table_says(steps: list[tuple[str, TopicPartition | None, int]]) -> None:
    """Whoever was asked, and whoever has been started anew meanwhile."""

    async def test(house: House) -> None:
        pumps = [FakePump(P0), FakePump(P1)]
        processes = [await house.process(pump) for pump in pumps]
        wanted: set[TopicPartition | None] = set()
        records = 100
        for number, (what, place, who) in enumerate(steps, 1):
            table = processes[who].table
            if what == "restart":
                await house.stop(processes[who])
                pumps[who] = FakePump(P0, P1)
                processes[who] = await house.process(pumps[who])
            elif what in ("hold", "release"):
                entry = {"by": "ann", "since": 0.0, "reason": "so"} if what == "hold" else None
                await table.put(key_of("hold/", "orders/a b", *(place or ())), entry)
                (wanted.add if entry else wanted.discard)(place)
            else:
                records = number if what == "settings" else 100
                await table.put(
                    key_of("settings/", "orders/a b"), {"max_records": number} if what == "settings" else None
                )
        await asyncio.sleep(0)
        for process, pump in zip(processes, pumps, strict=True):
            assert (bool(pump.whole), set(pump.holds)) == (None in wanted, {place for place in wanted if place})
            assert (pump.settings or live_settings(CONFIG, {})).max_records == records
            assert set(process.holds_of(process.consumers["orders/a b"])) == set(pump.holds)

    live(test)
