"""The link between the processes of one run and the one that started them: a socket, which is their standard input.

First comes one object, then lines of JSON in both directions. A process sends what a service manager gets
(`READY`, `STATUS`, `WATCHDOG`). It receives which of the others do not work, and why, and when to drain. That is no
signal, because a service manager may send one to every process, and a second one would end the drain.
"""

import asyncio
import contextlib
import json
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from headrace.runtime.service import Readiness

_LENGTH_BYTES: Final = 8
_MOST_BYTES: Final = 65_536
DRAIN: Final = b"null\n"
"""The line that begins the drain."""


class ServiceManager(Protocol):
    """Who gets reports of what this process does."""

    watchdog_seconds: float

    def send(self, **fields: str) -> bool:
        """Send fields such as `READY="1"`; False if they were not taken."""


def packed(found: object) -> bytes:
    """Return an object as the first bytes of a link. Only the process that starts another sends it one."""
    data = pickle.dumps(found)
    return len(data).to_bytes(_LENGTH_BYTES) + data


class ProcessLink:
    """The end of the link in a process that was started."""

    def __init__(self) -> None:
        """Take standard input, and wait for the object."""
        self._socket = socket.socket(fileno=0)
        self._socket.setblocking(True)
        self.received: Any = pickle.loads(self._read(int.from_bytes(self._read(_LENGTH_BYTES))))
        """The object."""
        self.watchdog_seconds = 0.0
        self.ready_line = ""
        """Sent along with `READY`."""
        self._drain: Callable[[], None]
        self._text = b""
        self._others: dict[str, Readiness] = {}

    def watch(self, drain: Callable[[], None]) -> None:
        """Take the lines of the other end, on the loop; `drain` begins the drain, and may be called again."""
        self._drain = drain
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._take)

    def send(self, **fields: str) -> bool:
        """Send what this process does; it never waits."""
        with contextlib.suppress(OSError):  # the other end has gone, and this process is about to end
            self._socket.sendall(json.dumps({**fields, "LINE": self.ready_line}).encode() + b"\n")
        return True

    def others(self) -> Mapping[str, Readiness]:
        """Return the other processes that do not work, with the reasons."""
        return self._others

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            if not (part := self._socket.recv(min(count - len(found), _MOST_BYTES))):
                raise SystemExit(1)  # the other end has gone
            found += part
        return found

    def _take(self) -> None:
        try:
            data = self._socket.recv(_MOST_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:  # the other end has gone
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in map(json.loads, lines):
            if line is None:
                self._drain()
            else:
                self._others = {name: Readiness(False, why) for name, why in line.items()}
