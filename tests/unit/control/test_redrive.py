from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.kafka import KafkaConfig
from headrace.control import dead_letters, redrive
from headrace.control.redrive import Redrive, Redriven, RedriveOptions
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.protocols import DeadLetter, Outcome, Verdict
from headrace.errors import HeadraceError, InvalidRequest, KafkaTimeout, TopicNotFound
from headrace.kafka import PartitionInfo, TopicInfo
from headrace.lifecycle import SystemClock
from headrace.records import Header, OutgoingRecord, Produced, Record, TopicPartition

DLQ = "orders.dlq"


class FakeKafka:
    """Topics, a log for each partition, and committed offsets: what redrive needs of a cluster."""

    def __init__(self) -> None:
        self.partitions = {"orders": 2, DLQ: 1}
        self.logs: dict[TopicPartition, list[Record]] = {}
        self.first: dict[TopicPartition, int] = {}
        self.offsets: dict[str, dict[TopicPartition, int]] = {}
        self.produced: list[OutgoingRecord] = []
        self.fail_at: set[int] = set()
        self.calls = 0

    def letter(self, number: int, *, topic: str = "orders", headers: Sequence[Header] = (), partition: int = 0) -> None:
        """Append one dead letter of a record `number` that came from `topic`."""
        origin = Record(topic, 1, number, 5, f"k{number}".encode(), f"v{number}".encode(), lambda: list(headers))
        outcome = Outcome(Verdict.DEAD_LETTER, f"E{number % 2}", "no")
        self.append(partition, origin, headers_of(DeadLetter(origin, "billing", 5, outcome, 1.0, 2.0)))

    def append(self, partition: int, origin: Record, headers: list[Header]) -> None:
        place = TopicPartition(DLQ, partition)
        log = self.logs.setdefault(place, [])
        log.append(Record(DLQ, partition, len(log), 9, origin.key, origin.value, lambda: headers, 4))

    async def topic_offsets(self, topic: str) -> dict[TopicPartition, tuple[int, int]]:
        places = [TopicPartition(topic, number) for number in range(self.partitions[topic])]
        return {place: (self.first.get(place, 0), len(self.logs.get(place, []))) for place in places}

    async def describe_topic(self, topic: str) -> TopicInfo:
        if topic not in self.partitions:
            raise TopicNotFound(f"topic {topic} does not exist")
        return TopicInfo(topic, [PartitionInfo(number, 1, [1], [1]) for number in range(self.partitions[topic])])

    async def list_topics(self) -> list[TopicInfo]:
        return [TopicInfo(name, []) for name in sorted(self.partitions)]

    async def committed(self, group: str) -> dict[TopicPartition, int]:
        return dict(self.offsets.get(group, {}))

    async def alter_group_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        self.offsets.setdefault(group, {}).update(offsets)

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Any]:
        results: list[Any] = []
        for record in records:
            self.calls += 1
            if self.calls in self.fail_at:
                results.append(KafkaTimeout("no answer"))
            else:
                self.produced.append(record)
                results.append(Produced(0, 0))
        return results

    async def read(
        self, kafka: KafkaConfig, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[list[Record], None]:
        for place, start in starts.items():
            if records := self.logs.get(place, [])[start : ends[place]]:
                yield records

    @property
    def position(self) -> int | None:
        return self.offsets.get(f"headrace.redrive.{DLQ}", {}).get(TopicPartition(DLQ, 0))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeKafka:
    made = FakeKafka()
    for module in (redrive, dead_letters):
        monkeypatch.setattr(module, "read_window", made.read)
    return made


class Impatient(SystemClock):
    async def sleep(self, seconds: float) -> None:
        """Do not wait."""


def run(fake: FakeKafka, **options: Any) -> Redriven:
    work = Redrive(KafkaConfig(), fake, DLQ, fake.produce, Impatient())  # type: ignore[arg-type]
    return asyncio.run(work.run(RedriveOptions(**options)))


def summary(fake: FakeKafka) -> Any:
    return asyncio.run(dead_letters.summary(KafkaConfig(), fake, DLQ))  # type: ignore[arg-type]


def test_a_letter_goes_back_as_it_came(fake: FakeKafka) -> None:
    """Key, value, own headers and partition are the record's own; count and first identity are added."""
    fake.letter(7, headers=[("a", b"1"), ("a", None)])
    assert run(fake) == Redriven(1, {"orders": 1}, 0)
    (record,) = fake.produced
    assert (record.topic, record.partition, record.key, record.value) == ("orders", 1, b"k7", b"v7")
    assert record.headers == [
        ("a", b"1"),
        ("a", None),
        ("headrace.redrive.count", b"1"),
        ("headrace.redrive.of", b"orders:1:7"),
    ]
    assert record.timestamp_ms == 0


def test_a_letter_that_came_back_before_keeps_its_first_identity_and_counts_up(fake: FakeKafka) -> None:
    """The second redrive of a record says 2, and still names the record it was first."""
    fake.letter(9, headers=[("headrace.redrive.count", b"1"), ("headrace.redrive.of", b"orders:0:3"), ("x", b"y")])
    run(fake)
    assert fake.produced[0].headers == [
        ("x", b"y"),
        ("headrace.redrive.count", b"2"),
        ("headrace.redrive.of", b"orders:0:3"),
    ]


def test_a_count_that_is_no_number_starts_again(fake: FakeKafka) -> None:
    """A foreign value of the counting header does not stop a redrive."""
    fake.letter(1, headers=[("headrace.redrive.count", b"many")])
    run(fake)
    assert ("headrace.redrive.count", b"1") in (fake.produced[0].headers or [])


def test_second_redrive_sends_nothing_and_new_letters_only(fake: FakeKafka) -> None:
    """Progress is kept: what went back stays back, what arrives later is left for the next run."""
    fake.letter(1)
    assert run(fake).records == 1
    assert run(fake).records == 0
    fake.letter(2)
    assert summary(fake).left == 1
    assert run(fake).records == 1
    assert [record.value for record in fake.produced] == [b"v1", b"v2"]
    assert run(fake, from_beginning=True).records == 2


def test_dry_run_changes_nothing(fake: FakeKafka) -> None:
    """A dry run counts what would go where."""
    fake.letter(1)
    fake.letter(2)
    assert run(fake, dry_run=True) == Redriven(2, {"orders": 2}, 0)
    assert fake.produced == []
    assert fake.offsets == {}


def test_failure_commits_what_is_before_it_and_says_why(fake: FakeKafka) -> None:
    """The committed position stops at the first letter that is not acknowledged."""
    for number in range(5):
        fake.letter(number)
    fake.fail_at = {3}
    with pytest.raises(KafkaTimeout):
        run(fake)
    assert fake.position == 2
    run(fake)
    assert {record.value for record in fake.produced} == {f"v{number}".encode() for number in range(5)}
    assert fake.position == 5


@given(failures=st.sets(st.integers(1, 60)), letters=st.integers(0, 30), rate=st.sampled_from([None, 1000.0]))
def test_no_letter_is_passed_over_whatever_fails(failures: set[int], letters: int, rate: float | None) -> None:
    """Runs repeated until success deliver every letter, and no position passes an undelivered one."""
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeKafka()
        patch.setattr(redrive, "read_window", fake.read)
        patch.setattr(redrive, "_SLICE_RECORDS", 7)
        for number in range(letters):
            fake.letter(number)
        fake.fail_at = failures
        for _ in range(100):
            try:
                run(fake)
                break
            except HeadraceError:
                delivered = {record.value for record in fake.produced}
                assert all(f"v{number}".encode() in delivered for number in range(fake.position or 0))
        assert {record.value for record in fake.produced} == {f"v{number}".encode() for number in range(letters)}
        assert fake.position == letters


def test_rate_bounds_records_per_second(fake: FakeKafka) -> None:
    """Letters go in steps of a second of the rate, with pauses that add up to it."""
    pauses: list[float] = []

    class Clock(SystemClock):
        async def sleep(self, seconds: float) -> None:
            pauses.append(seconds)

    for number in range(25):
        fake.letter(number)
    work = Redrive(KafkaConfig(), fake, DLQ, fake.produce, Clock())  # type: ignore[arg-type]
    asyncio.run(work.run(RedriveOptions(rate_records=10)))
    assert pauses == [1.0, 1.0, 0.5]


def test_steps_stay_within_the_producers_budget(fake: FakeKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large letters go in small steps."""
    monkeypatch.setattr(redrive, "_SLICE_BYTES", 9)
    sizes: list[int] = []

    async def produce(records: Sequence[OutgoingRecord]) -> list[Any]:
        sizes.append(len(records))
        return await fake.produce(records)

    for number in range(5):
        fake.letter(number)  # 4 bytes each
    work = Redrive(KafkaConfig(), fake, DLQ, produce, SystemClock())  # type: ignore[arg-type]
    asyncio.run(work.run(RedriveOptions()))
    assert sizes == [2, 2, 1]


def test_a_record_that_is_no_letter_is_refused_by_its_place(fake: FakeKafka) -> None:
    """Foreign records stop a redrive with partition and offset, and are passed over when asked for."""
    fake.letter(1)
    fake.append(0, Record("x", 0, 0, 0, None, b"foreign"), [])
    with pytest.raises(InvalidRequest, match=r"record 1 of orders\.dlq-0 is no dead letter"):
        run(fake)
    assert run(fake, skip_foreign=True) == Redriven(1, {"orders": 1}, 1)
    assert summary(fake).foreign == 1


@pytest.mark.parametrize("source", [DLQ, "__consumer_offsets"])
def test_redriving_onto_the_dead_letter_topic_or_an_internal_one_is_refused(fake: FakeKafka, source: str) -> None:
    """A letter that names its own topic or Kafka's would go in circles or do harm."""
    fake.letter(1, topic=source)
    with pytest.raises(InvalidRequest, match=f"says it came from {source}"):
        run(fake)
    assert fake.produced == []


def test_an_origin_that_is_gone_is_named(fake: FakeKafka) -> None:
    """Letters of a topic that was deleted stay where they are."""
    fake.letter(1, topic="gone")
    with pytest.raises(TopicNotFound, match="topic gone does not exist"):
        run(fake)
    assert fake.position is None


def test_an_origin_with_fewer_partitions_lets_the_key_choose(fake: FakeKafka) -> None:
    """A partition that is no longer there is replaced by the partitioner's choice."""
    fake.partitions["orders"] = 1
    fake.letter(1)
    run(fake)
    assert fake.produced[0].partition is None


def test_a_position_beyond_the_log_is_not_reset_silently(fake: FakeKafka) -> None:
    """After the topic was made again, the old position is told and nothing is sent."""
    fake.letter(1)
    fake.offsets[f"headrace.redrive.{DLQ}"] = {TopicPartition(DLQ, 0): 9}
    with pytest.raises(InvalidRequest, match=r"ends at 1, and group headrace\.redrive\.orders\.dlq stands at 9"):
        run(fake)
    assert run(fake, from_beginning=True).records == 1


def test_letters_that_expired_are_behind_the_start(fake: FakeKafka) -> None:
    """A log whose first records were deleted by retention is redriven from its first record."""
    fake.letter(1)
    fake.letter(2)
    fake.first[TopicPartition(DLQ, 0)] = 1
    assert run(fake).records == 1
    assert fake.produced[0].value == b"v2"


def test_summary_counts_what_is_left_by_error(fake: FakeKafka) -> None:
    """Total, left and error classes of those left."""
    for number in range(5):
        fake.letter(number)
    fake.offsets[f"headrace.redrive.{DLQ}"] = {TopicPartition(DLQ, 0): 2}
    found = summary(fake)
    assert (found.topic, found.total, found.left, found.errors) == (DLQ, 5, 3, {"E0": 2, "E1": 1})


def test_summary_of_an_ordinary_topic_is_refused(fake: FakeKafka) -> None:
    """A topic without any dead letter is none; an empty one may be."""
    assert summary(fake).total == 0
    fake.append(0, Record("x", 0, 0, 0, None, b"foreign"), [])
    with pytest.raises(InvalidRequest, match="is no dead letter topic"):
        summary(fake)


def test_topics_are_found_by_name_and_configuration(fake: FakeKafka) -> None:
    """Topics named *.dlq and configured ones that exist."""
    fake.partitions["broken"] = 1
    found = dead_letters.dead_letter_topics(fake, {"broken", "absent"})  # type: ignore[arg-type]
    assert asyncio.run(found) == ["broken", DLQ]
