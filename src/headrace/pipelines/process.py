"""One life of a driver process, seen from the process that watches it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from headrace.lifecycle import ChildProcess, Deadline, Service
from headrace.pipelines.driver.plan import AnyEvent, DriverPlan
from headrace.pipelines.environment import Toolchain

_MAX_EVENT_BYTES = 4_194_304
_TAIL_BYTES = 4_096
_TAIL_LINES = 5


class DriverProcess:
    """A running driver process and its JVM."""

    def __init__(self, child: ChildProcess, errors: Path) -> None:
        self._child = child
        self._errors = errors
        self._decoder = msgspec.json.Decoder(AnyEvent)

    @classmethod
    async def start(cls, owner: Service, plan: DriverPlan, toolchain: Toolchain) -> DriverProcess:
        """Start the process and hand it its plan; it dies with this process, and its JVM with it."""
        plan.scratch.mkdir(parents=True, exist_ok=True)
        errors = plan.folder / "driver.err"
        with errors.open("wb") as file:
            child = await ChildProcess.start(
                owner,
                f"driver of {plan.spec.name}",
                [sys.executable, "-P", "-m", "headrace.pipelines.driver"],
                on_exit=lambda code: None,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                env=toolchain.environment(plan.folder),
                cwd=plan.folder,
                limit=_MAX_EVENT_BYTES,
            )
        assert child.process.stdin is not None
        child.process.stdin.write(plan.model_dump_json().encode())
        child.process.stdin.close()
        return cls(child, errors)

    @property
    def pid(self) -> int:
        """Process id of the driver; its JVM is in the same process group."""
        return self._child.pid

    async def events(self) -> AsyncIterator[AnyEvent]:
        """Yield what the driver tells, until the process has ended."""
        assert self._child.process.stdout is not None
        async for line in self._child.process.stdout:
            yield self._decoder.decode(line)

    async def exit_code(self) -> int:
        """Wait for the end of the process; negative is the signal that ended it."""
        return await self._child.process.wait()

    async def stop(self, deadline: Deadline) -> None:
        """Let each flow finish its micro-batch, at most until the deadline; after it nothing of the process is left."""
        # Only the Python process is told. The JVM would take the same signal as an order to end now.
        with contextlib.suppress(ProcessLookupError):
            self._child.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exit_code(), deadline.remaining_seconds)
        self.kill()

    def kill(self) -> None:
        """End the process and its JVM now; they may have ended already."""
        self._child.kill()

    def last_words(self) -> str:
        """Return the last lines of what the process and its JVM wrote to standard error; empty if nothing."""
        with self._errors.open("rb") as file:
            file.seek(max(0, self._errors.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        # Java warns at every start about a module that Spark asks for.
        return "\n".join([line for line in lines if not line.startswith("WARNING: ")][-_TAIL_LINES:])
