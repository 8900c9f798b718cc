"""Names for the completion of the shell: topics, groups and consumers, within a second or none at all."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

import click

from headrace.cli.global_options import value_of

_SECONDS: Final = 0.9


def _complete(ctx: click.Context, incomplete: str, find: Callable[[Any], Awaitable[list[str]]]) -> list[str]:
    with contextlib.suppress(Exception), ctx.scope(cleanup=False):
        from headrace.cli.cluster_options import find_cluster
        from headrace.kafka import Admin

        cluster = find_cluster(value_of("bootstrap_servers"), value_of("config"), only=("kafka", "schema_registry"))
        Admin.on_wait = None
        limited = cluster.kafka.model_copy(update={"request_timeout_seconds": _SECONDS})

        async def names() -> list[str]:
            return await asyncio.wait_for(find(Admin(limited)), _SECONDS)

        return [name for name in asyncio.run(names()) if name.startswith(incomplete)]
    return []


def topic_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics that begin with a text; none if Kafka does not answer soon."""

    async def find(admin: Any) -> list[str]:
        return [topic.name for topic in await admin.list_topics()]

    return _complete(ctx, incomplete, find)


def group_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the groups that begin with a text; none if Kafka does not answer soon."""

    async def find(admin: Any) -> list[str]:
        return [group.name for group in await admin.list_groups()]

    return _complete(ctx, incomplete, find)


def consumer_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the reactive consumers and functions that begin with a text; none if no Headrace answers soon."""
    with contextlib.suppress(Exception), ctx.scope(cleanup=False):
        from headrace.cli.api import api_at
        from headrace.commands.routes import ControlEndpoints

        given = {name: value_of(name) for name in ("url", "ca", "config")}
        found = api_at(**given, limit_seconds=_SECONDS).call(ControlEndpoints.list)["consumers"]
        return [one["name"] for one in found if one["name"].startswith(incomplete)]
    return []
