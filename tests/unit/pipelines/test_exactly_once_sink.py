"""The sink that recognises its batches: what it writes, skips and refuses, with a target that can fail."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.errors import HeadraceError, KafkaTimeout, KafkaUnauthorized, PipelineInvalid
from headrace_pipelines.driver.exactly_once_sink import ExactlyOnceSink
from headrace_pipelines.driver.session import settings
from headrace_pipelines.driver_protocol import DriverPlan
from headrace_pipelines.graph import problems_of
from headrace_pipelines.load import load_pipeline
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import FakeTarget, document, plan_of
from yaml_table import table


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_pipelines.driver.exactly_once_sink.time.sleep", lambda seconds: None)


def batch(rows: str) -> Any:
    context = SimpleNamespace(getLocalProperty=lambda name: f"id of {name}")
    return SimpleNamespace(toArrow=lambda: rows, sparkSession=SimpleNamespace(sparkContext=context))


def sink(
    target: FakeTarget,
    checkpoint: Path,
    *,
    planned: int = -1,
    accepts: bool = False,
    expires: bool = True,
    reads: list[int] | None = None,
) -> ExactlyOnceSink:
    (checkpoint / "offsets").mkdir(parents=True, exist_ok=True)
    for number in range(planned + 1):
        (checkpoint / "offsets" / str(number)).touch()
        (checkpoint / "offsets" / f".{number}.crc").touch()

    def make(query: str) -> FakeTarget:
        target.name = query
        return target

    def read(batch: Any, number: int) -> Any:
        if reads is not None:
            reads.append(number)
        return batch.toArrow()

    return ExactlyOnceSink("f", make, checkpoint, accepts=accepts, expires=expires, read=read)


@pytest.mark.parametrize(
    ("known", "number", "refusal", "accepted"),
    [
        (5, 5, "", ["rows"]),  # Spark gives the last batch again, which the target does not have
        (6, 5, "", []),  # or has
        (None, 6, "", ["rows"]),  # Kafka has forgotten the group, and this batch is new
        (None, 5, r"it has none.*accept_unknown_batch: true", ["rows"]),  # or it may have been written
        (3, 5, "its last is 2", ["rows"]),
        (7, 5, "is an old copy", None),
    ],
)
@pytest.mark.parametrize("accepts", [True, False])
def test_a_batch_after_a_restart_is_written_once_or_refused(
    tmp_path: Path, known: int | None, number: int, refusal: str, accepted: list[str] | None, *, accepts: bool
) -> None:
    """A number that does not follow would repeat rows or leave some out; only a batch in doubt can be accepted."""
    target = FakeTarget(known)
    write = sink(target, tmp_path, planned=5, accepts=accepts)
    if refusal and not (accepts and accepted):
        with pytest.raises(PipelineInvalid, match=refusal):
            write(batch("rows"), number)
        assert isinstance(write.failure, PipelineInvalid)
        assert target.rows == []
    else:
        write(batch("rows"), number)
        assert (target.rows, target.number) == (accepted, number + 1)


@pytest.mark.parametrize("name", ["2", "2.compact"])
def test_a_number_of_files_stands_for_the_same_files(tmp_path: Path, name: str) -> None:
    """A file source counts its batches. So an old checkpoint has the same end with other files, which were skipped."""
    target, files = FakeTarget(), tmp_path / "sources/1"
    files.mkdir(parents=True)
    (files / "20").write_text("of another batch")
    (files / name).write_text('v1\n{"path":"file:///a","batchId":2}')
    write = sink(target, tmp_path)
    (tmp_path / "offsets/0").write_text('v1\n{}\n{"t":{"0":2}}\n{"logOffset":2}')
    write(batch("rows"), 0)
    sink(target, tmp_path)(batch("rows"), 0)
    assert target.rows == ["rows"]
    (files / name).write_text('v1\n{"path":"file:///a","batchId":2}\n{"path":"file:///b","batchId":2}')
    with pytest.raises(PipelineInvalid, match="batch 0 with other records"):
        sink(target, tmp_path)(batch("more rows"), 0)


def test_a_table_without_a_number_has_lost_its_rows(tmp_path: Path) -> None:
    """Its numbers do not expire: it was deleted, or is not where it was. The first batch of a checkpoint makes it."""
    for number, refusal in ((0, ""), (6, "it has none")):
        target = FakeTarget(None)
        with pytest.raises(PipelineInvalid, match=refusal) if refusal else contextlib.nullcontext():
            sink(target, tmp_path, planned=5, expires=False)(batch("rows"), number)
        assert target.rows == ([] if refusal else ["rows"])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", [None, 6])
def test_a_failure_on_either_side_of_the_commit_repeats_nothing(tmp_path: Path, when: str, number: int | None) -> None:
    """The target is opened again, which returns its number, and only then written to, until the batch is there once."""
    target = FakeTarget(number)
    target.failures = [(when, KafkaTimeout("lost")), (when, KafkaTimeout("lost"))]
    reads = list[int]()
    write = sink(target, tmp_path, planned=5, reads=reads)
    write(batch("rows 6"), 6)
    write(batch("rows 7"), 7)
    assert (target.rows, reads) == (["rows 6", "rows 7"], [6, 7])  # reading with tasks writes, so it happens once
    assert (target.opened, target.name, write.failure) == (3, "id of sql.streaming.queryId", None)


@pytest.mark.parametrize(
    ("error", "seconds", "failures", "tries"),
    [(KafkaTimeout, 10, 100, 8), (KafkaTimeout, 100, 1, 2), (KafkaUnauthorized, 10, 1, 1)],
)
def test_a_failure_is_raised_if_it_is_permanent_or_after_a_minute_of_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[HeadraceError], seconds: int, failures: int, tries: int
) -> None:
    """The minute begins when the first attempt has failed, which may take longer itself."""
    target = FakeTarget()
    target.failures = [("before", error("why"))] * failures
    times = iter(range(0, 1000, seconds))
    monkeypatch.setattr("headrace_pipelines.driver.exactly_once_sink.time.monotonic", lambda: next(times))
    write = sink(target, tmp_path)
    is_raised = tries != 2
    with pytest.raises(error) if is_raised else contextlib.nullcontext():
        write(batch("rows"), 0)
    assert (target.opened, target.rows) == (tries, [] if is_raised else ["rows"])
    assert (write.failure.description if write.failure else "") == ("why" if is_raised else "")


@pytest.mark.parametrize("security", table(__file__, "secrets_are_in_the_document_for_standard_input_only"))
def test_secrets_are_in_the_document_for_standard_input_only(security: dict[str, Any]) -> None:
    """What the driver reads from it is the same; printed or dumped otherwise, a plan shows none."""
    kafka = KafkaConfig(security=KafkaSecurity.model_validate(security))
    plan = plan_of(exact("batch"), kafka=kafka)
    assert DriverPlan.model_validate_json(plan.document()) == plan
    assert ("s3cret" in plan.document().decode()) == bool(security)
    assert "s3cret" not in repr(plan) + str(plan) + plan.model_dump_json()


@pytest.mark.parametrize(
    "sink",
    [
        {"postgres": {"database": "d", "user": "u", "password": "${file:password}"}, "table": "t", "keys": ["x"]},
        {"iceberg": "a.b", "catalog": {"type": "sql", "uri": "postgresql://u:${file:password}@h/d", "echo": False}},
    ],
)
def test_a_password_of_a_file_is_read_again_for_each_driver(tmp_path: Path, sink: dict[str, Any]) -> None:
    """References work in sections of a sink; the pipeline itself never shows the password."""
    secret = tmp_path / "password"
    secret.touch(0o600)
    secret.write_text("one-s3cret")
    flow = {"sql": "SELECT * FROM a", "sink": sink}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({**document(), "flows": {"f": flow}}))
    plan = plan_of(load_pipeline(tmp_path / "p.yaml"))
    assert b"one-s3cret" in plan.document()
    secret.write_text("two-s3cret")
    assert b"two-s3cret" in plan.document()
    secret.unlink()
    assert b"one-s3cret" in plan.document()
    assert "s3cret" not in repr(plan) + plan.model_dump_json()


@pytest.mark.parametrize(("trigger", "sink", "text"), table(__file__, "what_a_sink_cannot_do_is_refused"))
def test_what_a_sink_cannot_do_is_refused(
    tmp_path: Path, trigger: dict[str, Any], sink: dict[str, Any], text: str
) -> None:
    """Each with file, line and what to do."""
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(document(sink, trigger=trigger)))
    with pytest.raises(PipelineInvalid, match=rf"p\.yaml:\d+: flows\.f\.sink.*{text}"):
        load_pipeline(file)


def exact(scope: str, **driver: Any) -> PipelineSpec:
    """Return a pipeline with a sink of this scope."""
    return PipelineSpec.model_validate(document({"delivery": "exactly_once", "scope": scope}, driver=driver))


def test_scope_task_changes_the_driver_only_where_it_is_used() -> None:
    """A task that fails is tried again, and is never run twice; the plan shows what becomes visible together."""
    for scope, master, text in (
        ("batch", "local[3]", "exactly once"),
        ("task", "local[3,4]", "exactly once, each task visible on its own"),
    ):
        spec = exact(scope, cores=3)
        assert (settings(plan_of(spec))["spark.master"], spec.flows["f"].sink.guarantee) == (master, text)
        assert spec.transactions == {scope}
    # The second task of a pair would fence the first, and the first the second when it is tried again.
    for scope, value, count in (("task", "true", 1), ("task", True, 1), ("task", False, 0), ("batch", True, 0)):
        assert len(problems_of(exact(scope, settings={"spark.speculation": value}))) == count
