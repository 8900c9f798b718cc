"""What is measured: rows, and the sides of each, which run in turns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.active import ActiveTable
from bench.consume import command
from bench.environment import PARTITIONS, Bench, ended, first_to_last
from bench.function import ECHO, function
from bench.measured import Measured
from bench.peers.bridge import Bridge
from bench.peers.dapr import Dapr
from bench.produce import Shape, loaded
from bench.push import Sink, delays, push

PUSHED, READ, CALLED, RELAYED, SLOWLY_RELAYED = 0.08, 0.3, 2.0, 0.3, 0.03
"""Parts of the records of a run that are pushed one by one, read, given to a function, or written again."""
APP = Path(__file__).with_name("faststream_app.py")
LARGER_QUEUES = ("-X", "queued.min.messages=10000000", "-X", "queued.max.messages.kbytes=2000000")
SINGLE, ALONE, CROWD = (Shape("", 1, connections) for connections in (64, 1, 1000))
MANY, LARGE = Shape("", 100, 16), Shape("", 100, 16, size=1000)

NAMES = (
    "single",
    "audit",
    "many",
    "large",
    "crowd",
    "alone",
    "push",
    "push-100",
    "push-idle",
    "function",
    "output",
    "read-json",
    "read-binary",
    "consume",
    "consume-json",
)


class Side(NamedTuple):
    """One product, or one way to use it."""

    name: str
    run: Callable[[], Measured]
    over: str = ""
    """What it is divided by: the best of the other sides whose names begin so."""
    goal: float = 0.0
    """Of the ratio: at least, of times at most."""


class Row(NamedTuple):
    """One job."""

    title: str
    sides: tuple[Side, ...]
    field: str = "rate"
    """What is divided: `p50_ms` instead, where the time of a request counts."""


class Rows:
    """Makes the rows; a topic is filled when the first side wants it."""

    def __init__(self, bench: Bench, programs: dict[str, Path], bridge: Callable[[], Bridge]) -> None:
        self.bench, self.programs, self.bridge = bench, programs, bridge
        self.dapr = Dapr(bench, programs["Dapr"])
        parts = (PUSHED, READ, RELAYED, SLOWLY_RELAYED)
        self.pushed, self.read, self.relayed, self.slowly_relayed = (int(bench.records * part) for part in parts)
        self.topic = bench.topic("http")
        """All producers write to it."""
        self.outputs: set[str] = set()

    def all(self) -> dict[str, Row]:
        """Return every row by its name for `--rows`."""
        rows = (
            self.produced(
                "Produce 1 x 100 B, 64 connections",
                SINGLE,
                2.0,
                Side("Headrace, the body itself", partial(self.produce, SINGLE._replace(raw=True)), "Dapr"),
                Side("Dapr, CloudEvent", lambda: self.dapr.produce(self.topic, SINGLE, raw=False)),
            ),
            self.audited("Produce 1 x 100 B, 64 connections, with an audit", SINGLE),
            self.produced("Produce 100 x 100 B, 16 connections", MANY, 2.5),
            self.produced("Produce 100 x 1 KB, 16 connections", LARGE, 2.5),
            self.produced("Produce 1 x 100 B, 1,000 connections", CROWD, 1.7),
            self.produced("Produce 1 x 100 B, one connection", ALONE, 0.85)._replace(field="p50_ms"),
            self.pushing(),
            self.pushing_many(),
            Row(
                "Push, one record every 20 ms, from its producer to the backend",
                (Side("Headrace", lambda: delays(self.bench), "Dapr", 1.0), Side("Dapr", self.dapr.delays)),
                "p50_ms",
            ),
            self.calling(),
            self.writing(),
            self.reading("json", "JSON"),
            self.reading("binary", "binary"),
            self.consuming(),
            self.consuming_json(),
        )
        return dict(zip(NAMES, rows, strict=True))

    # Producing ----------------------------------------------------------------------------------------------------

    def produced(self, title: str, shape: Shape, goal: float, *more: Side) -> Row:
        return Row(
            title,
            (
                Side("Headrace", partial(self.produce, shape), "Dapr", goal),
                Side("Dapr", lambda: self.dapr.produce(self.topic, shape)),
                *more,
                Side("bare server", partial(self.bare_server, shape)),
            ),
        )

    def produce(self, shape: Shape, **config: Any) -> Measured:
        with self.bench.serving(config) as target:
            return loaded(shape.load(self.topic), target, self.bench)

    def bare_server(self, shape: Shape) -> Measured:
        with self.bench.other(
            sys.executable, "-m", "bench.bare_server", self.bench.cluster.bootstrap_servers
        ) as target:
            return loaded(shape.load(self.topic), target, self.bench)

    def audited(self, title: str, shape: Shape) -> Row:
        without, to_file = {"to": "none"}, {"to": "file", "records": "summary"}
        return Row(
            title,
            (
                Side(
                    "Headrace, `records: summary`",
                    partial(self.produce, shape, audit=to_file),
                    "Headrace, `to: none`",
                    0.9,
                ),
                Side("Headrace, `to: none`", partial(self.produce, shape, audit=without)),
            ),
        )

    # Pushing ------------------------------------------------------------------------------------------------------

    def keyed(self) -> str:
        return self.bench.full(self.pushed, "produce-keys")

    def pushing(self) -> Row:
        def headrace(order: str) -> Measured:
            return push(self.bench, self.keyed(), self.pushed, "single", ordering=order)

        return Row(
            "Push, one record per POST, records with 5,003 keys",
            (
                Side("Headrace, order `partition`", lambda: headrace("partition"), "Dapr", 2.0),
                Side("Dapr", lambda: self.dapr.push(self.keyed(), self.pushed)),
                Side("Headrace, order `key`", lambda: headrace("key"), "Dapr", 2.0),
                Side("bare loop, order of partitions", lambda: self.bare_push("partition", self.keyed(), self.pushed)),
                Side("bare loop, any order", lambda: self.bare_push("any", self.keyed(), self.pushed)),
            ),
        )

    def pushing_many(self) -> Row:
        records = self.bench.records

        def headrace(mode: str) -> Measured:
            return push(self.bench, self.bench.full(records), records, mode)

        return Row(
            "Push, 100 records per POST",
            (
                Side("Headrace, the status decides", lambda: headrace("status"), "Dapr, bulk subscribe", 2.5),
                Side("Dapr, bulk subscribe", lambda: self.dapr.push_bulk(self.bench.full(records), records)),
                Side("Headrace, a result per record", lambda: headrace("results"), "Dapr, bulk subscribe", 2.5),
                Side("bare loop, any order", lambda: self.bare_push("many", self.bench.full(records), records)),
            ),
        )

    def bare_push(self, mode: str, topic: str, records: int) -> Measured:
        with Sink(records, "status" if mode == "many" else "single") as sink:
            words = ["bench.bare_push", mode, self.bench.cluster.bootstrap_servers, topic, str(sink.port)]
            with ended(subprocess.Popen([sys.executable, "-m", *words])) as process:
                return first_to_last(sink.line, process.pid)

    # Functions ----------------------------------------------------------------------------------------------------

    def calling(self) -> Row:
        bench, records = self.bench, int(self.bench.records * CALLED)

        def topic() -> str:
            return bench.full(records, "produce-json")

        return Row(
            "A function that does nothing, 1 worker",
            (
                Side("Headrace", lambda: function(bench, topic(), records), "bare loop", 0.7),
                Side("FastStream", lambda: self.faststream(topic(), records), "bare loop"),
                Side("bare loop", lambda: bench.bare("call", topic(), records)),
            ),
        )

    def writing(self) -> Row:
        bench, records = self.bench, self.relayed

        def topic() -> str:
            return bench.full(records, "produce-json")

        def headrace(**attributes: str) -> Measured:
            return function(bench, topic(), records, 1, ECHO, outputTopic=bench.topic("outputs"), **attributes)

        return Row(
            "A function that writes each record to another topic, 1 worker",
            (
                Side("Headrace", headrace, "bare loop", 0.9),
                Side(
                    "FastStream",
                    lambda: self.faststream(topic(), self.slowly_relayed, bench.topic("outputs")),
                    "bare loop",
                ),
                Side("Headrace, exactly once", lambda: headrace(delivery="exactly_once"), "Headrace", 0.85),
                Side("bare loop", lambda: self.relay(topic(), records)),
            ),
        )

    def relay(self, topic: str, records: int) -> Measured:
        if topic not in self.outputs:
            self.outputs.add(topic)
            self.bench.cluster.create_topic(f"{topic}-out", PARTITIONS)
        return self.bench.bare("relay", topic, records)

    def faststream(self, topic: str, records: int, *target: str) -> Measured:
        words = [str(self.programs["FastStream"]), str(APP), self.bench.cluster.bootstrap_servers, topic, str(records)]
        with ended(subprocess.Popen([*words, *target], stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout
            return first_to_last(process.stdout.readline, process.pid)

    # Reading ------------------------------------------------------------------------------------------------------

    def reading(self, mode: str, name: str) -> Row:
        bench, records = self.bench, self.read

        def topic() -> str:
            return bench.full(records, "produce-kb")

        return Row(
            f"Read over HTTP, 1 KB records, {name}",
            (
                Side("Headrace", lambda: ActiveTable(bench).read(mode, topic(), records), "Strimzi bridge", 4.0),
                Side("Strimzi bridge", lambda: self.bridge().read(bench, mode, topic(), records)),
                Side("bare loop", lambda: bench.bare("consume", topic(), records)),
            ),
        )

    def consuming(self) -> Row:
        records = self.bench.records
        return Row(
            f"A command that writes {records:,} records of 100 B to a file",
            (
                Side("Headrace", lambda: self.headrace_consume(), "kcat", 0.8),
                Side("kcat", lambda: self.kcat()),
                Side("kcat, larger queues", lambda: self.kcat(*LARGER_QUEUES)),
                Side("bare loop", lambda: self.bare_lines()),
            ),
        )

    def consuming_json(self) -> Row:
        return Row(
            "The same as JSON with metadata",
            (
                Side("Headrace", lambda: self.headrace_consume("--output", "json"), "kcat", 0.8),
                Side("kcat", lambda: self.kcat("-J")),
            ),
        )

    def headrace_consume(self, *words: str) -> Measured:
        servers, topic = self.bench.cluster.bootstrap_servers, self.bench.full(self.bench.records)
        consume = [sys.executable, "-m", "headrace.cli.main", "consume", topic, "-b", servers]
        return command(self.bench, self.bench.records, *consume, *words)

    def kcat(self, *words: str) -> Measured:
        servers, topic = self.bench.cluster.bootstrap_servers, self.bench.full(self.bench.records)
        consume = [str(self.programs["kcat"]), "-C", "-q", "-e", "-o", "beginning", "-b", servers, "-t", topic]
        return command(self.bench, self.bench.records, *consume, *words)

    def bare_lines(self) -> Measured:
        servers, topic = self.bench.cluster.bootstrap_servers, self.bench.full(self.bench.records)
        words = [sys.executable, "-m", "bench.bare", "lines", servers, topic, str(self.bench.records)]
        return command(self.bench, self.bench.records, *words)
