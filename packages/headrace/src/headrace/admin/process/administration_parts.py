"""The administration of one process, made of the parts that it changes."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from headrace.admin.process.modules import Modules
from headrace.admin.process.routes import AdministrationEndpoints
from headrace.config.known_secrets import SecretMask
from headrace.process_context import ProcessContext
from headrace.runtime.feature_parts import NeededParts, Parts, Reload
from headrace.runtime.telemetry.log_levels import ROOT, change_level
from headrace.runtime.telemetry.recent_logs import RecentLogs
from headrace.runtime.tls import WatchedFiles


class AdministrationParts(Parts):
    """The endpoints of administration, and what they need."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._process = process = context.process
        self._logs = RecentLogs()
        secrets = SecretMask(context.config)
        process.on_read.append(secrets.add)
        self.administration = AdministrationEndpoints(
            lambda: process.in_force,
            self._logs,
            Modules(self._modules),
            process.signals.drain_requested.set,  # a request during the drain is not a second signal
            secrets,
            process.others,
        )
        self.endpoints = [self.administration]

    async def open(self) -> None:
        logging.getLogger().addHandler(self._logs)

    def close(self) -> None:
        logging.getLogger().removeHandler(self._logs)

    def reloads(self) -> Mapping[str, Reload]:
        if not self._process.read_again:
            return {}
        return {"log_level": Reload("reads the level from the configuration", self._change_level)}

    def _modules(self) -> Mapping[str, Reload]:
        files = [service for service in self._process.supervisor.services if isinstance(service, WatchedFiles)]
        how = "reads its files now; without a request, when they change"
        found = {one.setting: Reload(how, _load(one)) for one in files}
        for parts in self._process.parts.values():
            found |= parts.reloads()
        return found

    async def _change_level(self) -> None:
        level = (await self._process.read_config()).log_level
        change_level(ROOT, logging.getLevelName(level.upper()))
        self._process.changed(log_level=level)


def _load(files: WatchedFiles) -> Callable[[], Awaitable[None]]:
    async def load() -> None:
        files.load()

    return load
