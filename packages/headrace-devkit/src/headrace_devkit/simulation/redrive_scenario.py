"""The scenario of a redrive: whole processes push to a backend that refuses, then send the dead letters back.

While the job runs, its processes are killed and paused. In the end it is done, and each dead letter is back in its
topic: at least once, and exactly once where that is requested.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.http_client import send_json
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction, SimulatedBackend
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import EPOCH_SECONDS, Machine, World

TOPIC, DEAD_LETTERS, GROUP = "orders", "orders.dlq", "push"
_PARTITIONS = 2
_FAILING = 4
"""One in this many records fails."""
_FAILING_SECONDS = 120.0
_JOB_SECONDS = 300.0
_RETRY_SECONDS = 0.5
_FINISHED = ("done", "failed", "stopped")


class RedriveChoices(NamedTuple):
    """What a seed decides."""

    processes: int
    brokers: int
    records: int
    kills: int
    pauses: int
    broker_kills: int
    rate: float
    """Records per second of the redrive."""
    is_exactly_once: bool

    @classmethod
    def of(cls, chance: random.Random) -> "RedriveChoices":
        return cls(
            processes=chance.choice((1, 2)),
            brokers=chance.choice((1, 3)),
            records=chance.choice((40, 400)),
            kills=chance.choice((0, 1, 3)),
            pauses=chance.choice((0, 0, 1, 2)),
            broker_kills=chance.choice((0, 0, 1)),
            rate=chance.choice((5.0, 20.0, 1000.0)),
            is_exactly_once=chance.choice((True, False)),
        )


class RedriveRun:
    """The processes, their backend, the job, the faults, and the checks."""

    def __init__(self, world: World, options: RedriveChoices) -> None:
        self._world = world
        self._options = options
        self.kafka = SimulatedKafka(world, options.brokers)
        for topic in (TOPIC, DEAD_LETTERS):
            self.kafka.brokers.create_topic(topic, _PARTITIONS)
        self._backend = SimulatedBackend(self.kafka.network, "backend", self._decide)
        self._processes = [
            SimulatedProcess(self.kafka.network, f"headrace-{number}", configuration(self._settings(number)))
            for number in range(options.processes)
        ]
        self._refuses = True
        self._dead_letters = range(0, options.records, _FAILING)
        """The values that the backend refuses: not so many that its breaker opens."""
        self._job: dict[str, Any] = {}

    def _settings(self, number: int) -> dict[str, Any]:
        push = {
            "topics": [TOPIC],
            "group": GROUP,
            "backend": {"url": self._backend.url, "mode": "results"},
            "retry": {"attempts": 1},
        }
        return {
            "kafka": {"bootstrap_servers": "kafka:9092"},
            "http": {"port": self._port(number)},
            "reactive_consumers": {GROUP: push},
        }

    @staticmethod
    def _port(number: int) -> int:
        return 8080 + number

    def _decide(self, _process: Machine, records: Sequence[Arrived]) -> BackendAction:
        bad = {index for index, one in enumerate(records) if self._refuses and one.value in self._dead_letters}
        return BackendAction(0.005, frozenset(bad))

    # The job ---------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Run all of it, with its checks."""
        with self.kafka.installed():
            for process in self._processes:
                process.start()
            for number in range(self._options.records):
                self._write(number)
            if not self._world.run_until(self._have_failed, _FAILING_SECONDS):
                self._world.problem("DEAD_LETTERS", f"dead letters: {self._counts(DEAD_LETTERS)}")
            self._refuses = False
            client = self.kafka.machine("client")
            client.loop.start(self._redrive(), self._ended)
            self._break_things()
            if not self._world.run_until(lambda: self._job.get("state") in _FINISHED, _JOB_SECONDS):
                self._world.problem("LIVENESS", f"the job is not done, long after all faults: {self._job}")
            self._world.run(15.0)
        self._check()

    def _write(self, number: int) -> None:
        log = self.kafka.brokers.log(TOPIC, number % _PARTITIONS)
        assert log
        log.append([UnwrittenRecord(None, json.dumps(number).encode(), (), int(EPOCH_SECONDS * 1000))])

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self._world.problem("client-died", f"{type(cause).__name__}: {cause}")

    async def _redrive(self) -> None:
        """Start the job, and look at it until it is finished. A request without a response may have started it."""
        options = self._options
        body = {"rate": options.rate, "exactlyOnce": options.is_exactly_once}
        while not self._job:
            status, response = await self._send("POST", f"/adm/dead-letters/{DEAD_LETTERS}/redrive", body)
            if status == 202:
                self._job = response
            elif status in (0, 409):  # it may have begun
                await self._find()
            elif status not in (429, 503, 504):
                self._world.problem("STATUS", f"redrive: {status} {response}")
                return
            await asyncio.sleep(_RETRY_SECONDS)
        while self._job.get("state") not in _FINISHED:
            await asyncio.sleep(_RETRY_SECONDS)
            status, response = await self._send("GET", f"/adm/jobs/{self._job['id']}")
            if status == 200:
                self._job = response
        self._world.note("job", self._job["state"])

    async def _find(self) -> None:
        status, response = await self._send("GET", "/adm/jobs")
        if status == 200 and response["jobs"]:
            self._job = response["jobs"][0]

    async def _send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        number = self._world.random.randrange(self._options.processes)
        host = self._processes[number].machine.host
        return await send_json(host, self._port(number), method, path, body)

    # Faults ----------------------------------------------------------------------------------------------------------

    def _break_things(self) -> None:
        options, chance = self._options, self._world.random
        longest = 5.0 + len(self._dead_letters) / options.rate
        for count, fault in (
            (options.kills, self._kill),
            (options.pauses, self._pause),
            (options.broker_kills, self._kill_broker),
        ):
            for _ in range(count):
                self._world.call_later(chance.uniform(0.0, longest), fault)

    def _kill(self) -> None:
        process = self._world.random.choice(self._processes)
        if process.running:
            process.kill()
            self._world.call_later(self._world.random.uniform(0.1, 5.0), process.start)

    def _pause(self) -> None:
        chance = self._world.random
        process = chance.choice(self._processes)
        if process.running:
            process.pause(chance.choice((1.0, 15.0)))

    def _kill_broker(self) -> None:
        chance = self._world.random
        self.kafka.restart_broker(chance.choice(self.kafka.brokers.ids), chance.uniform(1.0, 10.0))

    # Checks ----------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._job.get("state") != "done":
            self._world.problem("JOB", f"{self._job.get('state')}: {self._job.get('message')}")
        counts = self._counts(TOPIC)
        for number in self._dead_letters:
            back = counts.get(number, 0) - 1
            if back < 1 or (self._options.is_exactly_once and back != 1):
                self._world.problem("BACK", f"dead letter {number} is back {back} times")

    def _have_failed(self) -> bool:
        return self._counts(DEAD_LETTERS).keys() == {*self._dead_letters}

    def _counts(self, topic: str) -> dict[int, int]:
        """Return how often each value is visible in a topic."""
        found: dict[int, int] = {}
        for partition in range(_PARTITIONS):
            log = self.kafka.brokers.log(topic, partition)
            fetched = log.fetch(0, 1_000_000, committed_only=True) if log else None
            for record in fetched.records if fetched else ():
                number = json.loads(record.value or b"-1")
                found[number] = found.get(number, 0) + 1
        return found


def redriving(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = RedriveChoices.of(world.random)
    RedriveRun(world, options).go()
    return options
