"""A lock between processes that write to the same folder, and what people read when it cannot be written."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import EnvironmentProblem


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; waits for it. The kernel frees it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def disk_problems(folder: Path, advice: str) -> Iterator[None]:
    """Turn a file that cannot be written into a paragraph for people.

    Raises:
        EnvironmentProblem: In place of an OSError of the block; ends with the advice.
    """
    try:
        yield
    except OSError as cause:
        raise EnvironmentProblem(
            f"Could not write to {folder}: {cause.strerror or cause}. Check its permissions, free some disk space there"
            f" ({advice}); then run the same command again."
        ) from cause
