"""From a function.yaml to its spec: keys in any letter case, annotations, and problems with their line."""

from __future__ import annotations

import ast
import difflib
import logging
import re
import symtable
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from headrace.config.explain import explain, location_of
from headrace.config.kafka_security import KafkaSecurity, warnings_of
from headrace.config.model import HeadraceConfig
from headrace.config.yaml_tree import KeyPath, Problems, dotted, read_text, read_tree
from headrace.errors import FunctionInvalid
from headrace.functions.spec import AnyTrigger, FunctionSpec, KafkaAttributes, KafkaTrigger, Trigger
from headrace.functions.trigger_security import (
    SETTINGS,
    SecretFiles,
    SecurityReader,
    Written,
    cluster_problem,
    in_nuclio_names,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

_KAFKA_KINDS = ("kafka-cluster", "kafka")
_PREFIX = "nuclio.io/kafka-"
_OTHER_ANNOTATIONS = ("custom.nuclio.io/kafka-window-size", "nuclio.io/wait-explicit-ack-during-rebalance-timeout")
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
_PROTECTION = ("tls", "sasl", "oauth")
"""Mappings in which an unknown key is an error: perhaps it should protect the connection."""
_NEAR = 0.8
"""Similarity from which an unknown key counts as a misspelt one."""

_KEYS = yaml.safe_load(Path(__file__).with_name("nuclio_keys.yaml").read_text())
_TRIGGER_READ = [name for name in _KEYS["trigger"]["read"] if name not in ("url", "attributes")]
_KAFKA_KEYS = [field.alias or name for name, field in KafkaAttributes.model_fields.items() if name != "security"]
_KEYS["attributes"]["read"] += _KAFKA_KEYS
_KEYS["annotations"]["read"] += [annotation for annotation, _ in SETTINGS.values()]
for _name in SETTINGS:
    _KEYS[_name.split(".")[-2] if "." in _name else "attributes"]["read"].append(_name.split(".")[-1])
_KEYS["attributes"]["read"] += [
    key
    for name, field in Trigger.model_fields.items()
    if (key := field.alias or name) not in (*_KEYS["trigger"]["read"], "name")
]


def load_function(file: Path, config: HeadraceConfig | None = None, *, check_handler: bool = False) -> FunctionSpec:
    """Return the spec of a function file, and log the keys that have no effect.

    Args:
        file: The file, or the folder that holds a `function.yaml`.
        config: Names the cluster that triggers are compared with, and the folder of secrets; None for neither.
        check_handler: Also find the handler, without importing its module.

    Raises:
        FunctionInvalid: The file cannot be read or a value is wrong; one line per problem, in the order of the file.
    """
    file = (file / "function.yaml" if file.is_dir() else file).absolute()
    problems = Problems()
    text = read_text(file, FunctionInvalid, "Check the path under functions")
    tree, locations = read_tree(text, str(file), problems)
    function = None
    if not problems.found:
        found = _FunctionFile(tree, {**locations, (): str(file)}, problems, file, config)
        function = found.function(file.parent, check_handler)
    if problems.found or not function:
        raise FunctionInvalid("\n".join(problems.ordered))
    return function


class _Section:
    """One mapping of the file: values by their known names, and where each is in the file."""

    def __init__(self, path: KeyPath) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.paths: dict[str, KeyPath] = {}

    def take(self, name: str, other: _Section, other_name: str = "") -> None:
        """Copy a value from another part of the file."""
        self.values[name], self.paths[name] = other.values[other_name or name], other.paths[other_name or name]

    def path_of(self, name: str) -> KeyPath:
        return self.paths.get(name, (*self.path, name))


class _FunctionFile:
    """A function file that has been parsed."""

    def __init__(
        self, tree: Any, locations: dict[KeyPath, str], problems: Problems, file: Path, config: HeadraceConfig | None
    ) -> None:
        self._tree = tree
        self._locations = locations
        self._problems = problems
        self._config = config
        self._files = SecretFiles(file, {}, config.functions_secrets_dir if config else None)

    def function(self, folder: Path, check_handler: bool) -> FunctionSpec | None:
        top = self._section((), self._tree, "top")
        metadata, spec = self._below(top, "metadata"), self._below(top, "spec")
        annotations = self._annotations(metadata)
        spec.paths |= metadata.paths
        spec.values = {"name": folder.name, **spec.values, **metadata.values, "folder": folder}
        self._check_runtime(spec)
        if isinstance(entries := spec.values.get("env"), list):
            path = spec.paths["env"]
            sections = [self._section((*path, index), entry, "variable") for index, entry in enumerate(entries)]
            spec.values["env"] = [section.values for section in sections]
        self._files = self._files._replace(mounts=self._mounts(spec))
        triggers = self._below(spec, "triggers", any_name=True)
        found = [self._trigger(triggers, name, annotations) for name in triggers.values]
        spec.values["triggers"] = [trigger for trigger in found if trigger]
        function = self._model(FunctionSpec, spec)
        if function and not function.triggers and not self._problems.found:
            self._wrong(triggers.path, "has no Kafka trigger: add one of kind kafka-cluster with topics, consumerGroup")
        if function and check_handler and (why := handler_problem(function.handler, folder)):
            self._wrong(spec.path_of("handler"), why)
        return function

    def _check_runtime(self, spec: _Section) -> None:
        runtime = str(spec.values.get("runtime", "python"))
        if not runtime.startswith("python"):
            self._warn(spec.path_of("runtime"), f"is {runtime}, and Headrace runs Python handlers only")

    def _annotations(self, metadata: _Section) -> _Section:
        """Return the annotations that concern Kafka, by the part of their name behind the prefix."""
        found, kafka = metadata.values.get("annotations", {}), _Section(metadata.path_of("annotations"))
        if not isinstance(found, dict):
            return self._section(kafka.path, found, "annotations")
        for name in [name for name in found if name in _OTHER_ANNOTATIONS]:
            self._warn((*kafka.path, name), "is without effect in Headrace")
        kafka_only = {name.removeprefix(_PREFIX): value for name, value in found.items() if name.startswith(_PREFIX)}
        return self._section(kafka.path, kafka_only, "annotations", _PREFIX)

    def _trigger(self, triggers: _Section, name: str, annotations: _Section) -> AnyTrigger | None:
        trigger = self._below(triggers, name, "trigger")
        kind = trigger.values.get("kind", "")
        if trigger.values.get("disabled") is True:
            return None
        if kind not in _KAFKA_KINDS:
            log.warning("trigger %s is of kind %r: Headrace runs %s", name, kind, " and ".join(_KAFKA_KINDS))
            return None
        attributes = self._below(trigger, "attributes")
        for key in _ANNOTATED:
            annotation = re.sub("([A-Z])", r"-\1", key).lower()
            if annotation in annotations.values and key not in attributes.values:
                attributes.take(key, annotations, annotation)
        if "url" in trigger.values and not attributes.values.get("brokers"):
            attributes.values["brokers"], attributes.paths["brokers"] = [trigger.values["url"]], trigger.paths["url"]
        for key in _TRIGGER_READ:
            if key in trigger.values:
                attributes.take(key, trigger)
        attributes.values["name"], attributes.paths["name"] = name, trigger.path
        acknowledges = annotations.values.get("explicit-ack-mode") in ("enable", "explicitOnly")
        if acknowledges and "explicitAckMode" not in trigger.values:
            attributes.take("explicitAckMode", annotations, "explicit-ack-mode")
        values, security = attributes.values, self._security(attributes, annotations)
        values["kafka"] = {key: values.pop(key) for key in _KAFKA_KEYS if key in values} | {"security": security}
        return self._model(KafkaTrigger, attributes)

    def _security(self, attributes: _Section, annotations: _Section) -> KafkaSecurity | None:
        """Return the TLS and login of a trigger: its attributes, and the annotations of what they do not have."""
        sections = {"": attributes, "tls": self._below(attributes, "tls"), "sasl": self._below(attributes, "sasl")}
        sections["sasl.oauth"] = self._below(sections["sasl"], "oauth")
        written: dict[str, Written] = {}
        for name, (annotation, _) in SETTINGS.items():
            section, _, key = name.rpartition(".")
            source, key = (sections[section], key) if key in sections[section].values else (annotations, annotation)
            if key in source.values:
                written[name] = Written(source.values[key], source.paths[key])
        reader = SecurityReader(written, attributes.path, self._files, self._wrong, self._warn)
        before = len(self._problems.found)
        try:
            security = reader.read()
        except ValidationError as cause:
            explain(reader.explained(cause), self._tree, self._locations, set(), self._problems)
            return None
        if len(self._problems.found) > before:
            return None
        for sentence in warnings_of(security, dotted(attributes.path)) if security else ():
            self._warn((), in_nuclio_names(sentence))
        kafka, brokers = self._config and self._config.kafka, attributes.values.get("brokers") or []
        if kafka and isinstance(brokers, list) and (why := cluster_problem(security, brokers, kafka)):
            used = (one.path for name, one in written.items() if name != "secretPath")
            path = next(used, attributes.path_of("brokers"))
            self._wrong(path, why)
        plain_anyway = kafka and security == KafkaSecurity(protocol="plaintext") and kafka.is_at(brokers)
        return None if plain_anyway else security

    def _mounts(self, spec: _Section) -> dict[Path, str]:
        """Return the secrets that the file mounts: each `mountPath` with its `secretName`."""
        found: dict[Path, str] = {}
        entries = spec.values.get("volumes", [])
        for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            both = self._section((*spec.path_of("volumes"), index), entry, "mount")
            volume, mount = self._below(both, "volume"), self._below(both, "volumeMount")
            secret, path = self._below(volume, "secret").values.get("secretName"), mount.values.get("mountPath")
            if isinstance(secret, str) and isinstance(path, str):
                found[Path(path)] = secret
        return found

    def _below(self, section: _Section, name: str, known: str = "", *, any_name: bool = False) -> _Section:
        return self._section(section.path_of(name), section.values.get(name, {}), "" if any_name else known or name)

    def _section(self, path: KeyPath, found: Any, known: str, prefix: str = "") -> _Section:
        """Return the mapping at a path by the names that are known, all if `known` is empty; judge the others."""
        section = _Section(path)
        if not isinstance(found, dict):
            self._wrong(path, "should be a mapping of names to values")
            return section
        keys = _KEYS.get(known, {})
        ignored = keys.get("ignored", ())
        names = {name.lower(): name for kind in keys.values() for name in kind}
        for written, value in found.items():
            name = names.get(written.lower()) if known else written
            if name is None and known in _PROTECTION:
                self._wrong((*path, written), f"is not known: known here are {', '.join(keys['read'])}")
            elif name is None:
                self._judge_unknown((*path, prefix + written), written, keys["read"], names)
            elif value != "":  # Go's way to say that nothing was written
                section.values[name], section.paths[name] = value, (*path, prefix + written)
        if idle := [prefix + name for name in section.values if name in ignored]:
            self._warn(path, f"without effect in Headrace: {', '.join(idle)}")
        return section

    def _judge_unknown(self, path: KeyPath, written: str, read: Collection[str], names: dict[str, str]) -> None:
        candidates = [name.lower() for name in read]
        misspelt = difflib.get_close_matches(written.lower(), candidates, 1, _NEAR)
        misspelt += [name for name in candidates if sorted(name) == sorted(written.lower())]
        near = misspelt or difflib.get_close_matches(written.lower(), names, 1)
        hint = f"; did you mean {names[near[0]]}?" if near else ""
        if written == "security":
            self._wrong(path, "is a section of headrace.yaml: write tls and sasl here")
        elif misspelt:
            self._wrong(path, f"is not known{hint}")
        else:
            self._warn(path, f"is not known and has no effect{hint}")

    def _model(self, model: type[M], section: _Section) -> M | None:
        try:
            return model.model_validate(section.values)
        except ValidationError as cause:
            errors = cause.errors(include_url=False, include_input=False)
            for error in errors:
                key = error["loc"][1:] if error["loc"][:1] == ("kafka",) else error["loc"]  # no key of the file
                first, *rest = key or ("",)
                error["loc"] = (*section.path_of(str(first)), *rest) if first else section.path
            explain(errors, self._tree, self._locations, set(), self._problems)
            return None

    def _wrong(self, path: KeyPath, sentence: str) -> None:
        self._problems.add(location_of(path, self._locations), path, sentence)

    def _warn(self, path: KeyPath, sentence: str) -> None:
        log.warning(self._text_of(path, sentence))

    def _text_of(self, path: KeyPath, sentence: str) -> str:
        return ": ".join(part for part in (location_of(path, self._locations), dotted(path), sentence) if part)


def handler_problem(handler: str, folder: Path) -> str:
    """Return why a worker could not find a handler, empty if it could or if only an import can show it.

    Args:
        handler: `module.sub:function`.
        folder: The folder that workers search first.
    """
    module, _, function = handler.partition(":")
    found = _find(module, folder)
    if found is None:
        return f"names module {module}, which is neither in {folder} nor installed: correct it"
    source = Path(found.origin or "")
    if source.suffix != ".py":
        return ""
    try:
        code = source.read_text()
        tree = ast.parse(code, str(source))
        table = symtable.symtable(code, str(source), "exec")
    except (SyntaxError, ValueError) as cause:
        where = f"{source}:{cause.lineno}" if isinstance(cause, SyntaxError) else str(source)
        return f"names a module that does not compile: {where}: {getattr(cause, 'msg', cause)}"
    known = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    opaque = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if function in known or opaque or "__getattr__" in known:
        return ""
    return f"names function {function}, which {source} does not define: correct it"


def _find(module: str, folder: Path) -> ModuleSpec | None:
    path: Sequence[str] | None = [str(folder), *filter(None, sys.path)]
    found, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, path) if path is not None else None
        if found is None:
            return None
        path = found.submodule_search_locations
    return found
