"""The steps of the demo: start everything, post the flights, wait for exact counts, redrive, print the table."""

import asyncio
import functools
import shutil
import signal
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import click
import yaml
from deltalake import DeltaTable

from headrace.cli.api import Api
from headrace.cli.cluster_options import quiet_client
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.output import install_progress, progress
from headrace.config.kafka import KafkaConfig
from headrace.errors import EnvironmentProblem, HeadraceError
from headrace.extras import missing_of
from headrace.kafka import Admin
from headrace.runs.routes import JobEndpoints
from headrace.runtime import run_blocking
from headrace_devkit.demo.flights import REFUSED_CARRIER, Expected, FlightCounts, Ledger, Requests, requests, rows
from headrace_devkit.devcluster import (
    Cluster,
    HeadraceProcess,
    PlannedResponse,
    RecordingBackend,
    Registry,
    start_together,
)
from headrace_devkit.devcluster.ports import free_ports
from headrace_queries.routes import QueryEndpoints

FILES = Path(__file__).with_name("files")
DEAD_LETTERS = "flights.long_delays.dlq"
_RETRY_TOPIC = "long-delays.retry.2s"
_TOPICS = {"flights": 4, "flights.enriched": 4, "flights.delays": 2, "flights.long_delays": 2}
_GROUPS = (
    "enrich",
    "long-delays",
    "headrace.delays.delays_by_hour",
    "headrace.delays.long_delays",
    "headrace.delays.delays_lake",
    "headrace.query.alarms",
)
_FLIGHTS = "SELECT CAST(coalesce(sum(flights), 0) AS BIGINT) AS flights FROM delays"
_WORST = "SELECT carrier, time_hour, mean_delay, flights FROM delays WHERE flights > 4 ORDER BY mean_delay DESC LIMIT 3"
_ALARMS = "SELECT carrier, time_hour FROM delays WHERE mean_delay > 300 AND flights > 4"
_BATCH_RECORDS = 500
_CONNECTIONS = 4
_AWAY_RESPONSES = 3
_START_SECONDS = 120.0
_SETTLE_SECONDS = 360.0
"""With the start of Spark, which may take 120 on a busy machine."""


@click.command(cls=HeadraceCommand)
@click.option("--keep", is_flag=True, help="Leave everything up at the end, print where it is, and wait for Ctrl-C.")
def demo(keep: bool) -> int:
    """Show the whole story on this machine, on the 336,776 flights of 2013 from New York.

    Flights are posted over HTTP as Avro. A function joins names, exactly once; a Spark pipeline computes delays, also
    into a Delta table. A reactive consumer pushes long delays, in key order, to a backend. The backend is unavailable
    at first and fails on purpose for a few records. These are retried, become dead letters and are redriven. At the end
    it prints a table of counts; the exit code is 0 only if every count is exact.

    Example: headrace demo
    """
    quiet_client()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as folder:
        return asyncio.run(Story(Path(folder)).run(keep))


def _is_live(url: str) -> bool:
    """Whether Headrace takes requests; the pipeline starts meanwhile."""
    with urllib.request.urlopen(f"{url}/health/liveness", timeout=5) as response:
        return bool(response.status == 200)


async def _offsets(session: aiohttp.ClientSession, url: str, body: bytes) -> list[dict[str, Any]]:
    """Post one request and return its offsets. What gets 503 has written nothing, so it is sent again."""
    end = time.monotonic() + _START_SECONDS
    while True:
        async with session.post(url, data=body) as response:
            if response.status == 200:
                offsets: list[dict[str, Any]] = (await response.json())["offsets"]
                return offsets
            if response.status != 503 or time.monotonic() > end:
                raise HeadraceError(f"posting flights: {(await response.text())[:500]}")
            pause = float(response.headers.get("Retry-After", 1))
        await asyncio.sleep(pause)


class Story:
    """One run of the demo, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lake = folder / "lake"
        self._cluster = Cluster(folder / "kafka")
        self._registry = Registry(folder / "registry")
        self._backend = RecordingBackend()
        self._backend.response = PlannedResponse(
            fails=lambda record: bool(record["value"]["carrier"] == REFUSED_CARRIER),
            stacktrace="CarrierUnknown: this backend does not know the carrier",
        )
        # Unavailable at first: this uses no attempts and makes no dead letters.
        self._backend.script.extend([PlannedResponse(status=503, headers={"Retry-After": "1"})] * _AWAY_RESPONSES)
        self._alarms = RecordingBackend()
        """Gets the rows of the standing query."""
        self._headrace: HeadraceProcess | None = None
        self._began = time.monotonic()
        self._times: dict[str, float] = {}
        self._console_port = 0
        """0 without a console."""

    async def run(self, keep: bool) -> int:
        """Run the demo. Returns the exit code."""
        next(rows())  # missing flights are reported before anything starts
        if keep and not missing_of("console"):
            (self._console_port,) = free_ports(1)
        try:
            made, headrace = await asyncio.gather(run_blocking(requests, _BATCH_RECORDS), self._start())
            return await self._flow(headrace, made, keep)
        finally:
            if self._headrace:
                self._headrace.terminate()
            self._backend.stop()
            self._alarms.stop()
            self._registry.remove()
            self._cluster.remove()

    async def _start(self) -> HeadraceProcess:
        """Start everything; this blocks the loop, while a thread makes the requests."""
        self._print("Starting Kafka, the schema registry, a backend")
        with install_progress() as report:
            start_together(self._registry, self._cluster, progress=report)
        self._backend.start()
        self._alarms.start()
        await self._prepare(Admin(self._kafka))
        self._print("Starting Headrace: sidecar, function, Spark pipeline, reactive consumer")
        self._headrace = self._process()
        self._headrace.start()
        self._headrace.server.wait_until(functools.partial(_is_live, self._headrace.url), _START_SECONDS)
        return self._headrace

    async def _prepare(self, admin: Admin) -> None:
        for topic, partitions in _TOPICS.items():
            await admin.create_topic(topic, partitions)
        async with aiohttp.ClientSession() as session:
            schema = {"schema": (FILES / "flight.avsc").read_text()}
            url = f"{self._registry.url}/subjects/flights-value/versions"
            async with session.post(url, json=schema) as response:
                if response.status != 200:
                    raise EnvironmentProblem(f"the schema registry refused the demo's schema: {await response.text()}")

    @property
    def _kafka(self) -> KafkaConfig:
        return KafkaConfig(bootstrap_servers=self._cluster.bootstrap_servers)

    async def _flow(self, headrace: HeadraceProcess, made: Requests, keep: bool) -> int:
        self._mark("started")
        planned, ledger = made.expected, Ledger(self._kafka, self._backend, _GROUPS, DEAD_LETTERS, _RETRY_TOPIC)
        self._print(f"Posting {planned.flights:,} flights as Avro, {_BATCH_RECORDS} per request")
        posted = await self._post(f"{headrace.url}/producers/flights", made)
        self._mark("posted")
        self._print("Waiting for the function, the pipeline and the reactive consumer")
        settled = await self._until(
            headrace, ledger, planned, lambda c: c.settled(planned.flights, planned.long_delays, planned.refused)
        )
        self._mark("settled")
        self._backend.response = PlannedResponse()
        redrive = functools.partial(Api(headrace.url).call, JobEndpoints.redrive, topic=DEAD_LETTERS)
        counts = (await run_blocking(redrive, {"dryRun": True}))["errors"]
        errors = ", ".join(f"{count} of {error}" for error, count in counts.items())
        self._print(f"Repairing the backend and redriving the dead letters: {errors or 'none'}")
        await run_blocking(redrive, {})
        await self._until(headrace, ledger, planned, lambda c: c.finished(planned.long_delays))
        final = await ledger.exact()
        self._mark("redriven")
        (response,) = await self._ask(headrace.url, _FLIGHTS)
        in_lake = await run_blocking(lambda: DeltaTable(self._lake).to_pyarrow_dataset().count_rows())
        ok = self._table(planned, posted, settled, final, response["flights"], in_lake)
        click.echo("  worst hours, by SQL over the table of flights.delays:")
        for row in await self._ask(headrace.url, _WORST):
            click.echo(
                f"    {row['carrier']} {row['time_hour']}  {row['mean_delay']:.0f} minutes, {row['flights']} flights"
            )
        ok = await self._show_alarms(headrace.url) and ok
        if keep:
            await self._wait_for_interrupt(headrace.url)
        return 0 if ok else 1

    async def _post(self, url: str, made: Requests) -> int:
        """Post every flight over a few connections. Returns how many were acknowledged."""
        acknowledged = 0
        bodies = iter(made.bodies)
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            with progress("flights") as show:

                async def work() -> None:
                    nonlocal acknowledged
                    for records, body in bodies:
                        offsets = await _offsets(session, url, body)
                        acknowledged += sum("offset" in entry for entry in offsets)
                        assert len(offsets) == records
                        show(acknowledged, made.expected.flights)

                await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
        return acknowledged

    async def _until(
        self, headrace: HeadraceProcess, ledger: Ledger, planned: Expected, done: Callable[[FlightCounts], bool]
    ) -> FlightCounts:
        """Count until the condition is true or the time limit is reached; the table then shows what is missing."""
        end = time.monotonic() + _SETTLE_SECONDS
        with progress("enriched and delivered") as show:
            while True:
                if not headrace.server.running:
                    raise EnvironmentProblem(f"Headrace stopped. Its last lines:\n{headrace.server.log_tail(30)}")
                counts = await ledger.quick()
                show(counts.enriched + counts.delivered, planned.flights + planned.long_delays)
                if done(counts) or time.monotonic() > end:
                    return counts
                await asyncio.sleep(0.5)

    async def _show_alarms(self, url: str) -> bool:
        """Show the rows that the standing query has pushed; False if a row of the table was not pushed."""
        needed = await self._ask(url, _ALARMS)
        hours = {(row["carrier"], row["time_hour"]) for row in self._alarms.records}
        missing = [row for row in needed if (row["carrier"], row["time_hour"]) not in hours]
        mark = f"WRONG, {len(missing)} of the table are missing" if missing else "ok"
        click.echo(f"  hours over 300 minutes, pushed by the standing query {len(hours):>6,}  {mark}")
        return not missing

    async def _ask(self, url: str, statement: str) -> list[dict[str, Any]]:
        """Return the rows of a statement over the tables of the running Headrace."""
        response = await run_blocking(Api(url).call, QueryEndpoints.query, {"sql": statement})
        rows: list[dict[str, Any]] = response["rows"]
        return rows

    def _table(
        self,
        planned: Expected,
        posted: int,
        settled: FlightCounts,
        final: FlightCounts,
        flights_in_table: int,
        rows_in_lake: int,
    ) -> bool:
        rows = [
            ("flights in the file = posted and acknowledged", planned.flights, posted),
            ("= enriched by the function, each exactly once", planned.flights, final.enriched),
            ("= sum of `flights` over the newest row per key", planned.flights, final.aggregated),
            ("= the same by SQL over a table of that topic", planned.flights, flights_in_table),
            ("long delays in the file = rows from the pipeline", planned.long_delays, final.long_delays),
            ("= delivered to the backend", planned.long_delays, final.delivered),
            ("= rows of a Delta table, with those redriven", planned.long_delays + planned.refused, rows_in_lake),
            ("waited in the retry topic for a second attempt", planned.refused, settled.delayed),
            ("dead letters before the redrive", planned.refused, settled.dead_letters_left),
            ("dead letters left after it", 0, final.dead_letters_left),
            ("lag of every group", 0, final.lag),
        ]
        click.echo()
        for text, expected_count, found in rows:
            mark = "ok" if expected_count == found else f"WRONG, expected {expected_count:,}"
            click.echo(f"  {text:<50} {found:>9,}  {mark}")
        self._print_times(planned.flights)
        return all(expected_count == found for _, expected_count, found in rows)

    def _print_times(self, flights: int) -> None:
        started, posted, settled = (self._times[name] for name in ("started", "posted", "settled"))
        click.echo(
            f"\n  start {started:.0f} s; posting {posted - started:.0f} s "
            f"({flights / (posted - started):,.0f} flights/s over HTTP); everything through {settled - started:.0f} s "
            f"({flights / (settled - started):,.0f} flights/s end to end); in all {self._times['redriven']:.0f} s"
        )

    async def _wait_for_interrupt(self, url: str) -> None:
        click.echo(f"\n  Headrace {url}   Kafka {self._cluster.bootstrap_servers}")
        if self._console_port:
            click.echo(f"  console http://127.0.0.1:{self._console_port}")
        click.echo(f"  schema registry {self._registry.url}   files {self._folder}   Ctrl-C ends it all")
        interrupted = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupted.set)
        await interrupted.wait()

    def _process(self) -> HeadraceProcess:
        env = {
            "KAFKA": self._cluster.bootstrap_servers,
            "SCHEMA_REGISTRY_URL": self._registry.url,
            "BACKEND_URL": self._backend.url,
            "ALARMS_URL": self._alarms.url,
            "DEMO_FILES": str(FILES),
            "PIPELINE": str(shutil.copy(FILES / "delays.yaml", self._folder)),  # its table is in the folder of the file
        }
        config = yaml.safe_load((FILES / "headrace.yaml").read_text())
        if self._console_port:
            config["console"] = {"port": self._console_port}
        return HeadraceProcess(config, self._folder, env)

    def _print(self, text: str) -> None:
        click.echo(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def _mark(self, name: str) -> None:
        self._times[name] = time.monotonic() - self._began
