"""The scenario of produce: whole processes, over HTTP, that fail.

A client sends each request with a key again and again until its response is 200; some requests it leaves before. In the
end each value is in its topic once, where the response says, and no value is there twice. A request without a key is
sent once: what its response says is written is there, and what it says has failed is not.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_devkit.simulation.http_client import send_json
from headrace_devkit.simulation.simulated_kafka import SimulatedKafka
from headrace_devkit.simulation.simulated_process import SimulatedProcess, configuration
from headrace_devkit.simulation.world import World

TOPIC = "orders"
_PORT = 8080
_CLIENTS = 3
_PARTITIONS = 2
_WORK_SECONDS = 60.0
_HEALING_SECONDS = 240.0
_RETRY_SECONDS = 0.3
_PATIENCE = 20.0
_IMPATIENT = 0.1
"""Share of the attempts that a client leaves early."""
_PLAIN = 0.2
"""Share of the requests without a key."""


class KeyOptions(NamedTuple):
    """What a seed decides."""

    brokers: int
    kills: int
    pauses: int
    cuts: int
    broker_kills: int
    late_every_seconds: float
    """About how often a request to Kafka is delayed; 0 for never."""

    @classmethod
    def of(cls, chance: random.Random) -> "KeyOptions":
        return cls(
            brokers=chance.choice((1, 3)),
            kills=chance.choice((0, 1, 3, 6)),
            pauses=chance.choice((0, 0, 2)),
            cuts=chance.choice((0, 1, 3)),
            broker_kills=chance.choice((0, 0, 1, 2)),
            late_every_seconds=chance.choice((0.0, 2.0, 8.0)),
        )


class KeyRun:
    """A process, its clients, the faults, and the checks."""

    def __init__(self, world: World, options: KeyOptions, work_seconds: float = _WORK_SECONDS) -> None:
        """Prepare; there are faults for `work_seconds`."""
        self._world = world
        self._options = options
        self._work_seconds = work_seconds
        self.kafka = SimulatedKafka(world, options.brokers)
        self.kafka.brokers.create_topic(TOPIC, _PARTITIONS)
        settings = {"kafka": {"bootstrap_servers": "kafka:9092"}, "http": {"port": _PORT}}
        self._process = SimulatedProcess(self.kafka.network, "headrace", configuration(settings))
        self.responses: dict[int, tuple[int, int]] = {}
        """Partition and offset, by the value of an answered request."""
        self._plain: set[int] = set()
        """The values that were sent without a key."""
        self._failed: set[int] = set()
        """The values of which a response said that they are not written."""
        self._sent = 0
        self._open = 0
        self._ends = False

    # Clients ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._process.start()
        for number in range(_CLIENTS):
            machine = self.kafka.machine(f"client-{number}")
            machine.loop.start(self._send_all(), self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self._world.problem("client-died", f"{type(cause).__name__}: {cause}")

    async def _send_all(self) -> None:
        self._open += 1
        while not self._ends:
            await asyncio.sleep(self._world.random.uniform(0.0, 0.2))
            count = self._world.random.choice((1, 1, 5))
            numbers = range(self._sent + 1, self._sent + 1 + count)
            self._sent += count
            await self._send(*numbers)
        self._open -= 1

    async def _send(self, *numbers: int) -> None:
        """Send a request with a key until it is answered, or one without a key once."""
        chance = self._world.random
        body: dict[str, Any] = {"records": [{"value": number} for number in numbers]}
        if chance.random() < _PLAIN:
            self._plain.update(numbers)
            self._take(numbers, *await self._request(body, {}))
            return
        headers = {"Idempotency-Key": f'"key-{numbers[0]}"'}
        while True:
            patience = chance.choice((0.003, 0.05)) if chance.random() < _IMPATIENT and not self._ends else _PATIENCE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    if self._take(numbers, *await self._request(body, headers)):
                        return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _request(self, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        return await send_json(self._process.name, _PORT, "POST", f"/producers/{TOPIC}", body, headers)

    def _take(self, numbers: Sequence[int], status: int, response: Any) -> bool:
        """Take a response; return whether all records are written."""
        if status not in (0, 200, 409, 429, 503, 504):
            self._world.problem("STATUS", f"request {numbers}: {status} {response}")
        self._world.note("response", numbers[0], status)
        # Without entries nothing was written, if it is certain at all.
        failed = [{"outcome": "fail"}] * len(numbers) if status in (429, 503) else []
        entries = response["offsets"] if status == 200 else failed
        for number, entry in zip(numbers, entries, strict=False):
            if "offset" in entry:
                self.responses[number] = entry["partition"], entry["offset"]
            elif entry["outcome"] == "fail":
                self._failed.add(number)
        return status == 200 and all("offset" in entry for entry in entries)

    # Faults ----------------------------------------------------------------------------------------------------------

    def break_things(self) -> None:
        options, chance = self._options, self._world.random
        for count, fault in (
            (options.kills, self._kill),
            (options.pauses, lambda: self._process.pause(chance.choice((1.0, 12.0)))),
            (options.cuts, lambda: self._process.cut(chance.uniform(0.5, 8.0))),
            (options.broker_kills, self._kill_broker),
        ):
            for _ in range(count):
                self._world.call_later(chance.uniform(1.0, self._work_seconds), fault)
        if options.late_every_seconds:
            self._hold_one()

    def _kill(self) -> None:
        if self._process.running:
            self._process.kill()
            self._world.call_later(self._world.random.uniform(0.1, 3.0), self._process.start)

    def _kill_broker(self) -> None:
        chance = self._world.random
        self.kafka.restart_broker(chance.choice(self.kafka.brokers.ids), chance.uniform(1.0, 15.0))

    def _hold_one(self) -> None:
        if self._world.now > self._work_seconds:
            return
        chance, late = self._world.random, self.kafka.transactions.late
        late.hold(
            chance.choice(("Produce", "EndTxn")),
            lambda: self._world.call_later(chance.uniform(0.05, 0.4), late.deliver),
        )
        self._world.call_later(chance.expovariate(1 / self._options.late_every_seconds), self._hold_one)

    def go(self) -> None:
        """Run all of it, with its checks."""
        with self.kafka.installed():
            self.start()
            self.break_things()
            self._world.run(self._work_seconds)
            self.end()

    # Checks ----------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Let the clients get their last responses, and check the topic."""
        self._ends = True
        if not self._world.run_until(lambda: not self._open, _HEALING_SECONDS):
            self._world.problem("LIVENESS", "requests are not answered, long after all faults")
        self._world.run(15.0)
        found: dict[int, list[tuple[int, int]]] = {}
        for partition in range(_PARTITIONS):
            log = self.kafka.brokers.log(TOPIC, partition)
            fetched = log.fetch(0, 1_000_000, committed_only=True) if log else None
            for record in fetched.records if fetched else ():
                found.setdefault(int(record.value or b"0"), []).append((partition, record.offset))
        for number in range(1, self._sent + 1):
            positions, response = found.get(number, []), self.responses.get(number)
            if len(positions) > 1 or (response and positions != [response]):
                self._world.problem("ONCE", f"request {number}: the response says {response}, and it is at {positions}")
            if positions and number in self._failed & self._plain:
                self._world.problem("FAILED", f"request {number} has failed, and is at {positions}")


def keys(world: World) -> Sequence[Any]:
    """Run the scenario; return the options of its seed."""
    options = KeyOptions.of(world.random)
    KeyRun(world, options).go()
    return options
