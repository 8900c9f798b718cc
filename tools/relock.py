"""For maintainers: fills in size and SHA-256 of a lock file's coordinates (`python tools/relock.py kafka`)."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from headrace_jvm.artifacts import Repository, lock_path, read_lock, sha256_of


def relock(name: str) -> None:
    """Fetch the artifacts a lock file names and write the file anew; look at the difference before you commit it."""
    lock = read_lock(name)
    lines = [f'title = "{lock.title}"', "", "[artifacts]"]
    with tempfile.TemporaryDirectory() as folder:
        repository = Repository(Path(folder), lambda count: None)
        for artifact in sorted(lock.artifacts):
            path = repository.fetch(artifact)
            pin = f'{{size = {path.stat().st_size}, sha256 = "{sha256_of(path)}"}}'
            lines.append(f'"{artifact.coordinate}" = {pin}')
    lock_path(name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for set_name in sys.argv[1:]:
        relock(set_name)
