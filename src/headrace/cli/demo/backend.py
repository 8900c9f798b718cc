"""The demo's backend: takes long delays, and fails on purpose for one carrier until it is repaired.

Run as `python -m headrace.cli.demo.backend PORT`; serves until it is killed.
"""

from __future__ import annotations

import sys

from aiohttp import web

from headrace.cli.demo.flights import REFUSED_CARRIER


class Backend:
    """Remembers which flights it took."""

    def __init__(self) -> None:
        self.delivered: set[str] = set()
        self.requests = 0
        self.repaired = False

    async def take(self, request: web.Request) -> web.Response:
        """Answer one result per record (sidecar.md 7.4)."""
        self.requests += 1
        return web.json_response([self._one(record) for record in await request.json()])

    async def repair(self, request: web.Request) -> web.Response:
        """From now on take every carrier."""
        self.repaired = True
        return web.json_response({})

    async def counts(self, request: web.Request) -> web.Response:
        """Say how many different flights arrived, in how many requests."""
        return web.json_response({"delivered": len(self.delivered), "requests": self.requests})

    def _one(self, record: dict[str, object]) -> dict[str, object]:
        flight = record["value"]
        assert isinstance(flight, dict)
        place = {"record": {name: record[name] for name in ("topic", "partition", "offset")}}
        if flight["carrier"] == REFUSED_CARRIER and not self.repaired:
            return {**place, "processed": False, "stacktrace": "CarrierUnknown: this backend does not know the carrier"}
        self.delivered.add(flight["flight_id"])
        return {**place, "processed": True}


def main() -> None:
    """Serve on a loopback port."""
    backend = Backend()
    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.add_routes(
        [
            web.post("/records", backend.take),
            web.post("/repair", backend.repair),
            web.get("/counts", backend.counts),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
