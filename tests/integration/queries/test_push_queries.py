"""Push queries of a running Headrace: events and ksqlDB's responses, where they continue, and what ends them."""

from __future__ import annotations

import http.client
import json
import re
import secrets
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace_devkit.testing import Cluster, HeadraceProcess, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send
from tests.table_process import TableProcess

EVENTS = {"Accept": "text/event-stream"}
ENDED = "too long|memory|could not be interrupted"
"""What may end a statement first depends on the load of the machine."""


class PushClient:
    """A connection with one push query; reads a line at a time."""

    def __init__(self, url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        given = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", path, json.dumps(body), given)
        self.response = self._connection.getresponse()
        self.last_id = ""
        self.event = ""

    def __enter__(self) -> PushClient:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection, also while the response has no end."""
        self.response.close()
        self._connection.close()

    def line(self) -> str:
        """Return the next line that is not empty; an empty one is the end."""
        while line := self.response.readline().decode():
            if line.strip():
                return line.strip()
        return ""

    def data(self) -> Any:
        """Return the data of the next event; None at the end."""
        while line := self.line():
            field, _, text = line.partition(": ")
            if field == "id":
                self.last_id = text
            elif field == "event":
                self.event = text
            elif field == "data":
                return json.loads(text)
        return None

    def begun(self) -> PushClient:
        """Wait for the first id, from which the client can continue."""
        line = self.line()
        assert line.startswith("id: "), line
        self.last_id = line.removeprefix("id: ")
        return self


@pytest.fixture
def topic(site: Scenario) -> str:
    """A topic of the test."""
    return f"push-{secrets.token_hex(4)}"


@pytest.fixture
def process(site: Scenario, kafka: Cluster, headrace: StartHeadrace, topic: str) -> HeadraceProcess:
    """A process with a table of the topic."""
    kafka.create_topic(topic, 1)
    return headrace({**site.config, "tables": {"stock": {"topic": topic, "schema": "item STRING, n BIGINT"}}})


def events(process: HeadraceProcess, sql: str, **headers: str) -> PushClient:
    return PushClient(process.url, "/query", {"sql": sql}, {**EVENTS, **headers})


def test_events_have_each_change_and_continue_where_a_client_left(
    site: Scenario, process: HeadraceProcess, topic: str
) -> None:
    """Filter and columns are those of the statement; an id continues also after the engine was killed."""
    statement = "SELECT key, n FROM stock WHERE n < 5 EMIT CHANGES"
    with events(process, statement).begun() as client:
        site.write_json(topic, {"n": 1}, {"n": 9}, {"n": 3, "item": "tea"})
        assert [client.data(), client.data()] == [{"key": "k0", "n": 1}, {"key": "k2", "n": 3}]
        last = client.last_id
        TableProcess(process).kill_engine()
        assert "restarted" in client.data()["description"]
        assert client.event == "error"
    site.write_json(topic, {"n": 4})
    site.wait_until(lambda: send("GET", f"{process.url}/tables/stock/rows/k0").body.get("n") == 4, "the new row")
    with events(process, statement, **{"Last-Event-ID": last}) as client:
        assert client.data() == {"key": "k0", "n": 4}
    with events(process, f"{statement} LIMIT 2", **{"Last-Event-ID": "{}"}) as client:
        assert [client.data(), client.data(), client.data()] == [{"key": "k2", "n": 3}, {"key": "k0", "n": 4}, None]


def test_ksqldb_clients_get_their_formats_and_close_queries(
    site: Scenario, process: HeadraceProcess, topic: str
) -> None:
    """`/query-stream` in lines, `/query` as one array, `/close-query`, and light-4j's endpoint."""
    site.write_json(topic, {"item": "tea", "n": 1}, {"item": "rice", "n": 2})
    site.wait_until(lambda: send("GET", f"{process.url}/tables").body["tables"][0]["rows"] == 2, "two rows")
    with PushClient(process.url, "/query-stream", {"sql": "SELECT item, n FROM stock EMIT CHANGES;"}) as client:
        header = json.loads(client.line())
        assert (header["columnNames"], header["columnTypes"]) == (["ITEM", "N"], ["STRING", "BIGINT"])
        site.write_json(topic, {"item": "salt", "n": 3})
        assert json.loads(client.line()) == ["salt", 3]
        assert send("POST", f"{process.url}/close-query", {"queryId": header["queryId"]}).status == 200
        assert client.line() == ""
    body = {"ksql": "SELECT n FROM stock WHERE n > 1 EMIT CHANGES LIMIT 2;"}
    earliest = {**body, "streamsProperties": {"auto.offset.reset": "earliest"}}
    kind = {"Content-Type": "application/vnd.ksql.v1+json; charset=utf-8"}
    with PushClient(process.url, "/query", earliest, kind) as client:
        found = json.loads(client.response.read())
    assert [part["row"]["columns"] for part in found if "row" in part] == [[2], [3]]
    assert found[-1] == {"finalMessage": "Limit Reached"}
    active = send("POST", f"{process.url}/ksqldb/active", {"query": "SELECT item FROM stock WHERE key = \\'k1\\';"})
    assert active.body == [{"ITEM": "rice"}]
    refused = send("POST", f"{process.url}/ksqldb/active", {"query": "SELECT nothing FROM stock;"})
    assert (refused.status, refused.code) == (400, "ERR30002")
    assert refused.body["description"].startswith("Ksql execution error: ")
    unknown = send("POST", f"{process.url}/close-query", {"queryId": "other"})
    assert (unknown.status, unknown.body["@type"]) == (400, "generic_error")


@pytest.mark.parametrize(
    "slow",
    [
        "list_sum(list_transform(range(200000 * n), lambda x: x % 7))",
        pytest.param("jaro_similarity(repeat('ab', 1500000 + n), repeat('ba', 1500000))", marks=pytest.mark.long),
    ],
)
def test_one_push_query_does_not_stop_the_others(
    site: Scenario, process: HeadraceProcess, topic: str, slow: str
) -> None:
    """A statement that takes too long is ended with a reason; others of the table get every row."""
    engine = TableProcess(process).engine
    with (
        events(process, f"SELECT {slow} FROM stock EMIT CHANGES").begun() as hostile,
        events(process, "SELECT n FROM stock EMIT CHANGES").begun() as client,
    ):
        site.write_json(topic, *({"n": number} for number in range(1000)))
        assert [client.data()["n"] for _ in range(1000)] == [*range(1000)]
        reason = hostile.data()
        assert hostile.event == "error"
        assert re.search(ENDED, reason["description"])
    assert TableProcess(process).engine == engine
    aggregate = send("POST", f"{process.url}/query", {"sql": "SELECT sum(n) FROM stock EMIT CHANGES"}, EVENTS)
    assert aggregate.status == 400
    assert aggregate.body["metadata"]["needs"] == "the function sum"


def test_a_client_that_does_not_read_is_cut(site: Scenario, process: HeadraceProcess, topic: str) -> None:
    """Rows wait within a limit; after it the stream ends with the reason."""
    with events(process, "SELECT repeat(item, 1000) AS text FROM stock EMIT CHANGES").begun() as client:
        for _ in range(5):
            site.write_json(topic, *({"item": "0123456789", "n": number} for number in range(2000)))
        site.wait_until(lambda: send("GET", f"{process.url}/tables").body["tables"][0]["rows"] == 2000, "all rows")
        last = None
        while client.event != "error" and (data := client.data()) is not None:
            last = data
        assert last
        assert "MiB of rows wait" in last["description"]
