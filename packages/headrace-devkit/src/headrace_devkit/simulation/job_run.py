"""What scenarios of jobs share: processes that push to a backend, a job that a client starts, and faults while it runs.

In the beginning the records are pushed. The client starts the job over HTTP, and looks at it until it is finished.
"""

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.http_client import send_json
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.simulated_backend import Arrived, BackendAction, SimulatedBackend
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import EPOCH_SECONDS, Machine, World

TOPIC, GROUP = "orders", "push"
PARTITIONS = 2
_PUSH_SECONDS = 120.0
_JOB_SECONDS = 300.0
_RETRY_SECONDS = 0.5
_FINISHED = ("done", "failed", "stopped")


class JobChoices(NamedTuple):
    """What a seed decides of a run."""

    processes: int
    brokers: int
    records: int
    kills: int
    pauses: int
    broker_kills: int
    rate: float
    """Records per second of the job."""

    @classmethod
    def of(cls, chance: random.Random) -> "JobChoices":
        return cls(
            processes=chance.choice((1, 2)),
            brokers=chance.choice((1, 3)),
            records=chance.choice((40, 400)),
            kills=chance.choice((0, 1, 3)),
            pauses=chance.choice((0, 0, 1, 2)),
            broker_kills=chance.choice((0, 0, 1)),
            rate=chance.choice((5.0, 20.0, 1000.0)),
        )


class JobRun(ABC):
    """The processes, their backend, the job, and the faults."""

    def __init__(self, world: World, choices: JobChoices, *topics: str) -> None:
        """Create the topics, and the processes."""
        self.world = world
        self.choices = choices
        self.kafka = SimulatedKafka(world, choices.brokers)
        for topic in (TOPIC, *topics):
            self.kafka.brokers.create_topic(topic, PARTITIONS)
        self._backend = SimulatedBackend(self.kafka.network, "backend", self.decide)
        self._processes = [
            SimulatedProcess(self.kafka.network, f"headrace-{number}", configuration(self._settings(number)))
            for number in range(choices.processes)
        ]
        self.has_begun = False
        """Whether the job may have begun."""
        self.job: dict[str, Any] = {}

    def _settings(self, number: int) -> dict[str, Any]:
        push = {
            "topics": [TOPIC],
            "group": GROUP,
            "backend": {"url": self._backend.url, "mode": "results"},
            "retry": {"attempts": 1},
        }
        return {
            "kafka": {"bootstrap_servers": "kafka:9092"},
            "http": {"port": 8080 + number},
            "reactive_consumers": {GROUP: push},
        }

    @abstractmethod
    def decide(self, process: Machine, records: Sequence[Arrived]) -> BackendAction:
        """Return what the backend does with a request."""

    @abstractmethod
    def request(self) -> tuple[str, dict[str, Any]]:
        """Return path and body of the request that starts the job."""

    @abstractmethod
    def is_pushed(self) -> bool:
        """Whether everything is pushed, so that the job may start."""

    @abstractmethod
    def check(self) -> None:
        """Check what the finished job has done."""

    # The job ---------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """Run all of it, with its checks."""
        with self.kafka.installed():
            for process in self._processes:
                process.start()
            for number in range(self.choices.records):
                self._write(number)
            if not self.world.run_until(self.is_pushed, _PUSH_SECONDS):
                self.world.problem("PUSH", "not everything is pushed")
            self.has_begun = True
            client = self.kafka.machine("client")
            client.loop.start(self._run_job(), self._ended)
            self._break_things()
            if not self.world.run_until(lambda: self.job.get("state") in _FINISHED, _JOB_SECONDS):
                self.world.problem("LIVENESS", f"the job is not done, long after all faults: {self.job}")
            self.world.run(15.0)
        if self.job.get("state") != "done":
            self.world.problem("JOB", f"{self.job.get('state')}: {self.job.get('message')}")
        self.check()

    def _write(self, number: int) -> None:
        log = self.kafka.brokers.log(TOPIC, number % PARTITIONS)
        assert log
        log.append([UnwrittenRecord(None, json.dumps(number).encode(), (), int(EPOCH_SECONDS * 1000))])

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self.world.problem("client-died", f"{type(cause).__name__}: {cause}")

    async def _run_job(self) -> None:
        """Start the job, and look at it until it is finished. A request without a response may have started it."""
        path, body = self.request()
        while not self.job:
            status, response = await self.send("POST", path, body)
            if status == 202:
                self.job = response
            elif status in (0, 409):  # it may have begun
                await self._find()
            elif status not in (429, 503, 504):
                self.world.problem("STATUS", f"{path}: {status} {response}")
                return
            await asyncio.sleep(_RETRY_SECONDS)
        while self.job.get("state") not in _FINISHED:
            await asyncio.sleep(_RETRY_SECONDS)
            await self.look()
        self.world.note("job", self.job["state"])

    async def look(self) -> None:
        """Look at the job."""
        status, response = await self.send("GET", f"/adm/jobs/{self.job['id']}")
        if status == 200:
            self.job = response

    async def _find(self) -> None:
        status, response = await self.send("GET", "/adm/jobs")
        if status == 200 and response["jobs"]:
            self.job = response["jobs"][0]

    async def send(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request to one of the processes."""
        number = self.world.random.randrange(self.choices.processes)
        return await send_json(self._processes[number].name, 8080 + number, method, path, body)

    # Faults ----------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def total(self) -> int:
        """How many records the job has."""

    def _break_things(self) -> None:
        choices, chance = self.choices, self.world.random
        longest = 5.0 + self.total / choices.rate
        for count, fault in (
            (choices.kills, self._kill),
            (choices.pauses, self._pause),
            (choices.broker_kills, self._kill_broker),
        ):
            for _ in range(count):
                self.world.call_later(chance.uniform(0.0, longest), fault)

    def _kill(self) -> None:
        process = self.world.random.choice(self._processes)
        if process.running:
            process.kill()
            self.world.call_later(self.world.random.uniform(0.1, 5.0), process.start)

    def _pause(self) -> None:
        chance = self.world.random
        process = chance.choice(self._processes)
        if process.running:
            process.pause(chance.choice((1.0, 15.0)))

    def _kill_broker(self) -> None:
        chance = self.world.random
        self.kafka.restart_broker(chance.choice(self.kafka.brokers.ids), chance.uniform(1.0, 10.0))

    # What topics show ------------------------------------------------------------------------------------------------

    def counts(self, topic: str) -> dict[int, int]:
        """Return how often each value is visible in a topic."""
        found: dict[int, int] = {}
        for partition in range(PARTITIONS):
            log = self.kafka.brokers.log(topic, partition)
            fetched = log.fetch(0, 1_000_000, committed_only=True) if log else None
            for record in fetched.records if fetched else ():
                number = json.loads(record.value or b"-1")
                found[number] = found.get(number, 0) + 1
        return found
