"""The exporter of spans at a collector that misbehaves."""

from __future__ import annotations

import asyncio

import pytest

from headrace.runtime.telemetry import tracing


async def test_a_response_without_an_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would fill the memory, and no later span would be exported."""
    left: asyncio.Queue[None] = asyncio.Queue()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\nbegin")
        await reader.read()
        writer.close()
        left.put_nowait(None)

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server, asyncio.timeout(8):
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name, value in (("EXPORTER_OTLP_ENDPOINT", endpoint), ("TRACES_SAMPLER", "always_on")):
            monkeypatch.setenv(f"OTEL_{name}", value)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        [service] = tracing.configure_tracing()
        assert tracing.tracer
        for _ in range(2):
            span = tracing.tracer.start("x", "SERVER", {})
            assert span
            span.end()
            await left.get()
        await service.stop()
