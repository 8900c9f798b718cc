"""The web console as a child process of `headrace run`. It has no rights of its own: each user logs in."""

from __future__ import annotations

import asyncio
import json
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
            [sys.executable, "-P", "-m", "headrace_console", self._child_settings()],
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

    def _child_settings(self) -> str:
        tls, management, urls = self._http.tls, self._http.management, self._urls()
        listeners = [tls, *([management.tls] if management else [])]
        settings = {
            "urls": [urls["http"]],
            "management": urls.get("management", ""),
            "trusted": [str(one.certificate) for one in listeners if one.certificate],
            "host": self._settings.host,
            "port": self._settings.port,
            "certificate": str(tls.certificate or ""),
            "key": str(tls.key or ""),
            "hosts": [*self._http.allowed_hosts],
        }
        return json.dumps(settings)


class ConsoleParts(Parts):
    """The process of the console."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        config = context.config
        self._services: list[Service] = []
        if console := config.section(ConsoleSections).console:
            self._services.append(ConsoleProcess(console, config.http, context.process.urls, context.clock))

    def services(self) -> Sequence[Service]:
        return self._services
