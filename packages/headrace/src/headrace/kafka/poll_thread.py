"""The thread of one consumer, which owns the client: polls, pauses, resumes, joins and leaves the group.

It never waits for a backend or a handler. When too many records are in flight, it pauses partitions and continues to
poll, so that the group membership never depends on a destination. On revoke it waits for the loop, with a limit.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.errors import HeadraceError
from headrace.kafka.assigned_partitions import AssignedPartitions
from headrace.kafka.client import library
from headrace.kafka.client.access import is_refused, refusal_in
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.error_map import ClientErrors
from headrace.kafka.commits import commit_now
from headrace.kafka.fetch_queue import FetchEvent
from headrace.kafka.loop_proxy import CommandQueue
from headrace.kafka.names import names_of
from headrace.kafka.positions import client_partitions as _plain
from headrace.kafka.positions import committed_offsets
from headrace.kafka.transactions.transaction_job import metadata_in
from headrace.records import CommitOffsets, Committed, Epochs, RecordBatch, TopicPartition
from headrace.runtime import Clock, Deadline, blocking
from headrace.runtime.failpoints import reach

log = logging.getLogger(__name__)

_BATCH_RECORDS = 2000
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.01
_PATIENCE_SECONDS = 0.1
_DRAIN_SECONDS = 20.0
_REFUSED_SECONDS = 2.0

_END = library.KafkaError._PARTITION_EOF
_NO_TOPIC = library.KafkaError.UNKNOWN_TOPIC_OR_PART
_OUT_OF_RANGE = library.KafkaError._AUTO_OFFSET_RESET
_BROKEN = (
    library.KafkaError._BAD_MSG,
    library.KafkaError._BAD_COMPRESSION,
    library.KafkaError._NOT_IMPLEMENTED,
    library.KafkaError.INVALID_MSG,
)
"""A batch whose checksum, compression or format is wrong. The client would skip it, not always correctly."""
_OF_A_POSITION = (_END, _OUT_OF_RANGE, *_BROKEN)
_FENCED = (library.KafkaError._FATAL, library.KafkaError._FENCED)


class PollThread:
    """What runs on the consumer's thread. `subscribe`, `committed` and `group_metadata` are commands of the loop."""

    def __init__(
        self, partitions: AssignedPartitions, security: ClientSecurity[Any], commands: CommandQueue, clock: Clock
    ) -> None:
        """Prepare; `security` makes the clients, which this thread closes, and `commands` run before each poll."""
        # Settings
        self._security = security
        self._commands = commands
        self._clock = clock
        # The group
        self.partitions = partitions
        self.loop = partitions.loop
        self._flow = partitions.flow
        self._resolver = partitions.resolver
        self._problems = partitions.problems
        self.member: tuple[bytes, Epochs] = b"", {}
        """For transactions: the client's metadata of the last turn, and the epochs then; for any thread."""
        self._assigned_as = ""
        """The member id when the first of the present partitions was assigned."""
        # This turn
        self.turned_at = clock.monotonic()
        """When it began, by the monotonic clock."""

    def run(self, stop_requested: blocking.Event) -> None:
        """Poll until the stop is requested, then leave the group."""
        try:
            while not stop_requested.is_set():
                self.turned_at = self._clock.monotonic()
                self.turn()
                self._renew()
            # Before the client closes: a closing client misses new generations, and Kafka then refuses its commits.
            self._drain_and_commit(list(self.partitions.epochs))
        finally:
            self._leave()

    def _leave(self) -> None:
        member = self._resolver.policy.member.properties
        with contextlib.suppress(library.KafkaException), ClientErrors():
            # A client that closes without partitions does not tell Kafka, which then waits for the session to end.
            stays = "group.instance.id" in member or member.get("group.protocol") == "consumer"
            if not stays and not self.partitions.client.assignment():
                self.partitions.client.unsubscribe()
        self.partitions.queue.close()  # runs _on_revoke for the assigned partitions

    def _renew(self) -> None:
        """Replace a client that cannot continue, or whose certificates or user have changed: leave, and join again."""
        if not self._resolver.policy.replaces_client:
            self._security.must_replace(self.partitions.client)  # gives the client a new password
            return
        if self.partitions.by_hand and self.partitions.commits.in_flight:
            return  # later: the new client would not report that commit
        refused = self._security.is_expired
        client = self._security.replacement(self.partitions.client)
        if client is None:
            return
        why = "Kafka refuses its group" if refused else "files of kafka.security have changed"
        log.info("%s: its client is being replaced, because %s", self.partitions.name, why)
        at = self.partitions.assignment.positions() if self.partitions.by_hand else []
        if not at:
            self._drain_and_commit(list(self.partitions.epochs))
        self._leave()
        self.partitions.commits.restart()
        self.partitions.use(client)
        if refused:
            self._commands.wait(_REFUSED_SECONDS)  # the new client may be refused as well
        if at:  # without membership the assignment continues
            self.partitions.assignment.add(at)
            paused = [p for p in self.partitions.by_hand if self._flow.is_paused(p) or self._resolver.is_open(p)]
            client.pause(_plain(paused))
        elif self._resolver.subscribed:
            client.subscribe(self._resolver.subscribed, **self._callbacks())

    def turn(self) -> None:
        """Run the commands of the loop, and poll once."""
        client = self.partitions.client
        self._commands.run()
        self.partitions.commits.send_due(client)
        self.partitions.resolve()
        self._read_member()
        if self._problems.refused:
            self._fetch_refused()
        self._pass_on()
        self._pause_and_resume()
        limit = min(_BATCH_RECORDS, self._flow.poll_limit_records)
        if not limit:
            # A moment without a poll does no harm, and is cheaper than a pause.
            self._commands.wait(_PATIENCE_SECONDS)
            return
        seconds = _BUSY_SECONDS if self._clock.monotonic() < self._commands.attentive_until else _IDLE_SECONDS
        if self._flow.all_paused:
            # No record can arrive, and a wait for commands ends as soon as enough is released.
            self._commands.wait(seconds)
        parts = self.partitions.queue.poll(
            0 if self._flow.all_paused or self._flow.has_waiting else seconds, limit
        ).parts
        if parts:
            reach("poll.after")
            self._dispatch(parts)
        if not self._pass_on() and not parts and self._flow.has_waiting:
            self._commands.wait(_BUSY_SECONDS)

    def subscribe(self, topics: list[str]) -> None:
        """Read these topics; the partitions of topics that stay are not revoked."""
        if topics == self._resolver.subscribed:
            return
        self._resolver.subscribed = topics
        if topics:
            self.partitions.client.subscribe(topics, **self._callbacks())
        else:
            self.partitions.client.unsubscribe()
            self._problems.report("", f"group {self._problems.group}: no topic matches its patterns yet")

    def _callbacks(self) -> dict[str, Any]:
        return {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}

    def committed(
        self, partitions: Sequence[TopicPartition], response: Callable[[CommitOffsets | HeadraceError], None]
    ) -> None:
        """Respond with the committed offsets of the group, or with the error of Kafka."""
        try:
            found = committed_offsets(self.partitions.client, partitions)
        except library.KafkaException as cause:
            topics = {partition.topic for partition in partitions}
            response(self._problems.refusal(topics) or self._problems.error(cause.args[0], topics))
            return
        response({partition: at for partition, at in found.items() if isinstance(at, Committed)})

    def group_metadata(self, epochs: Epochs, response: Callable[[Any], None]) -> None:
        """Respond with the metadata of this member, when earlier commits of these partitions are completed.

        The response is None if a partition is no longer assigned in its epoch, or Kafka does not know the member.
        """

        def settled(_revoked: Sequence[TopicPartition] | HeadraceError) -> None:
            response(metadata_in((self.partitions.client.consumer_group_metadata(), self.partitions.epochs), epochs))

        self.partitions.commits.when_settled(epochs, settled)

    def _read_member(self) -> None:
        # Only on this thread: the client's call may block for ever while another thread polls.
        if self._resolver.policy.transactional:
            self.member = self.partitions.client.consumer_group_metadata(), self.partitions.epochs.copy()

    def _dispatch(self, parts: Sequence[RecordBatch | FetchEvent]) -> None:
        """Keep records for the listener, and handle the client's events between them."""
        for part in parts:
            if isinstance(part, FetchEvent):
                self._on_event(part)
            else:
                self._keep_records(part)

    def _keep_records(self, batch: RecordBatch) -> None:
        if "" in self._problems:
            self._problems.report("", "")
        partition = batch.topic_partition
        self._allowed([partition])
        if partition not in self.partitions.epochs or not self._resolver.advance(partition, batch.offsets[-1] + 1):
            return  # revoked during this poll, or after offsets that cannot be read
        self._flow.received(partition, batch)

    def _pass_on(self) -> bool:
        """Pass what there is capacity for to the listener; return whether that was anything."""
        part: RecordBatch | int | None = None
        for partition, epoch, part in self._flow.take(self._clock.monotonic()):
            if isinstance(part, int):
                self.loop.post(self.loop.listener.on_end, partition, epoch, part)
                continue
            reach("hand-over.before")
            self.loop.post(self.loop.listener.on_records, partition, epoch, part)
            reach("hand-over.after")
        return part is not None

    def _on_event(self, event: FetchEvent) -> None:
        error, partition, offset = event
        code = error.code()
        group = self._problems.group
        if code in _OF_A_POSITION and self._resolver.is_open(partition):
            return  # the client reads on after offsets that cannot be read, and must not
        if code == _END:
            self._allowed([partition])
            self._flow.received(partition, offset or 0)
        elif code == _OUT_OF_RANGE:
            log.warning("group %s, %s: %s", group, partition, error.str())
            self._resolver.out_of_range(partition, offset)
        elif code in _BROKEN and partition in self.partitions.epochs:
            self._resolver.out_of_range(partition, offset)  # so it is fetched again, from here
            self.partitions.client.pause(_plain([partition]))
            problem = f"{partition}: {error.str()}; reading stopped there until this batch can be read"
            self._problems.report(str(partition), problem)
        elif code in _FENCED:
            refusal = refusal_in(error)
            found = self._problems.error(refusal or error, self._resolver.subscribed)
            self._problems.report("", found if refusal else "")
            if refusal is None or not self._resolver.policy.replaces_client:
                raise found
            self._security.is_expired = True
        elif is_refused(error) and partition.topic:
            assigned = partition in self.partitions.epochs
            if assigned:
                self._problems.refused.setdefault(partition, self._clock.monotonic() + _REFUSED_SECONDS)
            about = str(partition) if assigned else f"topic {partition.topic}"
            self._problems.report(about, self._problems.error(error, [partition.topic]))
        else:
            # A topic may be created at this moment; the subscription logs those that stay missing.
            level = logging.DEBUG if code == _NO_TOPIC and partition.topic else logging.WARNING
            explained = self._problems.explain(error, self._resolver.subscribed, f"group {group}: ")
            self._problems.report("", explained, level)

    def _fetch_refused(self) -> None:
        """Retry what Kafka refused: the client does not report that it may read again, unless records arrive."""
        now = self._clock.monotonic()
        for partition, due in self._problems.refused.items():
            if due <= now and not self._resolver.is_open(partition):
                self._problems.refused[partition] = now + _REFUSED_SECONDS
                self.partitions.fetch_from(partition, self._resolver.position_of(partition))

    def _allowed(self, partitions: Iterable[TopicPartition]) -> None:
        for partition in partitions if self._problems.refused else ():
            if self._problems.refused.pop(partition, None):
                self._problems.report(str(partition), "")

    def _pause_and_resume(self) -> None:
        pause, resume = self._flow.changes(self._clock.monotonic())
        if pause:
            self.partitions.client.pause(_plain(pause))
        for partition, offset in self._flow.take_dropped():
            self.partitions.fetch_again(partition, offset)
        if resume:
            self.partitions.client.resume(_plain(resume))

    def _on_assign(self, client: Any, assigned: list[Any]) -> None:
        if not self.partitions.epochs:
            self._assigned_as = client.memberid()
        self.partitions.add(assigned)

    def _on_revoke(self, client: Any, revoked: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in revoked]
        reach("revoke.before")
        self._drain_and_commit(partitions)
        self.partitions.assignment.remove(revoked)
        if not self.partitions.epochs:
            self._problems.without_partitions()
        log.info("%s: revoked %s", self.partitions.name, names_of(partitions))

    def _on_lost(self, client: Any, lost: list[Any]) -> None:
        reach("lost.before")
        self._lose([TopicPartition(p.topic, p.partition) for p in lost])
        self.partitions.assignment.remove(lost)
        self._problems.report("", f"group {self._problems.group}: partitions were lost; joining again")
        reach("lost.after")

    def _lose(self, partitions: Sequence[TopicPartition]) -> None:
        self.partitions.forget(partitions)
        self.loop.post(self.loop.listener.on_lost, partitions)
        log.warning("%s: lost %s", self.partitions.name, names_of(partitions))

    def _drain_and_commit(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait until the loop has drained partitions, and commit what is completed in them.

        They are lost if the member is another one than they were assigned to: a third one may have had them meanwhile,
        and Kafka would accept the commit, because it checks the member and not the partitions.
        """
        assigned = [partition for partition in partitions if partition in self.partitions.epochs]
        if assigned and self._assigned_as and self.partitions.client.memberid() not in (self._assigned_as, None):
            self._lose(partitions)
            return
        offsets = self._drain(assigned) if assigned else {}
        reach("revoke.drained")
        self.partitions.forget(partitions)
        if offsets and (failure := commit_now(self.partitions.client, offsets)):
            why = self._problems.explain(failure, {p.topic for p in offsets})
            log.warning(
                "%s: commit on revoke failed; completed records will be delivered again: %s", self.partitions.name, why
            )
        reach("revoke.committed")

    def _drain(self, partitions: Sequence[TopicPartition]) -> CommitOffsets:
        """Wait until the loop has drained partitions; return what may be committed."""
        leave_by = self.partitions.leave_by
        seconds = min(_DRAIN_SECONDS, leave_by.remaining_seconds) if leave_by else self._resolver.policy.drain_seconds
        deadline = Deadline(self._clock, seconds)  # from now on: the loop may be late
        listener = self.loop.listener
        self._read_member()  # a generation may have begun, and no other member has these partitions yet

        async def drain() -> CommitOffsets:
            return await listener.on_revoked(partitions, deadline)

        response = self.loop.wait_for(drain, "revoke", seconds + 1)
        if response is None and not self.loop.is_dead:
            text = "%s: group %s: draining %s took over %.0f s: records in flight will be delivered again"
            log.warning(text, self.partitions.name, self._problems.group, names_of(partitions), seconds)
        return response or {}
