"""What a feature adds to checks of a configuration, for commands that make no process."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.config.yaml_tree import KeyPath
from headrace.consumers.preconditions import Finding
from headrace.errors import HeadraceError
from headrace.feature import features, imported


class FeatureChecks:
    """The checks of one feature. A subclass overrides what it has; it imports what a check needs when it runs."""

    schemas: Mapping[str, Callable[[], dict[str, Any]]] = {}
    """What returns the JSON Schema of a kind of file, by the kind."""

    def problems(self, config: HeadraceConfig) -> Iterable[tuple[KeyPath, str]]:
        """Yield what is wrong in the sections of a valid file; every command that reads the file reports it."""
        return ()

    def slow_problems(self, config: HeadraceConfig) -> Iterable[tuple[KeyPath, str]]:
        """Yield what only a library can find: reported before a start and by `headrace config check`."""
        return self.problems(config)

    def completed(self, config: HeadraceConfig) -> HeadraceConfig:
        """Return a configuration with what follows from the sections of the feature."""
        return config

    def loaders(self, config: HeadraceConfig | None) -> Mapping[str, Callable[[Path], object]]:
        """Return what loads and checks a file that a section names, by the section."""
        return {}

    def loads_libraries(self, config: HeadraceConfig) -> bool:
        """Return whether a check of this configuration loads libraries that a process should not keep."""
        return False

    def watched_files(self, config: HeadraceConfig) -> Iterable[Path]:
        """Yield the files whose change restarts a development run."""
        return ()

    def memory_bytes(self, config: HeadraceConfig) -> int:
        """Return how much memory other processes of the feature need."""
        return 0

    def disk_bytes(self, config: HeadraceConfig) -> int:
        """Return how much of the disk of `state_dir` the feature needs."""
        return 0

    async def machine(self, config: HeadraceConfig) -> Sequence[Finding]:
        """Return the state of what the feature needs of the machine and of servers (`headrace doctor`)."""
        return ()


@functools.cache
def feature_checks() -> Sequence[FeatureChecks]:
    """Return the checks of every installed feature that has some."""
    return [imported(one.checks)() for one in features() if one.checks]


def completed(config: HeadraceConfig) -> HeadraceConfig:
    """Return a checked configuration with what follows from its sections.

    Raises:
        ConfigError: A section is not valid.
    """
    for checks in feature_checks():
        config = checks.completed(config)
    return config


def problems_of_files(files: Mapping[str, Sequence[Path]], config: HeadraceConfig | None) -> list[str]:
    """Return the problems of files by the section that names them, a line each."""
    loaders = {section: load for checks in feature_checks() for section, load in checks.loaders(config).items()}
    problems: list[str] = []
    for section, paths in files.items():
        for path in paths if section in loaders else ():
            try:
                loaders[section](path)
            except HeadraceError as problem:
                problems += problem.description.splitlines()
    return problems
