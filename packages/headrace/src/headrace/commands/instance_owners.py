"""Which process has which active instance: entries of the control table.

instance/<group>/<name>/<process>     the process with this id has the instance, or had it until it stopped

If several processes create the same instance, the first in the log gets it. A process holds a lease while it runs.
When a process loses its lease, the others mark its instances as gone. If it still runs, it reads that and closes them.
"""

import logging
from collections.abc import Callable, Collection
from typing import Final
from urllib.parse import unquote

import msgspec

from headrace.commands.entries import key_of
from headrace.commands.reconciler import Entry, Reconciler
from headrace.errors import HeadraceError, InstanceExists, InstanceGone, InstanceNotFound, KafkaUnavailable
from headrace.kafka import Admin, CompactedTable, Lease
from headrace.kafka.lease import lease_holders
from headrace.records import OwningProcess
from headrace.runtime import Clock, Deadline, Readiness, chance

log = logging.getLogger(__name__)

_PREFIX: Final = "instance/"
_LOOK_SECONDS: Final = 30.0
_SOON_SECONDS: Final = 1.0
_CERTAIN_SECONDS: Final = 3.0
"""When the lease of a process had no holder for this time, its instances are marked as gone."""
_KEPT_SECONDS: Final = 600.0
"""How long entries of instances that are gone are kept, so that their clients get the exact error."""


class InstanceOwners(Reconciler):
    """Registers the instances of this process, and knows those of the others."""

    what: Final = "instance"
    """What errors call it."""

    def __init__(
        self, table: CompactedTable[Entry], url: str, lease_of: Callable[[str], Lease], admin: Admin, clock: Clock
    ) -> None:
        """Prepare; `url` is the URL of this process, and `lease_of` makes the lease of a name."""
        super().__init__("instance owners", table, clock)
        self.process = chance.token_hex(8)
        """Id of this process; each start makes a new one."""
        self._url = url
        self._lease = lease_of(lease_name(self.process))
        self._holds_lease = False
        self._entries: dict[tuple[str, str], dict[str, OwningProcess]] = {}
        """By group and name, then by process."""
        self._own: dict[tuple[str, str], Callable[[], None]] = {}
        """The instances of this process, and the function that closes each."""
        self._leases = OtherLeases(admin, clock)
        self._cleaning = False
        self._draining = False

    async def start(self) -> None:
        self.watch(_PREFIX, self._on_entry)
        await super().start()
        self.keep(self._hold_lease, "lease")

    async def drain(self, deadline: Deadline) -> None:
        """Mark the instances of this process as gone, so that their clients get an error at once."""
        self._draining = True
        found = {key: self._entries.get(key, {}).get(self.process) for key in self._own}
        self._own = {}
        if changes := {_key(key, self.process): self._gone(one) for key, one in found.items() if one}:
            await self.table.put_all(changes, deadline.remaining_seconds)

    async def stop(self) -> None:
        await super().stop()
        await self._lease.release()

    def readiness(self) -> Readiness:
        return Readiness(self._holds_lease, "this process does not hold its lease yet: check whether Kafka responds")

    async def find(self, key: tuple[str, ...]) -> OwningProcess | None:
        """Return the process that has an instance or last had it; None if the instance does not exist.

        Its key is its group and its name.

        Raises:
            KafkaError: The control table cannot be read.
        """
        group, name = key
        found = self._first(group, name)
        if found is None or found.gone_at is not None:  # it may have been created just before
            await self.table.catch_up()
            found = self._first(group, name)
        return found

    def missing(self, key: tuple[str, ...]) -> InstanceNotFound:
        """Return the error for an instance that does not exist, or belongs to another principal."""
        group, name = key
        return InstanceNotFound(f"group {group[:100]} has no instance {name[:100]}: create it, and subscribe it")

    def gone(self, key: tuple[str, ...]) -> InstanceGone:
        """Return the error for an instance whose process has ended."""
        group, name = key
        return InstanceGone(
            f"instance {name[:100]} of group {group[:100]} is gone: its process has ended; "
            "the group's commits are intact: create an instance again, and subscribe it"
        )

    async def claim(self, group: str, name: str, principal: str, close: Callable[[], None]) -> None:
        """Register an instance of this process. `close` is called if other processes mark it as gone.

        Raises:
            InstanceExists: Another process has an instance of this name.
            KafkaError: It is not, or perhaps not, written.
        """
        if not self._holds_lease or self._draining:
            raise KafkaUnavailable("this process is not registered with its peers yet: send the request again")
        key = (group, name)
        entry = OwningProcess(self.process, self._url, principal)
        self._refuse_second(group, name)
        self._own[key] = close
        try:
            await self.table.put(_key(key, self.process), msgspec.to_builtins(entry))
            self._refuse_second(group, name)
        except BaseException:
            await self.release(group, name)
            raise

    async def release(self, group: str, name: str) -> None:
        """Remove the entry of a closed instance. If that fails, it is removed later."""
        if self._own.pop((group, name), None):
            try:
                await self.table.put(_key((group, name), self.process), None)
            except HeadraceError as error:
                log.warning("failed to remove the entry of instance %s/%s, will retry: %s", group, name, error)

    def suspect(self) -> None:
        """Check the leases of the other processes soon, because one does not respond."""
        self._leases.are_suspect = True
        self.wake()

    def _first(self, group: str, name: str) -> OwningProcess | None:
        """Return the first owner in the log; those that still run come before those that are gone."""
        found = self._entries.get((group, name), {}).values()
        return min(
            found,
            key=lambda one: (one.gone_at is not None, self.table.offset_of(_key((group, name), one.process))),
            default=None,
        )

    def _refuse_second(self, group: str, name: str) -> None:
        first = self._first(group, name)
        if first and first.process != self.process and first.gone_at is None:
            self.suspect()
            raise InstanceExists(f"group {group} already has an instance {name}: choose another name, or delete it")

    def _on_entry(self, key: str, entry: Entry | None) -> None:
        try:
            group, name, process = [unquote(part) for part in key.split("/")[1:]]
            owner = None if entry is None else msgspec.convert(entry, OwningProcess)
        except ValueError as cause:
            log.error("ignored the control table entry %s, which is not a valid instance: %s", key, cause)
            return
        owners = self._entries.setdefault((group, name), {})
        owners.pop(process, None)
        if owner:
            owners[process] = owner
        elif not owners:
            del self._entries[group, name]
        is_lost = owner is None or owner.gone_at is not None
        if is_lost and process == self.process and (close := self._own.pop((group, name), None)):
            log.warning("closing instance %s/%s: other processes declared this process dead", group, name)
            close()

    def reconcile(self) -> float | None:
        """Start correcting entries that do not match the instances that exist."""
        if not self._cleaning and not self._draining:
            self._cleaning = True
            self.keep(self._clean, "clean")
        return self._leases.pause_seconds

    async def _clean(self) -> None:
        try:
            found = [one for owners in self._entries.values() for one in owners.values() if one.gone_at is None]
            await self._leases.look({one.process for one in found} - {self.process})
            now = self._clock.time()
            changes: dict[str, object] = {}
            for key, owners in self._entries.items():
                for process, one in owners.items():
                    if one.gone_at is not None:
                        if now - one.gone_at > _KEPT_SECONDS:
                            changes[_key(key, process)] = None
                    elif process == self.process:
                        if key not in self._own:
                            changes[_key(key, process)] = None
                    elif one.url == self._url or self._leases.is_lost(process):
                        changes[_key(key, process)] = self._gone(one)
            if changes:
                await self.table.put_all(changes)
        except HeadraceError as error:
            log.warning("failed to correct instance entries, will retry: %s", error.description)
        self._cleaning = False

    def _gone(self, owner: OwningProcess) -> object:
        return msgspec.to_builtins(msgspec.structs.replace(owner, gone_at=self._clock.time()))

    async def _hold_lease(self) -> None:
        while True:
            try:
                self._holds_lease = await self._lease.acquire()
                if self._holds_lease:
                    await self._lease.lost.wait()
                    log.warning("this process lost its lease: other processes may mark its instances as gone")
            except HeadraceError as error:
                log.warning("this process is not registered with its peers yet, will retry: %s", error.description)
            self._holds_lease = False
            await self._lease.release()
            await self._clock.sleep(_SOON_SECONDS)


class OtherLeases:
    """The leases of the other processes, looked at often while one has no holder or is suspect, else rarely."""

    def __init__(self, admin: Admin, clock: Clock) -> None:
        self._admin = admin
        self._clock = clock
        self.are_suspect = False
        self._looked_at = 0.0
        self._absent: dict[str, float] = {}
        """Processes whose lease has no holder, and since when by the monotonic clock."""

    @property
    def pause_seconds(self) -> float:
        """The least time from one look to the next."""
        return _SOON_SECONDS if self.are_suspect or self._absent else _LOOK_SECONDS

    def is_lost(self, process: str) -> bool:
        """Return whether the lease of a process has had no holder for long enough to be certain."""
        certain = self._clock.monotonic() - _CERTAIN_SECONDS
        return self._absent.get(process, certain) < certain

    def is_absent(self, process: str) -> bool:
        """Return whether the lease of a process had no holder at the last look."""
        return process in self._absent

    async def look(self, processes: Collection[str]) -> None:
        """Look at the leases of these processes, if it is time.

        Raises:
            KafkaError: Kafka does not answer.
        """
        now = self._clock.monotonic()
        if now - self._looked_at < self.pause_seconds:
            return
        self._looked_at = now
        self.are_suspect = False
        self._absent = {process: since for process, since in self._absent.items() if process in processes}
        holders = await lease_holders(self._admin, [lease_name(process) for process in processes])
        for process in processes:
            if holders[lease_name(process)]:
                self._absent.pop(process, None)
            else:
                self._absent.setdefault(process, now)


def _key(instance: tuple[str, str], process: str) -> str:
    return key_of(_PREFIX, *instance, process)


def lease_name(process: str) -> str:
    """Return the name of the lease that a process holds while it runs."""
    return f"process.{process}"
