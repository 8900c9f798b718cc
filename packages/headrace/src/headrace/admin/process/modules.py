"""What a process can reload while it runs, and what needs a restart."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from headrace.config.whole_file import WholeFile
from headrace.errors import HeadraceError
from headrace.runtime.feature_parts import Reload

ALL = "ALL"


class ModuleView(msgspec.Struct):
    """A part of the process, and how it takes up a change."""

    name: str
    reload: Literal["request", "restart"]
    """`request`: POST /adm/modules reloads it. `restart`: only a restart of the process does."""
    how: str


class Reloads(msgspec.Struct, rename="camel"):
    """What became of a request."""

    reloaded: list[str]
    needs_restart: list[str]
    """Parts that only a restart reloads."""
    failed: dict[str, str]
    """Reasons by name. These parts keep what they had."""


class Modules:
    """The parts of a process by name: those that can be reloaded, and the sections of `headrace.yaml`."""

    def __init__(self, reloadable: Callable[[], Mapping[str, Reload]]) -> None:
        """Prepare; `reloadable` returns the parts that can be reloaded now."""
        self._reloadable = reloadable

    def list(self) -> Sequence[ModuleView]:
        """Return every part."""
        names = self._reloadable()
        reloadable = [ModuleView(name, "request", module.how) for name, module in names.items()]
        rest = [ModuleView(name, "restart", how) for name, how in _SECTIONS.items() if name not in names]
        return [*reloadable, *rest]

    async def reload(self, names: Iterable[str]) -> Reloads:
        """Reload the parts of these names; ALL stands for each that can be reloaded."""
        reloadable, result = self._reloadable(), Reloads([], [], {})
        for name in dict.fromkeys(names):
            for each in reloadable if name == ALL else [name]:
                if each not in reloadable:
                    result.needs_restart.append(each)
                elif each not in result.reloaded:
                    try:
                        await reloadable[each].reload()
                        result.reloaded.append(each)
                    except (HeadraceError, OSError) as cause:
                        result.failed[each] = cause.description if isinstance(cause, HeadraceError) else str(cause)
        return result


_RESTART = "change headrace.yaml and restart the process"
_SECTIONS = {
    **{name: _RESTART for name in WholeFile.model_fields if name not in WholeFile.internal},
    "http": f"{_RESTART}; changed files of http.tls are used within seconds",
    "reactive_consumers": f"{_RESTART}; PATCH /adm/reactive-consumers/{{name}}/settings changes some settings at once",
    "kafka": f"{_RESTART}; changed files of kafka.security are used within seconds",
    "schema_registry": f"{_RESTART}; a changed file of the password is used at the next request",
}
"""The sections of `headrace.yaml`, and what a change of each takes."""
