"""`headrace run`."""

import contextlib
import logging
import os
import shutil
import sys
from pathlib import Path

import click

from headrace.cli.cluster_options import DEFAULT_FILE, file_option, load_settings, variables
from headrace.cli.development import development_settings
from headrace.config.light4j.folder import folders_of
from headrace.config.load import read_config

log = logging.getLogger(__name__)

_STANDARD_ERROR = 2


@click.command()
@file_option
@click.option("--dev", is_flag=True, help="For development: start a Kafka if none responds, restart on a change.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(file: Path, dev: bool, program: tuple[str, ...]) -> int:
    """Run everything that the file names, in the foreground; with a PROGRAM after `--`, run that as well.

    Prints one line `ready http=...` on standard output when everything is ready; logs go to standard error. After
    SIGTERM or Ctrl-C it finishes what is in flight; a second one stops it at once.

    The program starts when Headrace is ready, and has its address in HEADRACE_URL. Its lines begin with `app |`.
    When it ends, Headrace ends with its exit code. When Headrace ends, it ends the program first.

    With --dev, no file is needed. A changed file is checked, and the run restarts if it is valid.

    Example: headrace run --dev -- node app.js
    """
    if program and not shutil.which(program[0]):
        raise click.UsageError(f"cannot start {program[0]}: no such program; the configuration file is named with -c")
    path = None if dev and file == DEFAULT_FILE and not file.exists() else file
    settings = development_settings(path) if dev else load_settings(file)
    from headrace.app.changed_files import ChangedFiles
    from headrace.app.process_services import run as run_everything
    from headrace.runtime import SystemClock
    from headrace.runtime.telemetry.logs import configure_logging

    configure_logging(settings.log_level, settings.log_format)
    for remark in read_config(file, variables()).remarks if folders_of(file) else ():
        log.warning(remark)
    files = ChangedFiles(path, settings, SystemClock()) if dev else None
    code = run_everything(
        settings, announce=click.echo, read_again=lambda: load_settings(file), program=program, files=files
    )
    if files and files.starts_again:
        sys.stdout.flush()
        words = sys.orig_argv[1:]
        _inherit_standard_files_only()
        os.execv(sys.executable, [sys.executable, *words])
    return code


def _inherit_standard_files_only() -> None:
    """Have the next program of this process close the others: Kafka's client leaves its pipes open for it."""
    for number in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        if number > _STANDARD_ERROR:
            with contextlib.suppress(OSError):  # that of the list
                os.set_inheritable(number, False)
