"""The workers of one trigger: started, watched, replaced when they end, stopped."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from headrace.errors import WorkerLost
from headrace.functions import wire
from headrace.functions.allocator import Allocator
from headrace.functions.process import WorkerProcess
from headrace.functions.spec import AnyTrigger, FunctionSpec
from headrace.lifecycle import Clock, Deadline, Readiness, RestartPauses, Service
from headrace.lifecycle.gauge_registry import register_gauge, unregister_gauge
from headrace.records import TopicPartition

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
_STEADY_SECONDS = 10.0
_REFUSING_FAILURES = 3
"""Deaths in a row without a served frame, above which callers are refused instead of waiting: a poison record alone
is dead-lettered before."""
_LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}


class _Slot:
    """One worker: one process after another."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.up = False
        self.problem = ""
        """Why the last process never got ready; empty once one did."""

    @property
    def busy(self) -> bool:
        return bool(self.process and not self.process.at_rest.is_set())


class FunctionService(Service):
    """Owns the worker processes of one trigger of a function.

    A worker that ends is replaced at once, one that keeps ending after growing pauses. The others continue meanwhile.
    """

    def __init__(self, spec: FunctionSpec, trigger: AnyTrigger, clock: Clock) -> None:
        super().__init__(f"function {spec.name}.{trigger.name}")
        self.spec = spec
        self.trigger = trigger
        self.restarts = 0
        """Workers replaced since the start."""
        self._clock = clock
        self._slots = [_Slot() for _ in range(trigger.workers)]
        self._allocator = Allocator(trigger.workers, static=trigger.allocation == "static")
        self._stopping = False
        self._labels = {"kind": "function", "consumer": f"{spec.name}.{trigger.name}"}
        self._gauges: dict[str, Callable[[], float]] = {
            "headrace_function_waiting_frames": lambda: self._allocator.waiting,
            "headrace_function_busy_workers": lambda: sum(1 for slot in self._slots if slot.busy),
            "headrace_function_worker_restarts_total": lambda: self.restarts,
        }

    async def start(self) -> None:
        for number in range(len(self._slots)):
            self.spawn(self._keep_alive(number), f"worker {number}")
        if self.spec.event_timeout_seconds:
            self.spawn(self._watch_time(self.spec.event_timeout_seconds), "event timeout")
        for gauge, read in self._gauges.items():
            register_gauge(gauge, read, **self._labels)

    def readiness(self) -> Readiness:
        """Ready when every worker is up or just being replaced, and at least one is up."""
        for number, slot in enumerate(self._slots):
            if slot.problem:
                return Readiness(False, f"worker {number} does not come up: {slot.problem}")
        if not any(slot.up for slot in self._slots):
            return Readiness(False, "no worker is up yet")
        return Readiness(True)

    async def drain(self, deadline: Deadline) -> None:
        """Wait until no worker is in the middle of a frame."""
        for slot in self._slots:
            if slot.process:
                await asyncio.wait_for(slot.process.at_rest.wait(), deadline.remaining_seconds)

    async def call_drain_callbacks(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        """Let the drain callbacks run before these partitions are given up; return by the deadline.

        A worker that is busy with others and has had no event of these since its last call is left alone.
        """
        processes = [slot.process for slot in self._slots if slot.process and slot.up]
        due = [process for process in processes if process.must_drain(partitions)]
        if calls := [self.spawn(process.call_drain_callback(deadline), "drain callback") for process in due]:
            await asyncio.wait(calls)

    async def stop(self) -> None:
        self._stopping = True
        deadline = Deadline(self._clock, self.trigger.termination_seconds)
        stops = [self.spawn(slot.process.stop(deadline), "stop") for slot in self._slots if slot.process]
        if stops:
            await asyncio.wait(stops)
        for gauge in self._gauges:
            unregister_gauge(gauge, **self._labels)
        await super().stop()

    async def serve(
        self, partition: TopicPartition, frame: bytearray, records: int, schemas: Mapping[int, wire.Schema]
    ) -> wire.Done | wire.Results:
        """Let a worker do one encoded frame of work and return its answer.

        If cancelled, a frame that was begun still ends, and its answer is dropped.

        Raises:
            WorkerLost: The worker ended; parameter `begun` as in `WorkerProcess.serve`.
            DestinationUnavailable: No worker that may serve this partition is up.
        """
        number = await self._allocator.acquire(partition)
        process = self._slots[number].process
        assert process is not None
        return await process.serve(partition, frame, records, schemas)

    async def _keep_alive(self, number: int) -> None:
        slot = self._slots[number]
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)
        while not self._stopping:
            pauses.started()
            why = await self._live(number, slot)
            slot.up = False
            if self._stopping:
                return
            self.restarts += 1
            log.warning("%s", why)
            served = slot.process.served if slot.process else 0
            if (served or pauses.steady) and not slot.problem:
                pauses.failures = 0
            else:
                pause = pauses.failed()
                if slot.problem or pauses.failures > _REFUSING_FAILURES:
                    self._allocator.down(number, why)
                if slot.problem or pauses.failures > 1:
                    await self._clock.sleep(pause)
            self._allocator.starting(number)

    async def _live(self, number: int, slot: _Slot) -> str:
        """Run one process from its start to its end and return why it ended."""
        process = WorkerProcess(f"{self.name} worker {number}", lambda: self._allocator.free(number))
        slot.process = process
        limit = self.spec.readiness_timeout_seconds
        try:
            await process.start(self, self._setup(number))
            if self._stopping:
                process.kill("stopped")
            await asyncio.wait_for(asyncio.shield(process.ready), limit)
        except TimeoutError:
            process.kill(f"loading the handler and init_context took longer than {limit:g} s (readinessTimeoutSeconds)")
        except OSError as cause:
            slot.problem = f"the process cannot be started: {cause.strerror or cause}"
            return f"{process.label}: {slot.problem}"
        except WorkerLost:
            log.debug("%s ended before it was ready", process.label)  # `ended` has the reason
        else:
            slot.up, slot.problem = True, ""
            self._allocator.free(number)
        lost = await process.ended
        if not slot.up:
            slot.problem = lost.description
        self._allocator.starting(number)
        return lost.description

    def _setup(self, number: int) -> wire.Setup:
        spec, trigger = self.spec, self.trigger
        return wire.Setup(
            handler=spec.handler,
            folder=str(spec.folder),
            worker_id=str(number),
            trigger_kind=trigger.kind,
            trigger_name=trigger.name,
            namespace=spec.namespace,
            key_format=trigger.key_format,
            value_format=trigger.value_format,
            output_format=trigger.output_format if trigger.output_topic else "",
            log_level=_LEVEL_NAMES.get(log.getEffectiveLevel(), "error"),
            env={
                "NUCLIO_FUNCTION_NAME": spec.name,
                "NUCLIO_FUNCTION_DESCRIPTION": spec.description,
                "NUCLIO_FUNCTION_HANDLER": spec.handler,
                **spec.env,
            },
        )

    async def _watch_time(self, limit_seconds: float) -> None:
        while True:
            await self._clock.sleep(min(1.0, limit_seconds / 4))
            now = self._clock.monotonic()
            for slot in self._slots:
                if slot.process:
                    slot.process.check_time(now, limit_seconds)
