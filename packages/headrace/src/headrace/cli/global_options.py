"""The global options: each is declared once, explained once (`headrace --help`), and taken anywhere in a command line.

A command names those that it uses with `uses`, and refuses the others. All commands are `HeadraceCommand` or
`HeadraceGroup`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

_GIVEN: Final = "headrace.global_options"
"""In `click.Context.meta`: the values of this command line by the name of their option."""
RESULT_FORMATS: Final = ("text", "json")
ROW_FORMATS: Final = (*RESULT_FORMATS, "csv", "parquet")


class GlobalOption(click.Option):
    """An option that keeps its value for the command that uses it."""

    def __init__(self, *spellings: str, **settings: Any) -> None:
        """Take the settings of a `click.Option`."""
        super().__init__(spellings, expose_value=False, callback=_keep, **settings)

    def get_help_record(self, ctx: click.Context) -> None:
        """Leave it out of the options of a command."""


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> Any:
    if option.name and ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
        ctx.meta.setdefault(_GIVEN, {})[option.name] = value
        if isinstance(ctx.command, HeadraceCommand):
            refuse_unused(ctx, ctx.command.callback)
    return value


_PATH: Final = click.Path(path_type=Path)
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
OPTIONS: Final = (
    GlobalOption("-c", "--config", type=_PATH, help="Configuration: a file, or a folder of light-4j."),
    GlobalOption("-b", "--bootstrap-servers", help="Kafka: host:port, comma separated."),
    GlobalOption("--schema-registry", "-r", metavar="URL", help="Schema registry, for formats that need one."),
    GlobalOption(
        "--url", "urls", multiple=True, help="A running Headrace; or set HEADRACE_URL. Token: HEADRACE_TOKEN."
    ),
    GlobalOption("--ca", type=_FILE, help="Authorities that sign its certificate, in PEM; or set SSL_CERT_FILE."),
    GlobalOption("--output", type=click.Choice(ROW_FORMATS), help="Format of standard output; text by default."),
    GlobalOption("--debug", is_flag=True, help="Show the traceback of an error and the Kafka client's log."),
)
_BY_NAME: Final = {str(option.name): option for option in OPTIONS}


def uses(*names: str, formats: Sequence[str] = RESULT_FORMATS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the values of global options, by their names; `formats` are those of its `output`.

    A value is None if the option is not given. `urls` has each `--url`, and `url` the last one.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*arguments: Any, **others: Any) -> Any:
            values = {name: value_of(name) for name in names}
            if (output := values.get("output", formats[0])) not in formats:
                path = click.get_current_context().command_path
                raise click.UsageError(f"{path} prints {' or '.join(formats)}, not {output}: use headrace sql")
            return command(*arguments, **values, **others)

        used = {"urls" if name == "url" else name for name in names}
        run.__dict__["global_options"] = frozenset(used | _used_by(command))
        return run

    return decorate


def value_of(name: str) -> Any:
    """Return the value of a global option in this command line; see `uses`."""
    given = click.get_current_context().meta.get(_GIVEN, {})
    if name == "url":
        return next(reversed(given.get("urls", ())), None)
    return given.get(name, {"output": RESULT_FORMATS[0], "urls": (), "debug": False}.get(name))


def _used_by(command: object) -> frozenset[str]:
    return frozenset({"debug", *getattr(command, "global_options", ())})


def refuse_unused(ctx: click.Context, command: object) -> None:
    """Raise click.UsageError for the global options of this command line that a command does not use."""
    unused = [name for name in ctx.meta.get(_GIVEN, {}) if name not in _used_by(command)]
    if unused and not ctx.resilient_parsing:
        spellings = " and ".join(max(_BY_NAME[name].opts, key=len) for name in unused)
        raise click.UsageError(f"{ctx.command_path} has no use for {spellings}: leave it out", ctx)


class HeadraceCommand(click.Command):
    """A command that takes global options."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *OPTIONS]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Offer what it does not refuse."""
        used = _used_by(self.callback)
        refused = {name for key, one in _BY_NAME.items() if key not in used for name in one.opts}
        return [item for item in super().shell_complete(ctx, incomplete) if item.value not in refused]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, after rejecting options before the command that it does not use."""
        refuse_unused(ctx, self.callback)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Explain its own options, and name the global ones that it uses."""
        super().format_options(ctx, formatter)
        names = [option.opts[0] for name, option in _BY_NAME.items() if name in _used_by(self.callback)]
        formatter.write_paragraph()
        formatter.write_text(f"Global options (headrace --help): {', '.join(names)}")


class HeadraceGroup(click.Group):
    """A group of commands that takes global options for them."""

    command_class = HeadraceCommand
    group_class = type

    def __init__(self, *arguments: Any, aliases: Mapping[str, str] | None = None, **settings: Any) -> None:
        """Take the settings of a `click.Group`, and second names of its commands."""
        super().__init__(*arguments, **settings)
        self.aliases = aliases or {}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = super().get_params(ctx)
        return [*own, *(option for option in OPTIONS if option not in own)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by either of its names."""
        found = super().resolve_command(ctx, [self.aliases.get(word, word) for word in args[:1]] + args[1:])
        if found[1] is not None and not isinstance(found[1], HeadraceCommand | HeadraceGroup):  # of another package
            refuse_unused(ctx, getattr(found[1], "callback", None))
        return found
