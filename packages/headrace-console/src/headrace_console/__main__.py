"""`python -m headrace_console SETTINGS`: the console's process below `headrace run`, with its settings as JSON."""

import json
import sys
from pathlib import Path

import click

from headrace.cli.trust import trust
from headrace.errors import HeadraceError
from headrace_console.serve import ConsoleSettings, serve


def main() -> int:
    """Serve the console until a signal, and return the exit code."""
    settings = json.loads(sys.argv[1])
    settings["trusted"] = trust(None, map(Path, settings["trusted"]))
    try:
        serve(ConsoleSettings(**settings), click.echo)
    except HeadraceError as error:
        click.echo(error.description, err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
