"""A port that several processes of this machine listen on together (`SO_REUSEPORT`)."""

import errno
import socket

from headrace.errors import EnvironmentProblem, HeadraceError, PortTaken


def hold_port(host: str, port: int, setting: str) -> socket.socket:
    """Reserve a port for the processes that will listen on it, and return the socket that does; 0 picks a free port.

    No connection arrives at it: it does not listen. While it is open, no other program gets the port.

    Raises:
        PortTaken: Another program listens there.
        EnvironmentProblem: The address is not usable.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    try:
        with socket.create_server((host, port), family=family) as alone:  # no other program listens, by any option
            port = alone.getsockname()[1]
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as cause:
        held.close()
        raise listen_error(cause, host, port, setting, setting) from cause
    return held


def listen_error(cause: OSError, host: str, port: int, setting: str, name: str) -> HeadraceError:
    """Return the error for an address that cannot be listened on; `setting` and `name` say what to correct."""
    start = f"failed to listen on {host}:{port}"
    if cause.errno == errno.EADDRINUSE:
        text = f"another program uses the port. Stop it, or change {setting} (0 picks a free one)"
        return PortTaken(f"{start}: {text}", host=host, port=port)
    text = f"{cause.strerror or cause}. Correct host and port of {name}"
    return EnvironmentProblem(f"{start}: {text}", host=host, port=port)
