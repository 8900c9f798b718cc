"""The partitions that the application has assigned: which wait to start, and where they start.

Source: librdkafka, `rdkafka_assignment.c`.
"""

from collections.abc import Sequence
from typing import Any

from confluent_kafka import OFFSET_INVALID, OFFSET_STORED, KafkaError, KafkaException

from headrace_devkit.simulation.client_requests import BlockingRequests
from headrace_devkit.simulation.fetcher import FetchedPartition, Fetcher
from headrace_devkit.simulation.group_member import GroupMembership
from headrace_devkit.simulation.offsets import Partition

_STORED = (OFFSET_INVALID, OFFSET_STORED)
_RETRY_SECONDS = 0.1


class ClientAssignment:
    """The assignment of one client."""

    def __init__(self, fetcher: Fetcher, member: GroupMembership, requests: BlockingRequests) -> None:
        self.partitions: dict[Partition, int] = {}
        """With the offset that the application has given."""
        self._fetcher = fetcher
        self._member = member
        self._requests = requests
        self._pending: dict[Partition, int] = {}
        """Partitions that do not start before all commits are answered."""
        self._queried: dict[Partition, int] = {}
        """Partitions whose committed offset was requested, with the number of the request."""
        self._queries = 0

    def check(self, items: Sequence[Any]) -> None:
        """Refuse an offset that means nothing."""
        for item in items:
            if item.offset < 0 and item.offset not in (-1, -2, *_STORED):
                raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    def add(self, items: Sequence[Any]) -> None:
        for item in items:
            key = item.topic, item.partition
            self.partitions[key] = self._pending[key] = item.offset
            self._fetcher.release(self._fetcher.of(*key), by_application=False)

    def remove(self, partition: Partition) -> None:
        self.partitions.pop(partition, None)
        self._pending.pop(partition, None)
        self._queried.pop(partition, None)
        self._fetcher.stop(self._fetcher.of(*partition))

    def clear(self) -> None:
        for partition in list(self.partitions):
            self.remove(partition)

    def hold(self, *, held: bool) -> None:
        """Stop fetching while the application handles a rebalance, or continue."""
        change = self._fetcher.hold if held else self._fetcher.release
        for partition in self.partitions:
            change(self._fetcher.of(*partition), by_application=False)

    def serve(self) -> None:
        """Start what may start, and tell the member when nothing is in progress."""
        commits = self._member.commits
        for partition, offset in [] if commits.open else list(self._pending.items()):
            if offset not in _STORED:
                del self._pending[partition]
                self._fetcher.start(self._fetcher.of(*partition), offset)
            elif self._member.coordinator.broker is not None:
                del self._pending[partition]
                self._query(partition)
        if not (self._pending or self._queried or commits.open):
            self._member.assignment_done()
            if self._member.rebalance.join_state == "init" and self._member.subscription:
                self._member.cluster.after(0, self._member.serve)

    def _query(self, partition: Partition) -> None:
        self._queries += 1
        number = self._queried[partition] = self._queries

        def again() -> None:
            if self._queried.get(partition) == number:
                self._query(partition)

        def answered(response: Any) -> None:
            if self._queried.get(partition) != number:
                return
            if isinstance(response, KafkaError):
                self._member.cluster.after(_RETRY_SECONDS, again)
                return
            del self._queried[partition]
            at = response[partition]
            self._start(self._fetcher.of(*partition), at.offset if at else self._fetcher.reset_to)
            self.serve()

        self._requests.fetch_committed([partition], answered)

    def _start(self, state: FetchedPartition, offset: int) -> None:
        if offset == OFFSET_INVALID:
            self._fetcher.fail(state, "no previously committed offset available", offset)
        else:
            self._fetcher.start(state, offset)
