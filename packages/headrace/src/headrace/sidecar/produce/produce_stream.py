"""A stream of records: takes lines, and returns a receipt for each line, in order.

Lines in flight are bounded: `feed` returns when it can take more, and its caller reads nothing until then.
A bad line fails alone, because the lines after it are not known yet.
"""

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.records import OutgoingRecord, Produced
from headrace.runtime import Clock, Deadline, next_slice
from headrace.sidecar.produce.produce import ProduceService, RequestIds
from headrace.sidecar.produce.produce_request import (
    NEITHER,
    ParsedRequest,
    ProduceRecord,
    ProduceRequest,
    SchemaChoices,
    check_present,
    explained,
)
from headrace.sidecar.produce.produce_response import Prepared, Result, failure_of

log = logging.getLogger(__name__)

_BATCH_RECORDS: Final = 500
_SINGLE_RECORDS: Final = 50
_RECEIPTS_BYTES: Final = 65_536
_PAUSE_SECONDS: Final = 0.02
_BUDGET_WAIT_SECONDS: Final = 30.0
_decode_record = msgspec.json.Decoder(ProduceRecord).decode
_encode_lines = msgspec.json.Encoder().encode_lines


class Failure(msgspec.Struct, rename="camel", omit_defaults=True):
    """The receipt of a line that is not, or may not be, in Kafka; or the reason why the stream ends."""

    error_code: int
    error: str
    outcome: str
    code: str
    line: int
    """Number of the line, from 1."""
    end: bool = False
    """Whether the stream ends: this line and all after it were not read."""


class Receipts(NamedTuple):
    """Receipts that are ready, as lines."""

    text: bytes
    requested_records: int
    written_records: int


class _Lines:
    """Splits the bytes of a stream into numbered lines."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The incomplete last line."""
        self.next_number = 1

    def split(self, chunk: bytes) -> list[bytes]:
        head, *more = chunk.split(b"\n")
        self.rest += head
        if not more:
            return []
        lines = [bytes(self.rest), *more[:-1]]
        self.rest = bytearray(more[-1])
        return lines


class _LineBatch:
    """Lines that are in flight together."""

    def __init__(self, numbers: list[int], entries: list[OutgoingRecord | errors.HeadraceError], size: int) -> None:
        self.numbers = numbers
        self.records = [entry for entry in entries if isinstance(entry, OutgoingRecord)]
        self.results: Sequence[Result] = []
        self.outcomes: list[Result] = []
        """The result of each record and the error of each other line, in order; empty until all are known."""
        self.size_bytes = size
        self._entries = entries

    @property
    def refusal(self) -> errors.HeadraceError:
        """The error of the first line that is not a record."""
        return next(entry for entry in self._entries if isinstance(entry, errors.HeadraceError))

    def settle(self, results: Sequence[Result]) -> None:
        self.results = results
        left = iter(results)
        self.outcomes = [e if isinstance(e, errors.HeadraceError) else next(left) for e in self._entries]


class _LinesInFlight:
    """The batches whose receipts have not been sent, in order; bounded by lines and bytes."""

    def __init__(self, limits: HttpConfig) -> None:
        self._limits = limits
        self._waiting: deque[_LineBatch] = deque()
        self._sending: list[_LineBatch] = []
        """Batches that the last call of `take` returned."""
        self._records = 0
        self._bytes = 0

    @property
    def is_full(self) -> bool:
        return self._records >= self._limits.max_records or self._bytes >= self._limits.max_body_bytes

    @property
    def has_ready(self) -> bool:
        """Whether receipts are ready for `take`."""
        return bool(self._waiting and self._waiting[0].outcomes)

    @property
    def is_empty(self) -> bool:
        """Whether all receipts have been taken."""
        return not self._waiting

    def add(self, batch: _LineBatch) -> None:
        self._waiting.append(batch)
        self._records += len(batch.numbers)
        self._bytes += batch.size_bytes

    def release(self) -> None:
        """Stop counting the batches of the last `take`, because their receipts have been sent."""
        self._records -= sum(len(batch.numbers) for batch in self._sending)
        self._bytes -= sum(batch.size_bytes for batch in self._sending)
        self._sending = []

    def take(self) -> _LineBatch:
        """Return the next batch with receipts."""
        batch = self._waiting.popleft()
        self._sending.append(batch)
        return batch


class ProduceStream:
    """One client's stream into one topic; one task feeds it, another sends the receipts."""

    def __init__(
        self,
        service: ProduceService,
        topic: str,
        choices: SchemaChoices,
        ids: RequestIds,
        limits: HttpConfig,
        clock: Clock,
    ) -> None:
        self._service = service
        self._topic = topic
        self._ids = ids
        self._request = functools.partial(ProduceRequest, **msgspec.structs.asdict(choices))
        self._limits = limits
        self._clock = clock
        self._lines = _Lines()
        self._in_flight = _LinesInFlight(limits)
        self._changed = asyncio.Event()
        self._feeding = False
        self._end: errors.HeadraceError | bool = False
        """Why no more lines are read; True if the client ended the stream."""

    async def feed(self, chunk: bytes, last: bool = False) -> bool:
        """Process the next bytes, wait until more fit, and return whether to read more."""
        self._feeding = True
        try:
            await self._process(self._lines.split(chunk))
            if len(self._lines.rest) > self._limits.max_body_bytes:
                self._end_at_long_line()
            if last:
                await self._process([bytes(self._lines.rest)])
                self.end()
        except Exception as defect:  # boundary: the client gets a last line with the error
            log.error("defect while reading a stream", exc_info=defect)
            self.end(errors.InternalError())
        self._feeding = False
        self._changed.set()
        return not self._end

    def end(self, reason: errors.HeadraceError | None = None) -> None:
        """Read no more lines; lines in flight still get their receipts."""
        self._end = self._end or reason or True
        self._changed.set()

    async def receipts(self) -> Receipts | None:
        """Return the next receipts when they are ready; None when the stream has ended and every line has a receipt.

        The receipts of the previous call count as sent, so more lines may follow.
        """
        self._in_flight.release()
        self._changed.set()
        while not self._in_flight.has_ready:
            if self._end and self._in_flight.is_empty and not self._feeding:
                return None
            await self._wait()
        text = bytearray()
        requested = 0
        written = 0
        while self._in_flight.has_ready and len(text) < _RECEIPTS_BYTES:
            batch = self._in_flight.take()
            outcomes = zip(batch.numbers, batch.outcomes, strict=True)
            text += _encode_lines([one if isinstance(one, Produced) else _failure(one, n) for n, one in outcomes])
            requested += len(batch.numbers)
            written += self._service.audit(batch.records, batch.results)
            if len(batch.records) < len(batch.outcomes):
                self._service.not_sent(self._topic, batch.refusal, len(batch.outcomes) - len(batch.records))
        return Receipts(bytes(text), requested, written)

    def last_line(self) -> bytes:
        """Return the line with the reason why the stream ends; empty if the client ended it."""
        if isinstance(self._end, errors.HeadraceError):
            return _encode_lines([_failure(self._end, self._lines.next_number, end=True)])
        return b""

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _end_at_long_line(self) -> None:
        limit = self._limits.max_body_bytes
        self.end(errors.PayloadTooLarge(f"a line is longer than {limit} bytes (http.max_body_bytes): the stream ends"))

    async def _process(self, lines: list[bytes]) -> None:
        limits = self._limits
        step = min(_BATCH_RECORDS, limits.max_records)
        for start in range(0, len(lines), step):
            batch = lines[start : start + step]
            size = sum(map(len, batch))
            if size > limits.max_body_bytes and len(max(batch, key=len)) > limits.max_body_bytes:
                bad = next(n for n, line in enumerate(batch) if len(line) > limits.max_body_bytes)
                await self._process(batch[:bad])
                self._end_at_long_line()
            while not self._end and self._in_flight.is_full:
                await self._wait()
            if self._end:
                return
            first = self._lines.next_number
            numbers = [n for n, line in enumerate(batch, first) if line and not line.isspace()]
            if numbers:
                full = batch if len(numbers) == len(batch) else [batch[n - first] for n in numbers]
                await self._send(_LineBatch(numbers, await self._prepare(full), size))
            self._lines.next_number += len(batch)
            await next_slice()  # other requests run between batches

    async def _prepare(self, lines: list[bytes]) -> list[OutgoingRecord | errors.HeadraceError]:
        """Return a record or an error for each line."""
        parsed = _parse(lines)
        prepared = iter(await self._prepare_records([one for one in parsed if isinstance(one, ProduceRecord)]))
        return [next(prepared) if isinstance(one, ProduceRecord) else one for one in parsed]

    async def _prepare_records(self, records: list[ProduceRecord]) -> list[OutgoingRecord | errors.HeadraceError]:
        try:
            request = ParsedRequest(self._request(records=records))
            return [*(await self._service.load(self._topic, request, self._ids)).records]
        except (errors.RequestError, errors.FormatError) as error:
            if len(records) == 1:  # the EncodeError of one record has a cause without record numbers
                return [error.__cause__ if isinstance(error.__cause__, errors.EncodeError) else error]
        except errors.HeadraceError as error:  # of the registry or Kafka: it applies to all of them
            return [error] * len(records)
        entries: list[OutgoingRecord | errors.HeadraceError] = []
        for index, record in enumerate(records):
            if index % _SINGLE_RECORDS == 0:
                await next_slice()  # other requests run between
            entries += await self._prepare_records([record])
        return entries

    async def _send(self, batch: _LineBatch) -> None:
        """Hand a batch over, when the produce budget allows it."""
        deadline = Deadline(self._clock, _BUDGET_WAIT_SECONDS)
        prepared = Prepared(batch.records, size_bytes=batch.size_bytes)
        while True:
            try:
                self._service.do(prepared, functools.partial(self._settle, batch))
                break
            except (errors.ProducerQueueFull, errors.KafkaUnavailable) as error:
                if isinstance(error, errors.KafkaUnavailable) or deadline.remaining_seconds <= 0:
                    self._settle(batch, [error] * len(batch.records))
                    break
            await self._clock.sleep(_PAUSE_SECONDS)
        self._in_flight.add(batch)

    def _settle(self, batch: _LineBatch, results: Sequence[Result]) -> None:
        batch.settle(results)
        self._changed.set()


def _parse(lines: list[bytes]) -> Sequence[ProduceRecord | errors.InvalidRequest]:
    """Return a record or an error for each line; decode all lines together unless one is bad."""
    try:
        str(b"\n".join(lines), "utf-8")  # the decoder does not check raw values
        records = [_decode_record(line) for line in lines]
        check_present(records)
        return records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        text = explained(str(cause), ProduceRecord.__struct_encode_fields__)
        error = errors.InvalidRequest(f"the line is not a valid record: {text}")
    except errors.InvalidRequest:
        error = errors.InvalidRequest(f"the line {NEITHER}")
    return [error] if len(lines) == 1 else [entry for line in lines for entry in _parse([line])]


def _failure(error: errors.HeadraceError, line: int, *, end: bool = False) -> Failure:
    entry = failure_of(error)
    return Failure(entry.error_code, entry.error, entry.outcome, error.code, line, end)
