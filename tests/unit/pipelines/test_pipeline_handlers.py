"""Handlers as Spark's Python workers run them: Arrow batches of records in, records out. No Spark runs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from headrace.errors import FunctionError, PipelineInvalid
from headrace.functions import protocol
from headrace_pipelines.driver.handlers import HandlerPlan, run
from headrace_pipelines.driver.value_codecs import HEADERS, FailurePolicy
from yaml_table import table

Rows = list[dict[str, Any]]
Call = Callable[..., Rows]

RETURN = "def handler(context, event):\n    "
FAILS = table(__file__, "fails")


def batch(values: list[bytes | None], headers: list[Any] | None = None, offset: int = 100) -> pa.RecordBatch:
    count = len(values)
    return pa.RecordBatch.from_pydict(
        {
            "topic": ["in"] * count,
            "partition": pa.array([3] * count, pa.int32()),
            "offset": pa.array(range(offset, offset + count), pa.int64()),
            "timestamp": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", "UTC")),
            "key": pa.array([b"k%d" % index for index in range(count)], pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": pa.array(headers or [None] * count, HEADERS),
        }
    )


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Call]:
    """Run a handler for values and return what it writes, one dictionary per record."""
    number = 0
    modules, paths, environment = set(sys.modules), list(sys.path), dict(os.environ)

    def call(
        code: str,
        *values: bytes | None,
        headers: list[Any] | None = None,
        on_error: Any = "dead_letter",
        attempts: int = 1,
        reads_topic: bool = True,
        batch_size: int = 0,
        value_format: str = "json",
    ) -> Rows:
        nonlocal number
        number += 1
        module = f"handler_{tmp_path.name}_{number}".replace("-", "_").replace("[", "_").replace("]", "_")
        (tmp_path / f"{module}.py").write_text(code)
        trigger = protocol.TriggerSetup("kafka-cluster", "t", "binary", value_format, "json", "out", batch_size)
        setup = protocol.Setup(f"{module}:handler", str(tmp_path), "0", [trigger], "default", "debug", {"MINE": "yes"})
        failures = FailurePolicy("headrace.p.f", "in.dlq", on_error)
        text = msgspec.json.encode(setup).decode()
        plan = HandlerPlan(text, failures, attempts, reads_topic, tmp_path / "secrets.properties")
        return [row for made in run(plan, [batch([*values], headers)]) for row in made.to_pylist()]

    yield call
    sys.path[:] = paths
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


def test_an_event_has_everything_of_its_record(call: Call) -> None:
    """Topic, partition, offset, time, key and headers reach the handler; variables of the function too."""
    given = [[{"key": "h", "value": b"x"}, {"key": "h", "value": b"y"}], None]
    rows = call(table(__file__, "shows_the_event"), b"1", b"2", headers=given)
    time = 1767225600000
    assert [row["value"].decode() for row in rows] == [
        repr(["in-3-100", time, "k0", "y", "in", "yes", "t"]),
        repr(["in-3-101", time, "k1", None, "in", "yes", "t"]),
    ]


def test_an_internal_topic_is_not_written(call: Call) -> None:
    """A handler cannot write dead letters of others."""
    [row] = call(RETURN + "context.emit('in.dlq', value='x')", b"1")
    assert (row["topic"], row["failed"]) == ("in.dlq", True)
    assert {"key": "headrace.dlq.error", "value": b"TopicInternal"} in row["headers"]


def test_types_and_explicit_acknowledgements(call: Call) -> None:
    """`Event[T]` makes a T of the body. An explicit acknowledgement says why there is none."""
    good, bad = call(table(__file__, "acknowledges"), b'{"n":1}', b'{"n":"x"}')
    assert good["value"] == b"1 in a pipeline a record is completed with its micro-batch"
    assert bad["topic"] == "in.dlq"


def test_fail_names_the_record_and_not_its_value(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    """The task fails, and with it the micro-batch; standard error has the traceback."""
    with pytest.raises(FunctionError, match=r"in-3-101 failed with ValueError after 2 attempts") as caught:
        call(FAILS, b"1", b"2", on_error="fail", attempts=2)
    assert "two" not in str(caught.value)
    assert "ValueError: two" in capfd.readouterr().err


def test_batches_and_the_record_that_is_to_blame(call: Call) -> None:
    """A batch handler gets lists; when one of them fails as a whole, each record is called alone."""
    rows = call(table(__file__, "fails_with_its_batch"), b"1", b"2", b"3", b"4", b"5", batch_size=2)
    assert [(row["topic"], row["value"]) for row in rows] == [
        ("out", b"1 [2]"),
        ("out", b"2 [2]"),
        ("in.dlq", b"3"),
        ("out", b"4 [2, 2, 1, 1, 1]"),
        ("out", b"5 [2, 2, 1]"),
    ]


def test_a_handler_that_cannot_be_loaded_stops_the_pipeline(call: Call) -> None:
    """The text has what failed first and last, in one line."""
    with pytest.raises(PipelineInvalid, match=r"importing .* failed: .*ModuleNotFoundError: No module named 'nowhere'"):
        call("import nowhere\n" + RETURN + "pass", b"1")
    with pytest.raises(PipelineInvalid, match="init_context failed"):
        call("def init_context(context):\n    1 / 0\n" + RETURN + "pass", b"1")
