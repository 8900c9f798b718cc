"""States and timers of a processor without Spark: what a call changes, keeps and takes back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headrace_pipelines.processors import (
    ABSENT,
    KeyClock,
    ListState,
    MapState,
    Processor,
    ValueState,
    rows_of_call,
    states_of,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Store:
    """A store in memory that counts its reads and writes."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self.values = values
        self.calls: list[tuple[str, Any]] = []

    def check(self, *values: Any) -> None:
        if "wrong" in values:
            raise TypeError("not of the type")

    def load(self, key: Any) -> Any:
        self.calls.append(("load", key))
        return self.values.get(key, ABSENT)

    def keys(self) -> list[Any]:
        return list(self.values)

    def save(self, key: Any, value: Any) -> None:
        self.calls.append(("save", key))
        if value is ABSENT:
            self.values.pop(key, None)
        else:
            self.values[key] = value


def test_a_key_costs_one_read_and_one_write_however_many_rows_it_has() -> None:
    """Later calls see what earlier ones have put."""
    store = Store({None: 5})
    state = ValueState("BIGINT").opened(store)
    for _ in range(10):
        state.put(state.get(0) + 1)
        state.end_call(keep=True)
    state.end_key()
    assert (store.values, store.calls) == ({None: 15}, [("load", None), ("save", None)])
    store.values[None] = 7  # the next key
    assert state.get() == 7


def test_a_call_that_fails_leaves_no_changes() -> None:
    """Not even of a value that was changed in its own object, nor of a timer."""
    store = Store({"a": {"n": 1}, "b": {"n": 2}})
    state = MapState("STRING", "STRUCT<n: INT>").opened(store)
    state.put("c", {"n": 3})
    state.end_call(keep=True)
    for _ in range(2):
        state.get("a")["n"] = 100
    state.delete("b")
    state.put("d", {"n": 4})
    assert ([key for key, _ in state.items()], "b" in state) == (["a", "c", "d"], False)
    state.end_call(keep=False)
    assert state.items() == [("a", {"n": 1}), ("b", {"n": 2}), ("c", {"n": 3})]
    state.clear()
    state.end_call(keep=True)
    state.end_key()
    assert store.values == {}

    clock = KeyClock()
    clock.stored = lambda: [NOON]
    clock.pending[NOON] = False
    assert clock.all() == []
    clock.end_call(keep=False)
    assert clock.all() == [NOON]


def test_a_value_of_another_type_is_refused_by_put() -> None:
    """So the failure is that of the row, not of the micro-batch."""
    values, listed = ValueState("BIGINT").opened(Store({})), ListState("BIGINT").opened(Store({}))
    for put in (values.put, listed.append):
        with pytest.raises(TypeError):
            put("wrong")
    listed.append(1)
    listed.append(2)
    assert (values.get("none"), listed.get()) == ("none", [1, 2])
    listed.clear()
    assert listed.get() == []


class Base(Processor):
    columns = "a INT"
    first = ValueState("INT")


class Derived(Base):
    second = MapState("STRING", "INT")

    def process(self, key: Any, row: dict[str, Any]) -> Any:
        return row

    def on_timer(self, key: Any, at: datetime) -> None:
        pass


def test_each_object_has_its_own_states_and_times_are_utc() -> None:
    """States of bases count; a timer without a zone is UTC, and a span counts from the watermark."""
    assert list(states_of(Derived)) == ["first", "second"]
    one, other = Derived(), Derived()
    one.first.put(1)
    assert (one.first.get(), other.first.get(), Base.first.get()) == (1, None, None)
    one.clock.watermark = NOON
    one.set_timer(timedelta(seconds=1))
    one.set_timer(datetime(2026, 1, 1, 11))
    one.set_timer(datetime.fromisoformat("2026-01-01T12:30:00+01:00"))
    assert one.timers() == [NOON - timedelta(hours=1), NOON - timedelta(minutes=30), NOON + timedelta(seconds=1)]
    wrong: Any = 5
    with pytest.raises(TypeError, match="a timer is a datetime or a timedelta, and this one is of type int"):
        one.set_timer(wrong)
    with pytest.raises(TypeError, match="Base sets a timer and has no method on_timer"):
        Base().set_timer(NOON)


@pytest.mark.parametrize(
    ("made", "rows"), [(None, []), ({"a": 1}, [{"a": 1}]), ([{"a": 1}, {"a": 2}], 2), ([1], "int")]
)
def test_a_method_returns_rows_or_yields_them(made: Any, rows: Any) -> None:
    """Anything else is a failure of the call."""
    if isinstance(rows, str):
        with pytest.raises(TypeError, match=f"this one is of type {rows}"):
            list(rows_of_call(made))
    else:
        assert list(rows_of_call(made)) == (made if rows == 2 else rows)
