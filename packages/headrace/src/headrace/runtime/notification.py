"""Tells the service manager, such as systemd, what this process does: the datagrams of `sd_notify(3)`."""

import logging
import os
import socket
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger(__name__)

_SEND_SECONDS: Final = 0.2


class Notifications:
    """Sends states to the socket in `NOTIFY_SOCKET`. Without one nothing is sent, and a failure is only logged."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the variables of the service manager out of the environment, so that child processes do not use them."""
        address = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # an abstract one has no file
        microseconds, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        watched = self._address and microseconds.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_seconds = int(microseconds) / 1e6 if watched else 0.0
        """A process that sends no `WATCHDOG=1` for this long is killed; 0 for never."""
        self._failed = False

    def send(self, **fields: str) -> bool:
        """Send fields such as `READY="1"` or `STATUS="..."`; waits for a full queue for a moment only.

        Returns False if there is a socket, and it did not take them.
        """
        if not self._address:
            return True
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.sendto(text.encode(), self._address)
        except (OSError, ValueError) as cause:  # ValueError: a null character in the address
            if not self._failed:
                log.warning("failed to notify the service manager, once or more: %s", cause)
            self._failed = True
            return False
        return True
