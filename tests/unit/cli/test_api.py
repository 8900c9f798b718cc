"""How commands call a running Headrace."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.cli.api import Api, api_options
from headrace.cli.main import main
from headrace.control.dead_letters.routes import DeadLetterEndpoints
from headrace.control.runs.routes import JobEndpoints
from headrace.control.table.registration_routes import RegistrationEndpoints
from headrace.errors import EnvironmentProblem, HeadraceError


class _Responses(http.server.BaseHTTPRequestHandler):
    seen: list[Any]

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.seen.append((self.command, self.path, body, self.headers["authorization"]))
        status, text = {"/no": (403, b'{"code":"ERR10005","description":"needs the scope admin"}')}.get(
            self.path, (502, b"<html>") if self.path == "/proxy" else (200, b'{"ok":true}')
        )
        text = b"<html>" if self.path == "/page" else text
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_Responses, f"do_{_method}", _Responses._respond)


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    seen: list[Any] = []
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Responses,), {"seen": seen}))
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", seen
    made.shutdown()
    made.server_close()


def test_each_method_sends_json_and_the_token(server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not used for an address of this machine."""
    url, seen = server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    api = Api(url + "/", "abc")
    assert api.call(DeadLetterEndpoints.page, None, {"limit": 3, "key": None}, topic="a/b c") == {"ok": True}
    api.call(JobEndpoints.change, job="j", action="pause")
    api.call(RegistrationEndpoints.put, {"x": 1}, name="n")
    api.request("PATCH", "/d", {"y": None})
    api.request("DELETE", "/e")
    assert [(method, path, json.loads(body or b"null")) for method, path, body, _ in seen] == [
        ("GET", "/adm/dead-letters/a%2Fb%20c?limit=3", None),
        ("POST", "/adm/jobs/j/pause", {}),
        ("PUT", "/reactive-consumers/n", {"x": 1}),
        ("PATCH", "/d", {"y": None}),
        ("DELETE", "/e", None),
    ]
    assert {token for *_, token in seen} == {"Bearer abc"}


def test_an_error_of_the_server_is_shown_with_its_description(server: tuple[str, list[Any]]) -> None:
    """A response that is not of Headrace says that another server is there."""
    with pytest.raises(HeadraceError, match="needs the scope admin") as refused:
        Api(server[0]).request("GET", "/no")
    assert refused.value.parameters == {"status": 403, "code": "ERR10005"}
    for path in ("/proxy", "/page"):  # an error, or a page with status 200
        with pytest.raises(HeadraceError, match="it is another server"):
            Api(server[0]).request("GET", path)


def test_an_unreachable_server_has_the_address_and_the_option() -> None:
    """One sentence has both."""
    with pytest.raises(EnvironmentProblem, match=r"Headrace is unreachable at http://127.0.0.1:9 .*--url"):
        Api("http://127.0.0.1:9").request("GET", "/")


def test_the_url_comes_from_the_option_the_environment_the_file_or_is_the_default(tmp_path: Path) -> None:
    """In this order."""

    @click.command()
    @api_options
    def show(api: Api, output: str) -> None:
        click.echo(f"{api.url} {output}")

    file = tmp_path / "headrace.yaml"
    file.write_text("http: {port: 9000}\n")
    run = CliRunner().invoke
    assert run(show).output == "http://127.0.0.1:8082 text\n"
    assert run(show, ["-c", str(file), "--output", "json"]).output == "http://127.0.0.1:9000 json\n"
    assert run(show, ["-c", str(file)], env={"HEADRACE_URL": "http://h:1"}).output == "http://h:1 text\n"
    assert run(show, ["--url", "http://o:2"], env={"HEADRACE_URL": "http://h:1"}).output == "http://o:2 text\n"


@pytest.mark.parametrize("url", ["notaurl", "127.0.0.1:8082", "file:///etc/passwd", "http://", "http://h:port", ""])
def test_an_invalid_url_is_wrong_usage(url: str) -> None:
    """Nothing is opened, a file least of all."""
    with pytest.raises(click.UsageError, match="is not a valid URL"):
        Api(url)


def test_ready_waits_and_prints_each_reason_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until readiness is 200; the exit code is 1 when the time is up."""
    away = "Kafka at k:1 has not answered for {} s: connection refused by k:1"
    responses = [(False, {"kafka": away.format(n)}) for n in (1, 2)] + [(False, {"push": "not joined"}), (True, {})]

    def readiness(*_: Any) -> dict[str, Any]:
        if not responses:
            raise EnvironmentProblem("nobody")
        ok, reasons = responses.pop(0)
        return {"ready": ok, "services": {name: {"ready": False, "reason": why} for name, why in reasons.items()}}

    monkeypatch.setattr(Api, "call", readiness)
    monkeypatch.setattr("headrace.cli.configuration._POLL_SECONDS", 0)
    with pytest.raises(SystemExit) as ended:
        main(["ready", "--url", "http://127.0.0.1:1"])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (0, "ready http=http://127.0.0.1:1\n")
    assert printed.err == f"waiting: kafka: {away.format(1)}\nwaiting: push: not joined\n"
    with pytest.raises(SystemExit) as ended:
        main(["ready", "--url", "http://127.0.0.1:1", "--timeout", "0"])
    assert (ended.value.code, capsys.readouterr().err) == (
        1,
        "not ready within 0 s: Headrace is not reachable at http://127.0.0.1:1 yet\n",
    )


def test_ready_names_the_token_where_the_reason_is_for_known_callers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness answers others with a bare no, at once and at the end."""
    monkeypatch.setattr(Api, "call", lambda *_: {"ready": False})
    with pytest.raises(SystemExit) as ended:
        main(["ready", "--url", "http://127.0.0.1:1", "--timeout", "0.1"])
    why = "only authenticated callers see the reason: set HEADRACE_TOKEN to a valid token"
    assert (ended.value.code, capsys.readouterr().err) == (1, f"waiting: {why}\nnot ready within 0.1 s: {why}\n")
