"""The demo, step by step: start everything, post the flights, wait for exact counts, redrive, print the table."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import click

from headrace.cli.connection import open_producer, quiet_client
from headrace.cli.demo.counting import Counts, Ledger
from headrace.cli.demo.flights import Expected, expected, requests
from headrace.cli.output import install_progress, progress
from headrace.config.kafka import KafkaConfig
from headrace.control.redrive import Redrive, RedriveOptions
from headrace.devcluster import Cluster, Registry, start_together
from headrace.devcluster.ports import free_ports
from headrace.devcluster.server import Server
from headrace.errors import EnvironmentProblem, HeadraceError
from headrace.kafka import Admin
from headrace.lifecycle import SystemClock

FILES = Path(__file__).with_name("files")
LETTERS = "flights.long_delays.dlq"
_TOPICS = {"flights": 4, "flights.enriched": 4, "flights.delays": 2, "flights.long_delays": 2}
_GROUPS = ("enrich", "long-delays", "headrace.delays.delays_by_hour", "headrace.delays.long_delays")
_BATCH_RECORDS = 500
_CONNECTIONS = 4
_START_SECONDS = 120.0
_SETTLE_SECONDS = 240.0


@click.command()
@click.option("--keep", is_flag=True, help="Leave everything up at the end, print where it is, and wait for Ctrl-C.")
def demo(keep: bool) -> int:
    """Show the whole story on this machine, on the 336,776 flights of 2013 from New York.

    Flights are posted over HTTP as Avro; a function joins names; a Spark pipeline computes delays; a reactive
    consumer pushes long delays to a backend that fails on purpose for a few; these become dead letters and are
    redriven. Ends with a table of counts; the exit code is 0 only if every count is exact.

    Example: headrace demo
    """
    quiet_client()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        return asyncio.run(Story(Path(folder)).tell(keep))


class Story:
    """One run of the demo in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cluster = Cluster(folder / "kafka")
        self._registry = Registry(folder / "registry")
        self._backend = Server("The demo's backend", folder / "backend.log")
        self._headrace = Server("Headrace", folder / "headrace.log")
        self._backend_port, self._port = free_ports(2)
        self._began = time.monotonic()
        self._times: dict[str, float] = {}

    async def tell(self, keep: bool) -> int:
        """Run the demo. Returns the exit code."""
        try:
            self._say("Starting Kafka, the schema registry, a backend")
            self._start_around()
            await self._prepare()
            self._say("Starting Headrace: sidecar, function, Spark pipeline, reactive consumer")
            self._start_headrace()
            return await self._flow(keep)
        finally:
            self._headrace.stop(30)
            self._backend.kill()
            self._registry.remove()
            self._cluster.remove()

    def _start_around(self) -> None:
        with install_progress() as told:
            start_together(self._registry, self._cluster, progress=told)
        command = [sys.executable, "-m", "headrace.cli.demo.backend", str(self._backend_port)]
        self._backend.start(command, detached=False)

    async def _prepare(self) -> None:
        admin = Admin(self._kafka)
        for topic, partitions in _TOPICS.items():
            await admin.create_topic(topic, partitions)
        async with aiohttp.ClientSession() as session:
            schema = {"schema": (FILES / "flight.avsc").read_text()}
            url = f"{self._registry.url}/subjects/flights-value/versions"
            async with session.post(url, json=schema) as answer:
                if answer.status != 200:
                    raise EnvironmentProblem(f"the schema registry refused the demo's schema: {await answer.text()}")

    def _start_headrace(self) -> None:
        file = self._folder / "headrace.yaml"
        file.write_text(self._config())
        command = [sys.executable, "-m", "headrace.cli.main", "run", "-c", str(file)]
        self._headrace.start(command, detached=False, cwd=self._folder)
        ready = re.compile(r"^ready http=", re.MULTILINE)
        self._headrace.wait_until(lambda: bool(ready.search(self._headrace.log.read_text())), _START_SECONDS)

    async def _flow(self, keep: bool) -> int:
        self._mark("started")
        want, ledger = expected(), Ledger(self._kafka, Admin(self._kafka), self._backend_port, _GROUPS, LETTERS)
        self._say(f"Posting {want.flights:,} flights as Avro, {_BATCH_RECORDS} per request")
        posted = await self._post(want.flights)
        self._mark("posted")
        self._say("Waiting for the function, the pipeline and the reactive consumer")
        at_rest = await self._until(ledger, lambda c: c.settled(want.flights, want.long_delays, want.refused))
        self._mark("settled")
        self._say(f"Repairing the backend and redriving {at_rest.letters_left} dead letters")
        await self._redrive()
        final = await self._until(ledger, lambda c: c.finished(want.long_delays))
        self._mark("redriven")
        ok = self._table(want, posted, at_rest, final)
        if keep:
            await self._wait_for_interrupt()
        return 0 if ok else 1

    async def _post(self, flights: int) -> int:
        """Post every flight over a few connections. Returns how many were acknowledged."""
        url, acknowledged = f"http://127.0.0.1:{self._port}/producers/flights", 0
        bodies = requests(_BATCH_RECORDS)
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            with progress("flights") as show:

                async def work() -> None:
                    nonlocal acknowledged
                    for records, body in bodies:
                        async with session.post(url, data=body) as answer:
                            if answer.status != 200:
                                raise HeadraceError(f"posting flights: {(await answer.text())[:500]}")
                            offsets = (await answer.json())["offsets"]
                        acknowledged += sum("offset" in entry for entry in offsets)
                        assert len(offsets) == records
                        show(acknowledged, flights)

                await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
        return acknowledged

    async def _redrive(self) -> None:
        async with aiohttp.ClientSession() as session:
            await session.post(f"http://127.0.0.1:{self._backend_port}/repair")
        async with open_producer(self._kafka) as back:
            redrive = Redrive(self._kafka, Admin(self._kafka), LETTERS, back.produce, SystemClock())
            await redrive.run(RedriveOptions())

    async def _until(self, ledger: Ledger, done: Callable[[Counts], bool]) -> Counts:
        """Count until the condition holds or the time is up; the table then shows what is missing."""
        end = time.monotonic() + _SETTLE_SECONDS
        with progress("enriched") as show:
            while True:
                if not self._headrace.running:
                    raise EnvironmentProblem(f"Headrace ended. Its last lines:\n{self._headrace.log_tail(30)}")
                counts = await ledger.quick()
                show(counts.enriched, None)
                if done(counts) or time.monotonic() > end:
                    return await ledger.exact()
                await asyncio.sleep(0.5)

    def _table(self, want: Expected, posted: int, at_rest: Counts, final: Counts) -> bool:
        rows = [
            ("flights in the file = posted and acknowledged", want.flights, posted),
            ("= enriched by the function", want.flights, final.enriched),
            ("= sum of `flights` over the newest row per key", want.flights, final.aggregated),
            ("long delays in the file = rows from the pipeline", want.long_delays, final.long_delays),
            ("= delivered to the backend", want.long_delays, final.delivered),
            ("dead letters before the redrive", want.refused, at_rest.letters_left),
            ("dead letters left after it", 0, final.letters_left),
            ("lag of every group", 0, final.lag),
        ]
        click.echo()
        for text, wanted, found in rows:
            mark = "ok" if wanted == found else f"WRONG, expected {wanted:,}"
            click.echo(f"  {text:<50} {found:>9,}  {mark}")
        self._print_times(want.flights)
        return all(wanted == found for _, wanted, found in rows)

    def _print_times(self, flights: int) -> None:
        started, posted, settled = (self._times[name] for name in ("started", "posted", "settled"))
        click.echo(
            f"\n  start {started:.0f} s; posting {posted - started:.0f} s "
            f"({flights / (posted - started):,.0f} flights/s over HTTP); everything through {settled - started:.0f} s "
            f"({flights / (settled - started):,.0f} flights/s end to end); in all {self._times['redriven']:.0f} s"
        )

    async def _wait_for_interrupt(self) -> None:
        click.echo(f"\n  Headrace http://127.0.0.1:{self._port}   Kafka {self._cluster.bootstrap_servers}")
        click.echo(f"  schema registry {self._registry.url}   files {self._folder}   Ctrl-C ends it all")
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted.set)
        await interrupted.wait()

    @property
    def _kafka(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self._cluster.bootstrap_servers)

    def _config(self) -> str:
        return f"""\
kafka: {{bootstrap_servers: "{self._cluster.bootstrap_servers}"}}
schema_registry: {{url: "{self._registry.url}"}}
http: {{port: {self._port}}}
functions: ["{FILES / "enrich" / "function.yaml"}"]
pipelines: ["{FILES / "delays.yaml"}"]
reactive_consumers:
  long-delays:
    topics: [flights.long_delays]
    group: long-delays
    value_format: json
    backend: {{url: "http://127.0.0.1:{self._backend_port}/records"}}
    retry: {{attempts: 3, first_delay_seconds: 0.05}}
"""

    def _say(self, text: str) -> None:
        click.echo(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def _mark(self, name: str) -> None:
        self._times[name] = time.monotonic() - self._began
