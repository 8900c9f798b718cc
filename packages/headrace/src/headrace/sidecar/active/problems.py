"""Why partitions of an instance are not read, for errors to its client; and the time limit of Kafka's responses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Final

from headrace.errors import HeadraceError, KafkaTimeout, ReadFailed, TopicNotFound, TopicRecreated
from headrace.kafka import Consumer, Subscription
from headrace.kafka.names import names_of
from headrace.records import TopicPartition

COMMAND_SECONDS: Final = 10.0
"""Longest wait for a response of Kafka."""
_NAMED: Final = 10
"""Most problems that one error describes."""


@contextlib.asynccontextmanager
async def in_time(advice: str) -> AsyncIterator[None]:
    """Raise KafkaTimeout, with advice, if Kafka takes too long."""
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            yield
    except TimeoutError as cause:
        raise KafkaTimeout(f"Kafka did not respond within {COMMAND_SECONDS:g} s; {advice}") from cause


class ReadProblems:
    """Problems that reads report: each once when it happens, and if it lasts, again when there are no records."""

    def __init__(self) -> None:
        self._new: list[HeadraceError] = []

    def add(self, error: HeadraceError) -> None:
        """Take a problem that no read has reported."""
        self._new.append(error)

    def are_new(self, consumer: Consumer | None) -> bool:
        """Return whether there is an unreported problem that no seek has solved."""
        stalled = {*consumer.stalled.values()} if self._new and consumer else ()
        self._new = [one for one in self._new if one in stalled or isinstance(one, TopicRecreated)]
        return bool(self._new)

    def take(
        self, consumer: Consumer, watch: Subscription | None, assigned: Iterable[TopicPartition]
    ) -> HeadraceError | None:
        """Return new problems as one error, else those that last, else a missing topic, else a partition's problem.

        Raises:
            KafkaUnauthorized: Kafka refuses the group, or one of its topics.
        """
        found = self._new if self.are_new(consumer) else [*consumer.stalled.values()]
        self._new = []
        if found:
            text = "; ".join([one.description for one in found[:_NAMED]])
            return type(found[0])(text, **found[0].parameters, partitions=[one.parameters for one in found])
        if watch and (missing := watch.missing):
            text = f"topic {missing[0]} does not exist" if len(missing) == 1 else f"no such topics: {names_of(missing)}"
            return TopicNotFound(f"{text}; create the missing topics, or subscribe to others", topic=missing[0])
        consumer.require_rights(watch.subscribed if watch else ())
        for partition in assigned:
            if problem := consumer.trouble(partition):  # also a position that is not in the log
                return ReadFailed(problem, topic=partition.topic, partition=partition.partition)
        return None
