"""`Idempotency-Key`: a repeated request gets the same response, and writes nothing.

The records of a request and the entry of its key are one transaction, so after a crash both exist or neither does.
Entries are in a compacted topic, which is read back at start; until then requests with keys wait. A request that
certainly failed is not remembered, so it may be sent again. If its outcome is unknown, its key stays in use until the
outcome of the transaction is known. Processes that run at the same time do not see each other's entries; those of one
run divide the keys (see `key_owners`).
"""

import asyncio
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from headrace import errors
from headrace.config.producer_config import IdempotencyConfig
from headrace.http.request_checks import check_key
from headrace.kafka import Admin, InternalTopic, read_back
from headrace.records import OutgoingRecord, Produced, Record
from headrace.runtime import Clock, Service
from headrace.runtime.telemetry.correlation import caller
from headrace.sidecar.produce.produce_response import EncodedResponse, Result
from headrace.sidecar.produce.transactions import PreparedTransaction

_VERSION: Final = b"\x01"
_DIGEST_BYTES: Final = 16
_CONFIGS: Final = {
    "cleanup.policy": "compact,delete",
    "retention.ms": "172800000",  # two days, twice the longest window
    "segment.ms": "3600000",
    "compression.type": "producer",
}
_ENTRY_BYTES: Final = 400
"""Approximate memory of an entry without its response."""
_WAIT_SECONDS: Final = 5.0
_RETRY_SECONDS: Final = 1.0


class Remembered(NamedTuple):
    """A request that was written."""

    request: bytes
    """Its hash."""
    response: bytes
    """JSON text."""
    until: float
    """When it expires, in seconds since the epoch."""


class RememberedRequests:
    """Requests by key, limited in time, number and memory; the oldest is forgotten first."""

    def __init__(
        self, window_seconds: float, clock: Clock, *, max_keys: int = 1_000_000, max_bytes: int = 134_217_728
    ) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Remembered] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, scope: bytes) -> Remembered | None:
        """Return the request of a key, if it has not expired."""
        self._forget()
        return self._entries.get(scope)

    def remember(self, scope: bytes, request: bytes, response: bytes, at: float) -> None:
        """Keep a response that was sent `at` a time, in seconds since the epoch."""
        self._drop(scope)
        self._entries[scope] = Remembered(request, response, at + self._window_seconds)
        self._bytes += _ENTRY_BYTES + len(response)
        self._forget()

    def _forget(self) -> None:
        now = self._clock.time()
        while self._entries:
            scope, oldest = next(iter(self._entries.items()))
            full = len(self._entries) > self._max_keys or self._bytes > self._max_bytes
            if oldest.until > now and not full:
                break
            self._drop(scope)

    def _drop(self, scope: bytes) -> None:
        if old := self._entries.pop(scope, None):
            self._bytes -= _ENTRY_BYTES + len(old.response)


class Idempotency(Service):
    """Remembers requests that carry a key."""

    def __init__(
        self, settings: IdempotencyConfig, admin: Admin, open_producers: Callable[[], None], clock: Clock
    ) -> None:
        super().__init__("idempotency")
        self.is_own: Callable[[bytes], bool] = lambda _: True
        """Whether this process remembers a key, by its digest; others remember the rest."""
        self.window = RememberedRequests(settings.window_seconds, clock)
        self._window_seconds = settings.window_seconds

        self._topic = InternalTopic(settings.topic, "", _CONFIGS)
        self._admin = admin
        self._open_producers = open_producers
        self._clock = clock
        self._running: dict[bytes, bytes] = {}
        self._requested = asyncio.Event()
        self._ready = asyncio.Event()
        self._problem: errors.HeadraceError = errors.KafkaUnavailable("still reading them back")

    async def start(self) -> None:
        self.keep(self._read_back, "read back")

    async def load(
        self, key: bytes, target: str, request: bytes, prepare: Callable[[], Awaitable[PreparedTransaction]]
    ) -> PreparedTransaction | EncodedResponse:
        """Return the transaction of a request, or the response of an earlier request with its key.

        The key is in use until `settled` of the transaction is called.

        Args:
            key: The header `Idempotency-Key`; keys are separate per caller and target.
            target: The topic, or the path.
            request: The bytes that must be equal when the key is repeated.
            prepare: Makes the transaction; may be called twice.

        Raises:
            InvalidRequest: The key is not valid.
            IdempotencyKeyReused: It was used for another request.
            IdempotencyKeyBusy: The first request with it is still in flight.
            KafkaUnavailable: The keys are not read back yet.
            KafkaUnauthorized: A right to their topic is missing.
        """
        check_key(key)
        if not self._ready.is_set():
            await self._wait_ready((await prepare()).records)
        scope = key_digest(target, key)
        digest = _digest(request)
        known = self.window.find(scope)
        if digest != (known.request if known else self._running.get(scope, digest)):
            raise errors.IdempotencyKeyReused()
        if known:
            return EncodedResponse(200, known.response)
        if scope in self._running:
            raise errors.IdempotencyKeyBusy()
        self._running[scope] = digest
        try:
            prepared = await prepare()
        except BaseException:
            del self._running[scope]
            raise
        return prepared._replace(
            last_record=functools.partial(self._entry, scope, digest, prepared),
            settled=functools.partial(self._settled, scope, prepared),
        )

    def _entry(
        self, scope: bytes, digest: bytes, prepared: PreparedTransaction, results: Sequence[Produced]
    ) -> OutgoingRecord:
        return OutgoingRecord(self._topic.name, scope, _VERSION + digest + prepared.response_of(results).body)

    def _settled(self, scope: bytes, prepared: PreparedTransaction, results: Sequence[Result] | None) -> None:
        digest = self._running.pop(scope)
        if results is not None and all(type(result) is Produced for result in results):
            self.window.remember(scope, digest, prepared.response_of(results).body, self._clock.time())

    async def _wait_ready(self, records: Sequence[OutgoingRecord]) -> None:
        if records:
            self._topic = self._topic._replace(source=records[0].topic)
            self._requested.set()
        limit = 0 if isinstance(self._problem, errors.KafkaUnauthorized) else _WAIT_SECONDS
        try:
            await asyncio.wait_for(self._ready.wait(), limit)
        except TimeoutError:
            if isinstance(self._problem, errors.KafkaUnauthorized):
                raise self._problem.with_traceback(None) from None
            raise errors.KafkaUnavailable(
                f"the idempotency keys are not available yet, and nothing was sent; send it again: {self._problem}"
            ) from None

    async def _read_back(self) -> None:
        while not self._ready.is_set():
            try:
                if not await self._admin.has_topic(self._topic.name):  # no key has been used so far
                    await self._requested.wait()
                    await self._topic.ensure(self._admin)
                self._open_producers()  # aborts the open transactions of an earlier process
                since_ms = int((self._clock.time() - self._window_seconds) * 1000)
                async for records in read_back(self._admin, self._topic, since_ms):
                    for record in records:
                        self._take(record)
                self._ready.set()
            except errors.HeadraceError as problem:
                self._problem = problem
                await self._clock.sleep(_RETRY_SECONDS)

    def _take(self, record: Record) -> None:
        value = record.value or b""
        if record.key and value[:1] == _VERSION and self.is_own(record.key):
            digest = value[1 : 1 + _DIGEST_BYTES]
            response = value[1 + _DIGEST_BYTES :]
            self.window.remember(record.key, digest, response, record.timestamp_ms / 1000)


def key_digest(target: str, key: bytes) -> bytes:
    """Return the digest of a key of the present caller for a topic or path."""
    return _digest(caller.get().encode(), target.encode(), key)


def _digest(*parts: bytes) -> bytes:
    """Return a hash of byte strings and their lengths, so that different lists have different hashes."""
    whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        whole.update(len(part).to_bytes(8) + part)
    return whole.digest()
