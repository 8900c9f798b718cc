"""Serves the usual produce request below the application: on its connection, without a task.

The usual request is `POST /producers/{topic}` with JSON or one value of known length, in formats without a schema,
whose credentials and topic are cached. The application serves all other requests. It also repeats those that fail
here, so it alone makes the error responses. Responses of both paths are equal, byte for byte.
"""

import asyncio
import dataclasses
import functools
import logging
import re
import time
from typing import Any, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.config.http import HttpConfig
from headrace.errors import HeadraceError, KafkaUnavailable, ProducerQueueFull
from headrace.http.application import Gate, error_of
from headrace.http.auth import Authenticator, Principal
from headrace.http.auth.principals import ADMIN
from headrace.http.connection import ClientConnection
from headrace.http.messages import JSON, media_type, retry_after
from headrace.http.request_checks import RequestChecks
from headrace.http.request_report import ServedRequest, end_span, log_access, server_span
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.correlation import caller, correlation_id, new_correlation_id
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.produce.ndjson_route import NDJSON
from headrace.sidecar.produce.produce import ProduceService, RequestIds
from headrace.sidecar.produce.produce_response import EncodedResponse, Prepared, Result
from headrace.sidecar.produce.routes import PATH, ProduceRoute, raw_record
from headrace.sidecar.produce.transaction_routes import request_ids

log = logging.getLogger(__name__)

_TOPIC: Final = re.compile(rb"/producers/([A-Za-z0-9._-]{1,249})")
_KINDS: Final = (b"application/json", b"application/json; charset=utf-8")
_UNUSUAL: Final = frozenset(
    b"""
    content-encoding expect idempotency-key origin sec-fetch-site transfer-encoding upgrade x-scope-token
    """.split()
)
_NOT_RAW: Final = (JSON, b"", *NDJSON)
_RULE: Final = ProduceRoute.produce.rule


class Exchange:
    """One request and its response, with the attributes of uvicorn's request cycles."""

    __slots__ = (
        "chunks",
        "connection",
        "disconnected",
        "ids",
        "keep_alive",
        "more_body",
        "principal",
        "raw",
        "response_complete",
        "scope",
        "started_at",
        "topic",
    )
    message_event: Final = asyncio.Event()  # uvicorn sets it to wake the task of a request; here there is none

    def __init__(
        self, connection: ClientConnection, topic: str, ids: RequestIds, principal: Principal | None, raw: bool = False
    ) -> None:
        self.connection = connection
        self.scope: Any = connection.scope
        self.topic = topic
        self.ids = ids if ids.correlation_id else ids._replace(correlation_id=new_correlation_id())
        self.raw = raw
        self.principal = principal
        self.chunks: list[bytes] = []
        self.more_body = self.keep_alive = True
        self.disconnected = self.response_complete = False
        self.started_at = time.perf_counter()

    @property
    def response_started(self) -> bool:
        """The same as `response_complete`, because `answer` writes the whole response at once."""
        return self.response_complete

    def answer(self, response: EncodedResponse) -> None:
        """Write the whole response at once."""
        connection = self.connection
        self.response_complete = True
        if self.disconnected or connection.transport.is_closing():
            return
        # In the same order as the application: headers of the server, headers of the response, ids.
        own = _header_lines(tuple(connection.server_state.default_headers))
        again = _header_lines(tuple(retry_after(response.retry_after_seconds)))
        trace = b"x-traceability-id: %b\r\n" % self.ids.traceability_id if self.ids.traceability_id else b""
        connection.transport.write(
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\n%bx-correlation-id: %b\r\n%b%b\r\n%b"
            % (
                STATUS_LINE[response.status],
                own,
                len(response.body),
                again,
                self.ids.correlation_id,
                trace,
                b"" if self.keep_alive else b"connection: close\r\n",
                response.body,
            )
        )
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()


@functools.lru_cache(4)  # the server's headers change with the date, once a second
def _header_lines(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


@dataclasses.dataclass(eq=False)
class FastPath:
    """Serves the usual requests of every connection."""

    _settings: HttpConfig
    _service: ProduceService
    _metrics: Metrics
    _gate: Gate
    _origins: RequestChecks
    _authenticator: Authenticator | None

    def begin(self, connection: ClientConnection) -> Exchange | None:
        """Return the exchange of a request with a complete head; None if the request is not a usual one."""
        scope: Any = connection.scope
        found = _TOPIC.fullmatch(connection.url)
        parser = connection.parser
        if not found or parser.get_method() != b"POST" or connection.flow.write_paused:
            return None
        if parser.get_http_version() != "1.1" or not parser.should_keep_alive():
            return None
        headers = dict(connection.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or not _UNUSUAL.isdisjoint(headers):
            return None
        raw = headers.get(b"content-type") not in _KINDS
        if raw and media_type(headers) in _NOT_RAW:
            return None
        if len(headers) != len(connection.headers) or not 0 < int(length) <= self._settings.max_body_bytes:
            return None
        scope["raw_path"] = connection.url
        scope["query_string"] = b""
        topic = found[1].decode()
        principal = None
        try:
            self._origins.check(scope, headers)
            if self._authenticator:
                principal = self._authenticator.known(headers)
                if principal is None:
                    return None
                principal.require(_RULE.any_of, _RULE.action, topic)
            self._service.check_writable(topic, admin=principal is None or ADMIN in principal.scopes)
        except HeadraceError:
            return None
        return Exchange(connection, topic, request_ids(headers), principal, raw)

    def serve(self, exchange: Exchange) -> bool:
        """Produce a complete request; return False if nothing was sent and the application must serve it."""
        if self._gate.disturbance or not self._gate.enter():
            return False
        if tracing.tracer:
            self._trace(exchange)
        principal = exchange.principal
        exchange.principal = None  # set only while the request counts as in flight
        try:
            prepared = self._prepare(exchange)
            if prepared is not None:
                if self._authenticator and principal:
                    self._authenticator.enter(principal)
                    exchange.principal = principal
                self._service.hand_over(prepared, functools.partial(self._done, exchange, prepared))
                return True
        except (KafkaUnavailable, ProducerQueueFull) as full:
            # Under overload and in an outage a rejection must be cheap, so the application does not repeat the work.
            self._set_context(exchange, principal)
            self._service.not_sent(exchange.topic, full)
            self._answer(exchange, self._error(exchange, full))
            return True
        except HeadraceError:
            log.debug("the application will serve this request, and respond with its error")
        except Exception as defect:  # noqa: BLE001 boundary: what the user sees is one error body
            self._set_context(exchange, principal)
            self._answer(exchange, self._error(exchange, defect))
            return True
        self._leave(exchange)
        return False

    def _trace(self, exchange: Exchange) -> None:
        headers = dict(exchange.scope["headers"])
        if span := server_span("POST", headers):
            exchange.ids = request_ids(headers, exchange.ids.correlation_id, span, exchange.topic)

    def _prepare(self, exchange: Exchange) -> Prepared | None:
        topic = exchange.topic
        body = b"".join(exchange.chunks)
        if not exchange.raw:
            return self._service.begin(topic, body, exchange.ids)
        record = raw_record(self._service, topic, exchange.scope["headers"], body)
        return self._service.begin_record(record, exchange.ids)

    def _done(self, exchange: Exchange, prepared: Prepared, results: list[Result]) -> None:
        self._set_context(exchange, exchange.principal)
        try:
            response = self._service.answer(prepared, results)
        except Exception as defect:  # noqa: BLE001 boundary: what the user sees is one error body
            response = self._error(exchange, defect)
        self._answer(exchange, response)

    def _set_context(self, exchange: Exchange, principal: Principal | None) -> None:
        """Set the ids for the audit; each callback has a separate context."""
        correlation_id.set(exchange.ids.correlation_id.decode())
        caller.set(principal.name if principal else "")

    def _answer(self, exchange: Exchange, response: EncodedResponse) -> None:
        self._metrics.produced(response.requested_records, response.written_records)
        seconds = time.perf_counter() - exchange.started_at
        self._metrics.request(PATH, response.status, seconds)
        self._leave(exchange)
        if exchange.ids.request or self._settings.access_log:
            self._report(exchange, response, seconds)
        exchange.answer(response)

    def _report(self, exchange: Exchange, response: EncodedResponse, seconds: float) -> None:
        correlation, traceability = exchange.ids.correlation_id.decode(), (exchange.ids.traceability_id or b"").decode()
        size = len(response.body)
        served = ServedRequest(
            exchange.scope, "POST", PATH, response.status, size, seconds, correlation, traceability, caller.get()
        )
        if self._settings.access_log:
            log_access(served, exchange.ids.request)
        if exchange.ids.request:
            end_span(exchange.ids.request, served)

    def _leave(self, exchange: Exchange) -> None:
        self._gate.leave()
        if self._authenticator and exchange.principal:
            self._authenticator.in_flight.leave(exchange.principal.name)

    def _error(self, exchange: Exchange, cause: Exception) -> EncodedResponse:
        correlation_id.set(exchange.ids.correlation_id.decode())
        error = error_of({"method": "POST", "path": f"/producers/{exchange.topic}"}, cause)
        return EncodedResponse(error.status, msgspec.json.encode(error.body()), error.retry_after_seconds)
