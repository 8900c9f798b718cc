"""Jobs and registrations, as the tests of least rights use them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.records import OutgoingRecord, Record
from tests.active_client import send
from tests.least_rights import Feature, RightsScenario, Written, assert_named

ENDED = ("done", "failed", "stopped")


class Job(Feature):
    """Requests that begin jobs, one after the other; one that fails is requested again."""

    present = (-1, 0, "")
    """The present use, how many of its jobs are done, and the job that is not."""

    def start(self) -> None:
        self.scenario.run(registrations={"backends": [self.scenario.backend.url]})

    def prepare(self, number: int) -> None:
        """Write what the jobs of a use are about."""

    def requests(self, number: int) -> list[tuple[str, Any]]:
        """Return the path and body of each request."""
        raise NotImplementedError

    def trigger(self, number: int) -> None:
        if self.present[0] != number:
            self.present = number, 0, ""
            self.prepare(number)
        _, count, job = self.present
        requests = self.requests(number)
        if count == len(requests):
            return
        try:
            if not job:
                path, body = requests[count]
                response = send("POST", self.scenario.url + path, body)
                job = response.body["id"] if response.status == 202 else ""
            else:
                response = send("GET", f"{self.scenario.url}/adm/jobs/{job}")
                if response.status == 200 and response.body["state"] in ENDED:
                    count, job = count + (response.body["state"] == "done"), ""
        except OSError:  # it is starting
            return
        self.response = json.dumps(response.body)
        assert_named(response)
        self.present = number, count, job

    def done(self, number: int) -> bool:
        return self.present == (number, len(self.requests(number)), "")

    def texts(self) -> str:
        return self.scenario.texts(self.response)


class Replay(Job):
    titles = ("Replay to a topic",)

    def prepare(self, number: int) -> None:
        self.scenario.site.write_json(self.scenario("orders"), {"n": number})

    def requests(self, number: int) -> list[tuple[str, Any]]:
        window = {"partition": 0, "first": number, "last": number}
        return [
            (
                "/adm/replays",
                {"topic": self.scenario("orders"), "to": {"topic": self.scenario("orders.copy")}, **window},
            )
        ]

    def done(self, number: int) -> bool:
        copies = [
            json.loads(record.value or b"{}")["n"]
            for record in self.scenario.site.records(self.scenario("orders.copy"))
        ]
        return super().done(number) and number in copies


def write_dead_letters(scenario: RightsScenario, number: int, *statuses: int) -> None:
    """Write a dead letter for each status."""
    written = list[OutgoingRecord]()

    async def produce(records: Any) -> list[Any]:
        written.extend(records)
        return [None] * len(records)

    for status in statuses:
        record = Record(scenario("orders"), 0, number, 1, b"k", b"%d-%d" % (number, status), list, 3)
        dead_letter = DeadLetter(record, scenario("tracking"), 3, Reply(f"HTTP {status}", "no", status), 1.0, 2.0)
        asyncio.run(DeadLetterTopic("{topic}.dlq", produce, None).write([dead_letter]))
    scenario.site.write(scenario("orders.dlq"), *written)


class Redrive(Job):
    """Of each use one dead letter goes back, one goes back exactly once, one is quarantined, and one is dropped."""

    titles = ("Drop dead letters", "Redrive and quarantine dead letters")

    def prepare(self, number: int) -> None:
        write_dead_letters(self.scenario, number, 400, 404, 410, 500)

    def requests(self, number: int) -> list[tuple[str, Any]]:
        path = f"/adm/dead-letters/{self.scenario('orders.dlq')}"
        return [
            (f"{path}/redrive", {"errors": ["HTTP 400"]}),
            (f"{path}/quarantine", {"errors": ["HTTP 500"]}),
            (f"{path}/redrive", {"errors": ["HTTP 404"], "exactlyOnce": True}),
            (f"{path}/drop", {"reason": "paid", "errors": ["HTTP 410"]}),
        ]

    def done(self, number: int) -> bool:
        if not super().done(number):
            return False
        topics = send("GET", f"{self.scenario.url}/adm/dead-letters").body["topics"]
        if not any((one["topic"], one["left"]) == (self.scenario("orders.dlq"), 0) for one in topics):
            return False
        back = [record.value for record in self.scenario.site.records(self.scenario("orders"))]
        expected = {b"%d-%d" % (use, status) for use in range(number + 1) for status in (400, 404)}
        assert (set(back), len(back)) == (expected, len(expected)), "a refused run sends nothing that it repeats"
        apart = self.scenario.site.records(self.scenario("orders.dlq.quarantine"))
        assert [record.value for record in apart] == [b"%d-500" % use for use in range(number + 1)]
        return True


class Registration(Written):
    titles = ("Registrations",)
    version = -1
    """The use whose settings are registered."""
    wanted = -1
    repeats = True

    def start(self) -> None:
        self.scenario.run(registrations={"backends": [self.scenario.backend.url]})

    def trigger(self, number: int) -> None:
        url = f"{self.scenario.url}/reactive-consumers/work"
        settings = self.scenario.consumer(dead_letter={"enabled": False}, batch={"max_records": number + 1})
        try:
            if self.wanted != number:
                super().trigger(number)
                self.wanted = number
            response = send("GET", url) if self.version == number else send("PUT", url, settings)
        except OSError:  # it is starting
            return
        if response.status in (200, 201):
            self.version = number
        self.response = json.dumps(response.body)
        assert_named(response)

    def done(self, number: int) -> bool:
        values = [record["value"] for record in self.scenario.backend.records]
        return self.version == number and {"n": number} in values
