"""`headrace run -- COMMAND` and `headrace run --dev`: starting, ending and starting again, on a real broker."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.devcluster import DevCluster
from headrace_devkit.devcluster.jvm_server import is_alive
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import MakeTopic
from headrace_devkit.testing.scenario import Scenario

BACKGROUND = "sleep 600 & echo background $! >&2; "
"""A shell that starts a program of its own, which outlives it."""


class Run:
    """`headrace run WORDS` in a folder, and what it prints."""

    def __init__(self, folder: Path, env: dict[str, str], *words: str) -> None:
        self._log = folder / "run.log"
        command = [sys.executable, "-m", "headrace.cli.main", "run", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)

    @property
    def printed(self) -> str:
        return self._log.read_text()

    def wait(self, text: str, times: int = 1) -> None:
        Scenario.wait_until(lambda: self.printed.count(text) >= times, f"{text!r} in {self.printed}")

    def pid(self) -> int:
        """Return the process that the program has started."""
        self.wait("background ")
        return int(self.printed.partition("background ")[2].split()[0])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []
    hidden = ("KAFKA", "SCHEMA_REGISTRY_URL")

    def start(*words: str, config: Any = None, **env: str) -> Run:
        if config:
            (tmp_path / "headrace.yaml").write_text(json.dumps(config))
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        made.append(Run(tmp_path, {**variables, "HEADRACE__HTTP__PORT": str(free_ports(1)[0]), **env}, *words))
        return made[-1]

    yield start
    for one in made:
        one.process.kill()
        one.process.communicate()


def test_the_program_ends_the_run_with_its_code(run: Callable[..., Run], site: Scenario, topic: MakeTopic) -> None:
    """It starts even if a consumer waits for it, has the standard input, knows the address and no secret.

    It leaves nothing running.
    """
    consumer = {"topics": [topic()], "group": "g", "backend": {"url": "http://127.0.0.1:9/", "health": {"path": "/"}}}
    script = BACKGROUND + "cat; echo url=$HEADRACE_URL token=$HEADRACE_TOKEN arguments=$*; echo last; exit 7"
    words = ("--", "sh", "-c", script, "sh", "--debug")
    started = run(*words, config={**site.config, "reactive_consumers": {"push": consumer}}, HEADRACE_TOKEN="t0ken")
    started.process.communicate(b"typed\n", 120)
    assert started.process.returncode == 7
    for expected in (r"^typed$", r"^url=http://127.0.0.1:\d+ token= arguments=--debug$", r"^last$"):
        assert re.search(expected, started.printed, re.MULTILINE), started.printed
    assert "ready http=" not in started.printed, "the consumer's backend is not there"
    site.wait_until(lambda: not is_alive(started.pid()), "the end of the background process")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_run_ends_the_program(run: Callable[..., Run], site: Scenario, number: int) -> None:
    """A signal ends the program first, while the API still serves; after a crash nothing of it is left."""
    ask = "curl -s -o /dev/null -w '%{http_code}' $HEADRACE_URL/health/liveness"
    script = BACKGROUND + f"trap 'echo last word $({ask}); exit 3' TERM; while :; do sleep 0.05; done"
    started = run("--", "sh", "-c", script, config=site.config)
    background = started.pid()
    started.process.send_signal(number)
    assert started.process.wait(120) == (0 if number == signal.SIGTERM else -9)
    site.wait_until(lambda: not is_alive(background), "the end of the background process")
    assert ("last word 200" in started.printed) == (number == signal.SIGTERM)


def test_a_valid_change_starts_the_run_again(run: Callable[..., Run], site: Scenario, tmp_path: Path) -> None:
    """A file that is not valid is reported, and what runs continues, or waits; a signal ends it while it restarts."""
    started = run(
        "--dev", "--", "sh", "-c", "trap 'sleep 1; exit' TERM; while :; do sleep 0.1; done", config=site.config
    )
    started.wait("ready http=")
    files = Path(f"/proc/{started.process.pid}/fd")
    before = len([*files.iterdir()])
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "htp": {}}))
    started.wait("keeping the running configuration: headrace.yaml:1: htp")
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "drain_seconds": 7}))
    started.wait("headrace.yaml changed: starting again")
    started.wait("starting the program sh", times=2)
    site.wait_until(lambda: len([*files.iterdir()]) < before + 5, "the end of files that the first run has left open")
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "drain_seconds": 8}))
    started.wait("headrace.yaml changed: starting again", times=2)
    (tmp_path / "headrace.yaml").write_text("not a mapping")
    started.wait("waiting until the files are valid")
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "drain_seconds": 9}))
    started.wait("starting the program sh", times=3)
    (tmp_path / "headrace.yaml").write_text(json.dumps({**site.config, "drain_seconds": 8}))
    started.wait("headrace.yaml changed: starting again", times=3)
    started.process.terminate()
    assert started.process.wait(120) == 0
    assert started.printed.count("ready http=") == 3


def test_a_run_for_development_needs_no_file_and_no_kafka(run: Callable[..., Run], tmp_path: Path) -> None:
    """It starts both in an empty folder, and leaves Kafka running for the next time."""
    script = "curl -s $HEADRACE_URL/health/readiness; exit 4"
    try:
        started = run("--dev", "--", "sh", "-c", script)
        assert started.process.wait(240) == 4
        assert "started Kafka at 127.0.0.1:" in started.printed
        assert '{"ready":true' in started.printed
        assert DevCluster(tmp_path / ".headrace/dev").down()
    finally:
        DevCluster(tmp_path / ".headrace/dev").down()
