"""The web console as a child process of `headrace run`. It has no rights of its own: each user logs in."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from headrace.config.http import HttpConfig
from headrace.errors import ServiceDied
from headrace.extras import require
from headrace.process_context import ProcessContext
from headrace.runtime import ChildProcess, Clock, Deadline, Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace_console.console_sections import ConsoleConfig, ConsoleSections

log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 2.0


class ConsoleProcess(Service):
    """Runs the console, and restarts it when it ends. Its end makes no other service unready."""

    def __init__(
        self, settings: ConsoleConfig, http: HttpConfig, urls: Callable[[], Mapping[str, str]], clock: Clock
    ) -> None:
        """Prepare; `urls` returns the addresses of the listeners by name, once they are known.

        Raises:
            EnvironmentProblem: The library is missing.
        """
        require("console", "the section console")
        super().__init__("console")
        # Settings.
        self._settings = settings
        self._http = http
        self._urls = urls
        self._clock = clock
        # The present process.
        self._child: ChildProcess | None = None

    async def run(self) -> None:
        """Run one process until it ends, which is always an error: it is stopped by `drain`.

        Raises:
            ServiceDied: It has ended by itself.
        """
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._child = await ChildProcess.start(
            self,
            "console",
            [sys.executable, "-P", "-m", "headrace.cli.main", "console", *self._arguments()],
            ended.set_result,
            stdout=asyncio.subprocess.PIPE,
        )
        output = self._child.process.stdout
        assert output
        async for line in output:
            log.info("%s", line.decode(errors="replace").strip())
        raise ServiceDied(f"the console ended with exit code {await ended}")

    async def drain(self, deadline: Deadline) -> None:
        await self._end()

    async def stop(self) -> None:
        await self._end()
        await super().stop()

    async def _end(self) -> None:
        await self.cancel_tasks()
        if self._child:
            await self._child.stop(Deadline(self._clock, _STOP_SECONDS))
            self._child = None

    def _arguments(self) -> list[str]:
        settings, tls = self._settings, self._http.tls
        urls = self._urls()
        options: dict[str, object] = {"url": urls["http"], "host": settings.host, "port": settings.port}
        options |= {"management-url": urls["management"]} if "management" in urls else {}
        if tls.certificate:
            options |= {"certificate": tls.certificate, "key": tls.key}
        given = [*options.items(), *(("allowed-host", name) for name in self._http.allowed_hosts)]
        listeners = [tls, *([self._http.management.tls] if self._http.management else [])]
        given += [("server-certificate", one.certificate) for one in listeners if one.certificate]
        return [word for name, value in given for word in (f"--{name}", str(value))]


class ConsoleParts(Parts):
    """The process of the console."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        config = context.config
        self._services: list[Service] = []
        if console := config.section(ConsoleSections).console:
            self._services.append(ConsoleProcess(console, config.http, context.process.urls, context.clock))

    def services(self) -> Sequence[Service]:
        return self._services
