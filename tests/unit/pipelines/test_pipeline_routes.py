"""`/adm/pipelines`: what runs here, and what an operator does with it."""

from __future__ import annotations

from typing import Any

from tests.running_server import RunningServer


async def test_pipelines_are_listed_paused_and_resumed(server: RunningServer) -> None:
    """The response of each request is the status after it; an unknown name is 404 with those there are."""

    async def ask(method: str, path: str) -> Any:
        body = "Content-Length: 0\r\n" if method == "POST" else ""
        return await server.ask(f"{method} /adm/pipelines{path} HTTP/1.1\r\nHost: h\r\n{body}\r\n".encode())

    [listed] = (await ask("GET", "")).json["pipelines"]
    assert (listed["name"], listed["state"], listed["driverPid"], listed["restarts"]) == ("t", "running", 7, 1)
    assert (listed["flows"]["f"]["batchId"], listed["flows"]["f"]["lagRecords"]) == (3, 4)
    assert (await ask("GET", "/t")).json == listed
    for word, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        assert (await ask("POST", f"/t/{word}")).json["state"] == state
    missing = await ask("GET", "/u")
    assert (missing.status, "it has t" in missing.json["description"]) == (404, True)
