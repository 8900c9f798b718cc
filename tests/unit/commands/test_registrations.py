"""Registered consumers: the order of the log decides, and every process that reads it comes to the same end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace import errors
from headrace.commands.registration_table import PREFIX, Registration, RegistrationRules, Registrations
from headrace.config.registrations import RegistrationsConfig
from headrace.consumers.preconditions import TopicRequirement
from headrace.errors import Conflict, Forbidden, HeadraceError, NotFound, RegistrationQuota
from headrace.http.auth import Principal
from headrace.runtime.gauge_registry import GaugeKey, gauges
from headrace_devkit.testing import ManualClock
from yaml_table import table

Entry = Mapping[str, Any]
URL = "http://localhost:8444/in"
ALLOWED = RegistrationsConfig(backends=["http://localhost:8444/"], max_per_owner=2, max_in_all=3)
FILE = TopicRequirement("reactive_consumers.filed", "filed", ["orders"])


def config(group: str = "g", *topics: str, **more: Any) -> dict[str, Any]:
    return {"topics": list(topics or ("t",)), "group": group, "backend": {"url": URL}, **more}


class Table:
    """One process's view of a shared log, which it reads as far as the test lets it."""

    def __init__(self, log: list[tuple[str, Entry | None]], rng: random.Random | None = None) -> None:
        self.log = log
        self.rng = rng
        self.position = 0
        self.entries: dict[str, tuple[int, Entry]] = {}
        self.on_change: Callable[[str, Entry | None], None] = lambda key, entry: None

    def watch(self, prefix: str, on_change: Callable[[str, Entry | None], None]) -> None:
        assert prefix == PREFIX
        self.on_change = on_change

    def require(self) -> None:
        """It is read."""

    async def catch_up(self) -> None:
        if self.rng:
            await self._others()
            self.read()

    def items(self, prefix: str) -> dict[str, Entry]:
        return {key: entry for key, (_, entry) in self.entries.items() if key.startswith(prefix)}

    def offset_of(self, key: str) -> int:
        return self.entries[key][0]

    async def put(self, key: str, entry: Entry | None) -> int:
        return await self.put_all({key: entry})

    async def put_all(self, entries: Mapping[str, Entry | None]) -> int:
        if self.rng:
            await self._others()
        self.log.extend(entries.items())
        offset = len(self.log) - 1
        if self.rng:
            await self._others()
        self.read(offset + 1)
        return offset

    async def _others(self) -> None:
        assert self.rng
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)

    def read(self, end: int | None = None) -> None:
        """Read up to an offset, or all."""
        for offset in range(self.position, len(self.log) if end is None else max(end, self.position)):
            key, entry = self.log[offset]
            self.entries.pop(key, None)
            if entry is not None:
                self.entries[key] = (offset, entry)
            self.position = offset + 1
            if key.startswith(PREFIX):
                self.on_change(key, entry)


class Process:
    """One process: its view of the log, and what it runs."""

    def __init__(
        self, log: list[tuple[str, Entry | None]], allowed: RegistrationsConfig = ALLOWED, **more: Any
    ) -> None:
        self.table = Table(log, more.get("rng"))
        self.running: Mapping[str, Registration] = {}
        self.removed: list[str] = []
        rules = RegistrationRules(allowed, {}, {"filed"}, [FILE], lambda topic: topic.startswith("_"))
        self.made = Registrations(self.table, rules, ManualClock(), self._apply, self.removed.append)  # type: ignore[arg-type]

    def _apply(self, running: Mapping[str, Registration]) -> None:
        self.running = running

    async def settle(self) -> dict[str, tuple[str, int]]:
        """Read all, and return what runs: name to owner and version."""
        self.table.read()
        self.made.reconcile()
        return {name: (one.owner, one.version) for name, one in self.running.items()}

    async def put(self, owner: str, name: str, config: Any) -> Registration:
        return (await self.made.put(owner, None, name, config))[0]


async def refused(work: Coroutine[Any, Any, Any], error: type[HeadraceError]) -> str:
    with pytest.raises(error) as caught:
        await work
    return caught.value.description


async def test_the_first_one_has_names_topics_and_places() -> None:
    """Names, topics in a group, places: of the file, of others, of one's own; nothing is written."""
    log: list[tuple[str, Entry | None]] = []
    one = Process(log)
    await one.put("a", "x", config("g", "t"))
    size = len(log)
    for owner, name, group, more, error in table(__file__, "the_first_one_has_them"):
        await refused(one.put(owner, name, config(group, **more)), getattr(errors, error))
    assert len(log) == size
    await one.put("a", "y", config("g", "u"))
    assert "a has 2 registrations" in await refused(one.put("a", "z", config("h")), RegistrationQuota)
    await one.put("b", "v", config("filed", "payments"))
    assert "there are 3" in await refused(one.put("c", "w", config("h")), RegistrationQuota)
    await refused(one.put("b", "v", config("g", "t")), Conflict)
    assert (await one.settle())["v"][0] == "b"


async def test_a_removed_one_is_stopped_before_its_pauses_and_settings_are_removed() -> None:
    """Else it would deliver while it drains. The next one of its name does not begin paused; others keep theirs."""
    log: list[tuple[str, Entry | None]] = []
    process = Process(log)
    await process.put("a", "x", config())
    log += [(f"{PREFIX}b/x", {"config": config("h"), "at": 1}), (f"{PREFIX}b/x", None)]
    own = ["hold/x", "hold/x/t/0", "settings/x", "skip/x/t/0/1"]
    log += [(key, {}) for key in (*own, "hold/xy")]
    await process.settle()
    assert process.removed == []
    await process.made.remove("a", "x")
    assert process.removed == ["x"]
    assert log[-5:] == [(f"{PREFIX}a/x", None), *[(key, None) for key in own]]


async def test_entries_that_are_not_valid_any_more_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """The others run; log, gauge and whoever looks say why; nothing is taken away, so a wider list brings them back."""
    log: list[tuple[str, Entry | None]] = []
    before = Process(log)
    await before.put("a", "x", {**config(), "backend": {"url": "http://localhost:8444/other"}})
    await before.put("b", "y", config("h", max_in_flight=1))
    log += [
        (f"{PREFIX}c/z", {"config": "no object", "at": 1, "scopes": None}),
        (f"{PREFIX}c/v", {"config": config("v"), "at": "now"}),
        (f"{PREFIX}nobody", {"config": config("n"), "at": 1}),
        (f"{PREFIX}c/w", {}),
        (f"{PREFIX}c/u", {"config": config("u"), "at": float("inf")}),
        (f"{PREFIX}c/s", {"config": config("s"), "at": 10**17}),
    ]
    wide = RegistrationsConfig(**{**ALLOWED.model_dump(), "max_in_all": 9, "max_per_owner": 9})
    tight = RegistrationsConfig(**{**wide.model_dump(), "backends": [URL]})
    other = RegistrationsConfig(**{**wide.model_dump(), "backends": ["http://elsewhere/"]})
    process = Process(log, tight)
    await process.made.start()
    assert list(await process.settle()) == ["y"]
    why = {one.name: str(process.made.refusal_of(one)) for one in process.made.all_of(None)}
    assert "/other, which is not allowed here" in why["x"]
    assert all("damaged" in why[name] for name in ("z", "v", "w", "u", "s", "nobody"))
    assert why["y"] == "None"
    assert gauges()[GaugeKey("headrace_registrations", (("state", "stored"),))] == 8
    assert gauges()[GaugeKey("headrace_registrations", (("state", "refused"),))] == 7
    assert "registration/a/x does not run: backend: url is http://localhost:8444/other, which" in caplog.text
    assert "registration/c/z does not run" in caplog.text
    await process.made.stop()
    assert await Process(log, other).settle() == {}
    assert set(await Process(log, wide).settle()) == {"x", "y"}
    few = RegistrationsConfig(**{**wide.model_dump(), "max_in_all": 1})
    assert list(await Process(log, few).settle()) == ["x"]
    assert len(log) == 8


async def test_what_a_caller_may_read_counts_when_it_registers_and_after() -> None:
    """Its scopes are stored; topics that patterns find later are held against them too."""
    process = Process([])
    principal = Principal("a", frozenset(["consumers:w", "consume:t.*", "group:g*"]))
    for bad in (config("h", "t.1"), config("g", "u"), config("g", "t.1", "u")):
        await refused(process.made.put("a", principal, "x", bad), Forbidden)
    nothing = Principal("a", frozenset(["consumers:w"]))
    await refused(process.made.put("a", nothing, "x", config()), Forbidden)
    one, _ = await process.made.put("a", principal, "x", config("g1", "t.1", topic_patterns=[".*"]))
    await process.settle()
    assert [topic for topic in ("t.1", "t.2", "u", "_t.3") if process.running["x"].may_read(topic)] == ["t.1", "t.2"]
    assert one.principal == Principal("a", principal.scopes)


async def test_what_another_consumer_of_its_name_was_paused_with_stays() -> None:
    """A registration that is refused, because the file or another owner has its name, takes nothing of theirs along."""
    log: list[tuple[str, Entry | None]] = []
    process = Process(log)
    await process.put("a", "x", config())
    for name, group in (("x", "other"), ("filed", "third")):
        log += [(f"{PREFIX}b/{name}", {"config": config(group), "scopes": None, "at": 1}), (f"hold/{name}", {})]
    await process.settle()
    for name in ("x", "filed"):
        await process.made.remove("b", name)
    assert {"hold/x", "hold/filed"} < {*process.table.items("")}
    await process.made.remove("a", "x")
    assert "hold/x" not in process.table.items("")


OWNERS, NAMES, GROUPS = ("a", "b"), ("x", "y", "z"), ("g", "h")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "remove"]),
        st.integers(0, 1),
        st.sampled_from(OWNERS),
        st.sampled_from(NAMES),
        st.sampled_from(GROUPS),
        st.sampled_from([["t"], ["u"], ["t", "u"]]),
    ),
    max_size=12,
)


AT_ONCE = [
    *[("put", 0, "b", "y", "g", ["u"]), ("put", 0, "a", "z", "g", ["u"]), ("put", 0, "a", "x", "g", ["u"])],
    *[("put", 0, "a", "x", "g", ["t"])] * 3,
    *[("put", 0, "a", "y", "g", ["t"]), ("put", 0, "a", "z", "g", ["t"]), ("put", 0, "b", "x", "g", ["u"])],
    *[("put", 0, "b", "x", "h", ["t"]), ("put", 0, "b", "y", "h", ["t"]), ("put", 0, "b", "z", "g", ["u"])],
]
"""One that is too late may run for a moment when its rival has changed, until it is removed."""


@settings(max_examples=300, deadline=None)
@example(AT_ONCE, 0)
@given(STEPS, st.integers(0, 2**32))
def test_any_interleaving_ends_equal(steps: list[Any], seed: int) -> None:
    """Two processes act at once and read the log late; a third reads only what compaction leaves of it."""

    async def test() -> None:
        rng, log, said = random.Random(seed), [], []  # type: ignore[var-annotated]
        processes = [Process(log, rng=rng) for _ in range(2)]

        turns = {(owner, name): asyncio.Lock() for owner in OWNERS for name in NAMES}

        async def act(kind: str, process: Process, owner: str, name: str, group: str, topics: list[str]) -> None:
            async with turns[owner, name]:  # an owner waits for one response before it asks again for the same name
                await ask(kind, process, owner, name, group, topics)

        async def ask(kind: str, process: Process, owner: str, name: str, group: str, topics: list[str]) -> None:
            await process.table._others()
            try:
                if kind == "remove":
                    await process.made.remove(owner, name)
                else:
                    said.append(await process.put(owner, name, config(group, *topics)))
            except (HeadraceError, KeyError) as error:
                assert isinstance(error, NotFound | Conflict | RegistrationQuota), error

        await asyncio.gather(*(act(kind, processes[at], *more) for kind, at, *more in steps))
        ends = [await process.settle() for process in processes]
        last = {key: offset for offset, (key, _) in enumerate(log)}
        fresh = Process(log)
        for offset, (key, _) in enumerate(log):
            if last[key] != offset:
                log[offset] = (f"{PREFIX}gone/gone", None)
        ends.append(await fresh.settle())
        assert ends[0] == ends[1] == ends[2]
        running = fresh.running.values()
        assert all(count <= 2 for count in Counter(one.owner for one in running).values())
        assert len(running) <= 3
        pairs = [(one.settings.group, topic) for one in running if one.settings for topic in one.settings.topics]
        assert len(pairs) == len(set(pairs))
        for one in said:  # whoever was accepted runs, unless its own owner has changed or removed it since
            if last.get(one.key) == one.version:
                assert ends[0].get(one.name) == (one.owner, one.version)

    asyncio.run(test())
