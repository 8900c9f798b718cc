"""A listener of its own for administration: what each listener serves, its TLS, and its end."""

from __future__ import annotations

import re
import socket
import ssl
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest

from headrace.app.documents import every_endpoint
from headrace.http.endpoint import OPEN
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic, StartHeadrace
from tests.active_client import send
from tests.command_line import headrace as run
from tests.raw_server import Authority

PRINCIPALS = {
    "ops": {"token": "a-token-of-an-operator", "scopes": ["admin", "kafka:w"]},
    "none": {"token": "a-token-without-scopes"},
}
OPS, NONE = ({"Authorization": f"Bearer {one['token']}"} for one in PRINCIPALS.values())
ON_MAIN_TOO = ["/health/liveness", "/live", "/health/readiness", "/ready", "/health/headrace"]


def issue(authority: Authority) -> dict[str, str]:
    authority.issue("management")
    (authority.folder / "management.key").chmod(0o600)
    return {part: str(authority.folder / f"management.{end}") for part, end in (("certificate", "pem"), ("key", "key"))}


def status_of(connection: HTTPConnection, method: str, path: str) -> int:
    """Return the status for a caller without scopes, on a connection that is kept."""
    connection.request(method, path, headers=NONE)
    with connection.getresponse() as response:
        response.read()
        return response.status


HEAD = "POST /transactions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"


def test_administration_has_its_own_listener_until_the_end(
    kafka: Cluster, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation is at one of them, health at both; commands find it; its certificate changes; it drains last."""
    authority, port = Authority(tmp_path), free_ports(1)[0]
    process = headrace(
        {
            "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
            "http": {"management": {"port": port, "tls": issue(authority)}},
            "security": {"mode": "token", "principals": PRINCIPALS},
            "health": {"use_json": True},
            "registrations": {"backends": ["https://backend.example/"]},
            "tables": {"rows": {"topic": topic()}},
        }
    )
    main, management = process.url, f"https://127.0.0.1:{port}"
    assert f"ready http={main} management={management}\n" in process.output
    trust = ssl.create_default_context(cafile=authority.file)
    both = HTTPConnection(main.rpartition("/")[2]), HTTPSConnection(f"127.0.0.1:{port}", context=trust)
    # A known caller without scopes learns by 403 where an operation is, and changes nothing.
    for endpoint in (one for one in every_endpoint() if one.rule != OPEN):
        path = re.sub("{.*?}", "1", endpoint.path)
        alone = path.startswith("/adm/") or path == "/metrics" or endpoint.rule.any_of == ("admin",)
        statuses = [status_of(connection, endpoint.method, path) for connection in both]
        assert statuses in ([[404, 403], [405, 403]] if alone else [[403, 404], [403, 405]]), (endpoint.id, statuses)
    for connection in both:
        connection.close()
    for path in ON_MAIN_TOO:
        assert [send("GET", url + path, None, OPS, trust).status for url in (main, management)] == [200, 200], path
    assert send("GET", f"{management}/adm/server/info", context=trust).status == 401

    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    monkeypatch.setenv("HEADRACE_TOKEN", PRINCIPALS["ops"]["token"])
    assert run("reactive", "list", "-c", str(process.server.log.parent / "headrace.yaml")) == 0
    assert run("reactive", "list", "--url", main) != 0

    shown = ssl.get_server_certificate(("127.0.0.1", port))
    issue(authority)
    reloaded = send("POST", f"{management}/adm/modules", ["http.management.tls"], OPS, trust)
    assert reloaded.body["reloaded"] == ["http.management.tls"]
    assert ssl.get_server_certificate(("127.0.0.1", port)) != shown

    with socket.create_connection(("127.0.0.1", int(main.rpartition(":")[2]))) as unfinished:
        unfinished.sendall(f"{HEAD}Authorization: {OPS['Authorization']}\r\n\r\n".encode())
        assert send("GET", f"{main}/openapi.json").status == 200
        assert send("DELETE", f"{management}/adm/shutdown", None, OPS, trust).status == 200
        while send("GET", f"{main}/openapi.json").status != 503:
            pass
        assert send("GET", f"{management}/adm/server/info", None, OPS, trust).status == 200
    assert process.terminate() == 0
