"""The instances of this process: created, found, listed, and closed when they are idle."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Final

from headrace.config.active import ActiveConsumersConfig
from headrace.errors import (
    Draining,
    IdempotencyKeyReused,
    InstanceExists,
    InstanceNotFound,
    InstanceState,
    TooManyRequests,
)
from headrace.formats.choice import Codecs
from headrace.kafka import Admin
from headrace.runtime import Clock, Deadline, Service
from headrace.runtime.telemetry.audit import Audit
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.monitor import ReadMonitor
from headrace.sidecar.active.read_entries import EntryWriter
from headrace.sidecar.active.spec import InstanceSpec

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_LEAST_BUFFER_BYTES: Final = 65_536
_BUFFER_PARTS: Final = 32
Claim = Callable[[str, str, str, Callable[[], None]], Awaitable[None]]
"""Registers an instance with other processes: group, name, principal, and what closes it if they declare it gone."""
Release = Callable[[str, str], Awaitable[None]]
"""Reports that an instance is closed: group and name."""


class ActiveInstances(Service):
    """Creates and holds instances. An instance belongs to the principal that created it."""

    def __init__(
        self,
        settings: ActiveConsumersConfig,
        admin: Admin,
        codecs: Codecs,
        clock: Clock,
        audit: Audit | None = None,
        shared: tuple[Claim, Release] | None = None,
    ) -> None:
        super().__init__("active consumers")
        self._settings = settings
        self._admin = admin
        self._codecs = codecs
        self._clock = clock
        self._instances: dict[tuple[str, str], ActiveInstance] = {}
        self._draining = False
        self._response_bytes = 0
        self.monitor = ReadMonitor(self.all, admin, audit, clock)
        """Counts what is read of them."""
        self.own_groups: Callable[[], Collection[str]] = tuple
        """Returns the groups of consumers, functions and pipelines of this process, which no instance may join."""
        self._claim: Claim | None = None
        self._release: Release | None = None
        if shared:
            self._claim, self._release = shared

    async def start(self) -> None:
        self.publish("headrace_active_instances", lambda: len(self._instances))
        self.publish(
            "headrace_active_buffered_bytes", lambda: sum(one.buffered_bytes for one in self._instances.values())
        )
        self.keep(self._close_idle, "idle instances")

    def end_reads(self) -> None:
        """Reject new instances, and end reads and streams: the process waits for their responses."""
        self._draining = True
        for one in self._instances.values():
            one.end_reads()

    async def drain(self, deadline: Deadline) -> None:
        await asyncio.gather(*(one.drain(deadline) for one in self._instances.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(one.stop() for one in self._instances.values()))
        self._instances.clear()
        await super().stop()

    async def create(self, spec: InstanceSpec, *, is_named: bool = True) -> ActiveInstance:
        """Create an instance, which has nothing to read yet; with the key of an earlier one, return that one.

        Raises:
            IdempotencyKeyReused: The key was used with other settings before.
            InstanceState: The group is that of a consumer of this process.
            InstanceExists: The group has one of this name.
            TooManyRequests: A limit is reached, for this principal or in total.
            Draining: The process is stopping.
        """
        key = spec.group, spec.name
        if self._draining:
            raise Draining()
        if spec.group in self.own_groups():
            text = "a consumer, function or pipeline of this process reads and commits in it; choose another group"
            raise InstanceState(f"group {spec.group} cannot be joined: {text}")
        if spec.key and (known := self._find_key(spec, is_named)):
            return known
        if key in self._instances:
            raise InstanceExists(f"group {spec.group} has an instance {spec.name}; choose another name, or delete it")
        spec = spec._replace(buffer_bytes=self._share(spec))
        entries = self.entries(spec)
        instance = self._instances[key] = ActiveInstance(
            spec, entries, self._admin, self._clock, self.monitor.delivered
        )
        await instance.start()
        if self._claim:
            try:
                await self._claim(*key, spec.owner, lambda: self._close(instance))
            except BaseException:
                self._instances.pop(key, None)
                await instance.stop()
                raise
        return instance

    def _find_key(self, spec: InstanceSpec, is_named: bool) -> ActiveInstance | None:
        for one in self._instances.values():
            known = one.spec
            if (known.owner, known.group, known.key) == (spec.owner, spec.group, spec.key):
                name = spec.name if is_named else known.name
                if known != spec._replace(name=name, buffer_bytes=known.buffer_bytes):
                    raise IdempotencyKeyReused()
                return one
        return None

    def _share(self, spec: InstanceSpec) -> int:
        """Return the buffer of a new instance: a part of what the others leave, so that more can follow."""
        settings = self._settings
        own = [one for one in self._instances.values() if one.spec.owner == spec.owner]
        if len(self._instances) >= settings.max_instances:
            limit = f"active_consumers.max_instances, {settings.max_instances}"
            raise TooManyRequests(f"instance limit of the process reached ({limit}); delete unused instances")
        if spec.owner and len(own) >= settings.max_instances_per_principal:
            limit = f"active_consumers.max_instances_per_principal, {settings.max_instances_per_principal}"
            raise TooManyRequests(f"instance limit of {spec.owner} reached ({limit}); delete unused instances")
        left = settings.total_bytes - sum(one.spec.buffer_bytes for one in self._instances.values())
        if left < _LEAST_BUFFER_BYTES:
            limit = f"active_consumers.total_bytes, {settings.total_bytes}"
            raise TooManyRequests(f"limit of all instance buffers reached ({limit}); delete unused instances")
        return min(spec.buffer_bytes, max(left // _BUFFER_PARTS, _LEAST_BUFFER_BYTES))

    @contextlib.contextmanager
    def answering(self, size_bytes: int) -> Iterator[None]:
        """Count the bytes of a response while it is written.

        Raises:
            TooManyRequests: Too many bytes are waiting for slow clients.
        """
        if self._response_bytes and self._response_bytes + size_bytes > self._settings.total_bytes:
            limit = f"active_consumers.total_bytes, {self._settings.total_bytes}"
            raise TooManyRequests(f"too many response bytes are waiting for slow clients ({limit}); try again later")
        self._response_bytes += size_bytes
        try:
            yield
        finally:
            self._response_bytes -= size_bytes

    def use(self, group: str, name: str, owner: str) -> ActiveInstance:
        """Return an instance of a principal for a request, which keeps it from being closed as idle.

        Raises:
            InstanceNotFound: There is none, or it belongs to another principal.
        """
        instance = self._instances.get((group, name))
        if instance is None or instance.spec.owner != owner:
            text = f"group {group[:100]} has no instance {name[:100]}; create it again, and subscribe it"
            raise InstanceNotFound(text)
        instance.last_used = self._clock.monotonic()
        return instance

    def entries(self, spec: InstanceSpec, value_format: str | None = None) -> EntryWriter:
        """Return the writer of an instance's entries, with another format of values if one is given."""
        keys = self._codecs.for_reading(spec.key_format)
        return EntryWriter(spec.group, keys, self._codecs.for_reading(value_format or spec.value_format))

    def all(self) -> Sequence[ActiveInstance]:
        return list(self._instances.values())

    async def delete(self, instance: ActiveInstance) -> None:
        """Close an instance and leave its group; nothing is committed that its client has not confirmed."""
        key = instance.spec.group, instance.spec.name
        if self._instances.get(key) is instance:
            del self._instances[key]
            if self._release:
                await self._release(*key)
        await instance.stop()

    async def _close_idle(self) -> None:
        while True:
            await self._clock.sleep(_LOOK_SECONDS)
            before = self._clock.monotonic() - self._settings.idle_seconds
            idle = [one for one in self._instances.values() if one.last_used < before and not one.turn.is_taken]
            for instance in idle:
                log.info("closing %s, which was idle for %g s", instance.name, self._settings.idle_seconds)
                self._close(instance)

    def _close(self, instance: ActiveInstance) -> None:
        self.keep(lambda: self.delete(instance), f"close {instance.name}")
