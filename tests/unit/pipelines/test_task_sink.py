"""The tasks that write a micro-batch in transactions of their own: what each writes, leaves out and refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.errors import PipelineInvalid
from headrace_pipelines.connector import write_secrets
from headrace_pipelines.driver import task_sink
from headrace_pipelines.driver.task_sink import TaskWriter
from headrace_pipelines.secrets_file import KAFKA, with_secrets
from tests.pipeline_harness import FakeTarget

LOGIN = {"sasl": {"mechanism": "PLAIN", "username": "u", "password": "s3cret"}}


class FakeTask(FakeTarget):
    """What Kafka has of a task."""

    def __call__(self, kafka: KafkaConfig, name: str, timeout_seconds: float) -> FakeTask:
        self.kafka = kafka
        self.name = name
        return self

    @property
    def values(self) -> list[bytes | None]:
        return [value for table in self.rows for value in table["value"].to_pylist()]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTask:
    """The target of task 3, which reaches Kafka by the secrets file."""
    made = FakeTask()
    write_secrets(tmp_path, {KAFKA: with_secrets(KafkaConfig(security=KafkaSecurity.model_validate(LOGIN)))})
    monkeypatch.setattr(task_sink, "BatchTransactions", made)
    context = SimpleNamespace(get=lambda: SimpleNamespace(partitionId=lambda: 3))
    monkeypatch.setattr(task_sink, "TaskContext", context)
    return made


def run(folder: Path, number: int, *records: tuple[bytes | None, bytes | None], accepts: bool = False) -> None:
    """Run a task with records of two Arrow batches."""
    writer = TaskWriter("headrace.p.f.id", number, 30.0, folder / "secrets.properties", accepts)
    halves = records[:1], records[1:]
    batches = [batch_of(half) for half in halves if half]
    assert [*writer.one_task(iter(batches))] == []


def batch_of(records: tuple[tuple[bytes | None, bytes | None], ...]) -> pyarrow.RecordBatch:
    keys, values = zip(*records, strict=True)
    arrays = [pyarrow.array(column, pyarrow.binary()) for column in (keys, values)]
    return pyarrow.RecordBatch.from_arrays(arrays, ["key", "value"])


def test_a_task_has_its_own_name_and_the_login_of_the_secrets_file(target: FakeTask, tmp_path: Path) -> None:
    """The number of the task follows the query's id; what travels to the worker has no secret."""
    run(tmp_path, 0, (b"k", b"v"), (None, b"w"), (None, None))
    assert (target.name, target.number, target.values, target.closed) == ("headrace.p.f.id.3", 1, [b"v", b"w", None], 1)
    assert target.kafka.security.sasl
    assert target.kafka.security.sasl.password.get_secret_value() == "s3cret"


@pytest.mark.parametrize("number", [None, 2, 5])
def test_a_task_is_written_once_however_often_it_comes(target: FakeTask, tmp_path: Path, number: int | None) -> None:
    """It may have had no records for some batches. Order and values within the task may differ, keys may not."""
    target.number = number
    run(tmp_path, 5, (b"a", b"1"), (b"b", b"2"), (b"b", b"3"))
    run(tmp_path, 5, (b"b", b"3"), (b"b", b"2"), (b"a", b"other"))
    assert (target.values, target.number) == ([b"1", b"2", b"3"], 6)


@pytest.mark.parametrize(
    "records", [[(b"a", b"1")], [(b"a", b"1"), (b"c", b"2")], [(b"a", b"1"), (b"b", b"2"), (b"b", b"2")], []]
)
@pytest.mark.parametrize("accepts", [True, False])
def test_other_keys_are_refused(target: FakeTask, tmp_path: Path, records: Any, *, accepts: bool) -> None:
    """A key that is random sends its row to another task: some would be repeated and some missing, in silence."""
    run(tmp_path, 5, (b"a", b"1"), (b"b", b"2"))
    if accepts:
        run(tmp_path, 5, *records, accepts=True)
        assert target.values == [b"1", b"2", *(value for _, value in records)]
        return
    with pytest.raises(PipelineInvalid, match=r"had other keys before.*same whenever.*accept_unknown_batch: true"):
        run(tmp_path, 5, *records)
    assert target.values == [b"1", b"2"]
