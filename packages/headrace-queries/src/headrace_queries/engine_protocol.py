"""The messages between Headrace and its engine of tables, which `headrace.framing` cuts from a stream.

The parent sends `EngineSetup` once, then requests in any order. The engine responds to each `Ask`, `Lookup` and
`Rebuild` with one message that has its number: `Rows`, `Row`, `Rebuilt` or `RequestFailed`. A `Subscribe` gets one
`PushBegun` or `RequestFailed`, then `Changes` until `Ended` or `Unsubscribe`. A `Filter` gets `Filtered` or
`RequestFailed`. `Statuses` and `Slow` are sent over and over; the first `Statuses` says that the engine is ready.
An engine sends `EvaluationBatch` and `Evaluate` to an evaluator, which says with `Row` that it is ready.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Literal, Self, TypeVar

import msgspec

from headrace.errors import StatementRejected
from headrace.framing import FrameReader, ProtocolBroken, encode_frame
from headrace_queries.push_statement import PushStatement

M = TypeVar("M")
Form = Literal["objects", "arrays", "arrow"]
Positions = dict[int, int]
"""By partition: the offset of the next record."""
Problem = tuple[Literal["unfit", "failed", "memory"], str]
"""A record does not fit the table, or the statement fails at it or needs too much memory for it; and why."""


class EngineSetup(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The configuration of the process, pickled: it goes from a process to its own child only."""

    config: bytes
    statements: bool
    """Whether the engine is the one that runs statements of callers."""


class Ask(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Run a statement."""

    number: int
    sql: str
    params: list[Any] | dict[str, Any]
    readable: list[str]
    """Tables that the caller may read."""
    form: Form
    max_rows: int
    timeout_seconds: float


class Lookup(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Find the row of a key."""

    number: int
    table: str
    key: str


class Cancel(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """Interrupt a statement whose caller has left."""

    number: int


class Rebuild(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Build a table again from its topic."""

    number: int
    table: str


class Subscribe(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Run a push query over each change of a table from now on, without a limit."""

    number: int
    table: str
    statement: PushStatement
    form: Form
    after: Positions | None = None
    """First send the rows of records from these positions on; of partitions without one, all. None: only changes."""


class Unsubscribe(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """End a subscription."""

    number: int
    table: str


class Filter(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """Evaluate a statement over records of a table's topic, each alone."""

    number: int
    table: str
    statement: PushStatement
    form: Form
    partition: int
    offsets: list[int]
    timestamps_ms: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[list[tuple[str, bytes | None]] | None] | None


class EvaluationBatch(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """Take the records that the next statements are evaluated over."""

    columns: list[tuple[str, str]]
    """Names, and types in DuckDB."""
    stream: bytes
    """Rows as an Arrow stream; empty for none."""


class Evaluate(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """Run a push query over the records."""

    number: int
    statement: PushStatement
    form: Form


class ColumnType(msgspec.Struct, array_like=True, frozen=True):
    """A column of a result."""

    name: str
    type: str
    """In DuckDB."""


class Rows(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """The result of a statement."""

    number: int
    columns: list[ColumnType]
    rows: list[bytes]
    """JSON text of each row; or one Arrow stream."""
    more: bool
    """Whether the result has further rows, which exceed a limit."""


class Row(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The row of a key as a JSON object; None if there is none."""

    number: int
    row: bytes | None


class RequestFailed(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """A request was rejected or interrupted."""

    number: int
    kind: Literal["invalid", "forbidden", "unavailable", "timeout", "memory"]
    reason: str


class Rebuilt(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """The table is empty, and its topic is read again."""

    number: int


class TableStatus(msgspec.Struct, frozen=True):
    """The state of a table."""

    name: str
    state: Literal["starting", "catching up", "live", "full", "refused", "failing"]
    """`live`: it has had every record of the moment when the process started. `full`: a limit is reached. `refused`:
    its definition or schema does not fit the rows on disk. `failing`: see `reason`; it retries by itself."""
    reason: str
    """Why it is not live; empty if it is."""
    topic: str
    kind: str
    rows: int
    bytes: int
    """On disk."""
    lag: int
    """Records of the topic that are not in the table yet."""
    age_seconds: float
    """Age of the newest record when it was applied; 0 without any."""
    corrupt: int
    """Records that were left out, because their key or value does not fit the columns."""
    last_corrupt: str
    gap: str
    """The last offsets that Kafka had removed before they were read; empty if there are none."""
    gap_offsets: int
    """Number of all such offsets."""
    columns: list[tuple[str, str]]
    """Names, and types in DuckDB."""


class Statuses(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """The states of all tables."""

    tables: list[TableStatus]


class PushBegun(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """A subscription has begun."""

    number: int
    columns: list[ColumnType]


class Changes(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """Rows for the subscribers of one statement."""

    numbers: list[int]
    rows: list[bytes]
    positions: Positions
    """Of some partitions: everything before these is in the rows that were sent."""


class Ended(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """A subscription has ended."""

    number: int
    reason: str
    outlived: bool = False
    """Whether its evaluation did not end when it was interrupted."""


class Slow(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """All statements that have been at work for a moment. If the engine ends now, one of them may be the reason."""

    numbers: list[int]
    outlived: list[int]
    """Those that do not end although they are interrupted over and over."""


class Filtered(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """The rows of a batch."""

    number: int
    rows: list[bytes | None]
    """Of each record: JSON text; None if the condition or a problem leaves it out."""
    problems: dict[int, Problem]
    """Of records without a row, by their index in the batch."""


class Evaluated(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """The rows of a push query."""

    number: int
    columns: list[ColumnType]
    rows: list[bytes]
    """Those before the first record at which the statement fails."""
    problem: str = ""
    """Why it fails at that record; empty if it fails at none."""


ToEngine = EngineSetup | Ask | Lookup | Cancel | Rebuild | Subscribe | Unsubscribe | Filter | EvaluationBatch | Evaluate
ToParent = Rows | Row | RequestFailed | Rebuilt | Statuses | PushBegun | Changes | Ended | Slow | Filtered | Evaluated

MOST_FRAME_BYTES = 128 * 1024 * 1024
_READ_BYTES = 262_144
decode_to_engine: Callable[[memoryview], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_parent: Callable[[memoryview], ToParent] = msgspec.msgpack.Decoder(ToParent).decode


def encode_message(message: ToEngine | ToParent) -> bytearray:
    """Return a message as one frame.

    Raises:
        StatementRejected: It is too long.
    """
    try:
        return encode_frame(message, MOST_FRAME_BYTES)
    except ProtocolBroken:
        raise StatementRejected(
            f"the engine of tables takes and gives at most {MOST_FRAME_BYTES >> 20} MiB at once: "
            "select fewer rows or columns, or send fewer records"
        ) from None


class Messages(Generic[M]):
    """The messages of a connection, until it ends, perhaps within one of them."""

    def __init__(self, stream: asyncio.StreamReader, decode: Callable[[memoryview], M]) -> None:
        self._stream = stream
        self._reader = FrameReader(decode, MOST_FRAME_BYTES)
        self._messages = deque[M]()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        """Return the next message.

        Raises:
            ProtocolBroken: The other side has sent something else.
        """
        while not self._messages:
            data = b""
            with contextlib.suppress(ConnectionError):
                data = await self._stream.read(_READ_BYTES)
            if not data:
                raise StopAsyncIteration
            self._messages.extend(self._reader.feed(data))
        return self._messages.popleft()
