"""From a function.yaml to its spec: its forms, its sections, and what depends on several sections."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from headrace.config.model import HeadraceConfig
from headrace.config.spelling import nearest
from headrace.config.yaml_tree import Problems, read_text, read_tree
from headrace.errors import FunctionInvalid
from headrace.functions.check import handler_problem
from headrace.functions.function_keys import OTHER_ANNOTATIONS, OTHER_KINDS, PREFIX, keys_of
from headrace.functions.nuclio_forms import commented_function, commented_yaml, unpack
from headrace.functions.sections import FileReader, FileSection
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.trigger import HandlerBatch, Trigger
from headrace.functions.triggers.trigger_kinds import KINDS
from headrace.functions.worker.handler import how_to_install

log = logging.getLogger(__name__)


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


class _FunctionFile(FileReader):
    """A function file that has been parsed."""

    def __init__(self, tree: Any, problems: Problems, file: Path, config: HeadraceConfig | None) -> None:
        super().__init__(tree, problems, file, config)

    def function(self, check_handler: bool) -> FunctionSpec | None:
        top = self.section((), self.tree, "top")
        metadata, spec = self.below(top, "metadata"), self.below(top, "spec")
        self.annotations = self._annotations(metadata)
        spec.paths |= metadata.paths
        file = self.file
        own = {"name": file.stem, "handler": f"{file.stem}:handler"} if file.suffix == ".py" else {}
        spec.values = {"name": file.parent.name, **own, **spec.values, **metadata.values}
        build = self.below(spec, "build")
        if build.values.get("commands"):
            self.warn(build.path_of("commands"), f"are not run: {how_to_install(str(file.parent))}")
        spec.values["folder"] = self._folder(spec, build)
        if not (runtime := str(spec.values.get("runtime", "python"))).startswith("python"):
            self.warn(spec.path_of("runtime"), f"is {runtime}, and Headrace runs Python handlers only")
        self._list(spec, "env")
        self._name_references(spec)
        self._list(spec, "loggerSinks")
        triggers = self.below(spec, "triggers", any_name=True)
        found = [self._trigger(triggers, name) for name in triggers.values]
        spec.values["triggers"] = sorted(filter(None, found), key=lambda trigger: trigger.requests)
        listening = [trigger for trigger in spec.values["triggers"] if trigger.requests]
        for other in listening[1:]:
            text = f"is of kind {other.kind}, as {listening[0].name} is: remove one of them"
            self.wrong(triggers.path_of(other.name), text)
        function = self.model(FunctionSpec, spec)
        if function and not function.kafka_triggers and not self.problems.found:
            self.wrong(triggers.path, "has no Kafka trigger: add one of kind kafka-cluster with topics, consumerGroup")
        if function and check_handler and (why := handler_problem(function.handler, function.folder)):
            self.wrong(spec.path_of("handler"), why)
        return function

    def _folder(self, spec: FileSection, build: FileSection) -> Path:
        """Return the folder of the handler's module: that of the file, or one for the source that the file contains."""
        if not (source := build.values.get("functionSourceCode")):
            return self.file.parent
        module = str(spec.values.get("handler", "")).partition(":")[0]
        if not re.fullmatch(r"[\w-]+", module):
            text = f"names module {module}, and functionSourceCode is one module: write a name without dots"
            self.wrong(spec.path_of("handler"), text)
            return self.file.parent
        path = build.path_of("functionSourceCode")
        try:
            return unpack(str(source), module, self._state)
        except ValueError:
            self.wrong(path, "is not the base64 of a source: write what `base64 FILE` prints")
        except OSError as cause:
            self.wrong(path, f"cannot be written below state_dir: {cause.strerror}. Correct {self._state}")
        return self.file.parent

    @property
    def _state(self) -> Path:
        return (self.config or HeadraceConfig()).state_dir.absolute() / "functions"

    def _name_references(self, spec: FileSection) -> None:
        """Name variables of other sources, unless the environment of the workers has them anyway."""
        variables = spec.values.get("env")
        for index, variable in enumerate(variables if isinstance(variables, list) else ()):
            if "valueFrom" in variable and (name := variable.get("name")) not in os.environ:
                path = (*spec.path_of("env"), index, "valueFrom")
                self.warn(path, f"is not read: set {name} in the environment of Headrace, which handlers have")

    def _list(self, spec: FileSection, name: str) -> None:
        """Read a list of mappings by their known names."""
        if isinstance(entries := spec.values.get(name), list):
            path = spec.paths[name]
            sections = [self.section((*path, index), entry, name) for index, entry in enumerate(entries)]
            spec.values[name] = [section.values for section in sections]

    def _annotations(self, metadata: FileSection) -> FileSection:
        """Return the annotations that concern Kafka, by the part of their name behind the prefix."""
        found, kafka = metadata.values.get("annotations", {}), FileSection(metadata.path_of("annotations"))
        if not isinstance(found, dict):
            return self.section(kafka.path, found, "annotations")
        kafka_only = {name.removeprefix(PREFIX): value for name, value in found.items() if name.startswith(PREFIX)}
        section = self.section(kafka.path, kafka_only, "annotations", PREFIX)
        known = [*OTHER_ANNOTATIONS, *(PREFIX + name for name in keys_of("annotations"))]
        for name, value in found.items():
            path = (*kafka.path, name)
            if name in OTHER_ANNOTATIONS:  # the older name wins, as in Nuclio
                section.values[OTHER_ANNOTATIONS[name]], section.paths[OTHER_ANNOTATIONS[name]] = value, path
            elif not name.startswith(PREFIX) and (other := nearest(name, known, 0.95)):
                self.wrong(path, f"is not known; did you mean {other}?")
        return section

    def _trigger(self, triggers: FileSection, name: str) -> Trigger | None:
        trigger = self.below(triggers, name, "trigger")
        if trigger.values.get("disabled") is True or not self._has_known_kind(trigger, name):
            return None
        kind = KINDS[trigger.values["kind"]]
        for key in kind.unused:
            if trigger.values.pop(key, None):
                self.warn(trigger.paths[key], f"has no effect in a trigger of kind {trigger.values['kind']}")
        attributes = self.below(trigger, "attributes", kind.mapping)
        for key in keys_of("trigger"):
            if key in trigger.values and key not in ("name", "url", "attributes"):
                attributes.take(key, trigger)
        attributes.values["batch"] = self.model(HandlerBatch, self.below(trigger, "batch")) or HandlerBatch()
        attributes.values["name"] = name
        attributes.paths |= {"name": trigger.path, "batch": trigger.path_of("batch")}
        return kind.read(self, trigger, attributes)

    def _has_known_kind(self, trigger: FileSection, name: str) -> bool:
        kind, path = trigger.values.get("kind", ""), trigger.path_of("kind")
        if isinstance(kind, str) and kind in KINDS:
            return True
        if kind in OTHER_KINDS:
            log.warning("trigger %s is of kind %r: Headrace runs %s", name, kind, ", ".join(KINDS))
        elif not kind:
            self.wrong(path, "is missing and has no default: add kind: kafka-cluster")
        else:
            other = nearest(str(kind), [*KINDS, *OTHER_KINDS]) or next(iter(KINDS))
            self.wrong(path, f"is {kind!r}, which is not a kind of trigger: did you mean {other}?")
        return False
