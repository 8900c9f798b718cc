"""Runs a user's program in a process group that ends with the parent; run as a script.

usage: launch_group.py PARENT_PID COMMAND...

It leads the group, and ends with the exit code of the program: 128 and the number of the signal that ended it.
SIGTERM and SIGINT to the group are for the program. When the parent dies, the whole group is killed; Linux only.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

_LAUNCH = str(Path(__file__).with_name("launch.py"))


def _end_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(parent: int, command: list[str]) -> int:
    """Run the program to its end, and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a handler is not inherited, an ignored signal would be
        signal.signal(number, lambda *_: None)
    _end_with_parent(parent)
    code = subprocess.call([sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), *command])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
