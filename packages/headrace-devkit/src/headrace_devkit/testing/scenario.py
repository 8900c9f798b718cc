"""A broker and the processes on it as a user sees them: HTTP, topics, committed offsets and commands."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
from confluent_kafka.admin import AdminClient

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka import Admin, Producer, read_records
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace_devkit.testing.forked import run_command
from headrace_devkit.testing.secured import command_environment, kafka_section

PATIENCE_SECONDS = 150.0


class JsonResponse(NamedTuple):
    """An HTTP response; `body` is parsed JSON, or text if it is not JSON."""

    status: int
    body: Any
    headers: Mapping[str, str]
    """Names in lower case."""
    seconds: float


class Scenario:
    """A cluster and the Headrace processes on it, used through their public interfaces."""

    def __init__(self, bootstrap_servers: str, folder: Path) -> None:
        """Use a cluster; commands run in the folder."""
        self.kafka = KafkaConfig(bootstrap_servers=bootstrap_servers, request_timeout_seconds=60)
        self.admin = Admin(self.kafka)
        self._folder = folder

    @property
    def config(self) -> dict[str, Any]:
        """The section `kafka` of a headrace.yaml; with a login, if processes need one."""
        return {"kafka": kafka_section(self.kafka.bootstrap_servers)}

    def records(self, topic: str) -> list[Record]:
        """Return every record of a topic."""

        async def read() -> list[Record]:
            offsets = await self.admin.topic_offsets(topic)
            starts, ends = {p: o[0] for p, o in offsets.items()}, {p: o[1] for p, o in offsets.items()}
            return [record async for batch in read_records(self.kafka, starts, ends) for record in batch]

        return asyncio.run(read())

    def write(self, topic: str, *records: OutgoingRecord) -> None:
        """Write records unchanged, in their order."""

        async def produce() -> None:
            producer = Producer(self.kafka, ProducerConfig())
            await producer.start()
            results = await producer.produce(records)
            await producer.stop()
            assert not [result for result in results if isinstance(result, Exception)]

        asyncio.run(produce())

    def write_json(self, topic: str, *values: Any) -> None:
        """Write JSON values with keys `k0`, `k1`, ... to partition 0."""
        self.write(
            topic,
            *(OutgoingRecord(topic, f"k{n}".encode(), json.dumps(v).encode(), None, 0) for n, v in enumerate(values)),
        )

    def remove_before(self, topic: str, offset: int, partition: int = 0) -> None:
        """Remove the first records of a partition, as retention does."""
        client = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        for done in client.delete_records([confluent_kafka.TopicPartition(topic, partition, offset)]).values():
            done.result(60)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic; brokers may know it for a moment longer."""
        client = AdminClient({"bootstrap.servers": self.kafka.bootstrap_servers})
        client.delete_topics([topic])[topic].result(60)

    def committed(self, group: str) -> dict[TopicPartition, int]:
        """Return a group's committed offsets."""
        return asyncio.run(self.admin.committed(group))

    def wait_committed(self, group: str, topic: str, offset: int, partition: int = 0) -> None:
        """Wait until the group has committed an offset."""
        where = confluent_kafka.TopicPartition(topic, partition)
        servers = {"bootstrap.servers": self.kafka.bootstrap_servers}
        client = confluent_kafka.Consumer({**servers, "group.id": group, "isolation.level": "read_uncommitted"})

        def committed() -> int:
            try:
                return client.committed([where], timeout=1)[0].offset
            except confluent_kafka.KafkaException:
                return -1  # not yet: a broker may be away

        try:
            self.wait_until(lambda: committed() == offset, f"{group} to commit {offset} of {topic}-{partition}")
        finally:
            client.close()

    def cli(self, *words: str, given: str = "", code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command as a user who has named the cluster, and check its exit code, if one is expected."""
        env = command_environment(self.kafka.bootstrap_servers, self._folder)
        done = run_command(self._folder, *words, given=given, env=env)
        assert code in (None, done.returncode), done.stderr
        assert "Traceback" not in done.stderr
        return done

    @staticmethod
    def wait_until(condition: Callable[[], Any], what: str, limit_seconds: float = 0.0) -> None:
        """Wait until a condition holds. The limit allows for a busy machine; failed connections count as not yet."""
        limit_seconds = max(limit_seconds, PATIENCE_SECONDS)
        end = time.monotonic() + limit_seconds
        while True:
            try:
                if condition():
                    return
            except (ConnectionError, TimeoutError, http.client.HTTPException):
                pass
            assert time.monotonic() < end, f"waited {limit_seconds:.0f} s, without {what}"
            time.sleep(0.05)

    @staticmethod
    def ask(
        url: str, body: Any = None, limit_seconds: float = 120.0, headers: Mapping[str, str] | None = None
    ) -> JsonResponse:
        """Send a GET, or a POST if there is a body."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
        began = time.monotonic()
        try:
            response = urllib.request.urlopen(request, timeout=limit_seconds)
        except urllib.error.HTTPError as error:
            response = error
        except urllib.error.URLError as error:
            raise ConnectionError(error.reason) from error
        with response:
            text = response.read().decode()
            seconds = time.monotonic() - began
        body = json.loads(text) if text and "json" in response.headers.get("Content-Type", "") else text
        return JsonResponse(response.status, body, {k.lower(): v for k, v in response.headers.items()}, seconds)

    def reasons(self, url: str) -> dict[str, str]:
        """Return why a process is not ready: reasons by service."""
        services = self.ask(f"{url}/health/readiness").body["services"]
        return {name: service["reason"] for name, service in services.items() if not service["ready"]}
