"""The names of internal topics, which only Headrace or Kafka writes: the kind of a topic by its name alone."""

from __future__ import annotations

import re
from typing import Final, Literal

Kind = Literal["", "state", "retry", "dead_letter"]
"""`state`: audit, control, idempotency keys, locks, completed offsets, and topics of Kafka; empty: not internal."""

_STATE: Final = ("__", "_headrace-")
_RETRY: Final = re.compile(r".+\.retry\.\d+s")
_DEAD_LETTERS: Final = re.compile(r".+\.(dlq|quarantine)")


def kind_by_name(topic: str) -> Kind:
    """Return the kind of a topic by its name alone."""
    if topic.startswith(_STATE):
        return "state"
    if _RETRY.fullmatch(topic):
        return "retry"
    return "dead_letter" if _DEAD_LETTERS.fullmatch(topic) else ""


def external_topic(topic: str) -> str:
    """Return a topic that users may write to.

    Raises:
        ValueError: It is an internal topic; the message is for the file that names it.
    """
    if kind_by_name(topic):
        raise ValueError(f"is {topic}, an internal topic that only Headrace or Kafka may write: write another one")
    return topic
