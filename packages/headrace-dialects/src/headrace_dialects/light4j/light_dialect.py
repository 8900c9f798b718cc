"""The dialect of light-4j: folders of its configuration files, separated as in a search path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config.dialect import Dialect, DialectReading
from headrace.config.yaml_tree import Problems
from headrace_dialects.light4j.folder import LightFolder, folders_of
from headrace_dialects.light4j.translation import remarks_of, write_tree


class LightDialect(Dialect):
    """Reads folders of light-4j."""

    def recognises(self, path: Path) -> bool:
        return bool(folders_of(path))

    def read(self, path: Path, environ: Mapping[str, str], problems: Problems) -> DialectReading:
        tree: dict[str, Any] = {}
        folder = LightFolder(folders_of(path), environ, problems)
        write_tree(folder, tree, problems)
        return DialectReading(tree, remarks_of(folder))
