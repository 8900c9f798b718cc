"""The body of a delivery and the answers to it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.delivery.dead_letter import REDRIVE_OF
from headrace.delivery.protocols import ACK, Delivery, Verdict
from headrace.errors import DestinationRefused
from headrace.records import Record, TopicPartition
from headrace.sidecar.reactive.envelope import Envelope, outcomes_of


def record(offset: int = 7) -> Record:
    headers = [("a", b"1"), ("a", b"2"), ('quote"', None)]
    return Record('to"pic', 3, offset, 1234, b"k", b"v", lambda: headers)


DELIVERY = Delivery("g", TopicPartition('to"pic', 3), 5, [], 2)


def test_an_entry_is_the_record_with_its_identity() -> None:
    """Fields of the original, and the delivery's id, attempt and epoch beside them; JSON whatever the names hold."""
    entry = json.loads(Envelope(DELIVERY).entry(record(), b'"k"', b'{"n":12345678901234567890}'))
    assert entry == {
        "topic": 'to"pic',
        "partition": 3,
        "offset": 7,
        "timestamp": 1234,
        "headers": {"a": "2", 'quote"': ""},
        "key": "k",
        "value": {"n": 12345678901234567890},
        "deliveryId": 'g:to"pic:3:7',
        "attempt": 2,
        "epoch": 5,
    }


def test_null_key_and_value_are_left_out() -> None:
    """A tombstone has no value field, as in the original."""
    assert not {"key", "value"} & json.loads(Envelope(DELIVERY).entry(record(), None, None)).keys()


def test_a_redriven_record_keeps_the_identity_of_its_first_delivery() -> None:
    """A backend that remembers delivery ids knows it again."""
    again = Record("t", 0, 99, 0, None, None, lambda: [(REDRIVE_OF, b"t:3:7")])
    entry = json.loads(Envelope(Delivery("g", TopicPartition("t", 0), 5, [again], 1)).entry(again, None, None))
    assert entry["deliveryId"] == "g:t:3:7"


@pytest.mark.parametrize("name", ["record", "consumerRecord"])
def test_results_are_matched_by_coordinates(name: str) -> None:
    """A backend may answer in any order if it echoes the records, under either name."""

    def result(offset: int, processed: bool) -> dict[str, Any]:
        return {name: {"topic": 'to"pic', "partition": 3, "offset": offset}, "processed": processed, "extra": 1}

    answer = json.dumps([result(8, False), result(7, True)]).encode()
    outcomes = outcomes_of(answer, [record(7), record(8)])
    assert outcomes[0] is ACK
    assert outcomes[1].verdict is Verdict.RETRY


def test_results_without_coordinates_are_matched_by_position() -> None:
    """The original's contract; the stack trace travels on."""
    outcomes = outcomes_of(b'[{"processed":true},{"processed":false,"stacktrace":"boom"}]', [record(7), record(8)])
    assert (outcomes[0], outcomes[1].reason) == (ACK, "boom")


def test_a_missing_processed_is_a_failure() -> None:
    """What is not said to be done is not done."""
    assert outcomes_of(b"[{}]", [record()])[0].verdict is Verdict.RETRY


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", "not a JSON array"),
        (b"{}", "not a JSON array"),
        (b"[1]", "not a JSON array"),
        (b"[]", "0 results for 1 records"),
        (b'[{"record":{"topic":"x","partition":3,"offset":7},"processed":true}]', "does not echo"),
    ],
)
def test_an_answer_that_is_not_as_agreed_is_refused(answer: bytes, says: str) -> None:
    """Nothing is taken as done by mistake."""
    with pytest.raises(DestinationRefused, match=says):
        outcomes_of(answer, [record()])
