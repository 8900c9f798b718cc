"""The client of a backend: certificates on both sides, and tokens ."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from pathlib import Path

from headrace.config.backend import BackendConfig, ClientTls
from headrace.runtime import SystemClock
from headrace.runtime.tls import ClientTlsFiles
from headrace.sidecar.reactive.client import client_of
from tests.raw_server import OK, Authority, always, client_for, run, served, why_not
from tests.staged import staged


@staged(run)
async def test_tls_takes_servers_that_the_authority_signed_and_no_others(tmp_path: Path) -> None:
    """Right name, date and authority; each of them wrong is refused in words, and no request is sent."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    context = ClientTlsFiles("x", ClientTls(ca=authority.file), SystemClock()).context
    cases = [
        (authority.issue("good"), ""),
        (authority.issue("other", host="other.example"), "not trusted: IP address mismatch"),
        (authority.issue("late", days=-1), "not trusted: certificate has expired"),
        (stranger.issue("foreign"), "not trusted: .* local issuer"),
    ]
    for tls, reason in cases:
        async with served(always(OK), tls=tls) as server:
            with client_for(server.url.replace("http:", "https:"), tls=context) as client:
                if not reason:
                    assert (await client.post(b"x")).body == b"ok"
                    continue
                assert re.search(reason, await why_not(client))
            assert server.requests == []


@staged(run)
async def test_tls_and_plain_text_do_not_meet(tmp_path: Path) -> None:
    """https to a plain port and http to a TLS port: a clear sentence, nothing delivered."""
    authority = Authority(tmp_path)
    context = ClientTlsFiles("x", ClientTls(ca=authority.file), SystemClock()).context

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with served(plain) as server:
        with client_for(server.url.replace("http:", "https:"), tls=context) as client:
            assert "does the server speak plain HTTP" in await why_not(client)
    async with served(always(OK), tls=authority.issue("good")) as server:
        with client_for(server.url) as client:
            assert re.search("not HTTP/1.1|closed the connection", await why_not(client))
        assert server.requests == []


@staged(run)
async def test_a_backend_may_want_a_certificate_and_a_new_one_is_taken(tmp_path: Path) -> None:
    """Without one it is refused; files that change are read again."""
    authority = Authority(tmp_path)
    server_tls = authority.issue("server")
    server_tls.load_verify_locations(authority.file)
    server_tls.verify_mode = ssl.CERT_REQUIRED
    authority.issue("us")
    settings = {"ca": authority.file, "certificate": tmp_path / "us.pem", "key": tmp_path / "us.key"}
    files = ClientTlsFiles("x", ClientTls.model_validate(settings), SystemClock())
    names: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        names.append(writer.get_extra_info("peercert")["serialNumber"])
        await server.answering(OK)(reader, writer)

    async with served(note, tls=server_tls) as server:
        url = server.url.replace("http:", "https:")
        without = ClientTlsFiles("x", ClientTls(ca=authority.file), SystemClock()).context
        with client_for(url, tls=without) as client:
            assert re.search("certificate|closed the connection", await why_not(client))
        assert names == []
        for _ in range(2):
            with client_for(url, tls=files.context) as client:
                assert (await client.post(b"x")).body == b"ok"
            authority.issue("us")
            files.look()
        assert len(set(names)) == 2


@staged(run)
async def test_a_token_goes_with_every_request_and_is_replaced_once(tmp_path: Path) -> None:
    """One token for many requests; 401 replaces it, only once; a failing token server is named without the secret."""

    def granted(name: str) -> bytes:
        body = json.dumps({"access_token": name, "token_type": "bearer", "expires_in": 3600})
        return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    refused = b"HTTP/1.1 401 U\r\nContent-Length: 0\r\n\r\n"
    denied = b'HTTP/1.1 401 U\r\nContent-Length: 26\r\n\r\n{"error":"invalid_client"} '[:-1]
    # A connection rests after a response, so the next request has another one.
    tokens = [always(each, then="close") for each in (granted("one"), granted("two"), granted("three"), denied)]
    answers = [always(each, then="close") for each in (OK, OK, refused, OK, refused, refused, refused)]
    async with served(*tokens) as giver, served(*answers) as server:
        oauth = {"token_url": giver.url, "client_id": "me:x", "client_secret": "hush hush", "scope": "a b"}
        backend = BackendConfig.model_validate({"url": server.url, "oauth": oauth})
        client = client_of(backend, SystemClock())
        statuses = [(await client.post(b"%d" % n)).status for n in range(4)]
        assert statuses == [200, 200, 200, 401]
        text = await why_not(client)
        client.close()
    assert "waiting for the token server" in text
    assert "HTTP 401 (invalid_client): check oauth.client_id" in text
    assert "hush" not in text
    used = [re.findall(r"Authorization: Bearer (\w+)\r", head)[0] for head, _ in server.requests]
    assert used == ["one", "one", "one", "two", "two", "three", "three"]
    head, body = giver.requests[0]
    assert body == b"grant_type=client_credentials&scope=a+b"
    assert "\r\nAuthorization: Basic bWUlM0F4Omh1c2glMjBodXNo\r\n" in head
