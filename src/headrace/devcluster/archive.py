"""Class-data archives: what a JVM has loaded once is mapped at later starts, which takes two thirds off a start.

Source: JEP 350 (archive written at exit), JEP 341 (default archive of the JDK itself).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from headrace.jvm import Java, Progress
from headrace.jvm.cache import disk_problems, file_lock
from headrace.jvm.java import run_java

# Measured for small servers: C1 and the serial collector halve memory and start-up, the rest is housekeeping.
SMALL_JVM = (
    "-Xms32m",
    "-Xss512k",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Xshare:auto",
    "-Xlog:cds=off",
    "-Djava.awt.headless=true",
)


def archive_flags(folder: Path, java: Java) -> list[str]:
    """Return the flags that use the archive of the program in `folder`, none if this Java could not make one."""
    archive = _archive(folder, java)
    return [f"-XX:SharedArchiveFile={archive}"] if archive.exists() and archive.stat().st_size else []


def prepare_archive(
    folder: Path, java: Java, exercise: Callable[[list[str], Path], None], progress: Progress | None
) -> None:
    """Make the archive of the program in `folder`, unless it is there.

    `exercise` runs the program with the given flags in the given scratch folder and ends it properly.
    """
    archive = _archive(folder, java)
    if archive.exists():
        return
    with (
        disk_problems(folder, "100 MB are needed"),
        file_lock(folder.with_name(f"{folder.name}.prepare.lock")),
        tempfile.TemporaryDirectory() as scratch,
    ):
        if archive.exists():
            return
        if progress:
            progress(f"preparing {folder.name.rpartition('-')[0]} for quick starts", 0, 0)
        draft = archive.with_suffix(".draft")
        exercise([*_base_flags(folder, java), f"-XX:ArchiveClassesAtExit={draft}"], Path(scratch))
        # Empty where this Java wrote none: then nobody tries again at every start.
        draft.touch()
        draft.replace(archive)


def _archive(folder: Path, java: Java) -> Path:
    # Only the very build that wrote an archive can use it.
    return folder / f"classes-{java.build}.jsa"


def _base_flags(folder: Path, java: Java) -> list[str]:
    """Return the flags that name the JDK's own archive; trimmed runtimes come without, so theirs is made first."""
    if (java.home / "lib" / "server" / "classes.jsa").exists():
        return []
    base = folder / f"base-{java.build}.jsa"
    run_java(java.executable, ["-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"], limit_seconds=60)
    return [f"-XX:SharedArchiveFile={base}"] if base.exists() else []
