from __future__ import annotations

import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from headrace.errors import PortTaken
from headrace_devkit.devcluster.group import ServerGroup, start_together
from headrace_devkit.devcluster.jvm_server import Server, ServerId, StillStarting

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

EXIT = {"x86_64": 60, "aarch64": 93}
"""The number of exit(2), which ends one thread, as a kill ends the first thread before the others."""
SLOW_END = """
import ctypes, os, pathlib, socket, sys, threading, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
def rest():
    while pathlib.Path(sys.argv[3]).exists():
        time.sleep(0.01)
    os._exit(1)
threading.Thread(target=rest).start()
ctypes.CDLL(None).syscall(int(sys.argv[2]), 0)
"""


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


class Listeners(ServerGroup):
    """One server that ends slowly."""

    title, state_name, port_option, ports_per_server = "Listener", "state.json", "--port", 1

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **more)
        self.server = self._add(1, Server("The listener", folder / "log"))

    def install(self, progress: object = None) -> None:
        """Nothing is missing."""

    def _command(self, n: int) -> list[str]:
        number, holds = EXIT[platform.machine()], self._directory / "holds"
        holds.touch()
        return [sys.executable, "-c", SLOW_END, str(self._ports[n][0]), str(number), str(holds)]

    def _wait_ready(self, limit_seconds: float) -> None:
        self.server.wait_until(lambda: _state(self.server) == "Z", limit_seconds)


@pytest.mark.skipif(platform.machine() not in EXIT, reason="the number of exit(2) is not known here")
def test_what_starts_again_gets_its_port_when_the_killed_process_has_let_it_go(tmp_path: Path) -> None:
    """Its first thread is a zombie while another one still holds the port; so the same port is not taken by it."""
    first = Listeners(tmp_path, detached=True)
    with first:
        with pytest.raises(OSError, match="in use"), socket.socket() as probe:
            probe.bind(("127.0.0.1", first.ports[0]))
        again = Listeners(tmp_path, detached=True)
        assert not again.server.running
        threading.Timer(0.2, (tmp_path / "holds").unlink).start()
        again.launch()
        assert again.ports == first.ports
        assert again.server.id != first.server.id
        again.remove()
