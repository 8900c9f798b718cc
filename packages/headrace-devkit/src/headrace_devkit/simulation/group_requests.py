"""What a member sends to its group: it finds the coordinator, sends one request after the other, and commits.

Source: librdkafka, `rdkafka_cgrp.c`: `rd_kafka_cgrp_coord_query`, `rd_kafka_cgrp_offsets_commit`,
`rd_kafka_cgrp_defer_offset_commit`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.offsets import CommittedOffset, Partition

if TYPE_CHECKING:
    from headrace_devkit.simulation.group_member import GroupMembership

_QUERY_SECONDS = 0.5
_NO_COORDINATOR = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
)
_PURPOSE = "group"
"""Of the connection on which everything of the group goes, one after the other."""


class CoordinatorLink:
    """The coordinator of a group, as a client knows it, and the connection to it."""

    def __init__(
        self,
        cluster: ClientCluster,
        groups: GroupCoordinators,
        group: str,
        connected: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """Prepare; `connected` is called when there is a coordinator, `changed` after each response."""
        self.groups = groups
        self.broker: int | None = None
        """None while it is not known, or not connected."""
        self._cluster = cluster
        self._group = group
        self._is_connected = connected
        self._changed = changed
        self._is_asking = False
        self._requested_at = -1000.0

    def find(self) -> None:
        """Ask any broker, if that was not done a moment ago."""
        now = self._cluster.world.now
        if self._is_asking or now < self._requested_at + _QUERY_SECONDS or self._cluster.is_closed:
            return
        self._is_asking = True
        self._requested_at = now

        def answered(response: Any) -> None:
            if isinstance(response, KafkaError):
                self._is_asking = False
            else:  # it counts when its connection is open
                self._cluster.send(response, lambda: None, lambda error: self._connected(response, error), _PURPOSE)

        self._cluster.send_to_any(lambda _broker: self.groups.find(self._group), answered)

    def _connected(self, broker: int, error: KafkaError | None) -> None:
        self._is_asking = False
        if error is None:
            self.broker = broker
            self._is_connected()

    def send(self, call: Callable[[int], Any], answered: Callable[[Any], object], seconds: float = 60.0) -> bool:
        """Send to the coordinator; False if there is none."""
        broker = self.broker
        if broker is None:
            return False

        def received(response: Any) -> None:
            if isinstance(response, KafkaError) and response.code() in _NO_COORDINATOR and broker == self.broker:
                self.broker = None
                self._cluster.after(0.1, self._changed)
            answered(response)
            self._changed()

        self._cluster.send(broker, lambda: call(broker), received, _PURPOSE, seconds)
        return True


class _Commit:
    def __init__(self, offsets: Mapping[Partition, CommittedOffset], then: Callable[[Any], object]) -> None:
        self.offsets = offsets
        self.then = then
        self.give_up_at: float | None = None


class MemberCommits:
    """The commits of one member that are not answered yet."""

    def __init__(self, member: "GroupMembership") -> None:
        self._member = member
        self.open = 0
        self._deferred: list[_Commit] = []

    @property
    def is_waiting(self) -> bool:
        """Whether some wait for a coordinator."""
        return bool(self._deferred)

    def send(self, offsets: Mapping[Partition, CommittedOffset], then: Callable[[Any], object]) -> None:
        """Commit; `then` gets the error code of each partition, or the error of a request that was not answered.

        It is sent behind what the connection waits for.
        """
        self.open += 1
        self._send(_Commit(offsets, then))

    def send_again(self) -> None:
        """Send what has waited for a coordinator."""
        deferred, self._deferred = self._deferred, []
        for commit in deferred:
            self._send(commit)

    def give_up(self) -> None:
        """End those that have waited too long for a coordinator."""
        member = self._member
        if self._deferred and member.coordinator.broker is None:
            now = member.cluster.world.now
            for commit in [one for one in self._deferred if one.give_up_at is not None and one.give_up_at <= now]:
                self._deferred.remove(commit)
                self._end(commit, KafkaError(KafkaError._WAIT_COORD))

    def _send(self, commit: _Commit) -> None:
        member = self._member
        if member.fatal is not None:
            fatal = KafkaError(KafkaError._FATAL)
            member.cluster.after(0, lambda: self._end(commit, fatal))
            return
        link, group, identity = member.coordinator, member.settings.group, member.identity
        if not link.send(
            lambda broker: link.groups.commit(broker, group, identity, commit.offsets),
            lambda response: self._answered(commit, response),
        ):
            self._defer(commit, KafkaError(KafkaError._WAIT_COORD))

    def _answered(self, commit: _Commit, response: Any) -> None:
        if isinstance(response, KafkaError) and response.code() in _NO_COORDINATOR:
            self._defer(commit, response)
            return
        if not isinstance(response, KafkaError):
            errors = set(response.values())
            if len(errors) == 1 and (error := errors.pop()):
                self._member.commit_refused(error)
        self._end(commit, response)

    def _defer(self, commit: _Commit, error: KafkaError) -> None:
        """Send it again when there is a coordinator, once and for as long as a session lasts."""
        member = self._member
        if commit.give_up_at is not None:
            self._end(commit, error)
            return
        commit.give_up_at = member.cluster.world.now + member.settings.session_seconds
        self._deferred.append(commit)
        member.serve()

    def _end(self, commit: _Commit, response: Any) -> None:
        self.open -= 1
        commit.then(response)
        if not self.open:
            self._member.host.serve_assignment()
