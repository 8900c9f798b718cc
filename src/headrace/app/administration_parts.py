"""The administration of one process, made of the parts that it changes."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from headrace.admin.process.chaos import Assault, Chaos, Disturbance
from headrace.admin.process.modules import Module, Modules
from headrace.admin.process.pass_through import PassThrough
from headrace.admin.process.routes import AdministrationEndpoints
from headrace.app.assembly import Assembly
from headrace.app.shared_work import Several
from headrace.config.known_secrets import SecretMask
from headrace.config.model import HeadraceConfig
from headrace.consumers.process_context import ProcessContext
from headrace.http.application import Gate
from headrace.http.auth import Authenticator
from headrace.runtime import Service, run_blocking
from headrace.runtime.telemetry.log_levels import ROOT, LogLevels
from headrace.runtime.telemetry.recent_logs import RecentLogs
from headrace.runtime.tls import WatchedFiles
from headrace.sidecar.reactive.client import BackendClient


class Administration:
    """The endpoints of administration, and what they need."""

    def __init__(
        self,
        context: ProcessContext,
        assembly: Assembly,
        services: Callable[[], Sequence[Service]],
        shut_down: Callable[[], None],
        several: Several | None = None,
    ) -> None:
        """Make it.

        Args:
            assembly: The consumers and functions of this process.
            services: Returns every service.
            shut_down: Begins the drain.
            several: Set in one of several processes.
        """
        self.read_again: Callable[[], HeadraceConfig] | None = None
        """Reads the configuration again; None if it is in no file."""
        self.authenticator: Authenticator | None = None
        """Its principals and limits can be reloaded."""
        self.gates: list[Gate] = []
        """The gates of the requests that assaults hit."""
        self.chaos = Chaos(context.clock, self._disturb)
        self.chaos.on_end = self._ended
        self._audit = context.audit
        self._assembly = assembly
        self._services = services
        self._logs = RecentLogs()
        self._levels = LogLevels(context.clock)
        config = context.config
        self._secrets = SecretMask(config)
        self.endpoints = AdministrationEndpoints(
            config,
            self._levels,
            self._logs,
            Modules(self._modules),
            self.chaos,
            shut_down,
            self._secrets,
            PassThrough(config.admin.pass_through, BackendClient),
            several.others if several else None,
        )
        self._link = several.link if several else None

    def open(self) -> None:
        """Begin to keep log records."""
        logging.getLogger().addHandler(self._logs)

    def close(self) -> None:
        """Undo every change of the log."""
        self._levels.end_all()
        logging.getLogger().removeHandler(self._logs)

    def _modules(self) -> Mapping[str, Module]:
        functions = {
            f"function {name}": Module("replaces its workers; its consumers stay in their groups", one.reload)
            for name, one in self._assembly.functions.reloads.items()
        }
        files = [service for service in self._services() if isinstance(service, WatchedFiles)]
        how = "reads its files now; without a request, when they change"
        sections: dict[str, Module] = {}
        if self.read_again:
            sections["log_level"] = Module("reads the level from the configuration", self._change_level)
        if self.read_again and self.endpoints.config.reactive_consumers:
            how = "restarts the reactive consumers whose settings in the configuration have changed; others continue"
            sections["reactive_consumers"] = Module(how, self._change_consumers)
        if self.read_again and self.authenticator:
            sections["security"] = Module("reads principals and limits from the configuration", self._change_security)
        return functions | {one.setting: Module(how, _load(one)) for one in files} | sections

    async def _read(self) -> HeadraceConfig:
        assert self.read_again
        config = await run_blocking(self.read_again)
        self._secrets.add(config)
        return config

    async def _change_level(self) -> None:
        level = (await self._read()).log_level
        self._levels.change(ROOT, logging.getLevelName(level.upper()), None)
        self._changed(log_level=level)

    async def _change_consumers(self) -> None:
        config = await self._read()
        await self._assembly.change(config)
        self._changed(reactive_consumers=config.reactive_consumers)

    async def _change_security(self) -> None:
        assert self.authenticator
        security = (await self._read()).security
        self.authenticator.change(security)
        self._changed(security=security)

    def _changed(self, **sections: object) -> None:
        """Show sections that were read again, and have a process that starts later get them, too."""
        self.endpoints.config = self.endpoints.config.model_copy(update=sections)
        if self._link:
            self._link.send(RELOADED=next(iter(sections)))

    def _disturb(self, disturbance: Disturbance | None) -> None:
        for gate in self.gates:
            gate.disturbance = disturbance

    def _ended(self, assault: Assault) -> None:
        if self._audit:
            self._audit.control(f"end assault {assault}", "process")


def _load(files: WatchedFiles) -> Callable[[], Awaitable[None]]:
    async def load() -> None:
        files.load()

    return load
