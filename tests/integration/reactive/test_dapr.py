"""An application of Dapr, unchanged: it publishes by Dapr's paths, gets events, and answers by Dapr's words."""

import json
import urllib.request
from typing import Any

from headrace_devkit.devcluster.recording_backend import Received
from headrace_devkit.testing import MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

KEYS = ("a", "b", "c")
WORDS = ("SUCCESS", "RETRY", "DROP", "404", "LATER", "SUCCESS")
QUICK = {"attempts": 3, "first_delay_seconds": 0.05, "max_delay_seconds": 0.1}


def publish(url: str, body: Any) -> int:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        status: int = response.status
    return status


class Application:
    """Answers one event, or the entries of a bulk request, by the word in the data; RETRY is done at the second try."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[str, int]]] = {"/one": [], "/bulk": []}
        self.done: dict[str, list[tuple[str, int]]] = {"/one": [], "/bulk": []}

    def __call__(self, received: Received) -> PlannedResponse:
        if received.path == "/bulk":
            words = {entry["entryId"]: self._word("/bulk", entry["event"]) for entry in received.body["entries"]}
            statuses = [{"entryId": name, "status": word} for name, word in words.items() if word != "404"]
            return PlannedResponse(body={"statuses": statuses})  # an entry that is missing counts as RETRY
        word = self._word("/one", received.body)
        return PlannedResponse(404) if word == "404" else PlannedResponse(body={"status": word})

    def _word(self, path: str, event: dict[str, Any]) -> str:
        data = event["data"]
        name = data["key"], data["n"]
        self.calls[path].append(name)
        word = "SUCCESS" if data["word"] == "RETRY" and self.calls[path].count(name) > 1 else data["word"]
        if word == "SUCCESS":
            self.done[path].append(name)
        return str(word)


def test_an_application_of_dapr_loses_nothing(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Each event ends once, as done or as a dead letter, and the first tries of a key are in its order."""
    name = topic()
    application = backend.response = Application()
    consumers = {
        path: {
            "topics": [name],
            "group": f"{name}-{path}",
            "retry": QUICK,
            "ordering": ordering,
            "dead_letter": {"topic": f"{{topic}}.{path}.dlq"},
            "backend": {"url": backend.url.replace("kafka/records", path), "mode": mode, "answers": "dapr"},
        }
        for path, mode, ordering in (("one", "cloudevents_structured", "key"), ("bulk", "results", "partition"))
    }
    process = headrace({**site.config, "dapr": {"pubsubs": ["kafka"]}, "reactive_consumers": consumers})
    data: list[dict[str, Any]] = [{"key": key, "n": n, "word": word} for n, word in enumerate(WORDS) for key in KEYS]
    for event in data[:9]:
        one = f"{process.url}/v1.0/publish/kafka/{name}?metadata.partitionKey={event['key']}"
        assert publish(one, event) == 204
    entries = [
        {
            "entryId": str(n),
            "event": event,
            "contentType": "application/json",
            "metadata": {"partitionKey": event["key"]},
        }
        for n, event in enumerate(data[9:])
    ]
    assert publish(f"{process.url}/v1.0-alpha1/publish/bulk/kafka/{name}", entries) == 204
    for path in consumers:
        site.wait_committed(f"{name}-{path}", name, len(data))
    done = {(key, n) for key in KEYS for n in (0, 1, 5)}
    lost = {(key, n) for key in KEYS for n in (2, 3, 4)}
    for path in consumers:
        calls = application.calls[f"/{path}"]
        assert sorted(application.done[f"/{path}"]) == sorted(done), path
        letters = site.records(f"{name}.{path}.dlq")
        assert {(d["key"], d["n"]) for d in (json.loads(one.value or b"")["data"] for one in letters)} == lost
        assert len(letters) == len(lost)
        tries = {n: calls.count(("a", n)) for n in range(6)}
        assert tries == {0: 1, 1: 2, 2: 1, 3: 1 if path == "one" else 3, 4: 3, 5: 1}, path
    for key in KEYS:  # an event waits until the one before it has ended
        ended = [n for other, n in application.calls["/one"] if other == key]
        assert ended == sorted(ended)
    event = json.loads(site.records(name)[0].value or b"")
    assert (event["type"], event["pubsubname"], event["topic"]) == ("com.dapr.event.sent", "kafka", name)
    assert [record.key for record in site.records(name)] == [event["key"].encode() for event in data]
