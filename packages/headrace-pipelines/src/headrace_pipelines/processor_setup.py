"""Checks the classes of processors without importing them: their methods, columns and states."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.functions.check import definition
from headrace_pipelines.spec import FlowSpec, PipelineSpec
from headrace_pipelines.sql import columns_of_schema

_METHODS = {"process": ("key", "row"), "on_timer": ("key", "at"), "init_state": ("key", "row"), "init": ()}
"""What Headrace calls, with the arguments behind `self`."""
_STATES = {"ValueState": 1, "MapState": 2, "ListState": 1}
"""Kinds of states, and their number of types."""


def processor_problems(spec: PipelineSpec) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield why processors cannot run: path in the file and sentence. What only an import can show is left out."""
    for name, flow in spec.flows.items():
        if flow.processor:
            yield from ((("flows", name, "processor"), text) for text in _problems(flow, spec.folder or Path()))


def _problems(flow: FlowSpec, folder: Path) -> Iterator[str]:
    reference = flow.processor or ""
    source, tree, problem = definition(reference, folder.absolute(), "class")
    if problem:
        yield problem
        return
    name = reference.partition(":")[2]
    made = [node for node in tree.body if getattr(node, "name", "") == name]
    if len(made) != 1:
        return
    if not isinstance(made[0], ast.ClassDef):
        yield f"names {name}, which is not a class: {source}:{made[0].lineno}: write class {name}(Processor)"
        return
    yield from (f"names a class to correct: {source}:{text}" for text in _ClassCheck(made[0], flow).problems())


class _ClassCheck:
    """What is wrong with the class of a processor."""

    def __init__(self, found: ast.ClassDef, flow: FlowSpec) -> None:
        self._class = found
        self._flow = flow
        self._is_whole = [ast.unparse(base).rpartition(".")[2] for base in found.bases] == ["Processor"]
        """Whether nothing is inherited from another class of the user."""
        self._methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        self._others = {node.name: node for node in found.body if isinstance(node, ast.AsyncFunctionDef)}
        self._values: Mapping[str, ast.expr] = {
            target.id: node.value
            for node in found.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }

    def problems(self) -> Iterator[str]:
        """Yield a line of the file with a sentence for each."""
        name, line = self._class.name, self._class.lineno
        if not self._class.bases:
            yield f"{line}: {name} has no base: write class {name}(Processor)"
            return
        needed = {"process": "def process(self, key, row)"}
        if self._flow.initial:
            needed["init_state"] = "def init_state(self, key, row), because the flow has initial"
        for method, form in needed.items():
            if self._is_whole and method not in {**self._methods, **self._others}:
                yield f"{line}: {name} has no method {method}: write {form}"
        for method, node in self._others.items():
            if method in _METHODS:
                yield f"{node.lineno}: {method} is async, and Spark calls it without a loop: write def {method}"
        for method, takes in _METHODS.items():
            if method in self._methods:
                yield from _signature(self._methods[method], takes)
        if self._is_whole and "columns" not in self._values:
            yield f'{line}: {name} has no columns: write columns = "name TYPE, name TYPE"'
        elif isinstance(value := self._values.get("columns"), ast.Constant):
            yield from (f"{value.lineno}: columns {text}" for text in columns_of_schema(str(value.value))[1])
        for state, value in self._values.items():
            if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in _STATES:
                yield from (f"{value.lineno}: state {state} {text}" for text in _state(value))


def _signature(method: ast.FunctionDef, takes: tuple[str, ...]) -> Iterator[str]:
    arguments = method.args
    most, needed = len(arguments.posonlyargs) + len(arguments.args), 1 + len(takes)
    fits = most - len(arguments.defaults) <= needed <= most or (arguments.vararg and most <= needed)
    if not method.decorator_list and not fits:
        form = f"{method.name}({', '.join(('self', *takes))})"
        yield f"{method.lineno}: {method.name} takes {ast.unparse(arguments) or 'nothing'}: write {form}"


def _state(call: ast.Call) -> Iterator[str]:
    kind = ast.unparse(call.func).rpartition(".")[2]
    types = {"MapState": 'MapState("STRING", "BIGINT")'}.get(kind, f'{kind}("BIGINT")')
    if len(call.args) != _STATES[kind]:
        yield f"has {len(call.args)} types: write {types}"
    for value in call.args:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield from columns_of_schema(f"value {value.value}")[1]
    for keyword in call.keywords:
        is_number = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, int | float)
        if keyword.arg != "ttl_seconds":
            yield f"has {keyword.arg}, which is not known here: the one further argument is ttl_seconds"
        elif isinstance(keyword.value, ast.UnaryOp) or (is_number and ast.literal_eval(keyword.value) <= 0):
            yield "has a ttl_seconds that is not above 0: correct it"
