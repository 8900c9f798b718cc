"""`POST /producers/{topic}`: what its Content-Type says decides who reads the body."""

from __future__ import annotations

from typing import Final

from starlette.types import Receive, Scope, Send

from headrace.config.http import HttpConfig
from headrace.errors import PathNotFound
from headrace.sidecar.produce import ProduceService
from headrace.telemetry.metrics import Metrics
from headrace.web.access import is_admin
from headrace.web.exchange import JSON, headers_of, media_type, read_json
from headrace.web.routes.produce_raw import RawProduceRoute, answered_ids
from headrace.web.routes.produce_stream import NDJSON, StreamProduceRoute
from headrace.web.routes.writing import KEY, Writing

PREFIX: Final = "/producers/"
PATH: Final = "/producers/{topic}"


class ProduceRoute:
    """The endpoint as a bare ASGI app, because it is the hot one."""

    def __init__(self, service: ProduceService, writing: Writing, metrics: Metrics, settings: HttpConfig) -> None:
        self._service = service
        self._writing = writing
        self._settings = settings
        self.stream = StreamProduceRoute(service, metrics, settings)
        self._raw = RawProduceRoute(service, writing, settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        topic = scope["path"][len(PREFIX) :]
        if not topic or "/" in topic:
            raise PathNotFound(f"{scope['path'][:200]}: the path is {PATH}, and a topic's name has no slash")
        self._service.check_writable(topic, admin=is_admin(scope))
        headers = headers_of(scope)
        if headers.get(b"content-type") != JSON and media_type(headers) not in (JSON, b""):
            other = self.stream if media_type(headers) in NDJSON else self._raw
            await other(topic, scope, receive, send)
            return
        body = await read_json(receive, headers, self._settings)
        ids = answered_ids(headers)
        if (key := headers.get(KEY)) is not None:
            await self._writing.produce_once(
                send, key, topic, body, lambda: self._service.prepare_body(topic, body, ids)
            )
            return
        await self._writing.tell(send, await self._service.produce(topic, body, ids))
