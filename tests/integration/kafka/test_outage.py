"""While no broker answers, everything that tells of a process says the same: since when, and why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, KafkaUnavailable
from headrace.kafka import Admin
from headrace.kafka.cluster_admin import ClusterAdmin
from headrace.records import TopicPartition
from headrace_devkit.testing import Cluster, HeadraceProcess, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file

RECORD = {"records": [{"key": "k", "value": {"n": 1}}]}
SOON_SECONDS = 3.0
LATE_SECONDS = 60.0


class OutageScenario:
    """A cluster of its own with one broker, and a process with a consumer and a function on it."""

    def __init__(self, cluster: Cluster, folder: Path, site: Any, headrace: Any, backend: Any) -> None:
        self.cluster, self.site = cluster, site
        trigger = {"kind": "kafka-cluster", "attributes": {"topics": ["orders"], "consumerGroup": "work"}}
        function = function_file(folder, "def handler(context, event):\n    return None\n", {"in": trigger})
        self.process: HeadraceProcess = headrace(
            {
                "kafka": {"bootstrap_servers": cluster.bootstrap_servers},
                "reactive_consumers": {
                    "push": {"topics": ["orders"], "group": "push", "backend": {"url": backend.url}}
                },
                "functions": [function],
            }
        )

    def says(self) -> dict[str, Any]:
        """Return what every place says at this moment."""
        url = self.process.url
        metrics = self.site.ask(f"{url}/metrics").body
        listed = json.loads(self.site.cli("reactive", "list", "--url", url, "--output", "json").stdout)
        page = json.loads(self.site.cli("status", "--url", url, "--output", "json", code=None).stdout)
        return {
            "ready": self.site.ask(f"{url}/health/readiness").status == 200,
            "readiness": self.site.reasons(url).get("kafka", ""),
            "metric": re.findall(r"^headrace_(?:ready|kafka_up)\S* (\S+)", metrics, re.MULTILINE),
            "lag metric": "headrace_consumer_lag_records{" in metrics,
            "list": [one["why"] for one in listed],
            "lag": [one["lag"] for one in listed],
            "text": self.site.cli("reactive", "list", "--url", url).stdout,
            "status": [self.site.cli("reactive", "status", name, "--url", url).stdout for name in ("push", "work.in")],
            "needs": [one["why"] for one in page["needs"]],
        }

    def is_well(self) -> bool:
        """Whether nothing says that anything is wrong, and the lag is known."""
        metrics = self.site.ask(f"{self.process.url}/metrics").body  # asked first, because commands take longer
        if "headrace_consumer_lag_records{" not in metrics or "headrace_ready 1" not in metrics:
            return False
        says = self.says()
        quiet = not [*says["readiness"], *filter(None, says["list"] + says["needs"])]
        known = says["lag"] == [0, 0] and says["lag metric"]
        return bool(says["ready"] and quiet and known and says["metric"] == ["1.0", "1.0"] and "runs" in says["text"])

    def produce(self, path: str = "/producers/orders", body: Any = RECORD) -> Any:
        return self.site.ask(f"{self.process.url}{path}", body)


@pytest.fixture
def scenario(
    site: Scenario, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> Iterator[OutageScenario]:
    with Cluster(tmp_path / "kafka") as cluster:
        cluster.create_topic("orders")
        made = OutageScenario(cluster, tmp_path, site, headrace, backend)
        assert made.produce().status == 200
        site.wait_until(made.is_well, "all to be well")
        yield made


def test_all_say_the_same_in_an_outage(scenario: OutageScenario) -> None:
    """List, status, top, readiness and metrics, of a consumer and of a function; and the log has a line at each end."""
    scenario.cluster.pause(1)
    began = time.monotonic()
    scenario.site.wait_until(
        lambda: scenario.site.ask(f"{scenario.process.url}/health/readiness").status != 200, "no 200"
    )
    assert time.monotonic() - began < 4 * SOON_SECONDS, "with room for a machine that is busy"
    says = scenario.says()
    away = rf"Kafka at {scenario.cluster.bootstrap_servers} has not answered for \d+ s"
    sentence = re.compile(f"{away}: neither a response nor an error arrived")
    for told in (says["readiness"], *says["list"], *says["needs"]):
        assert sentence.match(told), says
    for told in says["status"]:
        assert sentence.search(" ".join(told.split())), says
    assert says["metric"] == ["0.0", "0.0"]
    assert (says["lag metric"], says["lag"]) == (False, [None, None])
    assert says["text"].count("no Kafka") == 2
    scenario.site.wait_until(lambda: scenario.produce().status == 503, "a request to be refused")
    for path, body in (("/producers/orders", RECORD), ("/transactions", {"topics": [{"topic": "orders", **RECORD}]})):
        asked_at = time.monotonic()
        refused = scenario.produce(path, body)
        assert (refused.status, refused.headers["retry-after"]) == (503, "2")
        assert time.monotonic() - asked_at < SOON_SECONDS
        assert "nothing of this request was sent" in refused.body["description"]
        assert refused.body["metadata"]["retriable"] is True
        assert "requestStatus" not in refused.body
    scenario.cluster.resume(1)
    scenario.site.wait_until(scenario.is_well, "all to be well again", LATE_SECONDS)
    assert scenario.produce().status == 200
    lines = [line for line in scenario.process.output.splitlines() if "answer" in line]
    assert len([line for line in lines if "has not answered for" in line]) <= 4
    assert len([line for line in lines if "answers again after" in line]) == 1
    assert "no broker answers" not in scenario.process.output
    assert "Connection refused" not in scenario.process.output, "no line of the client as it is"
    assert scenario.process.terminate() == 0


@pytest.mark.long
def test_groups_are_described_after_an_outage(tmp_path: Path) -> None:
    """A client whose request was late because the coordinator was down does not reach it again: another one does."""

    async def described(admin: Admin) -> list[str]:
        found = await ClusterAdmin(admin).group("work")
        members = await admin.members_of(["work", "other"])
        return [*([found.state] if found else []), *(one.name for one in await admin.list_groups()), *members]

    async def scenario(cluster: Cluster) -> None:
        admin = Admin(KafkaConfig(bootstrap_servers=cluster.bootstrap_servers, request_timeout_seconds=3))
        await admin.alter_group_offsets("work", {TopicPartition("orders", 0): 0})
        assert await described(admin) == ["empty", "work", "work", "other"]
        cluster.kill(1)
        for request in (ClusterAdmin(admin).group("work"), admin.list_groups(), admin.group_members("work")):
            with pytest.raises(KafkaUnavailable):
                await request
        cluster.restart(1)
        end = time.monotonic() + LATE_SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(HeadraceError):
                if await described(admin) == ["empty", "work", "work", "other"]:
                    return
            await asyncio.sleep(0.5)
        raise AssertionError("groups are not described again")

    with Cluster(tmp_path / "kafka") as cluster:
        cluster.create_topic("orders")
        asyncio.run(scenario(cluster))


@pytest.mark.long
def test_following_a_topic_says_that_kafka_is_away_and_back(site: Scenario, tmp_path: Path) -> None:
    """On standard error, beside the records; records that come later are printed."""
    with Cluster(tmp_path / "kafka") as cluster:
        cluster.create_topic("orders")
        words = [sys.executable, "-m", "headrace.cli.main", "consume", "orders", "--follow"]
        command = [*words, "-b", cluster.bootstrap_servers]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
            said: list[str] = []
            assert following.stderr
            assert following.stdout
            reading = threading.Thread(target=lambda stream: said.extend(stream), args=(following.stderr,))
            reading.start()
            site.cli("produce", "orders", "-b", cluster.bootstrap_servers, given="one\n")
            assert following.stdout.readline() == "one\n"
            cluster.kill(1)
            away = f"Kafka at {cluster.bootstrap_servers} has not answered for"
            site.wait_until(lambda: any(away in line for line in said), "the outage to be told")
            cluster.restart(1)
            site.wait_until(lambda: any("answers again" in line for line in said), "the end to be told", LATE_SECONDS)
            site.cli("produce", "orders", "-b", cluster.bootstrap_servers, given="two\n")
            assert following.stdout.readline() == "two\n"
            following.terminate()
            reading.join()
