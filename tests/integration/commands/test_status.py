"""`headrace status` on running processes, as people and programs see it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def a_terminal_is_redrawn_until_an_interrupt(url: str) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "headrace.cli.main", "status", "--watch", "--url", url]
    env = {**os.environ, "COLUMNS": "80", "LINES": "60", "TERM": "xterm"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    seen, end = b"", time.monotonic() + 60
    try:
        while seen.count(b"NEEDS YOU") < 3 and time.monotonic() < end:
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
        assert b"\x1b[1A" in seen, "the page is drawn over the one before"
        process.send_signal(signal.SIGINT)
        end = time.monotonic() + 60
        with contextlib.suppress(OSError):  # the terminal is gone with the process
            while process.poll() is None and time.monotonic() < end:
                if select.select([ours], [], [], 1)[0]:  # a terminal that nobody reads would hold its last lines
                    os.read(ours, 4096)
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(ours)


def test_one_page_says_what_needs_a_person(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """A backend that is away, then dead letters; every part is in the JSON, and the page has the command that helps."""
    name = topic(2)
    site.write(name, *(OutgoingRecord(name, None, b"{}", partition=n % 2) for n in range(40)))
    backend.response = PlannedResponse(status=503)
    retry = {"attempts": 1, "first_delay_seconds": 0.05}
    consumer = {"topics": [name], "group": name, "backend": {"url": backend.url}, "retry": retry}
    url = headrace({**site.config, "reactive_consumers": {"orders": consumer}}).url

    def found() -> Any:
        return json.loads(site.cli("status", "--url", url, "--output", "json").stdout)

    def needs() -> list[Any]:
        return [
            (one["severity"], one["about"])
            for one in found()["needs"]
            if name in one["about"] or "topic" not in one["about"]
        ]

    site.wait_until(lambda: ("stopped", "reactive consumer orders") in needs(), "the breaker to be open")
    site.wait_until(lambda: found()["consumers"]["consumers"][0]["lag"] == 40, "the lag to be known")
    assert {"readiness", "consumers", "pipelines", "dead_letters", "instances", "cluster"} <= found().keys()
    assert found()["notShown"] == {}
    lines = site.cli("status", "--url", url).stdout.splitlines()
    assert "Kafka: 1 broker" in lines
    assert "    headrace reactive status orders" in lines
    assert any(line.split()[:2] == ["orders", name] and " 40 " in line for line in lines)
    a_terminal_is_redrawn_until_an_interrupt(url)
    backend.response = PlannedResponse(fails=lambda record: record["offset"] == 3)
    site.wait_until(lambda: needs() == [("degraded", f"topic {name}.dlq")], "the dead letters")


def test_without_headrace_the_page_says_so(site: Scenario, topic: MakeTopic) -> None:
    """A script sees by the exit code that the work failed."""
    port = str(free_ports(1)[0])
    (site._folder / "headrace.yaml").write_text(json.dumps({**site.config, "http": {"port": int(port)}}))
    printed = site.cli("status", code=1).stdout
    assert "Headrace is unreachable" in printed
