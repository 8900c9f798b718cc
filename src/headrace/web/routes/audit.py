"""`POST /consumers/active/audit`: clients that fetch records say what became of them. Source: sidecar.md 9.5."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.http import HttpConfig
from headrace.errors import AuditNotTaken
from headrace.security.principals import READ, WRITE
from headrace.sidecar.produce_limits import check_count
from headrace.telemetry.audit import Audit
from headrace.telemetry.audit_notes import Reported
from headrace.web.access import require
from headrace.web.bodies import answer
from headrace.web.exchange import headers_of, read_json

ACTIVE_AUDIT: Final = "/consumers/active/audit"

Id = Annotated[str, Meta(max_length=1000)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_INDEX: Final = re.compile(r"\$\[(\d+)\]")
_SAID_CHARACTERS: Final = 200


class AuditedRecord(msgspec.Struct):
    """The record as it was fetched; what else it has is not looked at."""

    topic: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    offset: Offset
    headers: dict[str, str | None] | None = None


class AuditedResult(msgspec.Struct, rename="camel"):
    """What became of one record; what else it has is not looked at."""

    record: AuditedRecord | None = None
    consumer_record: AuditedRecord | None = None
    """The same, by the name that the original's document has for it."""
    processed: bool | None = None
    """Anything but `true` is a failure."""
    key: Annotated[str, Meta(max_length=10_000)] | int | float | None = None
    correlation_id: Id | None = None
    traceability_id: Id | None = None
    timestamp: Offset | None = None
    """Milliseconds; now, if it is not given."""


_decode: Final = msgspec.json.Decoder(list[AuditedResult]).decode


def audit_routes(audit: Audit | None, settings: HttpConfig) -> list[Route]:
    """Return the endpoint."""

    async def report(request: Request) -> Response:
        results = _results(await read_json(request.receive, headers_of(request.scope), settings))
        check_count(results, settings.max_records)
        reported = [_reported(index, result) for index, result in enumerate(results)]
        for topic in {one.topic for one in reported}:
            require(request.scope, (READ, WRITE), "consume", topic)
        if audit is None:
            raise AuditNotTaken("audit.to is none here: set it to file or topic")
        return answer(audit.reported(reported))

    return [Route(ACTIVE_AUDIT, report, methods=["POST"])]


def _results(body: bytes) -> list[AuditedResult]:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        said = str(cause)[:_SAID_CHARACTERS]  # it may quote the body
        place = _INDEX.search(said)
        raise AuditNotTaken(
            f"the body is no array of results, nothing is noted: {said}", index=int(place[1]) if place else None
        ) from cause


def _reported(index: int, result: AuditedResult) -> Reported:
    record = result.record or result.consumer_record
    if record is None:
        raise AuditNotTaken(f"result {index} has no record, nothing is noted: echo what was fetched", index=index)
    headers = record.headers or {}
    return Reported(
        record.topic,
        record.partition,
        record.offset,
        result.processed is True,
        None if result.key is None else str(result.key),
        headers.get("X-Correlation-Id") or result.correlation_id or "",
        headers.get("X-Traceability-Id") or result.traceability_id or "",
        result.timestamp,
    )
