"""The user's program of `headrace run -- COMMAND`: starts after Headrace, and ends before it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.runtime import ChildProcess, Clock, Deadline, Readiness, Service, child_environment, group_command

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.1
_END_SECONDS: Final = 10.0
_NEEDS_PROGRAM: Final = ("reactive ", "backend")
"""Prefixes of services that may wait for the program itself, because it is their backend."""


class UserProgram(Service):
    """Starts the program once Headrace is ready; its end drains the process, and its exit code is that of it."""

    def __init__(
        self,
        command: Sequence[str],
        url: Callable[[], str],
        readiness: Callable[[], Mapping[str, Readiness]],
        on_end: Callable[[], None],
        clock: Clock,
    ) -> None:
        """Prepare.

        Args:
            command: Program and arguments.
            url: Returns the base URL of the HTTP API, once it is served.
            readiness: Returns the readiness of every service.
            on_end: Called when the program has ended by itself.
            clock: Time.
        """
        super().__init__("program")
        self.exit_code = 0
        """Of the program, if it ended by itself."""
        self._command = command
        self._url = url
        self._readiness = readiness
        self._on_end = on_end
        self._clock = clock
        self._child: ChildProcess | None = None
        self._stopping = False

    async def start(self) -> None:
        self.spawn(self._run(), "run")

    async def drain(self, deadline: Deadline) -> None:
        """End the program; half of the time is left for the others."""
        self._stopping = True
        if self._child:
            await self._child.stop(Deadline(self._clock, min(_END_SECONDS, deadline.remaining_seconds / 2)))

    async def stop(self) -> None:
        self._stopping = True
        if self._child:
            await self._child.stop(Deadline(self._clock, 0))
        await super().stop()

    async def _run(self) -> None:
        while any(not one.ready for name, one in self._readiness().items() if not name.startswith(_NEEDS_PROGRAM)):
            await self._clock.sleep(_LOOK_SECONDS)
        if self._stopping:
            return
        log.info("starting the program %s", self._command[0])
        command, variables = group_command(self._command), program_environment(self._url())
        self._child = await ChildProcess.start(self, "program", command, self._ended, env=variables, stdin=None)
        if self._stopping:
            await self._child.stop(Deadline(self._clock, 0))

    def _ended(self, code: int) -> None:
        if self._child:
            self._child.kill()  # what the program has left in its group
        if not self._stopping:
            self.exit_code = code
            log.info("the program %s ended with exit code %d: draining", self._command[0], code)
            self._on_end()


def program_environment(url: str) -> dict[str, str]:
    """Return the variables of the program: those of a child, and the address of Headrace as `HEADRACE_URL`."""
    local = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return {**child_environment(), "HEADRACE_URL": local}
