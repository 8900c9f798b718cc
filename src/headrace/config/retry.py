"""What happens to records that could not be delivered: retries, roll-backs and dead letters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headrace.config.section import Count, NotDots, Number, PositiveSeconds, Seconds, Section

Action = Literal["retry", "dead_letter", "skip", "unavailable"]
"""What a failure means: `retry` uses up an attempt; `dead_letter` ends the record at once; `skip` ends it as handled
elsewhere, counted; `unavailable` blames the destination, so the delivery waits and no attempt is used up."""

_UNAVAILABLE = frozenset((401, 403, 404, 408, 425, 429, 502, 503, 504))
_CLASSES: Mapping[int, Action] = {3: "unavailable", 4: "dead_letter", 5: "retry"}


def _texts(statuses: Any) -> Any:
    if not isinstance(statuses, dict):
        return statuses
    for status in statuses:
        if not re.fullmatch(r"[345](\d\d|xx)", str(status)):
            raise ValueError(f"names {status}, which is no failure: write statuses such as 409 or 5xx (300 to 599)")
    return {str(status): action for status, action in statuses.items()}


def _percent(value: int | None) -> int | None:
    if value is not None and not 0 <= value <= 100:
        raise ValueError(f"is {value}: write a percentage from 0 (any failure rolls back) to 100 (none does)")
    return value


ConsumerStatuses = Annotated[dict[str, Action], BeforeValidator(_texts)]
ErrorActions = dict[Annotated[str, Field(min_length=1)], Action]


def _growing_delays(delays: list[int]) -> list[int]:
    if any(later <= earlier for earlier, later in pairwise(delays)):
        raise ValueError("should grow: write each delay once, the shortest first, such as [10, 60, 600]")
    return delays


Delay = Annotated[int, Field(ge=1, le=86_400), Number]


class RetryConfig(Section):
    """What happens to a record that failed."""

    attempts: Count = 5
    """Deliveries of one record in all; after the last it becomes a dead letter."""
    first_delay_seconds: Seconds = 0.2
    """Pause before the second attempt; doubles from there, with full jitter."""
    max_delay_seconds: Seconds = 30.0
    """Longest pause."""
    deadline_seconds: PositiveSeconds | None = None
    """A record that fails this long after its first failure becomes a dead letter, whatever attempts are left."""
    statuses: ConsumerStatuses = Field(default_factory=dict)
    """What an HTTP status means, such as `409: skip` or `5xx: dead_letter`: `retry`, `dead_letter`, `skip` (handled
    already) or `unavailable` (the backend is to blame: wait, no attempt is used up). Without a line of their own 401,
    403, 404, 408, 425, 429, 502, 503, 504 and 3xx are `unavailable`; then a line such as `5xx` counts; without that,
    4xx is `dead_letter` and 5xx is `retry`."""
    errors: ErrorActions = Field(default_factory=dict)
    """The same by class of the error, such as `ValueError: dead_letter`; without a line here errors are retried."""
    rollback_threshold_percent: Annotated[int | None, AfterValidator(_percent), Number] = None
    """When more than this percentage of a delivery fails, all of it is delivered again, what succeeded included, until
    `attempts` are used up; 0 is any failure, 100 is never. Unset, only what failed is delivered again."""
    rollback_at_percent: Annotated[int | None, Field(ge=1, le=100), Number] = None
    """The same, when this percentage or more fails: the meaning of `batchRollbackThreshold` in light-4j."""
    rollback_min_records: Count = 4
    """Deliveries of fewer records are never rolled back."""
    last_retry: bool = False
    """A record that has used up its attempts ends as failed, counted and in the log, and is no dead letter again."""
    tiers: Annotated[list[Delay], AfterValidator(_growing_delays)] = []
    """Delays, in seconds, of further deliveries after `attempts` are used up, such as `[10, 60, 600]`: the record
    waits in the topic `<group>.retry.<delay>s` while others go on. After the last one it becomes a dead letter."""
    keep_key_order: bool = False
    """With one tier and order `key`: records wait behind an earlier record of their key that waits in the tier. There
    it has `attempts` again, a delay apart, and holds its key until it has ended."""

    @model_validator(mode="after")
    def _tiers_fit(self) -> RetryConfig:
        if self.keep_key_order and len(self.tiers) != 1:
            raise ValueError("keep_key_order takes exactly one delay: write one, such as tiers: [10]")
        if self.tiers and self.last_retry:
            raise ValueError("tiers and last_retry exclude each other: a last retry has no further ones; drop one")
        if self.deadline_seconds and sum(self.tiers) > self.deadline_seconds:
            raise ValueError(
                f"deadline_seconds is {self.deadline_seconds:g} and tiers take {sum(self.tiers)} s together, so the "
                "last one is never used: raise the deadline or drop the tier"
            )
        return self

    @model_validator(mode="after")
    def _one_threshold(self) -> RetryConfig:
        if self.rollback_threshold_percent is not None and self.rollback_at_percent is not None:
            raise ValueError(
                "rollback_threshold_percent (more than) and rollback_at_percent (at least) exclude each other: drop one"
            )
        return self

    @model_validator(mode="after")
    def _growing(self) -> RetryConfig:
        if self.first_delay_seconds > self.max_delay_seconds:
            raise ValueError("first_delay_seconds is greater than max_delay_seconds: lower it or raise the other")
        return self

    def tier_topics(self, group: str) -> list[str]:
        """Return the topics of a group's tiers, the shortest delay first."""
        return [f"{group}.retry.{delay}s" for delay in self.tiers]

    def action_of_status(self, status: int) -> Action:
        """Return what a status that is no success means; one that HTTP does not know is retried."""
        family = status // 100
        default = _CLASSES.get(family, "retry")
        default = "unavailable" if status in _UNAVAILABLE else self.statuses.get(f"{family}xx", default)
        return self.statuses.get(str(status), default)

    def action_of_error(self, error: str, default: Action = "retry") -> Action:
        """Return what a class of error means; a line without a dot fits any class of that name."""
        return self.errors.get(error) or self.errors.get(error.rsplit(".", 1)[-1], default)


class DeadLetterConfig(Section):
    """Where records go that cannot be delivered."""

    enabled: bool = True
    """When false, a record that has used up its attempts stops its partition and says so."""
    topic: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{topic\})+$", max_length=249), NotDots] = "{topic}.dlq"
    """Name of the dead letter topic; `{topic}` is the origin's name."""

    def topic_for(self, origin: str) -> str:
        """Return the dead letter topic of a topic."""
        return self.topic.replace("{topic}", origin)
