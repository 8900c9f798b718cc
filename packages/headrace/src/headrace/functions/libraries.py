"""The libraries of a function, in a folder that is named by a hash of their requirements.

Workers run with the interpreter of Headrace, and find this folder before its libraries. What the worker itself uses is
loaded by then, so a version that the function pins cannot break its connection to the parent.
"""

import hashlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.runtime import run_program

_FILE = "requirements.txt"
_LIMIT_SECONDS = 900.0


class Libraries(NamedTuple):
    """The folder of a function's libraries, and what fills it."""

    folder: Path
    arguments: Sequence[str]
    """Of `pip install`."""
    remedy: str
    """What the user runs to install them."""

    def install(self, stopped: Callable[[], bool]) -> str:
        """Install them unless they are there, and end pip when stopped; return why that failed."""
        if self.folder.is_dir():
            return ""
        from headrace.runtime.cache import file_lock  # here, because few functions need it

        with file_lock(self.folder.with_suffix(".lock")):
            partial = self.folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            if not self.folder.is_dir():
                pip = [sys.executable, "-m", "pip", "install", "--target", str(partial), "--no-input"]
                code, output = run_program([*pip, *self.arguments], _LIMIT_SECONDS, stopped)
                if code:
                    return f"failed to install its libraries ({' '.join(output.split()[-60:])}): {self.remedy}"
                partial.rename(self.folder)
        return ""


def is_install(command: str) -> bool:
    """Return whether a command of `spec.build.commands` installs libraries."""
    try:
        shlex.split(command)
    except ValueError:  # a quotation that does not end
        return False
    return re.match(r"(python3? -m )?pip3? install ", command) is not None and not re.search(r"[;&|`$<>]", command)


def libraries_of(file: Path, commands: Sequence[str], state: Path) -> Libraries | None:
    """Return the libraries of a function: of `requirements.txt` in its folder, and of commands; None if there are none.

    They are in a folder below `state`.
    """
    folder = file.parent
    arguments = [word for command in commands for word in shlex.split(command.partition(" install ")[2])]
    if (folder / _FILE).is_file():
        arguments += ["-r", str(folder / _FILE)]
    if not arguments:
        return None
    # A file that others are read from is likely a text too.
    texts = [path.name.encode() + path.read_bytes() for path in sorted(folder.glob("*.txt")) if path.is_file()]
    key = hashlib.sha256(repr((sys.version, sys.platform, arguments, texts)).encode()).hexdigest()[:32]
    remedy = f"run headrace function validate --install {shlex.quote(str(file))} (with the same -c, if you passed one)"
    return Libraries(state / key, arguments, remedy)
