"""Characters of foreign text that a reader would not see, or that would change what he sees: one set for all output."""

import re
from typing import Final

INVISIBLE: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
    "\ud800-\udfff]"
)
"""Controls except line end and tab, marks of direction, characters without a glyph, and halves of a surrogate pair.

The joiners U+200C and U+200D and the variation selectors U+FE00 to U+FE0F stay: scripts and emoji need them.
"""


def escaped(text: str) -> str:
    r"""Return a text in which these characters are `\uXXXX`, as JSON writes them."""
    return INVISIBLE.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _units(found[0])), text)


def _units(character: str) -> memoryview:
    return memoryview(character.encode("utf-16", "surrogatepass")[2:]).cast("H")  # both in the machine's byte order
