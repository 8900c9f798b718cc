"""The per-user cache folder, and how to write so that another process, or a full disk, can do no harm."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import EnvironmentProblem


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/headrace`, or `~/.cache/headrace`; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace"


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes; waits for it. The kernel frees it if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Put a file in place at once: readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(mode)
    draft.replace(path)


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
