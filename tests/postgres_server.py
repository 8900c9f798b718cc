"""A real PostgreSQL for tests, without root: of this machine, or of the package `pgserver`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headrace_devkit.devcluster.ports import free_ports

PASSWORD = "pg-s3cret"


def binaries() -> Path | None:
    """Return the folder of the server's programs; None if this machine has none."""
    found = [*map(Path, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    if on_path := shutil.which("pg_ctl"):
        found.insert(0, Path(on_path).resolve().parent)
    if package := importlib.util.find_spec("pgserver"):
        found += [Path(folder) / "pginstall/bin" for folder in package.submodule_search_locations or ()]
    return next((folder for folder in found if (folder / "initdb").exists()), None)


class PostgresServer:
    """One server with the database `postgres`, and its user `app`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.port = free_ports(1)[0]
        self._programs, self._data = programs, folder / "data"
        # PostgreSQL does not run as root.
        self._user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, "nobody")
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        self._run("initdb", "-U", "app", "--auth=scram-sha-256", f"--pwfile={secret}", "-D", str(self._data))

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self.port} -k '' -c fsync=off -c max_connections=30"
        self._run("pg_ctl", "-D", str(self._data), "-w", "-o", options, "-l", str(self._data / "log"), "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-w", "-m", "immediate", "stop")

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which `psql` and other clients find it."""
        login = {"HOST": "127.0.0.1", "PORT": str(self.port), "DATABASE": "postgres"}
        return {f"PG{name}": value for name, value in {**login, "USER": "app", "PASSWORD": PASSWORD}.items()}

    def sink(self, table: str, *keys: str, **more: Any) -> dict[str, Any]:
        """Return the sink of a flow."""
        postgres = {"host": "127.0.0.1", "port": self.port, "database": "postgres", "user": "app", "password": PASSWORD}
        return {"postgres": {**postgres, **more}, "table": table, "keys": list(keys)}

    def execute(self, statement: str) -> list[Any]:
        """Return the rows that a statement gives."""
        login = {"host": "127.0.0.1", "port": self.port, "dbname": "postgres", "user": "app", "password": PASSWORD}
        with psycopg.connect(**login) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._programs / program), *words]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **self._user)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server; without its programs the test is skipped."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL here: install one, or pip install pgserver")
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    folder.chmod(0o755)
    try:
        server = PostgresServer(programs, folder)
        server.start()
        yield server
        with contextlib.suppress(AssertionError):
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
