"""The demo's backend: takes long delays, and fails on purpose for one carrier until it is repaired."""

from aiohttp import web

from headrace.cli.demo.flights import REFUSED_CARRIER


class Backend:
    """An HTTP server on a free port of loopback that remembers which flights it took."""

    def __init__(self) -> None:
        self.delivered: set[str] = set()
        self.repaired = False
        """Whether it takes every carrier."""
        application = web.Application(client_max_size=16 * 1024 * 1024)
        application.router.add_post("/records", self._take)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)

    @property
    def url(self) -> str:
        """Where records are posted, once started."""
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/records"

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()

    async def stop(self) -> None:
        """Listen no more."""
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        """Answer one result per record (sidecar.md 7.4)."""
        return web.json_response([self._one(record) for record in await request.json()])

    def _one(self, record: dict[str, object]) -> dict[str, object]:
        flight = record["value"]
        assert isinstance(flight, dict)
        place = {"record": {name: record[name] for name in ("topic", "partition", "offset")}}
        if flight["carrier"] == REFUSED_CARRIER and not self.repaired:
            return {**place, "processed": False, "stacktrace": "CarrierUnknown: this backend does not know the carrier"}
        self.delivered.add(flight["flight_id"])
        return {**place, "processed": True}
