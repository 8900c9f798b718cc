"""One plain broker and one schema registry for all workers of a run.

The controller holds them in a thread, from when it knows that a test may need them until the run ends. A worker finds
them in their folder.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster import Cluster, Registry
from headrace_devkit.devcluster.group import start_together

_LIMIT_SECONDS = 300.0


class SharedServers:
    """The servers in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._said = folder / "said"  # empty when they respond, else why they do not
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def cluster(self) -> Cluster:
        """The broker."""
        return Cluster(self.folder / "kafka", 1)

    @property
    def registry(self) -> Registry:
        """The schema registry."""
        return Registry(self.folder / "registry")

    def start(self) -> None:
        """Start them, without waiting; again is nothing."""
        if not self._thread:
            self._thread = threading.Thread(target=self._hold, name="shared servers")
            self._thread.start()

    def stop(self) -> None:
        """End them, if they were started."""
        self._ended.set()
        if self._thread:
            self._thread.join()

    def wait_ready(self) -> None:
        """Wait until they respond.

        Raises:
            EnvironmentProblem: They did not start.
        """
        end = time.monotonic() + _LIMIT_SECONDS
        while not self._said.exists():
            if time.monotonic() > end:
                raise EnvironmentProblem(f"the servers of the run did not start within {_LIMIT_SECONDS:.0f} s")
            time.sleep(0.05)
        if problem := self._said.read_text():
            raise EnvironmentProblem(problem)

    def _hold(self) -> None:
        # Servers end with the thread that starts them, so this one stays.
        cluster, registry, problem = self.cluster, self.registry, ""
        try:
            try:
                start_together(cluster, registry)
            except EnvironmentProblem:  # the whole run needs this start, so it has a second try
                start_together(cluster, registry)
        except EnvironmentProblem as cause:
            problem = str(cause)
        partial = self._said.with_name("saying")
        partial.write_text(problem)
        partial.rename(self._said)
        self._ended.wait()
        cluster.remove()
        registry.remove()
