"""Dead letters to look at, and `/consumers/deadLetter/reactive`. Source: sidecar.md 8.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.http import HttpConfig
from headrace.control.dead_letters import LetterCounts
from headrace.control.letter_pages import DeadLetters
from headrace.control.letter_scan import Order, ScanOptions, State
from headrace.control.redelivery import Redelivery, RedeliveryRequest
from headrace.control.selection import Selection, Span
from headrace.errors import AuthTokenScopeMismatch, HeadraceError, InvalidRequest
from headrace.security.principals import READ, WRITE
from headrace.web.access import may_steer, require
from headrace.web.bodies import answer, query_of
from headrace.web.exchange import headers_of, read_json

LIST: Final = "/adm/dead-letters"
PAGE: Final = "/adm/dead-letters/{topic}"
STATISTICS: Final = "/adm/dead-letters/{topic}/statistics"
REDELIVERY: Final = "/consumers/deadLetter/reactive"


class _Window(Span, frozen=True, kw_only=True):
    topic: Annotated[str, Meta(description="That dead letters came from.")] | None = None
    group: Annotated[str, Meta(description="That they failed in.")] | None = None
    error: Annotated[str, Meta(description="Class of the error.")] | None = None
    key: Annotated[str, Meta(description="As text.")] | None = None
    header: Annotated[str, Meta(description="`name=value`.")] | None = None
    text: Annotated[str, Meta(description="In error class, reason or excerpt, in any case.")] = ""
    state: State = "all"

    def options(self, order: Order = "newest", cursor: str = "") -> ScanOptions:
        """Return how far the search goes."""
        return ScanOptions(order, cursor, self.state, self.text)

    def selection(self) -> Selection:
        """Return the dead letters that the query selects."""
        name, equals, value = (self.header or "").partition("=")
        if self.header is not None and not equals:
            raise InvalidRequest("header takes name=value")
        one = {"topics": self.topic, "groups": self.group, "errors": self.error, "keys": self.key}
        given: dict[str, Any] = {field: (text,) for field, text in one.items() if text is not None}
        return Selection(
            **{field: getattr(self, field) for field in Span.__struct_fields__},
            **given,
            headers={name: value} if equals else {},
        )


class LetterQuery(_Window, frozen=True, kw_only=True):
    """Which letters, in which order, from where."""

    order: Order = "newest"
    cursor: Annotated[str, Meta(description="Of the page before, with its order.")] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="Letters at most.")] = 20


class StatisticsQuery(_Window, frozen=True, kw_only=True):
    """Which letters are counted, and by how long spans of time."""

    bucket_seconds: Annotated[int, Meta(ge=1, le=31_536_000)] = 3600


def dead_letter_routes(
    letters: DeadLetters, redelivery: Redelivery, settings: HttpConfig, note: Callable[[str, str, str, str], None]
) -> list[Route]:
    """Return the endpoints; `note` puts an operation into the audit: action, target, reason, outcome."""

    async def counts(request: Request) -> Response:
        return answer(LetterCounts(await letters.topics.counts()))

    async def page(request: Request) -> Response:
        query = query_of(request, LetterQuery)
        options = query.options(query.order, query.cursor)
        topic = request.path_params["topic"]
        return answer(await letters.page(topic, query.selection(), options, query.limit))

    async def statistics(request: Request) -> Response:
        query = query_of(request, StatisticsQuery)
        topic = request.path_params["topic"]
        return answer(await letters.statistics(topic, query.selection(), query.options(), query.bucket_seconds))

    async def redeliver(request: Request) -> Response:
        wanted = await _asked(request, settings)
        for topic, consumer in redelivery.chosen(wanted):
            require(request.scope, (READ, WRITE), "consume", topic)
            require(request.scope, (READ, WRITE), "group", consumer.group)
            if consumer.owner and not may_steer(request.scope, consumer.owner):
                raise AuthTokenScopeMismatch(f"{topic} goes to a consumer of somebody else too: name a group of yours")
        try:
            done = await redelivery.run(wanted)
        except HeadraceError as error:
            note("redeliver", wanted.topic or "", error.description, "FAILURE")
            raise
        if done.records:
            outcome = "SUCCESS" if done.status == "processed" else "FAILURE"
            note("redeliver", ", ".join(done.topics), done.description, outcome)
        return answer(done)

    delivering = Route(REDELIVERY, redeliver, methods=["GET", "POST"])
    delivering.methods = {"GET", "POST"}  # no HEAD, which Starlette adds to GET: whoever sends one wants no delivery
    return [Route(LIST, counts), Route(PAGE, page), Route(STATISTICS, statistics), delivering]


async def _asked(request: Request, settings: HttpConfig) -> RedeliveryRequest:
    """Return what the query and the body of a POST ask for together."""
    posted = request.method == "POST"
    body = await read_json(request.receive, headers_of(request.scope), settings) if posted else b""
    try:
        query = msgspec.convert(dict(request.query_params), RedeliveryRequest, strict=False)
        asked = msgspec.json.decode(body or b"{}", type=RedeliveryRequest)
        names = request.query_params.keys() & msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw]).keys()
        if twice := sorted(names.intersection(RedeliveryRequest.__struct_fields__)):
            raise InvalidRequest(f"{', '.join(twice)} is in the query and in the body: send it once")
        given = {name: value for name in request.query_params if (value := getattr(query, name, None)) is not None}
        return msgspec.structs.replace(asked, **given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"group, topic, timeout or lastretry is not as it should be: {cause}") from cause
