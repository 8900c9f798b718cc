"""The example function that people copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.delivery.protocols import ACK

EXAMPLE = Path(__file__).parents[3] / "examples" / "function"


async def test_the_example_runs(running: Any) -> None:
    """It tells late flights from others, leaves out cancelled ones, and loads without a warning."""
    async with running(EXAMPLE) as function:
        flights = [{"carrier": "UA", "arr_delay": delay} for delay in (90, -3, None)]
        outcomes = await function.deliver(*(json.dumps(flight).encode() for flight in flights), b"no flight")
        assert outcomes[:3] == [ACK] * 3 and outcomes[3].permanent
        assert [json.loads(record.value)["arrival"] for record in function.written] == ["very late", "on time"]
        assert function.written[0].headers == [("carrier", b"UA")]
