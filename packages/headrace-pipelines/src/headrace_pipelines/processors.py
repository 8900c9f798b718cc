"""What the class of a stateful processor is made of: the base class, its state stores and its timers.

from headrace_pipelines.processors import Processor, ValueState

class WordCount(Processor):
    columns = "word STRING, count BIGINT"
    count = ValueState("BIGINT")

    def process(self, key, row):
        count = self.count.get(0) + 1
        self.count.put(count)
        yield {"word": key, "count": count}

It needs no pyspark. State and timers are those of the key that is processed. A call that fails leaves no changes.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Protocol, Self

Rows = Iterable[dict[str, Any]] | dict[str, Any] | None
"""What a method of a processor returns or yields: rows with the columns of `columns`; one, several or none."""


class StateStore(Protocol):
    """Where the values of one state are kept between micro-batches, for the present key."""

    def check(self, *values: Any) -> None:
        """Raise TypeError or ValueError if these cannot be stored."""

    def load(self, key: Any) -> Any:
        """Return the value of a key, `ABSENT` without one. A state that is not a map has the one key None."""

    def keys(self) -> Iterable[Any]:
        """Return the keys that have a value."""

    def save(self, key: Any, value: Any) -> None:
        """Replace the value of a key; with `ABSENT` remove it."""


ABSENT: Any = ...
"""Stands for the value of a key that has none."""


class State:
    """A state of a processor: declared as an attribute of its class, and used as an attribute of `self`."""

    types: tuple[str, ...]
    """SQL types of what it keeps."""

    def __init__(self, *types: str, ttl_seconds: float | None = None) -> None:
        self.types = types
        self.ttl_seconds = ttl_seconds
        self._store: StateStore | None = None
        # The present key
        self._loaded: dict[Any, Any] = {}
        self._kept: dict[Any, Any] = {}
        """Changes of calls that succeeded; not in the store yet."""
        self._pending: dict[Any, Any] = {}
        """Changes of the present call."""

    def opened(self, store: StateStore | None) -> Self:
        """Return the same state with a store; without one it is kept in memory."""
        found = copy.copy(self)
        found._store = store
        found._loaded, found._kept, found._pending = {}, {}, {}
        return found

    def end_call(self, *, keep: bool) -> None:
        """Keep the changes of a call, or forget them."""
        if keep:
            self._kept |= self._pending
        self._pending.clear()

    def end_key(self) -> None:
        """Store what the calls for a key have changed, before the next key."""
        if self._store:
            for key, value in self._kept.items():
                self._store.save(key, value)
            self._loaded.clear()
            self._kept.clear()

    def _get(self, key: Any) -> Any:
        for values in (self._pending, self._kept, self._loaded):
            if key in values:
                return copy.deepcopy(values[key])
        found = self._loaded[key] = self._store.load(key) if self._store else ABSENT
        return copy.deepcopy(found)

    def _put(self, key: Any, value: Any) -> None:
        if self._store and value is not ABSENT:
            self._store.check(*((value,) if len(self.types) == 1 else (key, value)))
        self._pending[key] = copy.deepcopy(value)


class ValueState(State):
    """One value for each key: `ValueState("BIGINT")`, or several columns: `ValueState("STRUCT<n: INT, at: DATE>")`.

    With `ttl_seconds` a value is removed this long after it was put.
    """

    def __init__(self, of: str, *, ttl_seconds: float | None = None) -> None:
        """Declare it with the SQL type of the value."""
        super().__init__(of, ttl_seconds=ttl_seconds)

    def get(self, default: Any = None) -> Any:
        """Return the value, or the default if there is none. A STRUCT is a dict."""
        found = self._get(None)
        return default if found is ABSENT else found

    def put(self, value: Any) -> None:
        """Replace the value.

        Raises:
            TypeError: It is not of the type.
            ValueError: It is too large for it.
        """
        self._put(None, value)

    def delete(self) -> None:
        """Remove the value."""
        self._put(None, ABSENT)


class MapState(State):
    """A map for each key, such as from products to counts: `MapState("STRING", "BIGINT")`.

    With `ttl_seconds` an entry is removed this long after it was put.
    """

    def __init__(self, key: str, of: str, *, ttl_seconds: float | None = None) -> None:
        """Declare it with the SQL types of its own keys and of the values."""
        super().__init__(key, of, ttl_seconds=ttl_seconds)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of one of its keys, or the default."""
        found = self._get(key)
        return default if found is ABSENT else found

    def put(self, key: Any, value: Any) -> None:
        """Replace the value of one of its keys; raises as `ValueState.put`."""
        self._put(key, value)

    def delete(self, key: Any) -> None:
        """Remove one of its keys."""
        self._put(key, ABSENT)

    def items(self) -> list[tuple[Any, Any]]:
        """Return all keys with their values."""
        keys = dict.fromkeys([*(self._store.keys() if self._store else ()), *self._kept, *self._pending])
        return [(key, value) for key in keys if (value := self._get(key)) is not ABSENT]

    def clear(self) -> None:
        """Remove all keys."""
        for key, _ in self.items():
            self.delete(key)

    def __contains__(self, key: Any) -> bool:
        return self._get(key) is not ABSENT


class ListState(State):
    """A list for each key: `ListState("STRUCT<page: STRING, at: TIMESTAMP>")`.

    With `ttl_seconds` a value is removed this long after it was appended.
    """

    def __init__(self, of: str, *, ttl_seconds: float | None = None) -> None:
        """Declare it with the SQL type of a value."""
        super().__init__(of, ttl_seconds=ttl_seconds)

    def get(self) -> list[Any]:
        """Return the values in the order of their arrival."""
        found = self._get(None)
        return [] if found is ABSENT else found

    def append(self, value: Any) -> None:
        """Add a value at the end; raises as `ValueState.put`."""
        self.put([*self.get(), value])

    def put(self, values: list[Any]) -> None:
        """Replace all values; raises as `ValueState.put`."""
        if not isinstance(values, list | tuple):
            raise TypeError(f"the values of a ListState are a list, and this is of type {type(values).__name__}")
        if store := self._store:
            for value in values:
                store.check(value)
        self._pending[None] = copy.deepcopy(values) or ABSENT

    def clear(self) -> None:
        """Remove all values."""
        self._put(None, ABSENT)


class KeyClock:
    """The timers of the present key, and the times of the present micro-batch."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)
        self.watermark: datetime | None = None
        self.stored: Callable[[], Iterable[datetime]] = tuple
        """Timers of the key that were set before this micro-batch."""
        self.kept: dict[datetime, bool] = {}
        """Timers that successful calls have set, or deleted with False."""
        self.pending: dict[datetime, bool] = {}

    def end_call(self, *, keep: bool) -> None:
        """Keep the changes of a call, or forget them."""
        if keep:
            self.kept |= self.pending
        self.pending.clear()

    def all(self) -> list[datetime]:
        """Return all that are set, the earliest first."""
        changes = self.kept | self.pending
        return sorted({*self.stored(), *changes} - {at for at, is_set in changes.items() if not is_set})


class Processor:
    """Base of the classes that a flow names by `processor`. Each key has its own state and timers.

    One object of it serves many keys: what it must remember belongs into a state, not into an attribute.
    """

    columns: ClassVar[str]
    """Names and types of the columns of its rows, as in SQL's CREATE TABLE."""
    clock: KeyClock
    """What the methods below read and change."""

    def __new__(cls) -> Self:
        """Give each object its own states."""
        made = super().__new__(cls)
        made.clock = KeyClock()
        for name, state in states_of(cls).items():
            setattr(made, name, state.opened(None))
        return made

    def init(self) -> None:
        """Prepare what all keys share, such as a connection: once in each Python worker of Spark."""

    def process(self, key: Any, row: dict[str, Any]) -> Rows:
        """Process a row of the key; yields or returns the rows to write."""
        raise NotImplementedError

    def on_timer(self, key: Any, at: datetime) -> Rows:
        """Act when a timer of the key is due; yields or returns the rows to write."""
        raise NotImplementedError

    def init_state(self, key: Any, row: dict[str, Any]) -> None:
        """Take over a row of `initial` before the first row of the stream."""
        raise NotImplementedError

    @property
    def now(self) -> datetime:
        """When the micro-batch began, in UTC. It is the same if the micro-batch is repeated."""
        return self.clock.now

    @property
    def watermark(self) -> datetime | None:
        """Event time that the stream has reached: older rows do not come any more. None without a watermark."""
        return self.clock.watermark

    def set_timer(self, at: datetime | timedelta) -> None:
        """Call `on_timer` for this key when the watermark reaches a time; without a watermark, when the clock does.

        A timedelta counts from the watermark, or from `now`. A time without a zone is UTC.

        Raises:
            TypeError: It is neither a datetime nor a timedelta, or the class has no `on_timer`.
        """
        if type(self).on_timer is Processor.on_timer:
            name = type(self).__name__
            raise TypeError(f"{name} sets a timer and has no method on_timer: write def on_timer(self, key, at)")
        self.clock.pending[self._time(at)] = True

    def delete_timer(self, at: datetime) -> None:
        """Delete a timer of this key; one that is not set is ignored."""
        self.clock.pending[self._time(at)] = False

    def timers(self) -> list[datetime]:
        """Return the timers of this key, the earliest first."""
        return self.clock.all()

    def _time(self, at: datetime | timedelta) -> datetime:
        if isinstance(at, timedelta):
            at = (self.watermark or self.now) + at
        if not isinstance(at, datetime):
            raise TypeError(f"a timer is a datetime or a timedelta, and this one is of type {type(at).__name__}")
        at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
        return at.replace(microsecond=at.microsecond // 1000 * 1000)  # as Spark keeps it


def states_of(kind: type[Processor]) -> dict[str, State]:
    """Return the states that a class declares, those of its bases too, by their names."""
    found = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    return {name: value for name, value in found.items() if isinstance(value, State)}


def rows_of_call(made: Rows) -> Iterator[dict[str, Any]]:
    """Yield the rows that a method returned.

    Raises:
        TypeError: It returned something else.
    """
    for row in (made,) if isinstance(made, dict) else made or ():
        if not isinstance(row, dict):
            raise TypeError(f"a row is a dict of columns, and this one is of type {type(row).__name__}")
        yield row
