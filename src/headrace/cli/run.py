"""`headrace run`."""

import logging
from pathlib import Path

import click

from headrace.cli.cluster_options import file_option, load_settings, variables
from headrace.config.light4j.folder import folders_of
from headrace.config.load import read_config

log = logging.getLogger(__name__)


@click.command()
@file_option
def run(file: Path) -> int:
    """Run everything that the file names, in the foreground.

    Prints one line `ready http=...` on standard output when everything is ready; logs go to standard error. After
    SIGTERM or Ctrl-C it finishes what is in flight; a second one stops it at once.

    Example: headrace run -c headrace.yaml
    """
    settings = load_settings(file)
    from headrace.app.process_services import run as run_everything
    from headrace.runtime.telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    for remark in read_config(file, variables()).remarks if folders_of(file) else ():
        log.warning(remark)
    return run_everything(settings, announce=click.echo, read_again=lambda: load_settings(file))
