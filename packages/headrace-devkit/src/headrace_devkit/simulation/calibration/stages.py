"""What a calibration script acts on: topics, members and time. The model and a real cluster are the two stages."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

LIMIT_SECONDS = 60.0
SESSION_SECONDS = 3.0
BASE = {
    "auto.offset.reset": "earliest",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "fetch.wait.max.ms": 100,
    "topic.metadata.refresh.interval.ms": 1000,
    "max.poll.interval.ms": 20_000,
}
CLASSIC = {
    "partition.assignment.strategy": "cooperative-sticky",
    "session.timeout.ms": int(SESSION_SECONDS * 1000),
    "heartbeat.interval.ms": 300,
}
CONSUMER = {"group.protocol": "consumer"}


class StageMember(ABC):
    """A member on a stage: its reports, and how to tell it something."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[list[Any]] = []
        self.ends_at: int | None = None
        """How many events are compared; None for all."""

    @abstractmethod
    def tell(self, *command: Any) -> None:
        """Have it do something, between two polls."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it as SIGSTOP does."""

    @abstractmethod
    def go_on(self) -> None:
        """Let it continue."""

    @abstractmethod
    def kill(self) -> None: ...

    @property
    def owned(self) -> set[tuple[str, int]]:
        """What its callbacks say that it has."""
        found: set[tuple[str, int]] = set()
        for name, *values in self.events:
            if name == "assign":
                found |= {tuple(one) for one in values[0]}
            elif name in ("revoke", "lost"):
                found -= {tuple(one) for one in values[0]}
        return found

    def count(self, name: str) -> int:
        return sum(event[0] == name for event in self.events)

    def failed(self, code: str) -> bool:
        """Whether the client has reported this about a connection."""
        return ["failure", code] in self.events


class Stage(ABC):
    """Topics, members, and time."""

    def __init__(self, protocol: str) -> None:
        self.protocol = protocol
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.topics: list[str] = []
        self.members: list[Any] = []
        self.notes: list[list[Any]] = []

    @property
    def base(self) -> dict[str, Any]:
        return {**BASE, **(CONSUMER if self.protocol == "consumer" else CLASSIC), "group.id": self.group}

    def member(self, name: str, topics: list[str] | None = None, **config: Any) -> Any:
        """Start a member that reads all topics of the script, or those given; none if a command assigns."""
        dotted = {key.replace("_", "."): value for key, value in config.items()}
        member = self.start_member(name, {**self.base, "client.id": name, **dotted})
        self.members.append(member)
        if topics != []:
            member.tell("subscribe", topics or self.topics)
        return member

    def until(self, condition: Callable[[], object], what: str, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Wait for a condition on what the members have reported."""
        if not self.wait(condition, limit_seconds):
            recent = {member.name: member.events[-15:] for member in self.members}
            raise AssertionError(f"{type(self).__name__}: not within {limit_seconds} s: {what}; {recent}")

    def settled(self, *members: Any) -> None:
        """Wait until these members have all partitions of the topics, each one, and nothing changes for a while."""
        all_of = {(topic, n) for topic in self.topics for n in range(self.partitions_of(topic))}

        def is_shared() -> bool:
            owned = [member.owned for member in members]
            sizes = sorted(len(one) for one in owned)
            return set().union(*owned) == all_of and sum(sizes) == len(all_of) and sizes[-1] - sizes[0] <= 1

        self.until(is_shared, f"{len(all_of)} partitions are shared by {[member.name for member in members]}")
        self.sleep(2.5)
        self.until(is_shared, "it stays so")

    @abstractmethod
    def start_member(self, name: str, config: dict[str, Any]) -> StageMember: ...

    @abstractmethod
    def wait(self, condition: Callable[[], object], limit_seconds: float) -> bool: ...

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...

    @abstractmethod
    def topic(self, partitions: int = 1) -> str: ...

    @abstractmethod
    def partitions_of(self, topic: str) -> int: ...

    @abstractmethod
    def add_partitions(self, topic: str, total: int) -> None: ...

    @abstractmethod
    def produce(self, topic: str, partition: int, count: int) -> None: ...

    @abstractmethod
    def transaction(self, topic: str, partition: int, count: int, ends: str = "") -> Callable[[str], None]:
        """Write records of a transaction and return a call that ends it: "commit" or "abort"."""

    @abstractmethod
    def offsets_in_transaction(self, topic: str, partition: int, offset: int) -> Callable[[str], None]:
        """Commit an offset of the group in a transaction, and return a call that ends it."""

    @abstractmethod
    def commit_as(self, metadata: bytes, partitions: set[tuple[str, int]]) -> str:
        """Commit in a transaction for a member, as its metadata has it; return the name of the error."""

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def delete_before(self, topic: str, partition: int, offset: int) -> None: ...

    @abstractmethod
    def committed(self) -> dict[tuple[str, int], int]: ...

    @abstractmethod
    def stop_brokers(self) -> Callable[[], None]:
        """Kill all brokers; return a call that starts them again."""

    @abstractmethod
    def stop_broker(self, which: str, topic: str) -> Callable[[], None]:
        """Kill the group's coordinator or the leader of a topic; return a call that starts it again."""

    def checkpoint(self, name: str) -> None:
        """Write down what the group has committed."""
        found = sorted([self.topics.index(t), n, offset] for (t, n), offset in self.committed().items())
        self.notes.append([name, found])

    def closed(self, member: Any) -> None:
        """Wait until a member has closed."""
        self.until(lambda: member.count("closed"), f"{member.name} closes")

    def close_all(self) -> None:
        """Close the members that are left, which is not part of the trace."""
        for member in self.members:
            member.ends_at = len(member.events)
        for member in self.members:
            if not member.count("closed") and not member.gone:
                member.tell("close")
                self.closed(member)
