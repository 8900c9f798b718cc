"""The settings of placement."""

from typing import Annotated

from pydantic import Field, StringConstraints

from headrace.config.section import Section

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{0,100}$")]


class PlacementConfig(Section):
    """Which processes run which consumers and functions. Without this section each process runs all of them."""

    copies: Annotated[int, Field(ge=1, le=100)] = 2
    """Processes that run each consumer."""
    process: _Name = ""
    """Name of this process, the same after a restart; by default the name of the machine."""
    zone: _Name = ""
    """Zone of this process. A consumer is in as many zones as possible."""
