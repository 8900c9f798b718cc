"""The partitions that one consumer reads: where each begins, and what ends or moves it, in which epoch.

Everything here runs on the consumer's thread. A partition is forgotten before it starts again.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import InvalidOffset
from headrace.kafka.client import library
from headrace.kafka.commits import Commits
from headrace.kafka.fetch_flow import FetchFlowControl
from headrace.kafka.fetch_queue import FetchQueue
from headrace.kafka.loop_proxy import ConsumerProblems, LoopProxy
from headrace.kafka.names import names_of
from headrace.kafka.positions import Assignment, OffsetGap, PositionResolver, StartPosition
from headrace.kafka.positions import client_partitions as _plain
from headrace.records import Committed, Epochs, Offsets, TopicPartition
from headrace.runtime import Deadline
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)


class AssignedPartitions:
    """The assignments of a consumer. `assign`, `seek`, `move`, `rewind`, `restart_topic` are commands of the loop."""

    def __init__(
        self,
        name: str,
        queue: FetchQueue,
        commits: Commits,
        *,
        loop: LoopProxy,
        flow: FetchFlowControl,
        resolver: PositionResolver,
        problems: ConsumerProblems,
    ) -> None:
        """Begin without partitions; `queue` is that of the thread's client."""
        # Settings
        self.name = name
        self.loop = loop
        self.flow = flow
        self.resolver = resolver
        self.problems = problems
        # The group
        self.by_hand: list[TopicPartition] = []
        """Partitions that are assigned without a subscription."""
        self.leave_by: Deadline | None = None
        """When the group must be left; set by the loop."""
        # These assignments
        self.commits = commits
        self.epochs = commits.epochs
        self._seeks: dict[TopicPartition, Callable[[bool], None]] = {}
        """Those whose new offset is not committed yet, with who waits for that."""
        # This client
        self.queue = queue
        self.assignment = Assignment(queue, whole=resolver.policy.member.is_eager)

    @property
    def client(self) -> Any:
        return self.queue.client

    def use(self, client: Any) -> None:
        """Read with another client, which has no partitions yet."""
        self.queue = self.queue.with_client(client)
        self.assignment = Assignment(self.queue, whole=self.resolver.policy.member.is_eager)

    def add(self, assigned: list[Any]) -> None:
        """Read partitions that are assigned now, where the group continues."""
        if self.leave_by:  # the client is closing, and revokes them at once
            self.assignment.add(assigned)
            return
        reach("assign.before")
        client = self.client
        partitions = [TopicPartition(p.topic, p.partition) for p in assigned]
        self.forget(partitions)
        starts = self.resolver.starts(client, partitions)
        for item, partition in zip(assigned, partitions, strict=True):
            item.offset = starts[partition].offset if partition in starts else library.OFFSET_END
        self.assignment.add(assigned)
        # The client may remember a pause from an earlier assignment, and flow control starts with nothing paused.
        client.resume(assigned)
        if unknown := [partition for partition in partitions if partition not in starts]:
            client.pause(_plain(unknown))
        for about in {"", *(f"topic {partition.topic}" for partition in partitions)}:
            self.problems.report(about, "")
        self._pass_assigned(starts)
        log.info("%s: assigned %s", self.name, names_of(partitions))
        reach("assign.after")

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions, at the group's committed offsets, without membership in the group.

        A consumer that is leaving begins no further partition.
        """
        if self.leave_by:
            return
        current = set(self.by_hand)
        required = set(partitions)
        removed = [partition for partition in self.by_hand if partition not in required]
        added = [partition for partition in partitions if partition not in current]
        self.by_hand, self.commits.is_by_hand = list(partitions), True
        if removed:
            self.forget(removed)
            self.loop.post(self.loop.listener.on_lost, removed)
            self.assignment.remove(_plain(removed))
        if added:
            self.add(_plain(added))

    def seek(self, partition: TopicPartition, epoch: int, to: Committed, response: Callable[[bool], None]) -> None:
        """Stop a partition and commit another offset; it starts there when the commit is acknowledged."""
        if self.epochs.get(partition) != epoch:
            response(False)
            return
        self.forget([partition])
        start = StartPosition(to.offset, to, epoch=self.resolver.new_epoch())
        self._seeks[partition] = response
        self.epochs[partition] = start.epoch
        self.resolver.wait_for_commit(partition, start)
        self.client.pause(_plain([partition]))
        self.commits.request({partition: to}, {partition: start.epoch})

    def move(self, offsets: Offsets, response: Callable[[Sequence[TopicPartition]], None]) -> None:
        """Continue at other offsets, without a commit. If partitions are not assigned, move none and respond with them.

        A revoke cannot happen between the check and the changes, because it is a call of this thread.
        """
        gone = [p for p in offsets if p not in self.epochs and not self.resolver.is_open(p)]
        if not gone:
            for partition, offset in offsets.items():
                start = StartPosition(offset, epoch=self.resolver.new_epoch())
                self.commits.renew(partition, start.epoch)  # what was requested before is still committed
                self.resolver.forget([partition])
                self._pass_assigned({partition: start})
                self.fetch_from(partition, offset)
        response(gone)

    def rewind(self, epochs: Epochs) -> None:
        """Restart these assignments at what the group has committed; those that are over are left out."""
        partitions = [partition for partition, epoch in epochs.items() if self.epochs.get(partition) == epoch]
        self.forget(partitions)
        self.client.pause(_plain(partitions))
        for partition, start in self.resolver.starts(self.client, partitions).items():
            self._start_at(partition, start)

    def restart_topic(self, topic: str, after: float) -> None:
        """Read a recreated topic from its start, even if its offsets have already passed the current positions."""
        for partition in [p for p, epoch in self.epochs.items() if p.topic == topic and epoch < after * 1000]:
            log.warning("%s, %s: resuming at the start of the new topic", self.problems.group, partition)
            self._restart_at(partition, library.OFFSET_BEGINNING, 0)

    def resolve(self) -> None:
        """Resume partitions whose position was not known before."""
        for partition, found in self.resolver.resolve(self.client, self.commits.is_open):
            if isinstance(found, OffsetGap):
                self._on_gap(partition, found)
            elif isinstance(found, StartPosition):
                self._start_at(partition, found)
            else:
                self.fetch_from(partition, found)

    def fetch_from(self, partition: TopicPartition, offset: int) -> None:
        """Fetch a partition from another offset, unless it is paused or its position is not resolved."""
        for each in self.assignment.reassign_at(partition, offset):
            waits = self.flow.is_paused(each) or self.resolver.is_open(each)
            (self.client.pause if waits else self.client.resume)(_plain([each]))

    def fetch_again(self, partition: TopicPartition, offset: int) -> None:
        """Fetch a partition from an offset whose record was received and dropped."""
        self.resolver.read_to({partition: offset})
        if self.resolver.is_open(partition):
            self.resolver.out_of_range(partition, offset)
        else:
            self.fetch_from(partition, offset)

    def forget(self, partitions: Sequence[TopicPartition]) -> None:
        """End the assignments of partitions."""
        self.flow.revoked(partitions)
        self.commits.forget(partitions)
        self.resolver.forget(partitions)
        for partition in partitions:
            self.epochs.pop(partition, None)
            self.problems.refused.pop(partition, None)
            if sought := self._seeks.pop(partition, None):
                sought(False)

    def _pass_assigned(self, starts: Mapping[TopicPartition, StartPosition]) -> None:
        """Report an assignment to the listener, before its records."""
        epochs = {partition: start.epoch for partition, start in starts.items()}
        self.epochs.update(epochs)
        self.flow.assigned(epochs)
        committed = {partition: start.committed for partition, start in starts.items() if start.committed}
        self.commits.request({p: committed[p] for p, start in starts.items() if start.is_new}, epochs)
        self.resolver.read_to({partition: start.offset for partition, start in starts.items()})
        loop = self.loop

        def assigned() -> None:  # one call: a commit of the old epoch must not count for the new one
            loop.epochs.update(epochs)
            loop.listener.on_assigned(epochs, committed)

        loop.post(assigned)

    def _start_at(self, partition: TopicPartition, start: StartPosition) -> None:
        sought = self._seeks.pop(partition, None)
        if sought:
            reach("seek.committed")
        self.fetch_from(partition, start.offset)
        self._pass_assigned({partition: start})
        if sought:
            reach("seek.after")
            sought(True)

    def _on_gap(self, partition: TopicPartition, gap: OffsetGap) -> None:
        """Stall or resume at the start of the log, as the policy says about missing offsets."""
        if self.resolver.policy.on_gap == "stop":
            text = f"{partition}: {gap}; it is stalled: {self.resolver.policy.advice}"
            self.problems.stall(str(partition), InvalidOffset(text, **partition._asdict()))
            return
        fields = record_fields(group := self.problems.group, partition, gap.start, consumer=self.name)
        log.warning("%s, %s: %s; resuming at %d, as on_gap says", group, partition, gap, gap.start, extra=fields)
        self.loop.post(self.loop.listener.on_gap, partition, gap.end - gap.first)
        if gap.is_cut_off:  # offsets from here on were used before, so it is another assignment
            self._restart_at(partition, gap.start, gap.start)
        else:
            self.fetch_from(partition, gap.start)

    def _restart_at(self, partition: TopicPartition, start: int, committed: int) -> None:
        """Begin another assignment of an assigned partition, without a rebalance."""
        self.forget([partition])
        self.loop.post(self.loop.listener.on_lost, [partition])
        epoch = self.resolver.new_epoch()
        self._pass_assigned({partition: StartPosition(start, Committed(committed), is_new=True, epoch=epoch)})
        self.fetch_from(partition, start)  # last: before, flow control may know a pause of the old assignment
