"""Which consumers this process runs, if `placement` is set: entries of the control table.

process/<process>        a process that runs consumers, with its zone and those of its file
placement/<consumer>     the processes that run a consumer

Each process holds a lease while it runs. The process that also holds the lease `placement.TOPIC` chooses. Kafka remains
the owner of partitions: two processes that disagree only make one more member of a group, so a mistake costs no record.
Without the table or that lease, each process keeps what it ran last, which is in a file too.
"""

import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from headrace.commands.entries import iso_time, key_of
from headrace.commands.instance_owners import OtherLeases, lease_name
from headrace.commands.placement.choose import PlacedConsumer, PlacedProcess, choose
from headrace.commands.reconciler import Entry, Reconciler
from headrace.config.placement_config import PlacementConfig
from headrace.errors import HeadraceError
from headrace.kafka import Admin, CompactedTable, Lease
from headrace.runtime import Clock, Deadline, Readiness
from headrace.runtime.supervisor import first_of

log = logging.getLogger(__name__)

_PROCESS: Final = "process/"
_PLACEMENT: Final = "placement/"
_AWAY_SECONDS: Final = 300.0
"""A process that is away for less than this keeps its consumers; their other processes do the work."""
_ALL_AWAY_SECONDS: Final = 60.0
"""A consumer whose processes are all away for this long gets others, unless most processes are away: they restart."""
_CHOOSE_SECONDS: Final = 5.0
_SOON_SECONDS: Final = 1.0
_SECOND_SECONDS: Final = 30.0
_LEADER_PAUSE_SECONDS: Final = 10.0


class Placements(Reconciler):
    """Registers this process, follows the placement, and chooses it while this process holds the lease."""

    def __init__(
        self,
        table: CompactedTable[Any],
        config: PlacementConfig,
        process: str,
        lease_of: Callable[[str], Lease],
        admin: Admin,
        state_dir: Path,
        clock: Clock,
    ) -> None:
        """Prepare; `process` is the name of this one, the same after a restart."""
        super().__init__("placement", table, clock)
        # Settings
        self.process = process
        self._config = config
        self._lease_of = lease_of
        self._file = state_dir / "placement.json"
        # This process
        self._sources: dict[str, Callable[[], Iterable[str]]] = {"file": tuple, "registered": tuple}
        self._appliers: list[Callable[[], None]] = []
        self._second_since = 0.0
        """Since when another process holds the lease of this one's name, by the monotonic clock; 0 if none does."""
        # What is chosen
        self._chosen: Mapping[str, list[str]] = {}
        self._admin = admin
        self._leases = OtherLeases(admin, clock)
        self._away: dict[str, float] = {}
        """Processes without a lease, and since when by the monotonic clock."""

    def follow(self, source: str, names: Callable[[], Iterable[str]], apply: Callable[[], None]) -> None:
        """Choose processes for the consumers of `names`; `apply` is called when that may have changed.

        Those of the source `file` run where a file has them; all processes know those that are `registered`.
        """
        self._sources[source] = names
        self._appliers.append(apply)

    def runs(self, consumer: str) -> bool:
        """Whether this process runs a consumer."""
        return self.process in self._chosen.get(consumer, ()) and not self._is_second

    def other_processes(self, consumer: str) -> Sequence[str]:
        """Return the processes that run a consumer; empty if this one does."""
        return () if self.runs(consumer) else self._chosen.get(consumer, ())

    async def start(self) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._chosen = msgspec.json.decode(self._file.read_bytes(), type=dict[str, list[str]])
        for state, read in {"here": lambda: len(self._here), "all": lambda: len(self._names())}.items():
            self.publish("headrace_placed_consumers", read, state=state)
        self.watch(_PROCESS, lambda key, entry: None)
        self.watch(_PLACEMENT, lambda key, entry: None)
        await super().start()
        self.keep(self._register, "register")
        self.keep(self._lead, "lead")

    async def drain(self, deadline: Deadline) -> None:
        await self.cancel_tasks()  # from now on nothing starts

    def readiness(self) -> Readiness:
        if self._is_second:
            return Readiness(
                False, f"another process has the name {self.process}: set placement.process to another one"
            )
        names, missing = self._names(), self._missing
        text = f"{self.process} runs {len(self._here)} of {len(names)} consumers"
        text += f" in zone {self._config.zone}" if self._config.zone else ""
        waits = f"; {missing[0]} waits for the process that holds the lease placement" if missing else ""
        return Readiness(not missing, text + waits)

    def reconcile(self) -> None:
        """Follow the table; without it, the last placement stays."""
        if self.table.is_loaded.is_set():
            before = self._chosen
            # The entries of a topic that was created again come one after the other.
            self._chosen = {name: before[name] for name in self._names() if name in before} | self._in_table()
            if before != self._chosen:
                self._keep_file()
        for apply in self._appliers:
            apply()

    @property
    def _is_second(self) -> bool:
        """Whether another process has the name. After a crash the lease is not free before the session has ended."""
        return bool(self._second_since) and self._clock.monotonic() - self._second_since > _SECOND_SECONDS

    def _in_table(self) -> dict[str, list[str]]:
        return {unquote(key[len(_PLACEMENT) :]): _names_in(one) for key, one in self.table.items(_PLACEMENT).items()}

    @property
    def _here(self) -> list[str]:
        return [name for name in self._names() if self.runs(name)]

    @property
    def _missing(self) -> list[str]:
        return [name for name in self._names() if not self._chosen.get(name)]

    def _names(self) -> list[str]:
        return sorted({name for names in self._sources.values() for name in names()})

    def _keep_file(self) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            written = self._file.with_suffix(".new")
            written.write_bytes(msgspec.json.encode(self._chosen))
            written.replace(self._file)
        except OSError as cause:
            log.warning("failed to keep the placement in %s: %s", self._file, cause)

    async def _register(self) -> None:
        """Hold the lease of this process, with its entry in the table; without the table others still see the lease."""
        key = key_of(_PROCESS, self.process)
        entry = {"zone": self._config.zone, "consumers": sorted(self._sources["file"]())}
        while True:
            async with self._held(lease_name(self._id_of(self.process))) as (lease, is_held):
                if lease:
                    self._second_since = 0.0 if is_held else self._second_since or self._clock.monotonic()
                self.wake()
                while lease and is_held and not lease.lost.is_set():
                    # Also if others took this process for gone.
                    if self.table.is_loaded.is_set() and self.table.get(key) != entry:
                        await self.table.put(key, entry)
                    await first_of(lease.lost.wait(), self._clock.sleep(_CHOOSE_SECONDS / 2))
            await self._clock.sleep(_SOON_SECONDS)

    async def _lead(self) -> None:
        """Choose while this process holds the lease."""
        await self.table.is_loaded.wait()
        while True:
            async with self._held(f"placement.{self.table.topic.name}") as (lease, is_held):
                self._away = {}
                self._leases = OtherLeases(self._admin, self._clock)
                while lease and is_held and not lease.lost.is_set():
                    if self._names() and not self._in_table():  # a new topic: the other processes register first
                        await self._clock.sleep(_CHOOSE_SECONDS)
                    await self._choose(lease)
                    await self._clock.sleep(_SOON_SECONDS if self._missing else _CHOOSE_SECONDS)
            await self._clock.sleep(_LEADER_PAUSE_SECONDS)

    @contextlib.asynccontextmanager
    async def _held(self, name: str) -> AsyncIterator[tuple[Lease | None, bool]]:
        """Try to hold a lease; give it, and whether this process holds it. None if Kafka does not answer."""
        lease, is_held = self._lease_of(name), False
        try:
            is_held = await lease.acquire()
            answered = True
        except HeadraceError as error:
            log.warning("failed to get the lease %s, will retry: %s", name, error.description)
            answered = False
        try:
            yield lease if answered else None, is_held
        finally:
            await lease.release()

    async def _choose(self, lease: Lease) -> None:
        try:
            processes = await self._present()
            known = self._in_table()
            before = {name: one for name, one in {**self._chosen, **known}.items() if not self._is_left(one, processes)}
            known_by: dict[str, list[str]] = {name: [] for name in self._sources["registered"]()}
            for one in processes:
                for name in _names_in(self.table.get(key_of(_PROCESS, one.name)) or {}, "consumers"):
                    known_by.setdefault(name, []).append(one.name)
            consumers = [PlacedConsumer(name, self._config.copies, known_by=each) for name, each in known_by.items()]
            chosen = choose(consumers, processes, before)
            at = iso_time(self._clock.time())
            changes = {
                key_of(_PLACEMENT, name): {"processes": [*names], "at": at, "by": self.process}
                for name, names in chosen.items()
                if names and {*names} != {*known.get(name, ())}
            }
            if changes:
                await lease.check()
                log.info("placement: %d of %d consumers change their processes", len(changes), len(consumers))
                await self.table.put_all(changes)
        except HeadraceError as error:
            log.warning("failed to choose the placement, will retry: %s", error.description)

    async def _present(self) -> list[PlacedProcess]:
        """Return the processes that are here, or away for a short time; forget the others."""
        entries = {unquote(key[len(_PROCESS) :]): one for key, one in self.table.items(_PROCESS).items()}
        await self._leases.look({self._id_of(name) for name in entries if name != self.process})
        now, away = self._clock.monotonic(), [name for name in entries if self._leases.is_absent(self._id_of(name))]
        self._away = {name: self._away.get(name, now) for name in away}
        gone = [name for name, since in self._away.items() if now - since >= _AWAY_SECONDS]
        if gone:
            log.warning("placement: %s: away for %g s; others get their consumers", ", ".join(gone), _AWAY_SECONDS)
            await self.table.put_all({key_of(_PROCESS, name): None for name in gone})
        return [
            PlacedProcess(name, str(one.get("zone", "")), is_away=name in self._away)
            for name, one in entries.items()
            if name not in gone
        ]

    def _is_left(self, names: Sequence[str], processes: Sequence[PlacedProcess]) -> bool:
        """Whether all processes of a consumer are away long enough that others get it."""
        since = self._clock.monotonic() - _ALL_AWAY_SECONDS
        is_left = all(self._away.get(name, math.inf) <= since for name in names)
        return is_left and 2 * sum(one.is_away for one in processes) <= len(processes)

    def _id_of(self, process: str) -> str:
        """Return the name of a process among those of all deployments on the cluster."""
        return f"{self.table.topic.name}.{process}"


def _names_in(entry: Entry, field: str = "processes") -> list[str]:
    names = entry.get(field)
    return [str(name) for name in names] if isinstance(names, list) else []
