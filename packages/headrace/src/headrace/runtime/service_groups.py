"""Service groups that start and stop at run time. A failure of one group does not stop the others."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from headrace.errors import HeadraceError
from headrace.runtime.clock import Clock, Deadline, RestartPauses
from headrace.runtime.service import Readiness, Service
from headrace.runtime.supervisor import Signals, Supervisor, first_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0


class GroupSpec(NamedTuple):
    """Required services of one name."""

    version: int
    """When it changes, the running group is drained before this one starts."""
    make: Callable[[], Sequence[Service]]
    """Makes the services, downstream first; called at each start."""
    on_stopped: Callable[[], None]
    """Reverts the side effects of `make`; called after the services have stopped."""


class _RunningGroup:
    def __init__(self) -> None:
        self.required: GroupSpec | None = None
        self.changed = asyncio.Event()
        self.signals = Signals()
        self.supervisor: Supervisor | None = None
        self.why = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        return self.required and self.required.version


class ServiceGroups(Service):
    """Starts, drains and stops groups of services on demand.

    If a service of a group dies, or the group cannot be made, the group is drained and restarted after a pause. The
    pause doubles from a second to a minute. `readiness_of`, a gauge and the log report it.
    """

    def __init__(self, name: str, clock: Clock, drain_seconds: float, metric: str) -> None:
        super().__init__(name)
        self._metric = metric
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._groups: dict[str, _RunningGroup] = {}

    async def start(self) -> None:
        groups = self._groups
        metric = self._metric
        self.publish(metric, lambda: sum(bool(each.supervisor) for each in groups.values()), state="running")
        self.publish(metric, lambda: sum(bool(each.why) for each in groups.values()), state="failing")

    async def drain(self, deadline: Deadline) -> None:
        self.apply({})
        await self._ended(deadline.remaining_seconds)

    async def stop(self) -> None:
        self.apply({})
        for group in self._groups.values():
            group.signals.notice()  # the second one: stop now
        await self._ended(None)
        await super().stop()

    def apply(self, required: Mapping[str, GroupSpec]) -> None:
        """Set the groups to run; others are stopped. A removed or replaced group drains first."""
        for name in [*self._groups, *required]:
            group, spec = self._groups.get(name), required.get(name)
            if group is None:
                group = self._groups[name] = _RunningGroup()
                group.required = spec
                group.task = self.spawn(self._keep_running(name, group), name)
            elif group.version != (spec and spec.version):
                group.required = spec
                group.changed.set()
                if not group.signals.drain_requested.is_set():
                    group.signals.notice()

    @property
    def running(self) -> Sequence[str]:
        """The names of its groups."""
        return [*self._groups]

    def readiness_of(self, name: str) -> Readiness:
        """Return whether every service of a group is ready, and if not, why."""
        group = self._groups.get(name)
        if group is None or group.supervisor is None:
            return Readiness(False, (group and group.why) or "not started yet")
        reasons = [text for ready, text in group.supervisor.readiness().values() if not ready]
        return Readiness(not reasons, "; ".join(reasons))

    async def _ended(self, timeout_seconds: float | None) -> None:
        if tasks := [group.task for group in self._groups.values() if group.task]:
            await asyncio.wait(tasks, timeout=timeout_seconds)

    async def _keep_running(self, name: str, group: _RunningGroup) -> None:
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

        def failed(cause: Exception, pause: float) -> None:
            group.why = cause.description if isinstance(cause, HeadraceError) else f"{type(cause).__name__}: {cause}"
            log.error("%s %s: %s; will restart in %g s", self.name, name, group.why, pause)

        async def wait(pause: float) -> None:
            await first_of(self._clock.sleep(pause), group.changed.wait())

        await pauses.keep(partial(self._run_once, group), failed, wait=wait)
        del self._groups[name]

    async def _run_once(self, group: _RunningGroup) -> bool:
        """Run a group until it is removed or replaced; return whether it is required still. Raises if it dies."""
        spec = group.required
        if not spec:
            return False
        group.changed.clear()
        group.signals = Signals()
        try:
            supervisor = Supervisor(spec.make(), self._clock, self._drain_seconds)
            await supervisor.start()
            group.supervisor, group.why = supervisor, ""
            await supervisor.run(group.signals)
        finally:
            group.supervisor = None
            spec.on_stopped()
        return True
