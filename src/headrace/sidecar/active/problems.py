"""Why partitions of an instance are not read, for the answers of its reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from headrace.errors import HeadraceError, TopicNotFound, TopicRecreated
from headrace.kafka import Consumer

_NAMED: Final = 10
"""Problems that an error describes at most."""


class ReadProblems:
    """Problems that a read answers: each once when it happens, and what lasts again when nothing else waits."""

    def __init__(self) -> None:
        self._new: list[HeadraceError] = []

    def add(self, error: HeadraceError) -> None:
        """Take a problem that no read has answered."""
        self._new.append(error)

    def are_new(self, consumer: Consumer | None) -> bool:
        """Return whether a problem was not answered yet, and a seek has not solved it."""
        stalled = consumer.stalled.values() if self._new and consumer else ()
        self._new = [one for one in self._new if one in stalled or isinstance(one, TopicRecreated)]
        return bool(self._new)

    def take(self, consumer: Consumer, missing: Collection[str]) -> HeadraceError | None:
        """Return the new problems as one error, else those that last, else a missing topic."""
        found, self._new = self._new if self.are_new(consumer) else [*consumer.stalled.values()], []
        if found:
            text = "; ".join([one.description for one in found[:_NAMED]])
            return type(found[0])(text, **found[0].parameters, partitions=[one.parameters for one in found])
        for topic in missing:
            return TopicNotFound(f"topic {topic} does not exist: create it, or subscribe to others", topic=topic)
        return None
