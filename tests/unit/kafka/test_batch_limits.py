"""How large batches may be, topic by topic."""

from __future__ import annotations

import asyncio
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError as ClientError

from headrace.errors import BatchRefused, HeadraceError, KafkaUnauthorized, KafkaUnavailable
from headrace.kafka.producer_limits import Batches, BatchLimits

USUAL = 1_000_000
TOO_LARGE = ClientError(ClientError.MSG_SIZE_TOO_LARGE)


class Cluster:
    """Tells the settings of a topic, or why not."""

    def __init__(self, *answers: int | dict[str, str] | HeadraceError) -> None:
        self.answers = list(answers)

    async def topic_configs(self, topic: str) -> dict[str, str]:
        answer = self.answers.pop(0)
        if isinstance(answer, HeadraceError):
            raise answer
        return answer if isinstance(answer, dict) else {"max.message.bytes": str(answer)}


def limits(*answers: Any, ask: int = 1) -> BatchLimits:
    """Return limits that were asked for the topic t."""
    cluster = Cluster(*answers)
    found = BatchLimits(cluster.topic_configs)

    async def main() -> None:
        await asyncio.gather(*(found.learn("t") for _ in range(ask)))

    asyncio.run(main())
    return found


def record(size: int) -> confluent_kafka.Message:
    return confluent_kafka.Message(topic="t", value=b"x" * size)


@pytest.mark.parametrize(
    ("answer", "batch"), [(1_048_588, None), (100_000, 65_536), (1000, 512), (257, 1), (10, 1), (65_536 + 256, 65_536)]
)
def test_batches_fit_the_topic(answer: int, batch: int | None) -> None:
    """With room for what frames them; a usual limit needs no batches of its own."""
    assert limits(answer).of("t", USUAL) == batch


def test_a_topic_is_asked_for_once() -> None:
    """Also by many at the same time."""
    assert limits(100_000, ask=5).of("t", USUAL) == 65_536


@pytest.mark.parametrize("answer", [KafkaUnauthorized(), KafkaUnavailable()])
def test_where_kafka_does_not_tell_the_usual_size_stays(answer: HeadraceError) -> None:
    """Nobody waits for the next question at once."""
    found = limits(answer)
    assert (found.of("t", USUAL), found.knows("t")) == (None, True)


def test_a_refused_batch_halves_the_limit_once_for_all_its_records() -> None:
    """A record that was alone is too large itself; any other may be sent again."""
    found = limits(KafkaUnauthorized())
    for _ in range(10):
        assert isinstance(found.refusal(TOO_LARGE, record(50_000), USUAL), BatchRefused)
    assert found.of("t", USUAL) == 524_288
    assert not found.knows("t")
    assert found.refusal(TOO_LARGE, record(600_000), 524_288) is None
    assert found.refusal(ClientError(ClientError.INVALID_RECORD), record(1), 524_288) is None
    for size in (524_288, 262_144, 131_072):
        found.refusal(TOO_LARGE, record(50_000), size)
    assert found.of("t", USUAL) == 65_536


def test_the_size_of_a_segment_limits_a_batch() -> None:
    """Kafka refuses a batch that is larger than a segment of the topic."""
    assert limits({"max.message.bytes": "1048588", "segment.bytes": "100000"}).of("t", USUAL) == 65_536


def test_a_refusal_counts_for_a_while_beside_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that Kafka refuses every time is alone after a few refusals, so it is too large itself."""
    now = 100.0
    monkeypatch.setattr("headrace.kafka.producer_limits.time.monotonic", lambda: now)
    found = limits(*[1_048_588] * 10)
    refusals = 0
    while found.refusal(TOO_LARGE, record(50_000), found.of("t", USUAL) or USUAL):
        refusals += 1
        asyncio.run(found.learn("t"))
        assert refusals < 6
    assert found.of("t", USUAL) == 32_768
    assert found.knows("t")
    now += 601
    assert not found.knows("t")
    asyncio.run(found.learn("t"))
    assert found.of("t", USUAL) is None


def test_a_client_is_flushed_before_a_batch_gets_too_large() -> None:
    """A record that is larger goes alone; topics without a limit are never flushed."""
    flushed: list[int] = []
    sent: list[int] = []
    batches = Batches(limits(1000), USUAL, lambda: flushed.append(len(sent)))
    for size in (200, 200, 200, 600, 600, 10, 10):
        batches.before("t", size)
        batches.before("u", 10**6)
        sent.append(size)
    assert flushed == [2, 3, 4, 5]
