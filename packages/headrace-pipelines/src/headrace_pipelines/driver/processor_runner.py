"""A processor in a Python worker of Spark: rows and timers of a key go to its object, with the state of the key.

State is read when a call asks for it, and written when all rows of its key are processed. So a call that fails leaves
no changes, and a key with many rows in a micro-batch costs one read and one write.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from headrace.delivery.outcomes import Reply
from headrace.functions.worker.handler import failure
from headrace.records import Record
from headrace_pipelines.driver.kafka_rows import DEAD_LETTER
from headrace_pipelines.driver.python_names import imported
from headrace_pipelines.driver.value_codecs import FailurePolicy
from headrace_pipelines.driver.value_verifier import verifier_of
from headrace_pipelines.processors import (
    ABSENT,
    KeyClock,
    ListState,
    MapState,
    Processor,
    Rows,
    State,
    rows_of_call,
    states_of,
)

FAILED_ROW = "_failed"
"""Column that tells whether a row stands for a call that failed."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
T = TypeVar("T")


class ProcessorPlan(NamedTuple):
    """What a Python worker needs to run the processor of a flow. It travels pickled."""

    reference: str
    """`module:Class`."""
    folder: str
    """Folder of the pipeline file."""
    read: str
    """Name of the source or view whose rows it gets."""
    time_column: str
    """Column with a watermark, by which the rows of a key are sorted; empty without one."""
    order_columns: tuple[str, ...]
    """Columns by which they are sorted instead; the processor does not see them."""
    is_test: bool
    """Whether rows without such a column keep the order in which they are given."""
    output: str
    """JSON of the type of its rows."""
    states: str
    """JSON of the names of its states with their types."""
    failures: FailurePolicy
    attempts: int


class StateFailed(BaseException):
    """Spark could not read or write a state: the task fails, and no call of the processor may catch it."""


class ProcessorRunner(StatefulProcessor):
    """Runs a processor for one task of Spark, which makes it from its pickled form."""

    def __init__(self, plan: ProcessorPlan) -> None:
        self._plan = plan
        self._processor: Processor | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the states. Spark also calls it in the driver, to learn their types."""
        self._handle = handle
        kind = imported(self._plan.folder, self._plan.reference, "processor")
        types = json.loads(self._plan.states)
        self._states = {
            name: state.opened(SparkStore(handle, name, state, types[name])) for name, state in states_of(kind).items()
        }

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803 Spark
        """Process the rows of a key in a micro-batch."""
        processor = self._begin(timerValues)
        made: list[OutputRow] = []
        for value in self._sorted([row.asDict() for row in rows]):
            made += self._call(functools.partial(processor.process, key[0], value), key[0], value)
        self._end_key(processor)
        return iter(made)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802, N803
        """Let the processor act on a timer of a key."""
        processor, at = self._begin(timerValues), _time(expiredTimerInfo.getExpiryTimeInMs())
        made = self._call(functools.partial(processor.on_timer, key[0], at), key[0], {"timer": at})
        self._end_key(processor)
        return iter(made)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:  # noqa: N802, N803
        """Let the processor take over a row of the initial state; its failure fails the flow."""
        processor = self._begin(timerValues)
        processor.init_state(key[0], initialState.asDict())
        self._end_call(keep=True)
        self._end_key(processor)

    def close(self) -> None:
        """Do nothing: the processor serves further micro-batches."""

    def _begin(self, timer_values: Any) -> Processor:
        """Return the processor of this Python worker, with the states and times of this task."""
        if self._processor is None:
            self._processor = _processor_of(self._plan)
            vars(self._processor).update(self._states, clock=KeyClock())  # not those of a task that failed
        timers = self._processor.clock
        timers.now = _time(timer_values.getCurrentProcessingTimeInMs())
        timers.watermark = _time(timer_values.getCurrentWatermarkInMs()) if self._plan.time_column else None
        timers.stored = lambda: [_time(at) for at in self._handle.listTimers()]
        return self._processor

    def _sorted(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return rows in the same order whenever their micro-batch is repeated."""
        at, columns = self._plan.time_column, self._plan.order_columns
        if columns:
            rows.sort(key=lambda row: [row[name] for name in columns])
            return [{name: row[name] for name in row if name not in columns} for row in rows]
        if not self._plan.is_test:
            rows.sort(key=str)
        return sorted(rows, key=lambda row: row[at] or _EPOCH) if at else rows

    def _call(self, call: Callable[[], Rows], key: Any, value: dict[str, Any]) -> list["OutputRow"]:
        """Return the rows of a call; after the last attempt the row that stands for the failure."""
        began = time.time()
        names, verify = _output_of(self._plan.output)
        for _ in range(self._plan.attempts):
            try:
                made = [_checked(row, names, verify) for row in rows_of_call(call())]
                self._end_call(keep=True)
                return made
            except (Exception, SystemExit) as cause:  # noqa: BLE001 boundary to user code: the failure is its row's
                self._end_call(keep=False)
                result = failure(cause)
        text = json.dumps(_as_json(value)).encode()
        record = Record(
            self._plan.read, 0, 0, -1, None if key is None else str(_as_json(key)).encode(errors="replace"), text
        )
        reply = Reply(result.error, result.reason, stack=result.stack)
        topic, record_key, body, headers, _ = self._plan.failures.row(record, reply, self._plan.attempts, began)
        pairs = [{"key": name, "value": text} for name, text in headers or ()]
        dead_letter = {"key": record_key, "value": body, "headers": pairs} if topic else None
        return [OutputRow({DEAD_LETTER: dead_letter, FAILED_ROW: True})]

    def _end_call(self, *, keep: bool) -> None:
        assert self._processor
        for state in self._states.values():
            state.end_call(keep=keep)
        self._processor.clock.end_call(keep=keep)

    def _end_key(self, processor: Processor) -> None:
        for state in self._states.values():
            state.end_key()
        for at, is_set in processor.clock.kept.items():
            (self._handle.registerTimer if is_set else self._handle.deleteTimer)(round((at - _EPOCH) / _MS))
        processor.clock.kept.clear()


class OutputRow(dict[str, Any]):
    """A row to write, in the form that Spark's Python worker takes it."""

    def asDict(self, recursive: bool = False) -> dict[str, Any]:  # noqa: N802 as Spark's Row has it
        """Return the columns."""
        return self


class SparkStore:
    """One state in Spark's state store, for the key that Spark processes."""

    def __init__(self, handle: StatefulProcessorHandle, name: str, state: State, types: Sequence[str]) -> None:
        schemas = [StructType.fromJson(json.loads(of)) for of in types]
        ttl_ms = None if state.ttl_seconds is None else round(state.ttl_seconds * 1000)
        self._is_map, self._is_list = isinstance(state, MapState), isinstance(state, ListState)
        kind = "getMapState" if self._is_map else "getListState" if self._is_list else "getValueState"
        self._state: Any = getattr(handle, kind)(name, *schemas, ttl_ms)
        self._verifiers = [verifier_of(each.fields[0].dataType, nullable=False) for each in schemas]
        self._zoned = "TIMESTAMP_NTZ" not in "".join(state.types).upper()

    def check(self, *values: Any) -> None:
        """Raise TypeError or ValueError if these cannot be stored."""
        for verify, value in zip(self._verifiers, values, strict=True):
            verify(value)

    def load(self, key: Any) -> Any:
        """Return the value of a key, `ABSENT` without one."""
        if self._is_list:
            return _of_spark(lambda: [self._plain(value) for (value,) in self._state.get()]) or ABSENT
        arguments = [(self._stored(key),)] if self._is_map else []
        found = _of_spark(lambda: (self._state.getValue if self._is_map else self._state.get)(*arguments))
        return ABSENT if found is None else self._plain(found[0])

    def keys(self) -> Iterable[Any]:
        """Return the keys of a map."""
        return _of_spark(
            lambda: [self._plain(key) for (key,), _ in self._state.iterator()] if self._state.exists() else []
        )

    def save(self, key: Any, value: Any) -> None:
        """Replace or remove the value of a key."""
        if self._is_map:
            at = (self._stored(key),)
            if value is not ABSENT:
                self._state.updateValue(at, (self._stored(value),))
            elif self._state.containsKey(at):
                self._state.removeKey(at)
        elif value is ABSENT:
            self._state.clear()
        elif self._is_list:
            self._state.put([(self._stored(each),) for each in value])
        else:
            self._state.update((self._stored(value),))

    def _plain(self, value: Any) -> Any:
        """Return a value of Spark as Python has it: a dict for a STRUCT, times in UTC."""
        if isinstance(value, Row):
            return {name: self._plain(each) for name, each in value.asDict().items()}
        if isinstance(value, dict):
            return {self._plain(key): self._plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._plain(each) for each in value]
        return value.astimezone(UTC) if self._zoned and isinstance(value, datetime) else value

    def _stored(self, value: Any) -> Any:
        """Return a value as Spark takes it: a time without a zone is UTC, not that of the machine."""
        if isinstance(value, dict):
            return {self._stored(key): self._stored(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._stored(each) for each in value]
        return value.replace(tzinfo=UTC) if self._zoned and isinstance(value, datetime) and not value.tzinfo else value


@functools.cache
def _processor_of(plan: ProcessorPlan) -> Processor:
    made: Processor = imported(plan.folder, plan.reference, "processor")()
    made.init()
    return made


@functools.cache
def _output_of(document: str) -> tuple[frozenset[str], Callable[[Any], None]]:
    """Return names of the columns of a type, and what raises an error for a row that is not of it."""
    kind = StructType.fromJson(json.loads(document))
    return frozenset(kind.names), verifier_of(kind)


def _checked(row: dict[str, Any], names: frozenset[str], verify: Callable[[Any], None]) -> OutputRow:
    if unknown := row.keys() - names:
        raise ValueError(
            f"the row has a column {min(map(str, unknown))}, which is not in columns: {', '.join(sorted(names))}"
        )
    verify(row)
    return OutputRow({**row, FAILED_ROW: False})


def _of_spark(call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as cause:  # boundary to Spark: the task fails with it, not the row
        raise StateFailed(f"Spark failed to read a state: {cause}") from cause


def _time(milliseconds: int) -> datetime:
    return _EPOCH + milliseconds * _MS


def _as_json(value: Any) -> Any:
    """Return a value of Spark as JSON has it, with text for what JSON cannot hold."""
    if isinstance(value, Row):
        value = value.asDict()
    if isinstance(value, dict):
        return {str(_as_json(key)): _as_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return value.isoformat() if isinstance(value, date) else value.hex() if isinstance(value, bytes) else str(value)
