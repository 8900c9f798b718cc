"""Databases without a way to files, networks or settings: the engine's with a file per table, and empty ones."""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import duckdb

from headrace.errors import EnvironmentProblem
from headrace_queries.columns import quoted
from headrace_queries.query_sections import QuerySections

log = logging.getLogger(__name__)

_CONFIG: Final = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
}
_OF_ENGINE: Final = {
    "threads": "1",  # of DuckDB's own: each statement has a thread of Headrace
    "checkpoint_threshold": "32MiB",  # a checkpoint writes much of a file again; a start reads what it has not written
}
IN_MEMORY: Final = "1GiB"
"""Memory of an empty database."""
_LOCKED: Final = "Could not set lock"
_INVALID: Final = "Detach and reattach"
"""In the errors of a file that takes no call any more, because memory or disk was too little for its checkpoint."""
_BROKEN: Final = 70
"""Exit code."""
_LOCK: Final = "SET GLOBAL TimeZone = 'UTC'; SET enable_external_access = false; SET lock_configuration = true"


def empty_database(**settings: str) -> duckdb.DuckDBPyConnection:
    """Return an empty database in memory."""
    connection = duckdb.connect(":memory:", config={**_CONFIG, "memory_limit": IN_MEMORY, **settings})
    connection.execute(_LOCK)
    return connection


def open_database(
    config: QuerySections, folder_name: str = "tables", *, lossless: bool = False
) -> tuple[duckdb.DuckDBPyConnection, Mapping[str, Path]]:
    """Return a connection with the file of each table in this folder attached, and the paths of these files.

    With `lossless`, rows as Arrow are only for DuckDB.
    A damaged file is kept under another name, and its table is built again.

    Raises:
        EnvironmentProblem: A file is in use by another process.
    """
    folder = (config.state_dir / folder_name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    memory = config.sql.memory_bytes
    settings: dict[str, Any] = {**_CONFIG, **_OF_ENGINE, "memory_limit": f"{memory // 1024}KiB"}
    settings["arrow_lossless_conversion"] = str(lossless).lower()
    connection = duckdb.connect(":memory:", config=settings)
    paths = {name: folder / f"{name}.duckdb" for name in config.tables}
    for name, path in paths.items():
        try:
            _attach(connection, name, path)
        except duckdb.IOException as cause:
            if _LOCKED in str(cause).replace(str(path), ""):
                raise EnvironmentProblem(
                    f"{path} is in use by another process: stop it, or give this one another state_dir"
                ) from cause
            _set_aside(name, path, cause)
            _attach(connection, name, path)
        except duckdb.Error as cause:
            _set_aside(name, path, cause)
            _attach(connection, name, path)
    connection.execute(_LOCK)
    return connection, paths


def end_if_broken(cause: BaseException) -> None:
    """End this process if DuckDB runs nothing more after this error: Headrace starts it again from the files."""
    invalid = isinstance(cause, duckdb.IOException) and _INVALID in str(cause)
    if invalid or isinstance(cause, (duckdb.FatalException, duckdb.InternalException)):
        log.critical("DuckDB has failed and runs nothing more: %s", str(cause).splitlines()[0])
        logging.shutdown()
        os._exit(_BROKEN)


def _attach(connection: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    text = str(path).replace("'", "''")
    connection.execute(f"ATTACH '{text}' AS {quoted(name + '_file')}")


def _set_aside(name: str, path: Path, cause: duckdb.Error) -> None:
    aside = path.with_suffix(".damaged")
    log.error("table %s: %s is not readable (%s); kept as %s, building it again", name, path, cause, aside)
    path.replace(aside)
    with contextlib.suppress(FileNotFoundError):
        path.with_name(path.name + ".wal").replace(aside.with_name(aside.name + ".wal"))
