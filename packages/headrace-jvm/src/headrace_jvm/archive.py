"""Class-data archives: what a JVM has loaded once is mapped into memory at later starts, which take a third as long.

Source: JEP 350 (archive written at exit), JEP 341 (default archive of the JDK).
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.runtime import run_program
from headrace_jvm.artifacts import Progress
from headrace_jvm.disk import disk_problems, file_lock
from headrace_jvm.java import Java

_SAME_SECONDS = 2.0
"""File systems and images of containers keep the time of a file as exactly as this."""


class ClassArchive(NamedTuple):
    """The archive of one program, made with one build of Java; no other build can use it."""

    java: Java
    folder: Path
    """Where the program's jars lie, and the archive."""
    installation: Path | None = None
    """Another folder of jars in the program's class path. It has an archive of its own, which has the time of the
    folder: after another installation into it, a new archive replaces the old one, which running JVMs keep.
    """

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a JVM that uses the archive; empty if there is none, or this Java could not make one."""
        usable = self._fits() and self._file.stat().st_size
        return (f"-XX:SharedArchiveFile={self._file}",) if usable else ()

    def _fits(self) -> bool:
        """Return whether the archive is there, and of the present installation."""
        if not self._file.exists() or not self.installation:
            return self._file.exists()
        return abs(self._file.stat().st_mtime - self.installation.stat().st_mtime) < _SAME_SECONDS

    def make(self, exercise: Callable[[Sequence[str], Path], None], progress: Progress | None) -> None:
        """Make the archive, unless it is there.

        `exercise` runs the program with the given flags in the given scratch folder, and ends it properly.
        """
        if self._fits():
            return
        with (
            disk_problems(self.folder, "250 MB are needed"),
            file_lock(self.folder.with_name(f"{self.folder.name}.prepare.lock")),
            tempfile.TemporaryDirectory() as scratch,
        ):
            if self._fits():
                return
            changed = self.installation and self.installation.stat().st_mtime
            if progress:
                progress(f"preparing {self.folder.name.rpartition('-')[0]} for quick starts", 0, 0)
            draft = self._file.with_suffix(".draft")
            exercise((*self._base_flags(), f"-XX:ArchiveClassesAtExit={draft}"), Path(scratch))
            # Empty where this Java wrote none, so that it is not tried again at every start.
            draft.touch()
            if changed:
                os.utime(draft, (changed, changed))
            draft.replace(self._file)

    @property
    def _file(self) -> Path:
        key = f"-{hashlib.sha256(os.fsencode(self.installation)).hexdigest()[:8]}" if self.installation else ""
        return self.folder / f"classes-{self.java.build}{key}.jsa"

    def _base_flags(self) -> list[str]:
        """Return the flags that name the JDK's own archive; trimmed runtimes come without, so theirs is made first."""
        if (self.java.home / "lib" / "server" / "classes.jsa").exists():
            return []
        base = self.folder / f"base-{self.java.build}.jsa"
        dump = ["-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
        run_program([str(self.java.executable), *dump], limit_seconds=60)
        return [f"-XX:SharedArchiveFile={base}"] if base.exists() else []
