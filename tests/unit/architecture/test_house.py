"""The rules of the house that tools do not hold: where things are born, one door per library, budgets, words."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headrace.app.documents import every_endpoint
from headrace.config.format_list import FORMATS
from headrace.extras import MODULES, extra_of

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
from tools.counts import files, parsed, trees  # noqa: E402 a plain folder, found from the repository's root

pytestmark = pytest.mark.xdist_group("house")

PACKAGES = ROOT / "packages"
FILES = files()
ERRORS = PACKAGES / "headrace/src/headrace/errors.py"

BIRTHS = {
    "create_task",
    "ensure_future",
    "TaskGroup",
    "to_thread",
    "run_in_executor",
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "executor",
    "ProcessPoolExecutor",
    "Popen",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "fork",
    "spawnv",
    "start_new_thread",
}
DOORS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("doors.yaml").read_text())


def room(path: Path) -> str:
    """Return the part of the core, or the guest, that a file is in."""
    package, *below = path.relative_to(PACKAGES).parts[2:]
    return below[0] if package == "headrace" else package


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_tasks_threads_and_processes_are_born_only_in_runtime() -> None:
    """Everything that lives has an owner; so it is started in one place."""
    found = [
        f"{path.relative_to(PACKAGES)}:{node.lineno} {name}"
        for path, tree in trees().items()
        if room(path) not in ("runtime", "headrace_jvm")  # downloads run side by side, and end with their block
        and path.name != "project_runs.py"  # a driver may not import runtime, and its process group has its children
        and "simulation" not in path.parts  # greenlets of a machine, which owns them; a stage owns its programs
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (name := getattr(node.func, "attr", getattr(node.func, "id", ""))) in BIRTHS
    ]
    assert found == []


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_tests_import_public_names_only() -> None:
    """So that what is inside can change without them."""
    found = {
        f"{path.relative_to(ROOT)}: {alias.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace")
        for alias in node.names
        if alias.name.startswith("_") or "._" in (node.module or "").replace(".__main__", "")
    }
    assert not found


def is_below(path: Path, places: list[str]) -> bool:
    """Whether a file is one of these places, or in one: a path in the core, or one that begins with a guest's name."""
    package, *below = path.relative_to(PACKAGES).parts[2:]
    whole = "/".join(below if package == "headrace" else (package, *below))
    return any(f"{whole}/".startswith(f"{place}/") for place in places)


def test_each_library_has_one_door() -> None:
    """A library is imported by its own package only, or its own module: a simulation replaces names there."""
    found = {
        f"{path.relative_to(PACKAGES)}: {name}"
        for path, tree in trees().items()
        for name in imports(tree)
        if (library := name.split(".")[0]) in DOORS and not is_below(path, DOORS[library])
    }
    assert not found


def test_each_optional_library_has_its_extra() -> None:
    """So the error for one that is missing names what to install, wherever its import is."""
    project = tomllib.loads((PACKAGES / "headrace/pyproject.toml").read_text())["project"]
    assert {*MODULES} == {*project["optional-dependencies"]}
    core = {canonicalize_name(Requirement(need).name) for need in project["dependencies"]}
    packages = packages_distributions()
    found = {name.split(".")[0] for tree in trees().values() for name in imports(tree)} - {*sys.stdlib_module_names}
    optional = {name for name in found if not core & {*map(canonicalize_name, packages.get(name, ()))}}
    assert {name for name in optional if not extra_of(name)} == {"headrace", "pydantic_core"}


def test_formats_are_listed_once() -> None:
    """`formats.csv` is the list; a second one would lack the next format."""
    listed = {
        f"{path.relative_to(PACKAGES)}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict)
        for each in [node.keys if isinstance(node, ast.Dict) else node.elts]
        if len({*FORMATS} & {name.value for name in each if isinstance(name, ast.Constant)}) > 1
    }
    assert listed == set()


def test_files_and_functions_stay_within_their_budgets() -> None:
    """A smell detector with an alarm."""
    sizes = {path: path.read_text().count("\n") for path in FILES}
    spans = sorted(length(node) for tree in trees().values() for node in functions(tree))
    assert {str(path) for path, size in sizes.items() if size > 500} == set()
    assert sum(size <= 400 for size in sizes.values()) >= 0.9 * len(sizes)
    assert spans[-1] <= 50
    assert spans[int(len(spans) * 0.9)] <= 30


def test_no_function_takes_more_than_eight_positional_parameters() -> None:
    """The rest is keyword-only; a section object replaces a long list."""
    found = [
        f"{path.relative_to(PACKAGES)}:{node.lineno} {node.name}"
        for path, tree in trees().items()
        for node in functions(tree)
        if len(node.args.args) + len(node.args.posonlyargs) > 9
    ]
    assert found == []


OF_EVERY_LISTENER = {"health", "live", "ready", "metrics", "adm", "specui.html"}
"""Segments that `http` may name: probes and metrics, administration, and the page of the API document."""
SCOPES = {"consumers:r", "consumers:w"}
"""Words of tokens, which `http` reads."""
DESCRIBED = {"_SECURITY"}
"""Texts of the API document: those of its scopes."""
NOUNS = r"consumers?|producers?|instances?|pipelines?|ksql\w*|dead.?letters?|replays?|redrives?|reactive|transactions?"


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file with their lines, docstrings included."""
    for statement in tree.body:
        target = getattr(statement, "target", None)
        if isinstance(target, ast.Name) and target.id in DESCRIBED:
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                yield node.lineno, node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def test_http_names_no_feature() -> None:
    """What a path is to the server is declared at its endpoint, so a feature adds one without touching `http`."""
    segments = {part for endpoint in every_endpoint() for part in endpoint.path.split("/") if part and part[0] != "{"}
    paths = "|".join(map(re.escape, sorted(segments - OF_EVERY_LISTENER, key=len, reverse=True)))
    named = re.compile(rf"(?<![\w/}}.])/(?:{paths})(?![\w.-])|\b(?:{NOUNS})\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(PACKAGES)}:{line} {match[0]}"
        for path, tree in trees().items()
        if room(path) == "http"
        for line, text in strings(tree)
        if text not in SCOPES and (match := named.search(text))
    ]
    assert found == []


def test_no_file_is_named_after_nothing() -> None:
    """A file is named by its noun."""
    assert not {path.stem for path in FILES} & {"core", "common", "utils", "util", "helpers", "manager", "misc"}


def test_package_files_only_export() -> None:
    """`__init__.py` holds a docstring, imports and names."""
    allowed = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    found = [
        f"{path.relative_to(PACKAGES)}:{node.lineno}"
        for path, tree in trees().items()
        if path.name == "__init__.py"
        for node in tree.body
        if not isinstance(node, allowed)
    ]
    assert found == []


def test_broad_excepts_say_what_the_user_sees() -> None:
    """A broad `except` stands at a boundary, with a comment on its line."""
    found = [
        f"{path.relative_to(PACKAGES)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"except (Base)?Exception( as \w+)?:|except:", line) and "boundary" not in line
        if not re.search(r"except BaseException:$", line)
    ]
    assert found == []


def test_words() -> None:
    """Kafka's word is record."""
    banned = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
        if path not in (Path(__file__), ROOT / "tests/docs/test_docs.py")  # which look for the same words
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if banned.search(line)
    ]
    assert found == []


def test_the_error_outline_is_the_tree() -> None:
    """Each family of the outline on top of errors.py is a class, and each class that others refine is in it."""
    outline = set(re.findall(r"\|-- ([A-Z]\w+)", ERRORS.read_text().split('"""')[1]))
    classes = [node for node in trees()[ERRORS].body if isinstance(node, ast.ClassDef)]
    assert outline <= {node.name for node in classes}
    refined = {getattr(node.bases[0], "id", "") for node in classes}
    tops = {node.name for node in classes if getattr(node.bases[0], "id", "") == "HeadraceError"}
    assert tops & refined <= outline


def test_error_codes_are_unique() -> None:
    """A code names one case for ever."""
    from headrace.errors import catalogue

    codes = [error.code for error in catalogue()]
    assert len(codes) == len(set(codes))
    assert all(error.__doc__ for error in catalogue())


def test_the_lock_file_carries_no_address() -> None:
    """Where packages come from is the reader's choice."""
    assert "://" not in (ROOT / "requirements.lock").read_text()


def test_the_licence_is_in_the_repository_and_in_the_package() -> None:
    """The text that each pyproject.toml names is shipped whole."""
    text = (ROOT / "LICENSE").read_text()
    for folder in sorted(PACKAGES.iterdir()):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
        assert (folder / "LICENSE").read_text() == text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def fixtures_without_a_type(path: Path, known: set[str]) -> Iterator[str]:
    """Yield where a test or a fixture takes or makes a fixture as `Any`."""
    for node in functions(parsed(path)):
        marks = [ast.unparse(mark) for mark in node.decorator_list]
        is_fixture = any("fixture" in mark for mark in marks)
        if is_fixture or node.name.startswith("test_"):
            given = {name for mark in marks for name in re.findall(r"\w+", mark.partition("parametrize(")[2])}
            taken = [part for part in (*node.args.args, *node.args.kwonlyargs) if part.arg in known - given]
            loose = [part.arg for part in taken if part.annotation and ast.unparse(part.annotation) == "Any"]
            made = is_fixture and node.returns and re.fullmatch(r"(\w+\[)?Any\]?", ast.unparse(node.returns))
            yield from (
                f"{path.relative_to(ROOT)}: {node.name}: {name}" for name in [*loose, *(["its value"] * bool(made))]
            )


def test_fixtures_have_types() -> None:
    """A reader of a test sees what it works with, and mypy compares its calls with the tools."""
    paths = [
        *sorted((ROOT / "tests").rglob("*.py")),
        PACKAGES / "headrace-devkit/src/headrace_devkit/testing/plugin.py",
    ]
    known = {"monkeypatch", "tmp_path", "capsys", "caplog", "request", "server", "opened"}
    for path in paths:
        nodes = functions(parsed(path))
        known |= {node.name for node in nodes if any("fixture" in ast.unparse(mark) for mark in node.decorator_list)}
    assert [found for path in paths for found in fixtures_without_a_type(path, known)] == []
