"""Replays whose process is killed: nothing is lost, no more comes twice than was announced, no group is touched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace.testing import HeadraceProcess, RecordingBackend
from tests.faults.push_scenario import PushScenario

PARTITIONS, RECORDS = 3, 600
BOUND = 40
"""Twice `flow.max_records`: so many records may come again after a kill."""
Start = Callable[..., HeadraceProcess]


class Replayed(PushScenario):
    """A topic that a group has read, processes of one deployment, and a replay."""

    def __init__(self, cluster: Any, start: Start, folder: Path, to: str = "consumer") -> None:
        super().__init__(cluster, start, folder, partitions=PARTITIONS, backend=RecordingBackend())
        self.target = self.new_topic(PARTITIONS) if to == "topic" else ""
        self.settings.update(batch={"max_records": 4}, flow={"max_records": BOUND // 2})
        self.backend.start()
        self.write(
            "", *(OutgoingRecord(self.topic, b"k%d" % n, b"%d" % n, None, n % PARTITIONS) for n in range(RECORDS))
        )

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the deployment."""
        return {**super().config, "control": {"topic": f"_headrace-control-{self.topic}"}}

    def read_by_the_group(self) -> None:
        """Let the group read everything, and record what every group has committed."""
        process = self.run()
        self.wait_done()
        assert process.terminate() == 0
        self.before = self.offsets_of(self.topic)

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

    def check_job(self, process: HeadraceProcess, job: str, kills: int) -> None:
        """Wait for the end, and say what is wrong by it."""
        url = f"{process.url}/adm/jobs/{job}"
        self.wait_until(lambda: self.ask(url).body["state"] in ("done", "failed"), f"{job} to end")
        shown = self.ask(url).body
        bound = 40_000 if self.target else BOUND
        assert (shown["state"], shown["spec"]["repeatsAtMost"]) == ("done", bound), shown
        arrived = self.arrived(job)
        assert len(arrived) == RECORDS, f"{RECORDS - len(arrived)} are lost"
        assert arrived.total() - RECORDS <= bound * kills, f"{arrived.total() - RECORDS} came again"
        assert shown["progress"]["counts"]["delivered"] == RECORDS
        assert self.offsets_of(self.topic) == self.before
        self.backend.stop()


def die_and_go_on(scenarios: Mapping[str, Replayed]) -> None:
    """Let a process of each scenario die at its point, side by side, and start another one that goes on."""
    for scenario in scenarios.values():
        scenario.read_by_the_group()
    first = {point: scenario.run(point) for point, scenario in scenarios.items()}
    jobs = {point: scenario.begin(first[point]) for point, scenario in scenarios.items()}
    for point, process in first.items():
        scenarios[point].wait_until(lambda process=process: process.exit_code is not None, f"the crash at {point}")
    second = {point: scenario.run(wait=False) for point, scenario in scenarios.items()}
    for point, scenario in scenarios.items():
        second[point].wait_ready()
        scenario.check_job(second[point], jobs[point], 1)


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("to", ["consumer", "topic"])
def test_a_replay_goes_on_wherever_its_process_dies(kafka: Any, headrace: Start, tmp_path: Path, to: str) -> None:
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
    die_and_go_on({point: Replayed(kafka, headrace, tmp_path, to) for point in points})


@pytest.mark.timeout(500)
def test_another_process_takes_a_replay_over(kafka: Any, headrace: Start, tmp_path: Path) -> None:
    """It was there all the time; the one that was asked dies between a delivery and the word that it ended."""
    scenario = Replayed(kafka, headrace, tmp_path)
    scenario.read_by_the_group()
    peer, asked = scenario.run(), scenario.run("delivery.after=crash@50")
    job = scenario.begin(asked)
    scenario.wait_until(lambda: asked.exit_code is not None, "the crash")
    scenario.check_job(peer, job, 1)
    assert f"job {job} runs here" in peer.output


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_is_killed_four_times_at_random(kafka: Any, headrace: Start, tmp_path: Path, seed: int) -> None:
    """With kill -9, when so many records have come as a die says; it ends, and every group is as it was."""
    scenario = Replayed(kafka, headrace, tmp_path)
    scenario.read_by_the_group()
    dice = random.Random(seed)
    process = scenario.run()
    job = scenario.begin(process)
    for kill in range(4):
        enough = (kill * RECORDS + dice.randrange(1, RECORDS)) // 4
        scenario.wait_until(lambda enough=enough: len(scenario.arrived(job)) >= enough, f"{enough} records")
        process.kill()
        process = scenario.run()
    scenario.check_job(process, job, 4)
