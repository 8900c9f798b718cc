"""Makes the synchronous client from the asynchronous one: `python -m tools.blocking_client` writes its file.

So both have the same operations, words and order, and only one of them is edited.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

CLIENT: Final = Path(__file__).parents[1] / "packages" / "headrace" / "src" / "headrace" / "client"
MADE: Final = CLIENT / "blocking_client.py"
_HEAD: Final = '"""The synchronous client, on httpx; `python -m tools.blocking_client` makes it from `awaiting.py`."""'
_RULES: Final = (
    (r"\bawaiting\b", "blocking"),
    (r'"""The asynchronous client, on httpx\."""', _HEAD),
    (r"^import asyncio\n", ""),
    (r"^import functools\n", "import functools\nimport time\n"),
    (r"\bAsyncIterator, Awaitable, Callable\b", "Callable, Iterator"),
    (r"\bAsyncIterator\b", "Iterator"),
    (r"\bAwaitable\[T\]", "T"),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bhttpx\.AsyncClient\b", "httpx.Client"),
    (r"\bAsync(HeadraceClient|GroupConsumer)\b", r"\1"),
    (r"\basync (def|with|for) ", r"\1 "),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter)__", r"__\1__"),
    (r"\baclose\b", "close"),
)
"""What each word of waiting becomes."""


def made() -> str:
    """Return the text of the synchronous client."""
    text = (CLIENT / "awaiting.py").read_text()
    for find, put in _RULES:
        text = re.sub(find, put, text, flags=re.MULTILINE)
    return text


if __name__ == "__main__":
    MADE.write_text(made())
