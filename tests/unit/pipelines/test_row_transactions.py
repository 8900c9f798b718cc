"""The sign by which real-time mode knows that Kafka still has the positions of its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.exactly_once_sink import REAL_TIME, ExactlyOnceSink
from headrace_pipelines.driver.row_transactions import RowTransactions
from tests.pipeline_harness import FakeTarget
from tests.yaml_table import table


def checkpoint(folder: Path, completed: int) -> Path:
    (folder / "commits").mkdir()
    (folder / "metadata").write_text('{"id":"q"}')
    for number in range(completed):
        (folder / "commits" / str(number)).touch()
    return folder


def of(target: FakeTarget, folder: Path, *, accepts: bool = False) -> RowTransactions:
    return RowTransactions(lambda query: target, folder, {}, "headrace.p.f", accepts=accepts)


@pytest.mark.parametrize(("completed", "number", "digest", "accepts", "written"), table(__file__, "starts"))
def test_a_group_without_its_sign_is_refused(
    tmp_path: Path, completed: int, number: int | None, digest: str, accepts: bool, written: list[int] | None
) -> None:
    """Rows after the checkpoint may be there then. Before the first checkpoint it is only that nothing was written."""
    target = FakeTarget(number)
    target.digest = digest
    rows = of(target, checkpoint(tmp_path, completed), accepts=accepts)
    if written is None:
        with pytest.raises(PipelineInvalid, match="does not know which rows after the checkpoint"):
            rows.poll(-1)
    else:
        rows.poll(-1)
    assert [each.num_rows for each in target.rows] == (written or [])


def test_the_sign_is_as_old_as_the_last_micro_batch(tmp_path: Path) -> None:
    """So positions that were written after it cannot have expired before it."""
    target = FakeTarget()
    rows = of(target, tmp_path)
    rows.poll(-1)
    assert not target.opened  # the query has no id yet
    checkpoint(tmp_path, 0)
    numbers = []
    for completed in (-1, -1, 0, 0, 1):
        rows.poll(completed)
        numbers.append(target.number)
    assert numbers == [0, 0, 1, 1, 2]
    assert (len(target.rows), target.digest) == (3, REAL_TIME)


def test_micro_batches_do_not_go_on_from_a_checkpoint_of_real_time_mode(tmp_path: Path) -> None:
    """The next number would be the expected one, and some of its rows may be there."""
    target = FakeTarget(3)
    target.digest = REAL_TIME
    sink = ExactlyOnceSink("f", lambda query: target, tmp_path, accepts=False)
    context = SimpleNamespace(getLocalProperty=lambda name: "q")
    batch: Any = SimpleNamespace(sparkSession=SimpleNamespace(sparkContext=context))
    with pytest.raises(PipelineInvalid, match="does not know whether it has batch 3"):
        sink(batch, 3)
