"""A consumer that runs commands and reports what happens; on the real client a program, on the model a thread.

Commands are lists such as `["commit", [["t", 0, 5]]]`, reports such as `["assign", [["t", 0]]]`.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition

POLL_SECONDS = 0.05
_NAMES = {value: name for name, value in vars(KafkaError).items() if isinstance(value, int) and name.isupper()}


def name_of(error: Any) -> str:
    """Return the name of an error's code, the same on both sides."""
    return _NAMES.get(error.code(), str(error.code())) if error else "ok"


class MemberProgram:
    """One member: `run` polls until the command to close."""

    def __init__(
        self,
        make_client: Callable[[dict[str, Any]], Any],
        config: dict[str, Any],
        commands: Callable[[], list[list[Any]]],
        report: Callable[[list[Any]], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._make_client = make_client
        self._config = config
        self._commands = commands
        self._report = report
        self._sleep = sleep
        self._client: Any = None
        self._closes = False
        self._in_callback: list[list[Any]] = []
        """Commands to run in the next callback of a revoke, before it returns."""
        self._callback_seconds = 0.0

    def run(self) -> None:
        reports = {"on_commit": self._on_commit, "error_cb": self._on_failure}
        self._client = self._make_client({**self._config, **reports})
        while not self._closes:
            for command in self._commands():
                self._do(command)
            if self._closes:
                break
            self._take(self._client.poll(POLL_SECONDS))
        self._client.close()
        self._report(["closed"])

    def _take(self, message: Any) -> None:
        if message is None:
            return
        if error := message.error():
            if error.code() == KafkaError._PARTITION_EOF:
                self._report(["end", message.topic(), message.partition(), message.offset()])
            else:
                about = [message.topic(), message.partition()] if message.topic() else []
                self._report(["error", name_of(error), *about])
            return
        self._report(["record", message.topic(), message.partition(), message.offset()])

    def _do(self, command: Sequence[Any]) -> None:
        name, *values = command
        try:
            getattr(self, f"do_{name}")(*values)
        except KafkaException as cause:
            self._report([f"{name} call" if name == "assign" else name, name_of(cause.args[0])])

    def do_subscribe(self, topics: list[str]) -> None:
        self._client.subscribe(
            topics,
            on_assign=lambda _client, items: self._report(["assign", _plain(items)]),
            on_revoke=self._on_revoke,
            on_lost=lambda _client, items: self._report(["lost", _plain(items)]),
        )

    def do_unsubscribe(self) -> None:
        self._client.unsubscribe()

    def do_assign(self, offsets: list[list[Any]]) -> None:
        self._client.assign([TopicPartition(*one) for one in offsets])

    def do_incremental_assign(self, offsets: list[list[Any]]) -> None:
        self._client.incremental_assign([TopicPartition(*one) for one in offsets])
        self._report(["incremental_assign", "ok"])

    def do_incremental_unassign(self, partitions: list[list[Any]]) -> None:
        self._client.incremental_unassign([TopicPartition(*one) for one in partitions])
        self._report(["incremental_unassign", "ok"])

    def do_commit(self, offsets: list[list[Any]]) -> None:
        self._client.commit(offsets=[TopicPartition(*one) for one in offsets], asynchronous=False)
        self._report(["commit", "ok"])

    def do_commit_async(self, offsets: list[list[Any]]) -> None:
        self._client.commit(offsets=[TopicPartition(*one) for one in offsets], asynchronous=True)

    def do_seek(self, topic: str, partition: int, offset: int) -> None:
        self._client.seek(TopicPartition(topic, partition, offset))

    def do_move(self, topic: str, partition: int, offset: int) -> None:
        """Move as Headrace does: assign the partition again."""
        items = [TopicPartition(topic, partition, offset)]
        self._client.incremental_unassign(items)
        self._client.incremental_assign(items)

    def do_pause(self, partitions: list[list[Any]]) -> None:
        self._client.pause([TopicPartition(*one) for one in partitions])

    def do_resume(self, partitions: list[list[Any]]) -> None:
        self._client.resume([TopicPartition(*one) for one in partitions])

    def do_hold(self, seconds: float) -> None:
        """Do not poll for a while."""
        self._sleep(seconds)
        self._report(["held"])

    def do_committed(self, partitions: list[list[Any]]) -> None:
        found = self._client.committed([TopicPartition(*one) for one in partitions], timeout=10)
        self._report(["committed", [[one.partition, one.offset] for one in found]])

    def do_watermarks(self, topic: str, partition: int) -> None:
        self._report(["watermarks", *self._client.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)])

    def do_times(self, topic: str, partition: int, timestamp_ms: int) -> None:
        found = self._client.offsets_for_times([TopicPartition(topic, partition, timestamp_ms)], timeout=10)
        self._report(["times", [[one.offset, name_of(one.error)] for one in found]])

    def do_topics(self, topic: str) -> None:
        found = self._client.list_topics(topic, timeout=10).topics
        self._report(["topics", [[len(one.partitions), name_of(one.error)] for one in found.values()]])

    def do_position(self, topic: str, partition: int) -> None:
        self._report(["position", self._client.position([TopicPartition(topic, partition)])[0].offset])

    def do_metadata(self) -> None:
        """Report who this member is, for a transaction."""
        self._report(["metadata", self._client.consumer_group_metadata().hex()])

    def do_assignment(self) -> None:
        self._report(["assignment", _plain(self._client.assignment())])

    def do_on_revoke(self, seconds: float, *commands: list[Any]) -> None:
        """Do this in each later callback of a revoke, and then wait."""
        self._in_callback, self._callback_seconds = list(commands), seconds

    def do_close(self) -> None:
        self._closes = True

    def _on_revoke(self, _client: Any, items: list[Any]) -> None:
        self._report(["revoke", _plain(items)])
        for command in self._in_callback:
            self._do(command)
        if self._callback_seconds:
            self._sleep(self._callback_seconds)

    def _on_failure(self, error: Any) -> None:
        self._report(["failure", name_of(error)])

    def _on_commit(self, error: Any, items: list[Any]) -> None:
        results = sorted([item.topic, item.partition, item.offset, name_of(item.error)] for item in items)
        self._report(["on_commit", name_of(error), results])


def _plain(items: list[Any]) -> list[list[Any]]:
    return sorted([item.topic, item.partition] for item in items)


def main() -> None:
    """Run a member on the real client: configuration as argument, commands on standard input, reports on output."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the test is gone

    threading.Thread(target=listen, daemon=True).start()

    def commands() -> list[list[Any]]:
        found: list[list[Any]] = []
        while not lines.empty():
            found.append(json.loads(lines.get()))
        return found

    def report(event: list[Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    config = {"log_level": 0, **json.loads(sys.argv[1])}
    MemberProgram(confluent_kafka.Consumer, config, commands, report, time.sleep).run()


if __name__ == "__main__":
    main()
