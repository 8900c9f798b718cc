"""A kind of trigger of another package: its events are ticks of a clock."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from headrace.functions.triggers.trigger import Trigger


class TicksTrigger(Trigger):
    """A trigger of kind `ticks`."""

    kinds: ClassVar[tuple[str, ...]] = ("ticks",)
    mapping: ClassVar[str] = "attributes.ticks"

    tick_seconds: Annotated[int, Field(ge=1, alias="tickSeconds", description="Time between two ticks.")] = 60
