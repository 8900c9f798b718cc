"""Runs several processes that serve one port: starts them, restarts one that ends, and drains all together."""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from headrace.config.model import HeadraceConfig
from headrace.config.process_share import ProcessShare, process_count
from headrace.errors import EnvironmentProblem, HeadraceError, ServiceDied
from headrace.framing import FrameReader, ProtocolBroken, encode_frame
from headrace.runtime import ChildProcess, Clock, Deadline, RestartPauses, Service, Signals, SystemClock, chance
from headrace.runtime.held_port import hold_port
from headrace.runtime.notification import Notifications
from headrace.runtime.process_link import DRAIN
from headrace.runtime.supervisor import first_of

log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.2
_LONGEST_PAUSE_SECONDS: Final = 30.0
_STEADY_SECONDS: Final = 60.0
_FAILED_STARTS: Final = 5
"""After this many in a row of one process, the run ends."""
_GRACE_SECONDS: Final = 10.0
"""For a process to stop after its drain."""
_REPORT_ATTEMPTS: Final = 10
_REPORT_SECONDS: Final = 0.1
_MOST_BYTES: Final = 1_048_576
"""Of a message of a process."""
_decode: Final = msgspec.msgpack.Decoder(dict[str, str]).decode


class OneProcess:
    """What is known of one of the processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: ChildProcess | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.failed_starts = 0
        """How often in a row it has ended before all its services had started."""
        self.is_new = True
        """Whether it has never started completely."""
        self.has_started = asyncio.Event()
        self.alive = False
        """Whether it has said so since the last report to the service manager."""
        self.ready_line = ""
        """Set while every service of it is ready, or was once."""
        self.why = "it has not started yet"

    @property
    def name(self) -> str:
        """For logs and readiness."""
        return f"process {self.number}"

    async def drain(self, deadline: Deadline) -> int:
        """Have it drain, kill it at the deadline, and return its exit code."""
        assert self.child
        if self.has_started.is_set() and self.writer:
            self.writer.write(DRAIN)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.child.process.wait(), deadline.remaining_seconds)
        await self.child.stop(deadline)
        return self.child.process.returncode or 0

    def ended(self, why: str) -> None:
        """Take that it runs no longer."""
        self.has_started.clear()
        self.alive, self.ready_line, self.why = False, "", why
        if self.writer:
            self.writer.close()
            self.writer = None


class SeveralProcesses(Service):
    """The processes of one run. This one serves nothing itself."""

    def __init__(
        self,
        config: HeadraceConfig,
        file: Path,
        read_again: Callable[[], HeadraceConfig],
        announce: Callable[[str], None],
        clock: Clock,
        manager: Notifications,
    ) -> None:
        super().__init__("processes")
        # Settings.
        self._config = config
        self._file = file
        self._read_again = read_again
        self._announce = announce
        self._clock = clock
        self._manager = manager
        # The processes.
        self._all = [OneProcess(number) for number in range(process_count(config))]
        self._shares: Sequence[ProcessShare] = ()
        self._signals = Signals()
        self._code: int | None = None
        self._announced = False

    async def run_all(self) -> int:
        """Run until a signal, or until a process ends the run. Returns the exit code.

        Raises:
            PortTaken, EnvironmentProblem: Nothing was started.
        """
        self._signals.install()
        self.on_death = lambda _: self._end_with(1)
        with contextlib.ExitStack() as held:
            self._shares = self._hold_ports(held)
            # The others wait for the first one: a mistake in a file is reported once.
            first = self._all[0]
            self.spawn(self._keep(first), first.name)
            await first_of(first.has_started.wait(), self._signals.drain_requested.wait())
            if not self._signals.drain_requested.is_set():
                for one in self._all[1:]:
                    self.spawn(self._keep(one), one.name)
                await self._signals.drain_requested.wait()
            codes = await self._end()
            await self.cancel_tasks()
        # A signal counts as in a shell.
        return self._code if self._code is not None else max(0, *(abs(code) + 128 * (code < 0) for code in codes))

    def _hold_ports(self, held: contextlib.ExitStack) -> list[ProcessShare]:
        http, management = self._config.http, self._config.http.management

        def port(host: str, given: int, setting: str) -> int:
            found: int = held.enter_context(hold_port(host, given, setting)).getsockname()[1]
            return found

        clients = port(http.host, http.port, "http.port")
        administration = port(management.host, management.port, "http.management.port") if management else 0
        urls = tuple(f"http://127.0.0.1:{port('127.0.0.1', 0, 'processes')}" for _ in self._all)
        secret, watchdog = chance.token_urlsafe(48), self._manager.watchdog_seconds
        return [ProcessShare(one.number, urls, secret, clients, administration, watchdog) for one in self._all]

    async def _keep(self, one: OneProcess) -> None:
        """Run a process, again after each end, until the run ends."""
        pauses = RestartPauses(self._clock, _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)

        async def live() -> None:
            if self._signals.drain_requested.is_set():
                return
            code = await self._live(one)
            has_started = one.has_started.is_set()
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            one.ended(how)
            if self._signals.drain_requested.is_set():
                return
            one.failed_starts = 0 if has_started else one.failed_starts + 1
            failed = one.failed_starts >= _FAILED_STARTS or (one.is_new and one is self._all[0] and not has_started)
            if code == 0 or failed:  # 0: an administrator has ended it
                log.info("%s %s: this ends the run", one.name, how)
                self._end_with(code if code >= 0 else 128 - code)
                return
            one.is_new = one.is_new and not has_started
            if not has_started:
                pauses.started()  # however long it took to start, it was not steady
            raise ServiceDied(how)

        def ended(cause: Exception, pause: float) -> None:
            log.error("%s %s; will restart in %.1f s", one.name, cause, pause)
            one.why = f"it {cause}, and restarts"
            self._report()

        await pauses.keep(live, ended, ServiceDied)

    def _end_with(self, code: int) -> None:
        """End the run with an exit code."""
        self._code = code
        self._signals.drain_requested.set()

    async def _live(self, one: OneProcess) -> int:
        """Run a process until it ends, and return its exit code."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        own, other = socket.socketpair()
        words = ["headrace.cli.main", "run", "--share", "-c", str(self._file)]
        with other:
            one.child = await ChildProcess.start(
                self, one.name, [sys.executable, "-P", "-m", *words], ended.set_result, stdin=other, env=os.environ
            )
        reader, one.writer = await asyncio.open_connection(sock=own)
        one.writer.write(encode_frame(pickle.dumps((self._config, self._shares[one.number]))))
        self._report()
        reading = self.spawn(self._read(one, reader), f"read {one.name}")
        try:
            return await ended
        finally:
            reading.cancel()

    async def _read(self, one: OneProcess, reader: asyncio.StreamReader) -> None:
        frames = FrameReader(_decode, _MOST_BYTES)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_MOST_BYTES):
                try:
                    messages = frames.feed(data)
                except ProtocolBroken as cause:
                    log.error("%s does not follow the protocol (%s); ending it", one.name, cause)
                    assert one.child
                    one.child.kill()
                    return
                for fields in messages:
                    await self._take(one, fields)

    async def _take(self, one: OneProcess, fields: Mapping[str, str]) -> None:
        one.has_started.set()
        if "WATCHDOG" in fields:
            one.alive = True
            # One that hangs keeps all silent, and the service manager restarts the run.
            if all(other.alive for other in self._all if other.has_started.is_set()):
                for other in self._all:
                    other.alive = False
                self._manager.send(WATCHDOG="1")
        elif "READY" in fields:
            one.ready_line = fields["LINE"]
            self._report()
            await self._announce_once()
        elif "RELOADED" in fields:
            self._read_section(fields["RELOADED"])
        elif "STATUS" in fields and not self._announced:
            self._manager.send(STATUS=f"{one.name}: {fields['STATUS']}")
            if not one.ready_line:
                one.why = fields["STATUS"]

    def _read_section(self, name: str) -> None:
        """Read a section that a process has read again, for processes that start later."""
        try:
            self._config = self._config.model_copy(update={name: getattr(self._read_again(), name)})
        except HeadraceError as error:
            log.error("a process that restarts will have the earlier %s: %s", name, error.description)

    async def _announce_once(self) -> None:
        if self._announced or not all(one.ready_line for one in self._all):
            return
        self._announced = True
        log.info("all %d processes are ready", len(self._all))
        self._announce(self._all[0].ready_line)
        for _ in range(_REPORT_ATTEMPTS):  # the manager waits for this one
            if self._manager.send(READY="1", STATUS="ready"):
                return
            await self._clock.sleep(_REPORT_SECONDS)

    def _report(self) -> None:
        """Tell each process which of the others are not ready."""
        for one in self._all:
            if one.writer:
                why = {other.name: other.why for other in self._all if other is not one and not other.ready_line}
                one.writer.write(encode_frame(why))

    async def _end(self) -> list[int]:
        """Drain all processes at once, and return their exit codes."""
        self._manager.send(STOPPING="1", STATUS="draining")
        deadline = Deadline(self._clock, self._config.drain_seconds + _GRACE_SECONDS)
        running = [one for one in self._all if one.child and one.child.running]
        self.spawn(self._stop_now(running), "second signal")
        return await asyncio.gather(*(one.drain(deadline) for one in running))

    async def _stop_now(self, running: Sequence[OneProcess]) -> None:
        await self._signals.stop_requested.wait()
        for one in running:
            if one.child:
                with contextlib.suppress(ProcessLookupError):
                    one.child.process.terminate()


def run_processes(
    config: HeadraceConfig, file: Path, *, read_again: Callable[[], HeadraceConfig], announce: Callable[[str], None]
) -> int:
    """Run the processes of a configuration, in the foreground.

    Args:
        file: Where the configuration is.
        read_again: Reads it again when an operator reloads a part of it.
        announce: Gets the line `ready http=...` when all of them are ready.

    Returns:
        Exit code: 0 after a drain by signal; that of a process that cannot start.

    Raises:
        PortTaken, EnvironmentProblem: Nothing was started.
    """
    if sys.platform != "linux":
        raise EnvironmentProblem("processes: only Linux divides connections among several processes: write 1")

    async def main() -> int:
        several = SeveralProcesses(config, file, read_again, announce, SystemClock(), Notifications(os.environ))
        return await several.run_all()

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
