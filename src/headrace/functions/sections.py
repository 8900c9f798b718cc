"""The mappings of a function file: keys in any letter case, values by their known names, problems with their line."""

import csv
import difflib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.consumers import RetryConfig
from headrace.config.explain import explain
from headrace.config.membership import ConsumerConfig
from headrace.config.yaml_tree import KeyPath, Problems
from headrace.functions.triggers.trigger_security import SETTINGS

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_NEAR = 0.8
"""Similarity from which a name counts as a misspelt one."""
_PROTECTION = ("tls", "sasl", "oauth")
"""Mappings in which an unknown key is an error: perhaps it should protect the connection."""

_SECTIONS: dict[str, type[BaseModel]] = {"retry": RetryConfig, "consumer": ConsumerConfig}
"""Settings of headrace.yaml among the attributes."""
_KEYS = yaml.safe_load(Path(__file__).with_name("nuclio_keys.yaml").read_text())
OTHER_KINDS: Final[Sequence[str]] = _KEYS.pop("other_kinds")
"""Kinds of triggers that Nuclio has besides."""
OTHER_ANNOTATIONS: Final[Mapping[str, str]] = _KEYS.pop("other_annotations")
"""Annotations without the prefix, and what each stands for behind it."""
with Path(__file__).with_name("trigger_keys.csv").open(newline="") as _file:
    _TABLE = list(csv.DictReader(_file))
ANNOTATED: Final = {row["key"]: row["annotation"] for row in _TABLE if row["annotation"]}
"""Keys that an annotation may stand in for: `nuclio.io/kafka-session-timeout` for `sessionTimeout`."""
for _row in _TABLE:
    _KEYS[_row["mapping"]]["read"].append(_row["key"])
_KEYS["annotations"]["read"] += [*ANNOTATED.values(), *(annotation for annotation, _ in SETTINGS.values())]
for _name in SETTINGS:
    _KEYS[_name.split(".")[-2] if "." in _name else "attributes"]["read"].append(_name.split(".")[-1])
ANNOTATIONS: Final[Sequence[str]] = _KEYS["annotations"]["read"]
"""What is known behind the prefix."""
TRIGGER_KEYS: Final[Sequence[str]] = _KEYS["trigger"]["read"]


def near(written: str, known: Iterable[str], similarity: float = _NEAR) -> str:
    """Return the known name that was probably intended; empty if none is similar."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(written.lower(), names, 1, similarity)
    found += [name for name in names if similarity < 1 and sorted(name) == sorted(written.lower())]
    return names[found[0]] if found else ""


class Section:
    """One mapping of the file: values by their known names, and where each is in the file."""

    def __init__(self, path: KeyPath) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.paths: dict[str, KeyPath] = {}

    def take(self, name: str, other: "Section", other_name: str = "") -> None:
        """Copy a value from another part of the file."""
        self.values[name], self.paths[name] = other.values[other_name or name], other.paths[other_name or name]

    def path_of(self, name: str) -> KeyPath:
        return self.paths.get(name, (*self.path, name))


class FileReader:
    """Reads the mappings of a file that has been parsed, and reports what is wrong with them or has no effect."""

    def __init__(self, tree: Any, problems: Problems) -> None:
        self.tree = tree
        self.problems = problems
        self.wrong = problems.report
        """Reports a problem at a path."""

    def below(self, section: Section, name: str, known: str = "", *, any_name: bool = False) -> Section:
        """Return the mapping below a key; its known names are those of `known`, by default of the key."""
        return self.section(section.path_of(name), section.values.get(name, {}), "" if any_name else known or name)

    def section(self, path: KeyPath, found: Any, known: str, prefix: str = "") -> Section:
        """Return the mapping at a path by the names that are known, all if `known` is empty; judge the others."""
        section = Section(path)
        if not isinstance(found, dict):
            self.wrong(path, "should be a mapping: write name: value, a line for each")
            return section
        keys = _KEYS.get(known, {})
        ignored = keys.get("ignored", ())
        names = {name.lower(): name for kind in keys.values() for name in kind}
        for written, value in found.items():
            name = names.get(written.lower()) if known else written
            if name is None and known in _PROTECTION:
                self.wrong((*path, written), f"is not known: known here are {', '.join(keys['read'])}")
            elif name is None:
                self._judge_unknown((*path, prefix + written), written, known, names)
            elif value != "":  # Go's way to say that nothing was written
                section.values[name], section.paths[name] = value, (*path, prefix + written)
        if idle := [prefix + name for name in section.values if name in ignored]:
            self.warn(path, f"without effect in Headrace: {', '.join(idle)}")
        return section

    def _judge_unknown(self, path: KeyPath, written: str, known: str, names: dict[str, str]) -> None:
        read = _KEYS[known]["read"]
        misspelt = near(written, read)
        other = {"attributes": "trigger", "http": "trigger", "trigger": "attributes"}.get(known, "")
        if written == "security":
            self.wrong(path, "is a section of headrace.yaml: write tls and sasl here")
        elif other and near(written, _KEYS[other]["read"], 1.0):
            where = "under attributes" if other == "attributes" else "one level up, at the trigger"
            self.wrong(path, f"has no effect here: write it {where}")
        elif misspelt:
            prefix = str(path[-1]).removesuffix(written)
            self.wrong(path, f"is not known; did you mean {prefix}{misspelt}?")
        else:
            likely = difflib.get_close_matches(written.lower(), names, 1)
            hint = f"; did you mean {names[likely[0]]}?" if likely else ""
            self.warn(path, f"is not known and has no effect{hint}")

    def model(self, model: type[M], section: Section, **values: Any) -> M | None:
        """Return the model of a section and of further values; None if a value is wrong, which is reported."""
        try:
            return model.model_validate(section.values | values)
        except ValidationError as cause:
            errors = cause.errors(include_url=False, include_input=False)
            for error in errors:
                _explain_more(error)
                key = error["loc"][1:] if error["loc"][:1] == ("kafka",) else error["loc"]  # no key of the file
                words = re.findall(r"\w+", error["msg"]) if error["type"] == "value_error" else []
                first, *rest = key or (next((word for word in words if word in section.paths), ""),)
                error["loc"] = (*section.path_of(str(first)), *rest) if first else section.path
            explain(errors, self.tree, self.problems)
            return None

    def judge_idle(self, section: Section, mapping: str, *made: BaseModel) -> None:
        """Name what is written and has no effect, but for defaults; `made` are the models of the section."""
        for row in _TABLE:
            key, (kind, _, why) = row["key"], row["becomes"].partition(": ")
            if row["mapping"] not in (mapping, "trigger" * (mapping != "spec")) or key not in section.paths:
                continue
            fields = ((part, name) for part in made for name in type(part).model_fields)
            found = next(((p, n) for p, n in fields if (type(p).model_fields[n].alias or n) == key), None)
            if kind == "nothing" and (not found or getattr(*found) != type(found[0]).model_fields[found[1]].default):
                self.warn(section.paths[key], f"has no effect in Headrace: {why}")

    def warn(self, path: KeyPath, sentence: str) -> None:
        """Log a warning about what is at a path."""
        log.warning(self.problems.located(path, sentence))


def _explain_more(error: ErrorDetails) -> None:
    """Name the known keys of a section, and the unit of a limit."""
    if error["type"] == "extra_forbidden":
        section, written = (str(part) for part in error["loc"][-2:])
        known = _SECTIONS[section].model_fields
        other = near(written, known)
        error["type"] = "value_error"
        error["msg"] = (
            f"is not known; did you mean {other}?" if other else f"is not known: known are {', '.join(known)}"
        )
    elif any(isinstance(limit, float) for limit in error.get("ctx", {}).values()):
        error["msg"] += " s"
