"""Producing over HTTP: with and without tokens in turns, in Avro, and to a slow broker."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from typing import NamedTuple

from joserfc import jwt
from joserfc.jwk import ECKey

from bench.environment import Bench, ask
from bench.load import NAME, Load, Target, measure
from bench.machine import memory_mib
from bench.measured import HEAD, Measured, cells, median_of, table
from headrace_devkit.devcluster import Registry
from headrace_jvm import ensure_artifacts, find_java

ROUNDS, SECONDS = 3, 4.0
VALUE = "x" * 98  # 100 bytes as JSON
SCHEMA = {
    "type": "record",
    "name": "Reading",
    "fields": [{"name": "id", "type": "long"}, {"name": "name", "type": "string"}, {"name": "at", "type": "double"}],
}
READING = {"id": 1234567890, "name": "n" * 185, "at": 1.5}  # 200 bytes as Avro
TOKEN_OF = {"issuer": "bench", "audience": "headrace"}
DEADLINE_MS = 31_000
"""The delivery timeout and a second."""

Serving = contextlib.AbstractContextManager[Target]


class Shape(NamedTuple):
    """What the clients send."""

    title: str
    records: int
    connections: int
    raw: bool = False
    """Whether the body is the value itself."""
    size: int = 100
    """Bytes of a value."""

    def load(self, topic: str) -> Load:
        path = f"/producers/{topic}"
        if self.raw:
            return Load(path, b"x" * self.size, 1, self.connections, "Content-Type: application/octet-stream")
        value = "x" * (self.size - 2)  # without the quotes
        body = json.dumps({"records": [{"value": value}] * self.records}).encode()
        return Load(path, body, self.records, self.connections)


SHAPES = {
    "many": Shape("100 x 100 B, 16 connections, records", 100, 16),
    "one": Shape("1 x 100 B, 64 connections, requests", 1, 64),
    "raw": Shape("1 x 100 B as the body itself, 64 connections, requests", 1, 64, raw=True),
}


def produce(bench: Bench, target: Target, shape: str, topic: str) -> Measured:
    """Load a server with a shape."""
    return loaded(SHAPES[shape].load(topic), target, bench)


def loaded(load: Load, target: Target, bench: Bench) -> Measured:
    """Load a server; every request must succeed."""
    got = measure(load, target, bench.folder, SECONDS * bench.scale)
    assert got.requests and not got.errors, (load.path, got)
    return got


class ProduceTable:
    """Measures, and prints the results."""

    title = "Producing over HTTP"
    text = f"""\
Medians of {ROUNDS} rounds in turns, loaded by {NAME}."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.topic = bench.topic("http")
        self.found: dict[tuple[str, str], list[Measured]] = {}

    def measure(self) -> None:
        """Run every row; those with and without tokens in turns."""
        for _ in range(ROUNDS):
            self.load_all("headrace", self.bench.serving({}))
            self.load_all("token", self.with_tokens())
        self.avro()
        self.throttled()

    def load_all(self, name: str, serving: Serving) -> None:
        with serving as target:
            for shape in ("many", "one"):
                self.add(name, shape, produce(self.bench, target, shape, self.topic))

    def add(self, name: str, shape: str, got: Measured) -> None:
        self.found.setdefault((name, shape), []).append(got)

    def with_tokens(self) -> Serving:
        key = ECKey.generate_key("P-256", {"kid": "bench"})
        keys = self.bench.folder / "keys.json"
        keys.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
        now = int(time.time())
        claims = {"iss": "bench", "aud": "headrace", "sub": "load", "scope": "kafka:w", "iat": now, "exp": now + 3600}
        token = jwt.encode({"alg": "ES256", "kid": "bench"}, claims, key)
        security = {"mode": "jwt", "jwt": {**TOKEN_OF, "jwks_file": str(keys)}}
        return self.bench.serving({"security": security}, f"Authorization: Bearer {token}")

    def avro(self) -> None:
        """Measure 100 x 200 B in Avro."""
        with (
            Registry(self.bench.folder / "registry") as registry,
            self.bench.serving({"schema_registry": {"url": registry.url}}) as target,
        ):
            schema = {"valueFormat": "avro", "valueSchema": json.dumps(SCHEMA), "records": [{"value": READING}]}
            path = f"/producers/{self.topic}"
            number = ask(f"http://127.0.0.1:{target.port}{path}", schema)["value_schema_id"]
            body = {"valueFormat": "avro", "valueSchemaId": number, "records": [{"value": READING}] * 100}
            load = Load(path, json.dumps(body).encode(), 100, 16)
            for _ in range(ROUNDS):
                got = measure(load, target, self.bench.folder, SECONDS * self.bench.scale)
                assert not got.errors, got
                self.add("headrace", "avro", got)

    def throttled(self) -> None:
        """Measure a minute with an eighth of the broker, and the largest resident memory in MiB."""
        self.limit(int(median_of("rate", self.found["headrace", "many"]) * 100 / 8))
        try:
            with self.bench.serving({}) as target:
                body = json.dumps({"records": [{"value": VALUE}] * 1000}).encode()
                load = Load(f"/producers/{self.topic}", body, 1000, 192)
                seconds = max(10.0, 60 * self.bench.scale)
                self.slow = measure(load, target, self.bench.folder, seconds, native=False)
                self.peak_mib = memory_mib(target.pid, "VmHWM")
        finally:
            self.limit(10**12)

    def limit(self, byte_rate: int) -> None:
        words = ["--alter", "--add-config", f"producer_byte_rate={byte_rate}"]
        words += ["--entity-type", "clients", "--entity-default"]
        servers = ["--bootstrap-server", self.bench.cluster.bootstrap_servers]
        java = [str(find_java(17).executable), "-cp", f"{ensure_artifacts('kafka')}/*", "kafka.admin.ConfigCommand"]
        subprocess.run([*java, *servers, *words], check=True, stdout=subprocess.DEVNULL)

    def lines(self) -> list[str]:
        """Return the table; medians of the rounds."""
        rows = []
        for shape in ("many", "one"):
            title, own, token = SHAPES[shape].title, self.found["headrace", shape], self.found["token", shape]
            part = median_of("rate", token) / median_of("rate", own)
            rows.append(f"{title} | {cells(own)} | | ")
            rows.append(f"{title}, signed token | {cells(token)} | **{part:.2f} of without** | >= 0.85")
        avro = self.found["headrace", "avro"]
        rows.append(f"Avro, 100 x 200 B, 16 connections, records | {cells(avro)} | | >= 100,000")
        return table(f"workload | {HEAD} | what counts | target", [*rows, self.slow_row()])

    def slow_row(self) -> str:
        late = "some" if self.slow.longest_ms > DEADLINE_MS or self.slow.errors else "none"
        seen = f"{self.slow.refused:,.0f} requests refused with 503, longest {self.slow.longest_ms / 1000:.1f} s"
        title = "1000 x 100 B, 192 connections, the broker at an eighth of the first row, records"
        counts = f"**{self.peak_mib:.0f} MiB, {late} late**, {seen}"
        return f"{title} | {cells([self.slow])} | {counts} | <= 200 MiB, none"
