"""Requests of a user without the right they need: each is answered 403 with operation, resource and principal."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from headrace.records import OutgoingRecord
from headrace.testing import RecordingBackend
from headrace.testing.secured import SecuredCluster
from tests.active_client import Instance, Response, send
from tests.least_rights import Row, World
from tests.least_rights_jobs import write_dead_letters

LIMIT_SECONDS = 20.0
TOPICS = (
    "orders",
    "orders.copy",
    "orders.dlq",
    "orders.dlq.quarantine",
    "_headrace-control",
    "_headrace-idempotency",
    "_headrace-locks",
    "_headrace-redriven",
)


def rights(topics: str = "", groups: str = "", ids: str = "") -> list[Row]:
    """Return one operation on every topic, group and transactional id."""
    found = [Row(topics, "topic", name, "") for name in ("orders*", "_headrace*") if topics]
    found += [Row(groups, "group", name, "") for name in ("tracking*", "headrace*") if groups]
    return found + [Row(ids, "transactional id", name, "") for name in ("headrace*",) if ids]


USERS = {"read": rights("Read", "Read", "Describe"), "none": []}
ALL, NONE = ("read", "none"), ("none",)


class Use(NamedTuple):
    """A request, and the users to whom Kafka refuses it."""

    refused: tuple[str, ...]
    method: str
    path: str
    body: Any = None
    headers: dict[str, str] = {}


RECORDS = {"records": [{"value": 1}]}
WINDOW = {"partition": 0, "offsets": {"start": 0, "end": 1}}
USES = (
    Use(ALL, "POST", "/producers/{orders}", RECORDS),
    Use(ALL, "POST", "/producers/{orders}", RECORDS, {"Idempotency-Key": "one"}),
    Use(ALL, "POST", "/transactions", {"topics": [{"topic": "{orders}", **RECORDS}]}),
    Use(NONE, "GET", "/topics/{orders}/partitions/0/records"),
    Use(NONE, "GET", "/adm/dead-letters"),
    Use(NONE, "GET", "/adm/dead-letters/{orders.dlq}"),
    Use(NONE, "GET", "/adm/dead-letters/{orders.dlq}/statistics"),
    Use(ALL, "POST", "/consumers/deadLetter/reactive", {"topic": "{orders}"}),
    Use(ALL, "GET", "/consumers/deadLetter/reactive?topic={orders}"),
    Use(
        ALL,
        "POST",
        "/consumers/deadLetter/active",
        [{"record": {"topic": "{orders}", "partition": 0, "offset": 7, "value": 1}}],
    ),
    Use(ALL, "POST", "/adm/reactive-consumers/push/pause", {"reason": "one"}),
    Use((), "POST", "/adm/reactive-consumers/push/resume", {}),
    Use(ALL, "POST", "/adm/reactive-consumers/push/seek", {"to": "begin", "topic": "{orders}", "partitions": [0]}),
    Use(ALL, "PATCH", "/adm/reactive-consumers/push/settings", {"rateRecords": 5}),
    Use((), "GET", "/adm/reactive-consumers"),
    Use((), "GET", "/adm/reactive-consumers/push"),
    Use((), "GET", "/adm/consumers"),
    Use((), "GET", "/adm/jobs"),
    Use((), "GET", "/adm/jobs/replay-1"),
    Use((), "POST", "/adm/jobs/replay-1/stop"),
    Use(ALL, "POST", "/adm/replays", {"topic": "{orders}", "to": {"topic": "{orders.copy}"}, **WINDOW}),
    Use(ALL, "POST", "/adm/replays", {"topic": "{orders}", "to": {"consumer": "push"}, **WINDOW}),
    Use(ALL, "POST", "/adm/dead-letters/{orders.dlq}/redrive", {}),
    Use(ALL, "POST", "/adm/dead-letters/{orders.dlq}/redrive", {"toConsumer": "push"}),
    Use(NONE, "POST", "/adm/dead-letters/{orders.dlq}/redrive", {"dryRun": True}),
    Use(ALL, "POST", "/adm/dead-letters/{orders.dlq}/drop", {"reason": "paid"}),
    Use(ALL, "POST", "/adm/dead-letters/{orders.dlq}/quarantine", {"reason": "odd"}),
    Use((), "GET", "/reactive-consumers"),
    Use((), "GET", "/reactive-consumers/one"),
    Use(ALL, "PUT", "/reactive-consumers/one", {"topics": ["{orders}"], "group": "g", "backend": {"url": "{backend}"}}),
    Use((), "DELETE", "/reactive-consumers/one"),
)
FETCH = Use(NONE, "GET", "/consumers/deadLetter/active?topic={orders}&group={tracking}-fetch&timeout=1000")
PARTITIONS = {"partitions": [{"topic": "{orders}", "partition": 0}]}
OF_AN_INSTANCE = (
    Use(NONE, "GET", "/records?timeout=1000"),
    Use(NONE, "PUT", "/offsets", PARTITIONS),
    Use(NONE, "POST", "/positions/first", PARTITIONS),
    Use(NONE, "POST", "/positions/last", PARTITIONS),
    Use((), "POST", "/positions", {"offsets": [{"topic": "{orders}", "partition": 0, "offset": 0}]}),
    Use((), "GET", "/subscriptions"),
    Use((), "GET", "/assignments"),
)


def world_of(user: str, *means: Any) -> World:
    """Return the world of a user, with a record, a dead letter, and a process that was started."""
    secured, folder, headrace, backend = means
    world = World(secured, f"{user}-{secrets.token_hex(2)}", USERS[user], folder, headrace, backend)
    for topic in TOPICS:
        world.create_topic(topic)
    for topic in TOPICS[5:]:  # an empty topic is loaded without the right to read it
        world.site.write(world(topic), OutgoingRecord(world(topic), b"key", None, None, 0))
    world.site.write_json(world("orders"), 1)
    write_dead_letters(world, 0, 400)
    names = {"id": world("headrace-host"), "producers": 1}
    world.run(
        wait=False,
        reactive_consumers={"push": world.consumer()},
        producer={"transactions": names, "idempotency": {"topic": world("_headrace-idempotency")}},
        registrations={"backends": [backend.url]},
    )
    return world


def user_of(world: World) -> str:
    """Return the kind of user."""
    return world.key.split("-")[0]


def filled(world: World, text: str) -> str:
    """Return a text with the names of topics and groups."""
    for name in (*TOPICS, "tracking"):
        text = text.replace(f"{{{name}}}", world(name))
    return text.replace("{backend}", world.backend.url)


def response_to(method: str, url: str, body: Any, headers: dict[str, str]) -> Response:
    """Return the response; sent again while the client is new and does not know why, or reads nothing."""
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            response = send(method, url, body, headers)
        except TimeoutError as none:
            return Response(599, str(none))
        unknown = response.body == [] or "the Kafka client is being replaced" in json.dumps(response.body)
        if not unknown or time.monotonic() > end:
            return response
        time.sleep(0.1)


def refusal(world: World, url: str, use: Use) -> str:
    """Return what is wrong with the response to a use; nothing if it is as it should be."""
    body = None if use.body is None else json.loads(filled(world, json.dumps(use.body)))
    response = response_to(use.method, url + filled(world, use.path), body, use.headers)
    text = json.dumps(response.body)
    named = response.status == 403 and f"User:{world.user} has no right" in text and "kafka-acls.sh" in text
    right = named if user_of(world) in use.refused else response.status < 500
    return (
        "" if right else f"{world.user}: {use.method} {use.path} {use.body or ''} {use.headers or ''}\n    {response}"
    )


def refusals(world: World, pool: Executor) -> list[Future[str]]:
    """Return what is wrong, as it will be known: what waits for Kafka up to 10 s waits together."""
    url, site = world.url, world.site
    site.wait_until(lambda: site.ask(f"{url}/health/liveness").status == 200, "a server")
    site.wait_until(
        lambda: not [text for text in site.reasons(url).values() if "answered yet" in text or "read yet" in text],
        "first answers of Kafka",
    )
    waiting = [pool.submit(refusal, world, url, FETCH)]
    for name, body in (("subscriptions", {"topics": ["{orders}"]}), ("assignments", PARTITIONS)):
        instance = Instance(url, f"{world('tracking')}-{name}", valueFormat="json")
        instance.ok("POST", f"/{name}", json.loads(filled(world, json.dumps(body))))
        waiting += [pool.submit(refusal, world, instance.url, use) for use in OF_AN_INSTANCE]
    waiting.append(pool.submit(lambda: "".join(refusal(world, url, use) for use in USES)))
    wait(waiting[-1:])
    return waiting


def test_requests_are_answered_403(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: Callable[..., Any], backend: RecordingBackend
) -> None:
    """Not as an outage, and with a response at all; each user has a process."""
    worlds = [world_of(user, kafka_secured, tmp_path, headrace, backend) for user in USERS]
    with ThreadPoolExecutor(64) as pool:
        waiting = [one for world in worlds for one in refusals(world, pool)]
        wrong = [text for one in waiting if (text := one.result())]
    assert not wrong, "\n".join(wrong)
