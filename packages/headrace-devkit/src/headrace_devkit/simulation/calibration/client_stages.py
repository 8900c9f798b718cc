"""Where a script of producers and administrators runs: a thread of a world, or this process with a real broker.

Both hand out clients with the same methods, and keep what the script notes: that is its trace.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.kafka.client.error_map import ClientErrors
from headrace_devkit.devcluster import Cluster
from headrace_devkit.simulation.administration_client import AdministrationClient
from headrace_devkit.simulation.broker_transactions import BrokerTransactions
from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.consumer_client import SimulatedConsumer
from headrace_devkit.simulation.greenlet_threads import sleep
from headrace_devkit.simulation.group_coordinator import GroupCoordinators
from headrace_devkit.simulation.simulated_producer import SimulatedProducer
from headrace_devkit.simulation.world import World
from headrace_devkit.testing.proxy import END_TRANSACTION, OFFSETS_IN_TRANSACTION, PRODUCE, FaultProxy

_LIMIT_SECONDS = 600.0
_KINDS = {"Produce": PRODUCE, "TxnOffsetCommit": OFFSETS_IN_TRANSACTION, "EndTxn": END_TRANSACTION}
PRODUCER = {
    "acks": "all",
    "delivery.timeout.ms": 4000,
    "enable.idempotence": True,
    "linger.ms": 1,
    "partitioner": "murmur2_random",
    "socket.timeout.ms": 3000,
}
_NAMES = {value: name for name, value in vars(KafkaError).items() if isinstance(value, int) and name.isupper()}


def name_of(error: Any) -> str:
    """Return the name of an error, with what else it says of itself."""
    if error is None:
        return "ok"
    flags = {"fatal": error.fatal(), "retriable": error.retriable(), "abort": error.txn_requires_abort()}
    return " ".join([_NAMES.get(error.code(), str(error.code())), *(name for name, is_set in flags.items() if is_set)])


def outcome_of(call: Callable[[], Any]) -> str:
    """Return how a call ended: its error, or its result."""
    try:
        with ClientErrors():
            result = call()
    except KafkaException as cause:
        return name_of(cause.args[0])
    except (BufferError, ValueError, TypeError) as cause:
        return type(cause).__name__
    return "ok" if result is None else str(result)


class ClientStage(ABC):
    """Clients, brokers and time of one script."""

    def __init__(self) -> None:
        self.trace: list[str] = []
        self._admin: Any = None
        self.unique = uuid.uuid4().hex[:8]
        self._topics = 0

    def note(self, what: str, *values: Any) -> None:
        """Add a line to the trace."""
        self.trace.append(" ".join([what, *map(str, values)]))

    def call(self, what: str, call: Callable[[], Any]) -> None:
        """Add a line with how a call ended."""
        self.note(what, outcome_of(call))

    def topic(self, partitions: int = 1, **configs: str) -> str:
        """Make a topic."""
        self._topics += 1
        name = f"t-{self.unique}-{self._topics}"
        self.create(name, partitions, **configs)
        return name

    def create(self, name: str, partitions: int = 1, **configs: str) -> None:
        dotted = {key.replace("_", "."): value for key, value in configs.items()}
        self.admin().create_topics([NewTopic(name, partitions, 1, config=dotted)])[name].result(20)

    def produce(
        self, client: Any, topic: str, values: Sequence[Any], partition: int = 0, keys: Sequence[Any] | None = None
    ) -> list[str]:
        """Hand over records, and return the list that gets their reports in the order of the records."""
        reports = ["none"] * len(values)

        def report_at(index: int) -> Callable[[Any, Any], None]:
            def report(error: Any, message: Any) -> None:
                reports[index] = name_of(error) if error else f"{message.partition()}@{message.offset()}"

            return report

        for index, value in enumerate(values):
            key = keys[index] if keys else None
            try:
                client.produce(topic, value, key, partition, report_at(index))
            except (KafkaException, BufferError) as cause:
                error = cause.args[0] if isinstance(cause, KafkaException) else None
                reports[index] = f"refused {name_of(error) if error else type(cause).__name__}"
        return reports

    def write(self, what: str, client: Any, topic: str, values: Sequence[Any], partition: int = 0) -> None:
        """Write records and note their reports."""
        reports = self.produce(client, topic, values, partition)
        self.call(f"{what} flush", lambda: client.flush(20))
        self.note(what, reports)

    def transactional(self, name: str, **config: Any) -> Any:
        return self.producer(transactional_id=f"{name}-{self.unique}", transaction_timeout_ms=20_000, **config)

    def read(self, topic: str, isolation: str = "read_committed", partition: int = 0) -> list[Any]:
        """Return what a reader gets up to the end of a partition."""
        reader = self.consumer(
            group_id="reader",
            auto_offset_reset="earliest",
            isolation_level=isolation,
            enable_partition_eof=True,
            enable_auto_commit=False,
        )
        reader.assign([TopicPartition(topic, partition, 0)])
        found: list[Any] = []
        end = self.now() + 20
        while self.now() < end:
            message = reader.poll(1)
            if message is not None and message.error():
                assert message.error().code() == KafkaError._PARTITION_EOF, message.error()
                break
            if message is not None:
                found.append(message.value().decode())
        reader.close()
        return found

    @abstractmethod
    def producer(self, **config: Any) -> Any: ...

    @abstractmethod
    def consumer(self, **config: Any) -> Any: ...

    def admin(self) -> Any:
        """Return an administrator; its requests end with it, so it is kept."""
        if self._admin is None:
            self._admin = self.administrator()
        return self._admin

    @abstractmethod
    def administrator(self) -> Any: ...

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...

    @abstractmethod
    def kill_broker(self) -> None: ...

    @abstractmethod
    def start_broker(self) -> None: ...

    @abstractmethod
    def stall_broker(self) -> None:
        """Stop the broker as SIGSTOP does."""

    @abstractmethod
    def unstall_broker(self) -> None: ...

    @abstractmethod
    def delay(self, kind: str) -> None:
        """Close the connection of the next request of a kind, which arrives later."""

    @abstractmethod
    def deliver(self) -> None:
        """Let it arrive."""


def _dotted(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "."): value for key, value in config.items()}


class ModelClients(ClientStage):
    """A world with one broker."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.world = World(seed)
        configs = {
            "broker.session.timeout.ms": 3000,
            "offsets.topic.num.partitions": 4,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
            "transaction.state.log.num.partitions": 4,
            "group.initial.rebalance.delay.ms": 0,
        }
        self._brokers = Brokers(self.world, 1, configs=configs)
        self._groups = GroupCoordinators(self._brokers)
        self._transactions = BrokerTransactions(self._brokers, self._groups.offsets, self._groups.check_transaction)

    def run(self, script: Callable[[ClientStage], None]) -> list[str]:
        """Run a script on a thread, and return its trace."""
        ended: list[int] = []

        def main() -> None:
            script(self)
            ended.append(1)

        self.world.machine("script").start_thread(main, "main")
        assert self.world.run_until(lambda: ended or self.world.problems, _LIMIT_SECONDS), self.trace
        assert not self.world.problems, (self.world.problems, self.trace)
        return self.trace

    def producer(self, **config: Any) -> Any:
        return SimulatedProducer(self._brokers, self._transactions, {**PRODUCER, **_dotted(config)})

    def consumer(self, **config: Any) -> Any:
        return SimulatedConsumer(self._brokers, self._groups, _dotted(config))

    def administrator(self) -> Any:
        return AdministrationClient(self._brokers, self._groups, {})

    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        sleep(seconds)

    def kill_broker(self) -> None:
        self._brokers.kill(1)

    def start_broker(self) -> None:
        self._brokers.start(1)

    def stall_broker(self) -> None:
        self._brokers.machine(1).pause(100_000)

    def unstall_broker(self) -> None:
        machine = self._brokers.machine(1)
        machine._paused_until = self.world.now
        machine._continue()

    def delay(self, kind: str) -> None:
        self._transactions.late.hold(kind)

    def deliver(self) -> None:
        self._transactions.late.deliver()


class RealClients(ClientStage):
    """A real broker, and the clients of the library."""

    def __init__(self, cluster: Cluster, proxy: FaultProxy | None = None) -> None:
        """Prepare; a script that delays requests needs a `proxy`."""
        super().__init__()
        self._cluster = cluster
        self._proxy = proxy
        self._common: dict[str, Any] = {"bootstrap.servers": (proxy or cluster).bootstrap_servers, "log_level": 0}

    def run(self, script: Callable[[ClientStage], None]) -> list[str]:
        """Run a script, and return its trace."""
        script(self)
        self._admin = None  # it would connect for ever to a proxy that stops
        return self.trace

    def producer(self, **config: Any) -> Any:
        return confluent_kafka.Producer({**self._common, **PRODUCER, **_dotted(config)})

    def consumer(self, **config: Any) -> Any:
        return confluent_kafka.Consumer({**self._common, **_dotted(config)})

    def administrator(self) -> Any:
        return AdminClient(self._common)

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def kill_broker(self) -> None:
        self._cluster.kill(1)

    def start_broker(self) -> None:
        self._cluster.restart(1)

    def stall_broker(self) -> None:
        self._cluster.pause(1)
        time.sleep(0.3)  # its threads stop one after the other

    def unstall_broker(self) -> None:
        self._cluster.resume(1)

    def delay(self, kind: str) -> None:
        assert self._proxy
        self._proxy.delay(_KINDS[kind])

    def deliver(self) -> None:
        assert self._proxy
        self._proxy.deliver()
