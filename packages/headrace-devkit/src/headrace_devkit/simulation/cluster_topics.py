"""The topics of one cluster, and the logs of their partitions. Pure: no time passes here, and nothing is sent."""

from collections.abc import Mapping

from headrace_devkit.simulation.partition_log import PartitionLog


class SimulatedTopic:
    """A topic: its partitions and configuration."""

    def __init__(self, name: str, number: int, configs: Mapping[str, str]) -> None:
        self.name = name
        self.id = f"topic-{number}"
        """Another one for each creation of the name."""
        self.configs = dict(configs)
        self.partitions: list[PartitionLog] = []


class ClusterTopics:
    """All topics of a cluster whose brokers have ids from 1 on."""

    def __init__(self, brokers: int = 1) -> None:
        self.ids = list(range(1, brokers + 1))
        self.topics: dict[str, SimulatedTopic] = {}
        self._topics_made = 0

    def is_up(self, broker: int) -> bool:
        """Whether a broker may lead partitions."""
        return broker in self.ids

    def create_topic(self, name: str, partitions: int = 1, configs: Mapping[str, str] | None = None) -> SimulatedTopic:
        """Create a topic that does not exist, with a replica on each broker."""
        self._topics_made += 1
        topic = self.topics[name] = SimulatedTopic(name, self._topics_made, configs or {})
        self.add_partitions(name, partitions)
        return topic

    def add_partitions(self, name: str, total: int) -> None:
        """Let a topic have this many partitions; it never has fewer."""
        topic = self.topics[name]
        for partition in range(len(topic.partitions), total):
            first = partition % len(self.ids)
            log = PartitionLog(name, partition, self.ids[first:] + self.ids[:first])
            if not self.is_up(log.replicas[0]):
                log.leader = next((broker for broker in log.replicas if self.is_up(broker)), None)
            topic.partitions.append(log)

    def delete_topic(self, name: str) -> None:
        del self.topics[name]

    def log(self, topic: str, partition: int) -> PartitionLog | None:
        """Return the log of a partition; None if it does not exist."""
        found = self.topics.get(topic)
        return found.partitions[partition] if found and 0 <= partition < len(found.partitions) else None
