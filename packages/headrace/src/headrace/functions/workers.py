"""The workers of a function's trigger, or of several: how many run, and when one is replaced or stopped."""

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from types import MappingProxyType

from headrace.errors import DestinationUnavailable, FunctionInvalid, WorkerLost
from headrace.functions import protocol
from headrace.functions.allocator import Allocator
from headrace.functions.frames import NOTHING_BEGUN, Response
from headrace.functions.process import WorkerProcess
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.worker_log import logger_of
from headrace.functions.worker_metrics import WorkerMetrics
from headrace.records import TopicPartition
from headrace.runtime import Clock, Deadline, Readiness, RestartPauses, Service, TokenBucket

log = logging.getLogger(__name__)

Acknowledge = Callable[[TopicPartition, int], str]
"""Takes an explicit acknowledgement of an offset; returns why that is not possible, else an empty text."""

_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 10.0
_STEADY_SECONDS = 10.0
_REFUSING_FAILURES = 3
"""Deaths in a row without a completed frame, above which callers are rejected instead of waiting. A poison record is a
dead letter before that."""
_FREE_RESTARTS = 10
_RESTARTS_PER_SECOND = 0.5
"""Restarts of one worker once it has used up the free ones."""
_LOOK_SECONDS = 0.2
_GROWTH = 1.25
"""A worker above this multiple of its memory limit is killed in the middle of a record."""
_FRAME_SECONDS = 0.05
_FIRST_RECORDS = 100
_FORGETS = 0.75
_LEVEL_NAMES = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}


class FramePace:
    """The number of records that take about 50 ms, by the time that the last frames took in their workers.

    The delay of the parent does not count: frames would shrink while it is busy, and make it busier.
    """

    def __init__(self) -> None:
        self._records = float(_FIRST_RECORDS)
        self._seconds = _FRAME_SECONDS

    @property
    def records(self) -> int:
        """Records of the next frame; at least 1."""
        return max(1, int(self._records / self._seconds * _FRAME_SECONDS)) if self._seconds else 1

    def learn(self, records: int, seconds: float) -> None:
        """Record how long a frame took."""
        self._records = self._records * _FORGETS + records
        self._seconds = max(self._seconds * _FORGETS + seconds, 1e-6)


class _Slot:
    """One worker: one process after another."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.up = False
        self.problem = ""
        """Why the last process failed to start; empty after a start."""
        self.partitions = set[TopicPartition]()
        """Whose events the process has had."""
        self.is_reloading = False
        """Whether the process is about to be replaced by one with the present files."""


class FunctionService(Service):
    """Owns the worker processes of one trigger of a function, or of several that share an allocator.

    A worker that ends is replaced at once; one that keeps ending, after growing pauses. The others continue.
    """

    def __init__(
        self,
        spec: FunctionSpec,
        triggers: Sequence[Trigger],
        clock: Clock,
        acknowledgers: Mapping[str, Acknowledge] = MappingProxyType({}),
        deliver_again: Mapping[str, Callable[[TopicPartition], None]] = MappingProxyType({}),
    ) -> None:
        """Prepare.

        Args:
            acknowledgers: Take explicit acknowledgements, by topic.
            deliver_again: Take partitions of a worker that has ended, by topic.
        """
        name = triggers[0].name if len(triggers) == 1 else triggers[0].allocator_name
        super().__init__(f"function {spec.name}.{name}")
        self.spec = spec
        self.triggers = triggers
        self.pace = FramePace()
        """How many records make a frame now."""
        self.restarts = 0
        """Workers that ended or were killed, and were replaced."""
        self._clock = clock
        self._acknowledgers = acknowledgers
        self._deliver_again = deliver_again
        self._slots = [_Slot() for _ in range(max(trigger.workers for trigger in triggers))]
        self._allocator = Allocator(len(self._slots), self._recall)
        self._stopping = False
        self.metrics = WorkerMetrics(spec, triggers, name, len(self._slots))
        """Numbers of the work of its workers."""

    @property
    def workers(self) -> range:
        return range(len(self._slots))

    async def start(self) -> None:
        logger_of(self._log_fields).setLevel(self.spec.log_level.upper() or logging.NOTSET)
        for number in range(len(self._slots)):
            self.spawn(self._keep_alive(number), f"worker {number}")
        self.keep(self._watch, "limits")
        self.metrics.publish(
            self,
            {
                "headrace_function_waiting_frames": lambda: self._allocator.waiting,
                "headrace_function_busy_workers": lambda: sum(
                    1 for slot in self._slots if slot.process and not slot.process.at_rest.is_set()
                ),
                "headrace_function_worker_restarts_total": lambda: self.restarts,
            },
        )

    def readiness(self) -> Readiness:
        """Ready when at least one worker is up, and the others are up or being replaced."""
        for number, slot in enumerate(self._slots):
            if slot.problem:
                return Readiness(False, f"worker {number} failed to start: {slot.problem}")
        if not any(slot.up for slot in self._slots):
            return Readiness(False, "no worker is up yet")
        return Readiness(True)

    async def drain(self, deadline: Deadline) -> None:
        """Wait until no worker is in the middle of a frame."""
        for slot in self._slots:
            if slot.process:
                await asyncio.wait_for(slot.process.at_rest.wait(), deadline.remaining_seconds)

    def stop_partitions(self, partitions: Collection[TopicPartition]) -> None:
        """Begin no more records of these partitions; those at work may complete."""
        self._allocator.give_up(partitions)
        for process in self._processes:
            process.stop_frames(partitions)

    async def give_up(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        """Complete events of these partitions, then run the drain callbacks; return by the deadline.

        A worker whose event is still in flight then is replaced. A worker that is busy with other partitions runs no
        callback, unless it has had an event of these since its last one.
        """
        if ends := [self.spawn(each.give_up(partitions, deadline), "drain callback") for each in self._processes]:
            await asyncio.wait(ends)

    @property
    def _processes(self) -> list[WorkerProcess]:
        return [slot.process for slot in self._slots if slot.process and slot.up]

    def acknowledge(self, ack: protocol.Ack) -> str:
        """Take an explicit acknowledgement of any worker; return why that is not possible, else an empty text."""
        if acknowledge := self._acknowledgers.get(ack.topic):
            return acknowledge(TopicPartition(ack.topic, ack.partition), ack.offset)
        return f"no trigger of {self.spec.name} reads {ack.topic} with explicitAckMode enable or explicitOnly"

    async def stop(self) -> None:
        self._stopping = True
        deadline = Deadline(self._clock, self._termination_seconds)
        stops = [self.spawn(slot.process.stop(deadline), "stop") for slot in self._slots if slot.process]
        if stops:
            await asyncio.wait(stops)
        await super().stop()

    async def serve(
        self,
        candidates: Sequence[int],
        partition: TopicPartition,
        frame: bytearray,
        records: int,
        schemas: Mapping[int, protocol.Schema],
        ending: Set[TopicPartition] = frozenset(),
    ) -> Response:
        """Let one of these workers do one encoded frame of work and return its response.

        It is `NOTHING_BEGUN` if the partition is `ending` before a worker has begun the frame. A frame that its worker
        has not begun goes to another worker if the first one ends, or if the other one is idle. If cancelled, a frame
        that was begun still completes, and its response is dropped.

        Raises:
            WorkerLost: The worker ended in the middle of the frame; parameters as in `WorkerProcess.serve`.
            DestinationUnavailable: No worker that may serve this partition is up.
        """
        while partition not in ending:
            number = await self._choose(candidates, partition)
            if number is not None and partition in ending:  # revoked in the turn in which it was given the worker
                self._allocator.frame_ended(number)
            if number is None or partition in ending:
                continue
            process = self._slots[number].process
            assert process is not None
            self._slots[number].partitions.add(partition)
            try:
                response = await process.serve(partition, frame, records, schemas)
            except WorkerLost as lost:
                if lost.parameters["begun"]:
                    raise
                if self._slots[number].process is process:
                    self._allocator.lost(number)  # or it could be chosen again before its end is recorded
                continue
            if response != NOTHING_BEGUN:
                return response
        return NOTHING_BEGUN

    async def _choose(self, candidates: Sequence[int], partition: TopicPartition) -> int | None:
        idle_part = self._allocator.idle / len(self._slots)
        number = self._allocator.take(candidates)
        if number is not None:
            self.metrics.allocated(0.0, False, idle_part)
            return number
        began = self._clock.monotonic()
        try:
            number = await self._allocator.acquire(candidates, partition)
        except DestinationUnavailable:
            self.metrics.allocations["error_timeout"] += 1
            raise
        self.metrics.allocated(self._clock.monotonic() - began, True, idle_part)
        return number

    def _recall(self, number: int) -> bool:
        process = self._slots[number].process
        return process is not None and process.recall()

    async def _keep_alive(self, number: int) -> None:
        slot = self._slots[number]
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)
        restarts = TokenBucket(self._clock, _RESTARTS_PER_SECOND, _FREE_RESTARTS)

        async def live() -> bool:
            if self._stopping:
                return False
            self._allocator.starting(number)
            why = await self._live(number, slot)
            slot.up = False
            if self._stopping or slot.is_reloading:
                slot.is_reloading = False
                return True
            self.restarts += 1
            log.warning("%s", why)
            if slot.problem:
                pauses.started()  # however long it took to start, it was not steady
            if slot.problem or not (slot.process and slot.process.served):
                raise WorkerLost(why)
            await restarts.wait(1)
            return True

        def lost(cause: Exception, pause: float) -> None:
            if slot.problem or pauses.failures > _REFUSING_FAILURES:
                self._allocator.down(number, str(cause))

        async def wait(pause: float) -> None:
            if slot.problem or pauses.failures > 1:
                await self._clock.sleep(pause)
            await restarts.wait(1)

        await pauses.keep(live, lost, WorkerLost, wait)

    async def _live(self, number: int, slot: _Slot) -> str:
        """Run one process from its start to its end and return why it ended."""
        about = {**self._log_fields, "worker": str(number)}
        process = WorkerProcess(f"{self.name} worker {number}", functools.partial(self._frame_ended, number), about)
        process.acknowledge = self.acknowledge
        slot.process, spec = process, self.spec
        slot.problem = await self._start(process, number, spec)
        if slot.problem:
            return slot.problem
        slot.up = True
        self._allocator.started(number)
        if spec is not self.spec:  # it may have loaded its files before the reload
            self._reload(number, process)
        lost = await process.ended
        self._allocator.lost(number)
        for partition in slot.partitions:
            if deliver_again := self._deliver_again.get(partition.topic):
                deliver_again(partition)
        slot.partitions.clear()
        return lost.description

    async def _start(self, process: WorkerProcess, number: int, spec: FunctionSpec) -> str:
        """Start a process and wait until it can serve; return why it cannot, else an empty text."""
        limit = spec.readiness_timeout_seconds
        try:
            if self._stopping:
                return f"{process.label}: stopped"
            await process.start(self, self._setup(number, spec))
            await asyncio.wait_for(asyncio.shield(process.ready), limit)
        except TimeoutError:
            process.kill(f"loading the handler and init_context took longer than {limit:g} s (readinessTimeoutSeconds)")
        except OSError as cause:
            return f"{process.label}: failed to start the process: {cause.strerror or cause}"
        except WorkerLost:
            log.debug("%s ended before it was ready", process.label)
        else:
            return ""
        return (await process.ended).description

    def _frame_ended(self, number: int, records: int, seconds: float) -> None:
        if records:
            self.pace.learn(records, seconds)
            self.metrics.worked(number, records, seconds)
        self._allocator.frame_ended(number)

    def _setup(self, number: int, spec: FunctionSpec) -> protocol.Setup:
        level = _LEVEL_NAMES.get(logger_of(self._log_fields).getEffectiveLevel(), "error")
        return spec.setup(self.triggers, str(number), level)

    async def _watch(self) -> None:
        """Replace workers that exceed the time limit of an event or the memory limit.

        Those above the memory limit are replaced between two frames, and those far above it at once.
        """
        limit, replaced = max(trigger.memory_limit_bytes for trigger in self.triggers), dict[int, WorkerProcess]()
        while True:
            seconds = self.spec.event_timeout_seconds or math.inf
            await self._clock.sleep(min(_LOOK_SECONDS, seconds / 4))
            for number, slot in enumerate(self._slots):
                if (process := slot.process) is None:
                    continue
                process.check_time(self._clock.monotonic(), seconds)
                used = process.memory_bytes if limit else 0
                why = f"memory: {used >> 20} MiB exceed workerMemoryLimit ({limit >> 20} MiB)"
                if used > limit * _GROWTH:
                    process.kill(why, error="memory")
                elif used > limit and replaced.get(number) is not process:
                    replaced[number] = process
                    self.spawn(self._replace(number, process, why), f"replace {number}")

    async def _replace(self, number: int, process: WorkerProcess, why: str) -> None:
        """Stop a process once it has completed its frame; frames that it has not begun go to another one."""
        self._allocator.lost(number)
        process.recall()
        await process.at_rest.wait()
        await process.call_drain_callback(
            Deadline(self._clock, self._termination_seconds)
        )  # the callback may acknowledge records
        process.recall()  # a caller may have sent a frame behind the callback
        await process.at_rest.wait()
        await process.stop(Deadline(self._clock, self._termination_seconds), why)

    async def try_out(self, spec: FunctionSpec) -> None:
        """Start one worker of this spec and the present files, and stop it.

        Raises:
            FunctionInvalid: It failed to start.
        """
        trial = WorkerProcess(f"{self.name} worker trial", lambda *_: None, self._log_fields)
        try:
            if why := await self._start(trial, 0, spec):
                raise FunctionInvalid(why)
        finally:
            await trial.stop(Deadline(self._clock, self._termination_seconds))

    def reload(self, spec: FunctionSpec) -> None:
        """Replace every worker by one of this spec and the present files."""
        self.spec = spec
        for number, slot in enumerate(self._slots):
            if slot.process and slot.up and not slot.is_reloading:
                self._reload(number, slot.process)

    def _reload(self, number: int, process: WorkerProcess) -> None:
        self._slots[number].is_reloading = True
        self.spawn(self._replace(number, process, "its files have changed"), f"reload {number}")

    @property
    def _log_fields(self) -> dict[str, str]:
        """Fields of the log lines of its workers; those of shared workers name no trigger."""
        trigger = {"trigger": self.triggers[0].name} if len(self.triggers) == 1 else {}
        return {"function": self.spec.name, **trigger}

    @property
    def _termination_seconds(self) -> float:
        return max(trigger.termination_seconds for trigger in self.triggers)
