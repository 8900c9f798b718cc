"""The destination without processes: outcomes, outputs, blame."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.delivery.outcomes import ACK, NOT_BEGUN, Delivery, Reply
from headrace.errors import (
    DestinationUnavailable,
    HeadraceError,
    KafkaTimeout,
    KafkaUnavailable,
    ProducerQueueFull,
    RecordTooLarge,
    WorkerLost,
)
from headrace.framing import FrameReader
from headrace.functions import protocol
from headrace.functions.destination import FunctionDestination
from headrace.functions.triggers.kafka_trigger import KafkaAttributes, KafkaTrigger
from headrace.functions.triggers.trigger import HandlerBatch
from headrace.records import Record, TopicPartition
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

P = TopicPartition("t", 0)
Response = Callable[[protocol.Work], protocol.Done | protocol.Results]


class FakeWorkers:
    """Answers each frame by a function, and remembers the offsets of the frames."""

    def __init__(self, response: Response) -> None:
        trigger = KafkaTrigger(
            name="k", kind="kafka", kafka=KafkaAttributes(topics=["t"], group="g"), output_topic="out"
        )
        self.triggers, self.workers, self.spec = [trigger], range(1), SimpleNamespace(name="fn")
        self.metrics = SimpleNamespace(handled={"k": Counter[str]()})
        self.response = response
        self.frames: list[list[int]] = []

    async def serve(
        self,
        candidates: Sequence[int],
        partition: TopicPartition,
        frame: bytearray,
        records: int,
        schemas: Mapping[int, protocol.Schema],
        ending: Collection[TopicPartition] = (),
    ) -> protocol.Done | protocol.Results:
        [work] = FrameReader(protocol.decode_to_worker).feed(bytes(frame))
        assert isinstance(work, protocol.Work) and len(work.offsets) == records
        self.frames.append(work.offsets)
        return self.response(work)


def cluster(*outcomes: HeadraceError | None) -> MemoryCluster:
    """Return a cluster that refuses the next outputs with these errors; None writes one."""
    made = MemoryCluster({"t": 2, "out": 1})
    made.producer.refuse(*outcomes)
    return made


def destination(
    workers: FakeWorkers, kafka: MemoryCluster | None = None, clock: ManualClock | None = None
) -> FunctionDestination:
    needed: Any = workers
    topics: Any = kafka or cluster()
    produce = topics.producer.produce
    registry: Any = None  # no schema is needed here
    return FunctionDestination(
        needed, workers.triggers[0], clock or ManualClock(), produce=produce, registry=registry, topics=topics
    )


def delivery(count: int, partition: TopicPartition = P) -> Delivery:
    records = [Record(partition.topic, partition.partition, n, 0, b"k%d" % n, b"v") for n in range(count)]
    return Delivery("g", partition, 1, records, 1)


def outputs(work: protocol.Work) -> protocol.Results:
    return protocol.Results([protocol.Result([protocol.Output(b"%d" % offset, [])]) for offset in work.offsets])


def bodies(work: protocol.Work) -> protocol.Results:
    return protocol.Results([b"%d" % offset for offset in work.offsets])


@pytest.mark.parametrize("response", [bodies, outputs])
def test_a_refused_output_fails_its_own_record_only(response: Any) -> None:
    """Whatever form the worker has answered in."""
    kafka = cluster(None, RecordTooLarge("2 MB"))
    replies = asyncio.run(destination(FakeWorkers(response), kafka).deliver(delivery(3)))
    assert [reply.error for reply in replies] == ["", "RecordTooLarge", ""]


@pytest.mark.parametrize("error", [KafkaUnavailable("no broker"), KafkaTimeout("no broker")])
def test_an_output_that_is_not_acknowledged_holds_back_its_record_and_what_follows(error: Exception) -> None:
    """A record is never acknowledged before its output, and a broker's failure uses no attempts.

    So a repetition begins with that record, and writes no output before it again. Without an order nothing waits.
    """
    kafka, why = cluster(None, error, None), "outputs to out are not acknowledged: no broker"
    workers = FakeWorkers(outputs)
    target = destination(workers, kafka)
    stuck = Reply(why, reached=False)
    assert asyncio.run(target.deliver(delivery(3))) == [ACK, stuck, NOT_BEGUN]
    workers.triggers = [workers.triggers[0].model_copy(update={"ordering": "none"})]
    target = destination(workers, kafka)
    kafka.producer.refuse(None, error, None)
    assert asyncio.run(target.deliver(delivery(3))) == [ACK, stuck, ACK]
    kafka.producer.refuse(error, error, error)
    with pytest.raises(DestinationUnavailable, match=why):
        asyncio.run(target.deliver(delivery(3)))
    kafka.producer.failure = error
    with pytest.raises(DestinationUnavailable, match=why):
        asyncio.run(target.deliver(delivery(3)))


async def test_a_full_producer_is_waited_for_without_running_the_handler_again() -> None:
    """Back-pressure from Kafka makes no duplicates."""
    kafka, workers, clock = cluster(), FakeWorkers(outputs), ManualClock()
    kafka.producer.failure = ProducerQueueFull()
    work = asyncio.ensure_future(destination(workers, kafka, clock).deliver(delivery(2)))
    await clock.advance(0.1)
    assert not work.done()
    kafka.producer.failure = None
    await clock.advance(0.1)
    assert await work == [ACK, ACK]
    assert workers.frames == [[0, 1]]


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("late", [False, True])
def test_records_that_kill_their_worker_are_found_by_halving(batch_size: int, late: bool) -> None:
    """Also if a worker dies only after the last record of its frame was begun; the others are only called again."""
    chance = Random(batch_size + late)
    for count in [1, 2, 3, 40, 41, 300]:
        guilty = {chance.randrange(count) for _ in range(chance.choice([1, 1, 2, 5]))}
        deaths = list[int]()

        def answer(work: protocol.Work, guilty: set[int] = guilty, deaths: list[int] = deaths) -> protocol.Done:
            if found := [index for index, offset in enumerate(work.offsets) if offset in guilty]:
                deaths.append(len(work.offsets))
                begun = len(work.offsets) - 1 if late else found[0]
                raise WorkerLost("worker 0 ended", begun=begun // batch_size * batch_size + 1, error="timeout")
            return protocol.Done()

        workers = FakeWorkers(answer)
        batch = HandlerBatch(mode="enable" if batch_size > 1 else "disable", batch_size=batch_size)
        workers.triggers = [workers.triggers[0].model_copy(update={"batch": batch})]
        replies = asyncio.run((target := destination(workers)).deliver(delivery(count)))
        assert {offset for offset, reply in enumerate(replies) if reply != ACK} == guilty
        limit = 3 if not late and batch_size == 1 else math.log2(count) + 4
        assert len(deaths) <= limit * len(guilty), (count, guilty, deaths)
        assert len(workers.frames) <= 3 * limit * len(guilty) and not len(target._suspects)
