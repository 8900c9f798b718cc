"""What becomes of a dead letter: back to its origin, a tier or a topic, into quarantine, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from headrace.delivery.dead_letter import PREFIX, Origin, redriven_headers, restored
from headrace.delivery.protocols import DeadLetter, Reply
from headrace.delivery.retry_topics import delayed_headers
from headrace.errors import InvalidRequest
from headrace.lifecycle import Clock
from headrace.records import Header, Record

QUARANTINE = ".quarantine"
"""Ending of the name of the topic where letters go that nobody is to redrive by mistake."""


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where letters go."""

    kind: Literal["origin", "tier", "quarantine", "drop"] = "origin"
    topic: str = ""
    """The tier's topic; the others name it themselves."""
    delay_seconds: int = 0
    """Of the tier."""
    reason: str = ""
    """Why letters are dropped or in quarantine; is kept with the mark and the letter."""

    @property
    def goes_round(self) -> bool:
        """Whether a letter may come back from there."""
        return self.kind in ("origin", "tier")

    def check(self, source: str) -> None:
        """Return if letters of a topic may go there.

        Raises:
            InvalidRequest: They would go in circles.
        """
        if self.topic == source:
            raise InvalidRequest(f"{source} is the dead letter topic itself: nothing is redriven there", topic=source)
        if self.kind == "quarantine" and source.endswith(QUARANTINE):
            raise InvalidRequest(f"{source} is a quarantine topic already: redrive or drop its letters", topic=source)

    def topic_of(self, source: str, origin: Origin) -> str:
        """Return the topic a letter goes to; empty for none."""
        if self.kind == "origin":
            return origin.partition.topic
        return {"quarantine": source + QUARANTINE, "drop": ""}.get(self.kind, self.topic)

    def outgoing(self, letter: Record, own: Sequence[Header], origin: Origin, clock: Clock) -> Outgoing:
        """Return what is written for a letter: headers, and the partition it would have.

        Args:
            letter: The letter.
            own: Headers its record had when it failed.
            origin: What its headers say.
            clock: For when it is due in a tier.
        """
        if self.kind == "quarantine":
            place = f"{letter.topic}:{letter.partition}:{letter.offset}"
            marked = [(f"{PREFIX}quarantined_from", place.encode()), (f"{PREFIX}quarantined_why", self.reason.encode())]
            return [*letter.headers, *marked], letter.partition
        back = redriven_headers(own, origin)
        if self.kind == "tier":
            failed = DeadLetter(restored(letter), origin.group, origin.attempts, Reply(origin.error), 0.0, 0.0)
            back += delayed_headers(failed, clock.time() + self.delay_seconds)
        return back, origin.partition.partition


Outgoing = tuple[list[Header], int | None]
