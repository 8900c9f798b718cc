"""Reactive consumers that teams register: entries of the control table, and which of them run.

The key of an entry has its owner and name, so no owner can overwrite another owner's entry. If registrations conflict
in their names, quotas or topics of a group, the first in the log wins. Every process reads the same log and decides
the same. A process whose entry loses removes it and reports the conflict.
"""

import dataclasses
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from headrace.commands.entries import key_of
from headrace.commands.reconciler import Reconciler
from headrace.config.registered import read_registration
from headrace.config.registrations import RegistrationConfig, RegistrationsConfig
from headrace.consumers.preconditions import TopicRequirement
from headrace.errors import Conflict, HeadraceError, InvalidRequest, NotFound, RegistrationQuota
from headrace.http.auth.principals import READ, Principal
from headrace.kafka import CompactedTable
from headrace.runtime import Clock, Deadline

log = logging.getLogger(__name__)

PREFIX: Final = "registration/"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_NEVER: Final = 2**63
_NO_TIME_MS: Final = 253_402_300_800_000
"""The year 10,000, which cannot be formatted."""
_RESERVED_GROUPS: Final = ("_", "headrace.")


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    """One entry of the table."""

    owner: str
    name: str
    version: int
    """Offset of the entry, which differs after each change."""
    since: int
    """Offset of the first entry with this name and these topics; the lowest one wins a conflict."""
    at_ms: int
    config: Mapping[str, Any]
    """The settings as the owner sent them."""
    principal: Principal | None
    """The caller that registered it, with its scopes at that time; None without authentication."""
    settings: RegistrationConfig | None = None
    """The checked settings; None if they are not allowed."""
    problem: HeadraceError | None = None
    """Why the settings are not allowed."""

    @property
    def key(self) -> str:
        """Key of its entry. A name has no slash, so the key is unique for every owner."""
        return f"{PREFIX}{self.owner}/{self.name}"

    @property
    def rank(self) -> tuple[int, str]:
        """Its rank in a conflict; the lowest one wins."""
        return self.since, self.key

    @property
    def topics(self) -> TopicRequirement | None:
        """The topics it reads; None if its settings are not allowed. Patterns count as all topics."""
        if not self.settings:
            return None
        matches = (lambda _: True) if self.settings.topic_patterns else None
        return TopicRequirement("another registration", self.settings.group, {*self.settings.topics}, matches)

    def may_read(self, topic: str) -> bool:
        """Return whether its owner's scopes allow reading a topic."""
        try:
            self.require("consume", topic)
        except HeadraceError:
            return False
        return True

    def require(self, action: str, name: str) -> None:
        """Raise Forbidden unless its owner's scopes allow a topic (`consume`) or a `group`."""
        if self.principal:
            self.principal.require((READ,), action, name)


@dataclasses.dataclass(frozen=True)
class RegistrationRules:
    """The rules of registrations: the operator's limits, and the consumers of the file."""

    allowed: RegistrationsConfig
    client_properties: Mapping[str, Any]
    names: Collection[str]
    """Names of the file's consumers."""
    required: Sequence[TopicRequirement]
    """Topics of the file's consumers."""
    is_internal: Callable[[str], bool]
    """Whether a topic is Kafka's or Headrace's own."""

    def refused(self, registrations: Iterable[Registration]) -> dict[str, HeadraceError]:
        """Return the registrations that do not run, and why, by key; the order of the argument does not matter."""
        refused: dict[str, HeadraceError] = {}
        taken = _Taken(self)
        for one in sorted(registrations, key=lambda one: one.rank):
            why = taken.conflict(one)
            if why is None:
                taken.add(one)
                why = one.problem
            if why:
                refused[one.key] = why
        return refused

    def conflict(self, one: Registration, others: Iterable[Registration]) -> HeadraceError | None:
        """Return why a registration must not be accepted.

        Earlier registrations count even if they are refused now. When their own conflict is resolved, they run, and
        must not then stop a registration that was accepted.
        """
        taken = _Taken(self)
        for other in others:
            if other.key != one.key and other.rank < one.rank:
                taken.add(other)
        return taken.conflict(one)

    def check(self, one: Registration) -> RegistrationConfig:
        """Return the checked settings of a registration.

        Raises:
            InvalidRequest: They are not valid, or not allowed.
            Forbidden: Its owner may not read one of the topics, or not in this group.
        """
        settings = read_registration(one.config, self.allowed, self.client_properties)
        if settings.group.startswith(_RESERVED_GROUPS):
            raise InvalidRequest(f"group {settings.group} has a reserved prefix: choose another group")
        one.require("group", settings.group)
        for topic in settings.topics:
            if self.is_internal(topic):
                raise InvalidRequest(f"topic {topic} is internal to Kafka or Headrace: remove it from topics")
            one.require("consume", topic)
        return settings


class _Taken:
    """Names, quotas and topics that are already taken."""

    def __init__(self, rules: RegistrationRules) -> None:
        self._allowed = rules.allowed
        self._names = dict.fromkeys(rules.names, "the file")
        self._count: Counter[str] = Counter()
        self._topics: defaultdict[str, list[TopicRequirement]] = defaultdict(list)
        for required in rules.required:
            self._topics[required.group].append(required)

    def add(self, one: Registration) -> None:
        self._names.setdefault(one.name, "another registration")
        self._count[one.owner] += 1
        if topics := one.topics:
            self._topics[topics.group].append(topics)

    def conflict(self, one: Registration) -> HeadraceError | None:
        allowed = self._allowed
        if one.name in self._names:
            return Conflict(f"{self._names[one.name]} already has the name {one.name}: choose another name")
        if self._count[one.owner] >= allowed.max_per_owner:
            return RegistrationQuota(
                f"limit reached: {one.owner} has {allowed.max_per_owner} registrations; remove one"
            )
        if self._count.total() >= allowed.max_in_all:
            return RegistrationQuota(
                f"limit reached: there are {allowed.max_in_all} registrations; the operator can raise "
                "registrations.max_in_all"
            )
        own = one.topics
        for other in self._topics[own.group] if own else ():
            both = {*own.topics} & {*other.topics, *other.retry_topics} if own else ()
            if both or (own and own.matches) or other.matches:
                what = f"topic {min(both)}" if both else "topics, possibly the same ones,"
                return Conflict(
                    f"{other.reader} already reads {what} in group {other.group}, so each would get only a part of "
                    "the records: choose another group"
                )
        return None


class Registrations(Reconciler):
    """The registrations as this process has read them; adds, changes and removes them."""

    def __init__(
        self,
        table: CompactedTable[Any],
        rules: RegistrationRules,
        clock: Clock,
        apply: Callable[[Mapping[str, Registration]], None],
        on_removed: Callable[[str], None],
    ) -> None:
        """Prepare; `apply` gets all registrations that must run, by name, whenever they may have changed.

        `on_removed` gets the name of a removed one that was running, before its control entries are removed.
        """
        super().__init__("registrations", table, clock)
        self._rules, self._apply, self._on_removed = rules, apply, on_removed
        self._running: dict[str, Registration] = {}
        self._entries: dict[str, Registration] = {}
        self._refused: dict[str, HeadraceError] = {}
        self._being_written: Counter[str] = Counter()
        self._read_back: dict[int, tuple[Registration | None, HeadraceError | None]] = {}
        self.watch(PREFIX, self._on_entry)

    async def start(self) -> None:
        self.publish("headrace_registrations", lambda: len(self._entries), state="stored")
        self.publish("headrace_registrations", lambda: len(self._refused), state="refused")
        await super().start()

    async def drain(self, deadline: Deadline) -> None:
        await self.cancel_tasks()  # from now on nothing starts

    def all_of(self, owner: str | None) -> list[Registration]:
        """Return the registrations of an owner, or of all, by name."""
        self.table.require()
        found = [one for one in self._entries.values() if owner is None or one.owner == owner]
        return sorted(found, key=lambda one: (one.name, one.since))

    def one_of(self, owner: str | None, name: str) -> Registration:
        """Return a registration of an owner; without an owner, the first one of this name.

        Raises:
            NotFound: The owner has no registration of this name.
        """
        found = [one for one in self.all_of(owner) if one.name == name]
        if not found:
            raise NotFound(f"registration {name} does not exist: see GET /reactive-consumers")
        return min(found, key=lambda one: (one.key in self._refused, one.since))

    def refusal_of(self, one: Registration) -> HeadraceError | None:
        """Return why a registration is not allowed to run, or None."""
        return self._refused.get(one.key)

    async def put(self, owner: str, principal: Principal | None, name: str, config: Any) -> tuple[Registration, bool]:
        """Add or change a registration; return it, and whether it is new. `principal` is None without authentication.

        Raises:
            InvalidRequest, Forbidden: The settings are not allowed.
            Conflict, RegistrationQuota: Earlier registrations conflict with it.
            KafkaError: It was not written, or perhaps not.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequest("the name is not valid: use up to 100 letters, digits, dots, underscores and hyphens")
        at_ms = int(self._clock.time() * 1000)
        requested = Registration(owner, name, -1, _NEVER, at_ms, config, principal)
        requested = dataclasses.replace(requested, settings=self._rules.check(requested))
        await self.table.catch_up()  # the caller may have changed it through another process just before
        present = self._entries.get(requested.key)
        refused = self._rules.refused(self._entries.values())
        if present and requested.key not in refused and present.topics == requested.topics:
            requested = dataclasses.replace(requested, since=present.since)  # other topics get a new rank
        if conflict := self._rules.conflict(requested, self._entries.values()):
            raise conflict
        return await self._write(requested), present is None

    async def _write(self, requested: Registration) -> Registration:
        """Write an entry, and remove it if an earlier entry in the log, not read before, conflicts with it."""
        key = requested.key
        self._being_written[key] += 1
        try:
            offset = await self.table.put(key, _entry(requested))
            before, conflict = self._read_back[offset]
        finally:
            self._being_written -= Counter([key])
            if not self._being_written:
                self._read_back.clear()
        written = dataclasses.replace(requested, version=offset, since=min(requested.since, offset))
        if written.since not in (offset, before.since if before else offset):
            conflict = Conflict(f"{written.name} was removed or changed at the same time: send it again")
        if conflict:
            if self.table.offset_of(key) == offset:
                if before and before.since != written.since:  # another registration may have taken its topics
                    before = dataclasses.replace(before, since=_NEVER)
                await self.table.put(key, _entry(before) if before else None)
            raise conflict
        return written

    async def remove(self, owner: str | None, name: str) -> None:
        """Remove a registration and its control entries; its group keeps its offsets.

        Raises:
            NotFound: It does not exist.
            KafkaError: It was not removed, or perhaps not.
        """
        await self.table.catch_up()
        present = self.one_of(owner, name)
        # Its pauses and settings are removed too, or the next one of this name would start paused. They stay if another
        # consumer has the name.
        entries = self._entries.values()
        has_name = present.key not in self._rules.refused(entries) or not (
            name in self._rules.names or any(one.name == name and one.key != present.key for one in entries)
        )
        control = [
            key
            for kind in (("hold/", "settings/", "seek/", "skip/", "placement/") if has_name else ())
            for key in self.table.items(key_of(kind, name))
            if f"{key}/".startswith(f"{key_of(kind, name)}/")
        ]
        await self.table.put_all(dict.fromkeys([present.key, *control]))

    def _on_entry(self, key: str, entry: Mapping[str, Any] | None) -> None:
        before = self._entries.pop(key, None)
        if entry is not None:
            one = self._entries[key] = self._registration(key, entry)
            if self._being_written[key]:  # only entries before this one in the log count
                self._read_back[one.version] = before, self._rules.conflict(one, self._entries.values())
        elif before and (running := self._running.get(before.name)) and running.key == key:
            self._on_removed(before.name)

    def _registration(self, key: str, entry: Mapping[str, Any]) -> Registration:
        owner, _, name = key[len(PREFIX) :].rpartition("/")
        version = self.table.offset_of(key)
        one = Registration(owner, name, version, version, 0, {}, None)
        try:
            scopes, since = entry.get("scopes"), int(entry.get("since", version))
            principal = None if scopes is None else Principal(owner, frozenset(map(str, scopes)))
            at_ms, config = int(entry["at"]), dict(entry["config"])
            one = dataclasses.replace(one, since=since, at_ms=at_ms, config=config, principal=principal)
            if not (owner and _NAME.fullmatch(name) and 0 <= at_ms < _NO_TIME_MS):
                raise ValueError("no owner, name or time")
            return dataclasses.replace(one, settings=self._rules.check(one))
        except HeadraceError as cause:
            problem = cause
        except (LookupError, TypeError, ValueError, OverflowError) as cause:
            problem = InvalidRequest(
                f"the entry in the control topic is damaged ({cause}): register it again, or remove it"
            )
        return dataclasses.replace(one, problem=problem)

    def reconcile(self) -> None:
        refused = self._rules.refused(self._entries.values())
        for key, error in refused.items():
            if str(self._refused.get(key)) != str(error):
                log.error("%s does not run: %s", key, error.description)
        self._refused = refused
        allowed = [one for one in self._entries.values() if one.key not in refused]
        self._running = {one.name: one for one in allowed if one.settings and one.settings.enabled}
        self._apply(self._running)


def _entry(one: Registration) -> dict[str, Any]:
    scopes = None if one.principal is None else sorted(one.principal.scopes)
    since = {} if one.since == _NEVER else {"since": one.since}
    return {"config": one.config, "scopes": scopes, "at": one.at_ms, **since}
