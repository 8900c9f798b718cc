"""From a pipeline file to its spec, with every problem named by its line."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.config.explain import refuse_constants, validated
from headrace.config.kafka_security import located
from headrace.config.references import FileReferences, ReferredSecret, holds_plain_text, is_secret_name
from headrace.config.yaml_tree import KeyPath, Problems, read_text, read_tree
from headrace.errors import PipelineInvalid
from headrace_pipelines.graph import ordered_views, problems_of
from headrace_pipelines.handler_setup import handler_problems
from headrace_pipelines.processor_setup import processor_problems
from headrace_pipelines.sinks.sink_kinds import SINKS
from headrace_pipelines.spec import PipelineSpec
from headrace_pipelines.sql import SqlFinding, check_sql, position_of

log = logging.getLogger(__name__)
_HOLDS_SECRET = re.compile(r"password\s*=|LoginModule|PRIVATE KEY", re.IGNORECASE)


def load_pipelines(paths: Sequence[Path], *, check: bool = False) -> list[PipelineSpec]:
    """Return the pipelines of several files; `check` as of `load_pipeline`.

    Raises:
        PipelineInvalid: See `load_pipeline`; or two files have the same pipeline name.
    """
    found: dict[str, tuple[Path, PipelineSpec]] = {}
    problems: list[str] = []
    for path in paths:
        try:
            spec = load_pipeline(path, check=check)
        except PipelineInvalid as cause:
            problems.append(cause.description)
            continue
        if spec.name in found:
            problems.append(
                f"{path}: name: {found[spec.name][0]} has the name {spec.name} too, so both would share "
                "checkpoints: give each pipeline its own name"
            )
        found[spec.name] = path, spec
    if problems:
        raise PipelineInvalid("\n".join(problems))
    writers: dict[str, str] = {}
    for path, spec in found.values():
        for topic in {topic for flow in spec.flows.values() for topic in flow.sink.topics}:
            if (first := writers.setdefault(topic, spec.name)) != spec.name:
                log.warning("%s: pipeline %s also writes to topic %s; their rows will be mixed", path, first, topic)
    return [spec for _, spec in found.values()]


def load_pipeline(path: Path, *, check: bool = False) -> PipelineSpec:
    """Return the pipeline of a file; with `check` also check its SQL, and log what may be wrong with it.

    Raises:
        PipelineInvalid: One line per problem with file and line, all problems at once.
    """
    problems = Problems()
    tree = read_tree(read_text(path, PipelineInvalid, "Correct the path"), str(path), problems)
    report = problems.report
    if not isinstance(tree, dict):
        report((), "is not a mapping of keys: begin with name, sources and flows")
    if problems.found and not (isinstance(tree, dict) and tree):
        raise PipelineInvalid("\n".join(problems.ordered))
    references = FileReferences(path, path.resolve().parent, os.environ, report)
    driver = tree.get("driver")
    _replace_references(tree, (), references, remote=isinstance(driver, dict) and "remote" in driver)
    refuse_constants(PipelineSpec, tree, problems)
    spec = validated(PipelineSpec, tree, problems, references.unresolved)
    if not spec:
        raise PipelineInvalid("\n".join(problems.ordered))
    if spec.kafka.security:
        security = located(spec.kafka.security, _SECURITY, references)
        spec = spec.model_copy(update={"kafka": spec.kafka.model_copy(update={"security": security})})
    _keep_references(spec, references)
    sql_files = sql_files_of(tree)
    spec = _with_sql_files(spec, path.resolve().parent, report)
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    for where, sentence in [*problems_of(spec), *handler_problems(spec), *processor_problems(spec)]:
        report(where, sentence)
    for found in check_sql(spec, None if problems.found else ordered_views(spec)) if check else ():
        sentence = problems.located(found.path, found.sentence, _sql_location(path, sql_files, problems, found))
        if found.is_problem:
            problems.found.append(sentence)
        else:
            log.warning(sentence)
    if problems.found:
        raise PipelineInvalid("\n".join(problems.ordered))
    return spec


def sql_files_of(tree: Any) -> dict[KeyPath, str]:
    """Return the SQL files that a pipeline file names, by the path of their view or flow."""
    parts = {(kind, name): part for kind in ("views", "flows") for name, part in (tree.get(kind) or {}).items()}
    return {at: part["sql_file"] for at, part in parts.items() if isinstance(part, dict) and "sql_file" in part}


def _sql_location(path: Path, sql_files: Mapping[KeyPath, str], problems: Problems, found: SqlFinding) -> str:
    """Return the location of the SQL that a finding is about; empty if it is the line of its key."""
    if (name := sql_files.get(found.path[:2])) and found.path[2:] in ((), ("sql",)):
        file = path.parent / name
        text = read_text(file, PipelineInvalid, "Correct the path")
        at = position_of(found.word, text) if found.word else None
        return f"{file}:{at[0]}:{at[1]}" if at else f"{file}:{found.line}"
    location, _, key = problems.location_of(found.path).rpartition(":")
    if found.word and key.isdecimal():
        lines = read_text(path, PipelineInvalid, "Correct the path").splitlines()[int(key) - 1 :]
        word = re.compile(rf"(?<!\w){re.escape(found.word)}(?!\w)", re.IGNORECASE)
        return next((f"{location}:{int(key) + number}" for number, line in enumerate(lines) if word.search(line)), "")
    return ""


_SECURITY = ("kafka", "security")
_PLAIN_SECRET = (
    "is a secret in plain text, which plans and logs may show: write kafka.security for a login at Kafka, and "
    "${env:NAME} or ${file:PATH} for anything else"
)

_REMOTE_SECRET = (
    "is a secret, and a Spark Connect server lists the statements of its clients with all options: write "
    "kafka.security for a login at Kafka, and use driver.master for anything else"
)


_SECTIONS = {key for kind in SINKS.values() for key in kind.references}


def _replace_references(value: Any, at: KeyPath, references: FileReferences, *, remote: bool) -> None:
    """Replace the references where they work, and report options of sources and sinks with secrets in plain text."""
    for key, below in value.items() if isinstance(value, dict) else ():
        if (*at, key) == ("kafka",) or (key in _SECTIONS and at[-1:] == ("sink",)):
            value[key] = references.replaced(below, (*at, key))
            continue
        if key not in ("options", "settings") or not isinstance(below, dict):
            _replace_references(below, (*at, key), references, remote=remote)
            continue
        for name, option in below.items():
            secret = is_secret_name(name) or _HOLDS_SECRET.search(str(option))
            if secret and (remote or holds_plain_text(str(option))):
                references.report((*at, key, name), _REMOTE_SECRET if remote else _PLAIN_SECRET)
                references.unresolved.add((*at, key, name))
            else:
                below[name] = references.replaced(option, (*at, key, name))


def _keep_references(spec: PipelineSpec, references: FileReferences) -> None:
    """Let passwords of sinks be read again when a driver starts."""
    for name, flow in spec.flows.items():
        for section in flow.sink.references:
            at = ("flows", name, "sink", section)
            found = getattr(flow.sink, section)
            values = found if isinstance(found, dict) else vars(found) if found else {}
            for key, value in values.items():
                if isinstance(value, SecretStr) and (text := references.texts.get((*at, key))):
                    values[key] = ReferredSecret(value, text, references.folder)


def _with_sql_files(spec: PipelineSpec, folder: Path, report: Callable[[KeyPath, str], None]) -> PipelineSpec:
    """Return a pipeline with its folder, with the texts of SQL files in place of their names."""
    folder = folder / (spec.folder or "")
    found: dict[str, Any] = {"views": dict(spec.views), "flows": dict(spec.flows)}
    for kind, queries in found.items():
        for name, query in queries.items():
            if query.sql_file:
                try:
                    text = read_text(folder / query.sql_file, PipelineInvalid, "Correct the path")
                    queries[name] = query.model_copy(update={"sql": text, "sql_file": None})
                except PipelineInvalid as cause:
                    report((kind, name), cause.description)
    return spec.model_copy(update={"folder": folder, **found})
