"""Dead letters of other products: what each header means, and that no bytes whatever make a reader raise."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.whole_file import WholeFile
from headrace.delivery.dead_letter import Origin
from headrace.kafka.internal_topics import InternalTopics
from headrace.records import Header, Record, TopicPartition
from headrace.runs.dead_letters.dead_letter_readers import ReadDeadLetter, read_origin
from headrace.runs.dead_letters.origins import Origins
from headrace_devkit.testing.memory_cluster import MemoryCluster
from headrace_dialects.foreign import foreign_readers
from headrace_dialects.foreign.foreign_readers import READERS
from tests.foreign_dead_letters import WRITERS, written_by

SPRING = 1_700_000_000_000, "billing", 0, "CardDeclined", "Listener failed; card 7 declined", True
WRITTEN = 1_700_000_009_000
OWN: list[Header] = [("trace", b"\x00"), ("dead-letter-note", b"ours"), ("kafka_key", None)]


def read(headers: list[Header]) -> Origin | None:
    return read_origin(Record("orders.DLT", 0, 0, WRITTEN, None, None), headers)


@pytest.mark.parametrize(
    ("writer", "name", "timestamp_ms", "group", "attempts", "error", "reason", "goes"),
    [
        ("spring", "spring", 1_700_000_000_000, "billing", 0, "CardDeclined", "Listener failed; card 7 declined", True),
        (
            "spring-retry",
            "spring",
            1_700_000_000_000,
            "billing",
            0,
            "CardDeclined",
            "Listener failed; card 7 declined",
            True,
        ),
        ("connect", "connect", WRITTEN, "connect-lake", 0, "DataException", "Converting byte[] failed", True),
        ("streams", "streams", WRITTEN, "", 0, "ArithmeticException", "/ by zero", False),
        ("share", "share", -1, "work", 5, *["Offset delivery count exceeded the threshold."] * 2, False),
        ("smallrye", "smallrye", -1, "", 0, "NoStock", "no stock of 7", True),
    ],
)
def test_a_letter_says_who_wrote_it_of_what_and_why(
    writer: str, name: str, timestamp_ms: int, group: str, attempts: int, error: str, reason: str, goes: bool
) -> None:
    """The record's own headers are those without the writer's."""
    headers = [*OWN, *written_by(writer, "orders", 2, 3_000_000_000)]
    found = read(headers)
    assert found
    assert (found.writer, found.partition, found.offset) == (name, TopicPartition("orders", 2), 3_000_000_000)
    assert (found.timestamp_ms, found.group, found.attempts) == (timestamp_ms, group, attempts)
    assert (found.error, found.text("reason"), not found.refusal) == (error, reason, goes)
    assert found.own_headers(headers) == OWN
    assert bool(found.text("last_failure")) == (name not in ("connect", "streams"))


@pytest.mark.parametrize("writer", WRITERS)
@given(data=st.data())
def test_no_bytes_make_a_reader_raise(writer: str, data: st.DataObject) -> None:
    """Whatever is wrong: read, or a record that no reader reads."""
    headers = written_by(writer, "orders", 2, 7)
    at = data.draw(st.integers(0, len(headers) - 1))
    changed = data.draw(st.none() | st.binary(max_size=12) | st.just(b"9" * 30))
    headers[at] = (headers[at][0], changed)
    found = read(headers)
    name = headers[at][0]
    if found:
        assert 0 <= found.partition.partition < 2**31
        assert 0 <= found.offset < 2**63
    if name.endswith(("-partition", "-offset", ".partition", ".offset")) and len(changed or b"") in (0, 1, 3, 5, 9):
        assert found is None or (changed or b"").isdigit()


@pytest.mark.parametrize(("number", "offset"), [(b"7", 7), ((7).to_bytes(8), 7), (b"-7", None), (b"\xff" * 8, None)])
def test_numbers_are_text_or_bytes(number: bytes, offset: int | None) -> None:
    """As copies of Spring write them; a negative one is not an offset."""
    headers = [(n, number if n.endswith("-offset") else data) for n, data in written_by("spring", "orders", 2, 1)]
    found = read(headers)
    assert (found.offset if found else None) == offset


def test_a_letter_that_failed_twice_is_of_its_first_record_and_its_last_failure() -> None:
    """Spring appends positions; ours come first where both wrote."""
    twice = [*written_by("spring", "orders", 1, 1), *written_by("spring", "orders.DLT", 2, 2)]
    twice[-2] = ("kafka_dlt-exception-message", b"again")
    found = read(twice)
    assert found
    assert (found.partition, found.offset, found.text("reason")) == (TopicPartition("orders", 1), 1, "again")


def origins(**foreign: Any) -> Origins:
    names = {topic.replace("_", "."): value for topic, value in foreign.items()}
    return Origins(InternalTopics(WholeFile.model_validate({"dead_letters": {"foreign": names}})))


def test_the_configuration_proves_an_origin() -> None:
    """A pair or several, also from quarantine; no other topic, and never a retry topic of Spring."""
    found = read(written_by("connect", "orders", 2, 7))
    assert found
    for pair in ("orders", ["audits", "orders"]):
        assert origins(orders_DLT=pair).refusal("orders.DLT", found) == ""
    assert origins(orders_DLT="orders").refusal("orders.DLT.quarantine", found) == ""
    assert "not known here" in origins(orders_DLT="audits").refusal("orders.DLT", found)
    assert InternalTopics(WholeFile.model_validate({"dead_letters": {"foreign": {"a.DLT": "a"}}})).kind_of("a.DLT")
    for wrong in ("orders-retry-1000", "orders-retry", "orders.dlq"):
        with pytest.raises(ValueError, match="orders"):
            origins(orders_DLT=wrong)
    retried = read(written_by("spring", "orders-retry-0", 2, 7))
    assert retried
    assert "retry topic of Spring" in retried.refusal


def test_originals_are_those_of_the_offset_with_the_value_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is gone, in a partition that never was, or another record."""
    cluster = MemoryCluster({"orders": 2})
    cluster.read_by(monkeypatch, foreign_readers)
    for offset in range(3000):
        cluster.append(Record("orders", 1, offset, 5, b"k", b"v%d" % offset, lambda: OWN))

    def letter(at: int, partition: int, offset: int, value: bytes | None) -> ReadDeadLetter:
        found = read(written_by("share", "orders", partition, offset))
        assert found
        return Record("dlq.work", 0, at, WRITTEN, None, value), found, []

    wanted = [letter(0, 1, 5, None), letter(1, 1, 2999, b"v2999"), letter(2, 1, 6, b"other")]
    wanted += [letter(3, 1, 3000, None), letter(4, 9, 5, None)]
    admin: Any = cluster
    found = asyncio.run(READERS.originals(admin, wanted))
    assert {at: (one.offset, list(one.headers)) for at, one in found.items()} == {0: (5, OWN), 1: (2999, OWN)}
