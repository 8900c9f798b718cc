"""The command `headrace`: imports the subcommand, and turns errors into a paragraph and an exit code."""

import atexit
import contextlib
import errno
import functools
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from headrace.cli.global_options import OPTIONS, HeadraceGroup, refuse_unused
from headrace.config.spelling import nearest
from headrace.errors import ConfigError, FunctionInvalid, HeadraceError, PipelineInvalid
from headrace.extras import extra_of, guest_missing, not_installed, other_version
from headrace.feature import CliCommand, features, imported

_OUTPUT_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

_WELCOME = """\
Headrace carries Kafka to people's code. Three commands to start with:

  headrace init push my-project    write a small project: push, function, pipeline, query or all
  headrace run --dev               run it, with a Kafka on this machine if none responds
  headrace consume orders          look at the records of a topic

All commands: headrace --help"""


@functools.cache
def _commands() -> Mapping[str, CliCommand]:
    """Return the commands of every feature by name, in the order of their names."""
    found = {name: command for feature in features() for name, command in feature.commands.items()}
    return dict(sorted(found.items()))


class _Lazy(HeadraceGroup):
    """Imports a command's module only when the command is used, so that help and completion are fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _commands():
            return None
        command: click.Command = imported(_commands()[cmd_name].where)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (
            args
            and args[0] not in _commands()
            and (missing := guest_missing(f"command {args[0]}", f"headrace {args[0]}"))
        ):
            raise missing
        if args and args[0] not in _commands() and (near := nearest(args[0], _commands())):
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{near}'?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        fits = ((name, one.help) for name, one in _commands().items() if name.startswith(incomplete))
        commands = [CompletionItem(name, help=text) for name, text in fits]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Global options, before or after the command"):
            formatter.write_dl([record for one in OPTIONS if (record := click.Option.get_help_record(one, ctx))])
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.help) for name, one in _commands().items()])


@click.group(
    cls=_Lazy,
    params=list(OPTIONS),
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="headrace")
@click.pass_context
def root(ctx: click.Context) -> None:
    """Carry Kafka to people's code: an HTTP sidecar, a function runtime and Spark pipelines.

    Exit codes: 0 ok, 1 the work failed, 2 wrong usage, 78 bad configuration, 130 interrupted.

    Example: headrace consume orders --max 10
    """
    if ctx.invoked_subcommand is None:
        refuse_unused(ctx, root.callback)
        click.echo(_WELCOME)


def _chosen(words: Sequence[str]) -> Sequence[str]:
    """Return the words from the command on, without the global options before it."""
    context = click.Context(root, resilient_parsing=True, **root.context_settings)
    return root.make_parser(context).parse_args(list(words))[1]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and end the process with its exit code."""
    gc.set_threshold(200_000, 50, 100)  # what imports and a start make stays: collections would find nothing
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words  # behind it are the words of another program
    chosen = _chosen(own)
    if chosen[:1] == ["run"]:  # during the start, SIGTERM ends the process at once with exit code 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if chosen[:1] == ["pipeline"]:  # its temporary files hold secrets, so they are removed as after Ctrl-C
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:  # `nohup` ignores the second
                signal.signal(number, signal.default_int_handler)
    _open_standard_files()
    try:
        code = root.main(words, "headrace", standalone_mode=False) or 0
        sys.stdout.flush()
    except (click.Abort, KeyboardInterrupt):
        # Clean-up is done. A normal exit would join threads, which may still wait for Kafka or the terminal.
        click.echo("interrupted", err=True)
        with contextlib.suppress(OSError):  # a full disk
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)
    except BrokenPipeError:
        # The reader of the output has closed it (`headrace consume t | head`).
        _discard_output()
        code = 0
    except SystemExit as ended:  # during the start of `run`
        code = ended.code if isinstance(ended.code, int) else 0
    except Exception as cause:  # noqa: BLE001 boundary: the user sees one paragraph
        code = _explain(cause, "--debug" in own, chosen)
    if arguments is None and "run" in chosen:
        _end_at_once(code)
    sys.exit(code)


def _open_standard_files() -> None:
    """Open what the parent has closed as /dev/null, and let output wait for a slow reader: it may share its file."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    with contextlib.suppress(OSError):
        os.set_blocking(1, True)


def _discard_output() -> None:
    """Let the rest of the output go nowhere: a flush at the end would fail again, and change the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_at_once(code: int) -> NoReturn:
    """End the process after the functions registered with `atexit`, which flush the log.

    A normal exit would wait for threads, and one of them may look up a name at a server that does not answer.
    """
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _explain(cause: Exception, debug: bool, words: Sequence[str]) -> int:
    if debug:
        traceback.print_exception(cause)
    if isinstance(cause, click.ClickException):
        cause.show()
        return cause.exit_code
    if not isinstance(cause, HeadraceError | OSError) and (mixed := other_version(cause)):
        cause = mixed
    if isinstance(cause, ModuleNotFoundError) and (missing := _missing_extra(cause.name or "", words)):
        cause = missing
    if isinstance(cause, HeadraceError):
        click.echo(cause.description, err=True)
        return 78 if isinstance(cause, ConfigError | FunctionInvalid | PipelineInvalid) else 1
    if isinstance(cause, OSError) and cause.errno in _OUTPUT_FAILED and not cause.filename:
        _discard_output()
        click.echo(f"cannot write the output: {cause.strerror}", err=True)
        return 1
    click.echo(
        f"A defect of Headrace: {type(cause).__name__}: {cause}. Please report it with the output of the same command "
        "with --debug",
        err=True,
    )
    return 1


def _missing_extra(module: str, words: Sequence[str]) -> HeadraceError | None:
    """Return the error that names the extra with a module, wherever its import failed; None if none has it."""
    name = next((word for word in words if word in _commands()), "")
    extra = extra_of(module)
    whole = _commands()[name].extra if name else ""
    return not_installed(f"headrace {name}", module, whole or extra) if extra else None


if __name__ == "__main__":
    main()
