"""`headrace run` with signed tokens."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import yaml
from joserfc import jwt
from joserfc.jwk import ECKey

from headrace_devkit.testing import Cluster, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send

KEY = ECKey.generate_key("P-256", {"kid": "one"})


def bearer(scope: str, lasts_seconds: int = 600) -> str:
    ends = int(time.time()) + lasts_seconds
    claims = {"iss": "issuer", "aud": "headrace", "exp": ends, "client_id": "loader", "scope": scope}
    return f"Bearer {jwt.encode({'alg': 'ES256', 'kid': 'one'}, claims, KEY)}"


class LongRequest:
    """A request without an end of its own, on a connection that ends with it."""

    def __init__(self, url: str, token: str, line: str, body: str = "", *headers: str) -> None:
        address, netloc = urlsplit(url), urlsplit(url).netloc
        self.connection = socket.create_connection((address.hostname, address.port), timeout=20)
        is_whole = "Transfer-Encoding: chunked" not in headers
        sent = [f"Content-Length: {len(body)}"] if body and is_whole else []
        head = [f"{line} HTTP/1.1", f"Host: {netloc}", f"Authorization: {token}", "Connection: close", *headers, *sent]
        self.connection.sendall("\r\n".join([*head, "", body]).encode())
        self.file = self.connection.makefile()

    def end(self) -> str:
        """Return the response; a TimeoutError if it does not end."""
        with self.connection, self.file:
            return self.file.read()


def long_requests(url: str, topic: str, lasting: str, token: str) -> dict[str, LongRequest]:
    """Begin each kind; the caller's instances are made with another token."""
    paths = []
    for _ in range(2):
        settings = {"autoCommitEnable": "false"}
        made = send("POST", f"{url}/consumers/{topic}-{uuid4()}", settings, {"Authorization": lasting})
        paths.append(made.body["base_uri"])
        subscribed = {"topics": [topic]}
        assert send("POST", f"{url}{paths[-1]}/subscriptions", subscribed, {"Authorization": lasting}).status == 204
    events, posted, lines = "Accept: text/event-stream", "Content-Type: application/json", "application/x-ndjson"
    push = '{"%s":"SELECT * FROM rows EMIT CHANGES;"}'
    dead = f"/consumers/deadLetter/active?group={topic}-{uuid4()}&topic={topic}&timeout=30000"
    chunked = (f"Content-Type: {lines}", "Transfer-Encoding: chunked")
    return {
        "active stream": LongRequest(url, token, f"GET {paths[0]}/records", "", events),
        "waiting read": LongRequest(url, token, f"GET {paths[1]}/records?timeout=30000"),
        "dead letter read": LongRequest(url, token, f"GET {dead}"),
        "SQL push": LongRequest(url, token, "POST /query", push % "sql", events, posted),
        "ksqlDB push": LongRequest(url, token, "POST /query-stream", push % "sql", posted),
        "NDJSON": LongRequest(url, token, f"POST /producers/{topic}", "", *chunked),
    }


def settings_of(kafka: Any, site: Any, topic: str) -> dict[str, Any]:
    kafka.create_topic(f"{topic}.dlq")
    return {**site.config, "tables": {"rows": {"topic": topic, "schema": "n BIGINT"}}}


def test_long_requests_end_when_their_token_expires(
    kafka: Cluster, site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """Row J2; each response names the reason. A token is valid for a minute after `exp`."""
    name, file = topic(), tmp_path / "jwks.json"
    file.write_text(json.dumps({"keys": [KEY.as_dict(private=False)]}))
    jwt_settings = {"issuer": "issuer", "audience": "headrace", "jwks_file": str(file)}
    settings = settings_of(kafka, site, name)
    url = headrace({**settings, "security": {"mode": "jwt", "jwt": jwt_settings}}).url
    requests = long_requests(url, name, bearer("kafka:r kafka:w"), bearer("kafka:r kafka:w", lasts_seconds=-55))
    ends = {kind: request.end() for kind, request in requests.items()}
    assert [kind for kind, text in ends.items() if "has expired" not in text] == [], ends


def test_long_requests_end_when_a_reload_takes_their_credentials(
    kafka: Cluster, site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """Of a principal that is removed, or has other scopes; those of others go on."""
    name, scopes = topic(), ["kafka:r", "kafka:w", "metrics"]
    tokens = {who: f"Bearer a-token-of-{who:-<16}" for who in ("gone", "less", "kept")}
    principals = {who: {"token": token.split()[1], "scopes": scopes} for who, token in tokens.items()}
    principals["kept"]["scopes"] = [*scopes, "admin"]
    security = {"mode": "token", "principals": principals}
    process = headrace({**settings_of(kafka, site, name), "security": security})
    open_requests = {who: long_requests(process.url, name, token, token) for who, token in tokens.items()}
    asked = {"Authorization": tokens["kept"]}
    reads = 'headrace_http_connections{kind="reads"} 9.0'
    site.wait_until(lambda: reads in site.ask(f"{process.url}/metrics", headers=asked).body, "all reads to be open")
    file = process.server.log.parent / "headrace.yaml"
    changed = yaml.safe_load(file.read_text())
    changed["security"]["principals"]["less"]["scopes"] = ["kafka:r"]
    del changed["security"]["principals"]["gone"]
    file.write_text(yaml.safe_dump(changed))
    assert send("POST", f"{process.url}/adm/modules", ["security"], asked).body["failed"] == {}
    for who, why in (("gone", "is not valid here"), ("less", "scopes of this caller have changed")):
        ends = {kind: request.end() for kind, request in open_requests[who].items()}
        assert [kind for kind, text in ends.items() if why not in text] == [], ends
    for request in open_requests["kept"].values():
        request.connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            request.end()
