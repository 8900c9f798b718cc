"""Whether a worker could call the handler of a function file, without an import of its module."""

import ast
import importlib.util
import math
import symtable
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from headrace.config.spelling import nearest


def handler_problem(handler: str, folder: Path) -> str:
    """Return why a worker could not call a handler; empty if it could, or if only an import can show it."""
    source, tree, problem = definition(handler, folder, "function")
    wrong = (_signature(tree, name, takes) for name, takes in ((handler.partition(":")[2], 2), ("init_context", 1)))
    return problem or next((f"names a module to correct: {source}:{text}" for text in wrong if text), "")


def definition(reference: str, folder: Path, kind: str) -> tuple[Path, ast.Module, str]:
    """Return file and content of the module of `module:name`, and why it does not define the name; empty if it does.

    The content is empty if only an import can show it.
    """
    module, _, name = reference.partition(":")
    found, empty = _find(module, folder), ast.Module([], [])
    if found is None:
        files = [path.stem for path in folder.glob("*.py")]
        other = nearest(module.removesuffix(".py"), files)
        hint = f"did you mean {other}:{name}?" if other else "correct it"
        return Path(), empty, f"names module {module}, which is neither in {folder} nor installed: {hint}"
    source = Path(found.origin or "")
    if source.suffix != ".py":
        return source, empty, ""
    try:
        code = importlib.util.decode_source(source.read_bytes())
        tree = ast.parse(code, str(source))
        table = symtable.symtable(code, str(source), "exec")
    except (SyntaxError, ValueError, RecursionError) as cause:
        where = f"{source}:{cause.lineno}" if isinstance(cause, SyntaxError) else str(source)
        text = f"names a module that does not compile: {where}: {getattr(cause, 'msg', cause)}. Correct this line"
        return source, empty, text
    known = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    opaque = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if name not in known and not opaque and "__getattr__" not in known:
        other = nearest(name, known)
        hint = f"did you mean {module}:{other}?" if other else "correct it"
        return source, empty, f"names {kind} {name}, which {source} does not define: {hint}"
    return source, tree, ""


def _signature(tree: ast.Module, name: str, takes: int) -> str:
    """Return why a function of a module does not take this number of values; empty if it does or is not known."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [node for node in found if node.name == name and not node.decorator_list]
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    if len(found) != 1 or any(node.id == name for node in stored):
        return ""
    arguments = found[0].args
    most = len(arguments.posonlyargs) + len(arguments.args)
    least = most - len(arguments.defaults)
    if least <= takes <= (math.inf if arguments.vararg else most) and all(arguments.kw_defaults):
        return ""
    form = f"{name}(context, event)" if takes == 2 else f"{name}(context)"
    return f"{found[0].lineno}: {name} takes {ast.unparse(arguments) or 'nothing'}: write {form}"


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
