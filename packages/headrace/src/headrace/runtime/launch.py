"""Becomes another program that dies when its parent dies; run as a script with `python -I -S`.

usage: launch.py PARENT_PID COMMAND...

Linux only: there the kernel sends SIGKILL when the thread that started this process ends. On other systems the command
just runs. An exec in between, rather than a hook between fork and exec, keeps the parent's threads out of it.
"""

import os
import sys

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        import ctypes
        import signal

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)
    try:
        os.execvp(command[0], command)
    except OSError as cause:
        sys.exit(f"cannot start {command[0]}: {cause.strerror}")
