"""A consumer that runs in this process: what control, replays, redrives and redelivery use of it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from headrace.config.consumers import DeadLetterConfig, DeliveryConfig, FlowControl
from headrace.consumers.lag import GroupTopics
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.outcomes import Destination
from headrace.delivery.pump import Pump
from headrace.kafka import Admin


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RunningConsumer:
    """A reactive consumer, or a trigger of a function, that runs in this process."""

    name: str
    """Name in the file; of a function's trigger, `<function>.<trigger>`."""
    kind: Literal["reactive", "function"]
    function: str = ""
    """The function whose trigger it is."""
    delivery: DeliveryConfig
    """Its settings in the file."""
    topics: Sequence[str]
    """The topics that its settings name."""
    partitions: Sequence[int] = ()
    """Numbers of the partitions of each topic that it reads; empty for its share as a member of the group."""
    matches: Callable[[str], bool] | None = None
    """Whether its patterns match a topic; None without patterns."""
    destination: Destination
    destination_name: str = ""
    """Display name: URL or handler."""
    dead_letter: DeadLetterConfig = dataclasses.field(default_factory=DeadLetterConfig)
    """Its dead letter settings."""
    dead_letters: DeadLetterTopic | None = None
    """Writes its dead letters; None if they are off."""
    pump: Pump
    """Delivers the records of its topics."""
    retry_pump: Pump | None = None
    """Delivers the records of its retry topics, if it has any."""
    flow: FlowControl = dataclasses.field(default_factory=FlowControl)
    """Limits of its memory."""
    admin: Admin
    """Administration of the cluster it reads."""
    no_replay: str = ""
    """Why replays to it are refused; empty if they are allowed."""
    owner: str = ""
    """The caller that registered it; empty if it is in the file."""

    @property
    def group(self) -> str:
        return self.pump.group

    @property
    def pumps(self) -> Sequence[Pump]:
        """Its pump, and that of its retry topics if it has any."""
        return [self.pump, self.retry_pump] if self.retry_pump else [self.pump]

    @property
    def retry_topics(self) -> Sequence[str]:
        """Its retry topics, the shortest delay first."""
        return self.delivery.retry.topic_names(self.group)

    def reads(self, topic: str) -> bool:
        """Return whether it reads a topic; its retry topics do not count."""
        return topic in self.topics or bool(self.matches and self.matches(topic))

    def is_origin(self, topic: str) -> bool:
        """Return whether its dead letters can be from a topic: one it reads, or one of its retry topics."""
        return self.reads(topic) or topic in self.retry_topics

    def writes_dead_letters_to(self, topic: str) -> bool:
        if self.dead_letters is None:
            return False
        before, origin, after = self.dead_letters.topic_for("\0").partition("\0")
        if not origin:
            return topic == before
        return (
            topic.startswith(before) and topic.endswith(after) and self.reads(topic[len(before) :].removesuffix(after))
        )


RunningConsumers = Mapping[str, RunningConsumer]
"""The consumers of this process by name; they may change at any time."""


def find_consumer(consumers: Iterable[RunningConsumer], kind: str, name: str) -> RunningConsumer | None:
    """Return the `consumer` or `function` of a name; the name of a function alone selects its first trigger."""
    if kind == "consumer":
        return next((each for each in consumers if each.kind == "reactive" and each.name == name), None)
    functions = [each for each in consumers if kind == "function" and each.kind == "function"]
    by_name = (each for each in functions if each.name == name)
    return next(by_name, None) or next((each for each in functions if each.function == name), None)


def groups_of(consumers: Iterable[RunningConsumer], others: Mapping[str, GroupTopics]) -> dict[str, GroupTopics]:
    """Return other groups and those of consumers, each with its topics."""
    found = dict(others)
    for consumer in consumers:
        known = found.get(consumer.group, GroupTopics(consumer.admin, []))
        topics, partitions = [*known.topics, *consumer.topics], known.partitions.union(consumer.partitions)
        found[consumer.group] = known._replace(topics=topics, partitions=partitions)
        if retries := consumer.retry_pump:
            known = found.get(retries.group, GroupTopics(consumer.admin, []))
            found[retries.group] = known._replace(topics=[*known.topics, *consumer.retry_topics])
    return found
