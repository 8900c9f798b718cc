"""The brokers of a run: topics and their leaders, and how a request reaches a broker and its response comes back.

A broker is a machine. Connections behave as TCP does: what is sent while the network is cut arrives later, in order.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.cluster_topics import ClusterTopics
from headrace_devkit.simulation.partition_log import PartitionLog
from headrace_devkit.simulation.world import Machine, World

Answered = Callable[[Any], object]
"""Gets what the broker responds, or a `KafkaError`, on the client's machine."""
OFFSETS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
_DELAY_SECONDS = (0.0002, 0.003)
"""One way, from the least to the most."""
_SLOW = 0.03
"""Which part of all is slower, as on a busy network or broker."""
_SLOW_SECONDS = (0.003, 0.2)
_TIMEOUT_SECONDS = 60.0
"""librdkafka's `socket.timeout.ms`."""
_RETRANSMIT_SECONDS = 0.2
_MOST_RETRANSMIT_SECONDS = 5.0


class Later:
    """A response that comes later: a call returns it, and `respond` is called once."""

    def __init__(self) -> None:
        self._responses: list[Any] = []
        self._then: Answered | None = None

    @property
    def is_done(self) -> bool:
        return bool(self._responses)

    def respond(self, response: Any) -> None:
        if self._responses:
            return
        self._responses.append(response)
        if self._then:
            self._then(response)

    def then(self, call: Answered) -> None:
        """Call with the response, at once if it is there."""
        self._then = call
        if self._responses:
            call(self._responses[0])


class _Exchange:
    """A request and its response."""

    __slots__ = ("answered", "call", "is_done", "timer")

    def __init__(self, call: Callable[[], Any], answered: Answered) -> None:
        self.call = call
        self.answered = answered
        self.is_done = False
        self.timer: Any = None


class BrokerConnection:
    """A client's connection to a broker. The broker serves one request at a time, in order, as Kafka does.

    So a commit waits behind a request to join that Kafka does not respond to yet. Source: Apache Kafka, `SocketServer`
    mutes a channel until the response is sent.
    """

    def __init__(self, brokers: "Brokers", client: Machine, broker: int) -> None:
        self.broker = broker
        self._brokers = brokers
        self._world = brokers.world
        self._client = client
        # Since it was opened
        self._open: list[_Exchange] = []
        self._sent: deque[Callable[[], object]] = deque()
        """Requests that have not got through, and what lets each arrive."""
        self._arrived: deque[_Exchange] = deque()
        self._is_serving = False
        self._responses: deque[Callable[[], object]] = deque()
        """Responses that have not got through, and what lets each be received."""
        self._last_arrival = 0.0
        self._number = 0
        """Of the connection to the broker: a response of an earlier one is not received."""

    def send(self, call: Callable[[], Any], answered: Answered, timeout_seconds: float = _TIMEOUT_SECONDS) -> None:
        """Send a request: `call` runs on the broker, and `answered` gets its result here."""
        exchange = _Exchange(call, answered)
        if not self._brokers.is_up(self.broker):
            delay = self._brokers.delay()
            self._world.call_later(delay, functools.partial(self._fail, exchange, _transport()), self._client)
            return
        self._open.append(exchange)
        self._brokers.opened(self)
        timeout = functools.partial(self._timed_out, exchange)
        exchange.timer = self._world.call_later(timeout_seconds, timeout, self._client)
        self._last_arrival = max(self._last_arrival, self._world.now + self._brokers.delay())
        machine = self._brokers.machine(self.broker)
        arrive = functools.partial(self._arrive, exchange, machine, self._number)
        self._sent.append(lambda: self._world.call_at(max(self._last_arrival, self._world.now), arrive, machine))
        if len(self._sent) == 1:
            self._pass_on(self._sent, self._client, machine)

    def close(self) -> None:
        """Drop it: no response of what is open is received any more."""
        for exchange in self._open:
            exchange.is_done = True
            exchange.timer.cancel()
        self._restart()

    def broken(self) -> None:
        """Fail what is open, because the broker has ended."""
        failed = self._open[:]
        self._restart()
        for exchange in failed:
            delay = self._brokers.delay()
            self._world.call_later(delay, functools.partial(self._fail, exchange, _transport()), self._client)

    def _restart(self) -> None:
        self._open.clear()
        self._sent.clear()
        self._arrived = deque()
        self._responses.clear()
        self._is_serving = False
        self._number += 1
        self._brokers.closed(self)

    def _pass_on(
        self, waiting: deque[Callable[[], object]], source: Machine, target: Machine, pause: float = _RETRANSMIT_SECONDS
    ) -> None:
        """Let what one side has sent get through in its order; try again and again while the network is cut."""
        if source.sends() and target.receives():
            while waiting:
                waiting.popleft()()
        elif waiting and source.alive and target.alive:
            longer = min(2 * pause, _MOST_RETRANSMIT_SECONDS)
            self._world.call_later(pause, lambda: self._pass_on(waiting, source, target, longer))

    def _arrive(self, exchange: _Exchange, machine: Machine, number: int) -> None:
        if number != self._number:  # the client is gone, and the broker does what has arrived nevertheless
            _result(exchange)
            return
        self._arrived.append(exchange)
        self._serve(machine, number)

    def _serve(self, machine: Machine, number: int) -> None:
        while self._arrived and not self._is_serving and number == self._number:
            exchange = self._arrived.popleft()
            self._is_serving = True
            result = _result(exchange)
            served = functools.partial(self._served, exchange, machine, number)
            if isinstance(result, Later):
                result.then(served)
            else:
                served(result)

    def _served(self, exchange: _Exchange, machine: Machine, number: int, response: Any) -> None:
        if number != self._number or not machine.alive:
            return
        self._is_serving = False
        received = functools.partial(self._received, exchange, response)
        self._responses.append(lambda: self._world.call_later(self._brokers.delay(), received, self._client))
        if len(self._responses) == 1:
            self._pass_on(self._responses, machine, self._client)
        if self._arrived:
            self._world.call_later(0, functools.partial(self._serve, machine, number), machine)

    def _received(self, exchange: _Exchange, response: Any) -> None:
        if exchange in self._open:
            self._open.remove(exchange)
            if not self._open:
                self._brokers.closed(self)
            exchange.timer.cancel()
            self._fail(exchange, response)

    def _timed_out(self, exchange: _Exchange) -> None:
        """Close the connection, as librdkafka does; what else is open fails with it."""
        failed = self._open[:]
        self._restart()
        for one in failed:
            code = KafkaError._TIMED_OUT if one is exchange else KafkaError._TRANSPORT
            one.timer.cancel()
            self._fail(one, KafkaError(code))

    def _fail(self, exchange: _Exchange, response: Any) -> None:
        if not exchange.is_done:
            exchange.is_done = True
            if exchange.timer:
                exchange.timer.cancel()
            exchange.answered(response)


class Brokers(ClusterTopics):
    """All brokers of one cluster, with ids from 1 on."""

    def __init__(self, world: World, count: int = 1, *, configs: Mapping[str, float] | None = None) -> None:
        super().__init__(count)
        self.world = world
        self.configs: dict[str, float] = {
            "broker.session.timeout.ms": 9000,
            "offsets.topic.num.partitions": 50,
            "transaction.state.log.num.partitions": 50,
            **(configs or {}),
        }
        self.on_moved: list[Callable[[str, int], None]] = []
        """Called with topic and partition when another broker has become the leader."""
        self._machines = {broker: world.machine(f"broker-{broker}") for broker in self.ids}
        self._starts = dict.fromkeys(self.ids, 1)
        self._connections: dict[int, dict[BrokerConnection, None]] = {broker: {} for broker in self.ids}
        for topic, name in ((OFFSETS_TOPIC, "offsets.topic"), (TRANSACTIONS_TOPIC, "transaction.state.log")):
            self.create_topic(topic, int(self.configs[f"{name}.num.partitions"]))

    # Requests --------------------------------------------------------------------------------------------------------

    def request(
        self,
        machine: Machine,
        broker: int,
        call: Callable[[], Any],
        answered: Answered,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> None:
        """Send one request that waits for no other one; see `BrokerConnection.send`.

        `call` returns the response, or a `Later`; a `KafkaException` that it raises is answered as its `KafkaError`.
        If the broker is down, or ends before it responds, that is `_TRANSPORT`; after the time limit, `_TIMED_OUT`.
        """
        BrokerConnection(self, machine, broker).send(call, answered, timeout_seconds)

    def connect(self, machine: Machine, broker: int) -> BrokerConnection:
        """Return a connection whose requests are served in order; it opens again by itself when it breaks."""
        return BrokerConnection(self, machine, broker)

    def delay(self) -> float:
        """Return how long something sent now takes."""
        chance = self.world.random
        return chance.uniform(*(_SLOW_SECONDS if chance.random() < _SLOW else _DELAY_SECONDS))

    def opened(self, connection: BrokerConnection) -> None:
        self._connections[connection.broker][connection] = None

    def closed(self, connection: BrokerConnection) -> None:
        self._connections[connection.broker].pop(connection, None)

    # Brokers ---------------------------------------------------------------------------------------------------------

    def machine(self, broker: int) -> Machine:
        return self._machines[broker]

    def is_up(self, broker: int) -> bool:
        return self._machines[broker].alive

    def any_up(self) -> int | None:
        """Return a broker that takes requests, by chance; None if there is none."""
        up = [broker for broker in self.ids if self.is_up(broker)]
        return self.world.random.choice(up) if up else None

    def stop(self, broker: int) -> None:
        """Stop a broker in order: its partitions get other leaders first."""
        self._move_from(broker)
        self._end(broker)

    def kill(self, broker: int) -> None:
        """End a broker at once: its partitions get other leaders when its session is over."""
        self._end(broker)
        starts = self._starts[broker]
        seconds = self.configs["broker.session.timeout.ms"] / 1000

        def expired() -> None:
            if self._starts[broker] == starts:
                self._move_from(broker)

        self.world.call_later(seconds, expired)

    def start(self, broker: int) -> None:
        """Start a broker that was stopped or killed; it leads what has no leader."""
        if self.is_up(broker):
            return
        self._starts[broker] += 1
        self._machines[broker] = self.world.machine(f"broker-{broker}.{self._starts[broker]}")
        for log in self._logs():
            if log.leader is None or log.leader == broker:
                self._lead(log, broker)

    def _end(self, broker: int) -> None:
        connections, self._connections[broker] = list(self._connections[broker]), {}
        self._machines[broker].kill()
        for connection in connections:
            connection.broken()

    def _move_from(self, broker: int) -> None:
        for log in self._logs():
            if log.leader == broker:
                others = [other for other in log.replicas if other != broker and self.is_up(other)]
                if others:
                    self._lead(log, others[0])
                elif not self.is_up(broker):
                    log.leader = None

    def _lead(self, log: PartitionLog, broker: int) -> None:
        log.leader = broker
        log.leader_epoch += 1
        log.wake()
        for moved in self.on_moved:
            moved(log.topic, log.partition)

    def _logs(self) -> list[PartitionLog]:
        return [log for topic in self.topics.values() for log in topic.partitions]

    # Topics ----------------------------------------------------------------------------------------------------------

    def leader_of(self, topic: str, partition: int) -> int | None:
        """Return the broker that clients send to, which may be down; None without a leader."""
        log = self.log(topic, partition)
        return log.leader if log else None

    def coordinator_of(self, key: str, topic: str = OFFSETS_TOPIC) -> int | None:
        """Return the coordinator of a group, or of a transactional id by the topic of transactions."""
        return self.leader_of(topic, java_hash(key) % len(self.topics[topic].partitions))


def java_hash(text: str) -> int:
    """Return Java's hash of a string, without its sign as Kafka uses it (`Utils.abs`)."""
    found = 0
    for character in text:
        found = (31 * found + ord(character)) & 0xFFFFFFFF
    return found & 0x7FFFFFFF if found < 0x80000000 else (0x100000000 - found) & 0x7FFFFFFF


def _transport() -> KafkaError:
    return KafkaError(KafkaError._TRANSPORT)


def _result(exchange: _Exchange) -> Any:
    try:
        return exchange.call()
    except KafkaException as cause:
        return cause.args[0]
