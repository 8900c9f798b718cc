"""From a function.yaml to its spec: keys in any letter case, annotations, and problems with their line."""

import csv
import difflib
import logging
import re
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace.config.consumers import RetryConfig
from headrace.config.explain import explain
from headrace.config.kafka_security import KafkaSecurity, warnings_of
from headrace.config.membership import ConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.config.yaml_tree import KeyPath, Problems, dotted, read_text, read_tree
from headrace.errors import FunctionInvalid
from headrace.functions.check import handler_problem, near
from headrace.functions.libraries import Libraries, is_install, libraries_of
from headrace.functions.nuclio_forms import commented_function, commented_yaml, unpack
from headrace.functions.spec import AnyTrigger, FunctionSpec, HandlerBatch, HttpTrigger, KafkaAttributes, KafkaTrigger
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

_KINDS = ("kafka-cluster", "kafka", "http")
_KAFKA_ONLY = ("explicitAckMode", "waitExplicitAckDuringRebalanceTimeout", "partitions", "url")
"""Keys of a trigger that have no effect in one of kind `http`."""
_PREFIX = "nuclio.io/kafka-"
_PROTECTION = ("tls", "sasl", "oauth")
"""Mappings in which an unknown key is an error: perhaps it should protect the connection."""

_SECTIONS: dict[str, type[BaseModel]] = {"retry": RetryConfig, "consumer": ConsumerConfig}
"""Settings of headrace.yaml among the attributes."""
_KEYS = yaml.safe_load(Path(__file__).with_name("nuclio_keys.yaml").read_text())
_OTHER_KINDS: list[str] = _KEYS.pop("other_kinds")
_OTHER_ANNOTATIONS: dict[str, str] = _KEYS.pop("other_annotations")
with Path(__file__).with_name("trigger_keys.csv").open(newline="") as _file:
    _TABLE = list(csv.DictReader(_file))
_ANNOTATED = {row["key"]: row["annotation"] for row in _TABLE if row["annotation"]}
"""Keys that an annotation may stand in for: `nuclio.io/kafka-session-timeout` for `sessionTimeout`."""
for _row in _TABLE:
    _KEYS[_row["mapping"]]["read"].append(_row["key"])
_TRIGGER_READ = [name for name in _KEYS["trigger"]["read"] if name not in ("name", "url", "attributes")]
_KAFKA_KEYS = [field.alias or name for name, field in KafkaAttributes.model_fields.items() if name != "security"]
_KEYS["annotations"]["read"] += [*_ANNOTATED.values(), *(annotation for annotation, _ in SETTINGS.values())]
_ANNOTATIONS = [*_OTHER_ANNOTATIONS, *(_PREFIX + name for name in _KEYS["annotations"]["read"])]
for _name in SETTINGS:
    _KEYS[_name.split(".")[-2] if "." in _name else "attributes"]["read"].append(_name.split(".")[-1])


def load_function(file: Path, config: HeadraceConfig | None = None, *, check_handler: bool = False) -> FunctionSpec:
    """Return the spec of a function file, and log the keys that have no effect.

    Args:
        file: The file, the folder that holds a `function.yaml`, or a source with a comment `# @nuclio.configure`.
        config: Names the cluster that triggers are compared with, and the folder of secrets; None for neither.
        check_handler: Also find the handler, without importing its module.

    Raises:
        FunctionInvalid: The file cannot be read or a value is wrong; one line per problem, in the order of the file.
    """
    file = (file / "function.yaml" if file.is_dir() else file).absolute()
    problems = Problems()
    text = read_text(file, FunctionInvalid, "Check the path under functions")
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON allows tabs between values only, and YAML allows none there
    is_source = file.suffix == ".py"
    tree = read_tree(commented_yaml(text) if is_source else text, str(file), problems)
    problems.locations[()] = str(file)
    if is_source and not problems.found:
        tree = commented_function(tree, problems)
    function = None
    if not problems.found:
        found = _FunctionFile(tree, problems, file, config)
        function = found.function(check_handler)
    if problems.found or not function:
        raise FunctionInvalid("\n".join(problems.ordered))
    return function


class _Section:
    """One mapping of the file: values by their known names, and where each is in the file."""

    def __init__(self, path: KeyPath) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        self.paths: dict[str, KeyPath] = {}

    def take(self, name: str, other: "_Section", other_name: str = "") -> None:
        """Copy a value from another part of the file."""
        self.values[name], self.paths[name] = other.values[other_name or name], other.paths[other_name or name]

    def path_of(self, name: str) -> KeyPath:
        return self.paths.get(name, (*self.path, name))


class _FunctionFile:
    """A function file that has been parsed."""

    def __init__(self, tree: Any, problems: Problems, file: Path, config: HeadraceConfig | None) -> None:
        self._tree = tree
        self._problems, self._wrong = problems, problems.report
        self._file, self._config = file, config
        self._files = SecretFiles(file, {}, config.functions_secrets_dir if config else None)

    def function(self, check_handler: bool) -> FunctionSpec | None:
        top = self._section((), self._tree, "top")
        metadata, spec = self._below(top, "metadata"), self._below(top, "spec")
        annotations = self._annotations(metadata)
        spec.paths |= metadata.paths
        file = self._file
        own = {"name": file.stem, "handler": f"{file.stem}:handler"} if file.suffix == ".py" else {}
        spec.values = {"name": file.parent.name, **own, **spec.values, **metadata.values}
        build = self._below(spec, "build")
        spec.values["folder"] = self._folder(spec, build)
        if not (runtime := str(spec.values.get("runtime", "python"))).startswith("python"):
            self._warn(spec.path_of("runtime"), f"is {runtime}, and Headrace runs Python handlers only")
        self._list(spec, "env", "variable")
        self._read_secrets(spec)
        self._list(spec, "loggerSinks", "sink")
        self._files = self._files._replace(mounts=self._mounts(spec))
        spec.values["libraries"] = self._libraries(spec, build)
        triggers = self._below(spec, "triggers", any_name=True)
        found = [self._trigger(triggers, name, annotations) for name in triggers.values]
        spec.values["triggers"] = [trigger for trigger in found if isinstance(trigger, KafkaTrigger)]
        for trigger in (trigger for trigger in found if isinstance(trigger, HttpTrigger)):
            if other := spec.values.get("http"):
                self._wrong(triggers.path_of(trigger.name), f"is of kind http, as {other.name} is: remove one of them")
            spec.values["http"] = trigger
        function = self._model(FunctionSpec, spec)
        self._judge_idle(spec, "spec", function)
        if function and not function.triggers and not self._problems.found:
            self._wrong(triggers.path, "has no Kafka trigger: add one of kind kafka-cluster with topics, consumerGroup")
        if function and check_handler and (why := handler_problem(function.handler, function.folder)):
            self._wrong(spec.path_of("handler"), why)
        return function

    def _folder(self, spec: _Section, build: _Section) -> Path:
        """Return the folder of the handler's module: that of the file, or one that gets the source in the file."""
        if not (source := build.values.get("functionSourceCode")):
            return self._file.parent
        module = str(spec.values.get("handler", "")).partition(":")[0]
        if not re.fullmatch(r"[\w-]+", module):
            text = f"names module {module}, and functionSourceCode is one module: write a name without dots"
            self._wrong(spec.path_of("handler"), text)
            return self._file.parent
        path = build.path_of("functionSourceCode")
        try:
            return unpack(str(source), module, self._state)
        except ValueError:
            self._wrong(path, "is not the base64 of a source: write what `base64 FILE` prints")
        except OSError as cause:
            self._wrong(path, f"cannot be written below state_dir: {cause.strerror}. Correct {self._state}")
        return self._file.parent

    @property
    def _state(self) -> Path:
        return (self._config or HeadraceConfig()).state_dir.absolute() / "functions"

    def _read_secrets(self, spec: _Section) -> None:
        """Give variables the secrets that they name; others that only Nuclio's platform knows are left out."""
        variables = spec.values.get("env")
        for index, variable in enumerate(variables if isinstance(variables, list) else ()):
            if "valueFrom" not in variable:
                continue
            section = self._section((*spec.path_of("env"), index, "valueFrom"), variable["valueFrom"], "valueFrom")
            if "secretKeyRef" not in section.values:
                continue
            reference, path = self._below(section, "secretKeyRef"), section.path_of("secretKeyRef")
            if not self._config:
                self._warn(path, "has no effect here, because no headrace.yaml names functions_secrets_dir")
                continue
            try:
                secret = self._files.key_of(reference.values.get("name"), reference.values.get("key"))
            except ValueError as cause:
                if reference.values.get("optional") is not True:
                    self._wrong(path, str(cause))
            else:
                del variable["valueFrom"]
                variable["value"] = secret

    def _libraries(self, spec: _Section, build: _Section) -> Libraries | None:
        """Return the libraries of the function; refuse it, or leave them out, as the configuration says."""
        commands = build.values.get("commands") or []
        for command in (written := [str(command) for command in commands]):
            if not is_install(command):
                self._warn(spec.path_of("build"), f"has the command {command!r}: only `pip install ...` has an effect")
        if not self._config or self._config.functions_libraries == "shared":
            return None
        found = libraries_of(self._file, [command for command in written if is_install(command)], self._state)
        if found and self._config.functions_libraries == "refuse" and not found.folder.is_dir():
            other = "or set functions_libraries: install in headrace.yaml"
            self._wrong(spec.path_of("build"), f"names libraries that are not installed: {found.remedy}, {other}")
        return found

    def _list(self, spec: _Section, name: str, known: str) -> None:
        """Read a list of mappings by their known names."""
        if isinstance(entries := spec.values.get(name), list):
            path = spec.paths[name]
            sections = [self._section((*path, index), entry, known) for index, entry in enumerate(entries)]
            spec.values[name] = [section.values for section in sections]

    def _annotations(self, metadata: _Section) -> _Section:
        """Return the annotations that concern Kafka, by the part of their name behind the prefix."""
        found, kafka = metadata.values.get("annotations", {}), _Section(metadata.path_of("annotations"))
        if not isinstance(found, dict):
            return self._section(kafka.path, found, "annotations")
        kafka_only = {name.removeprefix(_PREFIX): value for name, value in found.items() if name.startswith(_PREFIX)}
        section = self._section(kafka.path, kafka_only, "annotations", _PREFIX)
        for name, value in found.items():
            path = (*kafka.path, name)
            if name in _OTHER_ANNOTATIONS:  # the older name wins, as in Nuclio
                section.values[_OTHER_ANNOTATIONS[name]], section.paths[_OTHER_ANNOTATIONS[name]] = value, path
            elif not name.startswith(_PREFIX) and (other := near(name, _ANNOTATIONS, 0.95)):
                self._wrong(path, f"is not known; did you mean {other}?")
        return section

    def _trigger(self, triggers: _Section, name: str, annotations: _Section) -> AnyTrigger | None:
        trigger = self._below(triggers, name, "trigger")
        if trigger.values.get("disabled") is True or not self._has_known_kind(trigger, name):
            return None
        if (written := trigger.values.get("name", name)) != name:
            self._wrong(trigger.paths["name"], f"is {written}, and the trigger is {name}: remove it")
        is_http = trigger.values["kind"] == "http"
        for key in _KAFKA_ONLY if is_http else ():
            if trigger.values.pop(key, None):
                self._warn(trigger.paths[key], "has no effect in a trigger of kind http")
        attributes = self._below(trigger, "attributes", "http" if is_http else "")
        if "topic" in attributes.values and "topics" in attributes.values:
            self._wrong(attributes.paths["topic"], "is written as well as topics: keep topics")
        elif "topic" in attributes.values:
            attributes.take("topics", attributes, "topic")
            attributes.values["topics"] = [attributes.values["topics"]]
        if "url" in trigger.values and not attributes.values.get("brokers"):
            attributes.values["brokers"], attributes.paths["brokers"] = [trigger.values["url"]], trigger.paths["url"]
        for key in _TRIGGER_READ:
            if key in trigger.values:
                attributes.take(key, trigger)
        attributes.values["batch"] = self._model(HandlerBatch, self._below(trigger, "batch")) or HandlerBatch()
        attributes.values["name"] = name
        attributes.paths |= {"name": trigger.path, "batch": trigger.path_of("batch")}
        if is_http:
            web = self._model(HttpTrigger, attributes)
            self._judge_idle(attributes, "http", web)
            return web
        for key, annotation in _ANNOTATED.items():
            if annotation in annotations.values and key not in attributes.values:
                attributes.take(key, annotations, annotation)
        values, security = attributes.values, self._security(attributes, annotations)
        kafka = {key: values[key] for key in _KAFKA_KEYS if key in values} | {"security": security}
        made = self._model(KafkaTrigger, attributes, kafka=kafka)
        self._judge_idle(attributes, "trigger attributes", made)
        other_cluster = made and self._config and not self._config.kafka.is_at(made.kafka.brokers)
        if made and made.delivery == "exactly_once" and other_cluster:
            text = "is exactly_once, and outputs go to the brokers of headrace.yaml: a transaction has one cluster"
            self._wrong(attributes.path_of("delivery"), f"{text}; write at_least_once, or remove brokers")
        return made

    def _has_known_kind(self, trigger: _Section, name: str) -> bool:
        kind, path = trigger.values.get("kind", ""), trigger.path_of("kind")
        if kind in _KINDS:
            return True
        if kind in _OTHER_KINDS:
            log.warning("trigger %s is of kind %r: Headrace runs %s", name, kind, ", ".join(_KINDS))
        elif not kind:
            self._wrong(path, "is missing and has no default: add kind: kafka-cluster")
        else:
            other = near(str(kind), [*_KINDS, *_OTHER_KINDS]) or _KINDS[0]
            self._wrong(path, f"is {kind!r}, which is no kind of trigger: did you mean {other}?")
        return False

    def _judge_idle(self, section: _Section, mappings: str, made: FunctionSpec | AnyTrigger | None) -> None:
        """Name what is written and has no effect, but for defaults."""
        kafka = made.kafka if isinstance(made, KafkaTrigger) else None
        for row in _TABLE if made else ():
            key, (kind, _, why) = row["key"], row["becomes"].partition(": ")
            if row["mapping"] not in mappings or key not in section.paths or kind != "nothing":
                continue
            fields = ((part, name) for part in (made, kafka) if part for name in type(part).model_fields)
            found = next(((p, n) for p, n in fields if (type(p).model_fields[n].alias or n) == key), None)
            if not found or getattr(*found) != type(found[0]).model_fields[found[1]].default:
                self._warn(section.paths[key], f"has no effect in Headrace: {why}")

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
            explain(reader.explained(cause), self._tree, self._problems)
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
            self._wrong(path, "should be a mapping: write name: value, a line for each")
            return section
        keys = _KEYS.get(known, {})
        ignored = keys.get("ignored", ())
        names = {name.lower(): name for kind in keys.values() for name in kind}
        for written, value in found.items():
            name = names.get(written.lower()) if known else written
            if name is None and known in _PROTECTION:
                self._wrong((*path, written), f"is not known: known here are {', '.join(keys['read'])}")
            elif name is None:
                self._judge_unknown((*path, prefix + written), written, known, names)
            elif value != "":  # Go's way to say that nothing was written
                section.values[name], section.paths[name] = value, (*path, prefix + written)
        if idle := [prefix + name for name in section.values if name in ignored]:
            self._warn(path, f"without effect in Headrace: {', '.join(idle)}")
        return section

    def _judge_unknown(self, path: KeyPath, written: str, known: str, names: dict[str, str]) -> None:
        read = _KEYS[known]["read"]
        misspelt = near(written, read)
        other = {"attributes": "trigger", "http": "trigger", "trigger": "attributes"}.get(known, "")
        if written == "security":
            self._wrong(path, "is a section of headrace.yaml: write tls and sasl here")
        elif other and near(written, _KEYS[other]["read"], 1.0):
            where = "under attributes" if other == "attributes" else "one level up, at the trigger"
            self._wrong(path, f"has no effect here: write it {where}")
        elif misspelt:
            prefix = str(path[-1]).removesuffix(written)
            self._wrong(path, f"is not known; did you mean {prefix}{misspelt}?")
        else:
            likely = difflib.get_close_matches(written.lower(), names, 1)
            hint = f"; did you mean {names[likely[0]]}?" if likely else ""
            self._warn(path, f"is not known and has no effect{hint}")

    def _model(self, model: type[M], section: _Section, **values: Any) -> M | None:
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
            explain(errors, self._tree, self._problems)
            return None

    def _warn(self, path: KeyPath, sentence: str) -> None:
        log.warning(self._problems.located(path, sentence))


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
