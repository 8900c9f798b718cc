"""What SIGTERM and SIGINT mean: the first drains, the second stops now."""

import asyncio
import signal


class Signals:
    """Turns the process's signals into two events on the loop."""

    def __init__(self) -> None:
        self.drain_asked = asyncio.Event()
        """Set by the first SIGTERM or SIGINT."""
        self.stop_asked = asyncio.Event()
        """Set by the second."""

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.notice)

    def notice(self) -> None:
        """Count one signal."""
        if self.drain_asked.is_set():
            self.stop_asked.set()
        self.drain_asked.set()
