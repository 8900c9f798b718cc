"""Commands of earlier versions: each is an error that says what to type."""

from collections.abc import Mapping
from typing import ClassVar

import click


class WithRemoved(click.Group):
    """A group of commands that knows those that were removed."""

    instead: ClassVar[Mapping[str, str]] = {}
    """Names of removed commands, and what replaces them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in self.instead:
            ctx.fail(f"{ctx.command_path} {args[0]} was removed. Type: {self.instead[args[0]]}")
        return super().resolve_command(ctx, args)
