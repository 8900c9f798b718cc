"""Nuclio's other forms of a function: configuration in a comment of the source, source in the configuration."""

import base64
import hashlib
from pathlib import Path
from typing import Any

from headrace.config.yaml_tree import Problems

_SECTION = "function.yaml"


def commented_yaml(source: str) -> str:
    """Return the text of a comment `# @nuclio.configure`, on the lines that it has in the source.

    The comment begins behind this line, and ends before the first line that is not a comment.

    Source: Nuclio's pkg/processor/build/inlineparser.
    """
    lines, is_inside = list[str](), False
    for line in source.splitlines():
        is_inside = line.startswith("#") if is_inside else line.replace(" ", "") == "#@nuclio.configure"
        is_begin = line.replace(" ", "").startswith("#@nuclio.")
        lines.append(line[1:].removeprefix(" ") if is_inside and not is_begin else "")
    return "\n".join(lines)


def commented_function(tree: Any, problems: Problems) -> Any:
    """Return the configuration in such a comment; the locations are then relative to it."""
    if not isinstance(tree, dict) or _SECTION not in tree:
        text = f"has no comment `# @nuclio.configure` with {_SECTION}: write one, or name the {_SECTION}"
        problems.report((), text)
        return {}
    below = {path[1:]: where for path, where in problems.locations.items() if path[:1] == (_SECTION,)}
    problems.locations.clear()
    problems.locations |= below
    return tree[_SECTION]


def unpack(encoded: str, module: str, state: Path) -> Path:
    """Write the source of a module, which a configuration has in base64, and return its folder below `state`.

    Raises:
        ValueError: It is not base64 of a text.
        OSError: It cannot be written.
    """
    from headrace.runtime.cache import write_atomically  # here, because few functions need it

    source = base64.b64decode("".join(encoded.split()), validate=True).decode()
    folder = state / f"{hashlib.sha256(repr((module, source)).encode()).hexdigest()[:32]}.source"
    write_atomically(folder / f"{module}.py", source)
    return folder
