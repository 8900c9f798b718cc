"""Answers to requests that are written as one transaction each, and what becomes of their `Idempotency-Key`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.types import Send

from headrace.sidecar.idempotency import Idempotency
from headrace.sidecar.produce import Prepared
from headrace.sidecar.produce_answer import ProduceAnswer
from headrace.sidecar.transactions import Transactions, Work
from headrace.telemetry.metrics import Metrics
from headrace.web.exchange import Headers, answer_json, retry_after

KEY: Final = b"idempotency-key"
_REPLAYED: Final = (b"idempotency-replayed", b"true")


class Writing:
    """Writes and answers; with a key, once only."""

    def __init__(self, transactions: Transactions, idempotency: Idempotency, metrics: Metrics) -> None:
        self.transactions = transactions
        self._idempotency = idempotency
        self._metrics = metrics

    async def answer(
        self, send: Send, key: bytes | None, place: str, request: bytes, prepare: Callable[[], Awaitable[Work]]
    ) -> None:
        """Write what `prepare` makes and send the answer; where the key came before, send the answer it had."""
        replayed = False
        if key is None:
            answer = await self.transactions.write(await prepare())
        else:
            answer, replayed = await self._idempotency.once(key, place, request, prepare)
        await self.tell(send, answer, [_REPLAYED] if replayed else ())

    async def tell(self, send: Send, answer: ProduceAnswer, headers: Headers = ()) -> None:
        """Count an answer and send it."""
        self._metrics.produced(answer.asked_records, answer.written_records)
        headers = [*retry_after(answer.retry_after_seconds), *headers]
        await answer_json(send, answer.status, answer.body, headers)

    async def produce_once(
        self, send: Send, key: bytes, topic: str, request: bytes, prepare: Callable[[], Awaitable[Prepared]]
    ) -> None:
        """Write the records of a produce request and answer as it is answered; `request` stands for all of it."""

        async def work() -> Work:
            return self.transactions.of_produce(await prepare())

        await self.answer(send, key, topic, request, work)
