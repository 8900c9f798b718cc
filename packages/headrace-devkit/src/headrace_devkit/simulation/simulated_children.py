"""Child processes of a run: each is a machine of its own, and runs a program that the scenario has for its command.

The parent starts, signals and kills it as a real one: by `asyncio.create_subprocess_exec` and `os.killpg`. They are
connected by a pair of sockets, and by files that both really have. A child dies with its parent.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_devkit.simulation.greenlet_threads import Waiter
from headrace_devkit.simulation.network import Network, Transport
from headrace_devkit.simulation.world import Machine

Program = Callable[["Child"], int]
"""Runs on a thread of the child's machine; returns its exit code."""

_LOCAL_SECONDS = 0.00005
_START_SECONDS = (0.02, 0.4)
_FIRST_SOCKET = 1_000_000


class Children:
    """The programs of a run, and the processes that run them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.programs: dict[str, Program] = {}
        """By a word of the command."""
        self.sockets: dict[int, LocalSocket] = {}
        self.running: dict[int, Child] = {}
        """By process id."""
        self._started = 0
        network.children = self

    def socketpair(self) -> tuple["LocalSocket", "LocalSocket"]:
        """Return what `socket.socketpair` does: the second one is passed to a child."""
        machine = self.network.world.current
        assert machine
        first, second = LocalSocket(self, machine), LocalSocket(self, None)
        first.transport.peer, second.transport.peer = second.transport, first.transport
        return first, second

    def start(self, parent: Machine, command: Sequence[str], options: Mapping[str, Any]) -> "Child":
        """Start the program of a command."""
        (program,) = (one for word, one in self.programs.items() if word in command)
        self._started += 1
        child = Child(self, parent, self._started, command, options)
        self.running[child.pid] = child
        seconds = self.network.world.random.uniform(*_START_SECONDS)
        self.network.world.call_later(seconds, lambda: child.begin(program))
        return child

    def killpg(self, pid: int, number: int) -> None:
        """Send a signal, as `os.killpg` does."""
        if pid not in self.running:
            raise ProcessLookupError(pid)
        child = self.running[pid]
        if number == signal.SIGKILL:
            child.end(-number)
        else:
            self.network.world.call_later(_LOCAL_SECONDS, lambda: child.signalled(number), child.machine)


class Child:
    """One child process. To its parent it is what transports of subprocesses are to asyncio."""

    def __init__(
        self, children: Children, parent: Machine, number: int, command: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        self.pid = 1_000_000 + number
        self.command = command
        self.parent = parent
        self.machine = children.network.world.machine(f"{parent.name}.{number}")
        self.files = {passed: passed if passed >= _FIRST_SOCKET else os.dup(passed) for passed in options["pass_fds"]}
        """Its own descriptors, by those of the parent that it has inherited."""
        self.sockets = [children.sockets[passed] for passed in self.files if passed in children.sockets]
        self.on_signal: Callable[[], object] | None = None
        self._children = children
        self._output = os.dup(options["stdout"])
        self._code: int | None = None
        self._waiting: list[asyncio.Future[int]] = []
        for one in self.sockets:
            one.inherit(self.machine)
        parent.on_kill.append(lambda: self.end(-signal.SIGKILL))

    # The process

    def begin(self, program: Program) -> None:
        """Run its program, unless it was killed meanwhile."""
        if self.machine.alive:
            self.machine.start_thread(lambda: self._run(program), "main")

    def _run(self, program: Program) -> None:
        asyncio._set_running_loop(self.machine.loop)
        try:
            code = program(self)
        except SystemExit as ended:
            code = int(ended.code or 0)
        self.end(code)

    def signalled(self, number: int) -> None:
        """Take a signal: a wait for bytes is interrupted by it, other code is not."""
        if self.on_signal is None:
            self.end(-number)
        elif not any(one.interrupt(self.on_signal) for one in self.sockets):
            self.on_signal()

    def end(self, code: int) -> None:
        """End it: by itself, by a signal, or with its parent; does not return to code of its own."""
        if self._children.running.pop(self.pid, None) is None:
            return
        world = self.machine.world
        world.note("child-end", self.machine.name, code)
        for one in self.sockets:
            one.transport.close()
        for passed, own in self.files.items():
            if passed not in self._children.sockets:
                os.close(own)
        os.close(self._output)
        world.call_later(_LOCAL_SECONDS, lambda: self._reap(code), self.parent)
        if world.current is self.machine:
            asyncio._set_running_loop(None)  # it does not get to its next wait, which would
        self.machine.end()

    # What asyncio asks of its transport

    def get_pid(self) -> int:
        return self.pid

    def get_returncode(self) -> int | None:
        return self._code

    async def _wait(self) -> int:
        if self._code is None:
            waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            return await waiting
        return self._code

    def _reap(self, code: int) -> None:
        self._code = code
        self.parent.loop.look_at_pipes()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(code)


class LocalTransport(Transport):
    """One end of a pair of sockets on one computer: no cut disturbs it, and what was sent arrives."""

    def _send(self, call: bytes | Callable[[], None]) -> None:
        self._sent.append(call)
        self._network.world.call_later(_LOCAL_SECONDS, self._pass_on)

    def _pass_on(self) -> None:
        self._pass_on_part(self._sent.popleft())


class LocalSocket:
    """One end of a pair: of a loop, by `attach`; or of a child's program, which blocks in `recv`."""

    def __init__(self, children: Children, machine: Machine | None) -> None:
        self.transport = LocalTransport(children.network, machine, ("", 0))
        self._number = _FIRST_SOCKET + len(children.sockets)
        self._bytes = b""
        self._ended = False
        self._waiter: Waiter | None = None
        self._on_signal: Callable[[], object] | None = None
        children.sockets[self._number] = self

    def fileno(self) -> int:
        return self._number

    def setsockopt(self, *_option: object) -> None:
        """No option changes anything here."""

    def close(self) -> None:
        """The other process has it, or a transport that is closed."""

    def attach(self, protocol: asyncio.BaseProtocol) -> tuple[Transport, asyncio.BaseProtocol]:
        self.transport.set_protocol(protocol)
        return self.transport, protocol

    # The end of a child

    def inherit(self, machine: Machine) -> None:
        """Let it belong to a child."""
        self.transport.machine = machine
        self.transport.set_protocol(self)

    def interrupt(self, on_signal: Callable[[], object]) -> bool:
        """Run a signal's handler in the thread that waits for bytes; return whether there is one."""
        if self._waiter is None:
            return False
        self._on_signal = on_signal
        self._waiter.wake()
        return True

    def recv(self, _most_bytes: int) -> bytes:
        """Wait for bytes, and return all of them; none at the end."""
        while not self._bytes and not self._ended:
            self._waiter = Waiter()
            self._waiter.wait()
            self._waiter = None
            if on_signal := self._on_signal:
                self._on_signal = None
                on_signal()
        found, self._bytes = self._bytes, b""
        return found

    def sendall(self, data: bytes) -> None:
        self.transport.write(data)

    def connection_made(self, _transport: asyncio.BaseTransport) -> None:
        """Its transport is there from the beginning."""

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return True  # it may still send

    def connection_lost(self, _error: Exception | None) -> None:
        self.eof_received()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.wake()


class PipeReader(asyncio.ReadTransport):
    """The reading end of the output of a child, which is a real pipe: it is looked at when a child ends."""

    def __init__(self, pipe: Any, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._pipe = pipe
        self._protocol = protocol
        self.is_closed = False
        os.set_blocking(pipe.fileno(), False)
        protocol.connection_made(self)

    def look(self) -> None:
        """Pass what is there, and the end."""
        with contextlib.suppress(BlockingIOError):
            while not self.is_closed:
                if data := os.read(self._pipe.fileno(), 65_536):
                    self._protocol.data_received(data)
                else:
                    self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._pipe.close()
            self._protocol.connection_lost(None)
