"""What the README says there is, compared with the code: names of its tables, guarantees, and the one headrace.yaml."""

from __future__ import annotations

import ast
import importlib
import operator
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter

import headrace.runtime.telemetry
from headrace.config.backend import BackendConfig
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.format_list import FORMATS, SCHEMA_TYPES
from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSasl
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace.functions.triggers.trigger_kinds import KINDS
from headrace_pipelines.sinks.sink_kinds import SINKS, AnySink
from headrace_pipelines.sinks.topic_sink import KafkaSink
from headrace_pipelines.sources import SOURCES, KafkaSource
from headrace_pipelines.spec import FlowSpec, PipelineKafka

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


UNITS = {"KiB": 2**10, "MiB": 2**20}


def constant(module: ModuleType, name: str) -> Any:
    """Return a constant by its name, or the default of a field that no file sets."""
    owner, _, last = name.rpartition(".")
    field = getattr(getattr(module, owner, None), "model_fields", {}).get(last)
    return field.default if field else operator.attrgetter(name)(module)


def test_the_limits_are_those_of_the_code() -> None:
    """Each number of the page is its constant."""
    rows = re.findall(
        r"^\| [^|]+ \| ([\d,]+) ?(\w*) \| `([^`]+)` `([\w.]+)` \|", (ROOT / "docs/limits.md").read_text(), re.M
    )
    assert len(rows) > 30
    for number, unit, where, name in rows:
        module = where.removesuffix(".py").replace("/", ".")
        module = module if module.startswith("headrace_") else f"headrace.{module}"
        real = constant(importlib.import_module(module), name)
        assert int(number.replace(",", "")) * UNITS.get(unit, 1) == float(real), f"{where} {name}"


def literals(annotation: Any) -> set[str]:
    """Return the texts that a type may be, in whatever it is wrapped."""
    if isinstance(annotation, str):
        return {annotation}
    return set().union(*map(literals, get_args(annotation)))


def choices(model: type[BaseModel], field: str) -> set[str]:
    return literals(model.model_fields[field].annotation)


def security(model: Any) -> set[str]:
    """Return the protocols of a section's `security`; it must be the section that all clients have."""
    [section] = {each for each in (model, *get_args(model)) if isinstance(each, type) and issubclass(each, BaseModel)}
    return choices(section, "protocol")


NAMES = {
    "formats of produce, push, active consumers and functions": [
        {*FORMATS},
        choices(ReactiveConsumerConfig, "value_format"),
        choices(KafkaTrigger, "value_format"),
    ],
    "formats of a pipeline's topics, read and written": [
        choices(KafkaSource, "value_format"),
        choices(KafkaSink, "value_format") - {"record"},
    ],
    "`backend.mode` of a reactive consumer": [choices(BackendConfig, "mode")],
    "`kind` of a function's trigger": [set(KINDS)],
    "`explicitAckMode`": [choices(KafkaTrigger, "explicit_ack_mode")],
    "sources of a pipeline": [{*SOURCES}],
    "`corrupt`": [choices(KafkaSource, "corrupt")],
    "sinks of a pipeline": [{*SINKS}],
    "protocols to Kafka, also of pipelines": [
        security(section.model_fields["security"].annotation) for section in (KafkaConfig, PipelineKafka)
    ],
    "logins at Kafka, also of pipelines": [choices(KafkaSasl, "mechanism")],
}
"""How a row of the table of names begins, and what the code has."""


def of_sink(**sink: Any) -> set[str]:
    """Return the guarantees that `headrace pipeline plan` prints of a sink in each `delivery`."""
    model = type(TypeAdapter(AnySink).validate_python(sink))
    ways = [{"delivery": way} for way in choices(model, "delivery")] if "delivery" in model.model_fields else [{}]
    return words(" ".join(FlowSpec(sql="SELECT 1", sink=sink | way).sink.guarantee for way in ways))


def words(text: str) -> set[str]:
    return set(re.findall("at least once|exactly once", text.replace("_", " ")))


def of_model(model: type[BaseModel]) -> set[str]:
    """Return the guarantees of what a section configures: at least once, if it has no setting for that."""
    return words(" ".join(choices(model, "delivery"))) if "delivery" in model.model_fields else {"at least once"}


GUARANTEES = {
    "a backend of a reactive consumer": of_model(BackendConfig),
    "an output topic of a function": of_model(KafkaTrigger),
    "a topic of a pipeline": of_sink(topic="t"),
    "a PostgreSQL table of a pipeline": of_sink(postgres={"database": "d", "user": "u"}, table="t"),
    "a Delta or Iceberg table of a pipeline": of_sink(delta="t") | of_sink(iceberg="a.t", catalog={"type": "sql"}),
    "files of a pipeline": of_sink(files="f"),
}


def row(first: str) -> str:
    """Return the last cell of the one row of the README whose first cell begins so."""
    [found] = re.findall(rf"^\| {re.escape(first)}[^|]*\| ([^|]*) \|$", README, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("what", NAMES)
def test_the_readme_has_the_names_of_the_code(what: str) -> None:
    """A row names all that the code has, and nothing else."""
    assert [set(re.findall("`([^`]+)`", row(what)))] * len(NAMES[what]) == NAMES[what]


def test_the_page_on_formats_has_the_list_of_formats() -> None:
    """Its tables have every format and its numbers; the package has an extra for each with a schema."""
    page = (ROOT / "docs" / "formats.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)) == {*FORMATS}
    for codes, field in (("documented", "code"), ("light-4j", "light_4j_code")):
        names = sorted(FORMATS, key=lambda name, field=field: getattr(FORMATS[name], field))
        assert f"| `{codes}` | {' | '.join(names)} |" in page
    project = tomllib.loads((ROOT / "packages/headrace/pyproject.toml").read_text())["project"]
    assert SCHEMA_TYPES.keys() <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("destination", GUARANTEES)
def test_the_readme_has_the_guarantee_of_each_destination(destination: str) -> None:
    """A row says `at least once`, `exactly once`, or both, where the code offers both."""
    assert words(row(destination).replace("`delivery: exactly_once`", "")) == GUARANTEES[destination]


def test_files_of_the_readme_have_one_block_each() -> None:
    """Whoever saves the blocks as they are overwrites none of them."""
    names = re.findall(r"^```\w+\n(?:#|//|--) ([\w./]+)$", README, re.MULTILINE)
    assert "headrace.yaml" in names
    assert len(names) == len(set(names))


def named_in_the_architecture() -> Iterator[tuple[str, str]]:
    """Yield each file that decides, and each name behind it."""
    deciding = ARCHITECTURE.split("## Which file decides")[1].split("\n## ")[0]
    for cell in re.findall(r"^\| [^|]+ \| ([^|]+) \|$", deciding, re.MULTILINE):
        file = ""
        for name in re.findall("`([^`]+)`", cell):
            file = name if re.fullmatch(r"[\w/]+(\.py|\.csv|/)", name) else file
            if file:
                yield file, name


def defined_in(path: Path) -> set[str]:
    """Return what a file defines: functions, classes, fields, constants, attributes; no import counts."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names.add(getattr(target, "id", None) or getattr(target, "attr", ""))
    return names


def test_files_of_the_architecture_page_define_the_names_behind_them() -> None:
    """Each file of "which file decides" exists, and defines each name behind it."""
    missing, sources = [], [*ROOT.glob("packages/*/src"), ROOT / "packages/headrace/src/headrace"]
    for file, name in named_in_the_architecture():
        path = next((source / file for source in sources if (source / file).exists()), ROOT / file)
        if name == file:
            missing += [] if path.exists() else [(file, "")]
        elif path.suffix == ".py" and not {*name.split(".")} <= defined_in(path):
            missing.append((file, name))
    for page in ROOT.glob("packages/*/README.md"):
        own = page.parent / "src" / page.parent.name.replace("-", "_")
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", page.read_text()):
            missing += [(file, name) for name in re.findall(r"\w+", names) if name not in defined_in(own / file)]
    assert len([*named_in_the_architecture()]) > 30
    assert missing == []


def test_each_alert_has_its_section_of_the_runbook_and_names_commands_that_exist() -> None:
    """The annotation of an alert leads there."""
    page, commands = Path("docs/operations.md").read_text(), Path("docs/reference/cli.md").read_text()
    alerts = Path(headrace.runtime.telemetry.__file__).with_name("alerts.yaml").read_text()
    names = re.findall(r"- alert: (\w+)", alerts)
    assert names == [name for name in re.findall(r"^## (\w+)$", page, re.MULTILINE) if name.startswith("Headrace")]
    for command in re.findall(r"`(headrace [a-z ]+)", alerts):
        assert f"## {command.strip()}\n" in commands
