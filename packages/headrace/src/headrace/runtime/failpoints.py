"""Named points in the code where a test can make the process crash, stop, fail or wait.

Off unless the environment variable `HEADRACE_FAILPOINTS` names them: then every `reach` does nothing.
Its value is a list such as `commit.before=crash@3,dead_letter.before=delay:0.5`: the third time the process is killed,
the first time it waits for half a second. Each point acts once.
"""

import os
import re
import signal
import sys
from collections.abc import Callable

from headrace.runtime import blocking

VARIABLE = "HEADRACE_FAILPOINTS"
_POINT = re.compile(r"([a-z._-]+)=(crash|stop|raise|delay:([0-9.]+))(?:@([0-9]+))?")


def arm(text: str) -> Callable[[str], None]:
    """Return the function to call at every point, made from the variable's value.

    Raises:
        ValueError: The value is not a list of points.
    """
    points: dict[str, tuple[str, float]] = {}
    left: dict[str, int] = {}
    for item in text.split(","):
        found = _POINT.fullmatch(item.strip())
        if not found:
            raise ValueError(
                f"{VARIABLE}: {item!r} is not POINT=crash|stop|raise|delay:SECONDS, with @COUNT or without"
            )
        points[found[1]] = found[2].partition(":")[0], float(found[3] or 0)
        left[found[1]] = int(found[4] or 1)

    def reach(point: str) -> None:
        left[point] = left.get(point, 0) - 1
        if left[point] != 0:
            return
        action, seconds = points[point]
        os.write(sys.stderr.fileno(), f"failpoint {point}: {action}\n".encode())
        if action == "raise":
            raise RuntimeError(f"failpoint {point}")
        if action == "delay":
            blocking.sleep(seconds)
        else:
            os.kill(os.getpid(), signal.SIGKILL if action == "crash" else signal.SIGSTOP)

    return reach


reach = arm(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else lambda point: None
"""Called where a point is reached."""
