"""Producing over HTTP: Headrace, a bare loop, a bare server and a plain FastAPI server, in turns on one broker."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from joserfc import jwt
from joserfc.jwk import ECKey

from headrace.devcluster import Registry
from headrace.jvm import ensure_artifacts, find_java

ROUNDS = 3
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

SHAPES = {"many": (100, 16), "one": (1, 64), "alone": (1, 1)}
TITLES = {
    "many": "100 x 100 B, 16 connections, rec/s",
    "one": "1 x 100 B, 64 connections, req/s",
    "alone": "1 x 100 B, one connection, p50 ms",
}
Measured = dict[str, float]


class Target(NamedTuple):
    """A server under load."""

    port: str
    header: str = ""


class ProduceTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any) -> None:
        self.bench = bench
        self.topic: str = bench.topic("http")
        self.loops: list[float] = []
        self.found: dict[tuple[str, str], list[Measured]] = {}

    def measure(self) -> None:
        """Load every server in every shape, in turns."""
        for _ in range(ROUNDS):
            self.loops.append(self.bench.bare("produce", self.topic, int(1_000_000 * self.bench.scale)))
            for name, serving in (("ours", self.headrace()), ("bare", self.other("bare_server"))):
                self.load_all(name, serving)
            self.load_all("token", self.with_tokens())
            self.load_all("fastapi", self.other("fastapi_server"))

    def load_all(self, name: str, serving: contextlib.AbstractContextManager[Target]) -> None:
        with serving as target:
            for shape, (records, connections) in SHAPES.items():
                body = {"records": [{"value": VALUE}] * records}
                got = self.load(target, body, connections)
                assert not got["errors"], (name, shape, got)
                got["rate"] = got["requests"] * records / got["seconds"]
                self.found.setdefault((name, shape), []).append(got)

    def load(self, target: Target, body: Any, connections: int, seconds: float = 4.0) -> Measured:
        file = self.bench.folder / "body.json"
        file.write_text(json.dumps(body))
        words = [f"/producers/{self.topic}", target.port, str(connections)]
        rest = [str(file), *([target.header] if target.header else [])]
        self.bench.module("bench.load", *words, "0.5", *rest)  # warm up
        got: Measured = self.bench.module("bench.load", *words, str(max(1.0, seconds * self.bench.scale)), *rest)
        return got

    @contextlib.contextmanager
    def headrace(self, header: str = "", **config: Any) -> Iterator[Target]:
        process = self.bench.headrace(config)
        try:
            yield Target(process.url.rsplit(":", 1)[1], header)
        finally:
            process.terminate()

    def with_tokens(self) -> contextlib.AbstractContextManager[Target]:
        key = ECKey.generate_key("P-256", {"kid": "bench"})
        keys = self.bench.folder / "keys.json"
        keys.write_text(json.dumps({"keys": [key.as_dict(private=False)]}))
        now = int(time.time())
        claims = {"iss": "bench", "aud": "headrace", "sub": "load", "scope": "kafka:w", "iat": now, "exp": now + 3600}
        token = jwt.encode({"alg": "ES256", "kid": "bench"}, claims, key)
        security = {"mode": "jwt", "jwt": {**TOKEN_OF, "jwks_file": str(keys)}}
        return self.headrace(f"Authorization: Bearer {token}", security=security)

    @contextlib.contextmanager
    def other(self, module: str) -> Iterator[Target]:
        command = [sys.executable, "-m", f"bench.{module}", self.bench.cluster.bootstrap_servers]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            yield Target(process.stdout.readline().strip())
        finally:
            process.kill()
            process.wait()

    def avro(self) -> float:
        """Return records per second of 100 x 200 B in Avro."""
        with (
            Registry(self.bench.folder / "registry") as registry,
            self.headrace(schema_registry={"url": registry.url}) as target,
        ):
            schema = {"valueFormat": "avro", "valueSchema": json.dumps(SCHEMA), "records": [{"value": READING}]}
            url = f"http://127.0.0.1:{target.port}/producers/{self.topic}"
            request = urllib.request.Request(url, json.dumps(schema).encode(), {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                number = json.load(answer)["value_schema_id"]
            body = {"valueFormat": "avro", "valueSchemaId": number, "records": [{"value": READING}] * 100}
            rates = []
            for _ in range(ROUNDS):
                got = self.load(target, body, 16)
                assert not got["errors"], got
                rates.append(got["requests"] * 100 / got["seconds"])
        return statistics.median(rates)

    def throttled(self) -> tuple[Measured, float]:
        """Return what a minute with an eighth of the broker does, and the largest resident memory in MiB."""
        self.limit(int(self.of("ours", "many", "rate") * 100 / 8))
        try:
            process = self.bench.headrace({})
            body = {"records": [{"value": VALUE}] * 1000}
            got = self.load(Target(process.url.rsplit(":", 1)[1]), body, 192, seconds=60.0)
            status = Path(f"/proc/{process.server.id.pid}/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            process.kill()
        finally:
            self.limit(10**12)
        return got, peak / 1024

    def limit(self, byte_rate: int) -> None:
        words = ["--alter", "--add-config", f"producer_byte_rate={byte_rate}"]
        words += ["--entity-type", "clients", "--entity-default"]
        servers = ["--bootstrap-server", self.bench.cluster.bootstrap_servers]
        java = [str(find_java(17).executable), "-cp", f"{ensure_artifacts('kafka')}/*", "kafka.admin.ConfigCommand"]
        subprocess.run([*java, *servers, *words], check=True, stdout=subprocess.DEVNULL)

    def of(self, name: str, shape: str, field: str) -> float:
        return statistics.median(got[field] for got in self.found[name, shape])

    def lines(self) -> Iterator[str]:
        """Return the table; medians of the rounds."""
        loop = statistics.median(self.loops)
        yield "| workload | Headrace | bare server | FastAPI | what counts | target |"
        yield "|---|---|---|---|---|---|"
        ratio = self.of("ours", "many", "rate") / loop
        yield self.line("many", f"{ratio:.2f} of a bare loop ({loop:,.0f})", ">= 0.35")
        ratio = self.of("ours", "one", "rate") / self.of("bare", "one", "rate")
        yield self.line("one", f"{ratio:.2f} of the bare server", ">= 0.75, about 30,000")
        yield self.line("alone", f"{self.of('ours', 'alone', 'p50_ms'):.2f} ms", "<= 0.33 ms")
        for shape in ("many", "one"):
            rate = self.of("token", shape, "rate")
            ratio = rate / self.of("ours", shape, "rate")
            yield f"| {TITLES[shape]}, signed token | {rate:,.0f} | | | **{ratio:.2f} of without** | >= 0.85 |"
        rate = self.avro()
        yield f"| Avro, 100 x 200 B, 16 connections, rec/s | {rate:,.0f} | | | **{rate:,.0f}** | >= 100,000 |"
        got, peak = self.throttled()
        late = got["longest_ms"] > DEADLINE_MS
        counts = f"{peak:.0f} MiB, {'some' if late or got['errors'] else 'none'} late"
        seen = (
            f"{got['requests'] * 1000 / got['seconds']:,.0f} rec/s, {got['refused']:,.0f} requests told to come again"
        )
        seen += f", longest {got['longest_ms'] / 1000:.1f} s"
        title = "1000 x 100 B, 192 connections, the broker at an eighth of the first row"
        yield f"| {title} | {seen} | | | **{counts}** | <= 200 MiB, none |"

    def line(self, shape: str, counts: str, target: str) -> str:
        def cell(name: str) -> str:
            if shape == "alone":
                return f"{self.of(name, shape, 'p50_ms'):.2f}"
            return f"{self.of(name, shape, 'rate'):,.0f} (p50 {self.of(name, shape, 'p50_ms'):.1f} ms)"

        cells = " | ".join(map(cell, ("ours", "bare", "fastapi")))
        return f"| {TITLES[shape]} | {cells} | **{counts}** | {target} |"
