"""How commands call a running Headrace."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.cli.api import Api, api_options
from headrace.cli.global_options import HeadraceCommand
from headrace.cli.main import main
from headrace.cli.trust import trust
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.errors import EnvironmentProblem, HeadraceError
from headrace.runs.dead_letters.routes import DeadLetterEndpoints
from headrace.runs.routes import JobEndpoints
from tests.command_line import headrace
from tests.raw_server import Authority, Server, always, served_by_thread


class _Responses(http.server.BaseHTTPRequestHandler):
    seen: list[Any]
    refusal = 0

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.seen.append((self.command, self.path, body, self.headers["authorization"]))
        status, text = {"/no": (403, b'{"code":"ERR10005","description":"needs the scope admin"}')}.get(
            self.path, (502, b"<html>") if self.path == "/proxy" else (200, b'{"ok":true}')
        )
        text = b"<html>" if self.path == "/page" else text
        if self.refusal and self.path != "/health/readiness":
            status, text = self.refusal, b'{"code":"ERR10000","description":"get another token"}'
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


for _method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
    setattr(_Responses, f"do_{_method}", _Responses._respond)


@contextlib.contextmanager
def served(seen: list[Any], tls: ssl.SSLContext | None = None, **more: Any) -> Iterator[str]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Responses,), {"seen": seen, **more}))
    if tls:
        made.socket = tls.wrap_socket(made.socket, server_side=True)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http{'s' if tls else ''}://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    seen: list[Any] = []
    with served(seen) as url:
        yield url, seen


def test_each_method_sends_json_and_the_token(server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of the environment is not used for an address of this machine."""
    url, seen = server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HEADRACE_TOKEN", "abc")
    api = Api(url + "/")
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
    assert (refused.value.status, refused.value.code) == (403, "ERR10005")
    for path in ("/proxy", "/page"):  # an error, or a page with status 200
        with pytest.raises(HeadraceError, match="it is another server"):
            Api(server[0]).request("GET", path)


_HEAD = b"HTTP/1.1 200 OK\r\n"
OTHERS = {
    "a redirect": (
        b"HTTP/1.1 302 Found\r\nLocation: %b/stolen\r\nContent-Length: 0\r\n\r\n",
        "it redirects to .*/stolen, use that",
    ),
    "a page": (_HEAD + b"Content-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>", "it is another server"),
    "deep JSON": (_HEAD + b"Content-Length: 100000\r\n\r\n" + b"[" * 100_000, "it is another server"),
    "nothing": (b"", r"is unreachable at .*without response"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01", "is unreachable at"),
    "an endless head": (_HEAD + b"X: y\r\n" * 100_000, "is unreachable at"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_server_that_is_not_headrace_gets_one_request(
    name: str, server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token goes to no other server, whatever the response says, and no command ends with a defect."""
    monkeypatch.setenv("HEADRACE_TOKEN", "secret")
    url, seen = server
    response, why = OTHERS[name]
    with served_by_thread(always(response.replace(b"%b", url.encode()), then="close")(Server())) as port:
        api = Api(f"http://127.0.0.1:{port}", limit_seconds=20)
        with pytest.raises(HeadraceError, match=why):
            api.request("GET", "/")
        with pytest.raises(HeadraceError, match=why):
            api.request("POST", "/", {"a": 1})
    assert not seen


def test_each_cause_of_no_response_has_a_sentence_of_its_own(server: tuple[str, list[Any]], tmp_path: Path) -> None:
    """With the address, and the option or the command that helps."""
    tls = Authority(tmp_path).issue("server", host="elsewhere.example")
    with socket.create_server(("127.0.0.1", 0)) as silent, served([], tls) as url:
        causes = {
            "http://127.0.0.1:9": r"Headrace is unreachable at \S+ \(Connection refused\): start it .*--url",
            "http://no-such-host.invalid": r"Headrace is unreachable at \S+ \(.*\): start it .*--url",
            f"http://127.0.0.1:{silent.getsockname()[1]}": r"Headrace at \S+ did not respond within 0\.5 s: look",
            server[0].replace("http:", "https:"): r"No TLS connection to \S+ .* plain HTTP",
            url: r"The certificate of \S+ is not trusted \(.*\): name the file of its authority with --ca FILE",
        }
        for address, says in causes.items():
            with pytest.raises(EnvironmentProblem, match=f"^{says}"):
                Api(address, limit_seconds=0.5).request("GET", "/")
        with pytest.raises(EnvironmentProblem, match=r"pass an address with a name of the certificate"):
            Api(url, tls=trust(tmp_path / "ca.pem")).request("GET", "/")
        # The certificate of headrace.yaml alone, whatever host it names.
        pinned = trust(None, [tmp_path / "server.pem"])
        assert Api(url, tls=pinned).request("GET", "/") == {"ok": True}
        assert pinned.cert_store_stats()["x509"] == 1  # no authority, because no host name is checked


def test_commands_trust_the_file_of_an_authority_or_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`headrace status` of a running server is no outage then; an expired token is a problem with exit code 1."""
    monkeypatch.chdir(tmp_path)
    tls = Authority(tmp_path).issue("server")
    with served([], tls) as url:
        files = {"certificate": "server.pem", "key": "server.key"}
        (tmp_path / "server.key").chmod(0o600)
        settings = {"http": {"port": int(url.rpartition(":")[2]), "tls": files}}
        Path("file.yaml").write_text(json.dumps(settings))
        for options, code in ((["--ca", "ca.pem", "--url", url], 0), (["-c", "file.yaml"], 0), (["--url", url], 1)):
            assert headrace("status", *options) == code, options
            assert ("is not trusted" in capsys.readouterr().out) == bool(code)
        assert headrace("ready", "--timeout", "0", "--url", url) == 1
        assert "is not trusted" in capsys.readouterr().err
    with served([], tls, refusal=401) as url:
        monkeypatch.setenv("HEADRACE_TOKEN", "old")
        assert headrace("status", "--ca", "ca.pem", "--url", url) == 1
        assert "the token is not valid here (401)" in capsys.readouterr().out


def test_the_url_comes_from_the_option_the_environment_the_file_or_is_the_default(tmp_path: Path) -> None:
    """In this order."""

    @click.command(cls=HeadraceCommand)
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
