"""`headrace reactive top` on running processes, as people and programs see it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from typing import Any

import pytest

from headrace.devcluster.ports import free_ports
from headrace.records import OutgoingRecord
from headrace.testing import PlannedResponse

RECORDS = 40


@pytest.fixture
def broken(site: Any, topic: Any, headrace: Any, backend: Any) -> Any:
    """A process whose backend is away, with records that wait."""
    name = topic(2)
    site.write(name, *(OutgoingRecord(name, None, b"{}", partition=n % 2) for n in range(RECORDS)))
    backend.response = PlannedResponse(status=503)
    consumer = {"topics": [name], "group": f"{name}-push", "backend": {"url": backend.url, "mode": "status"}}
    process = headrace({**site.config, "reactive_consumers": {"orders": consumer}})

    def seen() -> bool:
        (row,) = table(site, process.url)["consumers"]
        return bool(row["breaker"] != "closed" and row["lag"] == RECORDS)

    site.wait_until(seen, "the breaker to be open and the lag to be known")
    return process


def table(site: Any, url: str) -> Any:
    """Return one table as a program reads it."""
    words = ["--url", url, "--interval", "0.2", "--once", "--output", "json"]
    return json.loads(site.cli("reactive", "top", *words).stdout)


def a_terminal_is_redrawn_until_an_interrupt(url: str) -> None:
    """On a terminal the table stays and is drawn again, and Ctrl-C is a good end."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "headrace.cli.main", "reactive", "top", "--url", url, "--interval", "0.2"]
    env = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    seen = b""
    while seen.count(b"orders ") < 3:
        seen += os.read(ours, 4096)
    assert seen.count(b"\x1b[1A") >= 2, "the table is drawn over the one before"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    os.close(ours)


def test_one_table_for_people_and_programs(site: Any, broken: Any, backend: Any) -> None:
    """It has the numbers and the reason, fits 80 columns, and is drawn again on a terminal."""
    found = table(site, broken.url)
    assert found["silent"] == {}
    (row,) = found["consumers"]
    assert "503" in row["why"]
    assert row["oldest_seconds"] >= 0
    lines = site.cli("reactive", "top", "--url", broken.url, "--interval", "0.2", "--once").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(index for index, line in enumerate(lines) if line.startswith("CONSUMER"))
    assert lines[head].split() == ["CONSUMER", "REC/S", "LAG", "IN", "FLIGHT", "TRIES", "BREAKER", "OLDEST"]
    assert lines[head + 1].split()[::2][:2] == ["orders", str(RECORDS)]
    a_terminal_is_redrawn_until_an_interrupt(broken.url)
    backend.response = PlannedResponse()
    site.wait_until(lambda: table(site, broken.url)["consumers"][0]["lag"] == 0, "the lag to be gone")


def test_without_an_response_the_exit_code_is_1(site: Any) -> None:
    """A script that asks once sees that the work failed, and the output says why."""
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    words = ["reactive", "top", "--url", url, "--interval", "0.2", "--once"]
    assert f"{url}: Headrace is unreachable" in site.cli(*words, code=1).stdout
    assert list(json.loads(site.cli(*words, "--output", "json", code=1).stdout)["silent"]) == [url]
