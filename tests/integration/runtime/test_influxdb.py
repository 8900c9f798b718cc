"""Pushes of metrics to a real InfluxDB of version 1, with a login."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.debian_package import debian_program

TOKEN = "ann:c4nary-pass"


class InfluxServer:
    """One server, which keeps its port and data when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.program = debian_program("influxd", "influxdb")
        http, rpc = free_ports(2)
        self.url = f"http://127.0.0.1:{http}"
        names = {"HTTP_BIND_ADDRESS": f"127.0.0.1:{http}", "BIND_ADDRESS": f"127.0.0.1:{rpc}"}
        names |= {"META_DIR": f"{folder}/meta", "DATA_DIR": f"{folder}/data", "DATA_WAL_DIR": f"{folder}/wal"}
        names |= {"HTTP_AUTH_ENABLED": "true", "REPORTING_DISABLED": "true"}
        self.environment = {**os.environ, **{f"INFLUXDB_{name}": value for name, value in names.items()}}

    @contextlib.contextmanager
    def running(self, site: Any) -> Iterator[None]:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([self.program], env=self.environment, **quiet)
        try:
            site.wait_until(lambda: site.ask(f"{self.url}/ping").status == 204, "InfluxDB")
            user, password = TOKEN.split(":")
            self.query(f"CREATE USER {user} WITH PASSWORD '{password}' WITH ALL PRIVILEGES")
            self.query("CREATE DATABASE metrics")
            yield
        finally:
            process.terminate()
            process.wait()

    def query(self, statement: str) -> list[dict[str, Any]]:
        """Return the rows of a statement."""
        user, password = TOKEN.split(":")
        fields = {"q": statement, "db": "metrics", "u": user, "p": password}
        with urllib.request.urlopen(f"{self.url}/query?{urllib.parse.urlencode(fields)}", b"") as response:
            series = json.load(response)["results"][0].get("series", [])
        return [
            {**dict(zip(one["columns"], row, strict=True)), **one.get("tags", {})}
            for one in series
            for row in one["values"]
        ]


@pytest.fixture
def influx(tmp_path: Path) -> InfluxServer:
    return InfluxServer(tmp_path)


def test_every_metric_and_light_4j_s_arrive_again_after_an_outage(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, influx: InfluxServer
) -> None:
    """The outage costs two lines in the log; counters of that time are in the first push after it."""
    influxdb = {"url": f"{influx.url}/write?db=metrics&precision=ms", "token": TOKEN, "interval_seconds": 4}
    process = headrace({**site.config, "metrics": {"influxdb": influxdb}, "audit": {"to": "none"}})
    name = topic(1)
    for _ in range(3):
        assert site.ask(f"{process.url}/producers/{name}", {"records": [{"value": "x"}]}).status == 200
    site.wait_until(lambda: "metrics are not taken by" in process.output, "the outage")
    with influx.running(site):
        site.wait_until(lambda: "are taken by" in process.output, "the end of the outage")
        rows = influx.query('SELECT sum(value) FROM "headrace.request.count" GROUP BY endpoint, clientId')
        produced = [row for row in rows if row["endpoint"] == "/producers/{topic}"]
        assert [(row["sum"], row["clientId"]) for row in produced] == [(3, "anonymous")]
        [mean] = influx.query("SELECT value FROM \"headrace.response_time.mean\" WHERE endpoint = '/producers/{topic}'")
        assert 0 < mean["value"] < 60_000
        [last] = influx.query("SELECT last(counter) FROM headrace_produce_records_total WHERE result = 'acknowledged'")
        assert last["last"] == 3
        assert influx.query('SELECT last(sum), last("+Inf") FROM headrace_event_loop_delay_seconds')
    assert process.output.count("metrics are not taken by") == 1
    assert "c4nary" not in process.output
