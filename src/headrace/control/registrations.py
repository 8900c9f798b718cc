"""Reactive consumers that teams register: entries of the control table, and which of them run.

An entry stands under its owner and name, so nobody can write over another's. Which one has a name, a place within the
quota, or a topic in a group is decided by the order in which they were registered, as the log has it: every process
that reads the same table comes to the same end. Whoever finds that it came too late takes its own entry back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from headrace.config.registered import check_size, read_registration
from headrace.config.registrations import RegistrationConfig, RegistrationsConfig
from headrace.config.section import fits_any
from headrace.control.entries import key_of
from headrace.control.preconditions import TopicRequirement
from headrace.errors import (
    HeadraceError,
    InvalidRequest,
    NotFound,
    RegistrationConflict,
    RegistrationQuota,
)
from headrace.kafka import CompactedTable
from headrace.lifecycle import Clock, Deadline, Service
from headrace.lifecycle.gauge_registry import register_gauge, unregister_gauge
from headrace.security.principals import READ, Principal

log = logging.getLogger(__name__)

PREFIX: Final = "registration/"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_GAUGES: Final = ("headrace_registrations", "headrace_refused_registrations")
_NEVER: Final = 2**63
_NO_TIME_MS: Final = 253_402_300_800_000
"""The year 10,000, which cannot be shown."""
_OUR_GROUPS: Final = "headrace."


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """One entry, as it was written."""

    owner: str
    name: str
    version: int
    """Where in the log it stands; another one after each change."""
    since: int
    """The version it had at first; its place in the queue."""
    at_ms: int
    config: Mapping[str, Any]
    """What its owner sent."""
    principal: Principal | None
    """Who registered it, with the scopes of that time; None where nobody has to say."""
    settings: RegistrationConfig | None = None
    """The same, read; None if it cannot be run."""
    problem: HeadraceError | None = None
    """Why not."""

    @property
    def key(self) -> str:
        """Key of its entry; a name has no slash, so whatever the owner is called, it has one meaning."""
        return f"{PREFIX}{self.owner}/{self.name}"

    def may_read(self, topic: str) -> bool:
        """Return whether its owner's scopes allow a topic."""
        try:
            self.require("consume", topic)
        except HeadraceError:
            return False
        return True

    def require(self, action: str, name: str) -> None:
        """Return if its owner's scopes allow a topic (`consume`) or a `group`.

        Raises:
            Forbidden: They do not.
        """
        if self.principal:
            self.principal.require((READ,), action, name)


@dataclasses.dataclass(frozen=True)
class RegistrationRules:
    """What stands in the file, beside which registrations live."""

    allowed: RegistrationsConfig
    client_properties: Mapping[str, Any]
    names: Collection[str]
    readers: Sequence[TopicRequirement]
    is_ours: Callable[[str], bool]
    """Whether a topic is Headrace's own."""

    def refusals(self, registrations: Iterable[Registration]) -> dict[str, HeadraceError]:
        """Return which registrations do not run, and why, by key: a function of the set, whatever order it comes in."""
        refused: dict[str, HeadraceError] = {}
        held = dict.fromkeys(self.names, "the file")
        groups: dict[str, list[TopicRequirement]] = defaultdict(list)
        for reader in self.readers:
            groups[reader.group].append(reader)
        count: Counter[str] = Counter()
        for one in sorted(registrations, key=lambda one: (one.since, one.key)):
            mine = _reader(one)
            if why := self._too_late(one, held, count) or (mine and _clash(mine, groups[mine.group])):
                refused[one.key] = why
                continue
            held[one.name] = "another registration"
            count[one.owner] += 1
            if mine:
                groups[mine.group].append(mine)
            if one.problem:
                refused[one.key] = one.problem
        return refused

    def objection(self, one: Registration, others: Iterable[Registration]) -> HeadraceError | None:
        """Return why a registration cannot have its place for good.

        All that came before it count, those too that are refused now: one of them may be allowed to run later, when
        what it clashes with goes, and then nobody who was told yes may have to give way.
        """
        before = [other for other in others if (other.since, other.key) < (one.since, one.key) and other.key != one.key]
        held = {**{other.name: "another registration" for other in before}, **dict.fromkeys(self.names, "the file")}
        readers = [*self.readers, *filter(None, map(_reader, before))]
        mine, count = _reader(one), Counter(other.owner for other in before)
        late = self._too_late(one, held, count)
        return late or (mine and _clash(mine, [reader for reader in readers if reader.group == mine.group]))

    def _too_late(self, one: Registration, held: Mapping[str, str], count: Counter[str]) -> HeadraceError | None:
        allowed = self.allowed
        if one.name in held:
            return RegistrationConflict(f"the name {one.name} belongs to {held[one.name]}: take another name")
        if count[one.owner] >= allowed.max_per_owner:
            return RegistrationQuota(f"{one.owner} has {allowed.max_per_owner} registrations: remove one first")
        if count.total() >= allowed.max_in_all:
            return RegistrationQuota(f"there are {allowed.max_in_all} registrations: ask the operator for more room")
        return None

    def read(self, one: Registration) -> RegistrationConfig:
        """Return a registration's settings.

        Raises:
            InvalidRequest: They are not usable, or not allowed.
            Forbidden: Its owner may not read such a topic, or not in such a group.
        """
        settings = read_registration(one.config, self.allowed, self.client_properties)
        if settings.group.startswith(("_", _OUR_GROUPS)):
            raise InvalidRequest(f"group is {settings.group}, and what begins so is Headrace's own: take another")
        one.require("group", settings.group)
        for topic in settings.topics:
            if self.is_ours(topic):
                raise InvalidRequest(f"topics names {topic}, which is Kafka's or Headrace's own: take it out")
            one.require("consume", topic)
        return settings


def _reader(one: Registration) -> TopicRequirement | None:
    if not one.settings:
        return None
    settings = one.settings
    matches = fits_any(settings.topic_patterns) if settings.topic_patterns else None
    return TopicRequirement("another registration", settings.group, settings.topics, matches)


def _clash(mine: TopicRequirement, beside: Iterable[TopicRequirement]) -> HeadraceError | None:
    for other in beside:
        both = {*mine.topics, *mine.retry_topics} & {*other.topics, *other.retry_topics}
        if both or mine.matches or other.matches:
            what = f"topic {min(both)}" if both else "topics, perhaps the same,"
            return RegistrationConflict(
                f"{other.reader} reads {what} in the group {other.group} already, so each would get only a part: take "
                "another group"
            )
    return None


class Registrations(Service):
    """This process's view of all registrations; and changing them."""

    def __init__(
        self,
        table: CompactedTable[Any],
        rules: RegistrationRules,
        clock: Clock,
        apply: Callable[[Mapping[str, Registration]], None],
        removed: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            table: Where they are kept.
            rules: What they must conform to.
            clock: Tells when one was changed.
            apply: Is called with all that are to run, by name, whenever that may have changed.
            removed: Is called with the name of one that ran and was removed, before what it was steered with goes.
        """
        super().__init__("registrations")
        self._table = table
        self._rules = rules
        self._clock = clock
        self._apply = apply
        self._removed = removed
        self._running: dict[str, Registration] = {}
        self._held: dict[str, Registration] = {}
        self._awaited: Counter[str] = Counter()
        self._arrived: dict[int, tuple[Registration | None, HeadraceError | None]] = {}
        self._refused: dict[str, HeadraceError] = {}
        self._changed = asyncio.Event()
        table.watch(PREFIX, self._note)

    async def start(self) -> None:
        register_gauge(_GAUGES[0], lambda: len(self._held))
        register_gauge(_GAUGES[1], lambda: len(self._refused))
        self.spawn(self._settle_often(), "settle")

    async def drain(self, deadline: Deadline) -> None:
        await self.cancel_tasks()  # nothing begins any more

    async def stop(self) -> None:
        for gauge in _GAUGES:
            unregister_gauge(gauge)
        await super().stop()

    def check_size(self, size_bytes: int) -> None:
        """Return if a body may be read.

        Raises:
            InvalidRequest: It is too large.
        """
        check_size(size_bytes, self._rules.allowed)

    def all_of(self, owner: str | None) -> list[Registration]:
        """Return the registrations of an owner, or of all, by name."""
        self._table.require()
        found = [one for one in self._held.values() if owner is None or one.owner == owner]
        return sorted(found, key=lambda one: (one.name, one.since))

    def one_of(self, owner: str | None, name: str) -> Registration:
        """Return a registration; with owner None anybody's, the one that has the name first.

        Raises:
            NotFound: The owner has none of this name, whoever else has.
        """
        found = [one for one in self.all_of(owner) if one.name == name]
        if not found:
            raise NotFound(f"no registration {name}: see GET /reactive-consumers")
        return min(found, key=lambda one: (one.key in self._refused, one.since))

    def refusal_of(self, one: Registration) -> HeadraceError | None:
        """Return why a registration does not run, if it may not."""
        return self._refused.get(one.key)

    async def put(self, owner: str, principal: Principal | None, name: str, config: Any) -> tuple[Registration, bool]:
        """Register, or change what is registered.

        Args:
            owner: Whose it is.
            principal: Who asks; None where nobody has to say.
            name: Its name.
            config: Its settings.

        Returns:
            It, and whether it is new.

        Raises:
            InvalidRequest, Forbidden: The settings are not allowed.
            RegistrationConflict, RegistrationQuota: Others came first.
            KafkaError: It could not be written, or that is not known.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "the name is not usable: take up to 100 letters, digits, dots, underscores and hyphens"
            )
        wanted = Registration(owner, name, -1, _NEVER, self._now_ms(), config, principal)
        wanted = dataclasses.replace(wanted, settings=self._rules.read(wanted))
        await self._table.catch_up()  # the same caller may have asked another process just before
        present = self._held.get(wanted.key)
        refused = self._rules.refusals(self._held.values())
        if present and wanted.key not in refused and _reader(present) == _reader(wanted):
            wanted = dataclasses.replace(wanted, since=present.since)  # else it queues anew for what it wants now
        if late := self._rules.objection(wanted, self._held.values()):
            raise late
        return await self._write(wanted), present is None

    async def _write(self, wanted: Registration) -> Registration:
        """Write an entry; take it back if by the log something came before it that was not read yet."""
        key = wanted.key
        self._awaited[key] += 1
        try:
            offset = await self._table.put(key, _entry(wanted))
            before, refused = self._arrived[offset]
        finally:
            self._awaited -= Counter([key])
            if not self._awaited:
                self._arrived.clear()
        written = dataclasses.replace(wanted, version=offset, since=min(wanted.since, offset))
        if late := _late(written, before) or refused:
            if self._table.offset_of(key) == offset:
                if before and before.since != written.since:  # the place is given up, somebody may have it by now
                    before = dataclasses.replace(before, since=_NEVER)
                await self._table.put(key, _entry(before) if before else None)
            raise late
        return written

    async def remove(self, owner: str | None, name: str) -> None:
        """Take a registration away; its group keeps its offsets.

        Raises:
            NotFound: There is none.
            KafkaError: It could not be taken away, or that is not known.
        """
        await self._table.catch_up()
        present = self.one_of(owner, name)
        # What it was steered with goes too, or the next one of this name would begin paused.
        steered = [
            key
            for kind in ("hold/", "settings/", "seek/", "skip/")
            for key in self._table.items(key_of(kind, name))
            if f"{key}/".startswith(f"{key_of(kind, name)}/")
        ]
        await self._table.put_all(dict.fromkeys([present.key, *steered]))

    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)

    def _note(self, key: str, entry: Mapping[str, Any] | None) -> None:
        before = self._held.pop(key, None)
        if entry is not None:
            one = self._held[key] = self._registration(key, entry)
            if self._awaited[key]:  # what was decided at this place of the log stands, whatever follows
                self._arrived[one.version] = before, self._rules.objection(one, self._held.values())
        elif before and (running := self._running.get(before.name)) and running.key == key:
            self._removed(before.name)
        self._changed.set()

    def _registration(self, key: str, entry: Mapping[str, Any]) -> Registration:
        owner, _, name = key[len(PREFIX) :].rpartition("/")
        version = self._table.offset_of(key)
        one = Registration(owner, name, version, version, 0, {}, None)
        try:
            scopes, since = entry.get("scopes"), int(entry.get("since", version))
            principal = None if scopes is None else Principal(owner, frozenset(map(str, scopes)))
            at_ms, config = int(entry["at"]), dict(entry["config"])
            one = dataclasses.replace(one, since=since, at_ms=at_ms, config=config, principal=principal)
            if not (owner and _NAME.fullmatch(name) and 0 <= at_ms < _NO_TIME_MS):
                raise ValueError("no owner, name or time")
            return dataclasses.replace(one, settings=self._rules.read(one))
        except HeadraceError as cause:
            problem = cause
        except (LookupError, TypeError, ValueError, OverflowError) as cause:
            problem = InvalidRequest(
                f"the entry in the control topic is damaged ({cause}): send it again, or remove it"
            )
        return dataclasses.replace(one, problem=problem)

    async def _settle_often(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._settle()

    def _settle(self) -> None:
        refused = self._rules.refusals(self._held.values())
        for key, error in refused.items():
            if str(self._refused.get(key)) != str(error):
                log.error("%s does not run: %s", key, error.description)
        self._refused = refused
        allowed = [one for one in self._held.values() if one.key not in refused]
        self._running = {one.name: one for one in allowed if one.settings and one.settings.enabled}
        self._apply(self._running)


def _late(written: Registration, before: Registration | None) -> HeadraceError | None:
    if written.since not in (written.version, before.since if before else written.version):
        return RegistrationConflict(f"{written.name} was removed or changed at the same time: send it again")
    return None


def _entry(one: Registration) -> dict[str, Any]:
    scopes = None if one.principal is None else sorted(one.principal.scopes)
    since = {} if one.since == _NEVER else {"since": one.since}
    return {"config": one.config, "scopes": scopes, "at": one.at_ms, **since}
