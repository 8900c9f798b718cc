from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.control.selection import Selection
from headrace.delivery.dead_letter import Origin, redriven_count
from headrace.records import Record, TopicPartition

_names = st.sampled_from(["a", "b", "c"])
_bytes = st.sampled_from([b"", b"x", b"y"])
_counts = st.tuples(st.just("headrace.redrive.count"), st.sampled_from([b"1", b"2", b"no"]))
_headers = st.lists(_counts | st.tuples(_names, st.none() | _bytes), max_size=4)
_origins = st.none() | st.builds(
    Origin,
    partition=st.builds(TopicPartition, _names, st.just(0)),
    offset=st.just(0),
    timestamp_ms=st.just(0),
    group=_names,
    attempts=st.just(1),
    first_failure=st.just(""),
    last_failure=st.just(""),
    error=_names,
)
_conditions = st.fixed_dictionaries(
    {},
    optional={
        "since_ms": st.integers(0, 4),
        "until_ms": st.integers(0, 4),
        "topics": st.lists(_names, max_size=2),
        "groups": st.lists(_names, max_size=2),
        "errors": st.lists(_names, max_size=2),
        "keys": st.lists(_bytes, max_size=2),
        "headers": st.lists(st.tuples(_names, _bytes), max_size=2),
        "redrives_below": st.integers(0, 3),
    },
)


def _record(at_ms: int, key: bytes | None, headers: list[tuple[str, bytes | None]]) -> Record:
    return Record("t", 0, 0, at_ms, key, None, headers.copy)


@given(_conditions, st.integers(0, 4), st.none() | _bytes, _headers, _origins)
def test_a_record_is_meant_when_each_condition_alone_means_it(conditions, at_ms, key, headers, origin) -> None:  # type: ignore[no-untyped-def]
    """Conditions are joined by and; and each of them, if it is given, is what its name says."""
    record = _record(at_ms, key, headers)
    alone = [Selection(**{name: value}).matches(record, origin) for name, value in conditions.items()]
    assert Selection(**conditions).matches(record, origin) == all(alone)
    for name, value in conditions.items():
        expected = {
            "since_ms": lambda v: at_ms >= v,
            "until_ms": lambda v: at_ms < v,
            "topics": lambda v: not v or (origin is not None and origin.partition.topic in v),
            "groups": lambda v: not v or (origin is not None and origin.group in v),
            "errors": lambda v: not v or (origin is not None and origin.error in v),
            "keys": lambda v: not v or key in v,
            "headers": lambda v: all(header in headers for header in v),
            "redrives_below": lambda v: redriven_count(headers) < v,
        }[name](value)
        assert Selection(**{name: value}).matches(record, origin) == expected
        if value not in ([], ()):
            assert Selection(**{name: value}).filters


def test_without_conditions_everything_is_meant() -> None:
    """A window alone leaves nothing of it out."""
    selection = Selection(partition=1, first=3, last=9)
    assert not selection.filters
    assert selection.matches(_record(0, None, []), None)
