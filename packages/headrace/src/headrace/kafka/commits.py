"""Commits of one group member: the newest offset per partition, one request at a time, only for assigned partitions."""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from headrace.errors import HeadraceError
from headrace.kafka.client import library
from headrace.kafka.client.access import is_refused
from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.records import CommitOffsets, Committed, Epochs, TopicPartition
from headrace.runtime import Clock, blocking
from headrace.runtime.failpoints import reach

log = logging.getLogger(__name__)

_NO_CONNECTION = (library.KafkaError._AUTHENTICATION, library.KafkaError._SSL, library.KafkaError._TRANSPORT)
"""`Reachability` reports the outage, once for all clients."""
_RETRY_SECONDS = 1.0
_COMMITS = "commits"
Response = Callable[[Sequence[TopicPartition] | HeadraceError], None]
"""Takes the partitions that were revoked before their commit was acknowledged, or the error."""
_TRIES = 30
_TRY_SECONDS = 0.1


def commit_now(client: Any, offsets: CommitOffsets) -> library.KafkaError | None:
    """Commit and wait. Returns why it failed; None if it succeeded.

    Between two generations Kafka refuses commits, until the leader of the group has assigned the partitions. A commit
    that waited behind the client's own request to join has the old generation; the next one has the new one.
    """
    failure: library.KafkaError | None = None
    error = library.KafkaError
    retries = {error.REBALANCE_IN_PROGRESS: _TRIES, error.ILLEGAL_GENERATION: 1}
    for _ in range(_TRIES):
        try:
            client.commit(offsets=to_client(offsets), asynchronous=False)
            return None
        except library.KafkaException as cause:
            failure = cause.args[0]
            code = failure.code()
            if not retries.get(code):
                break
            retries[code] -= 1
            blocking.sleep(_TRY_SECONDS)
    return failure


class _Request:
    """A commit whose caller waits for the response."""

    def __init__(self, partitions: Iterable[TopicPartition], response: Response) -> None:
        self.unsent = set(partitions)
        self.sent = set[TopicPartition]()
        self.dropped: list[TopicPartition] = []
        """Partitions that were revoked before the commit was acknowledged."""
        self.respond = response


class Commits:
    """Offsets to commit; used on the consumer's thread.

    An offset belongs to the assignment epoch it was reached in. When that epoch is over, the offset is dropped: another
    member may have committed a later one since, and a late retry would set the group back.
    """

    def __init__(
        self,
        name: str,
        clock: Clock,
        epochs: dict[TopicPartition, int],
        problems: ConsumerProblems,
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `problems` gets a refused commit, and `answered` is called when Kafka has answered."""
        self.epochs = epochs
        """The present assignments."""
        self._problems = problems
        self._name = name
        self._clock = clock
        self._answered = answered
        self._newest: dict[TopicPartition, tuple[int, Committed]] = {}
        self._sent: dict[TopicPartition, int] = {}
        self.in_flight = False
        """Whether a commit was sent and not reported yet."""
        self._retry_at = 0.0
        self._requests: list[_Request] = []
        self.is_by_hand = False
        """Whether partitions are read without membership; then Kafka refuses commits while the group has members."""

    def request_answered(self, offsets: CommitOffsets, epochs: Epochs, response: Response) -> None:
        """Commit offsets of these epochs, and respond once.

        The response has the partitions that are no longer assigned; the others are acknowledged by then. If a right is
        missing, the response is that error, and the commit is retried until the partition is revoked.
        """
        request = _Request(offsets, response)
        self._requests.append(request)
        self.request(offsets, epochs)
        self._drop([p for p in offsets if p not in epochs or epochs[p] != self.epochs.get(p)], [request])

    def when_settled(self, partitions: Iterable[TopicPartition], response: Response) -> None:
        """Respond when no commit of these partitions waits or is in flight; with the partitions revoked before that."""
        settling = _Request(self._newest.keys() & set(partitions), response)
        if self.in_flight:
            settling.sent = self._sent.keys() & set(partitions)
        self._requests.append(settling)
        self._respond()

    def request(self, offsets: CommitOffsets, epochs: Epochs) -> None:
        """Take offsets that were reached in these epochs; the newest per partition wins."""
        for partition, at in offsets.items():
            epoch = epochs.get(partition)
            if epoch is not None and epoch == self.epochs.get(partition):
                self._newest[partition] = epoch, at

    def is_open(self, partition: TopicPartition) -> bool:
        """Return whether a commit of a partition waits or is in flight; for any thread."""
        return partition in self._newest or partition in self._sent

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the offsets of partitions that are no longer assigned."""
        gone = list(partitions)
        for partition in gone:
            self._newest.pop(partition, None)
        self._drop(gone, self._requests)

    def renew(self, partition: TopicPartition, epoch: int) -> None:
        """Keep the offsets of a partition that stays assigned under another epoch."""
        if partition in self._newest:
            self._newest[partition] = epoch, self._newest[partition][1]
        if partition in self._sent:
            self._sent[partition] = epoch

    def restart(self) -> None:
        """Expect no reports of commits that the previous client has sent."""
        self._sent = {}
        self.in_flight = False
        self._retry_at = 0.0

    def send_due(self, client: Any) -> None:
        """Send the offsets, unless a commit is in flight or has just failed."""
        if not self._newest or self.in_flight or self._clock.monotonic() < self._retry_at:
            return
        newest = self._newest
        self._newest = {}
        self._sent = {partition: epoch for partition, (epoch, _) in newest.items()}
        reach("commit.before")
        try:
            client.commit(offsets=to_client({p: at for p, (_, at) in newest.items()}), asynchronous=True)
            # One at a time: the retry of a failed one must not set back a newer one.
            self.in_flight = True
            for request in self._requests:
                request.sent |= request.unsent & newest.keys()
                request.unsent -= newest.keys()
            reach("commit.sent")
        except library.KafkaException as cause:
            self._log_failed(cause.args[0])
            self._newest = newest
            self._retry_at = self._clock.monotonic() + _RETRY_SECONDS

    def reported(self, error: Any, offsets: Sequence[Any]) -> None:
        """Take the report of the commit in flight; failed offsets are sent again while their epoch lasts."""
        if error is None:
            self._answered()
        reported = from_client(offsets)
        if reported and self._sent.keys().isdisjoint(reported):
            return  # an earlier commit, whose partitions were revoked since
        self.in_flight = False
        reach("commit.acknowledged")
        failed = [p for p in offsets if error is not None or p.error is not None]
        not_committed = from_client(failed)
        acknowledged = self._sent.keys() & (reported.keys() - not_committed.keys())
        for request in self._requests:
            request.unsent |= request.sent - acknowledged
            request.sent.clear()
        self._respond()
        if failed:
            self._report_failure(error or failed[0].error, {p.topic for p in failed})
            newer = self._newest
            self._newest = {}
            self.request(not_committed, self._sent)
            self._newest |= newer
            self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
        elif _COMMITS in self._problems:
            self._problems.report(_COMMITS, "")
        self._sent = {}

    def _report_failure(self, error: Any, topics: Collection[str]) -> None:
        if not is_refused(error):
            self._log_failed(error)
            if self.is_by_hand and error.code() == library.KafkaError.UNKNOWN_MEMBER_ID:
                text = "the group has members, and these partitions are read without membership"
                self._problems.report(_COMMITS, f"Kafka refuses commits: {text}: use a group of its own")
            return
        refusal = self._problems.error(error, topics)
        self._problems.report(_COMMITS, f"Kafka refuses commits: {refusal.description}")
        for request in [one for one in self._requests if one.unsent & self._sent.keys()]:
            self._requests.remove(request)
            request.respond(refusal)

    def _log_failed(self, error: Any) -> None:
        level = logging.DEBUG if error.code() in _NO_CONNECTION else logging.WARNING
        log.log(level, "%s: commit failed: %s", self._name, error.str())

    def _drop(self, partitions: Sequence[TopicPartition], requests: Sequence[_Request]) -> None:
        for request in requests:
            waiting = request.unsent | request.sent
            dropped = [partition for partition in partitions if partition in waiting]
            request.dropped += dropped
            request.unsent.difference_update(dropped)
            request.sent.difference_update(dropped)
        self._respond()

    def _respond(self) -> None:
        completed = [request for request in self._requests if not request.unsent and not request.sent]
        self._requests = [request for request in self._requests if request.unsent or request.sent]
        for request in completed:
            request.respond(request.dropped)


def to_client(offsets: CommitOffsets) -> list[Any]:
    """Return offsets to commit, as the client takes them."""
    return [library.TopicPartition(p.topic, p.partition, at.offset, at.metadata) for p, at in offsets.items()]


def from_client(offsets: Sequence[Any]) -> dict[TopicPartition, Committed]:
    """Return committed offsets, as the client returns them."""
    return {TopicPartition(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in offsets}
