"""What a dialect declares: how its configuration is recognised, and how it becomes the tree of a `headrace.yaml`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.yaml_tree import Problems


class DialectReading(NamedTuple):
    """What was read."""

    tree: dict[str, Any]
    """The settings, as a `headrace.yaml` has them; the dialect's own placeholders are replaced."""
    remarks: list[str]
    """What has no effect, a sentence each."""


class Dialect:
    """Reads the configuration of another product."""

    def recognises(self, path: Path) -> bool:
        """Return whether a path names such a configuration."""
        raise NotImplementedError

    def read(self, path: Path, environ: Mapping[str, str], problems: Problems) -> DialectReading:
        """Return the settings, and report what is wrong with them.

        Raises:
            ConfigError: It cannot be read.
        """
        raise NotImplementedError
