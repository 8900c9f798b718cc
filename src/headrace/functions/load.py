"""From a function.yaml to its spec: keys in any letter case, annotations, and problems with their line."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headrace.config import yaml_tree
from headrace.config.explain import explain, place_of
from headrace.config.yaml_tree import Problems, dotted, read_text, read_tree
from headrace.errors import FunctionInvalid
from headrace.functions.spec import Attributes, FunctionSpec, KafkaTrigger

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_KAFKA_KINDS = ("kafka-cluster", "kafka")
_ACK_MODE = "nuclio.io/kafka-explicit-ack-mode"
_ANNOTATED = (
    "sessionTimeout",
    "heartbeatInterval",
    "maxWaitTime",
    "fetchMin",
    "fetchDefault",
    "workerAllocationMode",
    "ordering",
)
"""Attributes that an annotation may stand in for: `nuclio.io/kafka-session-timeout` for `sessionTimeout`."""


_TRIGGER_READ = ("kind", "disabled", "numWorkers", "maxWorkers", "workerTerminationTimeout", "explicitAckMode")
_ATTRIBUTES_READ = [field.alias or name for name, field in Attributes.model_fields.items()]
_KEYS = yaml.safe_load(Path(__file__).with_name("nuclio_keys.yaml").read_text())


def load_function(file: Path) -> FunctionSpec:
    """Return what a function file says. Keys nobody knows are logged, as Nuclio ignores them.

    Args:
        file: The file, or the folder that holds a `function.yaml`.

    Raises:
        FunctionInvalid: The file cannot be read or a value is wrong; names file, line, path, and what to write.
    """
    file = (file / "function.yaml" if file.is_dir() else file).absolute()
    problems = Problems()
    text = read_text(file, FunctionInvalid, "Check the path under functions")
    tree, places = read_tree(text, str(file), problems)
    if problems.found:
        raise FunctionInvalid("; ".join(problems.found))
    return _File(tree, {**places, (): str(file)}).function(file.parent)


class _Section:
    """One mapping of the file: values by the names we know them by, and where each was written."""

    def __init__(self, path: yaml_tree.Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.paths: dict[str, yaml_tree.Path] = {}

    def take(self, name: str, other: _Section, other_name: str = "") -> None:
        """Take a value over from another place of the file."""
        self.values[name], self.paths[name] = other.values[other_name or name], other.paths[other_name or name]

    def path_of(self, name: str) -> yaml_tree.Path:
        return self.paths.get(name, (*self.path, name))


class _File:
    """A function file that has been parsed."""

    def __init__(self, tree: Any, places: dict[yaml_tree.Path, str]) -> None:
        self._tree = tree
        self._places = places

    def function(self, folder: Path) -> FunctionSpec:
        top = self._section((), self._tree, _KEYS["top"])
        metadata = self._below(top, "metadata", _KEYS["metadata"])
        spec = self._below(top, "spec", _KEYS["spec"])
        annotations = self._below(metadata, "annotations")
        spec.paths |= metadata.paths
        spec.values = {"name": folder.name, **spec.values, **metadata.values, "folder": folder}
        if isinstance(entries := spec.values.get("env"), list):
            sections = [
                self._section((*spec.paths["env"], index), entry, ("name", "value"), ("valueFrom",))
                for index, entry in enumerate(entries)
            ]
            spec.values["env"] = [section.values for section in sections]
        triggers = self._below(spec, "triggers")
        found = [self._trigger(triggers, name, annotations) for name in triggers.values]
        spec.values["triggers"] = [trigger for trigger in found if trigger]
        function = self._model(FunctionSpec, spec)
        if not function.triggers:
            sentence = "has no Kafka trigger: add one of kind kafka-cluster with topics and consumerGroup"
            raise FunctionInvalid(self._told(triggers.path, sentence))
        return function

    def _trigger(self, triggers: _Section, name: str, annotations: _Section) -> KafkaTrigger | None:
        trigger = self._below(triggers, name, _KEYS["trigger"], _KEYS["ignored"]["trigger"])
        kind = trigger.values.get("kind", "")
        if trigger.values.get("disabled") is True:
            return None
        if kind not in _KAFKA_KINDS:
            log.warning("trigger %s is of kind %r: Headrace runs %s", name, kind, " and ".join(_KAFKA_KINDS))
            return None
        attributes = self._below(trigger, "attributes", _ATTRIBUTES_READ, _KEYS["ignored"]["attributes"])
        for key in _ANNOTATED:
            annotation = "nuclio.io/kafka-" + re.sub("([A-Z])", r"-\1", key).lower()
            if annotation in annotations.values and key not in attributes.values:
                attributes.take(key, annotations, annotation)
        if "url" in trigger.values and not attributes.values.get("brokers"):
            attributes.values["brokers"], attributes.paths["brokers"] = [trigger.values["url"]], trigger.paths["url"]
        for key in _TRIGGER_READ:
            if key in trigger.values:
                attributes.take(key, trigger)
        attributes.values["name"], attributes.paths["name"] = name, trigger.path
        if annotations.values.get(_ACK_MODE) in ("enable", "explicitOnly"):  # this annotation wins over the key
            attributes.take("explicitAckMode", annotations, _ACK_MODE)
        return self._model(KafkaTrigger, attributes)

    def _below(
        self, section: _Section, name: str, known: Collection[str] | None = None, ignored: Collection[str] = ()
    ) -> _Section:
        return self._section(section.path_of(name), section.values.get(name, {}), known, ignored)

    def _section(
        self, path: yaml_tree.Path, found: Any, known: Collection[str] | None, ignored: Collection[str] = ()
    ) -> _Section:
        """Return the mapping at a path by the names that are known, None for any; log the others and the ignored."""
        if not isinstance(found, dict):
            raise FunctionInvalid(self._told(path, "should be a mapping of names to values"))
        section = _Section(path)
        names = {name.lower(): name for name in (*(known or ()), *ignored)}
        for written, value in found.items():
            name = names.get(written.lower()) if known is not None else written
            if name is None:
                near = difflib.get_close_matches(written.lower(), names, 1)
                hint = f"; did you mean {names[near[0]]}?" if near else ""
                log.warning(self._told((*path, written), f"is not known and has no effect{hint}"))
            elif value != "":  # Go's way to say that nothing was written
                section.values[name], section.paths[name] = value, (*path, written)
        if idle := [name for name in section.values if name in ignored]:
            log.warning(self._told(path, f"without effect in Headrace: {', '.join(idle)}"))
        return section

    def _model(self, model: type[M], section: _Section) -> M:
        try:
            return model.model_validate(section.values)
        except ValidationError as cause:
            errors = cause.errors(include_url=False, include_input=False)
            for error in errors:
                first, *rest = error["loc"] or ("",)
                error["loc"] = (*section.path_of(str(first)), *rest) if first else section.path
            problems = Problems()
            explain(errors, self._tree, self._places, set(), problems)
            raise FunctionInvalid("\n".join(problems.found)) from None

    def _told(self, path: yaml_tree.Path, sentence: str) -> str:
        return ": ".join(part for part in (place_of(path, self._places), dotted(path), sentence) if part)
