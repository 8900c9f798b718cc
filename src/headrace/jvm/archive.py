"""Class-data archives: what a JVM has loaded once is mapped into memory at later starts, which take a third as long.

Source: JEP 350 (archive written at exit), JEP 341 (default archive of the JDK).
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.jvm.artifacts import Progress
from headrace.jvm.cache import disk_problems, file_lock
from headrace.jvm.java import Java
from headrace.lifecycle import run_program


class ClassArchive(NamedTuple):
    """The archive of one program, made with one build of Java; no other build can use it."""

    java: Java
    folder: Path
    """Where the program's jars lie, and the archive."""
    class_path: str = ""
    """What else stands in the program's class path; with another one it is another archive."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of a JVM that uses the archive; empty if there is none, or this Java could not make one."""
        usable = self._file.exists() and self._file.stat().st_size
        return (f"-XX:SharedArchiveFile={self._file}",) if usable else ()

    def make(self, exercise: Callable[[Sequence[str], Path], None], progress: Progress | None) -> None:
        """Make the archive, unless it is there.

        `exercise` runs the program with the given flags in the given scratch folder, and ends it properly.
        """
        if self._file.exists():
            return
        with (
            disk_problems(self.folder, "200 MB are needed"),
            file_lock(self.folder.with_name(f"{self.folder.name}.prepare.lock")),
            tempfile.TemporaryDirectory() as scratch,
        ):
            if self._file.exists():
                return
            if progress:
                progress(f"preparing {self.folder.name.rpartition('-')[0]} for quick starts", 0, 0)
            draft = self._file.with_suffix(".draft")
            exercise((*self._base_flags(), f"-XX:ArchiveClassesAtExit={draft}"), Path(scratch))
            # Empty where this Java wrote none, so that it is not tried again at every start.
            draft.touch()
            draft.replace(self._file)

    @property
    def _file(self) -> Path:
        key = f"-{hashlib.sha256(self.class_path.encode()).hexdigest()[:8]}" if self.class_path else ""
        return self.folder / f"classes-{self.java.build}{key}.jsa"

    def _base_flags(self) -> list[str]:
        """Return the flags that name the JDK's own archive; trimmed runtimes come without, so theirs is made first."""
        if (self.java.home / "lib" / "server" / "classes.jsa").exists():
            return []
        base = self.folder / f"base-{self.java.build}.jsa"
        dump = ["-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
        run_program([str(self.java.executable), *dump], limit_seconds=60)
        return [f"-XX:SharedArchiveFile={base}"] if base.exists() else []
