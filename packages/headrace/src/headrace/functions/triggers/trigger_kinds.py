"""The kinds of triggers: those of this package, and those of other packages by their entry points."""

from collections.abc import Mapping
from typing import Final

from headrace.extras import by_key, kinds_of_guests
from headrace.functions.function_keys import add_mapping
from headrace.functions.triggers.http_trigger import HttpTrigger
from headrace.functions.triggers.kafka_trigger import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger

GROUP: Final = "headrace.functions.triggers"
"""The group of entry points by which another package registers a kind: `NAME = "package.module:Class"`."""
_OWN: Final = (KafkaTrigger, HttpTrigger)
"""One line for each kind of this package."""


def registered() -> Mapping[str, type[Trigger]]:
    """Return the kinds by their names in the file: those of this package, then those of entry points.

    Raises:
        EnvironmentProblem: An entry point cannot be loaded, or is not a new kind of trigger.
    """
    kinds: tuple[type[Trigger], ...] = (*_OWN, *kinds_of_guests(GROUP, Trigger, "kind of trigger"))
    for kind in kinds:
        add_mapping(kind.mapping, kind.own_keys())
    return by_key(((name, kind) for kind in kinds for name in kind.kinds), "kind of trigger")


KINDS: Final = registered()
"""Each kind by its names; looked for once per process."""
