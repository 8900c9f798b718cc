"""Measure the console before a stand-in for a big Headrace, and attack it: `python -m bench.console`.

The stand-in has 200 consumers, and 1,000 partitions of one consumer and of one topic. It needs a Chromium.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from bench.machine import TICKS_PER_SECOND, process_times
from headrace.commands.consumer_status import BreakerDetails, Details, PartitionDetails
from headrace.delivery.status import SettingsInForce
from headrace.runtime import LoopThread
from tests.chromium import chromium, tab

CONSUMERS: Final = 200
PARTITIONS: Final = 1_000
VIEWS: Final = {
    "overview": ("/", "Consumers and functions"),
    "200 consumers": ("/consumers", "consumer-7"),
    "consumer with 1,000 partitions": ("/consumer?name=consumer-0", "orders-7"),
    "topic with 1,000 partitions": ("/topic?name=orders", "every partition is replicated"),
    "200 groups": ("/groups", "group-7"),
    "200 topics": ("/topics", "topic-10"),
}
"""Each view: its page, and a text that it has once it is complete."""
_IDLE_SECONDS: Final = 15.0
_LOGINS: Final = 500
_OPEN_PAGES: Final = 50
_TOKEN: Final = "a-token-of-an-operator"


class StandIn:
    """What the console asks of a Headrace; counts grow with each request, and it can stop to respond."""

    def __init__(self, token: str = "") -> None:
        self.silent = False
        self.requests = 0
        self._token = token
        self._thread = LoopThread("stand-in")
        self.url = self._thread.call(self._listen(), limit_seconds=10)

    async def _listen(self) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._respond)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _respond(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.silent:
            await asyncio.sleep(3600)
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            return web.json_response({"code": "ERR10000", "description": "no valid token"}, status=401)
        body = self._body(request.path)
        found = {"code": "ERR10007", "description": "no such path"} if body is None else body
        return web.Response(body=msgspec.json.encode(found), status=404 if body is None else 200)

    def _body(self, path: str) -> Any:
        if path == "/adm/reactive-consumers":
            return {"consumers": [self._consumer(number, 8) for number in range(CONSUMERS)]}
        if path.startswith("/adm/reactive-consumers/"):
            return self._consumer(0, PARTITIONS)
        if path == "/topics/orders":
            replicas = [{"broker": broker, "in_sync": True} for broker in (1, 2, 3)]
            return {
                **_topic("orders"),
                "partitions": [
                    {"partition": number, "leader": 1, "replicas": replicas, "problem": ""}
                    | {"first_offset": 0, "end_offset": self.requests + number}
                    for number in range(PARTITIONS)
                ],
            }
        if path.startswith("/topics/topic-"):
            return _topic(path.rpartition("/")[2])
        return {
            "/adm/server/info": {},
            "/health/readiness": {"ready": True, "services": {"kafka": {"ready": True, "reason": ""}}},
            "/adm/pipelines": {"pipelines": []},
            "/tables": {"tables": []},
            "/adm/dead-letters": {"topics": []},
            "/topics/orders/configs": {"configs": []},
            "/topics": [f"topic-{number}" for number in range(CONSUMERS)],
            "/groups": {"groups": [_group(f"group-{number}") for number in range(CONSUMERS)]},
        }.get(path)

    def _consumer(self, number: int, partitions: int) -> Details:
        shown = [
            PartitionDetails("orders", one, True, "m", self.requests, 1, self.requests + one, one, 0, 0, None, None, "")
            for one in range(partitions)
        ]
        return Details(
            name=f"consumer-{number}",
            kind="reactive",
            group=f"group-{number}",
            topics=["orders"],
            destination="http://127.0.0.1:9/orders",
            owner="",
            paused=None,
            settings=SettingsInForce(None, 1, 1, 0.0, 1),
            breaker=BreakerDetails("closed", None, ""),
            counts={"processed": self.requests * (number + 1)},
            partitions_assigned=partitions,
            lag=self.requests % 1000 + number,
            in_flight=number,
            open=0,
            oldest_seconds=None,
            attempts=0,
            why="",
            kafka=None,
            partitions=shown if partitions > CONSUMERS else [],
            commands=[],
        )


def _topic(name: str) -> dict[str, Any]:
    fields = {"name": name, "replication_factor": 3, "records": 7, "under_replicated": 0, "kind": ""}
    return {**fields, "internal": False, "configs": {}, "partitions": []}


def _group(name: str) -> dict[str, Any]:
    return {"group": name, "state": "stable", "members": 1, "kind": "reactive consumer", "type": "classic"}


class ConsoleUnderTest:
    """A console process and what it takes."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "headrace.cli.main", "console", "--port", "0", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.url = re.search(r"console (\S+)", self._process.stdout.readline())[1]  # type: ignore[index]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{self._process.pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) / 1024 if found else 0.0

    def share(self, seconds: float) -> float:
        """Return which share of a core it takes while this many seconds pass, in percent."""
        before = self.seconds
        time.sleep(seconds)
        return 100 * (self.seconds - before) / seconds

    @property
    def seconds(self) -> float:
        """Processor time until now."""
        return process_times(Path(f"/proc/{self._process.pid}/stat").read_text()).ticks / TICKS_PER_SECOND

    def request(self, method: str, path: str, body: str = "", cookie: str = "", limit_seconds: float = 30.0) -> int:
        """Send a request on a connection of its own, and return its status."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=limit_seconds)
        headers = {"Origin": self.url, "Content-Type": "application/x-www-form-urlencoded", "Cookie": cookie}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        finally:
            connection.close()

    def seconds_of(self, path: str, **given: Any) -> float:
        """Return how long a page takes without a browser."""
        begun = time.monotonic()
        self.request("GET", path, **given)
        return time.monotonic() - begun

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def measure() -> Iterator[tuple[str, str]]:
    """Measure the pages."""
    server = StandIn()
    begun = time.monotonic()
    console = ConsoleUnderTest("--url", server.url)
    yield "start to its address", f"{time.monotonic() - begun:.2f} s"
    yield "memory at start", f"{console.megabytes:.0f} MB"
    with chromium() as browser, tab(browser) as page:
        for name, (path, text) in {"first page, cold browser": VIEWS["overview"], **VIEWS}.items():
            begun, before = time.monotonic(), console.seconds
            page.goto(console.url + path)
            page.get_by_text(text, exact=True).first.wait_for()
            taken, used = time.monotonic() - begun, console.seconds - before
            time.sleep(3)
            share = console.share(_IDLE_SECONDS)
            yield name, f"{taken:.2f} s, {used:.2f} s of a processor; open: {share:.1f} % of one"
        yield "memory, one page open, all views visited", f"{console.megabytes:.0f} MB"
        pages = [page.context.new_page() for _ in range(_OPEN_PAGES)]
        for number, one in enumerate(pages):
            one.goto(console.url + [*VIEWS.values()][number % len(VIEWS)][0])
        time.sleep(5)
        yield f"memory, {_OPEN_PAGES} pages open", f"{console.megabytes:.0f} MB"
        yield f"processor, {_OPEN_PAGES} pages open", f"{console.share(_IDLE_SECONDS):.1f} %"
        begun = time.monotonic()
        page.goto(console.url)
        page.get_by_text("consumer-7", exact=True).first.wait_for()
        yield f"overview, {_OPEN_PAGES} pages open", f"{time.monotonic() - begun:.2f} s"
    time.sleep(15)
    yield "idle, no page open", f"{console.megabytes:.0f} MB, {console.share(_IDLE_SECONDS):.1f} %"
    console.stop()


def attack_logins() -> Iterator[tuple[str, str]]:
    """Send wrong tokens, to a Headrace that responds and to one that does not, while others look at pages."""
    server = StandIn(_TOKEN)
    console = ConsoleUnderTest("--url", server.url, "--url", server.url)
    connection = http.client.HTTPConnection("127.0.0.1", console.port)
    connection.request("POST", "/login", f"token={_TOKEN}", {"Origin": console.url})
    cookie = connection.getresponse().headers["set-cookie"].partition(";")[0]
    for silent in (False, True):
        server.silent = silent
        stop, sent, statuses = time.monotonic() + 10, [0], dict[Any, int]()

        def flood(stop: float = stop, sent: list[int] = sent, statuses: dict[Any, int] = statuses) -> None:
            while (now := time.monotonic()) < stop:
                sent[0] += 1
                try:
                    status: Any = console.request("POST", "/login", "token=wrong", limit_seconds=5)
                except OSError as cause:
                    status = type(cause).__name__
                statuses[status] = statuses.get(status, 0) + 1
                time.sleep(max(0.0, now + 0.1 - time.monotonic()))

        before = console.megabytes
        with ThreadPoolExecutor(_LOGINS // 10) as pool:
            for _ in range(_LOGINS // 10):
                pool.submit(flood)
            times = [console.seconds_of("/consumers", cookie=cookie) for _ in range(5)]
            tries = server.requests
            most = max(times)
        name = "silent Headrace" if silent else "Headrace that responds"
        yield f"logins before a {name}", f"{sent[0] / 10:.0f}/s sent, {statuses}, {tries} requests"
        yield "  a page meanwhile", f"{most:.2f} s; memory {before:.0f} to {console.megabytes:.0f} MB"
    console.stop()


def attack_silence() -> Iterator[tuple[str, str]]:
    """Open pages while the only Headrace accepts and never responds."""
    server = StandIn()
    console = ConsoleUnderTest("--url", server.url)
    server.silent = True
    with chromium() as browser:
        context = browser.new_context()
        for path in ("/", "/consumers", "/topic?name=orders", "/dead-letters", "/pipelines", "/audit"):
            page = context.new_page()
            begun = time.monotonic()
            found = page.goto(console.url + path)
            taken = time.monotonic() - begun
            page.locator(".hr-banner").get_by_text("Since").wait_for(timeout=30_000)
            yield f"silent: {path}", f"{found.status} in {taken:.2f} s, banner in {time.monotonic() - begun:.1f} s"
        server.silent = False
        begun = time.monotonic()
        page = context.pages[0]
        page.get_by_text("consumer-7", exact=True).first.wait_for(timeout=30_000)
        yield "silent: recovered without a reload", f"{time.monotonic() - begun:.1f} s"
    yield "silent: memory", f"{console.megabytes:.0f} MB"
    console.stop()


def attack_pages() -> Iterator[tuple[str, str]]:
    """Request pages that no browser opens, as fast as it goes."""
    server = StandIn()
    console = ConsoleUnderTest("--url", server.url)
    counts = dict[Any, int]()

    def request(_: int) -> None:
        try:
            status: Any = console.request("GET", "/consumers")
        except OSError as cause:
            status = type(cause).__name__
        counts[status] = counts.get(status, 0) + 1

    begun = time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(request, range(500)))
    yield "500 pages without a browser", f"{counts} in {time.monotonic() - begun:.0f} s, {console.megabytes:.0f} MB"
    console.stop()


def main() -> None:
    """Print what was measured."""
    parts = {one.__name__: one for one in (measure, attack_logins, attack_silence, attack_pages)}
    for name in sys.argv[1:] or parts:
        for title, value in parts[name]():
            print(f"| {title} | {value} |", flush=True)


if __name__ == "__main__":
    main()
