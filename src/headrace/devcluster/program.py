"""A Java program on this machine, and its class-data archive: what a JVM has loaded once is mapped at later starts.

That takes two thirds off a start. Source: JEP 350 (archive written at exit), JEP 341 (default archive of the JDK).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.jvm import Java, Progress
from headrace.jvm.cache import disk_problems, file_lock
from headrace.lifecycle import run_program

# Measured for small servers: C1 and the serial collector halve memory and start-up time.
_SMALL_JVM = (
    "-Xms32m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Xshare:auto",
    "-Xlog:cds=off",
    "-Djava.awt.headless=true",
)


class JavaProgram(NamedTuple):
    """Java, and the folder of a program's jars."""

    java: Java
    folder: Path
    archive_flags: tuple[str, ...] | None = None
    """Flags that replace those that use the archive."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs the program, with its archive unless this Java could not make one."""
        flags = self.archive_flags
        if flags is None:
            usable = self._archive.exists() and self._archive.stat().st_size
            flags = (f"-XX:SharedArchiveFile={self._archive}",) if usable else ()
        return [str(self.java.executable), *_SMALL_JVM, *flags, *arguments]

    def prepare_archive(self, exercise: Callable[[JavaProgram, Path], None], progress: Progress | None) -> None:
        """Make the archive, unless it is there.

        `exercise` runs the program it is given in the given scratch folder and ends it properly.
        """
        if self._archive.exists():
            return
        with (
            disk_problems(self.folder, "100 MB are needed"),
            file_lock(self.folder.with_name(f"{self.folder.name}.prepare.lock")),
            tempfile.TemporaryDirectory() as scratch,
        ):
            if self._archive.exists():
                return
            if progress:
                progress(f"preparing {self.folder.name.rpartition('-')[0]} for quick starts", 0, 0)
            draft = self._archive.with_suffix(".draft")
            flags = (*self._base_flags(), f"-XX:ArchiveClassesAtExit={draft}")
            exercise(self._replace(archive_flags=flags), Path(scratch))
            # Empty where this Java wrote none, so that it is not tried again at every start.
            draft.touch()
            draft.replace(self._archive)

    @property
    def _archive(self) -> Path:
        # Only the very build that wrote an archive can use it.
        return self.folder / f"classes-{self.java.build}.jsa"

    def _base_flags(self) -> list[str]:
        """Return the flags that name the JDK's own archive; trimmed runtimes come without, so theirs is made first."""
        if (self.java.home / "lib" / "server" / "classes.jsa").exists():
            return []
        base = self.folder / f"base-{self.java.build}.jsa"
        dump = ["-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
        run_program([str(self.java.executable), *dump], limit_seconds=60)
        return [f"-XX:SharedArchiveFile={base}"] if base.exists() else []
