"""The mappings of a function file: keys in any letter case, values by their known names, problems with their line."""

import logging
import re
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.consumers import RetryConfig
from headrace.config.explain import explain
from headrace.config.membership import ConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.spelling import hint, nearest
from headrace.config.yaml_tree import KeyPath, Problems
from headrace.functions.function_keys import IGNORED, keys_of, read_keys_of

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_MISSPELT = 0.8
"""Similarity to a key that is read from which an unknown key is an error; other unknown keys are warnings."""
_PROTECTION = ("tls", "sasl", "oauth")
"""Mappings in which an unknown key is an error: perhaps it should protect the connection."""

_SECTIONS: dict[str, type[BaseModel]] = {"retry": RetryConfig, "consumer": ConsumerConfig}
"""Attributes that are sections of headrace.yaml."""


class FileSection:
    """One mapping of the file: values by their known names, and where each is in the file."""

    def __init__(self, path: KeyPath) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.paths: dict[str, KeyPath] = {}

    def take(self, name: str, other: "FileSection", other_name: str = "") -> None:
        """Copy a value from another part of the file."""
        self.values[name], self.paths[name] = other.values[other_name or name], other.paths[other_name or name]

    def path_of(self, name: str) -> KeyPath:
        return self.paths.get(name, (*self.path, name))


class FileReader:
    """Reads the mappings of a parsed file, and reports what is wrong or has no effect."""

    def __init__(self, tree: Any, problems: Problems, file: Path, config: HeadraceConfig | None) -> None:
        self.tree = tree
        self.problems = problems
        self.wrong = problems.report
        """Reports a problem at a path."""
        self.config = config
        """None if clusters are not compared."""
        self.file = file
        """Relative paths start from its folder."""
        self.annotations = FileSection(())
        """Annotations of the function for Kafka, without the prefix `nuclio.io/kafka-`."""

    def below(self, section: FileSection, name: str, known: str = "", *, any_name: bool = False) -> FileSection:
        """Return the mapping below a key; its known names are those of `known`, by default of the key."""
        return self.section(section.path_of(name), section.values.get(name, {}), "" if any_name else known or name)

    def section(self, path: KeyPath, found: Any, known: str, prefix: str = "") -> FileSection:
        """Return the mapping at a path with its known names, or all names if `known` is empty; report the others."""
        section = FileSection(path)
        if not isinstance(found, dict):
            self.wrong(path, "should be a mapping: write name: value, a line for each")
            return section
        keys = keys_of(known) if known else {}
        names = {name.lower(): name for name in keys}
        for written, value in found.items():
            name = names.get(written.lower()) if known else written
            if name is None and known in _PROTECTION:
                self.wrong((*path, written), f"is not known: known here are {', '.join(read_keys_of(known))}")
            elif name is None:
                self._judge_unknown((*path, prefix + written), written, known)
            elif value != "":  # in Go, the same as a missing value
                section.values[name], section.paths[name] = value, (*path, prefix + written)
        if idle := [prefix + name for name in section.values if known and keys[name].becomes == IGNORED]:
            self.warn(path, f"without effect in Headrace: {', '.join(idle)}")
        return section

    def _judge_unknown(self, path: KeyPath, written: str, known: str) -> None:
        misspelt = nearest(written, read_keys_of(known), _MISSPELT)
        other = "trigger" if known.startswith("attributes") else "attributes" if known == "trigger" else ""
        if written == "security":
            self.wrong(path, "is a section of headrace.yaml: write tls and sasl here")
        elif other and written.lower() in map(str.lower, read_keys_of(other)):
            where = "under attributes" if other == "attributes" else "one level up, at the trigger"
            self.wrong(path, f"has no effect here: write it {where}")
        elif misspelt:
            prefix = str(path[-1]).removesuffix(written)
            self.wrong(path, f"is not known; did you mean {prefix}{misspelt}?")
        else:
            likely = nearest(written, keys_of(known))
            hint = f"; did you mean {likely}?" if likely else ""
            self.warn(path, f"is not known and has no effect{hint}")

    def model(self, model: type[M], section: FileSection, **values: Any) -> M | None:
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

    def warn(self, path: KeyPath, sentence: str) -> None:
        """Log a warning about what is at a path."""
        log.warning(self.problems.located(path, sentence))


def _explain_more(error: ErrorDetails) -> None:
    """Name the known keys of a section, and the unit of a limit."""
    if error["type"] == "extra_forbidden":
        section, written = (str(part) for part in error["loc"][-2:])
        known = _SECTIONS[section].model_fields
        error["type"] = "value_error"
        error["msg"] = f"is not known: {hint(written, known)}"
    elif any(isinstance(limit, float) for limit in error.get("ctx", {}).values()):
        error["msg"] += " s"
