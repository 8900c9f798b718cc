from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.dead_letter import Origin
from headrace.kafka.timestamps import moment, parse_time
from headrace.records import Record, TopicPartition
from headrace.runs.selection import Matcher, Selection

_names = st.sampled_from(["a", "b", "c"])
_bytes = st.sampled_from([b"", b"x", b"y"])
_texts = st.sampled_from(["", "x", "y"])
_headers = st.lists(st.tuples(_names, st.none() | _bytes), max_size=4)
_origins = st.none() | st.builds(
    Origin,
    partition=st.builds(TopicPartition, _names, st.just(0)),
    offset=st.just(0),
    timestamp_ms=st.just(0),
    group=_names,
    attempts=st.just(1),
    error=_names,
)
_conditions = st.fixed_dictionaries(
    {},
    optional={
        "since": st.integers(0, 4).map(moment),
        "until": st.integers(0, 4).map(moment),
        "topics": st.lists(_names, max_size=2),
        "groups": st.lists(_names, max_size=2),
        "errors": st.lists(_names, max_size=2),
        "keys": st.lists(_texts, max_size=2),
        "headers": st.dictionaries(_names, _texts, max_size=2),
    },
)


def _record(at_ms: int, key: bytes | None, headers: list[tuple[str, bytes | None]]) -> Record:
    return Record("t", 0, 0, at_ms, key, None, headers.copy)


@given(_conditions, st.integers(0, 4), st.none() | _bytes, _headers, _origins)
def test_a_record_is_selected_when_each_condition_alone_selects_it(conditions, at_ms, key, headers, origin) -> None:  # type: ignore[no-untyped-def]
    """Conditions are joined by and; and each of them, if it is given, is what its name says."""
    record = _record(at_ms, key, headers)
    alone = [Matcher(Selection(**{name: value})).matches(record, origin) for name, value in conditions.items()]
    assert Matcher(Selection(**conditions)).matches(record, origin) == all(alone)
    for name, value in conditions.items():
        expected = {
            "since": lambda v: moment(at_ms) >= v,
            "until": lambda v: moment(at_ms) < v,
            "topics": lambda v: not v or (origin is not None and origin.partition.topic in v),
            "groups": lambda v: not v or (origin is not None and origin.group in v),
            "errors": lambda v: not v or (origin is not None and origin.error in v),
            "keys": lambda v: not v or key in [text.encode() for text in v],
            "headers": lambda v: all((name, text.encode()) in headers for name, text in v.items()),
        }[name](value)
        assert Matcher(Selection(**{name: value})).matches(record, origin) == expected
    assert Selection(partition=1, first=3, **conditions).has_conditions == any(conditions.values())


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("2026-01-31T08:00", 1769846400000), ("2026-01-31T10:00+02:00", 1769846400000), ("90s", 910_000), ("9d", 0)],
)
def test_a_time_is_a_date_or_an_age(text: str, milliseconds: int) -> None:
    """UTC where no zone is given, and never before the epoch; an age needs to know what time it is."""
    assert parse_time(text, 1000.0) == moment(milliseconds)
    for wrong, now in (("soon", 1000.0), ("2h", None)):
        with pytest.raises(ValueError, match="Invalid isoformat"):
            parse_time(wrong, now)
