"""Commands of Headrace as forks of one process that has imported them.

A new interpreter takes more than a second of processor time to import Headrace; a fork takes hundredths.
"""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import headrace.cli
from headrace.runtime import failpoints
from headrace_devkit.devcluster import HeadraceProcess

_PRELOADED = [
    "__main__",
    "headrace_devkit.testing.forked",
    "headrace.app.app",
    "headrace.cli.main",
    *(f"headrace.cli.{module.name}" for module in pkgutil.iter_modules(headrace.cli.__path__)),
]
_PR_SET_PDEATHSIG = 1  # prctl(2)
_LIMIT_SECONDS = 240.0


class ForkedCommand:
    """A running command; used as `subprocess.Popen` is."""

    def __init__(
        self, words: Sequence[str], cwd: Path, env: Mapping[str, str], output: Path, errors: Path, stdin: Path
    ) -> None:
        """Start `headrace WORDS`; what it prints is appended to two files, which may be one."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        files = str(stdin), str(output), str(errors)
        self._process = context.Process(target=_run, args=(list(words), str(cwd), dict(env), *files), daemon=True)
        self._process.start()
        self.pid = self._process.pid or 0
        with contextlib.suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid and self.poll() is None:
                time.sleep(0.001)  # until signals to its group reach it

    def poll(self) -> int | None:
        """Return its exit code, negative if a signal ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, limit_seconds: float) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It runs still.
        """
        self._process.join(limit_seconds)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("headrace", limit_seconds)
        return code


def run_command(
    folder: Path, *words: str, given: str = "", env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run `headrace WORDS` in a folder to its end, as `subprocess.run` does."""
    with tempfile.TemporaryDirectory() as scratch:
        stdin, output, errors = (Path(scratch, name) for name in ("stdin", "output", "errors"))
        stdin.write_text(given)
        code = ForkedCommand(words, folder, env, output, errors, stdin).wait(_LIMIT_SECONDS)
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether a fork is as good as a new interpreter: no variable asks for something at its start."""
    at_start = {name for name in env if name.startswith("PYTHON")} - {"PYTHONUNBUFFERED"}
    return all(env[name] == os.environ.get(name, "") for name in at_start)


class ForkedHeadrace(HeadraceProcess):
    """`headrace run` as a fork."""

    def _launch(self, words: Sequence[str]) -> None:
        if can_fork(self._env):
            log = self.server.log
            self.server.adopt(ForkedCommand(words, self._folder, self._env, log, log, Path(os.devnull)))
        else:
            super()._launch(words)


def _run(words: list[str], cwd: str, env: dict[str, str], stdin: str, output: str, errors: str) -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate((stdin, output, errors)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
        os.dup2(os.open(path, flags), number)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", -1 if "PYTHONUNBUFFERED" not in env else 1, closefd=False)
    sys.argv = ["headrace", *words]
    _arm(env.get(failpoints.VARIABLE, ""))
    from headrace.cli.main import main

    main()


def _arm(points: str) -> None:
    """Arm failpoints in the modules that are loaded, as a new interpreter does when it loads them."""
    off, armed = failpoints.reach, failpoints.arm(points) if points else failpoints.reach
    for module in [module for name, module in sys.modules.items() if name.startswith("headrace.")]:
        if getattr(module, "reach", None) is off:
            vars(module)["reach"] = armed
