"""Live control: a seek or a skip is done by the process that has the partition, once, and waits for one."""

from __future__ import annotations

import asyncio

import pytest

from headrace.commands import consumer_control
from headrace.commands.commands import Commands, PartitionsRequest, SettingsRequest
from headrace.commands.entries import key_of
from headrace.errors import HeadraceError, KafkaUnavailable
from tests.control_harness import P0, P1, ControlHarness, FakePump, ask, live
from tests.raw_server import until
from tests.staged import staged


@staged(live)
async def test_a_command_waits_for_a_process_and_can_be_cancelled(harness: ControlHarness, /) -> None:
    """Until somebody is assigned the partition."""
    process, pump = await harness.start_with()
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


@staged(live)
async def test_a_process_of_0_2_that_has_the_partition_is_understood(harness: ControlHarness, /) -> None:
    """Two versions share a deployment during a rolling restart, and the older one has another word for it."""
    process, _ = await harness.start_with()
    asked = asyncio.ensure_future(ask(process, "skip", {P0: 3}))
    await until(lambda: process.table.items("skip/"))
    [(key, entry)] = process.table.items("skip/").items()
    await process.table.put(key, {**entry, "outcome": "ended already"})
    assert (await asked)[1][0].outcome == "already completed"


@staged(live)
async def test_what_another_process_wrote_just_before_counts(harness: ControlHarness, /) -> None:
    """Whoever pauses here and resumes there, a moment later, means what was paused."""
    process = await harness.start(FakePump(P0))
    consumer = process.consumers["orders/a b"]
    harness.cluster.tables.clear()  # from here on it reads late
    harness.put(key_of("hold/", "orders/a b"), {"by": "ann", "since": 0.0})
    harness.put(key_of("settings/", "orders/a b"), {"max_records": 7})
    commands = Commands(process, harness.clock)
    calls = asyncio.gather(
        commands.resume(consumer, PartitionsRequest()),
        commands.change(consumer, SettingsRequest(rate_records=5), "bob"),
    )
    await asyncio.sleep(0.01)
    harness.cluster.follow(process.table)
    await calls
    assert process.hold_of(consumer) is None
    [settings] = process.table.items("settings/").values()
    assert (settings["max_records"], settings["rate_records"]) == (7, 5)


@staged(live)
async def test_a_record_that_is_not_here_yet_is_skipped_when_it_is(harness: ControlHarness, /) -> None:
    """By the process that has the partition then; until then the command stays in the table."""
    first, pump = await harness.start_with(P0, last_offset=5)
    _, [result] = await ask(first, "skip", {P0: 9})
    assert result.outcome == "will be skipped"
    assert first.death is None
    await harness.stop(first)
    second, pump = await harness.start_with(P0)
    await until(lambda: pump.skipped == [(P0, 9)])
    await until(lambda: not second.table.items("skip/"))


@staged(live)
async def test_a_seek_ends_the_skips_that_wait_for_their_record(harness: ControlHarness, /) -> None:
    """After a seek back all records are delivered again."""
    process, pump = await harness.start_with(P0, last_offset=5)
    await ask(process, "skip", {P0: 9})
    await ask(process, "seek", {P0: 3})
    await until(lambda: not process.commands_of(process.consumers["orders/a b"]))
    assert (pump.sought, pump.skipped) == ([(P0, 3)], [])


def test_there_is_an_end_to_commands_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process holds them in memory."""
    monkeypatch.setattr(consumer_control, "_MAX_UNFINISHED", 2)

    async def test(harness: ControlHarness) -> None:
        process = await harness.start(FakePump())
        await ask(process, "seek", {P0: 1, P1: 2}, wait_seconds=0)
        with pytest.raises(HeadraceError, match="2 seeks and skips of orders/a b are pending"):
            await ask(process, "skip", {P0: 3}, wait_seconds=0)

    live(test)


@staged(live)
async def test_what_is_done_and_cannot_be_told_is_told_later_and_not_done_again(harness: ControlHarness, /) -> None:
    """The table cannot be written for a while after the seek."""
    process, pump = await harness.start_with(P0)
    harness.cluster.producer.refusal = lambda record: KafkaUnavailable("no broker answers")
    harness.put(key_of("seek/", "orders/a b", *P0, "i"), {"offset": 3})
    await until(lambda: pump.sought)
    for _ in range(20):
        await asyncio.sleep(0.001)
    harness.cluster.producer.refuse()
    await until(lambda: not process.table.items("seek/"))
    assert pump.sought == [(P0, 3)]


@staged(live)
async def test_a_process_that_is_behind_does_not_do_again_what_another_has_done(harness: ControlHarness, /) -> None:
    """It reads the table to its end before it does anything."""
    process, pump = await harness.start_with(P0)
    harness.cluster.tables.clear()  # from here on it reads late
    key = key_of("seek/", "orders/a b", *P0, "i")
    harness.put(key, {"offset": 3})
    harness.put(key, None)
    process.table.read(harness.log[:1], 1)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert pump.sought == []
    harness.cluster.follow(process.table, 1)
    await until(lambda: not process._busy)
    assert pump.sought == []
