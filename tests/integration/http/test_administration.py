"""Administration and health of a running process, without any broker."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.admin.process.routes import AdministrationEndpoints
from headrace.http.endpoint import endpoints_of
from headrace_devkit.testing import HeadraceProcess
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import Response, send

ADMIN, WRITER = "canary-of-the-admin-token", "canary-of-the-writer-token"
OPERATIONS = [(one.method, one.path.replace("{assault}", "kill")) for one in endpoints_of(AdministrationEndpoints)]


class Backend(http.server.BaseHTTPRequestHandler):
    """Responds with a status, and to its own administration with the request."""

    status = 503

    def do_GET(self) -> None:
        is_own = self.path.startswith("/adm/")
        self.send_response_only(200 if is_own else self.status)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        seen = {"path": self.path, "headers": sorted(self.headers), "body": json.loads(body) if body else None}
        content = json.dumps(seen).encode() if is_own else b""
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.do_GET()


class Site:
    """A process, its backend, and an administrator."""

    def __init__(self, folder: Path) -> None:
        self.backend = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend)
        threading.Thread(target=self.backend.serve_forever, daemon=True).start()
        principals = {"ann": {"token": ADMIN, "scopes": ["admin"]}, "bob": {"token": WRITER, "scopes": ["kafka:w"]}}
        url = f"http://127.0.0.1:{self.backend.server_port}/health?key=canary-of-the-url"
        sasl = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "u"}
        self.folder, self.audit = folder, folder / "audit.log"
        config = {
            "kafka": {"bootstrap_servers": "127.0.0.1:1", "properties": {**sasl, "sasl.password": "canary-of-kafka"}},
            "security": {"mode": "token", "principals": principals},
            "health": {"downstream_url": url, "use_json": True},
            "admin": {"chaos": "loopback", "pass_through": [f"http://127.0.0.1:{self.backend.server_port}"]},
            "audit": {"file": str(self.audit)},
        }
        self.process = HeadraceProcess(config, folder)

    def is_live(self) -> bool:
        try:
            return send("GET", f"{self.process.url}/health/liveness").status == 200
        except OSError:
            return False

    def ask(self, method: str, path: str, body: Any = None, token: str = ADMIN, passed: str = "false") -> Response:
        headers = {"Authorization": f"Bearer {token}", "X-Adm-PassThrough": passed}
        return send(method, self.process.url + path, body, headers)

    def service(self, name: str) -> Any:
        return self.ask("GET", "/health/readiness").body["services"][name]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("administration"))
    site.process.start()
    Scenario.wait_until(site.is_live, "liveness")
    yield site
    site.process.kill()
    site.backend.shutdown()
    site.backend.server_close()


def test_only_administrators_and_no_secret(site: Site) -> None:
    """Strangers and writers are refused everything; an administrator sees no secret; no other backend is reached."""
    for method, path in OPERATIONS:
        assert send(method, site.process.url + path).status == 401, path
        assert site.ask(method, path, token=WRITER).status == 403, path
        wanted = "true" if "chaos" in path or path == "/adm/shutdown" else "http://127.0.0.1:1"
        refused = site.ask(method, path, {} if path.endswith("kill") else ["http"], passed=wanted)
        assert (refused.status, refused.body["code"]) == (400, "ERR11004"), path
    info = site.ask("GET", "/adm/server/info").body
    assert info["environment"]["python"] and info["environment"]["libraries"]["librdkafka"]
    assert info["component"]["kafka"]["bootstrap_servers"] == "127.0.0.1:1"
    path = "/adm/logger/content?loggerName=headrace.kafka&loggerLevel=WARN"
    Scenario.wait_until(lambda: site.ask("GET", path).body, "a line of the log")
    content = site.ask("GET", path).body
    assert "Kafka at 127.0.0.1:1 has not answered" in json.dumps(content)
    assert "canary" not in json.dumps([info, content, site.process.output])


def test_requests_for_the_backend_are_passed_on_without_credentials(site: Site) -> None:
    """With query and body, in the audit, and nothing of it is done here."""
    assert site.ask("GET", "/adm/server/info", token=WRITER, passed="true").status == 403
    for method, path, body in (
        ("GET", "/adm/logger/content?limit=7", None),
        ("POST", "/adm/logger?by=ann", [{"name": "ROOT", "level": "DEBUG"}]),
    ):
        seen = site.ask(method, path, body, passed="true").body
        assert (seen["path"], seen["body"]) == (path, body)
        sent = {"Accept-Encoding", "Content-Length", "Content-Type", "Host", "X-Correlation-Id"}
        assert set(seen["headers"]) <= sent
        event = f"passed through: {method} {path.partition('?')[0]}"
        Scenario.wait_until(lambda event=event: event in site.audit.read_text(), event)
    assert "DEBUG" not in {one["level"] for one in site.ask("GET", "/adm/logger").body}


def test_the_backend_fails_readiness_and_never_liveness(site: Site) -> None:
    """Its state is in readiness within seconds, with the reason and without the query of its URL."""
    reason = "/health is not healthy: it responds with HTTP 503"
    Scenario.wait_until(lambda: site.service("backend")["reason"].endswith(reason), reason)
    for path in ("/health/headrace", "/adm/health/headrace"):
        assert send("GET", site.process.url + path).body == {"result": "ERROR"}, path
    assert send("GET", f"{site.process.url}/health/readiness").body == {"ready": False}
    assert site.is_live()
    Backend.status = 204
    Scenario.wait_until(lambda: site.service("backend")["ready"], "the backend")


def test_principals_limits_and_levels_are_reloaded(site: Site) -> None:
    """The next request is judged by the changed file; a file that is wrong, or needs a restart, changes nothing."""
    file, new = site.folder / "headrace.yaml", "canary-of-the-new-admin-token"
    before = file.read_text()

    def reload(change: Callable[[Any], object], name: str) -> Any:
        config = yaml.safe_load(before)
        change(config)
        file.write_text(yaml.safe_dump(config))
        return site.ask("POST", "/adm/modules", [name]).body

    def renamed(config: Any) -> None:
        config["security"]["principals"] = {"eve": {"token": new, "scopes": ["admin"]}}
        config["security"]["requests_per_second"] = 1
        config["log_level"] = "debug"

    everything = {"reloaded": ["log_level", "security"], "failed": {}}
    assert site.ask("POST", "/adm/modules", ["ALL"]).body == everything
    assert "'http' does not reload without a restart" in site.ask("POST", "/adm/modules", ["http"]).body["description"]
    assert "mode" in reload(lambda config: config["security"].update(mode="jwt"), "security")["failed"]["security"]
    assert reload(lambda config: config.update(security=None, log_level="loud"), "ALL")["failed"].keys() == {
        "log_level",
        "security",
    }
    assert reload(renamed, "ALL")["failed"] == {}
    assert site.ask("GET", "/adm/logger").status == 401
    root, second = (site.ask("GET", "/adm/logger", token=new) for _ in range(2))
    assert root.body[0]["name"] == "ROOT" and root.body[0]["level"] == "DEBUG" and second.status == 429
    file.write_text(before)
    Scenario.wait_until(lambda: site.ask("POST", "/adm/modules", ["ALL"], token=new).status == 200, "the reload")
    assert site.ask("GET", "/adm/server/info").status == 200
    assert new not in site.process.output


def test_assaults_end_by_themselves(site: Site) -> None:
    """They hit requests, are named in readiness and in the audit, and leave administration alone."""
    path = "/adm/chaosmonkey"
    assert site.ask("POST", f"{path}/exception", {"seconds": 5, "level": 1}).status == 200
    hit = site.ask("POST", "/producers/t", {"records": [{"value": 1}]}, token=WRITER)
    assert (hit.status, hit.body["code"]) == (500, "ERR10010")
    assert site.service("chaos")["reason"].startswith("assault exception for ")
    assert site.ask("POST", f"{path}/memory", {"seconds": 2, "megabytes": 32}).status == 200
    Scenario.wait_until(lambda: not any(site.ask("GET", path).body.values()), "the end of the assaults")
    assert site.service("chaos") == {"ready": True, "reason": ""}
    assert site.ask("POST", f"{path}/latency", {"seconds": 60, "level": 1, "milliseconds": 300}).status == 200
    began = time.monotonic()
    assert site.ask("GET", "/openapi.json").status == 200
    assert time.monotonic() - began >= 0.3
    assert site.ask("POST", f"{path}/latency", {"seconds": 0}).status == 200
    assert not any(site.ask("GET", path).body.values())
    Scenario.wait_until(lambda: site.audit.read_text().count("end assault") == 3, "the audit")


def test_a_request_ends_the_process_as_a_signal_does(site: Site) -> None:
    """It drains and exits with 0; an assault kills it, and the audit has both."""
    assert site.ask("DELETE", "/adm/shutdown").body["serviceId"] == "headrace"
    Scenario.wait_until(lambda: site.process.exit_code is not None, "the end")
    assert site.process.exit_code == 0
    site.process.start()
    Scenario.wait_until(site.is_live, "liveness")
    assert site.ask("POST", "/adm/chaosmonkey/kill", {}).status == 200
    Scenario.wait_until(lambda: site.process.exit_code is not None, "the end")
    assert site.process.exit_code == -9
    assert all(text in site.audit.read_text() for text in ('"shut down', '"assault kill'))
