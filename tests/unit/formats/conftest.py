"""A schema registry in the test's own loop, small and scriptable."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple
from urllib.parse import unquote

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.registry import SchemaRegistry
from headrace_devkit.testing import ManualClock


class SmallRegistry:
    """Answers as Confluent's API does; records requests, and can be stopped or broken."""

    def __init__(self) -> None:
        self.versions: dict[str, list[tuple[int, str]]] = {}
        self.types: dict[int, str] = {}
        self.references: dict[int, list[dict[str, object]]] = {}
        self.requests: list[str] = []
        self.bodies: list[dict[str, str]] = []
        self.authorizations: set[str | None] = set()
        self.broken: web.Response | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def add(self, subject: str, schema_id: int, text: str, type_: str = "AVRO", references: object = None) -> None:
        """Register a version; references are pairs of name and subject, always version 1."""
        if references:
            self.references[schema_id] = [{"name": n, "subject": s, "version": 1} for n, s in references]  # type: ignore[attr-defined]
        self.versions.setdefault(subject, []).append((schema_id, text))
        self.types[schema_id] = type_

    async def handle(self, request: web.Request) -> web.Response:
        """Answer a request to any path."""
        self.requests.append(f"{request.method} {request.path}")
        self.authorizations.add(request.headers.get("Authorization"))
        await self.gate.wait()
        if self.broken is not None:
            moved = {"Location": self.broken.headers["Location"]} if "Location" in self.broken.headers else {}
            return web.Response(status=self.broken.status, body=self.broken.body, headers=moved)
        parts = [unquote(step) for step in request.rel_url.raw_path.strip("/").split("/")]
        if parts[0] == "schemas":
            return self._by_id(int(parts[2]), with_versions=parts[-1] == "versions")
        if request.method == "POST":
            return self._post(parts[1], await request.json(), register=parts[-1] == "versions")
        return self._version(parts[1], parts[3])

    def _by_id(self, schema_id: int, with_versions: bool) -> web.Response:
        found = {s: t for s, entries in self.versions.items() for i, t in entries if i == schema_id}
        if not found:
            return _reject(404, 40403)
        if with_versions:
            return web.json_response([{"subject": subject, "version": 1} for subject in found])
        return web.json_response({"schema": next(iter(found.values())), **self._extra(schema_id)})

    def _extra(self, schema_id: int) -> dict[str, object]:
        extra: dict[str, object] = {} if self.types[schema_id] == "AVRO" else {"schemaType": self.types[schema_id]}
        return {**extra, "references": self.references.get(schema_id)} if schema_id in self.references else extra

    def _version(self, subject: str, number: str) -> web.Response:
        entries = self.versions.get(subject, [])
        index = len(entries) if number == "latest" else int(number)
        if not entries or index > len(entries):
            return _reject(404, 40401)
        schema_id, text = entries[index - 1]
        return web.json_response(
            {"subject": subject, "id": schema_id, "version": index, "schema": text} | self._extra(schema_id)
        )

    def _post(self, subject: str, body: dict[str, str], register: bool) -> web.Response:
        text = body["schema"]
        for schema_id, known in self.versions.get(subject, []):
            if known == text:
                return web.json_response({"id": schema_id})
        if not register:
            return _reject(404, 40403)
        if text == "incompatible":
            return _reject(409, 409, "not compatible with version 1")
        self.bodies.append(body)
        self.add(subject, 100 + len(self.types), text, body["schemaType"])
        return web.json_response({"id": 99 + len(self.types)})


def _reject(status: int, code: int, message: str = "not there") -> web.Response:
    return web.json_response({"error_code": code, "message": message}, status=status)


class Setting(NamedTuple):
    """A small registry, its client, and the clock of the client."""

    server: SmallRegistry
    client: SchemaRegistry
    clock: ManualClock


@contextlib.asynccontextmanager
async def _serving(shows: ssl.SSLContext | None = None, **settings: object) -> AsyncIterator[Setting]:
    small, clock = SmallRegistry(), ManualClock()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", small.handle)
    server = TestServer(app)
    await server.start_server(ssl=shows)
    scheme = "https" if "tls" in settings else "http"
    config = SchemaRegistryConfig.model_validate({"url": f"{scheme}://127.0.0.1:{server.port}", **settings})
    client = SchemaRegistry(config, clock)
    try:
        yield Setting(small, client, clock)
    finally:
        small.gate.set()
        await client.close()
        await server.close()


@pytest.fixture
def serving() -> Callable[..., AbstractAsyncContextManager[Setting]]:
    """Serve a small registry: `async with serving(timeout_seconds=1) as setting`; with TLS if `shows` is given."""
    return _serving
