"""Sidecar.md 18, item 13, as far as produce goes: what was taken before a stop is written and answered."""

from __future__ import annotations

import http.client
import itertools
import json
from concurrent.futures import ThreadPoolExecutor

from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

CLIENTS = 8


class Client:
    """Produces one numbered record after the other until one is refused."""

    def __init__(self, url: str, topic: str, name: str) -> None:
        self._url, self._topic, self._name = url, topic, name
        self.written: dict[int, str] = {}
        self.refused: set[tuple[int, str]] = set()

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._url.removeprefix("http://"), timeout=120)
        headers = {"Content-Type": "application/json", "Authorization": "Bearer not-for-kafka"}
        for number in itertools.count():
            value = f"{self._name}-{number}"
            text = json.dumps({"valueFormat": "string", "records": [{"value": value}]})
            try:
                connection.request("POST", f"/producers/{self._topic}", text, headers)
                response = connection.getresponse()
                body = json.loads(response.read())
            except (OSError, http.client.HTTPException):
                break  # a request on a connection that is closed meanwhile was not taken
            if response.status != 200:
                self.refused.add((response.status, body["code"]))
                break
            self.written[body["offsets"][0]["offset"]] = value
        connection.close()


def test_a_stop_loses_nothing_and_doubles_nothing(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """While clients produce: every ok is at its offset, whatever got no ok is not there, and the exit code is 0."""
    name = topic()
    process = headrace(site.config)
    clients = [Client(process.url, name, f"client{n}") for n in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        running = [pool.submit(client.run) for client in clients]
        site.wait_until(lambda: all(client.written for client in clients), "a record of each client")
        assert process.terminate() == 0
        for one in running:
            one.result(150)
    assert set().union(*(client.refused for client in clients)) <= {(503, "ERR40029")}
    written = {offset: value for client in clients for offset, value in client.written.items()}
    records = site.records(name)
    assert {record.offset: (record.value or b"").decode() for record in records} == written
    assert {header for record in records for header, _ in record.headers} == {"X-Correlation-Id"}
