"""Answers of a producer that does not wait for all replicas."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from headrace.errors import KafkaTimeout
from headrace.records import Produced
from headrace.sidecar.produce_answer import Prepared, answer_of

NOTHING = Prepared([])
PLACE = {"partition": 2, "offset": 7}


@pytest.mark.parametrize(("acks", "offsets", "said"), [("all", [PLACE], None), (1, [PLACE], 1), (0, [PLACE], 0)])
def test_an_answer_that_is_weaker_than_ok_says_so(acks: Literal["all", 1, 0], offsets: object, said: object) -> None:
    """And one that is not, does not."""
    answer = answer_of(NOTHING, [Produced(2, 7)], False, acks)
    body = msgspec.json.decode(answer.body)
    assert (body["offsets"], body.get("acks"), answer.status) == (offsets, said, 200)


def test_what_is_unknown_stays_unknown_with_weak_acks() -> None:
    """Beside a record that was sent."""
    body = msgspec.json.decode(answer_of(NOTHING, [Produced(0, -1), KafkaTimeout("late")], False, 0).body)
    assert [entry.get("outcome") for entry in body["offsets"]] == [None, "unknown"]
    assert body["offsets"][0]["offset"] == -1
