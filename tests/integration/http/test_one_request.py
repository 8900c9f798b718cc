"""One request is one request: on each listener, behind shared proxies, and for the clients of Java."""

from __future__ import annotations

import re
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import EnvironmentProblem
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, SharedHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_jvm import find_java
from headrace_jvm.artifacts import Artifact, Repository
from tests.debian_package import debian_program
from tests.function_calls import function_file

HERE = Path(__file__)
ROUNDS = 10
SPRING = [f"org.springframework:spring-{name}:6.2.12" for name in ("web", "core", "jcl", "beans")]
NGINX = """
daemon off; master_process off; pid FOLDER/pid; error_log stderr;
events {}
http {
    access_log off; client_body_temp_path FOLDER; proxy_temp_path FOLDER; fastcgi_temp_path FOLDER;
    uwsgi_temp_path FOLDER; scgi_temp_path FOLDER;
    map $http_upgrade $connection_upgrade { default upgrade; '' ''; }
    upstream headrace { server 127.0.0.1:SERVER; keepalive 4; }
    server {
        listen 127.0.0.1:PROXY;
        location / {
            proxy_pass http://headrace; proxy_http_version 1.1; proxy_set_header Host 127.0.0.1:SERVER;
            proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection $connection_upgrade;
        }
    }
}
"""
HAPROXY = """
defaults
    mode http
    http-reuse always
    timeout connect 10s
    timeout client 30s
    timeout server 30s
frontend proxy
    bind 127.0.0.1:PROXY
    default_backend headrace
backend headrace
    server one 127.0.0.1:SERVER
"""
PROXIES = {"nginx": (NGINX, "-p", "FOLDER", "-c"), "haproxy": (HAPROXY, "-f")}


def connected(url: str) -> socket.socket:
    host, _, port = url.rpartition("/")[2].partition(":")
    return socket.create_connection((host, int(port)), 30)


def upgrading(hidden: bytes, path: str = "/nothing") -> tuple[bytes, bytes]:
    """Return head and body of a request whose body is a request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    return f"{head}Content-Length: {len(hidden)}\r\n\r\n".encode(), hidden


@pytest.fixture(scope="module")
def process(
    kafka: Cluster, module_headrace: SharedHeadrace, tmp_path_factory: pytest.TempPathFactory
) -> HeadraceProcess:
    """A run of two processes with every listener that there is."""
    folder, code = tmp_path_factory.mktemp("function"), "def handler(context, event):\n    return 'done'\n"
    kafka.create_topic(source := f"one-request-{uuid.uuid4().hex[:8]}", 1)
    records = {"kind": "kafka-cluster", "attributes": {"topics": [source], "consumerGroup": source}}
    management, web = free_ports(2)
    triggers = {"in": records, "web": {"kind": "http", "attributes": {"port": web}}}
    function = function_file(folder, code, triggers)
    sections = {"http": {"management": {"port": management}}, "processes": 2, "functions": [function]}
    return module_headrace({**Scenario(kafka.bootstrap_servers, folder).config, **sections})


def test_each_listener_reads_a_body_as_a_body(process: HeadraceProcess) -> None:
    """That of requests, of administration, and of a function's trigger; the next request is served."""
    [line] = re.findall("^ready .*$", process.output, re.MULTILINE)
    urls = re.findall(r"=(http://\S+)", line)
    assert len(urls) == 3, line
    last = b"GET /health/liveness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for url in urls:
        for pieces in ((b"".join(upgrading(last)), last), (*upgrading(last), last)):
            with connected(url) as client, client.makefile("rb") as responses:
                for piece in pieces[:-1]:
                    client.sendall(piece)
                    first = b"" if piece != pieces[-2] else responses.readline()
                client.sendall(pieces[-1])
                text = first + responses.read()
            assert text.count(b"HTTP/1.1 ") == 2, (url, text)


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest, process: HeadraceProcess, site: Scenario, tmp_path: Path) -> Iterator[str]:
    """The address of a proxy in front of the run, which shares its connections among its clients."""
    text, *words = PROXIES[request.param]
    port = str(free_ports(1)[0])
    replaced = {"FOLDER": str(tmp_path), "PROXY": port, "SERVER": process.url.rpartition(":")[2]}
    for name, value in replaced.items():
        text = text.replace(name, value)
    (file := tmp_path / "proxy.conf").write_text(text)
    command = [debian_program(request.param, request.param), *(word.replace("FOLDER", str(tmp_path)) for word in words)]
    with subprocess.Popen([*command, str(file)]) as running:
        try:
            url = f"http://127.0.0.1:{port}"
            site.wait_until(lambda: site.ask(f"{url}/live").status == 200, f"{request.param} to pass requests on")
            yield url
        finally:
            running.terminate()


def test_a_client_of_a_proxy_gets_nothing_of_another(proxy: str, site: Scenario, topic: MakeTopic) -> None:
    """The attacker's hidden request would take in the victim's, with its token, and shift the responses."""
    name = topic()
    victim = (
        f"GET /topics/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: of-the-victim\r\n\r\n"
    )
    victim = victim.encode()
    takes = f"POST /producers/{name} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
    hidden = f"{takes}Content-Length: {len(victim) - 1}\r\n\r\n".encode()
    for number in range(ROUNDS):
        with connected(proxy) as attacker, connected(proxy) as client:
            head, body = upgrading(hidden)
            attacker.sendall(head + (body if number % 2 else b""))
            attacker.sendall(b"" if number % 2 else body)
            assert attacker.makefile("rb").readline().split()[1] == b"404"
            client.sendall(victim)
            with client.makefile("rb") as response:
                text = response.read()
            assert text.startswith(b"HTTP/1.1 200 ") and name.encode() in text.partition(b"\r\n\r\n")[2], text
    assert site.records(name) == []


@pytest.mark.long
def test_spring_over_the_client_of_java_can_post(
    process: HeadraceProcess, site: Scenario, topic: MakeTopic, tmp_path: Path
) -> None:
    """It offers HTTP/2 with its first request, whose body follows the head."""
    try:
        repository = Repository(tmp_path, lambda _: None)
        jars = [str(repository.fetch(Artifact(one, 0, ""))) for one in SPRING]
    except EnvironmentProblem as problem:
        pytest.skip(str(problem))
    name = topic()
    program, url = HERE.with_name("SpringPost.java"), f"{process.url}/producers/{name}"
    java = [str(find_java(17).executable), "-cp", ":".join(jars), str(program), url]
    done = subprocess.run(java, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["200"] * 3, done.stderr
    assert [record.value for record in site.records(name)] == [b'"x"'] * 3
