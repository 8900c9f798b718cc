"""Valid names of topics and groups, checked before any client call.

Source: Kafka's `Topic.validate`. The client reads a subscribed name with a leading `^` as a pattern, so names from
requests are checked first.
"""

import itertools
import re
from collections.abc import Collection
from typing import Final

from headrace.errors import InvalidRequest

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_GROUP_BYTES = 255
_NAMED: Final = 10


def check_topic(name: str) -> str:
    """Return the name if it is valid; otherwise raise InvalidRequest, which lists the valid characters."""
    if not _TOPIC.fullmatch(name) or name in (".", ".."):
        raise InvalidRequest(
            f"{name[:60]!r} is not a valid topic name; use 1 to 249 letters, digits, dots, underscores and hyphens, "
            "and neither '.' nor '..' alone",
            parameter="topic",
        )
    return name


def check_group(name: str) -> str:
    """Return the name if it is valid; otherwise raise InvalidRequest, which lists the valid characters."""
    if not name or name != name.strip() or not name.isprintable() or name.startswith("^"):
        raise InvalidRequest(
            f"{name[:60]!r} is not a valid group name; use printable characters, no outer spaces, no leading '^'",
            parameter="group",
        )
    if len(name.encode()) > _GROUP_BYTES:
        raise InvalidRequest(f"a group name may have at most {_GROUP_BYTES} bytes", parameter="group")
    return name


def names_of(named: Collection[object]) -> str:
    """Return partitions or topics as text of bounded length."""
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(map(str, itertools.islice(named, _NAMED))) + more or "nothing"
