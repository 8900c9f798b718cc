"""What child processes see of the environment of this one: everything but Headrace's own variables."""

import os
from collections.abc import Mapping
from typing import Final

_OWN: Final = "HEADRACE_"


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without the variables of Headrace, in any letter case: settings and tokens may be secrets.

    Every child gets this one, unless its starter passes another: a process of Headrace itself needs its settings.
    """
    known = os.environ if environ is None else environ
    return {name: value for name, value in known.items() if not name.upper().startswith(_OWN)}
