"""The configuration for people: errors as sentences with location and remedy, masked values, and the JSON Schema."""

from collections.abc import Collection, Iterable
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headrace.config.kafka import CONSUMER_KEYS, PRODUCER_KEYS, instead_of
from headrace.config.known_secrets import MASK, without_users
from headrace.config.model import HeadraceConfig
from headrace.config.references import is_secret_name
from headrace.config.section import Section
from headrace.config.spelling import hint
from headrace.config.whole_file import WholeFile
from headrace.config.yaml_tree import KeyPath, Problems
from headrace.extras import guest_missing


def masked(config: HeadraceConfig) -> dict[str, Any]:
    """Return every effective value as in JSON, with secrets (by type) masked, and what `mask` masks."""
    shown: dict[str, Any] = mask(_without_constants(config, config.model_dump(mode="json")))
    return shown


def _without_constants(value: Any, dumped: Any) -> Any:
    """Return what was dumped of a value, without the fields that no file sets."""
    if isinstance(value, Section):
        fields = {type(value).model_fields[name].alias or name: item for name, item in value}
        fields |= dict(value)
        hidden = value.internal - value.model_fields_set
        return {name: _without_constants(fields[name], item) for name, item in dumped.items() if name not in hidden}
    if isinstance(value, dict) and isinstance(dumped, dict):
        return {name: _without_constants(value.get(name), item) for name, item in dumped.items()}
    return dumped


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors and checks.

    Source: JSON Schema 2020-12.
    """
    return document_schema("headrace.yaml", WholeFile.model_json_schema())


def document_schema(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema as a document with dialect and id; the name is that of the files it describes."""
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:headrace:schema:{name}"}
    return {**about, **schema}


def mask(value: Any, name: str = "") -> Any:
    """Return a value of the configuration with secrets (by name), headers, logins and queries of URLs masked."""
    if isinstance(value, dict) and name == "headers":
        return dict.fromkeys(value, MASK)  # any of them may be a key of the backend
    if isinstance(value, dict):
        return {key: mask(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [mask(item, name) for item in value]
    if value and is_secret_name(name):
        return MASK
    if not isinstance(value, str):
        return value
    address, query, _ = value.partition("?") if name.endswith(("url", "path")) else (value, "", "")
    return without_users(f"{address}?{MASK}" if query else value)


_TABLES = {
    "producer": (PRODUCER_KEYS, CONSUMER_KEYS),
    "reactive_consumers": (CONSUMER_KEYS,),
    "queries": (CONSUMER_KEYS,),
    "schema_registry": (PRODUCER_KEYS,),
}
"""Sections in which people write keys of Java's clients, and the tables of these keys."""


AnySection = TypeVar("AnySection", bound=Section)


def validated(
    model: type[AnySection], tree: Any, problems: Problems, reported: Collection[KeyPath] = ()
) -> AnySection | None:
    """Return a tree as a section; None if it is not valid, with the problems added as by `explain`."""
    try:
        return model.model_validate(tree)
    except ValidationError as cause:
        explain(cause.errors(include_url=False, include_input=False), tree, problems, reported, model)
        return None


def explain(
    errors: list[ErrorDetails],
    tree: Any,
    problems: Problems,
    reported: Collection[KeyPath] = (),
    model: type[Section] = WholeFile,
) -> None:
    """Turn the errors of a model that validated a tree into problems with location, path and remedy.

    Paths in `reported` already have a problem and are skipped. No value is shown, because it may be a secret.
    """
    seen = set(reported)
    for error in errors:
        location = tuple(part for part in error["loc"] if not str(part).startswith("<"))  # tags of unions
        path = _in_tree(location, tree)
        shown = location if error["type"] == "missing" else path
        if shown in seen:  # a union reports once per kind of value
            continue
        seen.add(shown)
        problems.add(problems.location_of(path), shown, _sentence(error, path, model))


def _sentence(error: ErrorDetails, path: KeyPath, model: type[Section]) -> str:
    if error["type"] == "extra_forbidden":
        tables = _TABLES.get(str(path[0]))
        if tables and (text := instead_of(str(path[-1]), *tables)):
            return text
        if missing := guest_missing(f"section {'.'.join(map(str, path))}", "it"):
            return missing.description
        known = known_keys(path[:-1], model)
        if path[-1] in known:
            return "does not belong with the other keys of this section: keep one kind of keys"
        return _unknown(path[-1], known)
    if error["type"] == "missing":
        return "is missing and has no default: add it"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        return f"is not valid (allowed: {error['ctx']['pattern']}): correct it"
    if error["type"] == "too_short":
        return f"should have {error['ctx']['min_length']} or more entries: add one"
    if error["type"] in ("bool_type", "bool_parsing"):
        return "is neither true nor false: write one of them"
    if error["type"] in ("model_type", "dict_type"):
        return "should be a map of settings, each written as `name: value`: correct it"
    unit = str(path[-1]).rpartition("_")[2]
    if error["type"] in ("int_parsing", "float_parsing") and unit in ("bytes", "seconds"):
        return f"should be the number of {unit}, without a unit: correct it"
    text = error["msg"].removeprefix("Input ")
    if error["type"] == "string_type":
        return f"{text}: put the value in quotes"
    return f"{text}: correct the value"


def _unknown(key: object, known: Iterable[str]) -> str:
    return f"unknown key: {hint(str(key), known)}"


def refuse_constants(kind: Any, tree: Any, problems: Problems, path: KeyPath = ()) -> None:
    """Report the keys of a tree that no file may set, as unknown ones, and remove them from it."""
    sections, entry = _sections_of(kind), (get_args(kind) or (None,))[-1]
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            refuse_constants(entry, item, problems, (*path, index))
    if not isinstance(tree, dict):
        return
    if len(sections) > 1:  # a key that only it requires tells the kind
        sections = [each for each in sections if _required_of(each) & tree.keys()] or sections
    for key in [*tree]:
        owners = [section for section in sections if key in section.model_fields]
        if owners and all(key in section.internal for section in owners):
            problems.report((*path, key), _unknown(key, _settings_of(sections)))
            del tree[key]
        else:
            below = owners[0].model_fields[key].annotation if owners else entry
            refuse_constants(below, tree[key], problems, (*path, key))


def _required_of(section: type[Section]) -> set[str]:
    return {field.alias or name for name, field in section.model_fields.items() if field.is_required()}


def _in_tree(location: KeyPath, tree: Any) -> KeyPath:
    """Return the part of a validation error's location that exists in the tree."""
    path: KeyPath = ()
    for part in location:
        inside = isinstance(tree, dict) and part in tree
        if not inside and not (isinstance(tree, list) and isinstance(part, int) and part < len(tree)):
            break
        tree, path = tree[part], (*path, part)
    return path


def known_keys(path: KeyPath, model: type[Section] = WholeFile) -> list[str]:
    """Return the names that the model has at a path; empty if any name is allowed."""
    kind: Any = model
    for part in path:
        if found := _sections_of(kind):
            kind = next((field.annotation for each in found if (field := each.model_fields.get(str(part)))), None)
        else:  # a list, or a map of names
            kind = (get_args(kind) or (None,))[-1]
    return _settings_of(_sections_of(kind))


def _settings_of(sections: Iterable[type[Section]]) -> list[str]:
    """Return the keys that a file may have in one of these sections."""
    names = [
        field.alias or name
        for each in sections
        for name, field in each.model_fields.items()
        if name not in each.internal
    ]
    return list(dict.fromkeys(names))


def _sections_of(kind: Any) -> list[type[Section]]:
    """Return the sections that a type allows: one, or those of a union."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind]
    if get_origin(kind) in (dict, list):
        return []
    return [section for part in get_args(kind) for section in _sections_of(part)]
