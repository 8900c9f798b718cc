"""Writes the pages that are made from the code: `make docs`, or `python -m docs.generate`.

A test compares what is on disk with `pages()`, so a page that is out of date fails the build.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.planted_bugs import planted_bugs_page
from headrace.app.documents import every_endpoint
from headrace.cli.main import root
from headrace.config.explain import json_schema
from headrace.config.kafka import CONSUMER_KEYS, PRODUCER_KEYS, Key
from headrace.config.kafka_java import BY_PROPERTY
from headrace.errors import HeadraceError, catalogue
from headrace.functions.file_values import Duration
from headrace.functions.function_keys import KEYS, LOGIN, FunctionKey
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.kafka_trigger import KafkaAttributes, KafkaTrigger
from headrace.functions.triggers.trigger_kinds import KINDS
from headrace.runtime.telemetry.metrics import CATALOGUE, OUTCOMES
from headrace_dialects.light4j.key_table import ROWS as LIGHT_4J_KEYS
from headrace_pipelines.spec import PipelineSpec

ROOT = Path(__file__).parents[1]
CORE = ROOT / "packages" / "headrace" / "src" / "headrace"
GUESTS = sorted(path for path in ROOT.glob("packages/headrace-*/src/*") if path.is_dir() and path.suffix != ".egg-info")
REFERENCE = ROOT / "docs" / "reference"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAP_MARKS = ("<!-- file map: begin, written by make docs -->", "<!-- file map: end -->")

_MADE = "This page is written by `make docs`; change the code it is made from.\n"
_WIDTH = 100
_OPEN_FIRST = {
    "app": "app listeners",
    "cli": "main reactive",
    "config": "model load",
    "consumers": "running_consumer",
    "commands": "consumer_control registration_table",
    "runs": "window_run jobs",
    "runs/dead_letters": "pages completed_offsets",
    "delivery": "pump lane schedule tracker policy dead_letter outcomes",
    "formats": "choice plain registry",
    "functions": "workers destination process spec",
    "functions/triggers": "kafka_trigger",
    "functions/worker": "loop handler",
    "kafka": "consumer poll_thread producer commits compacted_table admin",
    "kafka/transactions": "producers",
    "runtime": "supervisor service clock",
    "sidecar/produce": "routes produce produce_request",
    "sidecar/active": "routes instance",
    "sidecar/reactive": "http_destination client",
    "runtime/telemetry": "metrics audit",
    "http": "server application endpoint",
    "http/auth": "authenticator principals",
}
"""The files of a package that a newcomer opens first."""

Schema = Mapping[str, Any]


def pages() -> dict[Path, str]:
    """Return every page that is made from the code: file to text."""
    return {
        REFERENCE / "configuration.md": configuration_page(),
        REFERENCE / "errors.md": errors_page(),
        REFERENCE / "metrics.md": metrics_page(),
        REFERENCE / "scopes.md": scopes_page(),
        REFERENCE / "producer-keys.md": producer_keys_page(),
        REFERENCE / "consumer-keys.md": consumer_keys_page(),
        REFERENCE / "light4j-keys.md": light4j_keys_page(),
        REFERENCE / "function-keys.md": function_keys_page(),
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "planted-bugs.md": planted_bugs_page(_MADE),
        REFERENCE / "headrace.schema.json": json.dumps(json_schema(), indent=2) + "\n",
        ARCHITECTURE: with_file_map(ARCHITECTURE.read_text()),
    }


# Settings ------------------------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Return every setting of `headrace.yaml` and of a pipeline file with type, default and meaning."""
    parts = [
        "# Settings\n",
        _MADE,
        "How files, references and the environment work together is in [configuration](../configuration.md).",
        "`headrace.schema.json` in this folder is the JSON Schema of `headrace.yaml`.",
        "Durations are in seconds and sizes in bytes or records, as the end of a name says.\n",
        "## headrace.yaml\n",
        *_sections(json_schema()),
        "## A pipeline file\n",
        "What the settings do together is in [pipelines](../pipelines.md).\n",
        *_sections(PipelineSpec.model_json_schema(by_alias=True)),
        "## A function file\n",
        "`function.yaml` is Nuclio's format; its keys are in [function keys](function-keys.md).",
    ]
    return "\n".join(parts) + "\n"


def _sections(schema: Schema) -> Iterator[str]:
    """Yield one table per part of the file: first the settings at its top, then each part below it.

    A part with the settings of an earlier one refers to it.
    """
    waiting: list[tuple[str, Schema, str, str]] = [("", schema, "", "")]
    listed: dict[int, str] = {}
    while waiting:
        path, node, text, kind = waiting.pop(0)
        if (first := listed.setdefault(id(node), path)) != path:
            yield f"### `{path}`{kind}\n\n{text} Its settings are those of `{first}`.\n"
            continue
        rows, below = [], []
        for name, setting in node["properties"].items():
            where = f"{path}.{name}" if path else name
            models = _models_below(schema, setting)
            step = f"{where}.<name>" if _entry(setting) else where
            for model in models:
                alone = len(models) == 1 and setting.get("description")
                below.append((step, model, alone or model["description"], _kind_of(model, models)))
            if not models:
                required = name in node.get("required", ())
                rows.append(_setting_row(where, setting, required))
        waiting = below + waiting
        if path:
            yield f"### `{path}`{kind}\n\n{text}\n"
        if rows:
            yield "\n".join(["| Setting | Type | Default | Meaning |", "|---|---|---|---|", *rows]) + "\n"


def _kind_of(model: Schema, models: list[Schema]) -> str:
    """Return the end of a section's heading if it is one of several: the first setting that only it requires."""
    others = [name for other in models if other is not model for name in other.get("required", ())]
    own = [name for name in model.get("required", ()) if name not in others]
    return f" with `{own[0]}`" if len(models) > 1 and own else ""


def _models_below(schema: Schema, setting: Schema) -> list[Schema]:
    """Return the sections that a setting may hold: none, one, or each of a union."""
    kinds = [setting, _entry(setting)]
    kinds += [kind for each in kinds for name in ("anyOf", "oneOf") for kind in each.get(name, ())]
    found = [schema["$defs"][kind["$ref"].rpartition("/")[2]] for kind in kinds if "$ref" in kind]
    return [model for model in found if "properties" in model]


def _entry(setting: Schema) -> Schema:
    """Return the schema of a map's values; empty if the setting is not a map."""
    entry: Schema = setting.get("additionalProperties") or next(iter(setting.get("patternProperties", {}).values()), {})
    return entry


def _setting_row(where: str, setting: Schema, required: bool) -> str:
    if "description" not in setting:
        raise SystemExit(f"{where} has no docstring in its model: add one, then run this again")
    default = "required" if required else f"`{json.dumps(setting.get('default', _empty(setting)))}`"
    cells = [f"`{where}`", _type_of(setting), default, setting["description"]]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _empty(setting: Schema) -> object:
    return {"array": [], "object": {}}.get(setting.get("type", ""))


def _type_of(setting: Schema) -> str:
    if "anyOf" in setting:
        kinds = (_type_of(part) for part in setting["anyOf"] if part.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds))
    if "const" in setting:
        return f"`{setting['const']}`"
    if "enum" in setting:
        return ", ".join(f"`{value}`" for value in setting["enum"])
    kind = setting.get("type", "")
    if kind == "array":
        return f"list of {_type_of(setting['items'])}"
    if kind == "object":
        return f"map to {_type_of(_entry(setting))}"
    if setting.get("format") in ("path", "password"):
        return {"path": "path", "password": "secret"}[setting["format"]]
    return {"string": "text", "boolean": "true or false"}.get(kind) or _number(setting, kind)


def _number(setting: Schema, kind: str) -> str:
    text = "whole number" if kind == "integer" else "number"
    if "exclusiveMinimum" in setting:
        return f"{text} above {setting['exclusiveMinimum']:g}"
    if "maximum" in setting:
        return f"{text} from {setting['minimum']} to {setting['maximum']}"
    return f"{text}, {setting['minimum']:,} or more" if "minimum" in setting else text


def producer_keys_page() -> str:
    """Return the table of the keys of Java's producer."""
    text = [
        "Where the keys of Kafka's Java producer are in `headrace.yaml`.",
        "One that is written into `producer`, its `properties` or `kafka.properties` is refused with the last column",
        "of this table, unless that names the map itself.\n",
    ]
    return _keys_page("Producer keys", text, "Java's producer", PRODUCER_KEYS)


def consumer_keys_page() -> str:
    """Return the table of the keys of Java's consumer."""
    text = [
        "Where the keys of Java's consumer are. The settings are those of a reactive consumer",
        "(`reactive_consumers.<name>`), or begin with the section of `headrace.yaml` they are in. Other keys:",
        "[light-4j](light4j-keys.md), [Nuclio](function-keys.md).",
        "Connection, TLS and SASL are in [producer keys](producer-keys.md); they are the same for both.\n",
    ]
    return _keys_page("Consumer keys", text, "Java's consumer", CONSUMER_KEYS)


def light4j_keys_page() -> str:
    """Return the table of every key of light-4j's files."""
    text = [
        "# Keys of a light-4j folder\n",
        _MADE,
        "How a folder is read is in [coming from light-4j](../coming-from.md#light-4j).",
        "*kept*: the default holds, also where Headrace has another; that of a login if the folder sets a part of it.",
        "*here*: what holds instead if the folder does not set the key, in the unit of the key.",
        "`*` is every other key of a file. *nothing*: the start and `headrace config check` list the key, with why.",
        "*refused*: such a key is an error if it is on. Settings that begin with `reactive.` and `query.` are those of",
        "`reactive_consumers.light4j` and `queries.ksqldb`; `active.` is `active_consumers`.\n",
        "| File | Key | Default of light-4j | Becomes |",
        "|---|---|---|---|",
    ]
    for row in LIGHT_4J_KEYS:
        becomes = ", ".join(f"`{name}`" for name in row.targets) or row.becomes
        default = f"`{row.default}`{', kept' if row.applied else ''}" if row.default else ""
        default += f"{', ' if default else ''}here {row.here}" if row.here else ""
        text.append(f"| {row.file} | `{row.key}` | {default} | {becomes} |")
    return "\n".join(text) + "\n"


def _keys_page(title: str, text: list[str], names: str, keys: Mapping[str, Key]) -> str:
    rows = [
        f"| `{name}` | {f'`{key.light_4j}`' if key.light_4j else ''} | {f'`{key.client}`' if key.client else ''} | "
        f"{key.setting} |"
        for name, key in keys.items()
    ]
    head = [f"| {names} | Default of light-4j | Client (librdkafka) | Headrace |", "|---|---|---|---|"]
    return "\n".join([f"# {title}\n", _MADE, *text, *head, *rows]) + "\n"


# Keys of function.yaml -----------------------------------------------------------------------------------------------


def function_keys_page() -> str:
    """Return what each key of a function file becomes: a property of the client, or a setting of the workers."""
    parts = [
        "# Function keys\n",
        _MADE,
        "How a function file works is in [functions](../function-reference.md#the-file).",
        "Keys are read in any letter case.",
        "An annotation is written below its key, and counts for every trigger that does not have the key.",
        "Names such as `session.timeout.ms` are properties of Kafka's client.",
        "Other keys of Nuclio's load too; one warning names those that have an effect there.\n",
    ]
    titles = {"spec": "`spec`", "trigger": "`spec.triggers.<name>`", "attributes": "`attributes`"}
    titles |= {
        kind.mapping: f"`attributes` of kind `{name}`" for name, kind in KINDS.items() if kind.mapping != "attributes"
    }
    for mapping, title in titles.items():
        parts += [f"## {title}\n", "| Key | Type | Default | Becomes |", "|---|---|---|---|"]
        parts += [*(_function_key_row(key) for key in KEYS if key.where == mapping and key.is_read), ""]
    parts += [
        "## TLS and login, in `attributes`\n",
        "Their types and rules are in [functions](../function-reference.md#tls-and-login-of-a-trigger).\n",
        "| Key | Setting of `kafka.security`, or property of `kafka.properties` |",
        "|---|---|",
        *(f"| {_key_cell(name, key.annotation)} | {_login_cell(key.becomes)} |" for name, key in LOGIN.items()),
    ]
    return "\n".join(parts) + "\n"


def _login_cell(becomes: str) -> str:
    by_property = BY_PROPERTY.get(becomes.strip("`"))
    return f"`{by_property[0]}`" if by_property else becomes


def _key_cell(key: str, annotation: str) -> str:
    prefix = "" if annotation.startswith("wait-") else "kafka-"
    return f"`{key}`<br>`nuclio.io/{prefix}{annotation}`" if annotation else f"`{key}`"


def _function_key_row(row: FunctionKey) -> str:
    kind, default = row.type, ""
    of_kind = next((each for each in KINDS.values() if each.mapping == row.where), KafkaTrigger)
    models: list[type[BaseModel]] = [FunctionSpec] if row.where == "spec" else [KafkaAttributes, of_kind]
    for model in models:
        for name, field in model.model_fields.items():
            if (field.alias or name) == row.key and not kind:
                kind, default = _field_cells(field, _schema_of(model)["properties"][row.key])
    return "| " + " | ".join([_key_cell(row.key, row.annotation), kind, default, row.becomes]) + " |"


@functools.cache
def _schema_of(model: type[BaseModel]) -> Schema:
    return model.model_json_schema()


def _field_cells(field: FieldInfo, setting: Schema) -> tuple[str, str]:
    """Return type and default of a key."""
    if "$ref" in setting or "$ref" in setting.get("items", ()):
        return "list" if "items" in setting else "mapping", ""
    if field.alias in ("name", "kind", "partitions", "disabled"):
        return "", ""
    value, kind = setting.get("default"), _type_of(setting)
    parts = [field.metadata, *(getattr(part, "__metadata__", ()) for part in get_args(field.annotation))]
    if any(Duration in metadata for metadata in parts):
        kind = re.sub(r"[\d.]+", lambda number: _go_duration(float(number[0])), kind.replace("number", "duration"))
        return kind, _go_duration(value) if value else ""
    return kind, "required" if field.is_required() else f"`{json.dumps(value)}`" if value not in (None, "", []) else ""


def _go_duration(seconds: float) -> str:
    """Return a duration as Go writes it."""
    units = (("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
    unit, length = next((one for one in units if seconds >= one[1]), units[-1])
    return f"{seconds / length:g}{unit}" if seconds else "0"


# Errors --------------------------------------------------------------------------------------------------------------


def errors_page() -> str:
    """Return the table of every error code."""
    rows = []
    for error in catalogue():
        if error.__module__ == HeadraceError.__module__:
            cases = [error, *(case for case in _cases_of(error) if case.message != error.message)]
            names = "<br>".join(case.message for case in cases)
            statuses = "<br>".join(str(case.status) for case in cases)
            again = "<br>".join("yes" if case.retriable else "no" for case in cases)
            rows.append(f"| {error.code} | {names} | {statuses} | {again} | {'<br>'.join(map(_first, cases))} |")
    parts = [
        "# Error codes\n",
        _MADE,
        "Every error response over HTTP has this body, and each response carries an `X-Correlation-Id`:\n",
        "```json",
        json.dumps(next(e for e in catalogue() if e.message == "KAFKA_TOPIC_NOT_FOUND")().body(), indent=2),
        "```\n",
        "`metadata.reason` is the name in lower case; further entries of `metadata` are facts for programs.",
        "*Again* says whether the same request may succeed when it is sent again unchanged.",
        "On the command line the description is printed; the exit code is 78 for a bad file, 1 for any other error.\n",
        "| Code | Name | HTTP status | Again | Meaning |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(parts) + "\n"


def scopes_page() -> str:
    """Return the table of every operation with the scopes and patterns that it needs."""
    rows = []
    for endpoint in every_endpoint():
        rule = endpoint.rule
        actions = [f"`{rule.action}:` of the {rule.parameter or 'body'}"] if rule.action else []
        actions += [f"`{rule.also}:` of the body"] if rule.also else []
        scopes = " or ".join(f"`{scope}`" for scope in rule.any_of) or "open"
        rows.append(f"| `{endpoint.method} {endpoint.path}` | {scopes} | {', '.join(actions)} |")
    parts = [
        "# Scopes of each operation\n",
        _MADE,
        "A caller without patterns needs one of the scopes. A caller with patterns needs all the patterns instead.",
        "*Body* stands for topics and groups that the body or the query names.",
        "How callers are authenticated is in [who may do what](../security.md).\n",
        "| Operation | Scope | Patterns |",
        "|---|---|---|",
        *rows,
    ]
    return "\n".join(parts) + "\n"


def _cases_of(error: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
    """Yield the kinds of an error that share its code."""
    for kind in error.__subclasses__():
        if "code" not in vars(kind):
            yield kind
            yield from _cases_of(kind)


def _first(error: type[HeadraceError]) -> str:
    return " ".join((error.__doc__ or "").split()).replace("|", "\\|")


# Metrics -------------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Return the table of every metric of `/metrics`."""
    rows = [
        f"| `{name}` | {kind} | {unit} | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, kind, unit, labels, text in CATALOGUE
    ]
    parts = [
        "# Metrics\n",
        _MADE,
        "`GET /metrics` shows these in Prometheus' text format, with the usual `process_` metrics.",
        "`kind` is `reactive`, `function` or `pipeline`; `consumer` is the name of a reactive consumer,",
        "`function.trigger` of a function, or `pipeline.flow` of a pipeline.",
        "The records of a consumer's retry topics count for that consumer.\n",
        "| Name | Type | Unit | Labels | Meaning |",
        "|---|---|---|---|---|",
        *rows,
        "\n## Outcomes\n",
        "The label `outcome` of `headrace_completed_records_total`:\n",
        "| Outcome | Meaning |",
        "|---|---|",
        *(f"| `{outcome}` | {meaning} |" for outcome, meaning in OUTCOMES.items()),
    ]
    return "\n".join(parts) + "\n"


# Commands ------------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the help of every command."""
    parts = [
        "# Commands\n",
        _MADE,
        "Commands that talk to Kafka look for it in this order: `--bootstrap-servers`, the file named by `--config`,",
        "the variables `KAFKA` and `SCHEMA_REGISTRY_URL`, the dev cluster of this folder, `localhost:9092`.\n",
    ]
    for words, text in _helps(root, "headrace", None):
        parts += [f"## {words}\n", "```text", text, "```\n"]
    return "\n".join(parts).rstrip() + "\n"


def _helps(command: click.Command, words: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    name = words.rpartition(" ")[2]
    context = click.Context(
        command, parent, info_name=name, terminal_width=_WIDTH, max_content_width=_WIDTH, **command.context_settings
    )
    yield words, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _helps(found, f"{words} {below}", context)


# Files ---------------------------------------------------------------------------------------------------------------


def with_file_map(page: str) -> str:
    """Return the architecture page with the file map as the files are now."""
    before, _, rest = page.partition(MAP_MARKS[0])
    after = rest.partition(MAP_MARKS[1])[2]
    return f"{before}{MAP_MARKS[0]}\n\n{file_map()}\n{MAP_MARKS[1]}{after}"


def file_map() -> str:
    """Return each package with its purpose, and the files to open first with the first sentence of each."""
    lines = [f"- `{name}`: {_purpose(CORE / name)}" for name in ("records.py", "errors.py", "feature.py")]
    for path in sorted(CORE.rglob("*/__init__.py")):
        package = path.parent.relative_to(CORE).as_posix()
        lines.append(f"- **`{package}/`** {_purpose(path)}")
        names = _OPEN_FIRST.get(package, "").split()
        lines += [f"  - `{package}/{name}.py`: {_purpose(path.with_name(f'{name}.py'))}" for name in names]
    for guest in GUESTS:
        lines.append(f"- **`{guest.name}/`** {_purpose(guest / '__init__.py')}")
        for path in sorted(guest.rglob("*/__init__.py")):
            lines.append(f"  - `{path.parent.relative_to(guest.parent)}/`: {_purpose(path)}")
    return "\n".join(lines) + "\n"


def _purpose(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return re.sub(r" Source: .*", "", first)


def main() -> None:
    """Write every page that has changed, and say which."""
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
