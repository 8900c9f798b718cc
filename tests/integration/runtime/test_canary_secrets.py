"""Secrets that are found nowhere: in no log, response, metric, process list, file or topic, whatever goes wrong."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import serialization as coding
from cryptography.hazmat.primitives.serialization import pkcs12

from headrace_devkit.devcluster import HeadraceProcess, RecordingBackend, Registry
from headrace_devkit.devcluster.certificates import write_file
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_devkit.testing import PlannedResponse, StartHeadrace
from headrace_devkit.testing.forked import ForkedCommand
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Instance

WRONG = "wrong password of a function"
MADE = [
    *("keystore password", "HTTP token", "cluster secret", "backend header", "backend client secret"),
    *("wrong password", "wrong client secret", "wrong registry password", "function variable"),
    *(WRONG, "query of a backend", "query of the health check"),
]
"""Kinds of secrets that are made here; the others are the cluster's."""
TOKEN_START = "eyJhbGciOiJSUzI1NiIs"
"""How every token of the token server begins."""
HANDLER = """
def handler(context, event):
    if event.offset == 1:
        raise ValueError("this record is bad")
    return event.body
"""
AVRO = b'{"valueFormat": "avro", "valueSchema": "\\"long\\"", "records": [{"value": 7}]}'
COMMANDS = ["config show", "doctor", "topics list"]
RECORDS = {"records": [{"key": "k", "value": {"n": n}} for n in range(3)]}


class Secrets:
    """Secrets by their kind; those of `variables` are in the environment of Headrace, the others in files."""

    def __init__(self, secured: SecuredCluster, folder: Path, registry: str) -> None:
        """Write the files that a user would have, for a cluster and a registry."""
        self.folder, self.registry, security = folder, registry, secured.security
        self.written: dict[str, str] = {
            "SASL password": security.passwords["app"],
            "OAuth client secret": security.passwords["admin"],
            "registry password": security.passwords["guest"],
            **{name: f"canary-{number}-{os.urandom(16).hex()}" for number, name in enumerate(MADE)},
        }
        key_text = (security.folder / "app.key").read_text()
        key = coding.load_pem_private_key(key_text.encode(), None)
        certificate = x509.load_pem_x509_certificate((security.folder / "app.pem").read_bytes())
        stored = coding.BestAvailableEncryption(self["keystore password"].encode())
        store = pkcs12.serialize_key_and_certificates(b"app", key, certificate, None, stored)  # type: ignore[arg-type]
        write_file(folder / "app.p12", store, 0o600)
        for name in ("keystore password", "HTTP token", "cluster secret"):
            write_file(folder / name, self[name].encode(), 0o600)
        self.written["private key"] = key_text.splitlines()[1]
        self.variables = {
            "KEY_TEXT": key_text,
            "REGISTRY_PASSWORD": self["registry password"],
            "BACKEND_HEADER": self["backend header"],
            "BACKEND_SECRET": self["backend client secret"],
        }

    def __getitem__(self, name: str) -> str:
        return self.written[name]

    def file(self, name: str) -> str:
        return f"${{file:{self.folder / name}}}"

    def found_in(self, content: bytes) -> list[str]:
        """Return the kinds of secrets that a text holds, as they are or in the encodings of HTTP."""
        text = content.decode(errors="replace").replace("\\/", "/")
        found = [name for name, value in self.written.items() if any(form in text for form in _forms(value))]
        return found + (["token"] if TOKEN_START in text else [])


def _forms(secret: str) -> Iterator[str]:
    yield secret
    yield urllib.parse.quote(secret, safe="")
    for shift in range(3):  # base64 of a text that holds it, without the characters that its neighbours change
        yield base64.b64encode(b"x" * shift + secret.encode()).decode()[4 if shift else 0 : -4]


@pytest.fixture
def secrets(
    kafka_secured: SecuredCluster, schema_registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Secrets]:
    """Secrets for the cluster, and for the registry that a server with TLS and logins protects."""
    folder, port = tmp_path_factory.mktemp("front"), schema_registry.ports[0]
    (server := TokenServer(folder, kafka_secured.security, registry_port=port)).start()
    yield Secrets(kafka_secured, tmp_path_factory.mktemp("secrets"), server.registry_url)
    server.remove()


class Seen(dict[str, bytes]):
    """What others can see, by where it is."""

    def ask(self, url: str, body: bytes | None = None, token: str = "") -> bytes:
        """Send a GET, or a POST if there is a body; return the response."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as response:
                found = bytes(response.read())
        except urllib.error.HTTPError as error:
            with error:
                found = str(error.headers).encode() + error.read()
        except urllib.error.URLError as error:
            raise ConnectionError(error.reason) from error
        self[url] = self.get(url, b"") + found
        return found

    def ask_everything(self, process: HeadraceProcess, token: str, topic: str) -> None:
        """Send every GET of the API document and some wrong requests, with the token, without it and with another."""
        names = {"topic": topic, "name": "push", "group": "readers", "instance": "one"}
        paths = json.loads(self.ask(process.url + "/openapi.json", token=token))["paths"].items()
        urls = [path.format_map(defaultdict(lambda: "1", names)) for path, methods in paths if "get" in methods]
        for url in [*urls, "/metrics", "/health/readiness", "/nowhere"]:
            for sent in (token, "", f"x{token}"):
                self.ask(process.url + url, token=sent)
        self.ask(f"{process.url}/producers/{topic}", b'{"records": [{"value": {"password": ', token)

    def administer(self, process: HeadraceProcess, token: str, topic: str) -> None:
        """Read the log at its most detailed level, reload everything, and start an assault that a request meets."""
        for path, body in (
            ("/adm/logger", b'[{"name": "ROOT", "level": "DEBUG"}]'),
            ("/adm/modules", b'["ALL"]'),
            ("/adm/chaosmonkey/exception", b'{"level": 1}'),
            (f"/producers/{topic}", b'{"records": [{"value": 1}]}'),
            ("/adm/chaosmonkey/exception", b'{"seconds": 0}'),
        ):
            self.ask(process.url + path, body, token)
        content = "/adm/logger/content?loggerLevel=DEBUG&startTime=0&limit=1000&offset="
        for offset in range(0, 10_000, 1000):
            self.ask(f"{process.url}{content}{offset}", token=token)
        assert b"ERR10010" in self[f"{process.url}/producers/{topic}"]
        assert b'"DEBUG"' in self[f"{process.url}/adm/logger/content?loggerLevel=DEBUG&startTime=0&limit=1000&offset=0"]

    def run_commands(self, file: Path, env: dict[str, str], folder: Path) -> None:
        """Run what shows settings or connects."""
        for words in COMMANDS:
            output = folder / f"{file.parent.name}-{words}.out"
            arguments = ["--debug", *words.split(), "-c", str(file)]
            ForkedCommand(arguments, file.parent, {**os.environ, **env}, output, output, Path(os.devnull)).wait(240)

    def read_processes(self, secrets: Secrets) -> None:
        """Read command lines and environments of all processes; these without what the user has set there."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                self[f"{process}/cmdline"] = (process / "cmdline").read_bytes()
                variables = (process / "environ").read_bytes().split(b"\0")
                kept = [text for text in variables if text.split(b"=")[0].decode() not in secrets.variables]
                self[f"{process}/environ"] = b"\n".join(kept)


def _whole(secrets: Secrets, kafka: dict[str, Any], name: str, backend_url: str) -> dict[str, Any]:
    """Return a configuration with every kind of secret."""
    folder = Path(kafka["security"]["tls"]["ca"]).parent
    (http_port, *ports) = free_ports(3)
    peer, absent = (f"http://127.0.0.1:{port}" for port in ports)
    oauth = {"token_url": f"{absent}/token", "client_id": "headrace", "client_secret": "${env:BACKEND_SECRET}"}
    headers = {"X-Api-Key": "${env:BACKEND_HEADER}"}
    scopes = ["kafka:r", "kafka:w", "admin", "metrics"]
    user = {"user": "admin", "password": secrets["OAuth client secret"]}
    consumer = {"topics": [name], "retry": {"attempts": 1}}
    query = f"?code={secrets['query of a backend']}"
    return {
        "log_level": "debug",
        "kafka": kafka,
        "admin": {"chaos": "loopback", "pass_through": [absent]},
        "health": {"downstream_url": f"{absent}/health?code={secrets['query of the health check']}"},
        "http": {"port": http_port},
        "cluster": {"peers": [peer, absent], "url": peer, "secret": secrets.file("cluster secret")},
        "security": {"mode": "token", "principals": {"all": {"token": secrets.file("HTTP token"), "scopes": scopes}}},
        "audit": {"to": "topic", "topic": f"{name}-audit", "records": "all"},
        "control": {"topic": f"{name}-control"},
        "schema_registry": {
            "url": secrets.registry + "/apis/ccompat/v7",
            "username": "guest",
            "password": "${env:REGISTRY_PASSWORD}",
            "tls": {"ca": f"{folder}/ca.pem", "certificate": f"{folder}/app.pem", "key": f"{folder}/app.key"},
        },
        "reactive_consumers": {
            "push": {**consumer, "group": f"{name}-push", "backend": {"url": backend_url + query, "headers": headers}},
            "lost": {**consumer, "group": f"{name}-lost", "backend": {"url": absent, "oauth": oauth}},
        },
        "functions": [
            _function(secrets, name, folder, "work", user),
            _function(secrets, name, folder, "refused", {"user": "app", "password": secrets[WRONG]}),
        ],
    }


def _function(secrets: Secrets, topic: str, folder: Path, name: str, login: dict[str, str]) -> str:
    """Write a function with a login of its own."""
    (secrets.folder / "work.py").write_text(HANDLER)
    sasl, results = {"enable": True, "mechanism": "PLAIN", **login}, {"outputTopic": f"{topic}-out"}
    attributes = {
        "topics": [topic],
        "consumerGroup": f"{topic}-{name}",
        "retry": {"attempts": 1},
        "tls": {"enable": True},
    }
    trusted = {"caCert": (folder / "ca.pem").read_text()}
    attributes |= {**trusted, "sasl": sasl, **(results if name == "work" else {})}
    spec = {"handler": "work:handler", "env": [{"name": "API_TOKEN", "value": secrets["function variable"]}]}
    function = {"spec": {**spec, "triggers": {"in": {"kind": "kafka-cluster", "attributes": attributes}}}}
    file = secrets.folder / f"{name}.yaml"
    write_file(file, yaml.safe_dump({"metadata": {"name": name}, **function}).encode(), 0o600)
    return str(file)


def _logins(secured: SecuredCluster, secrets: Secrets) -> dict[str, dict[str, Any]]:
    """Return sections `kafka`, right ones and wrong ones, one for each kind of login."""
    logins = {
        "password": secured.login(),
        "token": secured.login("OAUTHBEARER", "admin"),
        "key as text": secured.certificate(),
        "store": secured.certificate(),
        "wrong password": secured.login(),
        "wrong client secret": secured.login("OAUTHBEARER", "admin"),
    }
    tls = {way: kafka["security"]["tls"] for way, kafka in logins.items()}
    tls["key as text"]["key"] = "${env:KEY_TEXT}"
    del tls["store"]["certificate"], tls["store"]["key"]
    store = {"ssl.keystore.location": str(secrets.folder / "app.p12")}
    logins["store"]["properties"] = store | {"ssl.keystore.password": secrets.file("keystore password")}
    logins["wrong password"]["security"]["sasl"]["password"] = secrets["wrong password"]
    logins["wrong client secret"]["security"]["sasl"]["oauth"]["client_secret"] = secrets["wrong client secret"]
    return logins


def _configs(logins: dict[str, Any], secrets: Secrets, name: str, backend_url: str) -> dict[str, dict[str, Any]]:
    """Return the configuration of each process: one with every use of a secret, and one for each other login."""
    found: dict[str, dict[str, Any]] = {way: {"kafka": kafka, "log_level": "debug"} for way, kafka in logins.items()}
    found["password"] = _whole(secrets, logins["password"], name, backend_url)
    registry = {**found["password"]["schema_registry"], "password": secrets["wrong registry password"]}
    found["wrong registry password"] = found["key as text"] | {"schema_registry": registry}
    return found


def test_no_secret_is_seen_anywhere(
    kafka_secured: SecuredCluster, secrets: Secrets, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> None:
    """Every kind of secret, in every use of it, also where it is wrong, with the log at its most detailed level."""
    name, seen, records = "canary", Seen(), json.dumps(RECORDS).encode()
    for topic in (name, f"{name}-avro", f"{name}-more", f"{name}-out"):
        kafka_secured.cluster.create_topic(topic)
    site = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    backend.response = PlannedResponse(fails=lambda record: record["offset"] == 2)
    configs = _configs(_logins(kafka_secured, secrets), secrets, name, backend.url)
    started = {way: headrace(config, wait=False, env=secrets.variables) for way, config in configs.items()}
    main, token = started["password"], secrets["HTTP token"]

    def wait_for_response(way: str, topic: str, body: bytes, text: bytes, token: str = "") -> None:
        url = f"{started[way].url}/producers/{topic}"
        site.wait_until(lambda: text in seen.ask(url, body, token), f"{text!r} from the process of {way}")

    wait_for_response("password", name, records, b'"offset"', token)
    wait_for_response("password", f"{name}-avro", AVRO, b'"offset"', token)
    for way in ("token", "key as text", "store"):
        wait_for_response(way, f"{name}-more", records, b'"offset"')
    wait_for_response("wrong password", name, records, b"ERR")
    wait_for_response("wrong client secret", name, records, b"ERR")
    wait_for_response("wrong registry password", f"{name}-avro", AVRO, b"ERR40010")
    backend.wait_for(lambda b: len(b.accepted) >= 2)
    site.wait_until(lambda: site.records(f"{name}-out") and site.records(f"{name}.dlq"), "outputs and dead letters")
    site.wait_until(lambda: "user app or its password is wrong" in main.output, "the function with a wrong login")
    Instance(started["token"].url, "readers", name="one").ok("POST", "/subscriptions", {"topics": [f"{name}-more"]})
    for way in ("password", "token"):
        seen.ask_everything(started[way], token, f"{name}.dlq")
    for way in ("wrong password", "wrong client secret", "wrong registry password"):
        seen.ask(f"{started[way].url}/health/readiness")
    seen.ask(f"{main.url}/adm/dead-letters/{name}.dlq/redrive", b"{}", token)
    seen.administer(main, token, name)
    seen.read_processes(secrets)
    files = {process.server.log.parent / "headrace.yaml" for process in started.values()}
    for file in files:
        seen.run_commands(file, secrets.variables, tmp_path)
    for process in started.values():
        process.terminate()
    for topic in (name, f"{name}-audit", f"{name}-control", f"{name}.dlq", f"{name}-out"):
        seen[f"topic {topic}"] = repr(site.records(topic)).encode()
    seen |= {str(file): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file not in files}
    assert len([where for where in seen if where.endswith("headrace.log")]) == len(started)
    assert {where: found for where, content in seen.items() if (found := secrets.found_in(content))} == {}
