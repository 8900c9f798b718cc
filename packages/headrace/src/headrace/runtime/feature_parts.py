"""The parts that a feature adds to one process, and making those of every feature."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from headrace.feature import EVERY_OTHER, Feature, imported
from headrace.runtime.service import Service

P = TypeVar("P", bound="Parts")


class Reload(NamedTuple):
    """A part of a process that can be reloaded on request."""

    how: str
    """What a reload does, a sentence."""
    reload: Callable[[], Awaitable[None]]


class Parts:
    """What a feature adds to a process. A subclass makes it, and has what other features need of it as attributes.

    The constructor takes the `ProcessContext` and the `NeededParts`; it starts and contacts nothing.
    """

    endpoints: Sequence[object] = ()
    """Objects of the classes that the feature names."""

    def services(self) -> Sequence[Service]:
        """Return its services in the order they start. Called once, when the parts of every feature are made."""
        return ()

    def listeners(self, http: Any) -> Sequence[tuple[Any, Any, str]]:
        """Return further listeners: settings, router and name of each. `http` has the settings of the main one."""
        return ()

    def reloads(self) -> Mapping[str, Reload]:
        """Return what can be reloaded now, by name."""
        return {}

    def on_listener(self, web: Any) -> None:
        """Take the service that serves the endpoints."""

    async def open(self) -> None:
        """Do what comes before the start of the first service; an error refuses the start."""

    def close(self) -> None:
        """Undo `open`, after the last service has stopped. Also called if nothing was opened."""


class NeededParts:
    """The parts of the features that one feature needs."""

    def __init__(self, parts: Mapping[str, Parts]) -> None:
        self.by_name = parts

    def of(self, kind: type[P]) -> P:
        """Return the parts of a class.

        Raises:
            LookupError: No feature in `needs` has such parts.
        """
        found = next((one for one in self.by_name.values() if isinstance(one, kind)), None)
        if found is None:
            raise LookupError(f"{kind.__name__} belongs to none of {', '.join(self.by_name)}: add it to `needs`")
        return found


def make_parts(features: Sequence[Feature], context: object) -> Mapping[str, Parts]:
    """Make the parts of features that are in order, by name; nothing is started."""
    made: dict[str, Parts] = {}
    for one in features:
        if one.parts:
            needed = made if EVERY_OTHER in one.needs else {name: made[name] for name in one.needs if name in made}
            made[one.name] = imported(one.parts)(context, NeededParts(dict(needed)))
    return made
