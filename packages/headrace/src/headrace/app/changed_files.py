"""Watches the files of a configuration while developing: a change that passes `headrace config check` ends the run."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from headrace.config.model import HeadraceConfig
from headrace.consumers.feature_checks import feature_checks
from headrace.runtime import ChildProcess, Clock, Service, Signals, run_blocking

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.3
_INVALID_SECONDS: Final = 1.0
"""Until invalid files are checked again: what makes them valid may be a file that is not watched."""
_OTHER: Final = "another file"


class ChangedFiles(Service):
    """Drains the process once a file has changed and the new ones are valid; the caller then starts it again."""

    def __init__(self, file: Path | None, config: HeadraceConfig, clock: Clock) -> None:
        """Prepare to watch a file, None for a run without one, and the files that it names.

        What changes from now on is seen, so call this before the files are read for the run.
        """
        super().__init__("changed files")
        self.changed = False
        """Whether the process ends because of a change."""
        self.signals: Signals | None = None
        """What ends the process, once it runs."""
        self._file = file
        self._config = config
        self._clock = clock
        self._seen = self._stamps()

    @property
    def starts_again(self) -> bool:
        """Whether the caller starts the process again: after a change, unless a signal ends it for good."""
        return self.changed and not (self.signals and self.signals.stop_requested.is_set())

    async def run(self) -> None:
        known = ""
        while self._file and not self.changed:
            await self._clock.sleep(_INVALID_SECONDS if known else _LOOK_SECONDS)
            found = await run_blocking(self._stamps)
            if found == self._seen and not known:
                continue
            paths = ", ".join(sorted({path.name for path, _ in found.items() ^ self._seen.items()}))
            self._seen = found
            problems = await self._problems(self._file)
            if problems and (paths or problems != known):
                log.error("%s changed, keeping the running configuration: %s", paths or _OTHER, problems)
            known = problems
            if problems:
                continue
            log.info("%s changed: starting again", paths or _OTHER)
            if self.signals and not self.signals.drain_requested.is_set():
                self.changed = True
                self.signals.drain_requested.set()

    async def _problems(self, file: Path) -> str:
        """Return the problems of the files, found by a process of its own; empty if there are none."""
        command = [sys.executable, "-m", "headrace.cli.main", "config", "check", "-c", str(file)]
        pipe, ended = asyncio.subprocess.PIPE, asyncio.Event()
        null = asyncio.subprocess.DEVNULL
        child = await ChildProcess.start(
            self, "config check", command, lambda _: ended.set(), stdout=null, stderr=pipe, env=os.environ
        )
        _, errors = await child.process.communicate()
        await ended.wait()
        return errors.decode(errors="replace").strip() if child.process.returncode else ""

    def _stamps(self) -> Mapping[Path, tuple[int, int]]:
        found: dict[Path, tuple[int, int]] = {}
        for paths in (self._own_paths(), *(checks.watched_files(self._config) for checks in feature_checks())):
            with contextlib.suppress(OSError):  # a folder may be away for a moment, as during a checkout
                for path in paths:
                    with contextlib.suppress(OSError):  # an editor may be replacing it
                        stat = path.stat()
                        found[path] = stat.st_mtime_ns, stat.st_size
        return found

    def _own_paths(self) -> Iterator[Path]:
        file = self._file
        if file:
            yield from (path for path in file.iterdir() if path.is_file()) if file.is_dir() else [file]
        for function in self._config.functions:  # its code is watched by the function itself
            yield function / "function.yaml" if function.is_dir() else function
