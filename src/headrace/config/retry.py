"""What happens to records that could not be delivered: retries and dead letters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headrace.config.section import Count, NotDots, Seconds, Section


class RetryConfig(Section):
    """What happens to a record that failed."""

    attempts: Count = 5
    """Deliveries of one record in all; after the last it becomes a dead letter."""
    first_delay_seconds: Seconds = 0.2
    """Pause before the second attempt; doubles from there, with full jitter."""
    max_delay_seconds: Seconds = 30.0
    """Longest pause."""

    @model_validator(mode="after")
    def _growing(self) -> RetryConfig:
        if self.first_delay_seconds > self.max_delay_seconds:
            raise ValueError("first_delay_seconds is greater than max_delay_seconds: lower it or raise the other")
        return self


class DeadLetterConfig(Section):
    """Where records go that cannot be delivered."""

    enabled: bool = True
    """When false, a record that has used up its attempts stops its partition and says so."""
    topic: Annotated[str, Field(pattern=r"^([A-Za-z0-9._-]|\{topic\})+$", max_length=249), NotDots] = "{topic}.dlq"
    """Name of the dead letter topic; `{topic}` is the origin's name."""
