"""A push query as server-sent events: a row per event, and ids from which a client can continue.

Source: WHATWG HTML, server-sent events.
"""

from typing import Annotated, Final

import msgspec

from headrace.errors import HeadraceError, InvalidRequest
from headrace.http.request import UNREAD_SECONDS, HttpRequest
from headrace_queries.engine_protocol import Positions
from headrace_queries.push_query import PushQuery

EVENTS: Final = "text/event-stream"
LAST_EVENT_ID: Final = b"last-event-id"
_HEAD: Final = [(b"content-type", EVENTS.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
_HEARTBEAT_SECONDS: Final = 15.0
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 2)]
_decode_id = msgspec.json.Decoder(dict[_Number, _Number]).decode


def positions_of(event_id: str) -> Positions:
    """Return the positions behind the rows that the client of an event id has processed.

    Raises:
        InvalidRequest: It is not the id of such an event.
    """
    try:
        return _decode_id(event_id)
    except (msgspec.MsgspecError, UnicodeError) as cause:
        raise InvalidRequest(f"Last-Event-ID is not an id of this stream: {cause}") from cause


async def stream_events(push: PushQuery, limit: int | None, request: HttpRequest) -> None:
    """Send rows as they arrive, until the limit or the end of the query.

    The id of an event is behind all rows of a transaction of the table. A client that continues from it may get rows
    of the next one again.
    """
    request.is_streaming = True
    request.response.last_bytes = _error
    await request.response.start(200, _HEAD)
    sent = 0
    while limit is None or sent < limit:
        taken = await push.take(_HEARTBEAT_SECONDS)
        if taken is None:
            break
        rows = taken.rows if limit is None else taken.rows[: limit - sent]
        sent += len(rows)
        event_id = b"id: %b\n" % msgspec.json.encode(taken.positions)
        body = b"".join(b"data: %b\n\n" % row for row in rows[:-1])
        body += event_id + (b"data: %b\n\n" % rows[-1] if rows else b"\n")
        if not await request.response.write_through(body, UNREAD_SECONDS):
            return
    await request.response.end()


def _error(error: HeadraceError) -> bytes:
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.body())
