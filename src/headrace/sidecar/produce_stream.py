"""A stream of records: bytes of lines in, receipts out, one per line and in their order.

What is in flight is bounded: `feed` returns when there is room for more, so whoever calls it reads no more meanwhile.
A bad line fails alone, because nobody knows yet which lines will follow it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.lifecycle import Clock, Deadline, next_slice
from headrace.records import OutgoingRecord, Produced
from headrace.sidecar.produce import ProduceService, RequestIds
from headrace.sidecar.produce_answer import failure_of
from headrace.sidecar.produce_request import (
    NEITHER,
    ProduceRecord,
    ProduceRequest,
    SchemaChoices,
    check_present,
    explained,
)

log = logging.getLogger(__name__)

_BATCH_RECORDS: Final = 500
_ALONE_RECORDS: Final = 50
_RECEIPTS_BYTES: Final = 65_536
_PAUSE_SECONDS: Final = 0.02
_ROOM_SECONDS: Final = 30.0
_decode_record = msgspec.json.Decoder(ProduceRecord).decode
_encode_lines = msgspec.json.Encoder().encode_lines

_Outcome = Produced | errors.HeadraceError


class Failure(msgspec.Struct, rename="camel", omit_defaults=True):
    """The receipt of a line that is not, or perhaps not, in Kafka; or why no more lines were taken."""

    error_code: int
    error: str
    outcome: str
    code: str
    line: int
    """Number of the line, from 1."""
    end: bool = False
    """Whether neither this line nor any after it was taken."""


class Receipts(NamedTuple):
    """Receipts that are ready, as lines."""

    text: bytes
    asked_records: int
    written_records: int


class _Batch:
    """Lines that are in flight together."""

    def __init__(self, numbers: list[int], entries: list[OutgoingRecord | errors.HeadraceError], size: int) -> None:
        self.numbers = numbers
        self.records = [entry for entry in entries if isinstance(entry, OutgoingRecord)]
        self.results: Sequence[_Outcome] = []
        self.outcomes: list[_Outcome] = []
        self.size_bytes = size
        self._entries = entries

    @property
    def refusal(self) -> errors.HeadraceError:
        """Why the first of those lines is refused that are no records."""
        return next(entry for entry in self._entries if isinstance(entry, errors.HeadraceError))

    def settle(self, results: Sequence[_Outcome]) -> None:
        """Take the outcomes of its records."""
        self.results, left = results, iter(results)
        self.outcomes = [e if isinstance(e, errors.HeadraceError) else next(left) for e in self._entries]


class ProduceStream:
    """One client's stream into one topic; one task feeds it, another one takes the receipts."""

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
        self._request = functools.partial(ProduceRequest, **msgspec.structs.asdict(choices))
        self._ids = ids
        self._limits = limits
        self._clock = clock
        self._open_line = bytearray()
        self._next_line = 1
        self._window: deque[_Batch] = deque()
        self._shown: list[_Batch] = []
        self._records = self._bytes = 0
        self._room, self._ready = asyncio.Event(), asyncio.Event()
        self._feeding = False
        self._ended = False
        self._reason: errors.HeadraceError | None = None

    async def check(self) -> None:
        """Raise what can be said before the first line; see `ProduceService.check`."""
        await self._service.check(self._topic, self._request(records=[]), self._ids)

    async def feed(self, chunk: bytes, last: bool = False) -> bool:
        """Take the bytes that came next, and return whether more are taken, as soon as there is room for them."""
        self._feeding = True
        try:
            head, *more = chunk.split(b"\n")
            self._open_line += head
            if more:
                lines = [bytes(self._open_line), *more[:-1]]
                self._open_line = bytearray(more[-1])
                await self._take(lines)
            if len(self._open_line) > self._limits.max_body_bytes:
                self._too_long()
            if last:
                await self._take([bytes(self._open_line)])
                self.end()
        except Exception as defect:  # boundary: the client gets a last line that says so
            log.error("defect while reading a stream", exc_info=defect)
            self.end(errors.InternalError())
        self._feeding = False
        self._ready.set()
        return not self._ended

    def end(self, reason: errors.HeadraceError | None = None) -> None:
        """Take no more lines; the receipts of those that were taken still come."""
        if not self._ended:
            self._ended, self._reason = True, reason
            self._ready.set()
            self._room.set()

    async def receipts(self) -> Receipts | None:
        """Return the next receipts as soon as they are there; None when every line that was taken has its own.

        Those of the call before count as sent: there is room for as many lines again.
        """
        self._records -= sum(len(batch.numbers) for batch in self._shown)
        self._bytes -= sum(batch.size_bytes for batch in self._shown)
        self._room.set()
        while not (self._window and self._window[0].outcomes):
            if self._ended and not self._window and not self._feeding:
                return None
            self._ready.clear()
            await self._ready.wait()
        texts: list[bytes] = []
        self._shown, written = [], 0
        while self._window and self._window[0].outcomes and sum(map(len, texts)) < _RECEIPTS_BYTES:
            batch = self._window.popleft()
            self._shown.append(batch)
            texts.append(_encode_lines(_receipts_of(batch)))
            written += self._service.note(batch.records, batch.results)
            if len(batch.records) < len(batch.outcomes):
                self._service.not_sent(self._topic, batch.refusal, len(batch.outcomes) - len(batch.records))
        return Receipts(b"".join(texts), sum(len(batch.numbers) for batch in self._shown), written)

    def last_line(self) -> bytes:
        """Return what the client is told at the end: nothing, if it ended the stream itself."""
        return _encode_lines([_failure(self._reason, self._next_line, end=True)]) if self._reason else b""

    def _too_long(self) -> None:
        limit = self._limits.max_body_bytes
        self.end(errors.PayloadTooLarge(f"a line is longer than {limit} bytes (http.max_body_bytes): the stream ends"))

    async def _take(self, lines: list[bytes]) -> None:
        step = min(_BATCH_RECORDS, self._limits.max_records)
        for start in range(0, len(lines), step):
            batch = lines[start : start + step]
            size = sum(map(len, batch))
            if size > self._limits.max_body_bytes and len(max(batch, key=len)) > self._limits.max_body_bytes:
                bad = next(n for n, line in enumerate(batch) if len(line) > self._limits.max_body_bytes)
                await self._take(batch[:bad])
                self._too_long()
            while not self._ended and (
                self._records >= self._limits.max_records or self._bytes >= self._limits.max_body_bytes
            ):
                self._room.clear()
                await self._room.wait()
            if self._ended:
                return
            numbers = [n for n, line in enumerate(batch, self._next_line) if line and not line.isspace()]
            if numbers:
                full = batch if len(numbers) == len(batch) else [batch[n - self._next_line] for n in numbers]
                await self._send(_Batch(numbers, await self._prepare(full), size))
            self._next_line += len(batch)
            await next_slice()  # other requests run between batches

    async def _prepare(self, lines: list[bytes]) -> list[OutgoingRecord | errors.HeadraceError]:
        """Return a record for each line, or why there is none."""
        parsed = _parse(lines)
        prepared = iter(await self._prepare_records([one for one in parsed if isinstance(one, ProduceRecord)]))
        return [next(prepared) if isinstance(one, ProduceRecord) else one for one in parsed]

    async def _prepare_records(self, records: list[ProduceRecord]) -> list[OutgoingRecord | errors.HeadraceError]:
        try:
            return [*(await self._service.prepare(self._topic, self._request(records=records), self._ids)).records]
        except (errors.RequestError, errors.FormatError) as error:
            if len(records) == 1:  # of an EncodeError for one record, the cause says all
                return [error.__cause__ if isinstance(error.__cause__, errors.EncodeError) else error]
        except errors.HeadraceError as error:  # the registry, or Kafka: it is the same for each of them
            return [error] * len(records)
        entries: list[OutgoingRecord | errors.HeadraceError] = []
        for index, record in enumerate(records):
            if index % _ALONE_RECORDS == 0:
                await next_slice()  # other requests run between
            entries += await self._prepare_records([record])
        return entries

    async def _send(self, batch: _Batch) -> None:
        """Hand a batch over, waiting for room in the produce budget."""
        deadline = Deadline(self._clock, _ROOM_SECONDS)
        while True:
            try:
                self._service.write(batch.records, batch.size_bytes, functools.partial(self._settle, batch))
                break
            except errors.ProducerQueueFull as full:
                if deadline.remaining_seconds <= 0:
                    self._settle(batch, [full] * len(batch.records))
                    break
            except errors.KafkaUnavailable as away:
                self._settle(batch, [away] * len(batch.records))
                break
            await self._clock.sleep(_PAUSE_SECONDS)
        self._window.append(batch)
        self._records += len(batch.numbers)
        self._bytes += batch.size_bytes

    def _settle(self, batch: _Batch, results: Sequence[_Outcome]) -> None:
        batch.settle(results)
        self._ready.set()


def _parse(lines: list[bytes]) -> Sequence[ProduceRecord | errors.InvalidRequest]:
    """Return what each line holds; all at once if all are good."""
    try:
        str(b"\n".join(lines), "utf-8")  # the decoder does not look into raw values
        records = [_decode_record(line) for line in lines]
        check_present(records)
        return records
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        said = explained(str(cause), ProduceRecord.__struct_encode_fields__)
        error = errors.InvalidRequest(f"the line is no record: {said}")
    except errors.InvalidRequest:
        error = errors.InvalidRequest(f"the line {NEITHER}")
    return [error] if len(lines) == 1 else [entry for line in lines for entry in _parse([line])]


def _receipts_of(batch: _Batch) -> Sequence[Produced | Failure]:
    return [
        outcome if isinstance(outcome, Produced) else _failure(outcome, number)
        for number, outcome in zip(batch.numbers, batch.outcomes, strict=True)
    ]


def _failure(error: errors.HeadraceError, line: int, *, end: bool = False) -> Failure:
    entry = failure_of(error)
    return Failure(entry.error_code, entry.error, entry.outcome, error.code, line, end)
