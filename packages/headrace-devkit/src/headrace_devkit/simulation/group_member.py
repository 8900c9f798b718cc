"""A client's membership, as far as both protocols share it: the coordinator, commits, and what a rebalance asks for.

Names of states are those of librdkafka. Source: librdkafka, `rdkafka_cgrp.c`, `rdkafka_assignment.c`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from confluent_kafka import KafkaError

from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.group_requests import CoordinatorLink, MemberCommits
from headrace_devkit.simulation.offsets import Partition

JoinState = Literal[
    "init",
    "wait-join",
    "wait-metadata",
    "wait-sync",
    "wait-assign-call",
    "wait-unassign-call",
    "wait-unassign",
    "wait-incr-unassign",
    "steady",
]
Protocol = Literal["none", "eager", "cooperative"]


class GroupSettings(NamedTuple):
    """The properties of a client that decide its membership."""

    group: str
    instance_id: str | None
    client_id: str
    session_seconds: float
    heartbeat_seconds: float
    poll_seconds: float
    refresh_seconds: float
    assignors: tuple[str, ...]


class MemberHost(ABC):
    """The client of a member: what it fetches, and the queue of the application."""

    @abstractmethod
    def rebalance(self, event: Literal["assign", "revoke"], partitions: list[Partition]) -> None:
        """Hand partitions to the application."""

    @abstractmethod
    def problem(self, error: KafkaError, topic: str = "") -> None:
        """Return an error from the next poll."""

    @abstractmethod
    def hold_fetching(self, *, held: bool) -> None:
        """Stop fetching while the application handles a rebalance."""

    @abstractmethod
    def serve_assignment(self) -> None:
        """Start and stop what the assignment asks for, then call `assignment_done`, if nothing is in progress."""

    @abstractmethod
    def clear_assignment(self) -> None:
        """Stop fetching all."""

    @abstractmethod
    def poll_exceeded(self) -> bool:
        """Whether the application has not polled for `max.poll.interval.ms`."""

    @abstractmethod
    def closed(self) -> None:
        """The member is gone, so `close` returns."""


class Rebalance:
    """Where a member is in a rebalance, and what it does afterwards."""

    def __init__(self) -> None:
        self.join_state: JoinState = "init"
        self.owned: list[Partition] | None = None
        """What the group has given it; the application may not have called assign yet."""
        self.added_next: list[Partition] | None = None
        """Partitions to assign behind the revoke of others."""
        self.is_lost = False
        self.rejoins = False
        """Whether it joins again when the application has called assign or unassign."""
        self.leaves_on_unassign = False
        # The application
        self.checks_poll = False
        self.poll_was_exceeded = False
        # The end
        self.is_leaving = False
        self.is_terminating = False
        self.is_terminated = False

    @property
    def waits_for_call(self) -> bool:
        """Whether the application has yet to call assign or unassign."""
        return self.join_state in ("wait-assign-call", "wait-unassign-call")


class GroupMembership(ABC):
    """The state of a membership; its subclasses are the two protocols."""

    def __init__(
        self, host: MemberHost, cluster: ClientCluster, groups: GroupCoordinators, settings: GroupSettings
    ) -> None:
        # Settings
        self.host = host
        self.cluster = cluster
        self.settings = settings
        self.coordinator = CoordinatorLink(cluster, groups, settings.group, self._connected, self.serve)
        # The group
        self.member_id = ""
        self.generation = -1
        self.subscription: list[str] = []
        self.fatal: KafkaError | None = None
        self.commits = MemberCommits(self)
        self.rebalance = Rebalance()
        self._ticks = False

    # What a protocol does --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def protocol(self) -> Protocol: ...

    @property
    @abstractmethod
    def has_joined(self) -> bool: ...

    @abstractmethod
    def subscribe(self, topics: list[str]) -> None: ...

    @abstractmethod
    def unsubscribe(self) -> None: ...

    @abstractmethod
    def serve_join(self) -> None:
        """Send what is due: a join, a heartbeat."""

    @abstractmethod
    def leave(self) -> None: ...

    @abstractmethod
    def assignment_done(self) -> None: ...

    @abstractmethod
    def exceeded(self) -> None:
        """Leave, because the application does not poll."""

    @abstractmethod
    def commit_refused(self, error: int) -> None: ...

    def rejoin(self) -> None:
        """Join at the next turn; without a subscription, leave if that is due."""
        if not self.subscription:
            self.leave_maybe()
        self.rebalance.join_state = "init"

    # Turns -----------------------------------------------------------------------------------------------------------

    @property
    def is_rebalancing(self) -> bool:
        return (
            (self.has_joined and self.rebalance.join_state in ("wait-join", "wait-metadata"))
            or self.rebalance.join_state in ("wait-sync", "wait-unassign", "wait-incr-unassign")
            or self.rebalance.waits_for_call
        )

    def serve(self) -> None:
        """Do what is due, as the client's thread does after each event and once in a while."""
        if self.rebalance.is_terminated or self.try_terminate():
            return
        if self.fatal is None:
            self.check_session()
        if self.rebalance.checks_poll and self.host.poll_exceeded():
            self.rebalance.checks_poll = False
            self.rebalance.poll_was_exceeded = True
            seconds = self.settings.poll_seconds * 1000
            text = f"Application maximum poll interval ({seconds:.0f}ms) exceeded"
            self.host.problem(KafkaError(KafkaError._MAX_POLL_EXCEEDED, text))
            self.exceeded()
        if self.coordinator.broker is None:
            self.coordinator.find()
        elif self.fatal is None:
            self.serve_join()
        self.commits.give_up()
        if not self._ticks:
            self._ticks = True
            self.cluster.after(self.tick_seconds, self._tick)

    @property
    def tick_seconds(self) -> float:
        """How often it looks what is due, without an event."""
        return min(0.5, self.settings.heartbeat_seconds) if self.subscription or self.rebalance.is_terminating else 1.0

    def _tick(self) -> None:
        self._ticks = False
        if (
            self.subscription
            or self.coordinator.broker is None
            or self.commits.is_waiting
            or self.rebalance.is_terminating
            or self.rebalance.join_state != "init"
        ):
            self.serve()

    def check_session(self) -> None:  # noqa: B027
        """Notice that the session has ended; only the classic protocol does."""

    def _connected(self) -> None:
        self.commits.send_again()
        self.serve()
        self.host.serve_assignment()

    @property
    def identity(self) -> tuple[str, int, str | None]:
        """Who a request of this member says it is."""
        return self.member_id, self.generation, self.settings.instance_id

    # Rebalances ------------------------------------------------------------------------------------------------------

    def hand_over(self, event: Literal["assign", "revoke"], partitions: Iterable[Partition], *, rejoin: bool) -> None:
        """Have the application assign or unassign, and note what the member owns from now on."""
        changed = sorted(partitions)
        self.rebalance.rejoins = rejoin
        if self.fatal is not None:
            self.unassign()
            self.host.serve_assignment()
        else:
            self.rebalance.join_state = "wait-assign-call" if event == "assign" else "wait-unassign-call"
            self.host.hold_fetching(held=True)
            self.host.rebalance(event, changed)
        whole = self.protocol == "eager" or self.protocol == "none"
        if event == "assign":
            self.rebalance.owned = changed if whole else sorted({*(self.rebalance.owned or ()), *changed})
        else:
            left = [] if whole else [one for one in self.rebalance.owned or () if one not in changed]
            self.rebalance.owned = left or (None if whole else [])

    def new_assignment(self, partitions: Iterable[Partition]) -> None:
        """Take what the group has assigned: under the cooperative protocol only the difference is handed over."""
        target = set(partitions)
        if self.protocol != "cooperative":
            self.hand_over("assign", target, rejoin=False)
            return
        owned = set(self.rebalance.owned or ())
        if owned - target:
            self.rebalance.added_next = sorted(target - owned)
            self.hand_over("revoke", owned - target, rejoin=False)
        else:
            self.hand_over("assign", target - owned, rejoin=False)

    def revoke_all_maybe(self, *, lost: bool) -> None:
        """Revoke all and join again, unless a rebalance is in progress."""
        if not self.is_rebalancing:
            self.revoke_all(lost=lost)

    def revoke_all(self, *, lost: bool) -> None:
        if self.protocol != "cooperative":
            self.rebalance.is_lost |= lost
            if self.rebalance.owned is not None and not self.rebalance.waits_for_call:
                self.hand_over("revoke", self.rebalance.owned, rejoin=self.rebalance.rejoins)
            else:
                self.join_at_once()
                self.rejoin()
            return
        if self.rebalance.owned:
            self.rebalance.is_lost |= lost
            self.hand_over("revoke", self.rebalance.owned, rejoin=not self.rebalance.is_terminating)
        elif not self.rebalance.is_terminating:
            self.rejoin()

    def join_at_once(self) -> None:  # noqa: B027
        """Skip the pause before a join; only the classic protocol has one."""

    def assigned(self) -> None:
        """The application has called assign or incremental_assign."""
        if self.rebalance.join_state == "wait-assign-call":
            self.host.hold_fetching(held=False)
            self.rebalance.join_state = "steady"
            self.rebalance.checks_poll = bool(self.subscription)
        self.rebalance.is_lost = False

    def unassigned(self) -> None:
        """The application has called incremental_unassign."""
        if self.rebalance.join_state == "wait-unassign-call":
            self.host.hold_fetching(held=False)
            self.rebalance.join_state = "wait-incr-unassign"
        self.rebalance.is_lost = False

    def unassign(self) -> None:
        """Stop fetching all, because the application has called unassign, or the client closes."""
        self.host.clear_assignment()
        if self.rebalance.join_state == "wait-unassign-call":
            self.host.hold_fetching(held=False)
            self.rebalance.join_state = "wait-unassign"
        self.rebalance.is_lost = False

    def unassign_done(self) -> None:
        self.leave_maybe()
        if self.rebalance.join_state == "wait-unassign":
            self.join_at_once()
            self.rejoin()

    # The end ---------------------------------------------------------------------------------------------------------

    def leave_maybe(self) -> bool:
        if not self.rebalance.leaves_on_unassign:
            return False
        self.rebalance.leaves_on_unassign = False
        self.leave()
        return True

    def terminate(self) -> None:
        """Leave the group and end; the host gets a call when that is done."""
        self.rebalance.is_terminating = True
        if self.subscription:
            self.unsubscribe()
        if not self.rebalance.waits_for_call:
            self.unassign()
        self.host.serve_assignment()
        self.serve()

    def try_terminate(self) -> bool:
        if self.rebalance.is_terminated:
            return True
        if (
            not self.rebalance.is_terminating
            or self.rebalance.waits_for_call
            or self.commits.open
            or self.rebalance.is_leaving
        ):
            return False
        self.rebalance.is_terminated = True
        self.rebalance.owned = None
        self.host.closed()
        return True

    def left(self, _response: Any = None) -> None:
        """The response to the leave has come, or none can."""
        self.rebalance.is_leaving = False
        self.try_terminate()
