"""Requests of a user without rights: each is answered 403 with operation, resource and principal."""

from __future__ import annotations

import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import RecordingBackend, StartHeadrace
from headrace_devkit.testing.secured import SecuredCluster
from tests.active_client import Instance, send
from tests.least_rights import RightsScenario
from tests.least_rights_jobs import write_dead_letters
from yaml_table import table

LIMIT_SECONDS = 20.0
TOPICS = ("orders", "orders.copy", "orders.dlq", "orders.dlq.quarantine", "_headrace-control")
FILLED = ("_headrace-idempotency", "_headrace-locks", "_headrace-redriven")
"""Topics with a record, because an empty topic is loaded without the right to read it."""


def filled(scenario: RightsScenario, value: Any) -> Any:
    """Return a value with the names of topics, group and backend."""
    text = json.dumps(value).replace("{backend}", scenario.backend.url)
    for name in (*TOPICS, "tracking"):
        text = text.replace(f"{{{name}}}", scenario(name))
    return json.loads(text)


def unnamed(scenario: RightsScenario, url: str, row: list[Any]) -> str:
    """Return the response to a request, unless it names the missing right.

    The request is sent again while the client is new and does not know the reason, reads nothing, or while the same
    call is in progress.
    """
    method, path, body, headers = [*filled(scenario, row), None, None][:4]
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            response = send(method, url + path, body, headers)
        except TimeoutError:
            return f"{row}: no response"
        text = json.dumps(response.body)
        if response.status == 403 and f"User:{scenario.user} has no right" in text and "kafka-acls.sh" in text:
            return ""
        is_early = response.body == [] or "the Kafka client is being replaced" in text or "lease_taken" in text
        if not is_early or time.monotonic() > end:
            return f"{row}: {response}"
        time.sleep(0.1)


def test_requests_are_answered_403(
    kafka_secured: SecuredCluster, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Not as an outage, and with a response at all."""
    scenario = RightsScenario(kafka_secured, f"none-{secrets.token_hex(2)}", [], tmp_path, headrace, backend)
    for topic in (*TOPICS, *FILLED):
        scenario.create_topic(topic)
    for topic in FILLED:
        scenario.site.write(scenario(topic), OutgoingRecord(scenario(topic), b"key", None, None, 0))
    scenario.site.write_json(scenario("orders"), 1)
    write_dead_letters(scenario, 0, 400)
    names = {"id": scenario("headrace-host")}
    scenario.run(
        wait=False,
        reactive_consumers={"push": scenario.consumer()},
        producer={"transactions": names, "idempotency": {"topic": scenario("_headrace-idempotency")}},
        registrations={"backends": [backend.url]},
    )
    url, site = scenario.url, scenario.site
    site.wait_until(lambda: site.ask(f"{url}/health/liveness").status == 200, "a server")
    unknown = ("answered yet", "read yet")
    site.wait_until(
        lambda: not [text for text in site.reasons(url).values() if any(words in text for words in unknown)],
        "first responses of Kafka",
    )
    sent = [(url, row) for row in table(__file__, "requests")]
    for kind, body in table(__file__, "instances").items():
        instance = Instance(url, f"{scenario('tracking')}-{kind}", valueFormat="json")
        instance.ok("POST", f"/{kind}", filled(scenario, body))
        sent += [(instance.url, row) for row in table(__file__, "requests_of_an_instance")]
    with ThreadPoolExecutor(len(sent)) as pool:  # what waits for Kafka waits together
        wrong = pool.map(lambda request: unnamed(scenario, *request), sent)
        assert [text for text in wrong if text] == []
