"""Replays in a running process: a window once more, to the backend, a function or a topic, and no group touched."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from yaml_table import table

FUNCTION = table(__file__, "function")
HANDLER = """
def handler(context, event):
    return {"replay": event.headers["X-Headrace-Replay"].decode(), "offset": event.offset}
"""


def begin(site: Any, process: HeadraceProcess, topic: str, **request: Any) -> dict[str, Any]:
    """Begin a replay to the consumer and return its job."""
    response = site.ask(f"{process.url}/adm/replays", {"topic": topic, "to": {"consumer": topic}, **request})
    assert response.status == 202, response.body
    return response.body  # type: ignore[no-any-return]


def job(site: Any, process: HeadraceProcess, name: str) -> dict[str, Any]:
    response = site.ask(f"{process.url}/adm/jobs/{name}")
    assert response.status == 200, response.body
    return response.body  # type: ignore[no-any-return]


def wait_for(site: Any, process: HeadraceProcess, name: str, state: str = "done") -> dict[str, Any]:
    def reached() -> bool:
        found = job(site, process, name)
        assert found["state"] not in {"failed", "stopped", "done"} - {state}, found
        return bool(found["state"] == state)

    site.wait_until(reached, f"{name} to be {state}")
    return job(site, process, name)


def all_offsets(site: Any, topic: str) -> tuple[list[str], Mapping[TopicPartition, int]]:
    """Return the names of all groups that may commit, and what the group of the topic's consumer has committed.

    Groups of tests that run meanwhile are left out.
    """

    async def ask() -> tuple[list[str], Mapping[TopicPartition, int]]:
        names = [group.name for group in await site.admin.list_groups() if group.name.startswith((topic, "headrace"))]
        groups = sorted(name for name in names if not name.startswith("headrace.lease."))
        return groups, await site.admin.committed(f"{topic}-push")

    return asyncio.run(ask())


def replayed(backend: Any, name: str) -> list[dict[str, Any]]:
    """Return the records that a job delivered, in their order."""
    requests = [request for request in backend.requests if request.headers.get("x-headrace-replay") == name]
    return [record for request in requests for record in request.body]


def test_a_window_goes_to_the_backend_once_more(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """The same records with the same ids, and the id of the job; no committed offset of any group changes."""
    name = topic(2)
    site.write(name, *(OutgoingRecord(name, b"k", b"%d" % n, None, n % 2) for n in range(40)))
    process = push(name)
    site.wait_committed(f"{name}-push", name, 20)
    site.wait_committed(f"{name}-push", name, 20, 1)
    before, first = all_offsets(site, name), {entry["deliveryId"] for entry in backend.records}
    epochs = {(entry["partition"], entry["epoch"]) for entry in backend.records}

    request = {"partition": 1, "first": 5, "last": 14}
    dry = site.ask(f"{process.url}/adm/replays", {"topic": name, "to": {"consumer": name}, "dryRun": True, **request})
    assert (dry.status, dry.body["total"], dry.body["dryRun"]) == (200, 10, True)
    begun = begin(site, process, name, **request)
    assert (begun["kind"], begun["by"]) == ("replay", "anonymous")
    done = wait_for(site, process, begun["id"])
    assert (done["progress"]["done"], done["progress"]["counts"]["delivered"], done["message"]) == (10, 10, "")
    found = replayed(backend, begun["id"])
    assert [(entry["partition"], entry["offset"]) for entry in found] == [(1, n) for n in range(5, 15)]
    assert {entry["replay"] for entry in found} == {begun["id"]}
    assert {entry["deliveryId"] for entry in found} <= first
    assert {(entry["partition"], entry["epoch"]) for entry in found} <= epochs, "a backend that compares takes both"

    whole = begin(site, process, name)
    wait_for(site, process, whole["id"])
    assert len(replayed(backend, whole["id"])) == 40
    assert all_offsets(site, name) == before
    listed = site.ask(f"{process.url}/adm/jobs").body["jobs"]
    assert [entry["id"] for entry in listed][:2] == [whole["id"], begun["id"]]


def test_what_fails_in_a_replay_is_a_dead_letter_that_says_so(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """By the consumer's own policy."""
    name = topic()
    site.write_json(name, *range(6))
    process = push(name, retry={"attempts": 2})
    site.wait_committed(f"{name}-push", name, 6)

    def answer(request: Any) -> PlannedResponse:
        bodies = [{"record": entry, "processed": entry["offset"] != 3} for entry in request.body]
        return PlannedResponse(body=bodies)

    backend.response = answer
    failed = begin(site, process, name)
    done = wait_for(site, process, failed["id"])
    counts = done["progress"]["counts"]
    assert (counts["delivered"], counts["dead_letters"], counts["redeliveries"]) == (5, 1, 1)
    (letter,) = site.records(f"{name}.dlq")
    headers = dict(letter.headers)
    assert (headers["headrace.dlq.replay"], headers["headrace.dlq.offset"]) == (failed["id"].encode(), b"3")


def test_a_window_goes_to_a_function(site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Its handler sees by a header of the event that it is a replay; the group has read nothing of it."""
    name = topic()
    site.write_json(name, *range(5))
    (tmp_path / "function.yaml").write_text(
        FUNCTION.format(brokers=site.config["kafka"]["bootstrap_servers"], topic=name)
    )
    (tmp_path / "copy_it.py").write_text(HANDLER)
    control = {"topic": f"_headrace-control-{name}"}
    process = headrace({**site.config, "control": control, "functions": [str(tmp_path / "function.yaml")]})
    begun = begin(site, process, name, to={"function": "copy"}, partition=0, first=1, last=3)
    wait_for(site, process, begun["id"])
    out = [json.loads(record.value or b"") for record in site.records(f"{name}-out")]
    assert out == [{"replay": begun["id"], "offset": n} for n in (1, 2, 3)]


def test_a_record_that_can_end_nowhere_ends_the_replay(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Where dead letters are off nothing is passed over: the job fails and names the record."""
    name = topic()
    site.write_json(name, *range(5))
    backend.response = lambda request: PlannedResponse(
        body=[{"record": entry, "processed": entry["offset"] != 2} for entry in request.body]
    )
    process = push(name, dead_letter={"enabled": False}, auto_offset_reset="latest", retry={"attempts": 1})
    begun = begin(site, process, name)
    failed = wait_for(site, process, begun["id"], "failed")
    assert f"offset 2 of {name}-0 failed 1 times" in failed["message"]
    assert "lastRetry" in failed["message"]
    again = begin(site, process, name, lastRetry=True)
    counts = wait_for(site, process, again["id"])["progress"]["counts"]
    assert (counts["delivered"], counts["discarded"]) == (4, 1)
    assert site.ask(f"{process.url}/health/readiness").status == 200


BAD: list[tuple[dict[str, Any], int, str]] = table(__file__, "bad")


def test_what_makes_no_sense_is_refused_and_nothing_begins(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Each with a status and a sentence; the same over the seed's endpoint, with its code."""
    name, other = topic(2), topic()
    site.write_json(name, *range(10))
    process = push(name)

    def filled(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("{topic}", name).replace("{other}", other))

    for changes, status, said in BAD:
        response = site.ask(f"{process.url}/adm/replays", {"topic": name, "to": {"consumer": name}, **filled(changes)})
        assert (response.status, said in response.body["description"]) == (status, True), (changes, response.body)

    usual = {"topicName": name, "partition": 0, "startOffset": 0, "endOffset": 5, "consumerGroup": f"{name}-push"}
    for wrong, said in table(__file__, "bad_metadata"):
        response = site.ask(f"{process.url}/adm/messagereplaymetadata", {**usual, **filled(wrong)})
        assert (response.status, response.body["code"]) == (400, "ERR12218"), (wrong, response.body)
        assert said in response.body["description"], (wrong, response.body)
    assert name not in str(site.ask(f"{process.url}/adm/jobs").body)


def test_the_seeds_endpoint_replays_to_the_backend_and_to_a_topic(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Its response is that of a produce request, and names the job; a consumer group of its own is as good as any."""
    name, other = topic(), topic()
    site.write_json(name, *range(10))
    process = push(name)
    site.wait_committed(f"{name}-push", name, 10)
    usual = {"topicName": name, "partition": 0, "startOffset": 2, "endOffset": 5, "consumerGroup": f"{name}-push"}
    response = site.ask(f"{process.url}/adm/messagereplaymetadata", {**usual, "timeout": 100, "extra": 1})
    assert response.status == 200, response.body
    ((place,), status) = response.body["offsets"], response.body["requestStatus"]
    assert (place["partition"], place["offset"] >= 0, status) == (0, True, "OK")
    wait_for(site, process, response.body["jobId"])
    assert [entry["offset"] for entry in replayed(backend, response.body["jobId"])] == [2, 3, 4]
    to_topic = {**usual, "streamingApp": True, "destinationTopic": other, "consumerGroup": "only-for-replays"}
    wait_for(site, process, site.ask(f"{process.url}/adm/messagereplaymetadata", to_topic).body["jobId"])
    assert len(site.records(other)) == 3


def letters_of(site: Any, process: HeadraceProcess, name: str) -> dict[str, Any]:
    return next(one for one in site.ask(f"{process.url}/adm/dead-letters").body["topics"] if one["topic"] == name)  # type: ignore[no-any-return]


def test_letters_are_redriven_dropped_and_moved_by_jobs(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """To their topic, to the backend as the original records, to quarantine and away; each is completed once."""
    name = topic()
    site.write_json(name, *range(8))
    backend.response = lambda request: PlannedResponse(body=[{"record": e, "processed": False} for e in request.body])
    process = push(name, retry={"attempts": 1})
    site.wait_until(lambda: len(site.records(f"{name}.dlq")) == 8, "the dead letters")
    url = f"{process.url}/adm/dead-letters/{name}.dlq"
    backend.response = PlannedResponse()
    site.wait_committed(f"{name}-push", name, 8)
    before = all_offsets(site, name)

    dry = site.ask(f"{url}/redrive", {"dryRun": True, "keys": ["k1", "k2"]})
    assert (dry.status, dry.body["records"], dry.body["targets"]) == (200, 2, {name: 2})
    assert len(dry.body["hours"]) in (1, 2)
    assert site.ask(f"{url}/redrive", {"toConsumer": "nobody"}).status == 404

    def run(kind: str, **request: Any) -> dict[str, Any]:
        response = site.ask(f"{url}/{kind}", request)
        assert response.status == 202, response.body
        return wait_for(site, process, response.body["id"])

    done = run("redrive", toConsumer=name, keys=["k1", "k2"])
    assert (done["kind"], done["progress"]["counts"]["delivered"]) == ("redrive", 2)
    assert done["progress"]["counts"]["passed"] == 6
    sent = replayed(backend, done["id"])
    assert [entry["deliveryId"] for entry in sent] == [f"{name}-push:{name}:0:{n}" for n in (1, 2)]
    assert run("redrive", toConsumer=name, keys=["k1", "k3"])["progress"]["counts"]["passed"] == 7
    assert all_offsets(site, name) == before
    words = ["dlq", "redrive", f"{name}.dlq", "--to-backend", name, "--url", process.url, "--key", "k6"]
    assert f"1 dead letter of {name}.dlq would go back: 1 to {name}" in site.cli(*words, "--dry-run").stdout
    assert "state     done" in site.cli(*words).stdout
    assert "nothing matches" in site.cli(*words, code=1).stderr
    no_letters = site.ask(f"{process.url}/adm/dead-letters/{name}/redrive", {})
    assert (no_letters.status, "is not a dead letter topic" in no_letters.body["description"]) == (400, True)
    assert run("drop", keys=["k4"], reason="for this test")["progress"]["records"] == 1
    assert run("quarantine", keys=["k5"])["progress"]["targets"] == {f"{name}.dlq.quarantine": 1}
    assert letters_of(site, process, f"{name}.dlq")["left"] == 2
    assert run("redrive", exactlyOnce=True)["progress"]["records"] == 2
    assert letters_of(site, process, f"{name}.dlq")["left"] == 0
    assert site.ask(f"{url}/redrive", {"keys": ["k1"]}).status == 400
    again = site.ask(f"{url}/redrive", {})
    assert again.status == 400 or wait_for(site, process, again.body["id"])["progress"]["records"] == 0


def test_the_commands_begin_watch_and_steer(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Over the same HTTP API: dry run, to the end, detached, paused, resumed, stopped; a refusal is exit code 1."""
    name = topic()
    site.write_json(name, *range(30))
    process = push(name)
    site.wait_committed(f"{name}-push", name, 30)
    to = ["--to-consumer", name, "--url", process.url]
    window = ["--partition", "0", "--offsets", "3-6"]
    dry = site.cli("replay", name, *to, *window, "--dry-run").stdout
    assert f"would replay 4 offsets of {name}: 3 to 6 of partition 0" in dry
    said = site.cli("replay", name, *to, *window).stdout
    assert "state     done" in said
    assert "4 delivered" in said
    begun = json.loads(site.cli("replay", name, *to, "--rate", "1", "--detach", "--output", "json").stdout)["id"]
    refused = site.cli("replay", name, *to, code=1).stderr
    assert f"job {begun} already does that" in refused
    for step, state in (("pause", "paused"), ("resume", "waiting|running"), ("stop", "stopped")):
        assert re.search(f"state +({state})", site.cli("jobs", step, begun, "--url", process.url).stdout)
    listed = site.cli("jobs", "show", "--url", process.url).stdout.splitlines()
    assert [line.split()[2] for line in listed if name in line] == ["stopped", "done"]
    shown = site.cli("jobs", "show", begun, "--follow", "--url", process.url, "--output", "json").stdout
    assert json.loads(shown)["state"] == "stopped"
    site.cli("replay", name, "--url", process.url, code=2)
    site.cli("replay", name, *to, "--offsets", "7", code=2)
