"""Counts what a user, a reader and a contributor must know: `python -m tools.counts` prints now, bound and goal.

The bounds are in docs/developers/ideas.md, and a test holds them. What the code cannot be asked for is listed by name
in counts.yaml; each name is of a definition that exists.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
import yaml

from headrace.app.documents import every_endpoint
from headrace.cli.main import root
from headrace.config.explain import json_schema
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import catalogue
from headrace.functions.function_keys import KEYS
from headrace.runtime.telemetry import metrics
from headrace.runtime.telemetry.metrics import CATALOGUE
from headrace_pipelines.spec import PipelineSpec
from tools.blocking_client import MADE
from tools.class_attributes import attributes_of

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
PAGE: Final = DOCS / "developers" / "ideas.md"
MOST_ATTRIBUTES: Final = 12
_TELEMETRY: Final = Path(metrics.__file__).parent
_TEXT: Final = {".py", ".yaml", ".csv", ".sql", ".js", ".css", ".md", ".json", ".avsc", ".properties", ".txt", ".xml"}
_COMMON_NAMES: Final = {"__init__", "__main__", "feature", "routes", "spec", "load", "status"}
"""Names of modules that each feature may have."""
_LISTS: Final[Mapping[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SOURCES: Final = sorted(path for path in ROOT.glob("packages/*/src/headrace*") if path.suffix != ".egg-info")
"""Where the distributions are. That of the core is the first; the others are guests."""
NAMED: Final[Mapping[str, list[str]]] = _LISTS["named"]
"""What is counted by a list: the title of a count to its entries; an entry has one name, or several with ` + `."""

Schema = Mapping[str, Any]


class Bound(NamedTuple):
    """A line of the page."""

    most: int
    goal: str


# Code ----------------------------------------------------------------------------------------------------------------


@functools.cache
def files() -> list[Path]:
    """Return every Python file of the product."""
    return sorted(path for folder in SOURCES for path in folder.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a Python file, parsed once for all who look at it."""
    return ast.parse(path.read_text())


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return each Python file of the product, parsed."""
    return {path: parsed(path) for path in files()}


def is_guest(path: Path) -> bool:
    """Whether a file is of a guest, so a reader of the core need not know it."""
    return SOURCES[0] not in path.parents


def core_lines() -> int:
    """Return the lines of the core: Python, and the tables and texts that it reads; what is made is not read."""
    found = [path for folder in SOURCES for path in folder.rglob("*") if path.suffix in _TEXT and path.is_file()]
    return sum(path.read_text().count("\n") for path in found if not is_guest(path) and path != MADE)


def compiled_lines() -> int:
    """Return the lines of the compiled module."""
    return sum(path.read_text().count("\n") for path in (ROOT / "packages" / "headrace" / "native").iterdir())


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
            yield from _statements(child)


def classes() -> Iterator[tuple[ast.ClassDef, ast.Module]]:
    """Yield every class of the product with the tree of its file."""
    for tree in trees().values():
        yield from ((node, tree) for node in _statements(tree) if isinstance(node, ast.ClassDef))


def attributes_in(text: str) -> dict[str, set[str]]:
    """Return the attributes of each class of a Python text."""
    tree = ast.parse(text)
    return {node.name: attributes_of(node, tree) for node in _statements(tree) if isinstance(node, ast.ClassDef)}


def large_classes() -> dict[str, int]:
    """Return the stateful classes with more than 12 attributes, and how many each has."""
    found = {node.name: len(attributes_of(node, tree)) for node, tree in classes()}
    return {name: count for name, count in found.items() if count > MOST_ATTRIBUTES}


def repeated_modules() -> int:
    """Return how many names of modules more than one file has."""
    return sum(count > 1 for count in Counter(path.stem for path in files() if path.stem not in _COMMON_NAMES).values())


def _definitions(node: ast.AST, path: str = "") -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            continue
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        names = [child.name] if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []
        if isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        yield from (f"{path}{name}" for name in names)
        yield from _definitions(child, f"{path}{names[0]}." if named else path)


@functools.cache
def definitions() -> dict[str, set[Path]]:
    """Return the files of each definition of the product and the tests, by its name: `Class.method`."""
    found: dict[str, set[Path]] = {}
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for path, tree in [*trees().items(), *((path, parsed(path)) for path in tests)]:
        for name in _definitions(tree):
            found.setdefault(name, set()).add(path)
            found.setdefault(f"{_module(path)}:{name}", set()).add(path)
    return found


def _module(path: Path) -> str:
    return f"{path.parent.name}.{path.stem}" if path.stem == "__main__" else path.stem


def users_of(attribute: str) -> set[str]:
    """Return the methods that read an attribute of something other than `self`, as `Class.method`."""
    return {
        f"{node.name}.{method.name}"
        for node, _ in classes()
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute) and part.attr == attribute and ast.unparse(part.value) != "self"
    }


def names_of(entry: str) -> list[str]:
    """Return the names of an entry of a list; `module:` before a name chooses among definitions of the same name."""
    return entry.split(" + ")


# What can be set, called and watched ---------------------------------------------------------------------------------


def leaves(schema: Schema, node: Schema | None = None, path: str = "", above: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield each path of a file that a user can set; a section that repeats counts wherever it can be written.

    Where a part has several kinds, each kind's keys count.
    """
    node = schema if node is None else node
    for name, setting in node["properties"].items():
        where = f"{path}.{name}" if path else name
        entry = _entry(setting)
        below = [part for part in _sections(schema, setting, entry) if id(part) not in above]
        if not below:
            yield where
        for part in below:
            yield from leaves(schema, part, f"{where}.<name>" if entry else where, (*above, id(part)))


def _entry(setting: Schema) -> Schema:
    """Return the schema of a map's values; empty if the setting is not a map."""
    entry: Schema = setting.get("additionalProperties") or next(iter(setting.get("patternProperties", {}).values()), {})
    return entry if isinstance(entry, Mapping) else {}


def _sections(schema: Schema, setting: Schema, entry: Schema) -> list[Schema]:
    kinds = [setting, entry]
    kinds += [kind for each in kinds for name in ("anyOf", "oneOf") for kind in each.get(name, ())]
    found = [schema["$defs"][kind["$ref"].rpartition("/")[2]] for kind in kinds if "$ref" in kind]
    return [part for part in found if "properties" in part]


@functools.cache
def settings() -> set[str]:
    """Return each path of `headrace.yaml`."""
    return {*leaves(json_schema())}


def core_routes() -> list[str]:
    """Return method and path of each endpoint whose handler is in the core."""
    return [
        f"{endpoint.method} {endpoint.path}"
        for endpoint in every_endpoint()
        if endpoint.handler and not is_guest(Path(endpoint.handler.__code__.co_filename))
    ]


def _named_commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    yield context.command_path, command
    if isinstance(command, click.Group):
        below = {name: command.get_command(context, name) for name in command.list_commands(context)}
        for name, found in below.items():
            if found:
                yield from _named_commands(found, click.Context(found, info_name=name, parent=context))


@functools.cache
def commands() -> dict[str, click.Command]:
    """Return every command and group by what a user types: `dev up`."""
    found = _named_commands(root, click.Context(root, info_name="headrace"))
    return {path.partition(" ")[2]: command for path, command in found}


def options() -> int:
    """Return the options of all commands; one that several commands have counts for each, a global one too."""
    own = sum(isinstance(part, click.Option) for command in commands().values() for part in command.params)
    used: list[frozenset[str]] = [
        getattr(command.callback, "global_options", frozenset()) for command in commands().values()
    ]
    return own + sum(len(names - {"debug"}) for names in used)  # every command has `--debug`


def unwatched_metrics() -> list[str]:
    """Return the metrics that no panel and no alert uses."""
    used = "".join((_TELEMETRY / name).read_text() for name in ("panels.yaml", "alerts.yaml"))
    return [name for name, *_ in CATALOGUE if not re.search(rf"\b{name}(_count|_sum|_bucket)?\b", used)]


# Texts ---------------------------------------------------------------------------------------------------------------


def bytes_of_tests() -> int:
    """Return the bytes of all text below `tests`, without the copy of the API document, which is made from the code."""
    found = [path for path in (ROOT / "tests").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    texts = [path.read_bytes() for path in found if path.name != "api_contract.json"]
    return sum(len(text) for text in texts if b"\0" not in text[:1024])


def hand_written_words() -> int:
    """Return the words of `docs/` and of each README, without what is made from the code."""
    pages = [path for path in DOCS.rglob("*.md") if DOCS / "reference" not in path.parents]
    pages += [path for folder in (ROOT, *_folders()) for path in folder.glob("README.md")]
    made = re.compile(r"<!-- file map: begin.*?<!-- file map: end -->", re.DOTALL)
    return sum(len(made.sub("", path.read_text()).split()) for path in {*pages})


def _folders() -> list[Path]:
    roots = [ROOT / name for name in ("src", "packages", "bench", "changes", "deploy", "examples", "tools")]
    return [path for top in roots for path in [top, *top.rglob("*")] if path.is_dir()]


def glossary_words() -> int:
    """Return the words of Headrace."""
    return len(re.findall(r"^\| \*\*", (DOCS / "glossary.md").read_text(), re.MULTILINE))


# The table -----------------------------------------------------------------------------------------------------------

COUNTS: Final[Mapping[str, Callable[[], int]]] = {
    "Lines of the core": core_lines,
    "Lines of the compiled module": compiled_lines,
    "Leaves of `headrace.yaml`": lambda: len(settings()),
    "Keys of a pipeline file": lambda: len([*leaves(PipelineSpec.model_json_schema(by_alias=True))]),
    "Keys of a function file": lambda: sum(key.is_read for key in KEYS),
    "Routes of the core": lambda: len(core_routes()),
    "Routes of all": lambda: len(every_endpoint()),
    "Commands": lambda: sum(not isinstance(command, click.Group) for command in commands().values()),
    "Options of all commands": options,
    "Error codes": lambda: len([*catalogue()]),
    "Metrics": lambda: len(CATALOGUE),
    "Metrics in no panel and no alert": lambda: len(unwatched_metrics()),
    **{title: functools.partial(len, entries) for title, entries in NAMED.items()},
    f"Stateful classes with more than {MOST_ATTRIBUTES} attributes": lambda: len(large_classes()),
    "Bytes of tests": bytes_of_tests,
    "Hand-written words": hand_written_words,
    "Words of Headrace": glossary_words,
    "Optional hooks of a pump": lambda: len(PumpHooks._fields),
    "Module names that stand more than once": repeated_modules,
}


def bounds(page: str) -> dict[str, Bound]:
    """Return the bounds of the page by the title of their count."""
    table = page.partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([^|]*) \|", table, re.MULTILINE)
    return {title: Bound(int(most.replace(",", "")), goal.strip()) for title, most, goal in rows}


def table() -> str:
    """Return each count with its bound and goal, as text."""
    of_page = bounds(PAGE.read_text())
    lines = [f"{'count':48} {'now':>10} {'bound':>10} {'goal':>10}"]
    for title, count in COUNTS.items():
        bound = of_page.get(title, Bound(0, ""))
        lines.append(f"{title:48} {count():>10,} {bound.most:>10,} {bound.goal:>10}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
