"""Live control of consumers that run: over HTTP, on one process and on two, through rebalances and restarts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.api import Api
from headrace.errors import HeadraceError
from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from yaml_table import table


@pytest.fixture
def add(site: Scenario, headrace: StartHeadrace, backend: RecordingBackend) -> Callable[..., HeadraceProcess]:
    """Add a process to a deployment, whose consumer `push` pushes a topic to the backend."""
    table = f"_headrace-control-{uuid.uuid4().hex[:12]}"

    def start(topic: str, *, more: Any = None, env: Any = None, **settings: Any) -> HeadraceProcess:
        consumer = {
            "topics": [topic],
            "group": f"{topic}-push",
            "backend": {"url": backend.url},
            "consumer": {"properties": {"session.timeout.ms": 3000}},
            **settings,
        }
        config = {**site.config, "control": {"topic": table}, "reactive_consumers": {"push": consumer}, **(more or {})}
        return headrace(config, env=env)

    return start


CONSUMER = "/adm/reactive-consumers/push"


def has(api: Api, place: str) -> list[int]:
    """Return the partitions that a process has."""
    return [one["partition"] for one in api.request("GET", place)["partitions"] if one["assigned"]]


def test_a_command_reaches_the_process_that_has_the_partition(
    site: Scenario, topic: MakeTopic, add: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Whichever process gets it; each knows the owners of all partitions."""
    name = topic(2)
    first = Api(add(name).url)
    second = Api(add(name).url)
    for partition in (0, 1):
        site.write(name, *(OutgoingRecord(name, b"k", b"%d" % n, None, partition) for n in range(5)))
        site.wait_committed(f"{name}-push", name, 5, partition)
    site.wait_until(lambda: len(has(first, CONSUMER)) == len(has(second, CONSUMER)) == 1, "one partition for each")
    [theirs] = has(second, CONSUMER)
    elsewhere = {}

    def is_told() -> bool:
        elsewhere.update(
            {one["partition"]: one for one in first.request("GET", CONSUMER)["partitions"]}.get(theirs, {})
        )
        return elsewhere.get("lag") == 0 and " at 127.0.0.1" in elsewhere["member"] and "(pid " in elsewhere["member"]

    site.wait_until(is_told, "the first process to know of the other's partition")
    assert not elsewhere["assigned"]
    assert elsewhere["why"].startswith("another process has it")
    first.request("POST", f"{CONSUMER}/pause", {"topic": name, "partitions": [theirs]})
    sought = first.request("POST", f"{CONSUMER}/seek?waitSeconds=60", {"to": "earliest", "partitions": [theirs]})
    assert [(one["partition"], one["outcome"], one["cameFrom"]) for one in sought["results"]] == [(theirs, "sought", 5)]
    skipped = first.request(
        "POST", f"{CONSUMER}/skip?waitSeconds=60", {"partition": theirs, "offset": 1, "reason": "it is no order"}
    )
    assert skipped["results"][0]["by"] == sought["results"][0]["by"]
    before = len(backend.accepted)
    first.request("POST", f"{CONSUMER}/resume")
    site.wait_committed(f"{name}-push", name, 5, theirs)
    assert [(r["partition"], r["offset"]) for r in backend.accepted[before:]] == [(theirs, n) for n in (0, 2, 3, 4)]
    everywhere = first.request("POST", f"{CONSUMER}/seek?waitSeconds=60", {"offset": 5})
    assert {one["outcome"] for one in everywhere["results"]} == {"sought"}
    assert len({one["by"] for one in everywhere["results"]}) == 2


def test_a_pause_and_settings_survive_rebalances_and_restarts(
    site: Scenario, topic: MakeTopic, add: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Who comes later holds what is held, until somebody lets it go; the status says by whom and why."""
    name = topic(2)
    one = add(name)
    api = Api(one.url)
    api.request("POST", f"{CONSUMER}/pause", {"reason": "night"})
    api.request("PATCH", f"{CONSUMER}/settings", {"maxRecords": 3, "rateRecords": 1000.5})
    late = Api(add(name).url)
    site.wait_until(lambda: len(has(late, CONSUMER)) == 1, "the second process to get a partition")
    assert one.terminate() == 0
    one.start()
    one.wait_ready()
    for partition in (0, 1):
        site.write(name, *(OutgoingRecord(name, b"k", b"%d" % n, None, partition) for n in range(5)))

    def held() -> list[str]:
        parts = [part for who in (api, late) for part in who.request("GET", CONSUMER)["partitions"] if part["assigned"]]
        return [part["why"] for part in parts if part["recordsInFlight"] == 5]

    site.wait_until(lambda: len(held()) == 2, "both partitions to be read and held")
    assert all(why.startswith("paused by ") and why.endswith(": night") for why in held())
    assert backend.requests == []
    for who in (api, late):
        shown = who.request("GET", CONSUMER)
        assert shown["paused"]["reason"] == "night"
        assert (shown["settings"]["maxRecords"], shown["settings"]["rateRecords"]) == (3, 1000.5)
    late.request("POST", f"{CONSUMER}/resume")
    backend.wait_for(lambda b: len(b.accepted) == 10)
    assert max(len(request.body) for request in backend.requests) <= 3


def test_functions_and_retry_topics_are_steered_alike(
    site: Scenario, topic: MakeTopic, add: Callable[..., HeadraceProcess], backend: RecordingBackend, tmp_path: Path
) -> None:
    """A record that waits an hour for another try is skipped there; a function begins once more."""
    name, source, target = topic(), topic(), topic()
    (tmp_path / "work.py").write_text("def handler(context, event):\n    return event.body\n")
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "outputTopic": target}
    spec = {"handler": "work:handler", "triggers": {"in": {"kind": "kafka-cluster", "attributes": attributes}}}
    (tmp_path / "function.yaml").write_text(json.dumps({"metadata": {"name": "work"}, "spec": spec}))
    backend.response = PlannedResponse(fails=lambda record: record["value"] == 1)
    site.write_json(name, 0, 1, 2)
    site.write_json(source, 5, 6)
    api = Api(add(name, retry={"topics": [3600]}, more={"functions": [str(tmp_path / "function.yaml")]}).url)
    group, retry_topic = f"{name}-push", f"{name}-push.retry.3600s"
    site.wait_committed(group, name, 3)

    def waits() -> bool:
        found = {one["topic"]: one for one in api.request("GET", CONSUMER)["partitions"]}
        return retry_topic in found and found[retry_topic]["recordsInFlight"] == 1 and found[retry_topic]["why"] != ""

    site.wait_until(waits, "the record to wait in its retry topic")
    skipped = api.request(
        "POST", f"{CONSUMER}/skip", {"topic": retry_topic, "partition": 0, "offset": 0, "reason": "no order"}
    )
    assert skipped["results"][0]["outcome"] == "skipped"
    site.wait_committed(f"{group}.retry", retry_topic, 1)
    with pytest.raises(HeadraceError, match="is a retry topic of"):
        api.request("POST", f"{CONSUMER}/seek", {"to": "earliest", "topic": retry_topic})
    work = "/adm/reactive-consumers/work.in"
    assert api.request("GET", work)["kind"] == "function"
    site.wait_committed(f"{source}-work", source, 2)
    api.request("POST", f"{work}/pause")
    assert api.request("POST", f"{work}/seek?waitSeconds=60", {"to": "earliest"})["results"][0]["outcome"] == "sought"
    api.request("PATCH", f"{work}/settings", {"maxInFlight": 1})
    api.request("POST", f"{work}/resume")
    site.wait_until(lambda: len(site.records(target)) == 4, "the function to handle both again")


REFUSED = table(__file__, "refused")


def test_what_cannot_be_is_refused_and_nothing_is_half_done(
    site: Scenario, topic: MakeTopic, add: Callable[..., HeadraceProcess]
) -> None:
    """Each with what is wrong and what would be right; earlier commands stay in force."""
    name = topic()
    site.write_json(name, *range(3))
    api = Api(add(name).url)
    site.wait_committed(f"{name}-push", name, 3)
    for action, body, status, said in REFUSED:
        with pytest.raises(HeadraceError) as refused:
            api.request("PATCH" if action == "settings" else "POST", f"{CONSUMER}/{action}", body)
        assert (refused.value.status, said in refused.value.description) == (status, True), (
            action,
            body,
            refused.value.description,
        )
    with pytest.raises(HeadraceError, match="is done or does not exist"):
        api.request("DELETE", f"{CONSUMER}/commands/none")
    with pytest.raises(HeadraceError, match="did you mean push"):
        api.request("POST", "/adm/reactive-consumers/pusj/pause")
    shown = api.request("GET", CONSUMER)
    assert (shown["paused"], shown["commands"], shown["partitions"][0]["committed"]) == (None, [], 3)
    assert shown["settings"]["maxRecords"] == 100
