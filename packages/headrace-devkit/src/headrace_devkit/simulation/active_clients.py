"""Clients of active consumers: each creates instances over HTTP, reads, commits in its way, seeks, and goes away.

`commits` and `transactions` are the real `headrace.client`. The others know only the documented requests: `bare`
commits without a body, `offsets` with offsets, `auto` has auto commit, `stream` reads server-sent events.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

import msgspec

from headrace.client.exchange import ClientRequest, HttpReply, NewRecord, ResponseLost, RetryPolicy, Work
from headrace.client.operations import ClientOperations
from headrace.errors import CommitRefused, HeadraceError
from headrace.records import TopicPartition
from headrace_devkit.simulation.active_checker import GroupChecker, ReadingClient
from headrace_devkit.simulation.http_client import HttpConnection
from headrace_devkit.simulation.simulated_process import SimulatedProcess
from headrace_devkit.simulation.world import World

TOPIC: Final = "orders"
OUTPUT: Final = "processed"
KINDS: Final = ("bare", "offsets", "auto", "stream", "commits", "transactions")
_EXPECTED: Final = (0, 200, 204, 404, 409, 410, 429, 503, 504)
_GONE: Final = (404, 410)
_PATIENCE_SECONDS: Final = 40.0
_PAUSE_SECONDS: Final = 0.5


class Lost(Exception):
    """The client has no response, and has given up."""


class ClientRun(Protocol):
    """What a client knows of its run."""

    world: World
    is_healed: bool
    ends: bool

    def target(self, number: int) -> tuple[SimulatedProcess, int]:
        """Return the process that a client's next connection reaches, and its port."""

    def creation(self) -> dict[str, Any]:
        """Return further fields of the creation of an instance."""

    @property
    def idle_seconds(self) -> float:
        """How long an instance exists without a request."""

    @property
    def seeks(self) -> str:
        """`none`, `back`, or `any`."""

    @property
    def hostile(self) -> float:
        """How often a client does something unusual."""

    @property
    def is_forwarding(self) -> bool:
        """Whether a request may reach another process than the one with the instance."""


class ActiveClient:
    """One client, which has one instance after the other."""

    def __init__(self, run: ClientRun, checker: GroupChecker, kind: str, number: int) -> None:
        self.kind = kind
        self.number = number
        self._run = run
        self._chance = run.world.random
        self._checker = checker
        self._connections: list[HttpConnection] = []
        self._names = itertools.count(1)
        self._client = ClientOperations(RetryPolicy(6, 0.1, 2.0))
        # Of one instance
        self.state = ReadingClient(checker.group)
        self._path = ""
        self._last: dict[int, dict[str, Any]] = {}
        """By partition: the last record that is not committed."""
        self._event_id = ""

    # Requests --------------------------------------------------------------------------------------------------------

    async def run(self, work: Work[Any]) -> Any:
        """Carry out an operation of `headrace.client`."""
        try:
            step = next(work)
            while True:
                if not isinstance(step, ClientRequest):
                    await asyncio.sleep(step)
                    step = next(work)
                    continue
                body = b"" if step.body is None else msgspec.json.encode(step.body)
                try:
                    reply = await self.send(step.method, step.path, body, dict(step.headers), self._patience())
                except Lost as cause:
                    step = work.throw(ResponseLost(cause, sent=True))
                else:
                    step = work.send(reply)
        except StopIteration as end:
            return end.value

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> HttpReply:
        """Send a request of the instance, until it is answered with another status than 429, 503 and 504."""
        text = b"" if body is None else json.dumps(body).encode()
        while True:
            reply = await self.send(method, self._path + path, text, headers, self._patience())
            if reply.status not in (429, 503, 504) or self._run.ends:
                return reply
            await asyncio.sleep(_PAUSE_SECONDS)

    def _patience(self) -> float:
        impatient = not self._run.is_healed and self._chance.random() < self._run.hostile
        return self._chance.choice((0.002, 0.05, 1.0)) if impatient else _PATIENCE_SECONDS

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str], patience: float) -> HttpReply:
        """Send a request, and tell the checker of it; raise Lost if there is no response in time."""
        since, began = self._checker.acknowledged(), self._run.world.now
        self._before(path, body)
        connection = None
        try:
            async with asyncio.timeout(patience):
                connection = await self._connection()
                reply = await connection.send(
                    method, path, body, headers, on_reply=lambda reply: self._after(method, path, body, reply, since)
                )
        except (OSError, TimeoutError) as cause:
            self._give_up(connection, path)
            if patience == _PATIENCE_SECONDS and self._checker.is_calm and self._run.world.now - began > patience - 1:
                self._run.world.problem("SLOW", f"{method} {path} has no response after {patience:g} s")
            raise Lost(str(cause)) from None
        self._connections.append(connection)
        if reply.status not in _EXPECTED:
            self._run.world.problem("STATUS", f"{method} {path}: {reply.status} {reply.body.decode()[:200]}")
        return reply

    async def _connection(self) -> HttpConnection:
        while self._connections:
            kept = self._connections.pop()
            if kept.is_open and self._chance.random() < 0.7:
                return kept
            kept.transport.close()
        process, port = self._run.target(self.number)
        return await HttpConnection.open(process.name, port)

    def _give_up(self, connection: HttpConnection | None, path: str) -> None:
        if connection is None:
            return
        if "/positions" in path:
            self.state.wild |= self.state.unknown
        if "/records" in path:
            self.state.lose_response()
            unread = connection.transport.unread.partition(b"\r\n\r\n")[2]
            if self._run.is_forwarding and unread:
                self._checker.perhaps_receives(self.state, _records(unread))
        connection.abort()

    def _before(self, path: str, body: bytes) -> None:
        if "/positions" in path:
            for one in self._targets(path, body):
                self._checker.seeks(self.state, one["partition"], one["offset"], passes_over=self._run.seeks == "any")

    def _targets(self, path: str, body: bytes) -> list[dict[str, Any]]:
        request = json.loads(body)
        if path.endswith("/first"):
            return [{**one, "offset": 0} for one in request["partitions"]]
        return list(request["offsets"])

    def _after(self, method: str, path: str, body: bytes, reply: HttpReply, since: Any) -> None:
        """Tell the checker of a response, at the moment at which its last byte is read."""
        if reply.status >= 300:
            return
        if method == "GET" and "/records" in path:
            records = _records(reply.body)
            if self.kind == "auto":  # a read confirms those before
                since = None
            self._checker.receives(self.state, records, since)
            self._last |= {one["partition"]: one for one in records}
        elif method == "POST" and path.endswith("/offsets"):
            named = json.loads(body)["offsets"] if body else None
            entries = json.loads(reply.body) if named is None else named
            step = 0 if named is None else 1
            self._checker.commit_acknowledged((one["partition"], one["offset"] + step) for one in entries)
        elif path == "/transactions" and (consumer := json.loads(body).get("consumer")):
            self._checker.commit_acknowledged((one["partition"], one["offset"] + 1) for one in consumer["offsets"])
        elif "/positions" in path:
            for one in self._targets(path, body):
                self._checker.sought(self.state, one["partition"], one["offset"])

    # Its life --------------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Have one instance after the other, until the run ends."""
        while not self._run.ends:
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
            try:
                await (self._live_with_client() if self.kind in ("commits", "transactions") else self._live_by_hand())
            except (Lost, HeadraceError) as cause:
                self._run.world.note("client gives up", self.number, type(cause).__name__)

    def _vanishes(self) -> bool:
        """Whether it goes away without a word."""
        return not self._run.is_healed and self._chance.random() < 0.1 * self._run.hostile

    async def _vanish(self) -> bool:
        """Go away, and return after a while; return whether the instance is still this client's."""
        run = self._run
        for connection in self._connections if self._chance.random() < 0.5 else ():
            connection.abort()
        self._connections.clear()
        self.state.lose_response()  # a reset may leave it open whether the last response was read
        was_calm_until = run.world.now
        away = self._chance.choice((1.0, run.idle_seconds * 0.8, run.idle_seconds + 10.0))
        run.world.note("vanishes", self.number, round(away, 3))
        await asyncio.sleep(away)
        if away < run.idle_seconds:
            return True
        reply = await self.call("GET", "/subscriptions")
        if reply.status not in _GONE and self._checker.was_calm_since(was_calm_until):
            run.world.problem("IDLE", f"{self._path} exists after {away:g} s without a request: {reply.status}")
        return False

    def _renew(self) -> str:
        self.state = ReadingClient(self._checker.group)
        self._last = {}
        self._event_id = ""
        name = f"{self.kind}-{self.number}-{next(self._names)}"
        self._path = f"/consumers/{self._checker.group}/instances/{name}"
        return name

    # With `headrace.client` ------------------------------------------------------------------------------------------

    async def _live_with_client(self) -> None:
        name = self._renew()
        own = {**self._run.creation(), "name": name, "autoOffsetReset": "earliest", "valueFormat": "json"}
        consumer = self._client.instance(self._checker.group, [TOPIC], **own)
        await self.run(consumer.open())
        while not self._run.ends:
            wait, most = self._chance.choice((0.0, 0.5, 3.0)), self._chance.choice((1, 5, 500))
            records = await self.run(consumer.read(wait, most))
            await asyncio.sleep(self._chance.uniform(0.0, 0.3))
            if self._vanishes() and not await self._vanish():
                return
            if self._chance.random() < 0.5:
                await self._finish(consumer)
            if records and self._seeks():
                found = self._seek_target(records[-1].partition, records[-1].offset)
                await self.run(consumer.seek({TopicPartition(TOPIC, found["partition"]): found["offset"]}))
        await self.run(consumer.close())

    async def _finish(self, consumer: Any) -> None:
        """Commit what was returned, alone or with its results."""
        try:
            if self.kind == "commits":
                await self.run(consumer.commit())
            elif done := consumer.records.done:
                results = [
                    NewRecord(f"{partition.partition}-{offset}")
                    for (partition, _), span in done.items()
                    for offset in range(span.first, span.end)
                ]
                work = self._client.transaction({OUTPUT: results}, SimpleNamespace(operations=consumer))
                await self.run(work)
        except CommitRefused:
            self.state.lose_response()

    # With the documented requests only -------------------------------------------------------------------------------

    async def _live_by_hand(self) -> None:
        name = self._renew()
        creation = {**self._run.creation(), "name": name, "autoOffsetReset": "earliest", "valueFormat": "json"}
        if self.kind == "auto":
            creation |= {"autoCommitEnable": True, "auto.commit.interval.ms": 500}
        path, self._path = self._path, f"/consumers/{self._checker.group}"
        reply = await self.call("POST", "", creation, **{"Idempotency-Key": f'"{name}"'})
        self._path = path
        if reply.status != 200:
            return
        reply = await self.call("POST", "/subscriptions", {"topics": [TOPIC]})
        while reply.status not in _GONE and not self._run.ends:
            if self._vanishes() and not await self._vanish():
                return
            try:
                reply = await (self._stream() if self.kind == "stream" else self._read_and_commit())
            except Lost:
                await asyncio.sleep(self._chance.uniform(0.0, _PAUSE_SECONDS))
            else:
                await asyncio.sleep(self._chance.uniform(0.0, 0.3))
        if reply.status not in _GONE:
            await self.call("DELETE", "")

    async def _read_and_commit(self) -> HttpReply:
        chance = self._chance
        query = f"?timeout={chance.choice((0, 500, 3000))}&max_records={chance.choice((1, 5, 500))}"
        twice = not self._run.is_healed and chance.random() < self._run.hostile
        reads = [self.call("GET", f"/records{query}") for _ in range(2 if twice else 1)]
        replies = await asyncio.gather(*reads, return_exceptions=True)
        for cause in replies:
            if isinstance(cause, BaseException):
                raise cause
        if self.kind != "auto" and chance.random() < 0.5:
            await self._commit()
        if self._last and self._seeks():
            last = chance.choice([*self._last.values()])
            target = self._seek_target(last["partition"], last["offset"])
            self._last.pop(last["partition"])
            await self.call("POST", "/positions", {"offsets": [{"topic": TOPIC, **target}]})
        return [one for one in replies if isinstance(one, HttpReply)][-1]

    async def _commit(self) -> None:
        last, self._last = self._last, {}
        if self.kind == "bare":
            await self.call("POST", "/offsets")
        elif last:
            # Every second one knows of assignments.
            names = ("topic", "partition", "offset", "assignment")[: 3 + self.number % 2]
            offsets = [{name: one[name] for name in names} for one in last.values()]
            try:
                reply = await self.call("POST", "/offsets", {"offsets": offsets})
            except Lost:
                self._last = last | self._last
                raise
            if reply.status == 409:
                self.state.lose_response()

    async def _stream(self) -> HttpReply:
        """Read a stream for a while, commit what has arrived, and leave it."""
        events = _Events(self._take_event)
        headers = {"Accept": "text/event-stream"}
        if self._event_id and self._chance.random() < 0.7:
            headers["Last-Event-ID"] = self._event_id
        else:
            self.state.lose_response()
        self._event_id = ""
        connection = None
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                connection = await self._connection()
            async with asyncio.timeout(self._chance.uniform(0.5, 6.0)):
                path = f"{self._path}/records"
                reply = await connection.send("GET", path, b"", headers, on_part=events.feed)
                self.state.lose_response()
                return reply
        except TimeoutError:
            pass
        except OSError as cause:
            self.state.lose_response()
            raise Lost(str(cause)) from None
        finally:
            if connection:
                connection.abort()
        await self._commit()
        return HttpReply(200, b"", {})

    def _take_event(self, event_id: str, record: dict[str, Any]) -> None:
        self._event_id = event_id
        self._checker.receives(self.state, [record], None)
        self._last[record["partition"]] = record

    # Seeks -----------------------------------------------------------------------------------------------------------

    def _seeks(self) -> bool:
        run = self._run
        return not run.is_healed and run.seeks != "none" and self._chance.random() < 0.1

    def _seek_target(self, partition: int, offset: int) -> dict[str, int]:
        steps = self._chance.choice((-20, -5, -1) if self._run.seeks == "back" else (-20, -1, 3, 10))
        end = self._checker.end_of(partition)
        return {"partition": partition, "offset": max(0, min(offset + steps, end))}


class _Events:
    """Takes server-sent events apart."""

    def __init__(self, take: Callable[[str, dict[str, Any]], object]) -> None:
        self._take = take
        self._text = b""

    def feed(self, part: bytes) -> None:
        *events, self._text = (self._text + part).split(b"\n\n")
        for event in events:
            fields = dict(line.partition(b": ")[::2] for line in event.split(b"\n"))
            record = json.loads(fields.get(b"data", b"{}"))
            if "offset" in record and b"event" not in fields:
                self._take(fields[b"id"].decode(), record)


def _records(body: bytes) -> Sequence[dict[str, Any]]:
    """Return the records of a response; none if it is not whole."""
    try:
        found = json.loads(body)
    except ValueError:
        return []
    return found if isinstance(found, list) else []
