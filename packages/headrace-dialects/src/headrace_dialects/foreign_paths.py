"""Which path of another product a request means, and what to use here; nothing is guessed from similar names."""

import csv
import functools
import re
from importlib.resources import files
from typing import Final, NamedTuple

_SHOWN_CHARACTERS: Final = 100


class ForeignPath(NamedTuple):
    """A path that another product serves."""

    method: str
    """Empty for every method."""
    path: str
    """With names in place of parameters; `/**` at its end stands for any rest, or none."""
    product: str
    instead: str
    """Our method and path; empty if there is none."""
    page: str
    """The page that says more."""

    def values_in(self, method: str, path: str) -> dict[str, str] | None:
        """Return the parameters of a request for it; None for any other request."""
        match = _pattern(self.path).fullmatch(path) if self.method in ("", method) else None
        return match.groupdict() if match else None


@functools.cache
def rows() -> list[ForeignPath]:
    """Return the paths; of several that fit a request, the first counts."""
    text = files(__package__).joinpath("foreign_paths.csv").read_text(encoding="utf-8")
    return [ForeignPath(**row) for row in csv.DictReader(text.splitlines())]


def own_of(method: str, path: str) -> str:
    """Return what to use in place of a path of another product, as the end of a sentence; empty for an unknown path."""
    for row in rows():
        values = row.values_in(method, path)
        if values is not None:
            shown = {name: text[:_SHOWN_CHARACTERS] for name, text in values.items()}
            instead = row.instead.format(**{"topic": "{topic}", **shown})
            return f"; it is a path of {row.product}: {instead and f'use {instead}, and '}see docs/{row.page}"
    return ""


@functools.cache
def _pattern(path: str) -> re.Pattern[str]:
    text, rest = path.removesuffix("/**"), "(?:/.*)?" if path.endswith("/**") else "/?"
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", text) + rest, re.DOTALL)
