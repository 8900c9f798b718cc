"""`/consumers/deadLetter/reactive`: dead letters are delivered again to the backend of their consumer."""

from collections.abc import Mapping
from typing import Final

import msgspec

from headrace import errors
from headrace.errors import AuthTokenScopeMismatch, InvalidRequest
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import (
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
from headrace_dialects.light4j.redelivery import Redelivery, RedeliveryRequest, RedeliveryResponse

_REDELIVERY: Final[Errors] = (errors.InvalidTopicName, errors.LeaseTaken, errors.LeaseLost, errors.ReadFailed, *KAFKA)


class RedeliveryEndpoints:
    """Delivers dead letters again, as light-4j kafka-sidecar does."""

    def __init__(self, redelivery: Redelivery) -> None:
        self._redelivery = redelivery

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
