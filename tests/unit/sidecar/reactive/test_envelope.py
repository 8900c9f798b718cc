"""The body of a delivery and the responses to it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.outcomes import ACK, Delivery
from headrace.errors import DestinationRefused
from headrace.records import Header, Record, RecordBatch, TopicPartition
from headrace.sidecar.reactive.envelope import array_of, replies_of
from yaml_table import table

HEADERS: list[Header] = [("a", b"1"), ("a", b"2"), ('quote"', None), ("bytes", b"\xff")]


def record(offset: int = 7, headers: list[Header] | None = None) -> Record:
    return Record('to"pic', 3, offset, 1234, b"k", b"v", lambda: headers)


DELIVERY = Delivery('g%"', TopicPartition('to"pic', 3), 5, [], 2)
PLACE = {"topic": 'to"pic', "partition": 3}


def entry(sent: Record, key: bytes | None = None, value: bytes | None = None) -> Any:
    (found,) = json.loads(array_of(DELIVERY, RecordBatch.of([sent]), [key], [value]))
    return found


def test_an_entry_is_the_record_with_its_identity() -> None:
    """The fields of light-4j with the delivery's id, attempt and epoch; valid JSON for every name."""
    assert entry(record(headers=HEADERS), b'"k"', b'{"n":12345678901234567890}') == {
        **PLACE,
        "offset": 7,
        "timestamp": 1234,
        "headers": {"a": "2", 'quote"': None, "bytes": "\ufffd", "X-Correlation-Id": 'g%":to"pic:3:7'},
        "headerList": [
            {"name": "a", "value": "MQ=="},
            {"name": "a", "value": "Mg=="},
            {"name": 'quote"', "value": None},
            {"name": "bytes", "value": "/w=="},
        ],
        "key": "k",
        "value": {"n": 12345678901234567890},
        "deliveryId": 'g%":to"pic:3:7',
        "attempt": 2,
        "epoch": 5,
    }


@pytest.mark.parametrize(
    ("headers", "expected"),
    [(None, 'g%":to"pic:3:7'), ([("x", b"")], 'g%":to"pic:3:7'), ([("X-Correlation-Id", b"mine")], "mine")],
)
def test_each_record_has_a_correlation_id(headers: list[Header] | None, expected: str) -> None:
    """Its own, or its delivery id, which is the same in every attempt. Without a live assignment it has no epoch."""
    batch = RecordBatch.of([record(headers=headers)])
    (found,) = json.loads(array_of(DELIVERY._replace(epoch=0), batch, [None], [None]))
    assert (found["headers"]["X-Correlation-Id"], found["attempt"], "epoch" in found) == (expected, 2, False)


def test_null_key_and_value_are_left_out() -> None:
    """A tombstone has no value field, as in light-4j; empty is not null."""
    assert not {"key", "value"} & entry(record()).keys()
    assert entry(record(), b'""', b'""') | {"key": "", "value": ""} == entry(record(), b'""', b'""')


def result(offset: int, processed: bool, name: str = "record", **more: Any) -> dict[str, Any]:
    return {name: {**PLACE, "offset": offset, "value": [1, {"x": None}]}, "processed": processed, "extra": 1, **more}


def outcomes(response: Any, *offsets: int) -> list[Any]:
    sent = RecordBatch.of([record(offset) for offset in offsets or (7,)])
    if not isinstance(response, str | bytes):
        response = json.dumps(response)
    return list(replies_of(response.encode() if isinstance(response, str) else response, sent))


@given(st.integers(1, 50), st.data())
def test_any_order_of_echoed_results_gives_each_record_its_own(count: int, data: st.DataObject) -> None:
    """Whatever the order, and under mixed names."""
    offsets = [n * 3 for n in range(count)]
    failed = data.draw(st.sets(st.sampled_from(offsets)))
    names = data.draw(st.lists(st.sampled_from(["record", "consumerRecord"]), min_size=count, max_size=count))
    results = [result(offset, offset not in failed, name) for offset, name in zip(offsets, names, strict=True)]
    random.Random(data.draw(st.integers())).shuffle(results)
    assert [offset for offset, one in zip(offsets, outcomes(results, *offsets), strict=True) if one != ACK] == sorted(
        failed
    )


@pytest.mark.parametrize("echo", [{}, {"record": None}, {"record": {}}, {"record": {"key": "k"}}])
def test_results_without_coordinates_are_matched_by_position(echo: dict[str, Any]) -> None:
    """As in light-4j; the stack trace is kept."""
    found = outcomes([{"processed": True, **echo}, {"processed": False, "stacktrace": "boom", **echo}], 7, 8)
    assert (found[0], found[1].reason) == (ACK, "boom")


@pytest.mark.parametrize("said", [True, False, None, "yes"])
def test_a_failure_is_permanent_if_the_backend_says_so(said: object) -> None:
    """Only with `true`; other values are ignored, like unknown fields."""
    assert outcomes([result(7, False, permanent=said)])[0].permanent is (said is True)


@pytest.mark.parametrize(("trace", "error"), table(__file__, "a_stack_trace_names_its_class_of_error"))
def test_a_stack_trace_names_its_class_of_error(trace: str, error: str) -> None:
    """By it policies decide, and dead letters are counted."""
    assert outcomes([result(7, False, stacktrace=trace)])[0].error == error


def test_the_reason_of_a_python_traceback_is_its_last_line() -> None:
    """The stack keeps the end of a long one; of any other trace, reasons have the beginning."""
    assert len(outcomes([{"stacktrace": "x" * 100_000}])[0].reason) == 8000
    trace = "Traceback (most recent call last):\n" + '  File "a.py", line 3, in f\n' * 9000 + "ValueError: boom\n"
    (outcome,) = outcomes([{"stacktrace": trace}])
    assert (outcome.error, outcome.reason, len(outcome.stack)) == ("ValueError", "ValueError: boom", 8000)
    assert outcome.stack.endswith("in f\nValueError: boom")


ONE = result(7, True)


@pytest.mark.parametrize(
    ("response", "says"),
    [
        ([ONE, ONE], "result 1 is the second for offset 7"),
        ([ONE, {"processed": True}], "result 1 has no topic"),
        ([{"processed": True}, result(8, True)], "result 0 has no topic"),
        ([ONE, result(9, True)], "result 1 is for .* offset 9"),
        *table(__file__, "a_response_that_is_not_as_agreed_is_refused"),
        (b'[{"processed":false,"stacktrace":"\xff"}]', "not a JSON array"),
        (b"[" * 100_000, "not a JSON array"),
        (b'[{"x":' + b"[" * 100_000, "not a JSON array"),
        ([{**ONE, "record": {"topic": "x", "partition": 3, "offset": 7}}, ONE], "result 0 is for x-3 offset 7"),
        ([{**ONE, "record": {**PLACE, "partition": 4, "offset": 7}}, ONE], "result 0 is for to.pic-4 offset 7"),
        ([{**ONE, "record": PLACE}, ONE], "result 0 has no topic"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_response_that_is_not_as_agreed_is_refused(response: Any, says: str) -> None:
    """Nothing is guessed, and the text says what is wrong."""
    with pytest.raises(DestinationRefused, match=says):
        outcomes(response, 7, 8)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)
ECHOES = st.dictionaries(
    st.sampled_from(["topic", "partition", "offset"]), VALUES | st.sampled_from(['to"pic', 3, 7, 8])
)
NAMES = ["record", "consumerRecord", "processed", "key", "stacktrace", "correlationId", "timestamp", "other"]
RESPONSES = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES | ECHOES | st.just(True)), max_size=3)


@given(st.binary() | st.builds(lambda response: json.dumps(response).encode(), RESPONSES | VALUES))
def test_whatever_a_backend_answers_is_outcomes_or_refused(response: bytes) -> None:
    """And a record is done only if a result says so."""
    try:
        found = replies_of(response, RecordBatch.of([record(7), record(8)]))
    except DestinationRefused as error:
        assert "the backend" in error.description
    else:
        assert len(found) == 2
        assert found.count(ACK) <= response.count(b'"processed": true')
