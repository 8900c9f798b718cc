"""Dead letters to read, and `/consumers/deadLetter/reactive`."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from headrace import errors
from headrace.errors import AuthTokenScopeMismatch, InvalidRequest
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import (
    ADMINISTER,
    JSON,
    KAFKA,
    RECORDS_BODY,
    Call,
    CallEvent,
    Endpoint,
    Errors,
    Rule,
    may_control,
    require,
)
from headrace.runs.dead_letters.counts import DeadLetterCounts
from headrace.runs.dead_letters.pages import (
    DeadLetterPage,
    DeadLetterPages,
    DeadLetterStatistics,
    Order,
    ScanOptions,
    State,
)
from headrace.runs.redelivery import Redelivery, RedeliveryRequest, RedeliveryResponse
from headrace.runs.selection import Selection, Span

_REDELIVERY: Final[Errors] = (errors.InvalidTopicName, errors.LeaseTaken, errors.LeaseLost, errors.ReadFailed, *KAFKA)


class _Window(Span, frozen=True, kw_only=True):
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


class DeadLetterQuery(_Window, frozen=True, kw_only=True):
    """Selects dead letters, their order, and where the page starts."""

    order: Order = "newest"
    cursor: Annotated[str, Meta(description="Of the previous page, with its order.")] = ""
    limit: Annotated[int, Meta(ge=1, le=500, description="Dead letters at most.")] = 20


class StatisticsQuery(_Window, frozen=True, kw_only=True):
    """Selects the dead letters to count, and the length of a time bucket."""

    bucket_seconds: Annotated[int, Meta(ge=1, le=31_536_000)] = 3600


class DeadLetterEndpoints:
    """Shows dead letters, and delivers them again as light-4j kafka-sidecar does."""

    def __init__(self, dead_letters: DeadLetterPages, redelivery: Redelivery) -> None:
        self._dead_letters = dead_letters
        self._redelivery = redelivery

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
        return await self._dead_letters.statistics(
            call.parameters["topic"], query.selection(), query.options(), query.bucket_seconds
        )

    @Endpoint(
        "POST",
        "/consumers/deadLetter/reactive",
        "DLTopicReplayReactivePost",
        "Deliver a batch of dead letters to the backend of their consumer again",
        Rule((WRITE,), "consume", also="group"),
        request={JSON: RedeliveryRequest},
        query=RedeliveryRequest,
        example={"topic": "orders", "lastretry": False},
        errors=(*RECORDS_BODY, *_REDELIVERY),
        audited="redeliver",
        decoded=False,
    )
    async def redeliver(self, call: Call[bytes | None, dict[str, str]]) -> RedeliveryResponse:
        request = _merged(call.body or b"{}", call.query)
        for topic, consumer in self._redelivery.chosen(request):
            require(call.request, (WRITE,), "consume", topic)
            require(call.request, (WRITE,), "group", consumer.group)
            if consumer.owner and not may_control(call.request, consumer.owner):
                raise AuthTokenScopeMismatch(
                    f"another owner's consumer also reads {topic}: set group to your own group"
                )
        call.event = CallEvent(request.topic or "")
        done = await self._redelivery.run(request)
        outcome = "SUCCESS" if done.status == "processed" else "FAILURE"
        call.event = CallEvent(", ".join(done.topics), done.description, outcome=outcome) if done.records else None
        return done

    redeliver_by_get = redeliver.at(
        "GET",
        "/consumers/deadLetter/reactive",
        "DLTopicReplayReactive",
        request={},
        example=None,
        errors=_REDELIVERY,
        effect=True,
    )


def _merged(body: bytes, query: Mapping[str, str]) -> RedeliveryRequest:
    """Merge query and body into one request."""
    try:
        by_query = msgspec.convert(query, RedeliveryRequest, strict=False)
        request = msgspec.json.decode(body, type=RedeliveryRequest)
        names = query.keys() & msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
        if twice := sorted(names.intersection(RedeliveryRequest.__struct_fields__)):
            raise InvalidRequest(f"{', '.join(twice)} is in both query and body: send it once")
        given = {name: value for name, value in msgspec.structs.asdict(by_query).items() if name in query}
        return msgspec.structs.replace(request, **given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"group, topic, timeout or lastretry is not valid: {cause}") from cause
