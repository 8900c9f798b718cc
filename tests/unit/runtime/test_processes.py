"""Child processes, with real ones."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.app.user_program import program_environment
from headrace.runtime import ChildProcess, Deadline, Service, SystemClock, run_program, start_child

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-uc",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); time.sleep(60)",
]


def test_a_program_that_takes_too_long_is_killed() -> None:
    """The limit holds; one that ends by itself is told by its exit code, with all that it printed."""
    assert run_program(SLEEP, 0.05) == (-signal.SIGKILL, "")
    assert run_program([sys.executable, "-c", "print('on'); raise SystemExit(3)"], 60) == (3, "on\n")


def test_a_command_that_does_not_exist_says_so(tmp_path: Path) -> None:
    """The child ends with a sentence, not a traceback."""
    log = tmp_path / "log"
    child = start_child(["/no/such/program"], output=log)
    assert child.wait(5) == 1
    assert "cannot start /no/such/program: No such file" in log.read_text()


async def test_no_child_sees_a_variable_of_headrace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However it is started, and in any letter case, as the configuration reads them; the other variables are there."""
    for name in ("HEADRACE__A", "HEADRACE_TOKEN", "headrace__kafka__security__sasl__password", "Headrace_token"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("AIRPORT", "JFK")
    program = [sys.executable, "-c", "import os; e = os.environ; print('hush' in e.values(), e['AIRPORT'])"]
    output, owner, ended = tmp_path / "output", Service("x"), asyncio.Event()
    start_child(program, output=output).wait()
    child = await ChildProcess.start(owner, "child", program, lambda _: ended.set(), stdout=subprocess.PIPE)
    seen = [run_program(program, 60)[1], output.read_text(), (await child.process.communicate())[0].decode()]
    assert seen == ["False JFK\n"] * 3
    await ended.wait()
    assert "hush" not in program_environment("http://localhost:1").values()


async def test_the_owner_hears_of_the_end_of_its_child() -> None:
    """The exit code arrives on the loop."""
    owner, code = Service("o"), asyncio.get_running_loop().create_future()
    await ChildProcess.start(owner, "c", [sys.executable, "-c", "raise SystemExit(3)"], code.set_result)
    assert await asyncio.wait_for(code, 60) == 3
    await owner.stop()


async def test_stopping_a_child_of_a_service_has_a_limit() -> None:
    """SIGTERM first, SIGKILL at the deadline."""
    owner, codes = Service("o"), []
    child = await ChildProcess.start(owner, "c", STUBBORN, codes.append, stdout=asyncio.subprocess.PIPE)
    assert child.process.stdout
    await child.process.stdout.readline()
    await child.stop(Deadline(SystemClock(), 0.05))
    assert child.process.returncode == -signal.SIGKILL
    await owner.stop()
