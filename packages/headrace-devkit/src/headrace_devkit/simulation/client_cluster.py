"""What a client knows of the cluster: its connections, topics with leaders, and which brokers fail."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from confluent_kafka import KafkaError

from headrace_devkit.simulation.brokers import Answered, BrokerConnection, Brokers
from headrace_devkit.simulation.world import Machine

_RETRY_SECONDS = 0.1
"""librdkafka's `retry.backoff.ms`."""


class TopicMetadata(NamedTuple):
    """A topic, as a client knows it."""

    id: str
    leaders: tuple[int | None, ...]
    read_at: float


class ClientCluster:
    """The cluster, as one client sees it."""

    def __init__(self, brokers: Brokers, machine: Machine, failed: Callable[[KafkaError], None]) -> None:
        """Prepare; `failed` gets the errors of connections."""
        self.brokers = brokers
        self.machine = machine
        self.world = brokers.world
        self.topics: dict[str, TopicMetadata] = {}
        self.is_closed = False
        self._failed = failed
        self._connections: dict[tuple[int, str], BrokerConnection] = {}
        self._down: dict[int, None] = {}
        """Brokers that were not reached last; there is one error for each time."""

    def connection(self, broker: int, purpose: str = "") -> BrokerConnection:
        """Return the connection to a broker; that to the coordinator is one of its own, as in librdkafka."""
        key = broker, purpose
        if key not in self._connections:
            self._connections[key] = self.brokers.connect(self.machine, broker)
        return self._connections[key]

    def send(
        self, broker: int, call: Callable[[], Any], answered: Answered, purpose: str = "", seconds: float = 60.0
    ) -> None:
        """Send a request; `answered` gets its response, unless the client is closed."""

        def received(response: Any) -> None:
            self._heard(broker, response)
            if not self.is_closed:
                answered(response)

        self.connection(broker, purpose).send(call, received, seconds)

    def send_to_any(self, call: Callable[[int], Any], answered: Answered, seconds: float = 60.0) -> None:
        """Send a request to a broker that takes connections; fail with `_TRANSPORT` if there is none."""
        broker = self.brokers.any_up()
        if broker is not None:
            self.send(broker, functools.partial(call, broker), answered, seconds=seconds)
            return
        for one in self.brokers.ids:
            self._heard(one, KafkaError(KafkaError._TRANSPORT))
        fail = functools.partial(answered, KafkaError(KafkaError._TRANSPORT))
        self.after(_RETRY_SECONDS, lambda: self.is_closed or fail())

    def after(self, seconds: float, call: Callable[[], object]) -> Any:
        """Call later, on this client's machine."""
        return self.world.call_later(seconds, call, self.machine)

    def refresh(self, topics: Iterable[str] | None, then: Callable[[KafkaError | None], object]) -> None:
        """Ask for topics, or for all of them."""
        names = None if topics is None else list(topics)

        def answered(response: Any) -> None:
            if isinstance(response, KafkaError):
                then(response)
                return
            for name in [*self.topics] if names is None else names:
                if name not in response:
                    self.topics.pop(name, None)
            now = self.world.now
            self.topics.update(
                {name: TopicMetadata(number, leaders, now) for name, (number, leaders) in response.items()}
            )
            then(None)

        self.send_to_any(lambda _broker: self._describe(names), answered)

    def refresh_every(self, seconds: float) -> None:
        """Ask for the known topics again and again, so that new partitions are found."""

        def again() -> None:
            if not self.is_closed:
                self.after(seconds, again)
                if self.topics:
                    self.refresh([*self.topics], lambda _error: None)

        self.after(seconds, again)

    def leader(self, topic: str, partition: int) -> int | None:
        """Return the leader that this client knows."""
        found = self.topics.get(topic)
        return found.leaders[partition] if found and partition < len(found.leaders) else None

    def count(self, topic: str) -> int:
        """Return how many partitions a topic has, 0 if it is not known."""
        return len(self.topics[topic].leaders) if topic in self.topics else 0

    def close(self) -> None:
        self.is_closed = True
        for connection in self._connections.values():
            connection.close()

    def _describe(self, names: list[str] | None) -> dict[str, tuple[str, tuple[int | None, ...]]]:
        known = self.brokers.topics
        return {
            name: (known[name].id, tuple(log.leader for log in known[name].partitions))
            for name in (known if names is None else names)
            if name in known
        }

    def _heard(self, broker: int, response: Any) -> None:
        if not (isinstance(response, KafkaError) and response.code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)):
            self._down.pop(broker, None)
            return
        if broker in self._down or self.is_closed:
            return
        self._down[broker] = None
        self._failed(KafkaError(KafkaError._TRANSPORT, f"broker-{broker}: Connect to broker failed"))
        if len(self._down) == len(self.brokers.ids):
            count = len(self.brokers.ids)
            self._failed(KafkaError(KafkaError._ALL_BROKERS_DOWN, f"{count}/{count} brokers are down"))
