"""The command of a Java program on this machine, with its class-data archive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from headrace_jvm import ClassArchive, Java

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
    archive_flags: Sequence[str] | None = None
    """Flags that replace those that use the archive."""

    @property
    def archive(self) -> ClassArchive:
        """What the program has loaded once."""
        return ClassArchive(self.java, self.folder)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs the program, with its archive unless this Java could not make one."""
        flags = self.archive.flags if self.archive_flags is None else self.archive_flags
        return [str(self.java.executable), *_SMALL_JVM, *flags, *arguments]
