"""The format `headrace-kafka`: options, columns, and which micro-batches it writes, skips and refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyspark.sql.types import StructType

from headrace.config.kafka import KafkaConfig
from headrace.errors import ConfigError, PipelineInvalid, TopicNotFound
from pyspark_headrace import DefaultSource, stream_writer
from pyspark_headrace.sink_options import options_of
from pyspark_headrace.stream_writer import TaskWritten, as_records
from tests.pipeline_harness import FakeTarget
from yaml_table import table

Run = Callable[..., None]
OPTIONS = {"name": "jobs.copy", "topic": "out", "kafka.bootstrap.servers": "b:1"}


def rows_of(columns: dict[str, Any]) -> StructType:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in columns.items()]
    return StructType.fromJson({"fields": fields})


ROWS = rows_of({"key": "string", "value": "string", "_keyed": "boolean"})


class Targets:
    """What Kafka has of the whole query and of its tasks, by the name of the producer."""

    def __init__(self) -> None:
        self.targets: dict[str, FakeTarget] = {}
        self.has_topic = True

    def __call__(self, kafka: KafkaConfig, name: str, seconds: float, properties: Any = None) -> Any:
        target: Any = self.targets.setdefault(name, FakeTarget())

        def look_up() -> int | None:
            if not self.has_topic:
                raise TopicNotFound("no topic")
            return target.number

        def record(number: int, digest: str) -> None:
            target.number, target.digest = number + 1, digest

        target.look_up, target.record = look_up, record
        target.create_topic = lambda: setattr(self, "has_topic", True)
        return target

    def values(self) -> list[bytes]:
        rows = [rows for target in self.targets.values() for rows in target.rows]
        return sorted(value for each in rows for value in each["value"].to_pylist())


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Targets:
    """The Kafka of the writers."""
    made = Targets()
    monkeypatch.setattr(stream_writer, "BatchTransactions", made)
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, kafka: Targets) -> Run:
    """Run the tasks of a micro-batch as Spark does, each with its values; `commits` as if Spark came so far."""

    def work(number: Any, *tasks: str, query: str = "q", commits: bool = True, more: Any = None, **own: str) -> None:
        writer = pickle.loads(pickle.dumps(DefaultSource({**OPTIONS, **(more or {})}).streamWriter(ROWS, False)))
        messages = []
        for task, values in enumerate(tasks):
            known = {"streaming.sql.batchId": number, "sql.streaming.queryId": query, **own}
            context = SimpleNamespace(partitionId=lambda task=task: task, getLocalProperty=known.get)
            monkeypatch.setattr(stream_writer, "TaskContext", SimpleNamespace(get=lambda context=context: context))
            rows = pyarrow.RecordBatch.from_pydict({"key": [*values], "value": [f"{number}{each}" for each in values]})
            messages.append(writer.write(iter([rows])))
        if commits:
            DefaultSource(OPTIONS).streamWriter(ROWS, False).commit(messages, int(number))

    return work


def test_a_repeated_micro_batch_is_written_once(kafka: Targets, run: Run) -> None:
    """Tasks that were written before a crash are skipped, also when only Spark's own commit is missing."""
    kafka.has_topic = False
    run("0", "ab", "c")
    run("1", "ab", commits=False)  # the second task never ran
    run("1", "ab", "cd", commits=False)
    run("1", "ab", "cd")
    run("1", "ab", "cd")
    run("2", "", "c")
    assert kafka.values() == [b"0a", b"0b", b"0c", b"1a", b"1b", b"1c", b"1d", b"2c"]
    assert {name: target.number for name, target in kafka.targets.items()} == {
        "jobs.copy": 3,
        "jobs.copy.q.0": 2,
        "jobs.copy.q.1": 3,
    }


@pytest.mark.parametrize(("number", "tasks", "query", "words"), table(__file__, "micro_batches_in_doubt_are_refused"))
def test_micro_batches_in_doubt_are_refused(
    kafka: Targets, run: Run, number: str, tasks: list[str], query: str, words: str
) -> None:
    """After batches 0 to 2 of the query `q`: old checkpoints, other rows, and what Kafka does not know."""
    for each in "012":
        run(each, "ab", "c")
    written = kafka.values()
    with pytest.raises(PipelineInvalid, match=words):
        run(number, *tasks, query=query)
    assert kafka.values() == written


@pytest.mark.parametrize("number", ["5", "2"])
def test_a_micro_batch_in_doubt_is_written_if_the_option_says_so(kafka: Targets, run: Run, number: str) -> None:
    """It may be there twice then; the next one is in no doubt."""
    run("2", "a", "c", more={"acceptunknownbatch": "true"})
    run(number, "ab", more={"acceptunknownbatch": "true"})
    run(str(int(number) + 1), "a")
    assert kafka.targets["jobs.copy"].number == int(number) + 2
    assert f"{number}b".encode() in kafka.values()


def test_a_new_checkpoint_begins_anew(kafka: Targets, run: Run) -> None:
    """Its query has another id, and so its tasks have other names."""
    run("0", "a")
    run("1", "a")
    run("0", "a", query="other")
    run("1", "a", query="other")
    assert kafka.values() == [b"0a", b"0a", b"1a", b"1a"]


@pytest.mark.parametrize(
    "own", [{"streaming.sql.batchId": ""}, {"sql.streaming.queryId": ""}, {"__is_continuous_processing": "true"}]
)
def test_without_micro_batches_it_refuses(run: Run, own: dict[str, str]) -> None:
    """There is no number that a repeat would have again. A batch write has none, and there is nothing to read."""
    with pytest.raises(PipelineInvalid, match=r"needs micro-batches.*processingTime"):
        run("0", "a", **own)
    with pytest.raises(PipelineInvalid, match=r"writes streams only.*writeStream"):
        DefaultSource(OPTIONS).writer(ROWS, False)
    with pytest.raises(PipelineInvalid, match=r"writes only.*format kafka"):
        DefaultSource(OPTIONS).schema()


@pytest.mark.parametrize(("changes", "words"), table(__file__, "options_that_cannot_be_translated_are_named"))
def test_options_that_cannot_be_translated_are_named(changes: dict[str, str], words: list[str]) -> None:
    """Each with what to do, and no secret."""
    with pytest.raises(ConfigError) as refused:
        options_of({name: value for name, value in {**OPTIONS, **changes}.items() if value})
    assert [each for each in words if each not in str(refused.value)] == []
    assert "s3cret" not in str(refused.value)


def test_options_of_the_connector_are_those_of_the_client() -> None:
    """Login, TLS and producer by the names of Java's client; what Spark adds is ignored."""
    jaas = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="u" password="s3cret";'
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-512", "sasl.jaas.config": jaas}
    own = {"linger.ms": "5", "max.request.size": "2000000", "acks": "all", "transaction.timeout.ms": "90000"}
    properties = {f"kafka.{name}": value for name, value in {**login, **own, "client.rack": "r"}.items()}
    found = options_of({**OPTIONS, **properties, "checkpointlocation": "/c"})
    sasl = found.kafka.security.sasl
    assert sasl
    assert (sasl.mechanism, sasl.username, sasl.password.get_secret_value()) == ("SCRAM-SHA-512", "u", "s3cret")
    assert found.kafka.security.effective_protocol == "sasl_ssl"
    assert found.kafka.properties == {"client.rack": "r"}
    assert (found.timeout_seconds, found.producer) == (90.0, {"linger.ms": 5, "message.max.bytes": 2_000_000})


@pytest.mark.parametrize(("columns", "words"), table(__file__, "columns_that_are_no_record_are_named"))
def test_columns_that_are_no_record_are_named(kafka: Targets, columns: dict[str, Any], words: str) -> None:
    """Their names and types are those of Spark's own Kafka sink."""
    with pytest.raises(ConfigError, match=words):
        DefaultSource({**OPTIONS, "topic": ""}).streamWriter(rows_of(columns), False)


def test_rows_are_records() -> None:
    """Texts become bytes; columns that are missing are null, and others are ignored. The option names every topic."""
    headers = [[{"key": "h", "value": b"1"}], None]
    columns = {"value": ["v", None], "headers": headers, "partition": pyarrow.array([1, None], pyarrow.int32())}
    rows = pyarrow.RecordBatch.from_pydict({**columns, "topic": ["a", "b"], "more": [1, 2]})
    assert as_records(rows, "").to_pydict() == {
        **{"topic": ["a", "b"], "key": [None, None], "value": [b"v", None]},
        **{"headers": headers, "partition": [1, None]},
    }
    assert as_records(rows, "out")["topic"].to_pylist() == ["out", "out"]
    with pytest.raises(PipelineInvalid, match="no topic"):
        as_records(pyarrow.RecordBatch.from_pydict({"value": ["v"], "topic": pyarrow.nulls(1, pyarrow.string())}), "")


def test_spark_finds_it_by_its_name() -> None:
    """Each session of PySpark imports the module to look for formats, so the import loads neither client nor Arrow."""
    code = (
        "import sys, pkgutil, importlib\n"
        "assert 'pyspark_headrace' in {found.name for found in pkgutil.iter_modules()}\n"
        "print(importlib.import_module('pyspark_headrace').DefaultSource.name())\n"
        "assert not {'confluent_kafka', 'pyarrow', 'headrace'} & {*sys.modules}"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("headrace-kafka\n", 0), found.stderr
    assert pickle.loads(pickle.dumps(TaskWritten("q"))).query == "q"
