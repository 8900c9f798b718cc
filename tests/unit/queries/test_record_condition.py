"""Which records a condition in SQL lets through, which it filters, and which it cannot decide."""

from __future__ import annotations

import time

import pytest

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.delivery.outcomes import FILTERED, Delivery
from headrace.errors import StatementRejected
from headrace.records import RecordBatch, TopicPartition
from headrace_queries.record_condition import RecordCondition
from yaml_table import table

PARTITION = TopicPartition("orders", 3)
VALUE = str(table(__file__, "value")).encode()


def reply_of(condition: str, value: bytes | None = VALUE) -> str:
    """Return what becomes of one record: `met`, `filtered`, or the error and its reason."""
    row = (7, 1_767_225_600_000, b"k", value, [("h", b"first"), ("h", b"v")], 1)
    records = RecordBatch.from_rows(PARTITION, [row])
    reply = RecordCondition(condition)(Delivery("g", PARTITION, 1, records, 1), records).get(0)
    return "met" if reply is None else "filtered" if reply == FILTERED else f"{reply.error}: {reply.reason}"


@pytest.mark.parametrize("name", ["met", "filtered"])
def test_a_condition_is_evaluated_as_sql(name: str) -> None:
    """NULL is not true, and a part that cannot change the result is not evaluated."""
    assert {condition: reply_of(condition) for condition in table(__file__, name)} == dict.fromkeys(
        table(__file__, name), name
    )


@pytest.mark.parametrize(("condition", "reason"), table(__file__, "undecided"))
def test_types_that_do_not_fit_are_a_failure_of_the_record(condition: str, reason: str) -> None:
    found = reply_of(condition)
    assert found.startswith("StatementRejected: ") and reason in found


@pytest.mark.parametrize(("condition", "text"), table(__file__, "refused"))
def test_what_is_not_supported_is_refused(condition: str, text: str) -> None:
    with pytest.raises(StatementRejected) as refused:
        RecordCondition(condition)
    assert text in refused.value.description


@pytest.mark.parametrize(("value", "end"), table(__file__, "values"))
def test_a_value_that_is_not_json_fails_and_one_without_fields_is_filtered(value: str | None, end: str) -> None:
    assert reply_of("value.a = 5", None if value is None else value.encode()).split(":")[0] == end


@pytest.mark.parametrize("condition", ["(" * 3000 + "true" + ")" * 3000, "NOT " * 900 + "true"])
def test_a_deep_condition_is_refused(condition: str) -> None:
    with pytest.raises(StatementRejected, match="nested too deeply"):
        RecordCondition(condition)


def test_no_pattern_takes_long() -> None:
    """Each part is found once, however many signs of any length a pattern has."""
    started = time.process_time()
    assert reply_of("value LIKE '" + "%a_" * 20 + "%b'", b"a" * 100_000) == "filtered"
    assert time.process_time() - started < 2


def test_only_a_condition_over_other_columns_fits_a_format_with_a_schema() -> None:
    settings = {"topics": ["orders"], "group": "g", "backend": {"url": "http://b"}, "value_format": "avro"}
    assert ReactiveConsumerConfig.model_validate({**settings, "where": "key = 'k'"}).where
    with pytest.raises(ValueError, match="its format is avro"):
        ReactiveConsumerConfig.model_validate({**settings, "where": "value.a = 1"})
