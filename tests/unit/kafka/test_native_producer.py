"""The producer of the compiled module, without a broker: whatever it gets, each record is reported once."""

from __future__ import annotations

import gc
import select
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kafka import KafkaConfig
from headrace.kafka.client.native import native_module
from tests.hostile_native import HOSTILE

MODULE: Any = native_module(KafkaConfig())
pytestmark = pytest.mark.skipif(MODULE is None, reason="the compiled module was not built here")
SECONDS = 30
ODD = st.none() | st.binary(max_size=40) | st.text(max_size=5) | st.integers() | st.floats() | st.just(...)
RECORDS = st.lists(
    st.builds(
        SimpleNamespace,
        topic=st.sampled_from(["t", "u", "", "a\0b", "x" * 250, "\udc80"]) | ODD,
        key=ODD,
        value=ODD,
        headers=st.none() | st.lists(st.tuples(st.text(max_size=3), ODD) | ODD, max_size=3) | ODD,
        partition=st.none() | st.integers(-(2**70), 2**70) | ODD,
        timestamp_ms=st.integers(-(2**70), 2**70) | ODD,
    )
    | ODD,
    max_size=8,
)


def opened() -> Any:
    return MODULE.Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": "0", "log.queue": "true"})


def reports(producer: Any, most: int = 3) -> list[tuple[Any, int, int, Any]]:
    """Purge the producer, and return what it reports until it is empty."""
    producer.purge(True)
    found, wait = list[Any](), select.poll()
    wait.register(producer.fileno(), select.POLLIN)
    more = True
    while more or len(producer):
        if not more:
            assert wait.poll(SECONDS * 1000), "no report"
        completed, _, more = producer.drain(most)
        found += completed
    return found


@settings(max_examples=100, deadline=None)
@given(requests=st.lists(RECORDS, min_size=1, max_size=4), most=st.integers(1, 9))
def test_each_record_is_refused_or_reported_once(requests: list[list[Any]], most: int) -> None:
    """Also a record of no use, and with reports that are taken in small numbers."""
    producer = opened()
    seen: Counter[tuple[int, int]] = Counter()
    for number, records in enumerate(requests):
        at = 0
        while at < len(records) and (refused := producer.produce(number, records[at:], at, number % 2)):
            index, cause = refused
            assert isinstance(cause, Exception) or (cause[0] != 0, type(cause[1]), cause[2]) == (True, str, False)
            seen[number, index] += 1
            at = index + 1
    for number, first, count, found in reports(producer, most):
        assert [report[:2] for report in found] == [(found[0][0], 0)] * count, "none of them was written"
        seen.update((number, first + at) for at in range(count))
    assert seen == Counter({(number, at): 1 for number, records in enumerate(requests) for at in range(len(records))})
    producer.close()


def test_nothing_is_kept_of_what_was_reported() -> None:
    """Nor of what was refused, or was in flight when the producer was closed."""
    producer = opened()
    record = SimpleNamespace(topic="t", key=b"k", value=b"v", headers=[("a", b"1")], partition=None, timestamp_ms=0)
    bad = SimpleNamespace(topic="t", key=b"k", value=1, headers=None, partition=None, timestamp_ms=0)
    request = object()
    gc.collect()
    before = [sys.getrefcount(each) for each in (record, bad, request, record.value, record.headers)]
    for _ in range(100):
        producer.produce(request, [record] * 10, 0, False)
        producer.produce(request, [bad], 0, False)
    assert len(reports(producer)) == 100
    producer.produce(request, [record], 0, False)
    producer.close()
    assert [sys.getrefcount(each) for each in (record, bad, request, record.value, record.headers)] == before


def test_a_closed_producer_says_so() -> None:
    producer = opened()
    producer.close()
    producer.close()
    for call in (lambda: producer.produce(1, [], 0, False), lambda: producer.drain(1), producer.purge):
        with pytest.raises(ValueError, match="closed"):
            call()
    assert len(producer) == 0


@pytest.mark.parametrize(
    "properties", [{"no.such.property": "1"}, {"linger.ms": "many"}, {"linger.ms": 1}, {1: "1"}, None]
)
def test_what_cannot_be_a_client_is_refused(properties: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        MODULE.Producer(properties)


@pytest.mark.parametrize("hostile", [each.__name__ for each in HOSTILE])
def test_no_caller_brings_the_process_down(hostile: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile_native", hostile], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
