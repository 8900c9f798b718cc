"""The kinds of triggers of a function, by their names in the file."""

from collections.abc import Mapping
from typing import Final

from headrace.functions.triggers.http import HttpTrigger
from headrace.functions.triggers.kafka import KafkaTrigger
from headrace.functions.triggers.trigger import Trigger

_OWN: Final[tuple[type[Trigger], ...]] = (KafkaTrigger, HttpTrigger)
"""One line for each kind."""
KINDS: Final[Mapping[str, type[Trigger]]] = {name: kind for kind in _OWN for name in kind.kinds}
