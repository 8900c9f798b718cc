"""A backend as a destination: one POST per delivery over kept-alive connections, an outcome per record."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from headrace.config.backend import BackendConfig
from headrace.delivery.protocols import ACK, Delivery, Outcome, Verdict
from headrace.errors import DecodeError, DestinationRefused, DestinationUnavailable, RegistryUnavailable
from headrace.formats.codecs import Reader
from headrace.lifecycle import Service
from headrace.records import Record
from headrace.sidecar.reactive.envelope import Envelope, outcomes_of

_ANSWER_BYTES = 16_777_216


class HttpDestination(Service):
    """Posts JSON arrays of records to a backend (sidecar.md 7.3)."""

    def __init__(self, name: str, backend: BackendConfig, keys: Reader, values: Reader) -> None:
        """Prepare; connections are opened when needed.

        Args:
            name: Name of the service.
            backend: Where, with which limits.
            keys: Decodes stored keys.
            values: Decodes stored values.
        """
        super().__init__(name)
        self._backend = backend
        self._keys = keys
        self._values = values
        self._session: aiohttp.ClientSession | None = None

    async def stop(self) -> None:
        if self._session:
            await self._session.close()

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        """Post the records that can be decoded; the others are dead letters at once."""
        await self._prepare(delivery.records)
        outcomes: dict[int, Outcome] = {}
        sent: list[Record] = []
        entries: list[bytes] = []
        entry = Envelope(delivery).entry
        for record in delivery.records:
            try:
                key, value = self._keys.decode(record.key), self._values.decode(record.value)
            except DecodeError as error:
                outcomes[record.offset] = Outcome(Verdict.DEAD_LETTER, "DecodeError", error.description)
                continue
            sent.append(record)
            entries.append(entry(record, key, value))
        answered = await self._post(b"[" + b",".join(entries) + b"]", sent) if sent else []
        if not outcomes:
            return answered
        outcomes.update(zip((record.offset for record in sent), answered, strict=True))
        return [outcomes[record.offset] for record in delivery.records]

    async def _prepare(self, records: Sequence[Record]) -> None:
        try:
            await self._keys.prepare([record.key for record in records])
            await self._values.prepare([record.value for record in records])
        except RegistryUnavailable as cause:
            raise DestinationUnavailable(f"waiting for the schema registry: {cause.description}") from cause

    async def _post(self, body: bytes, sent: Sequence[Record]) -> list[Outcome]:
        try:
            async with self._open_session().post(self._backend.url, data=body, allow_redirects=False) as response:
                answer = await _read_limited(response)
                status = response.status
        except TimeoutError as cause:
            raise self._unavailable(f"no answer within {self._backend.timeout_seconds:g} s") from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise self._unavailable(str(cause) or type(cause).__name__) from cause
        if status >= 300:
            # The whole delivery failed, so none of its records is to blame: it is repeated as it is.
            raise self._unavailable(f"HTTP {status}")
        if self._backend.mode == "status":
            return [ACK] * len(sent)
        return outcomes_of(answer, sent)

    def _unavailable(self, why: str) -> DestinationUnavailable:
        return DestinationUnavailable(f"waiting for the backend {self._backend.url}: {why}", url=self._backend.url)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._backend.timeout_seconds),
                connector=aiohttp.TCPConnector(limit=0),  # the pump bounds what is in flight
                headers={**self._backend.headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


async def _read_limited(response: aiohttp.ClientResponse) -> bytes:
    answer = bytearray()
    async for chunk in response.content.iter_any():
        answer += chunk
        if len(answer) > _ANSWER_BYTES:
            raise DestinationRefused(f"the backend's answer is larger than {_ANSWER_BYTES} bytes")
    return bytes(answer)
