from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from headrace.errors import PortTaken
from headrace_devkit.devcluster.group import start_together
from headrace_devkit.devcluster.jvm_server import Server, ServerId, StillStarting

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Run a line of Python as a server; it is killed after the test."""
    started: list[Server] = []

    def start(code: str) -> Server:
        server = Server("The server", tmp_path / "server.log")
        started.append(server)
        server.start([sys.executable, "-c", code], detached=False)
        return server

    yield start
    for server in started:
        server.kill()


def _up(server: Server) -> bool:
    return "up" in server.log_tail()


def _state(server: Server) -> str:
    assert server.id
    return Path(f"/proc/{server.id.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_another_process_with_the_same_number_is_not_mistaken_for_it(run: Callable[..., Server]) -> None:
    """The start time must match, else nothing is signalled."""
    server = run(SLEEP)
    assert server.id
    stranger = Server("stranger", server.log, found=ServerId(server.id.pid, "12345"))
    assert not stranger.running
    stranger.kill()
    assert server.running


def test_a_stubborn_server_is_killed_after_the_limit(run: Callable[..., Server]) -> None:
    """SIGTERM ignored means SIGKILL."""
    server = run(STUBBORN)
    server.wait_until(lambda: _up(server), 60)
    server.stop(0.05)
    assert server.exit_code == -signal.SIGKILL


def test_a_slow_start_has_time_while_its_log_grows(run: Callable[..., Server]) -> None:
    """Then it is told apart from one that ended, and it lives on."""
    server = run("import time\nfor n in range(99): print('up' if n > 40 else n, flush=True); time.sleep(0.05)")
    server.wait_until(lambda: _up(server), 1)
    with pytest.raises(StillStarting, match=r"^The server was not ready within"):
        server.wait_until(lambda: False, 0.1)
    assert server.running


def test_a_late_registry_leaves_kafka_running(run: Callable[..., Server]) -> None:
    """Any other group that is late ends what was started."""
    server = run(SLEEP)
    registry = Mock(servers=[], wait_ready=Mock(side_effect=StillStarting("late")))
    kafka = Mock(servers=[server])
    assert start_together(registry, kafka, may_be_late=registry) == "late"
    assert server.running
    with pytest.raises(StillStarting):
        start_together(registry, kafka)


@pytest.mark.parametrize("line", ["... Address already in use.", "Port 8081 seems to be in use by another process"])
def test_a_lost_race_for_a_port_is_told_apart(run: Callable[..., Server], line: str) -> None:
    """So that the caller can try another port; a stack trace of any length may follow the line."""
    server = run(f"raise SystemExit({line!r} + '\\n\\tat y' * 60 + '\\n... 4 more')")
    with pytest.raises(PortTaken, match=r"use.*\n\.\.\. 4 more$"):
        server.wait_until(lambda: False, 60)
