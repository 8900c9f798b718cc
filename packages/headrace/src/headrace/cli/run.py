"""`headrace run`."""

import contextlib
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NoReturn

import click

from headrace.cli.cluster_options import DEFAULT_FILE, load_settings, variables
from headrace.cli.global_options import HeadraceCommand, uses
from headrace.cli.output import collected_warnings
from headrace.config.dialects import dialect_of
from headrace.config.load import read_config
from headrace.config.model import HeadraceConfig
from headrace.config.process_share import process_count
from headrace.consumers.feature_checks import feature_checks, problems_of_files
from headrace.errors import ConfigError, FunctionInvalid, PipelineInvalid
from headrace.extras import hook

log = logging.getLogger(__name__)

_STANDARD_ERROR = 2
_STARTED_AGAIN = "_HEADRACE_STARTED_AGAIN"
"""A variable of the process that follows another after a change."""
_INVALID = 78
_INVALID_SECONDS = 1.0
_CHECK_SECONDS = 60.0


@click.command(cls=HeadraceCommand)
@click.option("--dev", is_flag=True, help="For development: start a Kafka if none responds, restart on a change.")
@click.option("--share", is_flag=True, hidden=True, help="One of several processes; the first one starts it.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
@uses("config")
def run(dev: bool, share: bool, program: tuple[str, ...], config: Path | None) -> int:
    """Run everything that the file names, in the foreground; with a PROGRAM after `--`, run that as well.

    Prints one line `ready http=...` on standard output when everything is ready; logs go to standard error. After
    SIGTERM or Ctrl-C it finishes what is in flight; a second one stops it at once.

    The program starts when Headrace is ready, and has its address in HEADRACE_URL. When it ends, Headrace ends with
    its exit code. When Headrace ends, it ends the program first.

    With --dev, no file is needed. A changed file is checked, and the run restarts if it is valid.

    Example: headrace run --dev -- node app.js
    """
    file = config or DEFAULT_FILE
    if share:
        return _run_share(file)
    if program and not shutil.which(program[0]):
        raise click.UsageError(f"cannot start {program[0]}: no such program; the configuration file is named with -c")
    path = None if dev and file == DEFAULT_FILE and not file.exists() else file
    follows = os.environ.pop(_STARTED_AGAIN, "")
    try:
        code, starts_again = _run(file, path, dev, program, is_checked=bool(follows))
    except (ConfigError, FunctionInvalid, PipelineInvalid) as problem:
        if not follows:
            raise
        click.echo(f"{problem.description}\nwaiting until the files are valid", err=True)
        _wait_until_valid(file)
        starts_again = True
    if starts_again:
        _start_again()
    return code


def _run(file: Path, path: Path | None, dev: bool, program: tuple[str, ...], *, is_checked: bool) -> tuple[int, bool]:
    """Return the exit code, and whether a change asks for another run."""
    from headrace.app.changed_files import ChangedFiles
    from headrace.runtime import SystemClock
    from headrace.runtime.telemetry.logs import configure_logging

    settings = load_settings(path)
    files = ChangedFiles(path, settings, SystemClock()) if dev else None
    if path and not is_checked:
        _check(path, settings)
    settings = hook("development", "headrace run --dev")(path) if dev else settings
    configure_logging(settings.log_level, settings.log_format)
    for remark in read_config(file, variables()).remarks if dialect_of(file) else ():
        log.warning(remark)
    if settings.processes != 1 and not dev and process_count(settings) > 1:
        if program:
            raise click.UsageError("a PROGRAM needs one process: write processes: 1, or start it by itself")
        from headrace.app.several_processes import run_processes

        return run_processes(settings, file, read_again=lambda: load_settings(file), announce=click.echo), False
    from headrace.app.app import run as run_everything

    code = run_everything(
        settings, announce=click.echo, read_again=lambda: load_settings(file), program=program, files=files
    )
    return code, bool(files and files.starts_again)


def _check(file: Path, settings: HeadraceConfig) -> None:
    """Do what `config check` does, before anything starts.

    Code of users is not imported. What loads large libraries runs in a process of its own.

    Raises:
        ConfigError: One line per problem.
    """
    if any(checks.loads_libraries(settings) for checks in feature_checks()):
        code, text = _config_check(file)
        problems = [line for line in text.splitlines() if not line.startswith("warning: ")] if code == _INVALID else []
    else:
        with collected_warnings():  # the start logs them
            problems = problems_of_files({"functions": settings.functions}, settings)
    if problems:
        raise ConfigError("\n".join(problems))


def _config_check(file: Path) -> tuple[int, str]:
    from headrace.runtime import run_program

    check = [sys.executable, "-m", "headrace.cli.main", "config", "check", "-c", str(file)]
    return run_program(check, _CHECK_SECONDS, env=os.environ)


def _wait_until_valid(file: Path) -> None:
    while _config_check(file)[0]:
        time.sleep(_INVALID_SECONDS)


def _start_again() -> NoReturn:
    """Become a new process of the same command."""
    sys.stdout.flush()
    words = sys.orig_argv[1:]
    _inherit_standard_files_only()
    os.execve(sys.executable, [sys.executable, *words], {**os.environ, _STARTED_AGAIN: "1"})


def _run_share(file: Path) -> int:
    """Run one of several processes, which gets its configuration from the one that started it."""
    from headrace.app.app import run as run_everything
    from headrace.runtime.process_link import ProcessLink

    link = ProcessLink()
    settings, share = link.received
    link.watchdog_seconds = share.watchdog_seconds
    return run_everything(
        share.of(settings),
        announce=lambda line: setattr(link, "ready_line", line),
        read_again=lambda: share.of(load_settings(file)),
        share=share,
        link=link,
    )


def _inherit_standard_files_only() -> None:
    """Have the next program of this process close the others: Kafka's client leaves its pipes open for it."""
    for number in [int(file.name) for file in Path("/dev/fd").iterdir()]:
        if number > _STANDARD_ERROR:
            with contextlib.suppress(OSError):  # that of the list
                os.set_inheritable(number, False)
