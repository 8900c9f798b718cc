"""Finds a handler without importing its module, so that a check runs no code of the user."""

from __future__ import annotations

import ast
import symtable
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def handler_problem(handler: str, folder: Path) -> str:
    """Return why a worker could not find a handler, empty if it could or if only an import can tell.

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
