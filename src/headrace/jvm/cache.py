"""The per-user cache folder, and the two ways to write into it that another process can always live with."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


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
