"""`headrace run`."""

from pathlib import Path

import click

from headrace.cli.config import file_option
from headrace.cli.settings import located, variables
from headrace.config.load import load_config


@click.command()
@file_option
def run(file: Path) -> int:
    """Run everything the file names, in the foreground.

    Prints one line `ready http=...` on standard output when everything answers; logs go to standard error. SIGTERM or
    Ctrl-C finishes what is in flight, a second one stops at once.

    Example: headrace run -c headrace.yaml
    """
    settings = located(load_config(file, variables()))
    from headrace.app import run as run_everything

    return run_everything(settings, announce=click.echo)
