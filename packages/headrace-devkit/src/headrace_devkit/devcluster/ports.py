"""Loopback ports for servers that must know them before they start."""

import itertools
import random
import socket
from collections.abc import Collection

from headrace.errors import PortTaken

# Below the range from which systems take the ports of outgoing connections: a client that keeps trying a killed
# broker's port from that range can end up connected to itself, and then the broker cannot come back.
_CANDIDATES = range(15_000, 32_000)


def free_ports(count: int, excluded: Collection[int] = ()) -> list[int]:
    """Return different ports that nothing listens on now, none of them excluded."""
    found: list[int] = []
    start = random.randrange(len(_CANDIDATES))
    for port in itertools.chain(_CANDIDATES[start:], _CANDIDATES[:start]):
        if len(found) == count:
            break
        if port not in excluded and is_free(port):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def require_free(port: int, what: str, option: str) -> None:
    """Make sure that a requested port is free.

    Raises:
        PortTaken: Something listens on it.
    """
    if not is_free(port):
        raise PortTaken(
            f"Port {port} for {what} is taken by another program. Stop that program, or choose another port with"
            f" {option}; without {option} a free port is chosen."
        )
