"""The per-user cache folder, and how to write a file that another process may read meanwhile."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/headrace`, or `~/.cache/headrace`; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace"


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Put a file in place at once: readers see the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.chmod(mode)
    draft.replace(path)
