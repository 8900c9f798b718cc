"""What no caller of the compiled module should do. Each function runs in a process of its own, which must not crash."""

from __future__ import annotations

import ctypes.util
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.native import native_module

module: Any = native_module(KafkaConfig())


def opened() -> Any:
    return module.Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": "0", "log.queue": "true"})


def record(**fields: Any) -> Any:
    known = {"topic": "t", "key": None, "value": b"v", "headers": None, "partition": None, "timestamp_ms": 0}
    return SimpleNamespace(**{**known, **fields})


def refused(call: Callable[[], object]) -> str:
    try:
        found = call()
    except Exception as cause:  # noqa: BLE001 whatever it is
        return str(cause)
    raise AssertionError(f"{found} was returned")


def the_producer_is_closed_by_a_record() -> None:
    """It is in use then, so it stays open."""
    producer = opened()

    class Closing:
        topic, key, headers, partition, timestamp_ms = "t", None, None, None, 0

        @property
        def value(self) -> bytes:
            producer.close()
            assert "in use" in refused(lambda: producer.drain(9))
            assert "in use" in refused(lambda: producer.produce(1, [record()], 0, True))
            return b"v"

    assert producer.produce(1, [Closing(), record()], 0, True) is None
    assert len(producer) >= 2
    producer.close()


def a_list_says_that_it_is_longer_than_memory() -> None:
    class Long(list[Any]):
        def __len__(self) -> int:
            return 2**61

    producer = opened()
    assert "too many" in refused(lambda: producer.produce(1, Long([record()] * 3), 0, True))
    index, cause = producer.produce(1, [record(headers=Long([("a", b"1")]))], 0, True)
    assert (index, type(cause)) == (0, IndexError)


def values_are_longer_than_kafka_allows() -> None:
    large, producer = bytes(2**31 + 1), opened()
    for fields in ({"key": large}, {"value": large}, {"key": large, "value": large}):
        index, (code, _, is_fatal) = producer.produce(1, [record(**fields)], 0, True)
        assert (index, code, is_fatal) == (0, confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE, False)


def a_child_uses_and_drops_what_its_parent_has() -> None:
    """None of the client's threads is there, and its locks may be held for ever."""
    producer, consumer = opened(), confluent_kafka.Consumer({"group.id": "g", "log_level": 0})
    queue = module.FetchQueue(consumer)
    producer.produce(1, [record()], 0, True)
    producer.purge()
    if not (child := os.fork()):
        assert "forked" in refused(lambda: producer.drain(9))
        assert "forked" in refused(lambda: producer.produce(1, [record()], 0, True))
        assert "forked" in refused(lambda: queue.consume(1, 0))
        assert len(producer) == 0
        producer.close()
        queue.close()
        del producer
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    completed: list[Any] = []
    while not completed:
        completed += producer.drain(9)[0]
    assert completed[0][0] == 1
    producer.close()
    queue.close()
    consumer.close()


def another_library_is_opened() -> None:
    """It has not got the functions, and what is open goes on."""
    producer = opened()
    assert "has no rd_kafka" in refused(lambda: module.open_library(ctypes.util.find_library("c")))
    assert producer.produce(1, [record()], 0, True) is None
    producer.close()
    opened().close()


def the_process_ends_while_all_is_in_use() -> None:
    producer, consumer = opened(), confluent_kafka.Consumer({"group.id": "g", "log_level": 0})
    producer.produce(producer, [record()] * 9, 0, True)
    queue = module.FetchQueue(consumer)
    threading.Thread(target=lambda: queue.consume(9, 600), daemon=True).start()


def objects_are_half_made() -> None:
    for made in (module.Producer.__new__(module.Producer), opened()):
        made.close()
        for call in (made.purge, lambda: made.drain(1), lambda: made.transact("begin_transaction", 0)):  # noqa: B023 called here
            assert "closed" in refused(call)
        assert len(made) == 0
    queue = module.FetchQueue.__new__(module.FetchQueue)
    queue.close()
    assert "closed" in refused(lambda: queue.consume(1, 0))
    producer = module.Producer.__new__(module.Producer)
    assert "No such" in refused(lambda: producer.__init__({"no.such": "1"}))
    assert "made already" in refused(lambda: producer.__init__({}))


def a_transaction_gets_anything() -> None:
    producer = opened()
    assert "transactional.id" in producer.transact("init_transactions", 10)[1]
    assert "too short" in producer.transact("", 10, [], b"")[1]
    for rows in ([1], [()], [("t", 0, "x", "")], [("t", 0, 2**70, "")], [("\0", 0, 1, "")]):
        assert refused(lambda: producer.transact("", 10, rows, b"CGMDv2:"))  # noqa: B023 called here


HOSTILE = [
    the_producer_is_closed_by_a_record,
    a_list_says_that_it_is_longer_than_memory,
    values_are_longer_than_kafka_allows,
    a_child_uses_and_drops_what_its_parent_has,
    another_library_is_opened,
    the_process_ends_while_all_is_in_use,
    objects_are_half_made,
    a_transaction_gets_anything,
]

if __name__ == "__main__":
    globals()[sys.argv[1]]()
