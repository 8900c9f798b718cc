"""The scenario of live control: push under chance, while an operator pauses, seeks, skips and changes settings.

The operator uses the HTTP API of any process. With a registered consumer, it also stops and starts the consumer. In the
end everything is resumed, and completes: what a seek has passed over is not waited for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace_devkit.simulation.http_client import send_json
from headrace_devkit.simulation.live_control_checker import LiveControlChecker
from headrace_devkit.simulation.loaded_run import TOPIC
from headrace_devkit.simulation.push_scenario import GROUP, PushOptions, PushRun
from headrace_devkit.simulation.world import World

_FIXED: dict[str, Any] = {"retry_topics": (), "keep_key_order": False, "faults": 2}
_ACTIONS = ("hold", "hold", "release", "release", "seek", "seek", "skip", "change", "switch")
_RETRY_SECONDS = 1.0


class LiveControlRun(PushRun):
    """One run of push with an operator."""

    checker: LiveControlChecker
    checker_type = LiveControlChecker

    def __init__(self, world: World, options: PushOptions) -> None:
        self.is_registered = world.random.random() < 0.3
        super().__init__(world, options)
        self._is_controlled = True

    def settings(self, number: int) -> dict[str, Any]:
        found = super().settings(number)
        if self.is_registered:
            self._consumer = found.pop("reactive_consumers")["push"]
            found["registrations"] = {"backends": [self.backend.url]}
        return found

    def run(self) -> None:
        operator = self.kafka.machine("operator")
        operator.loop.start(self._control(), self._ended)
        super().run()
        self.checker.check_repeats()

    def is_done(self) -> bool:
        return not self._is_controlled and super().is_done()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (cause := task.exception()):
            self.world.problem("operator-died", f"{type(cause).__name__}: {cause}")

    # The operator

    async def _control(self) -> None:
        """Send commands until all heals; then resume everything."""
        chance = self.world.random
        await self._until_done(self._enable)
        while not self.is_healed:
            await asyncio.sleep(chance.uniform(0.2, 5.0))
            await getattr(self, f"_{chance.choice(_ACTIONS)}")()
        for last in (self._enable, self._release, self._reset):
            await self._until_done(last)
        self._is_controlled = False

    async def _until_done(self, command: Callable[[], Awaitable[bool]]) -> None:
        while not await command():  # noqa: ASYNC110 it sends a request each time
            await asyncio.sleep(_RETRY_SECONDS)

    async def _enable(self) -> bool:
        return not self.is_registered or await self._register(True)

    async def _reset(self) -> bool:
        body = {"rateRecords": None, "maxRecords": None, "maxInFlight": None}
        return (await self._send("PATCH", "/settings", body))[0] == 200

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        status, response = await self._send_any(method, f"/adm/reactive-consumers/push{path}", body)
        if status not in (0, 200, 202, 400, 404, 429, 503, 504):
            self.world.problem("STATUS", f"{method} {path}: {status} {response}")
        return status, response

    async def _send_any(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        index = self.world.random.randrange(len(self.processes))
        status, response = await send_json(self.processes[index].name, 8081 + index, method, path, body)
        self.world.note("requests", method, path, str(body), status, "" if status in (200, 201, 202) else str(response))
        return status, response

    def _partition(self) -> int:
        return self.world.random.randrange(self.options.partitions)

    async def _hold(self) -> None:
        partition = self._partition()
        is_all = self.world.random.random() < 0.3
        status, _ = await self._send("POST", "/pause", {} if is_all else {"topic": TOPIC, "partitions": [partition]})
        if status == 200:
            self.checker.pauses(*(range(self.options.partitions) if is_all else [partition]))

    async def _release(self) -> bool:
        self.checker.resumes()
        return (await self._send("POST", "/resume", {}))[0] == 200

    async def _seek(self) -> None:
        partition = self._partition()
        log = self.kafka.brokers.log(TOPIC, partition)
        end = log.end if log else 0
        committed = self.kafka.groups.offsets.committed(GROUP).get((TOPIC, partition))
        offset = min(end, max(0, (committed.offset if committed else 0) + self.world.random.randint(-20, 10)))
        seek = self.checker.sends_seek(partition, offset)
        status, response = await self._send("POST", "/seek", {"partitions": [partition], "offset": offset})
        if status == 200 and response["results"][0]["outcome"] == "sought":
            self.checker.seek_is_done(partition, seek)

    async def _skip(self) -> None:
        partition = self._partition()
        committed = self.kafka.groups.offsets.committed(GROUP).get((TOPIC, partition))
        offset = committed.offset if committed else 0
        log = self.kafka.brokers.log(TOPIC, partition)
        if log is None or offset >= log.end:
            return
        self.checker.passes_over(partition, offset)
        body = {"partition": partition, "offset": offset, "reason": "test"}
        status, response = await self._send("POST", "/skip", body)
        if status == 200 and response["results"][0]["outcome"] == "skipped":
            self.checker.is_skipped(partition, offset)

    async def _change(self) -> None:
        chance = self.world.random
        body = {"maxRecords": chance.choice((1, 5)), "maxInFlight": chance.choice((1, 8))}
        await self._send("PATCH", "/settings", body)

    async def _switch(self) -> None:
        """Stop the registered consumer, and start it again."""
        if self.is_registered and await self._register(False):
            await asyncio.sleep(self.world.random.uniform(0.1, 10.0))
            await self._register(True)

    async def _register(self, is_enabled: bool) -> bool:
        body = {**self._consumer, "enabled": is_enabled}
        status, response = await self._send_any("PUT", "/reactive-consumers/push", body)
        if status not in (0, 200, 201, 409, 429, 503, 504):
            self.world.problem("STATUS", f"register: {status} {response}")
        return status in (200, 201)


def live_control(world: World) -> PushOptions:
    """Run the scenario with the options of its seed."""
    options = PushOptions.drawn(world.random, **_FIXED)
    run = LiveControlRun(world, options)
    world.note("options", str(options), run.is_registered)
    with run.kafka.installed():
        run.run()
    return options
