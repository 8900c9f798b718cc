from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.delivery.dead_letter import Origin
from headrace.errors import HeadraceError, InvalidRequest, KafkaError, KafkaTimeout, RecordTooLarge, TransactionAborted
from headrace.kafka.internal_topics import InternalTopics
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace.runs import redrive
from headrace.runs.dead_letters.origins import Origins
from headrace.runs.redrive import Redrive
from headrace.runs.redrive_spec import Redriven, RedriveOptions, RedriveSpec, Target
from headrace.runs.redrive_writers import AcknowledgedWriter, Item, Tally, WriteContext
from headrace.runs.selection import Selection
from headrace_devkit.testing import ManualClock
from redrive_kafka import DLQ, DeadLetterCluster, install
from yaml_table import table


@pytest.fixture
def fake() -> Iterator[DeadLetterCluster]:
    made = DeadLetterCluster()
    with pytest.MonkeyPatch.context() as patch:
        install(made, patch)
        yield made


class Impatient(ManualClock):
    """A clock that moves by the time of each sleep."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self._now += max(0.0, seconds)


def run(fake: DeadLetterCluster, target: Target | None = None, clock: Any = None, /, **chosen: Any) -> Redriven:
    origins = chosen.pop("origins", None)
    selecting = {name: chosen.pop(name) for name in list(chosen) if name in Selection.__struct_fields__}
    spec = RedriveSpec(DLQ, Selection(**selecting), target or Target(), RedriveOptions(**chosen))
    return run_of(fake, spec, clock, origins)


def dropped(fake: DeadLetterCluster, topic_id: str, end: int) -> Redriven:
    """Run a drop that was requested when partition 0 ended here."""
    return run_of(fake, RedriveSpec(DLQ, target=Target("drop", reason="r"), topic_id=topic_id, ends={0: end}))


def run_of(fake: DeadLetterCluster, spec: RedriveSpec, clock: Any = None, origins: Origins | None = None) -> Redriven:
    origins = origins or Origins(InternalTopics(HeadraceConfig()))
    one = Redrive(fake, fake.produce, clock or Impatient(), spec, origins)  # type: ignore[arg-type]
    return asyncio.run(one.run(asyncio.Event()))


@given(failures=st.sets(st.integers(1, 60)), letters=st.integers(0, 30), rate=st.sampled_from([None, 1000.0]))
def test_no_letter_is_passed_over_whatever_fails(failures: set[int], letters: int, rate: float | None) -> None:
    """Runs repeated until success deliver every letter; each failed one repeats as many as may be unsaved at most."""
    with pytest.MonkeyPatch.context() as patch:
        fake = DeadLetterCluster()
        install(fake, patch)
        patch.setattr(redrive, "REPEATS_AT_MOST", 7)
        for number in range(letters):
            fake.letter(number)
        fake.fail_at, failed = failures, 0
        while failed < 100:
            try:
                run(fake, rate_records=rate)
                break
            except HeadraceError:
                failed += 1
                assert {f"v{offset}".encode() for offset in fake.ended()} <= {*fake.values}
        assert {*fake.values} == {f"v{number}".encode() for number in range(letters)}
        assert len(fake.values) - letters <= 7 * failed
        assert fake.ended() == set(range(letters))


@given(
    commits=st.lists(st.sampled_from(["commit", "abort", "doubt"]), max_size=8),
    letters=st.integers(0, 20),
    large=st.sets(st.integers(0, 19), max_size=2),
)
def test_exactly_once_is_once_whatever_happens_to_commits(commits: list[str], letters: int, large: set[int]) -> None:
    """Aborted and doubtful transactions, and letters that do not fit: each other letter is there once, and counted."""
    with pytest.MonkeyPatch.context() as patch:
        fake = DeadLetterCluster()
        install(fake, patch)
        patch.setattr(redrive, "_TRANSACTION_RECORDS", 3)
        for number in range(letters):
            fake.letter(number)
        fake.producer.transaction_ends, fake.too_large = [*commits], {f"v{number}".encode() for number in large}
        counted = 0
        for _ in range(10):
            try:
                done = run(fake, exactly_once=True)
                counted += done.records
                break
            except (KafkaTimeout, TransactionAborted, RecordTooLarge):
                counted = len(fake.ended())
        stay = large & set(range(letters))
        assert sorted(fake.values) == sorted(f"v{n}".encode() for n in set(range(letters)) - stay)  # type: ignore[type-var]
        assert fake.ended() == set(range(letters)) - stay
        assert counted == letters - len(stay)
        assert len(done.too_large) == len(stay)


def test_what_comes_after_the_request_is_left_for_the_next_run(
    fake: DeadLetterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when another session, or another process, continues the run: what is dropped was there at the request."""
    offsets = fake.topic_offsets

    async def grows(topic: str, right: str = "") -> Any:
        fake.letter(len(fake.records(DLQ)))
        return await offsets(topic)

    fake.letter(0)
    monkeypatch.setattr(fake, "topic_offsets", grows)
    fake.producer.transaction_ends = ["commit", "abort"]
    assert (run(fake, exactly_once=True).records, fake.ended()) == (2, {0, 1})
    for topic_id, number in (("", 1), ("first", 1)):
        assert dropped(fake, topic_id, len(fake.ended()) + 1).records == number
    with pytest.raises(InvalidRequest, match="created again"):
        dropped(fake, "another", 9)


def test_dead_letters_that_expire_while_a_run_reads_do_not_end_it(
    fake: DeadLetterCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow run may be overtaken by the retention of the topic; what is still there goes."""
    for number in range(4):
        fake.letter(number)

    async def expired(kafka: Any, starts: Any, ends: Any) -> Any:
        if not fake.log(DLQ).start:
            fake.log(DLQ).delete_before(2)
            raise KafkaError("offset out of range")
        async for batch in fake.read_window(kafka, starts, ends):
            yield batch

    monkeypatch.setattr(redrive, "read_window", expired)
    assert (run(fake).records, fake.values) == (2, [b"v2", b"v3"])


CONSUMERS = {
    "billing": {"topics": ["orders"], "group": "billing", "retry": {"topics": [10]}},
    "wide": {"topic_patterns": ["team-.*", "all.*"], "group": "wide"},
    "shared": {"topics": ["a", "b"], "group": "shared", "dead_letter": {"topic": DLQ}},
    "apart": {"topics": ["c"], "group": "apart", "dead_letter": {"topic": "c-dead"}},
}


def known() -> Origins:
    """Return what a configuration with some consumers proves."""
    consumers = {name: {"backend": {"url": "http://h"}, **consumer} for name, consumer in CONSUMERS.items()}
    named = {"audit": {"topic": "trail"}, "reactive_consumers": consumers}
    return Origins(InternalTopics(HeadraceConfig.model_validate(named)))


@pytest.mark.parametrize(("topic", "group", "left"), table(__file__, "a_letter_goes_back_only_to_an_origin"))
def test_a_letter_goes_back_only_to_an_origin_that_is_proved(
    fake: DeadLetterCluster, topic: str, group: str, left: str
) -> None:
    """Its consumer reads the topic and writes its dead letters here; others are left with the reason."""
    for name in ("a", "p1"):
        fake.brokers.create_topic(name, 2)
    fake.letter(1, topic=topic, group=group)
    fake.letter(2)
    done = run(fake, origins=known())
    assert done.records == (1 if left else 2)
    assert [why.endswith(left) or left in why for why in done.unproved] == ([True] if left else [])
    assert sum(done.unproved.values()) == len(done.unproved)
    assert len(fake.ended()) == done.records


@pytest.mark.parametrize(("source", "topic", "group", "refusal"), table(__file__, "an_origin_is_one_that_is_read"))
def test_an_origin_is_one_that_its_consumer_reads_and_that_is_not_internal(
    source: str, topic: str, group: str, refusal: str
) -> None:
    """Also from quarantine; by the usual name where the group is not known; never Headrace's own topics."""
    found = known().refusal(source, Origin(TopicPartition(topic, 0), 1, 1, group, 1, "E"))
    assert refusal in found if refusal else found == ""


def test_origins_are_proved_by_the_consumers_that_are_registered_now() -> None:
    """A registration proves its topics at once; one that no longer reads a topic proves it no longer."""
    internal = InternalTopics(HeadraceConfig())
    origins = Origins(internal)

    def refusal() -> str:
        return origins.refusal("team-a.dlq", Origin(TopicPartition("p1", 0), 1, 1, "team-a", 1, "E"))

    def register(*topics: str) -> None:
        settings = {"group": "team-a", "dead_letter": {"topic": "team-a.dlq"}, "backend": {"url": "http://h"}}
        internal.register([ReactiveConsumerConfig.model_validate({**settings, "topics": topics})])

    assert "not known here" in refusal()
    register("p1")
    assert refusal() == ""
    register("other")
    assert "which their group team-a does not read" in refusal()


def test_a_record_that_was_redriven_too_often_is_kept_back(fake: DeadLetterCluster) -> None:
    """At the limit it is not sent and stays left; it can be moved to quarantine. Below, it keeps its first identity."""
    first = ("headrace.redrive.of", b"orders:0:3")
    for count in (b"1", b"2", b"3"):
        fake.letter(int(count), headers=[("headrace.redrive.count", count), first, ("x", b"y")])
    assert run(fake, max_redrives=2).kept_back == 2
    assert fake.values == [b"v1"]
    assert fake.produced[0].headers == [("x", b"y"), ("headrace.redrive.count", b"2"), first]
    moved = run(fake, Target("quarantine"), max_redrives=2)
    assert (moved.records, moved.targets, moved.kept_back) == (2, {f"{DLQ}.quarantine": 2}, 0)
    assert len(fake.brokers.topics[f"{DLQ}.quarantine"].partitions) == 2


def test_what_is_sent_while_others_are_saved_is_saved_later() -> None:
    """The next run would send it again."""
    saved: list[dict[int, list[int]]] = []

    async def drop(offset: int) -> None:
        await writer.write([Item(Record(DLQ, 0, offset, 0, None, b""), None, "E")])

    async def save(produce: Any, offsets: dict[int, list[int]], headers: Any) -> None:
        saved.append(dict(offsets))
        if len(saved) == 1:
            await drop(2)

    async def saves() -> None:
        await drop(1)
        await writer.save()
        await writer.save()

    completed: Any = SimpleNamespace(save=save)
    writer = AcknowledgedWriter(WriteContext(RedriveSpec(DLQ), completed, Tally(), AsyncMock()), AsyncMock())
    asyncio.run(saves())
    assert saved == [{0: [1]}, {0: [2]}]


def test_a_record_that_no_reader_reads_is_left_and_counted(fake: DeadLetterCluster) -> None:
    """The dead letters beside it go."""
    fake.letter(1)
    fake.dead(0, Record("x", 0, 0, 0, None, b"foreign"), [])
    fake.letter(2)
    done = run(fake)
    assert (fake.values, sum(done.unproved.values()), fake.ended()) == ([b"v1", b"v2"], 1, {0, 2})


@pytest.mark.parametrize("returns", [True, False])
def test_a_redrive_stops_when_too_many_records_come_back(fake: DeadLetterCluster, returns: bool) -> None:
    """Those of the run count; what was not sent is left."""
    for number in range(300):
        fake.letter(number)
    produce = fake.produce

    async def failing(records: Sequence[OutgoingRecord]) -> list[Any]:
        results = await produce(records)
        for one in [one for one in records if one.topic == "orders"]:
            fake.letter(1000, headers=one.headers if returns else [])
        return results

    fake.produce = failing  # type: ignore[method-assign]
    done = run(fake, rate_records=20.0, stop_at_percent=1.0)
    assert (1 < done.records < 100) if returns else done.records == 300
    assert (done.failed_again > 1, done.stopped.endswith("dead letters failed, more than 1 %")) == (returns, returns)
    assert len(fake.ended()) == done.records
