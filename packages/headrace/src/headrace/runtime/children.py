"""What child processes see of the environment of this one: everything but Headrace's own variables."""

import os
import re
from collections.abc import Collection
from typing import Final

_OWN: Final = "HEADRACE_"
_HOLDS_SECRET: Final = re.compile("PRIVATE KEY-----|LoginModule")
"""Found in keys and JAAS lines, whose text in a variable may differ from that of the setting."""


def child_environment(hidden: Collection[str] | None = None) -> dict[str, str]:
    """Return the environment without the variables of Headrace, in any letter case: settings and tokens may be secrets.

    A child that runs for others, who may read its variables, also sees no value of `hidden`, and no private key.
    Every child gets this one, unless its starter passes another: a process of Headrace itself needs its settings.
    """
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(_OWN)}
    if hidden is None:
        return own
    return {name: value for name, value in own.items() if value not in hidden and not _HOLDS_SECRET.search(value)}
