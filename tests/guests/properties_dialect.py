"""A dialect of another package: a file of Java's properties, of which it reads one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.config.dialect import Dialect, DialectReading
from headrace.config.yaml_tree import Problems


class PropertiesDialect(Dialect):
    """Reads `bootstrap.servers`."""

    def recognises(self, path: Path) -> bool:
        return path.suffix == ".properties"

    def read(self, path: Path, environ: Mapping[str, str], problems: Problems) -> DialectReading:
        found = dict(line.split("=", 1) for line in path.read_text().splitlines())
        tree = {"kafka": {"bootstrap_servers": found.pop("bootstrap.servers")}}
        return DialectReading(tree, [f"{path}: {key} has no effect" for key in found])
