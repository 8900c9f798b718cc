"""`headrace init`: a small project that runs, from the files in `templates`."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from headrace.cli.file_schemas import schema_kinds, schema_of
from headrace.cli.global_options import HeadraceCommand, uses
from headrace.cli.output import print_result

_TEMPLATES: Final = Path(__file__).with_name("templates")
_PARTS: Final[dict[str, dict[str, str]]] = {
    "push": {"backend.py": "the backend that gets what is pushed", "tests/test_push.py": "a test of it"},
    "function": {
        "vat/vat.py": "a handler, which is called for every record of `orders`",
        "vat/function.yaml": "what it reads and writes",
        "tests/test_function.py": "a test of it",
    },
    "pipeline": {
        "totals.yaml": "a pipeline: sources, flows and where their rows go",
        "totals.sql": "its SQL",
        "tests/totals.yaml": "a test case: `headrace pipeline test totals.yaml`",
        "tests/test_pipeline.py": "the same with pytest",
    },
    "query": {
        "backend.py": "the backend that gets what is pushed",
        "tests/test_query.py": "a test of the table and of the standing query",
    },
}
"""Kinds of projects: their files, and what each has."""
KINDS: Final = (*_PARTS, "all")
_LOOK: Final = {
    "push": "headrace reactive list",
    "function": "headrace consume orders.vat --follow",
    "pipeline": "headrace consume orders.totals --follow",
    "query": "headrace tables show",
}
"""The command that shows what a project has done."""
_PRODUCE: Final = (
    """printf 'tea\\t{"item": "tea", "euros": 900}\\n' | headrace produce orders --keys --value-format json"""
)


@click.command(cls=HeadraceCommand)
@click.argument("kind", type=click.Choice(KINDS), default="push")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=Path())
@uses("output")
def init(kind: str, folder: Path, output: str) -> None:
    """Write a small project that runs, and print the next three commands. It overwrites nothing.

    push: records to a backend; function: a handler; pipeline: SQL by Spark; query: a table and a standing query.

    Example: headrace init function my-project
    """
    kinds = [*_PARTS] if kind == "all" else [kind]
    commands = next_commands(kinds)
    files = project_files(kinds, folder.resolve().name, commands)
    if present := [str(folder / name) for name in files if (folder / name).exists()]:
        raise click.UsageError(f"{', '.join(present)}: already there. Use another folder, or remove what is there")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    first = [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]
    lines = [
        f"wrote {len(files)} files in {folder.resolve()}. Next:",
        "",
        *(f"  {line}" for line in [*first, *commands]),
    ]
    print_result({"folder": str(folder.resolve()), "files": [*files], "commands": commands}, "\n".join(lines), output)


def next_commands(kinds: Sequence[str]) -> list[str]:
    """Return the commands that run a project, write a record and show what became of it."""
    program = " -- python3 backend.py" if any("backend.py" in _PARTS[kind] for kind in kinds) else ""
    look = _LOOK["function"] if len(kinds) > 1 else _LOOK[kinds[0]]
    return [f"headrace run --dev{program}   # stays in the foreground: use a second terminal", _PRODUCE, look]


def project_files(kinds: Sequence[str], name: str, commands: Sequence[str]) -> dict[str, str]:
    """Return the files of a project by path."""
    about = {path: text for kind in kinds for path, text in _PARTS[kind].items()}
    rows = "\n".join(f"| `{path}` | {text} |" for path, text in about.items())
    readme = (_TEMPLATES / "README.md").read_text()
    for mark, text in {"{name}": name, "{commands}": "\n".join(commands), "{files}": rows}.items():
        readme = readme.replace(mark, text)
    parts = [_TEMPLATES / "headrace.yaml", *(_TEMPLATES / kind / "part.yaml" for kind in kinds)]
    files = {
        "README.md": readme,
        "pytest.ini": (_TEMPLATES / "pytest.ini").read_text(),
        ".gitignore": (_TEMPLATES / "gitignore").read_text(),
        "headrace.yaml": "".join(part.read_text() for part in parts),
    }
    for path in about:
        source = next(kind for kind in _PARTS if path in _PARTS[kind])  # kinds may share a file, which the first has
        # Code of a project is not a module of Headrace.
        files[path] = (_TEMPLATES / source / (f"{path}.tmpl" if path.endswith(".py") else path)).read_text()
    for kind in schema_kinds():
        file = "headrace" if kind == "config" else kind
        files[f"schemas/{file}.json"] = json.dumps(schema_of(kind), indent=1, ensure_ascii=False) + "\n"
    return files
