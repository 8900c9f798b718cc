"""Administration: hostile requests, secrets, and what is bounded or ends by itself."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.admin.health.routes import HealthEndpoints
from headrace.admin.process.routes import ContentQuery
from headrace.admin.process.server_info import server_info
from headrace.config.administration import HealthConfig
from headrace.config.explain import mask
from headrace.config.known_secrets import MASK, SecretMask
from headrace.config.model import HeadraceConfig
from headrace.config.registrations import refused_address
from headrace.config.whole_file import WholeFile
from headrace.errors import DeliveryError, Forbidden, HeadraceError, PathNotFound, RequestError
from headrace.http.endpoint import Call
from headrace.runtime import Deadline, Readiness, SystemClock
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.recent_logs import MAX_CHARACTERS, MAX_RECORDS
from headrace_dialects.light4j.chaos import AssaultRequest, Chaos
from headrace_dialects.light4j.chaos_routes import ChaosEndpoints
from tests.administration_endpoints import administration, assaults, pass_through
from tests.raw_server import always, served
from tests.running_server import RunningServer
from tests.unit.http.test_openapi import request
from yaml_table import table


def secret_config() -> HeadraceConfig:
    """Return a configuration full of secrets, as it is after it was read."""
    return WholeFile.model_validate(table(__file__, "secrets"))


async def test_hostile_requests(server: RunningServer) -> None:
    """Each has its status and code; none is a defect."""
    for method, path, body, status, code in table(__file__, "requests"):
        response = await server.ask(request(method, path, body=body.encode()))
        assert response.status == status, (path, body, response.body)
        assert code in ("", response.json["code"] if status >= 400 else ""), (path, body, response.body)
    many = json.dumps([{"name": "ROOT", "level": "INFO"}] * 101).encode()
    assert (await server.ask(request("POST", "/adm/logger", body=many))).status == 400
    assert (await server.ask(request("POST", "/adm/logger", body=b"[" * 100_000))).status == 400


async def test_nothing_but_json_of_an_allowed_backend_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other URL is contacted, however it is written; no redirect is followed; an answer is small, whole and soon."""
    monkeypatch.setattr("headrace_dialects.light4j.pass_through._SECONDS", 0.3)

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\n1\r\n")
            await asyncio.sleep(0.01)

    answers = [always(answer.encode()) for answer in table(__file__, "refused_answers")]
    async with served(*answers, endless) as backend:
        base = f"http://127.0.0.1:{backend.port}"
        backends = pass_through(WholeFile.model_validate({"admin": {"pass_through": [base]}}))

        async def ask(value: str) -> None:
            headers = {b"x-adm-passthrough": value.encode()}
            route = SimpleNamespace(parameters={})
            head = SimpleNamespace(headers=headers, method="GET", path="/adm/modules", query=b"a=b", route=route)
            request: Any = SimpleNamespace(head=head)
            await backends.answer(Call(request, None, None))

        for form in table(__file__, "other_backends"):
            with pytest.raises(RequestError, match="does not list"):
                await ask(form.format(port=backend.port))
        assert backend.connections == 0
        for number in range(len(answers) + 1):
            with pytest.raises(DeliveryError):
                await ask(("true", f"{base}/")[number % 2])
        assert backend.connections == len(answers) + 1
        assert all(head.startswith("GET /adm/modules?a=b HTTP/1.1\r\n") for head, _ in backend.requests)
    for address in ("127.0.0.1", "0.0.0.0", "224.0.0.1", "ff02::1", "169.254.169.254", "::ffff:169.254.169.254"):
        assert refused_address("http://backend.example:8080", address), address


def test_no_secret_is_in_the_settings_or_the_log() -> None:
    """By type, by name, in URLs and in headers; the log also has none that only looks like one."""
    config = secret_config()
    assert config.model_dump_json().count("canary") >= 6
    assert b"canary" not in msgspec.json.encode(server_info(config))
    assert mask({"properties": {"proxy": "http://u:canary@h/"}}) == {"properties": {"proxy": f"http://{MASK}@h/"}}
    shown_of = SecretMask(config)
    for message, shown in table(__file__, "messages"):
        assert shown_of(message) == shown


def test_the_log_in_memory_is_bounded() -> None:
    """In number, in characters, and per record; the latest remain, and a page is bounded too."""
    endpoints = administration()
    logs, record = endpoints._logs, logging.makeLogRecord({"name": "headrace.x", "levelno": logging.ERROR, "msg": "m"})
    for number in range(3 * MAX_RECORDS):
        record.msg = f"{number}"
        logs.emit(record)
    kept = logs.find("headrace", logging.ERROR, 0, 2**62)
    assert [kept[0].message, kept[-1].message, len(kept)] == [
        f"{2 * MAX_RECORDS}",
        f"{3 * MAX_RECORDS - 1}",
        MAX_RECORDS,
    ]
    page = endpoints._content(ContentQuery(limit=1000, end_time=2**62, start_time=0))["headrace.x"]
    assert (page.total, len(page.logs)) == (MAX_RECORDS, 1000)
    record.msg = "x" * 1_000_000
    for _ in range(MAX_RECORDS):
        logs.handle(record)
    kept = logs.find("", logging.ERROR, 0, 2**62)
    assert sum(len(one.message) for one in kept) <= MAX_CHARACTERS
    assert not logs.find("headrace.xy", logging.ERROR, 0, 2**62)
    assert not logs.find("", logging.CRITICAL, 0, 2**62)


@pytest.mark.parametrize(
    ("chaos", "client", "error"),
    [
        ("none", "127.0.0.1", RequestError),
        ("loopback", "10.0.0.7", Forbidden),
        ("loopback", "::ffff:10.0.0.7", Forbidden),
        ("loopback", "127.0.0.1", None),
        ("loopback", "::1", None),
        ("anywhere", "10.0.0.7", None),
    ],
)
async def test_who_may_start_assaults(chaos: str, client: str, error: type[HeadraceError] | None) -> None:
    """Callers of other machines only if the file says so."""
    endpoints = assaults(WholeFile.model_validate({"admin": {"chaos": chaos}}))
    head = SimpleNamespace(headers={}, route=SimpleNamespace(parameters={"assault": "latency"}))
    request: Any = SimpleNamespace(head=head, client_address=client)
    call = Call(request, AssaultRequest(seconds=0), None)
    if error is None:
        await ChaosEndpoints.assault.handler(endpoints, call)
        return
    with pytest.raises(error):
        await ChaosEndpoints.assault.handler(endpoints, call)


async def test_the_word_of_light4j_can_be_json_or_off() -> None:
    """Liveness and readiness have no such switch."""
    request: Any = SimpleNamespace(head=SimpleNamespace(path="/health/s"))
    call: Any = SimpleNamespace(parameters={"serviceId": "s"}, request=request)
    for settings, ready, expected in (
        ({}, True, (200, b"OK")),
        ({}, False, (400, b"ERROR")),
        ({"use_json": True}, True, (200, b'{"result":"OK"}')),
        ({"enabled": False}, True, None),
    ):
        states = {"kafka": Readiness(ready)}
        health = HealthEndpoints(lambda states=states: states, "s", Metrics(), HealthConfig(**settings))
        if expected is None:
            with pytest.raises(PathNotFound, match=r"health\.enabled"):
                await HealthEndpoints.health.handler(health, call)
        else:
            response = await HealthEndpoints.health.handler(health, call)
            assert (response.status, response.body) == expected


async def test_a_drain_ends_assaults() -> None:
    """Requests are disturbed until then, and not after it; each kind runs once."""
    applied: list[Any] = []
    chaos = Chaos(SystemClock(), applied.append)
    chaos.begin("exception", AssaultRequest(level=1), "ann")
    chaos.begin("memory", AssaultRequest(megabytes=8), "ann")
    chaos.begin("memory", AssaultRequest(megabytes=4), "bob")
    assert {name: one.by for name, one in chaos.running().items()} == {"exception": "ann", "memory": "bob"}
    assert "assault exception for 60 s" in chaos.readiness().reason
    with pytest.raises(HeadraceError, match="it is not a defect"):
        await applied[-1]()
    await chaos.drain(Deadline(SystemClock(), 1))
    assert (applied[-1], chaos.running(), chaos.readiness().reason) == (None, {}, "")
    await chaos.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("chaos")]
