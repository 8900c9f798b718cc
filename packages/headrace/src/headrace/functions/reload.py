"""Reload of a function: replaces its workers on request, or when its files have changed."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.config.model import HeadraceConfig
from headrace.errors import FunctionInvalid, HeadraceError
from headrace.functions.load import load_function
from headrace.functions.workers import FunctionService
from headrace.runtime import Clock, Service, run_blocking

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.3
_IGNORED = ("__pycache__", ".")
"""Prefixes of files and folders that do not belong to a function."""


class FunctionReload(Service):
    """Replaces the workers of one function. Its consumers stay in their groups."""

    def __init__(self, file: Path, config: HeadraceConfig, pools: Sequence[FunctionService], clock: Clock) -> None:
        """Prepare; with `functions_reload` each change in the folder of the file is a request."""
        super().__init__(f"function {pools[0].spec.name} reload")
        self._file = file
        self._config = config
        self._pools = pools
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> None:
        """Read the file and replace every worker; the old ones stay until a new one is ready.

        Raises:
            FunctionInvalid: The file is not valid, its triggers have changed, or a new worker failed to start.
        """
        spec = load_function(self._file, self._config, check_handler=True)
        old = self._pools[0].spec
        if [one.model_dump() for one in spec.triggers] != [one.model_dump() for one in old.triggers]:
            raise FunctionInvalid(f"{self._file}: the triggers have changed: restart the process, or undo the change")
        async with self._one_at_a_time:
            for pool in self._pools:
                await pool.try_out(spec)
            for pool in self._pools:  # all or none: pools must not run different files
                pool.reload(spec)
        log.info("%s: the changed files are valid; new workers take over", self.name)

    async def run(self) -> None:
        seen = await run_blocking(self._stamps) if self._config.functions_reload else {}
        while self._config.functions_reload:
            await self._clock.sleep(_LOOK_SECONDS)
            found = await run_blocking(self._stamps)
            if found == seen:
                continue
            seen = found
            try:
                await self.reload()
            except (HeadraceError, OSError) as cause:  # an editor may be replacing a file just now
                log.error("%s: rejected the changed files, keeping the old workers: %s", self.name, cause)

    def _stamps(self) -> Mapping[Path, tuple[int, int]]:
        found: dict[Path, tuple[int, int]] = {}
        folder = self._file if self._file.is_dir() else self._file.parent
        for path in folder.rglob("*"):
            if not any(part.startswith(_IGNORED) for part in path.relative_to(folder).parts):
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    stat = path.stat()
                    found[path] = stat.st_mtime_ns, stat.st_size
        return found
