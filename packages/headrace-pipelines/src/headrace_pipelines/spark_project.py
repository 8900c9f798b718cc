"""Projects of Spark Declarative Pipelines: which files are one, what their keys mean, and what Spark has not."""

import ast
import contextlib
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from headrace.config.references import FileReferences
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace_pipelines.sources import AnySource
from headrace_pipelines.spec import DriverSpec, FlowSpec, Name, PipelineSpec, TableName

FILE_NAMES: Final = ("spark-pipeline.yml", "spark-pipeline.yaml")
"""The names that Spark looks for."""
_KEYS: Final = ("name", "storage", "catalog", "database", "schema", "configuration", "libraries")
_OWN_KEYS: Final = frozenset(("storage", "libraries"))
_DELTA: Final = re.compile(r"io\.delta\.|[\"']delta[\"']|USING\s+DELTA", re.IGNORECASE)
_ADVICE: Final = "Spark 4.2 does not have it"
_OF_DATABRICKS: Final = (
    (re.compile(r"[\"']cloudFiles[\"']|\b(?:cloud|read)_files\s*\(", re.IGNORECASE), "the format cloudFiles",
     "read the folder with a file format of Spark and a schema"),
    (re.compile(r"@?\b(?:dp|dlt)\.expect\w*|\bEXPECT\s*\(", re.IGNORECASE), "expectations",
     "filter the rows in the query, or write a pipeline file with rules"),
    (re.compile(r"\b(?:import\s+dlt|from\s+dlt\s+import)\b"), "the module dlt",
     "write `from pyspark import pipelines as dp`"),
    (re.compile(r"SCD\s+TYPE\s+2|stored_as_scd_type\s*=\s*[\"']?2", re.IGNORECASE), "SCD type 2",
     "use type 1, which is the default"),
    (re.compile(r"[\"']/Volumes/"), "/Volumes", "name a folder or a URL that Spark can read"),
    (re.compile(r"\bprivate\s*=\s*True|\bCREATE\s+(?:OR\s+REFRESH\s+)?PRIVATE\b", re.IGNORECASE), "private tables",
     "use a temporary view"),
)  # fmt: skip
"""What only Databricks has: its sign in a line, its name, and what to use instead."""
_COMMENTS: Final = {
    ".py": re.compile(r"#[^\n\"']*$", re.MULTILINE),
    ".sql": re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL),
}


class SparkProject(PipelineSpec):
    """A project of Spark Declarative Pipelines. Its flows are known when Spark has resolved them."""

    name: Name
    sources: dict[TableName, AnySource] = {}
    flows: dict[Name, FlowSpec] = {}
    file: Path
    """The file `spark-pipeline.yml`."""
    storage: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*:/")]
    title: str
    """Name of the project as the file has it."""
    catalog: str | None = None
    database: str | None = None
    configuration: dict[str, str] = {}
    """With its references replaced."""
    libraries: list[str] = []
    uses_delta: bool = False

    def flow_name(self, identifier: str) -> str:
        """Return the name of a flow without the project's own catalog and database."""
        default = f"{self.catalog or 'spark_catalog'}.{self.database or 'default'}."
        return identifier.replace("`", "").removeprefix(default)

    @property
    def document(self) -> dict[str, Any]:
        """What Spark reads of the file, with the references replaced."""
        known = {"name": self.title, "storage": self.storage, "catalog": self.catalog, "database": self.database}
        found: dict[str, Any] = {key: value for key, value in known.items() if value is not None}
        libraries = [{"glob": {"include": include}} for include in self.libraries]
        return found | {"configuration": self.configuration, "libraries": libraries}


def is_project(path: Path) -> bool:
    """Return whether a file is a project's: by its name, or by keys that no pipeline file has."""
    if path.name in FILE_NAMES:
        return True
    try:
        tree = read_tree(path.read_text(encoding="utf-8-sig"), str(path), Problems())
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(tree, dict) and bool(_OWN_KEYS & tree.keys())


def load_projects(paths: Sequence[Path], others: Sequence[PipelineSpec] = ()) -> list[SparkProject]:
    """Return the projects of several files.

    Raises:
        PipelineInvalid: See `load_project`; or two pipelines have one name.
    """
    found: dict[str, str] = {spec.name: "a pipeline file" for spec in others}
    projects: list[SparkProject] = []
    problems: list[str] = []
    for path in paths:
        try:
            project = load_project(path)
        except PipelineInvalid as cause:
            problems.append(cause.description)
            continue
        if (first := found.setdefault(project.name, str(path))) != str(path):
            problems.append(f"{path}: name: {first} has the name {project.name} too: give each its own name")
        projects.append(project)
    if problems:
        raise PipelineInvalid("\n".join(problems))
    return projects


def load_project(path: Path) -> SparkProject:
    """Return the project of a file whose keys and definitions Spark can read.

    Raises:
        PipelineInvalid: One line per problem with file and line, all problems at once.
    """
    problems = Problems()
    tree = read_tree(read_text(path, PipelineInvalid, "Correct the path"), str(path), problems)
    if not isinstance(tree, dict):
        problems.report((), "is not a mapping of keys: begin with name, storage and libraries")
        tree = {}
    _check_keys(tree, problems)
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    references = FileReferences(path, path.resolve().parent, os.environ, problems.report)
    configuration = references.replaced(tree.get("configuration") or {}, ("configuration",))
    includes = [entry["glob"]["include"] for entry in tree.get("libraries") or ()]
    files = _files(path.resolve().parent, includes, problems.report)
    texts = {file: read_text(file, PipelineInvalid, "Correct the path") for file in files}
    problems.found += [problem for file, text in texts.items() for problem in _problems_of_file(file, text)]
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    changed = {at[-1] for at in references.texts}
    known = {key: value for key, value in configuration.items() if key not in changed and _at_start(key, value)}
    return SparkProject(
        name=re.sub(r"^[^a-z]+|[^a-z0-9_-]", "-", tree["name"].lower()).strip("-")[:63] or "project",
        title=tree["name"],
        file=path.resolve(),
        folder=path.resolve().parent,
        storage=tree["storage"],
        catalog=tree.get("catalog"),
        database=tree.get("database") or tree.get("schema"),
        configuration=configuration,
        libraries=includes,
        uses_delta=any(map(_DELTA.search, [*configuration.values(), *texts.values()])),
        driver=DriverSpec(settings=known),
    )


def _at_start(key: str, value: str) -> bool:
    """Return whether the JVM may get a setting at its start, where process lists show it."""
    with contextlib.suppress(ValueError):
        return bool(DriverSpec(settings={key: value})) and not key.startswith(("spark.connect.", "spark.plugins"))
    return False


def _check_keys(tree: Mapping[str, Any], problems: Problems) -> None:
    """Report what Spark refuses of the file, and storage without a scheme."""
    report = problems.report
    for key in tree:
        if key not in _KEYS:
            report(
                (key,), f"is not a key of Spark; it has {', '.join(_KEYS)}. Settings of Headrace go to headrace.yaml"
            )
    for key in ("name", "storage"):
        if key not in tree:
            report((), f"{key} is missing, which Spark needs")
    for key in ("name", "storage", "catalog", "database", "schema"):
        if key in tree and not isinstance(tree[key], str):
            report((key,), "should be a string: put it in quotes")
    storage = tree.get("storage")
    if isinstance(storage, str) and not re.match(r"[a-z][a-z0-9+.-]*:/", storage):
        report(("storage",), "is not an absolute URI: write file:///path, or another scheme with a path")
    configuration = tree.get("configuration") or {}
    if not isinstance(configuration, dict):
        report(("configuration",), "should be a mapping of settings to strings")
    else:
        for key, value in configuration.items():
            if not isinstance(value, str):
                report(("configuration", key), "should be a string: put it in quotes")
    libraries = tree.get("libraries") or []
    if not isinstance(libraries, list):
        report(("libraries",), "should be a list of `glob: {include: transformations/**}`")
        return
    for index, entry in enumerate(libraries):
        found = entry.get("glob") if isinstance(entry, dict) else None
        include = found.get("include") if isinstance(found, dict) else None
        if not isinstance(include, str):
            report(("libraries", index), "should be `glob: {include: transformations/**}`")
        elif glob.has_magic(include.removesuffix("/**")):
            text = f"{include} is neither a file nor a folder with /** at its end, and Spark takes nothing else"
            report(("libraries", index), text)


def _files(folder: Path, includes: Sequence[str], report: Callable[[tuple[str | int, ...], str], None]) -> list[Path]:
    """Return the definitions, as Spark finds them."""
    found: list[Path] = []
    for index, include in enumerate(includes):
        pattern = include + "/*" if include.endswith("/**") else include
        try:
            below = [each for each in folder.glob(pattern) if each.is_file() and "__pycache__" not in each.parts]
        except (NotImplementedError, ValueError):  # an absolute path
            report(("libraries", index), f"{include} is not relative to this file")
            continue
        if not below:
            report(("libraries", index), f"{include} names no file")
        for each in sorted(below):
            if each.suffix not in _COMMENTS:
                report(("libraries", index), f"{each} is neither .py nor .sql, which Spark refuses: move it elsewhere")
            else:
                found.append(each)
    if not includes:
        report((), "libraries is missing: name the definitions, as `glob: {include: transformations/**}`")
    return found


def _problems_of_file(file: Path, text: str) -> Iterator[str]:
    """Yield what is wrong with definitions, with their line."""
    if file.suffix == ".py":
        try:
            ast.parse(text)
        except SyntaxError as cause:
            yield f"{file}:{cause.lineno or 1}: is not Python: {cause.msg}. Correct this line"
            return
        text = _COMMENTS[".py"].sub("", text)
    else:
        text = _COMMENTS[".sql"].sub(lambda comment: "\n" * comment[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        for sign, name, instead in _OF_DATABRICKS:
            if sign.search(line):
                yield f"{file}:{number}: {name} is Databricks' own, and {_ADVICE}: {instead}"
