"""What stands in the way of a consumer: said by its thread, read by the loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.records import TopicPartition

log = logging.getLogger(__name__)


class Problems:
    """One sentence per partition at most, and one about the membership."""

    def __init__(self, group: str) -> None:
        self._texts: dict[str, str] = {"": f"group {group}: not joined yet"}

    def say(self, about: str, problem: str) -> None:
        """Set or clear what is said about a partition, or about the membership when `about` is empty."""
        if problem:
            if self._texts.get(about) != problem:  # it may be found again every second
                log.warning("%s", problem)
            self._texts[about] = problem
        else:
            self._texts.pop(about, None)

    def all(self) -> Sequence[str]:
        """Return every sentence."""
        return list(self._texts.values())

    def of(self, partition: TopicPartition) -> str:
        """Return what keeps records of a partition from coming; empty if nothing does."""
        return self._texts.get(str(partition)) or self._texts.get("", "")
