"""The link between the processes of one run and the one that started them: a socket, which is their standard input.

First comes one object, then messages in both directions. A process sends what a service manager gets
(`READY`, `STATUS`, `WATCHDOG`). It receives which of the others do not work, and why, and when to drain. That is not a
signal, because a service manager may send one to every process, and a second one would end the drain.
"""

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

from headrace.framing import FrameReader, encode_frame
from headrace.runtime.service import Readiness

_READ_BYTES: Final = 65_536
DRAIN: Final = bytes(encode_frame(None))


class ProcessLink:
    """The end of the link in a process that was started."""

    def __init__(self) -> None:
        """Take standard input, and wait for the object."""
        self._socket = socket.socket(fileno=0)
        self._socket.setblocking(True)
        self._reader = FrameReader(msgspec.msgpack.Decoder(bytes | dict[str, str] | None).decode)
        messages: list[Any] = []
        while not messages:
            if not (data := self._socket.recv(_READ_BYTES)):
                raise SystemExit(1)  # the other end has gone
            messages = self._reader.feed(data)
        self.received: Any = pickle.loads(messages.pop(0))
        self._early = messages
        self.watchdog_seconds = 0.0
        self.ready_line = ""
        """Sent along with `READY`."""
        self._drain: Callable[[], None]
        self._others: dict[str, Readiness] = {}

    def watch(self, drain: Callable[[], None]) -> None:
        """Take the messages of the other end, on the loop; `drain` begins the drain, and may be called again."""
        self._drain = drain
        self._follow(self._early)
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._take)

    def send(self, **fields: str) -> bool:
        """Send what this process does; it never waits."""
        with contextlib.suppress(OSError):  # the other end has gone, and this process is about to end
            self._socket.sendall(encode_frame({**fields, "LINE": self.ready_line}))
        return True

    def others(self) -> Mapping[str, Readiness]:
        """Return the other processes that do not work, with the reasons."""
        return self._others

    def _take(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the other end has gone
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            return
        self._follow(self._reader.feed(data))

    def _follow(self, messages: Iterable[Mapping[str, str] | None]) -> None:
        for message in messages:
            if message is None:
                self._drain()
            else:
                self._others = {name: Readiness(False, why) for name, why in message.items()}
