"""The known name that a misspelt one is nearest to."""

import difflib
from collections.abc import Iterable


def nearest(written: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """Return the known name that was probably intended, in any letter case; empty if none is similar.

    Names with the same characters in another order are similar. `similarity` is the ratio of difflib, from 0 to 1, for
    others.
    """
    names, written = {name.lower(): name for name in known}, written.lower()
    found = difflib.get_close_matches(written, names, 1, similarity)
    found += [name for name in names if len(name) == len(written) and sorted(name) == sorted(written)]
    return names[found[0]] if found else ""


def hint(written: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the name that was probably intended, else all known ones."""
    known = [*known]
    near = nearest(written, known)
    return f"did you mean {near}?" if near else f"known here are {', '.join(known)}" if known else "none is known here"
