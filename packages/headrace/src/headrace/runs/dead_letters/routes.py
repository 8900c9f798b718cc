"""Endpoints that show dead letters: in pages, and counted."""

from typing import Annotated, Any

from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.http.endpoint import ADMINISTER, KAFKA, Call, Endpoint
from headrace.runs.dead_letters.counts import DeadLetterCounts
from headrace.runs.dead_letters.pages import (
    DeadLetterPage,
    DeadLetterPages,
    DeadLetterStatistics,
    Order,
    ScanOptions,
    State,
)
from headrace.runs.selection import Selection, Span


class StatisticsQuery(Span, frozen=True, kw_only=True):
    """Selects dead letters."""

    topic: Annotated[str, Meta(description="Topic of origin.")] | None = None
    group: Annotated[str, Meta(description="Consumer group that wrote the dead letters.")] | None = None
    error: Annotated[str, Meta(description="Class of the error.")] | None = None
    key: Annotated[str, Meta(description="As text.")] | None = None
    header: Annotated[str, Meta(description="`name=value`.")] | None = None
    text: Annotated[str, Meta(description="In error class, reason or excerpt, in any case.")] = ""
    state: State = "all"

    def options(self, order: Order = "newest", cursor: str = "") -> ScanOptions:
        """Return order, start and conditions of the search."""
        return ScanOptions(order, cursor, self.state, self.text)

    def selection(self) -> Selection:
        """Return the dead letters that the query selects."""
        name, equals, value = (self.header or "").partition("=")
        if self.header is not None and not equals:
            raise InvalidRequest("header must be name=value")
        one = {"topics": self.topic, "groups": self.group, "errors": self.error, "keys": self.key}
        given: dict[str, Any] = {field: (text,) for field, text in one.items() if text is not None}
        return Selection(
            **{field: getattr(self, field) for field in Span.__struct_fields__},
            **given,
            headers={name: value} if equals else {},
        )


class DeadLetterQuery(StatisticsQuery, frozen=True, kw_only=True):
    """Selects dead letters, their order, and where the page starts."""

    order: Order = "newest"
    cursor: Annotated[str, Meta(description="Of the previous page, with its order.")] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="Dead letters at most.")] = 20


class DeadLetterEndpoints:
    """Shows dead letters."""

    def __init__(self, dead_letters: DeadLetterPages) -> None:
        self._dead_letters = dead_letters

    @Endpoint(
        "GET", "/adm/dead-letters", "getDeadLetterTopics", "Number of dead letters by topic", ADMINISTER, errors=KAFKA
    )
    async def topics(self, call: Call[None, None]) -> DeadLetterCounts:
        return DeadLetterCounts(await self._dead_letters.topics.counts())

    @Endpoint("GET", "/adm/dead-letters/{topic}", "getDeadLetters", "Dead letters in pages", ADMINISTER, errors=KAFKA)
    async def page(self, call: Call[None, DeadLetterQuery]) -> DeadLetterPage:
        query = call.query
        options = query.options(query.order, query.cursor)
        return await self._dead_letters.page(call.parameters["topic"], query.selection(), options, query.limit)

    @Endpoint(
        "GET",
        "/adm/dead-letters/{topic}/statistics",
        "getDeadLetterStatistics",
        "Dead letters by error, origin, status and time",
        ADMINISTER,
        errors=KAFKA,
    )
    async def statistics(self, call: Call[None, StatisticsQuery]) -> DeadLetterStatistics:
        query = call.query
        return await self._dead_letters.statistics(call.parameters["topic"], query.selection(), query.options())
