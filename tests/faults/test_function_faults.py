"""Functions whose handlers and processes fail in every way; the ledger judges by their journal and the broker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from headrace_devkit.devcluster.jvm_server import is_alive
from headrace_devkit.testing import Cluster, StartHeadrace
from tests.faults.function_scenario import FunctionScenario, children, descriptors
from yaml_table import table

pytestmark = pytest.mark.timeout(500)

WAYS = table(__file__, "ways")
DEAD_LETTERS = table(__file__, "dead_letters")
"""What is wrong with the records that cannot be handled, by their values."""
HARMLESS = ("print", "endless", "fork", "signals", "alarm", "thread", "program")


@pytest.mark.parametrize("allocation", ["pool", pytest.param("key", marks=pytest.mark.long)])
def test_each_way_to_break_a_worker_costs_its_own_record_only(
    kafka: Cluster, headrace: StartHeadrace, tmp_path: Path, allocation: str
) -> None:
    """Those that cannot be handled are the only dead letters; the runtime opens no descriptor more, and ends."""
    scenario = FunctionScenario(
        kafka,
        headrace,
        tmp_path,
        WAYS,
        ordering="key",
        spec={"eventTimeout": "2s"},
        trigger={"numWorkers": 3, "workerTerminationTimeout": "2s", "workerMemoryLimit": "120Mi"},
        attributes={"workerAllocationMode": allocation},
    )
    process, begin = scenario.run(), time.time()
    scenario.write_values("raise")
    scenario.wait_done()
    open_before = descriptors(process)  # now that it has written a dead letter
    values = [*DEAD_LETTERS, *HARMLESS]
    between = [[str(number) for number in range(first * 30, first * 30 + 30)] for first in range(len(values))]
    scenario.write_values(*(value for way, numbers in zip(values, between, strict=True) for value in (*numbers, way)))
    scenario.wait_done()
    scenario.fault_since(begin, most=30 * 200)
    assert scenario.check() == []
    dead_letters = [record for run in scenario.recording() for record in run.dead_letters]
    found = {record.value.decode(): dict(record.headers)["headrace.dlq.error"].decode() for record in dead_letters}
    assert found == DEAD_LETTERS and len(dead_letters) == len(DEAD_LETTERS) + 1
    assert (process.output.count(": assigned "), process.output.count(": revoked ")) == (1, 0)
    assert descriptors(process) <= open_before + 5
    workers = children(process)
    assert process.terminate() == 0
    assert not any(map(is_alive, workers))
