"""The types of the plug-in's fixtures that are called, for the signatures of tests."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace_devkit.devcluster import HeadraceProcess


class MakeTopic(Protocol):
    """The fixture `topic`."""

    def __call__(self, partitions: int = 1, **configs: object) -> str:
        """Make a topic, and return its name. Names of configurations have underscores: `retention_ms=1000`."""


class StartHeadrace(Protocol):
    """The fixture `headrace`."""

    def __call__(
        self, config: Mapping[str, Any], *, wait: bool = True, env: Mapping[str, str] | None = None
    ) -> HeadraceProcess:
        """Start a process with this headrace.yaml, and wait until it is ready."""


class SharedHeadrace(Protocol):
    """The fixture `module_headrace`."""

    def __call__(self, config: Mapping[str, Any]) -> HeadraceProcess:
        """Return the process of the module with this headrace.yaml; the first call starts it."""
