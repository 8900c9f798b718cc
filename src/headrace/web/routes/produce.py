"""`POST /producers/{topic}`."""

from __future__ import annotations

from typing import Final

from starlette.types import Receive, Scope, Send

from headrace.errors import PathNotFound
from headrace.sidecar.produce import ProduceService, RequestIds
from headrace.telemetry.metrics import Metrics
from headrace.web.exchange import answer_json, headers_of, read_json, retry_after
from headrace.web.middleware import CORRELATION, TRACEABILITY, given_id

PREFIX: Final = "/producers/"
PATH: Final = "/producers/{topic}"


class ProduceRoute:
    """The endpoint as a bare ASGI app, because it is the hot one."""

    def __init__(self, service: ProduceService, metrics: Metrics, max_body_bytes: int) -> None:
        self._service = service
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        topic = scope["path"][len(PREFIX) :]
        if not topic or "/" in topic:
            raise PathNotFound(f"{scope['path'][:200]}: the path is {PATH}, and a topic's name has no slash")
        headers = headers_of(scope)
        body = await read_json(scope, receive, self._max_body_bytes)
        ids = RequestIds(given_id(headers, CORRELATION), given_id(headers, TRACEABILITY), headers.get(b"authorization"))
        answer = await self._service.produce(topic, body, ids)
        self._metrics.records_in("produce", answer.asked_records)
        self._metrics.records_out("produce", answer.written_records)
        await answer_json(send, answer.status, answer.body, retry_after(answer.retry_after_seconds))
