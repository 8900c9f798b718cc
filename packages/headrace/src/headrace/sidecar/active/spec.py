"""The settings of an instance, and what it reads."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.kafka import ReadPolicy
from headrace.records import TopicPartition
from headrace.runtime import chance


class InstanceSpec(NamedTuple):
    """The settings of an instance."""

    group: str
    name: str
    owner: str
    """Name of the principal; empty without authentication."""
    key_format: str
    value_format: str
    wait_seconds: float
    min_bytes: int
    """A read ends as soon as this many bytes are there; below 1, as soon as any record is."""
    max_read_bytes: int
    auto_commit_seconds: float | None
    """How often confirmed records are committed; None without auto commit."""
    buffer_bytes: int
    policy: ReadPolicy
    linger_seconds: float = 0.0
    """How long a read that has a record waits for further ones."""
    key: str = ""
    """The `Idempotency-Key` of its creation."""

    @property
    def id(self) -> str:
        """Group and name, as in paths."""
        return f"{self.group}/{self.name}"


def random_name() -> str:
    """Return a name with 144 random bits, for an instance whose client gave none."""
    return f"rest-consumer-{chance.token_urlsafe(18)}"


class Topics(NamedTuple):
    """What an instance reads: topics, the topics that match a pattern, or partitions without membership."""

    names: Sequence[str] = ()
    matches: Callable[[str], bool] | None = None
    partitions: Sequence[TopicPartition] | None = None
