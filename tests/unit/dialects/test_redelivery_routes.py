"""Delivering dead letters again over HTTP: what the endpoint takes, and whose topics a caller may touch."""

from __future__ import annotations

from tests.running_server import OpenServer, RunningServer

PATH = "/consumers/deadLetter/reactive"
SCOPES = {"other": ["consume:other*", "group:g"], "reader": ["kafka:r"], "writer": ["kafka:w"], "boss": ["admin"]}
SECURITY = {"mode": "token", "principals": {n: {"token": f"{n:->16}", "scopes": s} for n, s in SCOPES.items()}}


def request(name: str, query: str = "", body: bytes | None = None, path: str = PATH) -> bytes:
    head = f"{'GET' if body is None else 'POST'} {path}{query} HTTP/1.1\r\nHost: h\r\n"
    head += f"Authorization: Bearer {name:->16}\r\nContent-Length: {len(body or b'')}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + (body or b"")


async def test_nothing_of_a_call_is_left_for_the_next(opened: OpenServer) -> None:
    """Defect 26: `lastretry`, group and topics are those of the call; what is unknown is ignored (decisions.md 4)."""
    async with opened(security=SECURITY) as server:
        for ask in (
            request("writer", "?lastretry=true&group=g&topic=t&timeout=5&colour=blue"),
            request("writer"),
            request("writer", "?topic=t&timeout=7", b'{"group":"b","lastretry":true,"colour":1}'),
            request("writer", "?group=q", b""),
            request("writer", "?topic=t", b"{}"),
        ):
            assert (await server.ask(ask)).status == 200
        requested = [(one.group, one.topic, one.timeout, one.lastretry) for one in server.dead_letters.requests]
        assert requested == [
            ("g", "t", 5, True),
            (None, None, None, False),
            ("b", "t", 7, True),
            ("q", None, None, False),
            (None, "t", None, False),
        ]
        for wrong in ("?timeout=-1", "?timeout=x", "?lastretry=perhaps"):
            assert (await server.ask(request("writer", wrong))).json["code"] == "ERR11004"
        twice = await server.ask(request("writer", "?topic=t", b'{"topic":"u"}'))
        assert (twice.status, twice.json["description"][:30]) == (400, "topic is in both query and bod")
        assert len(server.dead_letters.requests) == len(requested)


async def test_a_probe_delivers_nothing(server: RunningServer) -> None:
    """HEAD asks what there is, so it must not redeliver dead letters as GET does there."""
    reader, writer = await server.connect()
    writer.write(f"HEAD {PATH} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    assert b" 405 " in await reader.readline()
    writer.close()
    assert not server.dead_letters.requests


async def test_the_caller_is_in_the_audit(server: RunningServer) -> None:
    """When dead letters were delivered, and when they could not be; a call that finds none has no event."""
    for query in ("", "?timeout=3", "?group=away&topic=t"):
        await server.get(PATH + query)
    assert server.events.controls == [
        ("redeliver", "t.dlq", "so many", "FAILURE"),
        ("redeliver", "t", "away", "FAILURE"),
    ]
