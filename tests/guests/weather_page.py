"""A page of the console of another package."""

from __future__ import annotations

from typing import Any

from headrace_console.view import page


@page("/weather", "Weather", position=15)
async def weather(view: Any) -> None:
    """Build the page."""
