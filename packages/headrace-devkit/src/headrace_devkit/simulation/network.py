"""Connections between machines, in memory: they open, carry bytes in order, close, and can hang.

A cut keeps what was sent, as TCP does: it arrives when the network is whole again. A killed machine resets its
connections, and so does one that closes before it has read what has arrived. What listens is a process's HTTP server,
or anything that makes protocols: a backend, a client of HTTP.
"""

import asyncio
import errno
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace_devkit.simulation.connection_state import ConnectionSocket
from headrace_devkit.simulation.world import Machine, World

if TYPE_CHECKING:
    from headrace_devkit.simulation.simulated_children import Children

_RETRY_SECONDS = 0.25
_NEAR_SECONDS = 0.0002
_FAR_SECONDS = 0.002
_KERNELS_BYTES = 262_144
"""What the kernels of both ends hold, while the peer does not read. What is beyond is in the transport."""
_HIGH_BYTES = 65_536
"""The limit of asyncio, beyond which a protocol must write no more."""


class Network:
    """All machines of a world, by name and by address."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[tuple[str, int], tuple[Machine, Callable[[Transport], object]]] = {}
        """By name and port: the machine, and what gets each new connection."""
        self.refused: set[str] = set()
        """Names of machines that refuse connections, as one does that is not started yet."""
        self.children: Children | None = None
        """The child processes of machines, if a scenario has any."""
        self.sockets: dict[int, Transport] = {}
        """Each end of a connection that is not closed, by its file descriptor."""
        self._descriptors = itertools.count(100)
        self._addresses: dict[str, str] = {}

    def join(self, machine: Machine) -> None:
        """Let a machine open connections."""
        machine.loop.network = self

    def listen(self, machine: Machine, port: int, accept: Callable[["Transport"], object]) -> None:
        """Pass each connection to a port of a machine to a call that runs on the machine."""
        self.listeners[machine.host, port] = machine, accept

    def close(self, machine: Machine, port: int) -> None:
        """Refuse connections to this port from now on."""
        self.listeners.pop((machine.host, port), None)

    def descriptor_of(self, transport: "Transport") -> int:
        """Return the file descriptor of a new end of a connection."""
        number = next(self._descriptors)
        self.sockets[number] = transport
        return number

    def _listener(self, name: str, port: int) -> Any:
        """Return what listens; `localhost` is the computer of all processes, which listen at ports of their own."""
        if name == "localhost":
            name = next((host for host, number in self.listeners if number == port), name)
        return self.listeners.get((name, port), (None, None))

    def address_of(self, name: str) -> str:
        """Return the IP address of a name."""
        if name not in self._addresses:
            self._addresses[name] = f"10.0.0.{len(self._addresses) + 1}"
        return self._addresses[name]

    def delay(self) -> float:
        return self.world.random.uniform(_NEAR_SECONDS, _FAR_SECONDS)

    async def connect(
        self, loop: Any, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple["Transport", asyncio.BaseProtocol]:
        """Open a connection from the machine of a loop."""
        names = [name for name, address in self._addresses.items() if address == host]
        name = names[0] if names else host
        source: Machine = loop.machine
        opened = loop.create_future()
        protocol = factory()
        near, far = Transport(self, source, (name, port)), Transport(self, None, (source.host, 0))
        near.peer, far.peer = far, near

        def arrive() -> None:
            target, accept = self._listener(name, port)
            if target is None or accept is None or not target.alive or name in self.refused:
                answer(ConnectionRefusedError(111, "Connect call failed"))
            elif not (source.sends() and target.receives()):
                self.world.call_later(_RETRY_SECONDS, arrive)  # the packet is sent again
            else:
                far.machine = target
                target.on_kill.append(far.reset_peer)
                self.world.call_later(0, lambda: accept(far), target)
                answer(None)

        def answer(error: OSError | None) -> None:
            self.world.call_later(self.delay(), lambda: done(error), source)

        def done(error: OSError | None) -> None:
            if opened.done():
                if error is None:
                    near.abort()
            elif error:
                opened.set_exception(error)
            else:
                source.on_kill.append(near.reset_peer)
                near.set_protocol(protocol)
                opened.set_result(None)

        self.world.call_later(self.delay(), arrive)
        await opened
        return near, protocol


class _WriteBuffer:
    """What was written at one end, and the other has not read."""

    def __init__(self) -> None:
        self.high_bytes = _HIGH_BYTES
        self.low_bytes = _HIGH_BYTES // 4
        self._unread_bytes = 0
        self._is_full = False
        """Whether the protocol must write no more."""

    @property
    def size_bytes(self) -> int:
        return max(0, self._unread_bytes - _KERNELS_BYTES)

    def is_full_by(self, size_bytes: int) -> bool:
        """Add what is written; return whether the protocol must pause now."""
        self._unread_bytes += size_bytes
        was_full, self._is_full = self._is_full, self._is_full or self.size_bytes > self.high_bytes
        return self._is_full and not was_full

    def is_empty_by(self, size_bytes: int) -> bool:
        """Remove what was read; return whether the protocol may write again."""
        self._unread_bytes -= size_bytes
        was_full, self._is_full = self._is_full, self._is_full and self.size_bytes > self.low_bytes
        return was_full and not self._is_full


class Transport(asyncio.Transport):
    """One end of a connection; its calls of the protocol run on its machine's loop."""

    def __init__(self, network: Network, machine: Machine | None, peername: tuple[str, int]) -> None:
        super().__init__()
        self.machine = machine
        self.peer: Transport
        self._network = network
        self._peername = peername
        self._protocol: Any = None
        self._arrived: deque[bytes | Callable[[], None]] = deque()
        """What has arrived and waits: until there is a protocol, and until it reads again."""
        self._sent: deque[bytes | Callable[[], None]] = deque()
        """What is on its way to the peer, in order."""
        self._buffer = _WriteBuffer()
        self._reading = True
        self._closing = False
        self._lost = False
        self.socket = ConnectionSocket(network.descriptor_of(self), self._hears_peer)

    @property
    def unread(self) -> bytes:
        """What the machine has received, and its process has not read."""
        return b"".join(part for part in self._arrived if isinstance(part, bytes))

    def _hears_peer(self) -> bool:
        """Whether what the peer's machine acknowledges arrives here."""
        here, there = self.machine, self.peer.machine
        return here is not None and there is not None and there.sends() and here.receives()

    # What the protocol calls

    def write(self, data: Any) -> None:
        if self._closing or not data:
            return
        self.socket.state.written += len(data)
        self._send(bytes(data))
        if self._buffer.is_full_by(len(data)):
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._send(self.peer.eof)

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if self.unread:
            self.abort()  # as Linux does: the peer must learn that it was not read
        elif not self._closing:
            self._closing = True
            self._send(lambda: self.peer.lose(None))
            self._soon(lambda: self.lose(None))

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            self._sent.clear()
            self._send(lambda: self.peer.lose(ConnectionResetError(104, "Connection reset by peer")))
            self._soon(lambda: self.lose(None))

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        self._soon(self._read)

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def get_write_buffer_size(self) -> int:
        return self._buffer.size_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._buffer.high_bytes = high if high is not None else 4 * low if low is not None else _HIGH_BYTES
        self._buffer.low_bytes = low if low is not None else self._buffer.high_bytes // 4

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": self._peername, "socket": self.socket}.get(name, default)

    def set_protocol(self, protocol: Any) -> None:
        begun, self._protocol = self._protocol, protocol
        if begun is None:
            protocol.connection_made(self)
        self._read()

    def get_protocol(self) -> Any:
        return self._protocol

    # What the network calls

    def reset_peer(self) -> None:
        """Its machine was killed: the peer learns of it as soon as a packet gets through."""
        if self._lost or self.peer.machine is None:
            return
        self._lost = self._closing = True
        self._network.world.call_later(self._network.delay(), self._reset)

    def _reset(self) -> None:
        if self.peer.machine and self.peer.machine.receives():
            self.peer.lose(ConnectionResetError(104, "Connection reset by peer"))
        elif self.peer.machine and self.peer.machine.alive:
            self._network.world.call_later(_RETRY_SECONDS, self._reset)

    def eof(self) -> None:
        self.socket.state.peer_has_closed()
        self._arrive(self._at_eof)

    def lose(self, error: Exception | None) -> None:
        if error is None:
            self.socket.state.peer_has_closed()
        else:
            self.socket.state.is_reset()
        self._arrive(lambda: self._end(error))

    def receive(self, content: bytes) -> None:
        """Take bytes, and acknowledge them; a process that has closed gets nothing more, and its machine resets."""
        if self._closing:
            self._network.world.call_later(0, lambda: self.peer.lose(ConnectionResetError(errno.ECONNRESET, "reset")))
        else:
            self.peer.socket.state.arrives(len(content))
            self._arrive(content)

    def was_read(self, size_bytes: int) -> None:
        """The peer has read so much of what was written here."""
        if self._buffer.is_empty_by(size_bytes) and not self._lost:
            self._soon(lambda: self._protocol.resume_writing())

    def _send(self, call: bytes | Callable[[], None]) -> None:
        is_idle = not self._sent
        self._sent.append(call)
        if is_idle:
            self._network.world.call_later(self._network.delay(), self._pass_on)

    def _pass_on(self) -> None:
        source, target = self.machine, self.peer.machine
        if source is not None and target is not None and not (source.sends() and target.receives()):
            if source.alive and target.alive:
                self._network.world.call_later(_RETRY_SECONDS, self._pass_on)
            return
        while self._sent:
            self._pass_on_part(self._sent.popleft())

    def _pass_on_part(self, part: bytes | Callable[[], None]) -> None:
        if isinstance(part, bytes):
            self.peer.receive(part)
        else:
            part()

    def _arrive(self, call: bytes | Callable[[], None]) -> None:
        self._arrived.append(call)
        self._soon(self._read)

    def _soon(self, call: Callable[[], None]) -> None:
        if self.machine is not None:
            self.machine.loop.call_soon(call)

    def _read(self) -> None:
        while self._arrived and self._protocol is not None and self._reading and not self._lost:
            part = self._arrived.popleft()
            if not isinstance(part, bytes):
                part()
            elif not self._closing:  # a loop reads nothing more of what its process has closed
                self.peer.was_read(len(part))
                self._protocol.data_received(part)

    def _at_eof(self) -> None:
        if not self._protocol.eof_received():
            self.close()

    def _end(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self._protocol.connection_lost(error)
            self.socket.close()
            self._network.sockets.pop(self.socket.number, None)


class ListeningSocket:
    """The socket of a server: what `socket.create_server` returns to a process."""

    def __init__(self, network: Network, machine: Machine, port: int) -> None:
        self.machine = machine
        self.port = port
        self.on_readable: Callable[[], object] | None = None
        """Set by `add_reader` of the loop."""
        self._network = network
        self._waiting: deque[AcceptedSocket] = deque()
        network.listen(machine, port, self._accept)

    def announce(self) -> None:
        """Report connections that wait to be accepted."""
        if self._waiting and self.on_readable:
            self.on_readable()

    def _accept(self, transport: Transport) -> None:
        self._waiting.append(AcceptedSocket(transport))
        self.announce()

    def accept(self) -> tuple["AcceptedSocket", tuple[str, int]]:
        if not self._waiting:
            raise BlockingIOError
        return self._waiting.popleft(), ("", 0)

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def setblocking(self, flag: bool) -> None:
        """Nothing here blocks."""

    def setsockopt(self, *_option: object) -> None:
        """No option changes anything here."""

    def fileno(self) -> int:
        return 3 if (self.machine.host, self.port) in self._network.listeners else -1

    def close(self) -> None:
        self._network.close(self.machine, self.port)


class AcceptedSocket:
    """One connection that a server has accepted, before it has a protocol."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def attach(self, protocol: asyncio.BaseProtocol) -> tuple[Transport, asyncio.BaseProtocol]:
        self._transport.set_protocol(protocol)
        return self._transport, protocol

    def setblocking(self, flag: bool) -> None:
        """Nothing here blocks."""

    def close(self) -> None:
        self._transport.abort()
