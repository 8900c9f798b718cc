"""Writing dead letters: what they say, what gives way when they are too large, and which are not written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from headrace.delivery.dead_letter import DeadLetterTopic, headers_of, origin_of, restored
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.errors import DeadLetterFailed, HeadraceError, InvalidRequest, KafkaUnavailable, RecordTooLarge
from headrace.records import Header, OutgoingRecord, Produced, Record
from yaml_table import table

OWN: list[Header] = [("a", b"\x00\xff"), ("a", None)]


def dead_letter(offset: int = 7, value: bytes = b"v", reason: str = "no such order\nat line 3") -> DeadLetter:
    record = Record("t", 2, offset, 5, b"\xfe", value, lambda: OWN)
    return DeadLetter(record, "g", 3, Reply("HTTP 500", reason, 500), 1.0, 2.0)


def size(record: OutgoingRecord) -> int:
    return len(record.value or b"") + sum(len(name) + len(data or b"") for name, data in record.headers or ())


class Topic:
    """A topic with a limit."""

    def __init__(self, limit: int = 1_000_000) -> None:
        self.limit = limit
        self.written: list[OutgoingRecord] = []
        self.made: list[str] = []
        self.down: set[bytes | None] = set()

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Produced | HeadraceError]:
        results: list[Produced | HeadraceError] = []
        for record in records:
            if size(record) > self.limit:
                results.append(RecordTooLarge("too large"))
            elif record.value in self.down:
                results.append(KafkaUnavailable("down"))
            else:
                self.written.append(record)
                results.append(Produced(0, len(self.written) - 1))
        return results

    async def ensure(self, name: str, source: str) -> None:
        self.made.append(name)

    def write(self, *dead_letters: DeadLetter) -> None:
        asyncio.run(DeadLetterTopic("{topic}.dlq", self.produce, self.ensure).write(dead_letters))


def test_a_dead_letter_has_the_record_and_its_history() -> None:
    """Key, value and own headers byte for byte, then the history."""
    topic = Topic()
    topic.write(dead_letter())
    (written,) = topic.written
    assert (written.topic, written.key, written.value) == ("t.dlq", b"\xfe", b"v")
    headers = list(written.headers or ())
    assert headers[:2] == OWN
    assert {name: (value or b"").decode() for name, value in headers[2:]} == table(__file__, "history")
    origin = origin_of(headers)
    assert origin
    assert (origin.text("status"), origin.text("excerpt")) == ("500", "no such order\nat line 3")


def test_a_dead_letter_is_restored_as_its_record() -> None:
    """Offset, time, key, value and own headers are those of the record; another record is rejected."""
    first = dead_letter()
    stored = Record("t.dlq", 0, 99, 8, first.record.key, first.record.value, lambda: headers_of(first), 3)
    again = restored(stored)
    assert (again.topic_partition, again.offset, again.timestamp_ms) == (first.record.topic_partition, 7, 5)
    assert (again.key, again.value, again.size_bytes) == (b"\xfe", b"v", 3)
    assert again.headers[: len(OWN)] == OWN
    assert again.headers[len(OWN) :] == [("headrace.redrive.count", b"1"), ("headrace.redrive.of", b"t:2:7")]
    back = Record("t.dlq", 0, 100, 8, None, None, lambda: headers_of(first._replace(record=again)))
    assert restored(back).headers[len(OWN) :] == [("headrace.redrive.count", b"2"), ("headrace.redrive.of", b"t:2:7")]
    with pytest.raises(InvalidRequest, match="not a dead letter"):
        restored(again)


def test_a_header_is_cut_between_characters() -> None:
    """A character that UTF-8 cannot encode does not prevent the dead letter."""
    headers = dict(headers_of(dead_letter(reason="\udcff" + "\u20ac" * 5000)))
    assert headers["headrace.dlq.excerpt"] == b"?" + "\u20ac".encode() * 341
    assert len(headers["StackTrace"] or b"") == 1 + 3 * 2730


@pytest.mark.parametrize(("size_bytes", "left"), table(__file__, "ours_give_way_when_a_letter_is_too_large"))
def test_ours_give_way_when_a_letter_is_too_large(
    size_bytes: int, left: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Omitted are the stack, the reason, the excerpt, then all headers of Headrace; the log then has the history."""
    value = b"x" * 100_000
    topic = Topic(len(value) + size_bytes)
    topic.write(dead_letter(value=value, reason="r" * 9000))
    (written,) = topic.written
    assert (written.key, written.value, list(written.headers or ())[:2]) == (b"\xfe", value, OWN)
    names = [name.removeprefix("headrace.dlq.") for name, _ in list(written.headers or ())[2:]]
    assert [name for name in names if name in ("reason", "status", "excerpt", "StackTrace")] == left
    assert bool(names) == bool(caplog.messages == [])
    if not names:
        assert (
            "group g, t-2: the dead letter of offset 7 (attempts=3, HTTP 500) has no headrace.dlq headers"
            in caplog.text
        )


async def test_a_failure_names_the_dead_letters_that_are_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """The others are not written again; and the topic is checked again, because it may be gone."""
    topic = Topic(50_000)
    topic.down = {b"b"}
    writer = DeadLetterTopic("{topic}.dlq", topic.produce, topic.ensure)

    with pytest.raises(DeadLetterFailed, match=r"failed to write 1 of 3 dead letters of t to t\.dlq: down") as one:
        await writer.write([dead_letter(1), dead_letter(2, b"b"), dead_letter(3)])
    assert one.value.parameters["missing"] == [1]
    with pytest.raises(DeadLetterFailed, match="too large") as two:
        await writer.write([dead_letter(1, b"x" * 60_000), dead_letter(2)])
    assert two.value.parameters["missing"] == [0]
    assert topic.made == ["t.dlq"] * 2
    assert [(record.value or b"")[:1] for record in topic.written] == [b"v"] * 3
