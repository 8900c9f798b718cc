"""Operations on dead letters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace import errors
from headrace.control.dead_letters import LetterCounts
from headrace.control.letter_pages import LetterPage, LetterStatistics
from headrace.control.redelivery import RedeliveryAnswer, RedeliveryRequest
from headrace.web.operation import BODY, JSON, KAFKA, Errors, Operation
from headrace.web.routes.dead_letters import (
    LIST,
    PAGE,
    REDELIVERY,
    STATISTICS,
    LetterQuery,
    StatisticsQuery,
)

_READING: Final[Errors] = (errors.InvalidRequest, *KAFKA)
_REDELIVERY: Final[Errors] = (
    errors.InvalidTopicName,
    errors.LeaseTaken,
    errors.LeaseLost,
    errors.ReadFailed,
    *KAFKA,
)
_AGAIN: Final = "Deliver a batch of dead letters to the backend of their consumer again"

DEAD_LETTERS: Final[Mapping[tuple[str, str], Operation]] = {
    ("GET", LIST): Operation(
        "getDeadLetterTopics", "How many dead letters there are", {200: LetterCounts}, errors=KAFKA
    ),
    ("GET", PAGE): Operation(
        "getDeadLetters", "Dead letters in pages", {200: LetterPage}, query=LetterQuery, errors=_READING
    ),
    ("GET", STATISTICS): Operation(
        "getDeadLetterStatistics",
        "Dead letters by error, origin, status and time",
        {200: LetterStatistics},
        query=StatisticsQuery,
        errors=_READING,
    ),
    ("GET", REDELIVERY): Operation(
        "DLTopicReplayReactive",
        _AGAIN,
        {200: RedeliveryAnswer},
        query=RedeliveryRequest,
        errors=(errors.InvalidRequest, *_REDELIVERY),
        effect=True,
    ),
    ("POST", REDELIVERY): Operation(
        "DLTopicReplayReactivePost",
        _AGAIN,
        {200: RedeliveryAnswer},
        request={JSON: RedeliveryRequest},
        query=RedeliveryRequest,
        example={"topic": "orders", "lastretry": False},
        errors=(*BODY, *_REDELIVERY),
    ),
}
"""Every endpoint by method and path."""
