"""Functions under chance: as in push, and workers that die, hang, answer late or fail; with explicit acknowledgements.

The processes are whole function hosts. A worker is Headrace's own loop on a machine of its own, with a handler that
does what a seed decides.
"""

import contextlib
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from headrace.functions.allocator import worker_of_key
from headrace.functions.sdk import Response
from headrace.records import TopicPartition
from headrace_devkit.simulation.checkers import Rules
from headrace_devkit.simulation.functions_checker import FunctionChecker
from headrace_devkit.simulation.greenlet_threads import sleep
from headrace_devkit.simulation.loaded_run import TOPIC, LoadedRun, drawn
from headrace_devkit.simulation.simulated_children import Child, Children
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.simulated_worker import HANDLER, SimulatedHandler, WorkerAtWork
from headrace_devkit.simulation.world import World

GROUP = "function"
OUTPUT = "results"
_HUNG_SECONDS = 45.0
_ACK_SECONDS = 5.0

WEIGHTS: dict[str, dict[Any, float]] = {
    "ordering": {"partition": 3, "key": 3, "none": 1},
    "allocation": {"pool": 3, "static": 3, "key": 2},
    "workers": {1: 2, 2: 2, 4: 1},
    "acks": {"disable": 4, "enable": 2, "explicitOnly": 2},
    "batch": {0: 4, 3: 1, 20: 1},
    "output": {False: 1, True: 1},
    "delivery": {"at_least_once": 1},
    "timeout": {None: 1, 2.0: 1, 6.0: 2},
    "attempts": {1: 1, 2: 2, 5: 2},
    "max_delay": {0.2: 2, 2.0: 2, 20.0: 1},
    "drain": {1.0: 1, 5.0: 3, 20.0: 1},
    "ack_wait": {0.1: 2, 3.0: 1},
    "retry_topics": {(): 4, (2,): 1},
    "protocol": {"classic": 2, "consumer": 1},
    "partitions": {1: 1, 3: 3, 8: 1},
    "processes": {1: 1, 2: 4, 3: 1},
    "brokers": {1: 1, 3: 2},
    "keys": {1: 1, 5: 3, 100: 1},
    "rate": {1.0: 2, 5.0: 3, 40.0: 1},
    "seconds": {30.0: 2, 60.0: 2},
    "work": {0.002: 3, 0.1: 2, 1.0: 1},
    "bad": {0.0: 1, 0.05: 2, 0.3: 1},
    "deaths": {0.0: 2, 0.01: 2, 0.05: 1},
    "poison": {0.0: 2, 0.02: 2},
    "faults": {0: 1, 3: 3, 8: 2},
}
"""How often each value of an option is drawn."""


class FunctionOptions(NamedTuple):
    """What a seed decides of a run."""

    ordering: str
    allocation: str
    workers: int
    acks: str
    batch: int
    """Records of a call, at most; 0 for one event instead of a list."""
    output: bool
    delivery: str
    timeout: float | None
    attempts: int
    max_delay: float
    drain: float
    """How long a revoked partition waits for its events."""
    ack_wait: float
    retry_topics: tuple[int, ...]
    protocol: str
    partitions: int
    processes: int
    brokers: int
    keys: int
    rate: float
    seconds: float
    work: float
    bad: float
    """Share of the calls that raise."""
    deaths: float
    """Share of the calls at which the worker dies, or hangs."""
    poison: float
    """Share of the records that always fail: they raise, or if workers die at all, end the worker."""
    faults: int

    @classmethod
    def drawn(cls, chance: random.Random, **fixed: Any) -> "FunctionOptions":
        """Draw each option by its weight, apart from those that are fixed."""
        found = cls(**(drawn(chance, WEIGHTS) | fixed))
        if found.delivery == "exactly_once":
            found = found._replace(acks="disable", output=True)
        explicit = found.acks != "disable"
        return found._replace(
            allocation="static" if explicit and found.allocation == "pool" else found.allocation,
            ordering="key" if found.allocation == "key" and found.ordering == "partition" else found.ordering,
            batch=0 if explicit else found.batch,
            retry_topics=() if explicit or found.delivery == "exactly_once" else found.retry_topics,
        )


class HandlerFailed(Exception):
    """What the handler raises."""


class FunctionRun(LoadedRun[FunctionOptions]):
    """One run of a function: its cluster, processes, workers and checker."""

    faults: ClassVar = (*LoadedRun.faults, "worker", "worker", "freeze")
    group = GROUP

    def __init__(self, world: World, options: FunctionOptions) -> None:
        super().__init__(world, options, options.brokers)
        retries = [f"{GROUP}.retry.{delay}s" for delay in options.retry_topics]
        for topic in (TOPIC, OUTPUT, f"{TOPIC}.dlq", *retries):
            self.kafka.brokers.create_topic(topic, options.partitions)
        topics = [TOPIC, *retries, f"{TOPIC}.dlq"]
        rules = Rules(options.ordering, options.attempts, options.drain, topics, 1)
        self.checker: FunctionChecker = FunctionChecker(
            world,
            self.kafka.brokers,
            rules,
            output=OUTPUT if options.output else "",
            acks=options.acks,
            by_key=options.allocation == "key",
            counts=options.acks == "disable" and options.delivery == "at_least_once",
        )
        self.children = Children(world.network)
        self.handler = SimulatedHandler(self.children, self.handle)
        self.handler.begin = self.begin
        self.processes: list[SimulatedProcess] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let processes use the cluster, and read the file of the function."""
        with tempfile.TemporaryDirectory() as folder, self.kafka.installed():
            path = Path(folder) / "function.yaml"
            path.write_text(json.dumps(self.function()))
            for number in range(1, self.options.processes + 1):
                settings = self.settings(number) | {"functions": [str(path)]}
                self.processes.append(self.world.process(configuration(settings), f"headrace-{number}"))
            yield

    def settings(self, number: int) -> dict[str, Any]:
        return {
            "kafka": {"bootstrap_servers": "broker-1:9092"},
            "http": {"port": 8080 + number},
            "drain_seconds": self.options.drain + 5,
        }

    def function(self) -> dict[str, Any]:
        """Return the file of the function."""
        options = self.options
        retry = {"attempts": options.attempts, "max_delay_seconds": options.max_delay, "topics": options.retry_topics}
        consumer = {"group.protocol": options.protocol} if options.protocol == "consumer" else {}
        # In order of keys a record that is alone waits for more of its batch, so the time of that is short.
        batch = {"mode": "enable", "batchSize": options.batch, "timeout": "50ms"}
        attributes = {
            "topics": [TOPIC],
            "consumerGroup": GROUP,
            "workerAllocationMode": options.allocation,
            "maxWaitHandlerDuringRebalance": f"{options.drain}s",
            "ordering": options.ordering,
            "delivery": options.delivery,
            "retry": retry,
            "consumer": {"properties": consumer},
            **({"outputTopic": OUTPUT} if options.output else {}),
        }
        trigger = {
            "kind": "kafka-cluster",
            "numWorkers": options.workers,
            "explicitAckMode": options.acks,
            "waitExplicitAckDuringRebalanceTimeout": f"{options.ack_wait}s",
            "batch": batch if options.batch else {"mode": "disable"},
            "attributes": attributes,
        }
        spec: dict[str, Any] = {"handler": HANDLER, "triggers": {"orders": trigger}}
        if options.timeout:
            spec["eventTimeout"] = f"{options.timeout}s"
        return {"metadata": {"name": "collect"}, "spec": spec}

    # The handler, in a worker

    def begin(self, worker: WorkerAtWork) -> None:
        """Set up a worker; some acknowledge what they have when partitions are released."""
        if self.options.acks != "disable" and self.world.random.random() < 0.5:
            worker.context.platform.set_drain_callback(lambda: self.acknowledge(worker))

    def handle(self, worker: WorkerAtWork, event: Any) -> Any:
        """Behave in a call as its options decide."""
        events = event if isinstance(event, list) else [event]
        if worker.is_busy:
            self.world.problem("BUSY", f"{worker.name} got {events[0].id} during another call")
        worker.is_busy = True
        for one in events:
            self.note("arrived", worker, one, 0)
        chance, options = self.world.random, self.options
        poisoned = any(json.loads(one.body)["poison"] for one in events)
        sleep(0.01 if self.is_healed else options.work * chance.expovariate(1))
        ends = not self.is_healed and chance.random() < options.deaths
        if ends and chance.random() < 0.3:
            sleep(_HUNG_SECONDS)
        elif ends or (poisoned and options.deaths):
            worker.child.end(-9)
        worker.is_busy = False
        if poisoned or (not self.is_healed and chance.random() < options.bad):
            for one in events:
                self.note("refused", worker, one, 500 if len(events) == 1 else 200)
            raise HandlerFailed
        if options.acks != "disable":
            return self.hold(worker, events[0])
        for one in events:
            self.note("taken", worker, one, 200)
        return [one.body for one in events] if options.batch else event.body

    def hold(self, worker: WorkerAtWork, event: Any) -> Response:
        """Succeed, perhaps without completing the record; and perhaps acknowledge what waits for it."""
        chance = self.world.random
        waits = self.options.acks == "explicitOnly" or chance.random() < 0.5
        if waits:
            worker.held.append(event)
        if self.is_healed or chance.random() < 0.3:
            self.acknowledge(worker)
        self.note("taken", worker, event, 200)
        response = Response(body=event.body)
        if waits:
            self.note("held", worker, event)
            response.ensure_no_ack()
        return response

    def acknowledge(self, worker: WorkerAtWork) -> None:
        """Acknowledge what a worker has held; where one completes those before it, only the last of a partition."""
        held, worker.held = worker.held, []
        accepted: set[int] = set()
        for event in sorted(held, key=lambda one: -one.offset):
            if event.shard_id in accepted and self.options.allocation != "key":
                continue
            self.note("acknowledges", worker, event)
            if worker.acknowledge(event):
                self.note("not acknowledged", worker, event)  # it will be called again
            else:
                accepted.add(event.shard_id)

    def note(self, name: str, worker: WorkerAtWork, event: Any, *values: int) -> None:
        self.world.note(name, worker.name, event.topic, event.shard_id, event.offset, *values)

    # Faults

    def _workers_of(self, process: SimulatedProcess) -> list[Child]:
        running = self.children.running.values()
        return [child for child in running if process.running and child.parent is process.machine]

    def _pause(self, process: SimulatedProcess, seconds: float) -> None:
        super()._pause(process, seconds)
        if self.world.random.random() < 0.5:
            for child in self._workers_of(process):
                child.machine.pause(seconds)

    def _worker(self, process: SimulatedProcess, _seconds: float) -> None:
        if workers := self._workers_of(process):
            self.world.random.choice(workers).end(-9)

    def _freeze(self, process: SimulatedProcess, seconds: float) -> None:
        if workers := self._workers_of(process):
            self.world.random.choice(workers).machine.pause(seconds)

    # The end

    def heal(self) -> None:
        super().heal()
        if self.options.acks != "disable":
            self._call_each_worker()

    def _call_each_worker(self) -> None:
        """Write records that each worker is called for, so that it can acknowledge what it has held."""
        if all(process.stopping for process in self.processes):
            return
        for partition in range(self.options.partitions):
            for key in self._keys(partition):
                self.produced += 1
                self.write(partition, key, json.dumps({"id": self.produced, "poison": False}).encode())
        self.world.call_later(_ACK_SECONDS, self._call_each_worker)

    def _keys(self, partition: int) -> list[bytes]:
        """Return a key of each worker that may have had records of a partition."""
        if self.options.allocation != "key":
            return [b"k"]
        keys = [b"last-%d" % number for number in range(20 * self.options.workers)]
        found = {worker_of_key(key, TopicPartition(TOPIC, partition), self.options.workers): key for key in keys}
        return [*found.values()]


def functions(world: World) -> FunctionOptions:
    """Run functions with the options of its seed."""
    options = FunctionOptions.drawn(world.random)
    world.note("options", str(options))
    run = FunctionRun(world, options)
    with run.installed():
        run.run()
    return options
