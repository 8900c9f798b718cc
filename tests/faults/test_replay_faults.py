"""Replays whose process is killed: nothing is lost, no more comes twice than was announced, no group is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, HeadraceProcess, RecordingBackend
from tests.faults.push_scenario import PushScenario

PARTITIONS, RECORDS = 3, 600
BOUND = 40
"""Twice `flow.max_records`: how many records may come again after a kill."""
Start = Callable[..., HeadraceProcess]


class Replayed(PushScenario):
    """A topic that a group has read, what every group has committed, processes of one deployment, and a replay."""

    def __init__(self, cluster: Any, start: Start, folder: Path, to: str = "consumer") -> None:
        super().__init__(cluster, start, folder, partitions=PARTITIONS, backend=RecordingBackend())
        self.target = self.new_topic(PARTITIONS) if to == "topic" else ""
        self.settings.update(batch={"max_records": 4}, flow={"max_records": BOUND // 2})
        self.backend.start()
        self.write(
            "", *(OutgoingRecord(self.topic, b"k%d" % n, b"%d" % n, None, n % PARTITIONS) for n in range(RECORDS))
        )
        process = self.run()
        self.wait_done()
        assert process.terminate() == 0
        self.before = self.offsets_of(self.topic)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the deployment."""
        return {**super().config, "control": {"topic": f"_headrace-control-{self.topic}"}}

    def begin(self, process: HeadraceProcess) -> str:
        to = {"topic": self.target} if self.target else {"consumer": "push"}
        return str(self.ask(f"{process.url}/adm/replays", {"topic": self.topic, "to": to}).body["id"])

    def arrived(self, job: str) -> Counter[tuple[int, int]]:
        """Return how often each record came."""
        if self.target:
            places = [dict(record.headers)["headrace.replay.of"] or b"" for record in self.records(self.target)]
            return Counter((int(part), int(offset)) for _, part, offset in (p.decode().split(":") for p in places))
        requests = [r for r in list(self.backend.requests) if r.headers.get("x-headrace-replay") == job]
        return Counter((entry["partition"], entry["offset"]) for request in requests for entry in request.body)

    def check_job(self, process: HeadraceProcess, job: str) -> None:
        """Wait for the end of a job whose process was killed once, and check what has arrived."""
        url = f"{process.url}/adm/jobs/{job}"
        self.wait_until(lambda: self.ask(url).body["state"] in ("done", "failed"), f"{job} to end")
        shown = self.ask(url).body
        bound = 40_000 if self.target else BOUND
        assert (shown["state"], shown["spec"]["repeatsAtMost"]) == ("done", bound), shown
        arrived = self.arrived(job)
        assert len(arrived) == RECORDS, f"{RECORDS - len(arrived)} are lost"
        assert arrived.total() - RECORDS <= bound, f"{arrived.total() - RECORDS} came again"
        assert shown["progress"]["counts"]["delivered"] == RECORDS
        assert self.offsets_of(self.topic) == self.before
        self.backend.stop()


def check_deaths(scenarios: Mapping[str, Replayed]) -> None:
    """Let a process of each scenario die at its point, side by side, and start another one that goes on."""
    first = {point: scenario.run(point) for point, scenario in scenarios.items()}
    jobs = {point: scenario.begin(first[point]) for point, scenario in scenarios.items()}
    for point, process in first.items():
        scenarios[point].wait_until(lambda process=process: process.exit_code is not None, f"the crash at {point}")
    second = {point: scenario.run(wait=False) for point, scenario in scenarios.items()}
    for point, scenario in scenarios.items():
        second[point].wait_ready()
        scenario.check_job(second[point], jobs[point])


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("to", ["consumer", "topic"])
def test_a_replay_goes_on_wherever_its_process_dies(kafka: Cluster, headrace: Start, tmp_path: Path, to: str) -> None:
    """At every point of a replay; it goes on when it is started again."""
    points = [
        "delivery.before=70",
        "delivery.after=50",
        "replay.read=20",
        "replay.save=3",
        "replay.saved=6",
        "ended.after=60",
    ]
    if to == "topic":  # by 500 records, so everything happens but a few times
        points = ["delivery.after=1", "replay.read=2", "replay.save=1", "replay.saved=1", "ended.after=2"]
    points = [point.replace("=", "=crash@") for point in points]
    check_deaths({point: Replayed(kafka, headrace, tmp_path, to) for point in points})


@pytest.mark.timeout(500)
def test_another_process_takes_a_replay_over(kafka: Cluster, headrace: Start, tmp_path: Path) -> None:
    """It was there all the time; the one that was asked dies between a delivery and the word that it ended."""
    scenario = Replayed(kafka, headrace, tmp_path)
    peer, asked = scenario.run(), scenario.run("delivery.after=crash@50")
    job = scenario.begin(asked)
    scenario.wait_until(lambda: asked.exit_code is not None, "the crash")
    scenario.check_job(peer, job)
    assert f"job {job} runs here" in peer.output
