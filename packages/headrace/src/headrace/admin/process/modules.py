"""What a process can reload while it runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from headrace.errors import HeadraceError
from headrace.runtime.feature_parts import Reload

ALL = "ALL"


class ModuleView(msgspec.Struct):
    """A part of the process, and how it takes up a change."""

    name: str
    how: str


class Reloads(msgspec.Struct):
    """What became of a request."""

    reloaded: list[str]
    failed: dict[str, str]
    """Reasons by name. These parts keep what they had."""


class Modules:
    """The parts of a process that can be reloaded, by name."""

    def __init__(self, reloadable: Callable[[], Mapping[str, Reload]]) -> None:
        """Prepare; `reloadable` returns the parts that can be reloaded now."""
        self._reloadable = reloadable

    def list(self) -> Sequence[ModuleView]:
        return [ModuleView(name, module.how) for name, module in self._reloadable().items()]

    async def reload(self, names: Iterable[str]) -> Reloads:
        """Reload the parts of these names, which `list` has; ALL stands for each of them."""
        reloadable, result = self._reloadable(), Reloads([], {})
        for name in dict.fromkeys(names):
            for each in reloadable if name == ALL else [name]:
                if each not in result.reloaded:
                    try:
                        await reloadable[each].reload()
                        result.reloaded.append(each)
                    except (HeadraceError, OSError) as cause:
                        result.failed[each] = cause.description if isinstance(cause, HeadraceError) else str(cause)
        return result
