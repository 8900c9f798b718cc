"""Sidecar.md 18, item 13, as far as produce goes: what was taken before a stop is written and answered."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

CLIENTS = 8


class Client(threading.Thread):
    """Produces one numbered record after the other until one is refused."""

    def __init__(self, url: str, topic: str, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._place, self._topic = url.removeprefix("http://"), topic
        self.written: dict[int, str] = {}
        self.refused: list[tuple[int, str]] = []
        self.begun = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._place, timeout=120)
        kind = {"Content-Type": "application/json", "Authorization": "Bearer not-for-kafka"}
        number = 0
        while not self.refused:
            value = f"{self.name}-{number}"
            try:
                text = json.dumps({"valueFormat": "string", "records": [{"value": value}]})
                connection.request("POST", f"/producers/{self._topic}", text, kind)
                response = connection.getresponse()
                body = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                break  # a request on a connection that is closed meanwhile was not taken
            if response.status == 200:
                self.written[body["offsets"][0]["offset"]] = value
                self.begun.set()
            else:
                self.refused.append((response.status, body["code"]))
            number += 1
        connection.close()


def test_a_stop_loses_nothing_and_doubles_nothing(
    site: Any, topic: Callable[..., str], headrace: Callable[..., Any]
) -> None:
    """While clients produce: every ok is at its offset, whatever got no ok is not there, and the exit code is 0."""
    name = topic()
    process = headrace(site.config)
    clients = [Client(process.url, name, f"client{n}") for n in range(CLIENTS)]
    for client in clients:
        client.start()
    assert all(client.begun.wait(120) for client in clients)
    assert process.terminate() == 0
    for client in clients:
        client.join(150)
    assert not any(client.is_alive() for client in clients)
    assert {refusal for client in clients for refusal in client.refused} <= {(503, "ERR40029")}
    answered = {offset: value for client in clients for offset, value in client.written.items()}
    records = site.records(name)
    assert {record.offset: (record.value or b"").decode() for record in records} == answered
    assert {header for record in records for header, _ in record.headers} == {"X-Correlation-Id"}
