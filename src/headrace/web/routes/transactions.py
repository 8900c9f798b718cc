"""`POST /transactions`."""

from __future__ import annotations

from typing import Final

from starlette.types import Receive, Scope, Send

from headrace.config.http import HttpConfig
from headrace.lifecycle import next_slice
from headrace.security.principals import WRITE
from headrace.sidecar.produce import LONG_BODY_BYTES
from headrace.sidecar.transactions import parse_transaction
from headrace.web.access import is_admin, require
from headrace.web.exchange import headers_of, read_json
from headrace.web.routes.produce_raw import answered_ids
from headrace.web.routes.writing import KEY, Writing

TRANSACTIONS: Final = "/transactions"


class TransactionRoute:
    """The endpoint."""

    def __init__(self, writing: Writing, settings: HttpConfig) -> None:
        self._writing = writing
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        body = await read_json(receive, headers, self._settings)
        if len(body) > LONG_BODY_BYTES:
            await next_slice()
        request = parse_transaction(body, self._settings.max_records)
        for part in request.topics:
            require(scope, (WRITE,), "produce", part.topic)
            self._writing.transactions.check_writable(part.topic, admin=is_admin(scope))
        ids = answered_ids(headers)
        transactions = self._writing.transactions
        await self._writing.answer(
            send, headers.get(KEY), TRANSACTIONS, body, lambda: transactions.prepare(request, ids)
        )
