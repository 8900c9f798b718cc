"""One process: the parts of every feature, started in order and run until a signal."""

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Sequence

import uvloop

from headrace.app.changed_files import ChangedFiles
from headrace.app.listeners import ListenerParts
from headrace.app.measuring import measuring
from headrace.app.ready_announcer import ReadyAnnouncer
from headrace.app.user_program import UserProgram
from headrace.config.kafka_security import warnings_of
from headrace.config.model import HeadraceConfig
from headrace.config.process_share import ProcessShare
from headrace.config.remote_server import RemoteServer
from headrace.errors import ServiceDied
from headrace.feature import features
from headrace.kafka.client.properties import check_properties
from headrace.process_context import make_context
from headrace.runtime import Clock, Service, SystemClock
from headrace.runtime.feature_parts import NeededParts, make_parts
from headrace.runtime.notification import Notifications
from headrace.runtime.process_link import ProcessLink
from headrace.runtime.telemetry.logs import configure_logging

log = logging.getLogger(__name__)

_EXIT_DIED = 1
_COLLECT_AFTER = 20_000, 50, 100


class App:
    """The services of one process, downstream first."""

    def __init__(
        self, config: HeadraceConfig, clock: Clock, share: ProcessShare | None = None, link: ProcessLink | None = None
    ) -> None:
        """Make every service; nothing is started or contacted. One of several processes has a share and a link.

        Raises:
            ConfigError: A client property is not allowed, or the files of TLS are not usable.
            FunctionInvalid: A function file is not usable.
            PipelineInvalid: A pipeline file is not usable.
        """
        _check(config)
        self.context = context = make_context(config, clock, share, link)
        self.process = process = context.process
        process.parts = make_parts(features(), context)
        self.listeners = NeededParts(process.parts).of(ListenerParts)
        services: list[Service] = [*measuring(context), *context.services]
        for parts in process.parts.values():
            services += parts.services()
        for service in services:
            process.supervisor.add(service)

    async def run(
        self, announce: Callable[[str], None], program: Sequence[str] = (), files: ChangedFiles | None = None
    ) -> int:
        """Run until a signal or a death, a change of watched files, or the end of the user's program.

        Returns the exit code.
        """
        process, clock = self.process, self.context.clock
        supervisor, signals, link = process.supervisor, process.signals, process.link
        signals.install()
        webs = self.listeners.all
        line = lambda: announce("ready " + " ".join(f"{web.name}={web.url}" for web in webs))  # noqa: E731
        supervisor.add(ReadyAnnouncer(supervisor, clock, line, link or Notifications(os.environ)))
        ended = signals.drain_requested.set
        user = UserProgram(program, lambda: self.listeners.web.url, supervisor.readiness, ended, clock)
        if files:
            files.signals = signals
            supervisor.add(files)
        if program:
            supervisor.add(user)  # the last to start, and the first to drain
        try:
            self.listeners.claim()  # the web starts last, and consumers would have begun by then
            if link:
                link.watch(ended)
            for parts in process.parts.values():
                await parts.open()
            await supervisor.start()
            # Objects made until now stay. Scanning them in each collection took a fifth of the time of producing.
            gc.freeze()
            gc.set_threshold(*_COLLECT_AFTER)
            await supervisor.run(signals)
        except ServiceDied as death:
            log.critical("stopping this process: %s", death.description)
            return _EXIT_DIED
        finally:
            for name, parts in process.parts.items():
                try:
                    parts.close()
                except Exception:  # boundary: one feature's failure must not hide why the process ends
                    log.exception("feature %s failed to close", name)
            await self.context.registry.close()
        return user.exit_code


def _check(config: HeadraceConfig) -> None:
    """Check the client properties, and log warnings about settings."""
    check_properties(config.kafka, config.producer)
    weak = [text for server in dict(config).values() if isinstance(server, RemoteServer) for text in server.warnings]
    for warning in [*config.producer.warnings, *warnings_of(config.kafka.security), *weak]:
        log.warning("%s", warning)


def run(
    config: HeadraceConfig,
    *,
    announce: Callable[[str], None],
    read_again: Callable[[], HeadraceConfig] | None = None,
    program: Sequence[str] = (),
    files: ChangedFiles | None = None,
    share: ProcessShare | None = None,
    link: ProcessLink | None = None,
) -> int:
    """Run everything the configuration names, in the foreground.

    Args:
        announce: Gets the line `ready http=...` when everything is ready.
        read_again: Reads the configuration again when an operator reloads a part of it.
        program: The user's program and its arguments, which runs with the process.
        files: Watches files, and ends the process when they have changed.
        share: That of one of several processes.
        link: Its link to the process that started it.

    Returns:
        Exit code: 0 after a drain by signal, 1 after a service died; that of the program when it ended by itself.

    Raises:
        ConfigError, FunctionInvalid, PipelineInvalid, PortTaken: Nothing was started.
    """
    configure_logging(config.log_level, config.log_format, share.number if share else None)

    async def main() -> int:
        app = App(config, SystemClock(), share, link)
        app.process.read_again = read_again
        return await app.run(announce, program, files)

    # The loop stays open until the process ends: to close it means to wait for threads that look up names.
    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
