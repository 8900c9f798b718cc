"""What a stateful class keeps: its attributes, however they are declared.

A class is stateful if a method other than its constructor sets an attribute of `self`, or deletes one. A record class
(dataclass or `msgspec.Struct`) is stateful also if its file sets one of its fields. What is frozen is not stateful.

These are attributes: what any method sets on `self`, names of `__slots__`, and names of the class body with a value or
an annotation. Constants (upper case, `ClassVar` or `Final`), nested functions and properties are not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

_CONSTRUCTORS: Final = ("__init__", "__post_init__", "__new__")
_CONSTANT: Final = ("ClassVar", "Final")
_RECORDS: Final = ("dataclass", "Struct")


def attributes_of(node: ast.ClassDef, tree: ast.Module) -> set[str]:
    """Return the attributes of a stateful class of a file; empty for any other class."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    later = {name for method in methods if method.name not in _CONSTRUCTORS for name in _set_on_self(method)}
    declared = {*_declared(node)}
    if _is_record(node):
        later |= declared & {*_set_anywhere(tree)}
    if not later or _is_frozen(node):
        return set()
    return declared.union(*map(_set_on_self, methods))


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes that the class body declares."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            if not any(word in ast.unparse(part.annotation) for word in _CONSTANT):
                yield from _plain(part.target.id)
        elif isinstance(part, ast.Assign):
            for target in part.targets:
                if isinstance(target, ast.Name) and target.id == "__slots__":
                    yield from (str(each.value) for each in ast.walk(part.value) if isinstance(each, ast.Constant))
                elif isinstance(target, ast.Name):
                    yield from _plain(target.id)


def _plain(name: str) -> list[str]:
    return [] if name.isupper() or name.startswith("__") else [name]


def _set_on_self(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {
        part.attr
        for part in ast.walk(method)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }


def _set_anywhere(tree: ast.Module) -> Iterator[str]:
    for part in ast.walk(tree):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store | ast.Del):
            yield part.attr


def _is_record(node: ast.ClassDef) -> bool:
    return any(word in ast.unparse(part) for part in (*node.decorator_list, *node.bases) for word in _RECORDS)


def _is_frozen(node: ast.ClassDef) -> bool:
    options = [
        *node.keywords,
        *(word for part in node.decorator_list if isinstance(part, ast.Call) for word in part.keywords),
    ]
    return any(word.arg == "frozen" and ast.unparse(word.value) == "True" for word in options)
