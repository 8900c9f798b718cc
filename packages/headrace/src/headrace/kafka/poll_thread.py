"""The thread of one consumer, which owns the client: polls, pauses, resumes, assigns, seeks and commits.

It never waits for a backend or a handler. When too many records are in flight, it pauses partitions and continues to
poll, so that the group membership never depends on a destination. On revoke it waits for the loop, with a limit.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import confluent_kafka

from headrace.errors import HeadraceError, InvalidOffset
from headrace.kafka.client.access import is_refused, refusal_in
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.error_map import ClientErrors
from headrace.kafka.commits import Commits, commit_now
from headrace.kafka.fetch_flow import FetchFlowControl
from headrace.kafka.loop_proxy import CommandQueue, ConsumerProblems, LoopProxy
from headrace.kafka.names import names_of
from headrace.kafka.positions import Assignment, OffsetGap, PositionResolver, StartPosition, committed_offsets
from headrace.kafka.positions import client_partitions as _plain
from headrace.kafka.reader import to_batches
from headrace.kafka.transactions.transaction_job import metadata_in
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, TopicPartition
from headrace.runtime import Clock, Deadline
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

_BATCH_RECORDS = 2000
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.01
ATTENTIVE_SECONDS = 0.2
"""A command with a response is often followed by another one. For this long, polls are short, so that it waits less."""
_PATIENCE_SECONDS = 0.1
_DRAIN_SECONDS = 20.0
_REFUSED_SECONDS = 2.0

_END = confluent_kafka.KafkaError._PARTITION_EOF
_NO_TOPIC = confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART
_OUT_OF_RANGE = confluent_kafka.KafkaError._AUTO_OFFSET_RESET
_BROKEN = (
    confluent_kafka.KafkaError._BAD_MSG,
    confluent_kafka.KafkaError._BAD_COMPRESSION,
    confluent_kafka.KafkaError._NOT_IMPLEMENTED,
    confluent_kafka.KafkaError.INVALID_MSG,
)
"""A batch whose checksum, compression or format is wrong. The client would skip it, not always correctly."""
_OF_A_POSITION = (_END, _OUT_OF_RANGE, *_BROKEN)
_FENCED = (confluent_kafka.KafkaError._FATAL, confluent_kafka.KafkaError._FENCED)


class PollThread:
    """What runs on the consumer's thread. `seek`, `subscribe` and `restart_topic` are commands of the loop."""

    def __init__(
        self,
        name: str,
        security: ClientSecurity[Any],
        *,
        loop: LoopProxy,
        commands: CommandQueue,
        flow: FetchFlowControl,
        resolver: PositionResolver,
        problems: ConsumerProblems,
        clock: Clock,
    ) -> None:
        """Prepare; `security` makes the clients, which this thread closes, and `commands` run before each poll."""
        self.epochs: dict[TopicPartition, int] = {}
        """The epochs of the current assignment."""
        self.commits = Commits(name, clock, self.epochs, resolver.acknowledged, problems)
        self.leave_by: Deadline | None = None
        """When the group must be left; set by the loop."""
        self.turned_at = clock.monotonic()
        """When its current turn began, by the monotonic clock."""
        self.attentive_until = 0.0
        """Until when polls are short, by the monotonic clock."""
        self._name = name
        self._security = security
        self.loop = loop
        self._commands = commands
        self._flow = flow
        self.resolver = resolver
        self._problems = problems
        self._clock = clock
        self.member: tuple[bytes, Epochs] = b"", {}
        """For transactions: the client's metadata of the last turn, and the epochs then; for any thread."""
        self._use(security.make())
        self._seeks: dict[TopicPartition, Callable[[bool], None]] = {}
        self._by_hand: list[TopicPartition] = []
        """Partitions that are assigned without a subscription."""

    def run(self, stop_requested: threading.Event) -> None:
        """Poll until the stop is requested, then leave the group."""
        try:
            while not stop_requested.is_set():
                self.turned_at = self._clock.monotonic()
                self.turn()
                self._renew()
            # Before the client closes: a closing client misses new generations, and Kafka then refuses its commits.
            self._drain_and_commit(list(self.epochs))
        finally:
            self._leave()

    def _leave(self) -> None:
        member = self.resolver.policy.member.properties
        with contextlib.suppress(confluent_kafka.KafkaException), ClientErrors():
            # A client that closes without partitions does not tell Kafka, which then waits for the session to end.
            stays = "group.instance.id" in member or member.get("group.protocol") == "consumer"
            if not stays and not self._client.assignment():
                self._client.unsubscribe()
        self._client.close()  # runs _on_revoke for the assigned partitions

    def _use(self, client: Any) -> None:
        self._client = client
        self._assignment = Assignment(client, whole=self.resolver.policy.member.is_eager)

    def _renew(self) -> None:
        """Replace a client that cannot continue, or whose certificates or user have changed: leave, and join again."""
        if not self.resolver.policy.replaces_client:
            self._security.must_replace(self._client)  # gives the client a new password
            return
        if self._by_hand and self.commits.in_flight:
            return  # later: the new client would not report that commit
        refused = self._security.is_expired
        client = self._security.replacement(self._client)
        if client is None:
            return
        why = "Kafka refuses its group" if refused else "files of kafka.security have changed"
        log.info("%s: its client is being replaced, because %s", self._name, why)
        at = self._assignment.positions() if self._by_hand else []
        if not at:
            self._drain_and_commit(list(self.epochs))
        self._leave()
        self.commits.restart()
        self._use(client)
        if refused:
            self._commands.wait(_REFUSED_SECONDS)  # the new client may be refused as well
        if at:  # without membership the assignment continues
            self._assignment.add(at)
            paused = [p for p in self._by_hand if self._flow.is_paused(p) or self.resolver.is_open(p)]
            client.pause(_plain(paused))
        elif self.resolver.subscribed:
            client.subscribe(self.resolver.subscribed, **self._callbacks())

    def turn(self) -> None:
        """Run the commands of the loop, and poll once."""
        client = self._client
        self._commands.run()
        self.commits.send_due(client)
        self._resolve_positions()
        self._read_member()
        if self._problems.refused:
            self._fetch_refused()
        self._pause_and_resume()
        if self._flow.must_wait:
            # A moment without a poll does no harm, and is cheaper than a pause.
            self._commands.wait(_PATIENCE_SECONDS)
            return
        seconds = _BUSY_SECONDS if self._clock.monotonic() < self.attentive_until else _IDLE_SECONDS
        if self._flow.all_paused:
            # No record can arrive, and a wait for commands ends as soon as enough is released.
            self._commands.wait(seconds)
            seconds = 0
        # consume() alone waits until the batch is full; poll() returns with the first record.
        first = client.poll(seconds)
        if first is not None:
            reach("poll.after")
            more = client.consume(min(_BATCH_RECORDS - 1, self._flow.poll_limit_records), 0)
            self._dispatch([first, *more])

    def subscribe(self, topics: list[str]) -> None:
        """Read these topics; the partitions of topics that stay are not revoked."""
        if topics == self.resolver.subscribed:
            return
        self.resolver.subscribed = topics
        if topics:
            self._client.subscribe(topics, **self._callbacks())
        else:
            self._client.unsubscribe()
            self._problems.report("", f"group {self._problems.group}: no topic matches its patterns yet")

    def _callbacks(self) -> dict[str, Any]:
        return {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}

    def seek(self, partition: TopicPartition, epoch: int, to: Committed, response: Callable[[bool], None]) -> None:
        """Stop a partition and commit another offset; it starts there when the commit is acknowledged."""
        if self.epochs.get(partition) != epoch:
            response(False)
            return
        self._forget([partition])
        start = StartPosition(to.offset, to, epoch=self.resolver.new_epoch())
        self._seeks[partition] = response
        self.epochs[partition] = start.epoch
        self.resolver.wait_for_commit(partition, start)
        self._client.pause(_plain([partition]))
        self.commits.request({partition: to}, {partition: start.epoch})

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions, at the group's committed offsets, without membership in the group."""
        current = set(self._by_hand)
        required = set(partitions)
        removed = [partition for partition in self._by_hand if partition not in required]
        added = [partition for partition in partitions if partition not in current]
        self._by_hand, self.commits.is_by_hand = list(partitions), True
        if removed:
            self._forget(removed)
            self.loop.post(self.loop.listener.on_lost, removed)
            self._assignment.remove(_plain(removed))
        if added:
            self._on_assign(self._client, _plain(added))

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
                self._fetch_from(partition, offset)
        response(gone)

    def committed(
        self, partitions: Sequence[TopicPartition], response: Callable[[CommitOffsets | HeadraceError], None]
    ) -> None:
        """Respond with the committed offsets of the group, or with the error of Kafka."""
        try:
            found = committed_offsets(self._client, partitions)
        except confluent_kafka.KafkaException as cause:
            topics = {partition.topic for partition in partitions}
            response(self._problems.refusal(topics) or self._problems.error(cause.args[0], topics))
            return
        response({partition: at for partition, at in found.items() if isinstance(at, Committed)})

    def group_metadata(self, epochs: Epochs, response: Callable[[Any], None]) -> None:
        """Respond with the metadata of this member, when earlier commits of these partitions are completed.

        The response is None if a partition is no longer assigned in its epoch, or Kafka does not know the member.
        """

        def settled(_revoked: Sequence[TopicPartition] | HeadraceError) -> None:
            response(metadata_in((self._client.consumer_group_metadata(), self.epochs), epochs))

        self.commits.when_settled(epochs, settled)

    def _read_member(self) -> None:
        # Only on this thread: the client's call may block for ever while another thread polls.
        if self.resolver.policy.transactional:
            self.member = self._client.consumer_group_metadata(), self.epochs.copy()

    def rewind(self, epochs: Epochs) -> None:
        """Restart these assignments at what the group has committed; those that are over are left out."""
        partitions = [partition for partition, epoch in epochs.items() if self.epochs.get(partition) == epoch]
        self._forget(partitions)
        self._client.pause(_plain(partitions))
        for partition, start in self.resolver.starts(self._client, partitions).items():
            self._start_at(partition, start)

    def restart_topic(self, topic: str, after: float) -> None:
        """Read a recreated topic from its start, even if its offsets have already passed the current positions."""
        for partition in [p for p, epoch in self.epochs.items() if p.topic == topic and epoch < after * 1000]:
            log.warning("%s, %s: resuming at the start of the new topic", self._problems.group, partition)
            self._restart_at(partition, confluent_kafka.OFFSET_BEGINNING, 0)

    def _dispatch(self, items: list[Any]) -> None:
        """Pass records to the listener, and handle the client's events between them."""
        errors = [item.error() for item in items]
        first = 0
        for index in range(len(items)) if any(errors) else ():
            if errors[index] is not None:
                self._pass_records(items[first:index])
                self._on_event(items[index])
                first = index + 1
        self._pass_records(items[first:] if first else items)

    def _pass_records(self, messages: list[Any]) -> None:
        if not messages:
            return
        self._problems.report("", "")
        batches = to_batches(messages)
        self._allowed([batch.topic_partition for batch in batches])
        for batch in batches:
            partition = batch.topic_partition
            epoch = self.epochs.get(partition)
            if epoch is None or self.resolver.is_open(partition):
                continue  # revoked during this poll, or after offsets that cannot be read
            self._flow.fetched(partition, len(batch), batch.size_bytes, self._clock.monotonic())
            self.resolver.read_to({partition: batch.offsets[-1] + 1})
            reach("hand-over.before")
            self.loop.post(self.loop.listener.on_records, partition, epoch, batch)
            reach("hand-over.after")

    def _on_event(self, item: Any) -> None:
        error = item.error()
        code = error.code()
        group = self._problems.group
        partition = TopicPartition(item.topic() or "", item.partition() if item.partition() is not None else -1)
        if code in _OF_A_POSITION and self.resolver.is_open(partition):
            return  # the client reads on after offsets that cannot be read, and must not
        if code == _END:
            self._allowed([partition])
            if epoch := self.epochs.get(partition):
                self.loop.post(self.loop.listener.on_end, partition, epoch, item.offset())
        elif code == _OUT_OF_RANGE:
            log.warning("group %s, %s: %s", group, partition, error.str())
            self.resolver.out_of_range(partition, item.offset())
        elif code in _BROKEN and partition in self.epochs:
            self.resolver.out_of_range(partition, item.offset())  # so it is fetched again, from here
            self._client.pause(_plain([partition]))
            problem = f"{partition}: {error.str()}; reading stopped there until this batch can be read"
            self._problems.report(str(partition), problem)
        elif code in _FENCED:
            refusal = refusal_in(error)
            found = self._problems.error(refusal or error, self.resolver.subscribed)
            self._problems.report("", found if refusal else "")
            if refusal is None or not self.resolver.policy.replaces_client:
                raise found
            self._security.is_expired = True
        elif is_refused(error) and partition.topic:
            assigned = partition in self.epochs
            if assigned:
                self._problems.refused.setdefault(partition, self._clock.monotonic() + _REFUSED_SECONDS)
            about = str(partition) if assigned else f"topic {partition.topic}"
            self._problems.report(about, self._problems.error(error, [partition.topic]))
        else:
            # A topic may be created at this moment; the subscription logs those that stay missing.
            level = logging.DEBUG if code == _NO_TOPIC and partition.topic else logging.WARNING
            explained = self._problems.explain(error, self.resolver.subscribed, f"group {group}: ")
            self._problems.report("", explained, level)

    def _fetch_refused(self) -> None:
        """Retry what Kafka refused: the client does not report that it may read again, unless records arrive."""
        now = self._clock.monotonic()
        for partition, due in self._problems.refused.items():
            if due <= now and not self.resolver.is_open(partition):
                self._problems.refused[partition] = now + _REFUSED_SECONDS
                self._fetch_from(partition, self.resolver.position_of(partition))

    def _allowed(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions if self._problems.refused else ():
            if self._problems.refused.pop(partition, None):
                self._problems.report(str(partition), "")

    def _pause_and_resume(self) -> None:
        pause, resume = self._flow.changes(self._clock.monotonic())
        if pause:
            self._client.pause(_plain(pause))
        if resume:
            self._client.resume(_plain(resume))

    def _on_assign(self, client: Any, assigned: list[Any]) -> None:
        reach("assign.before")
        if self.leave_by:  # the client is closing, and revokes them at once
            self._assignment.add(assigned)
            return
        partitions = [TopicPartition(p.topic, p.partition) for p in assigned]
        self._forget(partitions)
        starts = self.resolver.starts(client, partitions)
        for item, partition in zip(assigned, partitions, strict=True):
            item.offset = starts[partition].offset if partition in starts else confluent_kafka.OFFSET_END
        self._assignment.add(assigned)
        # The client may remember a pause from an earlier assignment, and flow control starts with nothing paused.
        client.resume(assigned)
        if unknown := [partition for partition in partitions if partition not in starts]:
            client.pause(_plain(unknown))
        for about in {"", *(f"topic {partition.topic}" for partition in partitions)}:
            self._problems.report(about, "")
        self._pass_assigned(starts)
        log.info("%s: assigned %s", self._name, names_of(partitions))
        reach("assign.after")

    def _pass_assigned(self, starts: Mapping[TopicPartition, StartPosition]) -> None:
        """Report an assignment to the listener, before its records."""
        epochs = {partition: start.epoch for partition, start in starts.items()}
        self.epochs.update(epochs)
        self._flow.assigned(epochs)
        committed = {partition: start.committed for partition, start in starts.items() if start.committed}
        self.commits.request({p: committed[p] for p, start in starts.items() if start.is_new}, epochs)
        self.resolver.read_to({partition: start.offset for partition, start in starts.items()})
        loop = self.loop

        def assigned() -> None:  # one call: a commit of the old epoch must not count for the new one
            loop.epochs.update(epochs)
            loop.listener.on_assigned(epochs, committed)

        loop.post(assigned)

    def _resolve_positions(self) -> None:
        """Resume partitions whose position was not known before."""
        for partition, found in self.resolver.resolve(self._client):
            if isinstance(found, OffsetGap):
                self._on_gap(partition, found)
            elif isinstance(found, StartPosition):
                self._start_at(partition, found)
            else:
                self._fetch_from(partition, found)

    def _start_at(self, partition: TopicPartition, start: StartPosition) -> None:
        sought = self._seeks.pop(partition, None)
        if sought:
            reach("seek.committed")
        self._fetch_from(partition, start.offset)
        self._pass_assigned({partition: start})
        if sought:
            reach("seek.after")
            sought(True)

    def _on_gap(self, partition: TopicPartition, gap: OffsetGap) -> None:
        """Stall or resume at the start of the log, as the policy says about missing offsets."""
        if self.resolver.policy.on_gap == "stop":
            text = f"{partition}: {gap}; it is stalled: {self.resolver.policy.advice}"
            self._problems.stall(str(partition), InvalidOffset(text, **partition._asdict()))
            return
        fields = record_fields(group := self._problems.group, partition, gap.start, consumer=self._name)
        log.warning("%s, %s: %s; resuming at %d, as on_gap says", group, partition, gap, gap.start, extra=fields)
        self.loop.post(self.loop.listener.on_gap, partition, gap.end - gap.first)
        if gap.is_cut_off:  # offsets from here on were used before, so it is another assignment
            self._restart_at(partition, gap.start, gap.start)
        else:
            self._fetch_from(partition, gap.start)

    def _restart_at(self, partition: TopicPartition, start: int, committed: int) -> None:
        """Begin another assignment of an assigned partition, without a rebalance."""
        self._forget([partition])
        self.loop.post(self.loop.listener.on_lost, [partition])
        epoch = self.resolver.new_epoch()
        self._pass_assigned({partition: StartPosition(start, Committed(committed), is_new=True, epoch=epoch)})
        self._fetch_from(partition, start)  # last: before, flow control may know a pause of the old assignment

    def _fetch_from(self, partition: TopicPartition, offset: int) -> None:
        for each in self._assignment.reassign_at(partition, offset):
            waits = self._flow.is_paused(each) or self.resolver.is_open(each)
            (self._client.pause if waits else self._client.resume)(_plain([each]))

    def _on_revoke(self, client: Any, revoked: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in revoked]
        reach("revoke.before")
        self._drain_and_commit(partitions)
        self._assignment.remove(revoked)
        if not self.epochs:
            self._problems.without_partitions()
        log.info("%s: revoked %s", self._name, names_of(partitions))

    def _on_lost(self, client: Any, lost: list[Any]) -> None:
        reach("lost.before")
        partitions = [TopicPartition(p.topic, p.partition) for p in lost]
        self._forget(partitions)
        self.loop.post(self.loop.listener.on_lost, partitions)
        self._assignment.remove(lost)
        self._problems.report("", f"group {self._problems.group}: partitions were lost; joining again")
        log.warning("%s: lost %s", self._name, names_of(partitions))
        reach("lost.after")

    def _drain_and_commit(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait until the loop has drained partitions, and commit what is completed in them."""
        assigned = [partition for partition in partitions if partition in self.epochs]
        offsets = self._drain(assigned) if assigned else {}
        reach("revoke.drained")
        self._forget(partitions)
        if offsets and (failure := commit_now(self._client, offsets)):
            why = self._problems.explain(failure, {p.topic for p in offsets})
            log.warning("%s: commit on revoke failed; completed records will be delivered again: %s", self._name, why)
        reach("revoke.committed")

    def _drain(self, partitions: Sequence[TopicPartition]) -> CommitOffsets:
        """Wait until the loop has drained partitions; return what may be committed."""
        leave_by = self.leave_by
        seconds = min(_DRAIN_SECONDS, leave_by.remaining_seconds) if leave_by else self.resolver.policy.drain_seconds
        deadline = Deadline(self._clock, seconds)  # from now on: the loop may be late
        listener = self.loop.listener
        self._read_member()  # a generation may have begun, and no other member has these partitions yet

        async def drain() -> CommitOffsets:
            return await listener.on_revoked(partitions, deadline)

        response = self.loop.wait_for(drain, "revoke", seconds + 1)
        if response is None and not self.loop.is_dead:
            text = "%s: group %s: draining %s took over %.0f s: records in flight will be delivered again"
            log.warning(text, self._name, self._problems.group, names_of(partitions), seconds)
        return response or {}

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        self._flow.revoked(partitions)
        self.commits.forget(partitions)
        self.resolver.forget(partitions)
        for partition in partitions:
            self.epochs.pop(partition, None)
            self._problems.refused.pop(partition, None)
            if sought := self._seeks.pop(partition, None):
                sought(False)
